"""A trial copies and indexes a batch of rows as a build does, and rolls that back: the cost of a row on this server.

It writes tables that no other session ever sees, reads under ACCESS SHARE, and is bounded in rows, blocks and time. It
measures the size of entries and of their B-tree, the WAL and the seconds of a row.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import DATA_SCHEMA, SCHEMA
from airflow_roir.engine.database import execute, said
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.entry_size import names_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.files import File, files_of
from airflow_roir.engine.source.source import Source

T = TypeVar("T")

# The most that a trial reads. The first few blocks tell how much of it fits into the time.
MOST_ROWS = 20_000
MOST_BLOCKS = 1_000
FIRST_BLOCKS = 8
# Consecutive blocks of one place, as a batch reads them; places are random.
STRETCH_BLOCKS = 50
MOST_PLACES = 40
# The rows of a leaf that isn't stored in blocks.
ROWS_OF_LEAF = 500
# The wanted time of the second, larger copy. A statement that takes much longer is cancelled, and the trial fails.
WANTED_S = 0.4
LONGEST_MS = 3_000
# The most entries that are written into a delta.
MOST_CAPTURED = 2_000
# With fewer rows most of the size is pages that aren't full.
FEWEST_CAPTURED = 200
SIZES = """
SELECT pg_relation_size(%(heap)s) AS heap, pg_table_size(%(heap)s) - pg_relation_size(%(heap)s) AS beside,
       pg_indexes_size(%(heap)s) AS tree
"""


@dataclass(frozen=True)
class Copied:
    """Copied rows, the seconds that this took, and the bytes of WAL."""

    rows: int
    seconds: float
    wal: int


@dataclass(frozen=True)
class Captured:
    """The written rows of a delta. bytes: with their index; wal: the bytes of WAL for them."""

    rows: int
    bytes: int
    wal: int


@dataclass(frozen=True)
class Trial:
    """The cost of the rows. copy_s: for `timed` of them; index_s: for all of them.

    heap, toast, index, wal (of the copy): bytes.
    """

    rows: int
    timed: int
    copy_s: float
    index_s: float
    heap: int
    toast: int
    index: int
    wal: int
    captured: Captured | None

    @property
    def row_s(self) -> float:
        """One worker's seconds to copy and index a row."""
        return self.copy_s / self.timed + self.index_s / self.rows if self.timed else 0.0


def attempt(connection: Connection, source: Source, entry: Entry) -> Trial | str:
    """Copies and indexes some rows of a locked source, in the caller's transaction, and rolls that back.

    Returns a text with the reason if it wasn't possible, also if the source has no rows.
    """
    return undone(connection, lambda: _attempt(connection, source, entry))


def undone(connection: Connection, work: Callable[[], T]) -> T | str:
    """Does the work in the caller's transaction and rolls it back. Returns the server's error as a text instead."""
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL statement_timeout = {LONGEST_MS}")
        return work()
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return said(error)
    finally:
        if not connection.invalidated:
            savepoint.rollback()


def _attempt(connection: Connection, source: Source, entry: Entry) -> Trial | str:
    # Two plans at once must not wait for each other.
    name = f"{DATA_SCHEMA}.trial_{execute(connection, 'SELECT pg_backend_pid()').scalar_one()}"
    stored = f"{name}_s"
    # Rows are routed into a partition, as the copy routes them into segments.
    execute(connection, f"CREATE TABLE {name} ({entry.definitions()}) PARTITION BY RANGE (c1)")
    execute(connection, f"CREATE TABLE {stored} PARTITION OF {name} DEFAULT WITH (autovacuum_enabled = false)")
    copied = copy_some(connection, source, entry, name)
    if isinstance(copied, str):
        return copied
    begun = time.monotonic()
    # Not unique, since duplicates don't matter here. Without deduplication, as in a unique index.
    execute(connection, f"CREATE INDEX ON {stored} {physical.key_clause(entry)} WITH (deduplicate_items = off)")
    index_s = time.monotonic() - begun
    size = execute(connection, SIZES, {"heap": stored}).one()
    rows = copied.rows
    captured = _capture(connection, entry, name, min(rows, MOST_CAPTURED)) if rows >= FEWEST_CAPTURED else None
    return Trial(rows, rows, copied.seconds, index_s, size.heap, size.beside, size.tree, copied.wal, captured)


