"""Reads a worker's ranges: in the order of the primary key, or block by block (docs/architecture.md#scan).

By key, each batch fetches its rows from wherever they are; by blocks, it reads them in the order of the file. A scan by
blocks is right: a row that isn't where it was at prepare has been written since, so touched wins for it. That is an
insert, or an update that moves the row to another block, even if its entry stays the same. If the scan meets such a row
twice, the seal removes the copied entries (`physical.remove_touched`).

The rows are those of the source; or, in a rebuild, the entries of the generation that readers see, which is narrower:
each entry is the projection of its row in every snapshot (I1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from airflow_roir.definition import Scan, argument, quote
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.scan.batch_size import GROWTH, REMEMBERED
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import SourceChanged
from airflow_roir.scan_range import Key, ScanRange

# For narrow rows; used if the table was never analyzed and no batch was copied yet.
ROWS_PER_BLOCK = 200.0
# A first batch is small, since nothing is known of its blocks; later ones grow with the blocks that were copied.
FIRST_BLOCKS = 16


@dataclass(frozen=True)
class Stretch:
    """The rows that one batch copies.

    watermark: the range's next one; where, values: SQL for the rows; settings: SQL to send before they are read.
    """

    watermark: Key | None
    done: bool
    where: str
    values: dict[str, str]
    settings: str = ""


class Reader(Protocol):
    """Cuts the next batch off a range. The caller has locked the relation, so that it keeps its name and its file."""

    def next(self, relation: str, scan: ScanRange, rows: int, usual: float | None = None) -> Stretch:
        """The next stretch, of about `rows` rows. Raises SourceChanged.

        relation: its quoted name; usual: rows per block when it was analyzed.
        """
        ...

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Call it for each committed batch."""
        ...


class KeyReader:
    """Reads in the order of the primary key."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.source = job.source
        self._casts = job.source.comparands

    def next(self, relation: str, scan: ScanRange, rows: int, usual: float | None = None) -> Stretch:
        """Looks up the batch's last key: exactly `rows` rows, but for the range's last batch."""
        last, done = last_key(self.connection, self.source, relation, scan, rows)
        values: dict[str, str] = {}
        where = scan.condition(self.source.primary_key, self._casts, None if done else last, values)
        # If the rows have bounds, they must come from the index: in the middle of a composite key the planner takes a
        # batch for a quarter of the table, and would read the whole table for each.
        settings = f"SET LOCAL enable_sort = on; SET LOCAL enable_seqscan = {'off' if values else 'on'};"
        return Stretch(last if last is not None else scan.watermark, done, where, values, settings)

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Does nothing."""


def last_key(
    connection: Connection, source: Source, relation: str, scan: ScanRange, rows: int, only: str = "ONLY"
) -> tuple[Key | None, bool]:
    """The key of a batch's last row, in the order of the primary key, and true if the range ends with that batch.

    relation: the quoted name of the source, or of a table like it; only: '' also reads tables that inherit from it.
    Returns None and true if no row is left.
    """
    values: dict[str, str] = {}
    where = scan.condition(source.primary_key, source.comparands, None, values)
    # Qualified: otherwise ORDER BY would sort the texts, which have the columns' names.
    key = ", ".join(f"s.{quote(name)}" for name in source.primary_key)
    descending = ", ".join(f"s.{quote(name)} DESC" for name in source.primary_key)
    texts = ", ".join(source.columns[name].text("s") for name in source.primary_key)
    # In a subquery, so that rows which OFFSET skips aren't turned into texts.
    columns = ", ".join(quote(name) for name in source.primary_key)
    head = f"SELECT {texts} FROM (SELECT {columns} FROM {only} {relation} s WHERE {where} ORDER BY"
    named = ", ".join(f"k{i} text" for i in range(len(source.primary_key)))
    for order, is_last in ((f"{key} OFFSET {rows - 1} LIMIT 1", False), (f"{descending} LIMIT 1", True)):
        found = owner.rows(connection, source, f"{head} {order}) s", named, values, [relation]).first()
        if found is not None:
            return list(found), is_last
    return None, True


# The present file. emptied: a TRUNCATE has removed all rows since the plan, and every later row is touched.
FILE = """
SELECT pg_relation_filenode(r.oid)::bigint AS filenode,
       current_setting('block_size')::int AS block_bytes,
       EXISTS (SELECT FROM roir.emptied e
                WHERE e.generation_id = %(generation)s AND e.relation IN (r.oid::bigint, %(source)s)) AS emptied
  FROM to_regclass(%(relation)s) r (oid)
"""


class BlockReader:
    """Reads block by block, as many blocks at a time as held about the wanted rows before. Bounds are block numbers."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self._rows_per_block: deque[float] = deque(maxlen=REMEMBERED)
        self._blocks = FIRST_BLOCKS

    def next(self, relation: str, scan: ScanRange, rows: int, usual: float | None = None) -> Stretch:
        """As many blocks as hold about `rows` rows.

        Raises SourceChanged if the relation's file isn't the one of the plan (VACUUM FULL, CLUSTER, pg_repack):
        its rows are in other blocks then, which no capture notices.
        """
        assert scan.lower is not None
        assert scan.upper is not None
        values = {"relation": relation, "generation": self.job.generation_id, "source": self.job.source.oid}
        file = execute(self.connection, FILE, values).one()
        if file.emptied:
            return Stretch(scan.watermark, True, "false", {})
        if file.filenode != scan.filenode:
            raise SourceChanged(
                f"index {self.job.run.index}: {relation} was rewritten since the operation was prepared (VACUUM FULL, "
                "CLUSTER, pg_repack, SET TABLESPACE), so its blocks hold other rows now. Abort the operation and start "
                f"again, with --scan key if that may happen again: roir abort {argument(self.job.run.index)}"
            )
        first = self._first(scan)
        # The highest known density: after an empty stretch the blocks may be full again.
        dense = max([*self._rows_per_block, usual or 0.0]) or ROWS_PER_BLOCK
        most = limits_of(self.connection).batch_bytes // file.block_bytes
        blocks = max(1, min(int(rows / dense), self._blocks * GROWTH, most))
        end = min(first + blocks, int(scan.upper[0]))
        where = f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid"
        return Stretch([str(end - 1)] if end > first else scan.watermark, end >= int(scan.upper[0]), where, {})

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Learns how many rows a block has."""
        if stretch.watermark is not None and stretch.watermark != scan.watermark:
            blocks = int(stretch.watermark[0]) + 1 - self._first(scan)
            self._rows_per_block.append(rows / blocks)
            self._blocks = max(blocks, FIRST_BLOCKS)

    def _first(self, scan: ScanRange) -> int:
        """The first block that isn't copied yet."""
        assert scan.lower is not None
        return int(scan.lower[0]) if scan.watermark is None else int(scan.watermark[0]) + 1


def reader_of(connection: Connection, job: Job) -> Reader:
    """The reader of the operation's ranges."""
    return BlockReader(connection, job) if job.scan.by_blocks else KeyReader(connection, job)


def selected(job: Job) -> list[str]:
    """SQL for the columns of an entry, in the relations that are cut into ranges."""
    if job.scan is Scan.INDEX:
        return job.entry.physical()
    return [column.of(None) for column in job.entry.columns]


def has_entry(job: Job) -> str:
    """SQL, true for a row of the relations that are cut into ranges if it has an entry."""
    return "true" if job.scan is Scan.INDEX else job.entry.satisfied(None)