def copy_some(connection: Connection, source: Source, entry: Entry, into: str) -> Copied | str:
    """Copies rows from random places of the source into an empty table of entries, as many as the time allows.

    Returns a text if there are none.
    """
    files = [file for file in files_of(connection, source.leaves) if file.blocks]
    total = sum(file.blocks for file in files)
    blocks = min(FIRST_BLOCKS, total)
    copied = _copy(connection, source, entry, into, files, blocks)
    more = min(MOST_BLOCKS, total)
    if copied.rows:
        # The first blocks include the costs of a start, so the next ones are faster.
        in_time = int(blocks * WANTED_S / max(copied.seconds, 1e-3)) * 2
        more = min(more, int(blocks * MOST_ROWS / copied.rows), in_time)
    if more > blocks:
        execute(connection, f"TRUNCATE {into}")
        copied = _copy(connection, source, entry, into, files, more)
    if not copied.rows:
        return "the table has no rows" if not total else "no rows were met"
    return copied


def _copy(
    connection: Connection, source: Source, entry: Entry, into: str, files: Sequence[File], blocks: int
) -> Copied:
    """Copies rows from some blocks."""
    names = names_of(connection, [file.relation for file in files])
    read = ", ".join(column.of("s") for column in entry.columns)
    satisfied = f"WHERE {entry.satisfied('s')}" if entry.condition else ""
    parts = [
        f"(SELECT {read} FROM (SELECT * FROM ONLY {names[relation]} s {where}) s {satisfied})"
        for relation, where in _stretches(files, blocks)
    ]
    if not parts:
        return Copied(0, 0.0, 0)
    query = f"SELECT * FROM ({' UNION ALL '.join(parts)}) s LIMIT {MOST_ROWS}"
    item, values = owner.relation(connection, source, query, owner.row_type(connection, into))
    explain = "EXPLAIN (ANALYZE, WAL, TIMING OFF, COSTS OFF, FORMAT JSON)"
    insert = f"INSERT INTO {into} ({', '.join(entry.physical())}) SELECT * FROM {item}"
    return _explained(connection, f"{explain} {insert}", values, into)


def _explained(connection: Connection, statement: str, values: dict[str, object], into: str) -> Copied:
    [told] = execute(connection, statement, values).scalar_one()
    rows = int(execute(connection, f"SELECT count(*) FROM {into}").scalar_one())
    return Copied(rows, told["Execution Time"] / 1000, int(told["Plan"].get("WAL Bytes", 0)))


def _stretches(files: Sequence[File], blocks: int) -> Iterator[tuple[int, str]]:
    """Conditions over leaves, alias `s`: random places, in each leaf by its share of the blocks."""
    heaps = [file for file in files if file.heap]
    for file in files:
        if not file.heap:
            yield file.relation, f"LIMIT {ROWS_OF_LEAF}"
    total = sum(file.blocks for file in heaps)
    if total <= blocks and len(heaps) <= MOST_PLACES:
        for file in heaps:
            yield file.relation, ""
        return
    step = max(1, min(STRETCH_BLOCKS, blocks // 8))
    # The stretches of all files are numbered, and some of the numbers are chosen.
    counts = [-(-file.blocks // step) for file in heaps]
    chosen = random.sample(range(sum(counts)), min(sum(counts), MOST_PLACES, max(1, blocks // step)))
    first = 0
    for file, count in zip(heaps, counts, strict=True):
        for place in sorted(n - first for n in chosen if first <= n < first + count):
            begin, end = place * step, min((place + 1) * step, file.blocks)
            yield file.relation, f"WHERE s.ctid >= '({begin},0)'::tid AND s.ctid < '({end},0)'::tid"
        first += count


def _capture(connection: Connection, entry: Entry, base: str, rows: int) -> Captured:
    """Writes entries into a delta in random order, in which users' writes come."""
    delta = f"{base}_d"
    execute(connection, f"CREATE TABLE {delta} ({entry.definitions()}, state {SCHEMA}.entry_state NOT NULL)")
    identity = ", ".join(entry.physical(entry.identity_positions))
    execute(connection, f"CREATE INDEX ON {delta} ({identity}) WITH (deduplicate_items = off)")
    columns = ", ".join(entry.physical())
    put = (
        "EXPLAIN (ANALYZE, WAL, TIMING OFF, COSTS OFF, FORMAT JSON) "
        f"INSERT INTO {delta} ({columns}, state) SELECT {columns}, 'regular' FROM {base} ORDER BY random() LIMIT {rows}"
    )
    written = _explained(connection, put, {}, delta)
    size = int(execute(connection, "SELECT pg_total_relation_size(%(delta)s)", {"delta": delta}).scalar_one())
    return Captured(written.rows, size, written.wal)
