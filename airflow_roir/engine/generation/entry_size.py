"""The sizes of entries: a B-tree's tuple has at most a third of a page, and no index may make a user's write fail.

If the columns' types bound an entry's size, the bound decides. Otherwise rows are read, and the server itself is asked
about those that might be too big: only the server knows what it compresses. Rows of later writes can't be known.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import DATA_SCHEMA, MAX_KEY_COLUMNS, QualifiedName, quote
from airflow_roir.engine.database import execute, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import COVERED_BYTES, Entry
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.files import File, files_of
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput

# How many blocks of all leaves together are read, and of each leaf at least: a leaf with no more is read whole.
SAMPLE_BLOCKS = 1_000
BLOCKS_OF_LEAF = 32
# How many rows are read of a leaf if these blocks had none, or if blocks can't be chosen.
ROWS_OF_LEAF = 1_000
STRETCHES_PER_STATEMENT = 250
# The server is asked about at most this many rows that may be too big, the biggest first.
MOST_TRIED = 2_000
# A tuple's header with its bitmap of NULLs, and the most that alignment may add for each column.
HEADER_BYTES = 16
ALIGNMENT_BYTES = 7
# BTMaxItemSize: a third of a page without its header and its special space, less the row's address.
LIMIT = "SELECT ((current_setting('block_size')::int - 40 - 16) / 3) / 8 * 8 - 8"
TOO_BIG = "54000"
# Some rows of a {leaf}, by the clause {some}. {size}: of row `s`.
SOME_ROWS = "(SELECT s.tableoid AS leaf, s.ctid::text AS tid, {size} AS size FROM ONLY {leaf} s {some})"
# {rows}: several of these, with UNION ALL.
BIGGEST = """
SELECT leaf, max(size) AS biggest, (array_agg(tid ORDER BY size DESC) FILTER (WHERE size > {limit}))[1:{most}] AS tids
  FROM ({rows}) s GROUP BY leaf
"""


@dataclass(frozen=True)
class EntrySize:
    """Sizes in bytes. limit: a B-tree's; bound: that of the types, None if they have none; biggest: of a sample."""

    limit: int
    bound: int | None
    biggest: int | None

    def __str__(self) -> str:
        if self.biggest is None:
            return f"at most {self.bound} of {self.limit} bytes"
        allowed = "any size" if self.bound is None else f"{self.bound} bytes"
        return f"{self.biggest} of {self.limit} bytes at most in a sample; the types allow {allowed}"


def cover(connection: Connection, index: QualifiedName, source: Source, entry: Entry, covering: str) -> Entry:
    """The entry, with only those columns covered that always fit, so that no included value makes a write fail.

    If the key is bounded, its room is reserved. If it isn't, or is too big by itself, covered columns get at most 1,024
    bytes. A B-tree has at most 32 columns. Raises InvalidInput if `covering` is `all` and a column doesn't fit.
    """
    limit = int(execute(connection, LIMIT).scalar_one())
    key = _bound(source, entry, entry.identity_positions)
    room = COVERED_BYTES if key is None or key > limit else limit - key
    places = MAX_KEY_COLUMNS - entry.identity
    columns = list(entry.columns)
    for i in entry.included_positions:
        if not columns[i].covered:
            continue
        name = columns[i].source
        most = source.columns[name].max_bytes
        if places == 0:
            if covering == "all":
                raise InvalidInput(
                    f"index {index}: covering is all, but a B-tree has at most {MAX_KEY_COLUMNS} columns: there is "
                    f"no room for included column {quote(name)}. Use covering auto, which covers the first ones, "
                    "or none"
                )
            columns[i] = replace(columns[i], covered=False)
        elif most is not None and most + ALIGNMENT_BYTES <= room:
            room -= most + ALIGNMENT_BYTES
            places -= 1
        elif covering == "all":
            size = "of any size" if most is None else f"of {most} bytes"
            raise InvalidInput(
                f"index {index}: covering is all, but included column {quote(name)} ({source.columns[name].type}) may "
                f"be {size}; an entry of a B-tree takes {limit} bytes with its key and primary key, so a write of "
                "a long value would fail. Use covering auto, which covers what always fits, or none"
            )
        else:
            columns[i] = replace(columns[i], covered=False)
    return replace(entry, columns=tuple(columns))


def measure(connection: Connection, index: QualifiedName, source: Source, entry: Entry) -> EntrySize:
    """The size of the indexed part of entries: key, primary key, covered columns.

    Raises InvalidInput if the entry of a row that was read doesn't fit: all rows of small leaves are read, and those of
    some random blocks of big leaves.
    """
    limit = int(execute(connection, LIMIT).scalar_one())
    positions = [i for i, c in enumerate(entry.columns) if i < entry.identity or c.covered]
    bound = _bound(source, entry, positions)
    if bound is not None and bound <= limit:
        return EntrySize(limit, bound, None)
    # An upper bound: values that aren't compressed yet may become smaller in the index.
    size = f"{HEADER_BYTES} + " + " + ".join(
        f"coalesce(pg_column_size({entry.columns[i].of('s')}) + {ALIGNMENT_BYTES}, 0)" for i in positions
    )
    if entry.condition is not None:
        size = f"CASE WHEN {entry.satisfied('s')} THEN {size} ELSE 0 END"
    biggest = 0
    for leaf, found, tids in _sampled(connection, source, size, limit):
        biggest = max(biggest, min(found, limit))
        if tids and (too_big := _refused(connection, source, entry, leaf, tids)):
            raise InvalidInput(
                f"index {index}: {source.name} has a row whose key, primary key and covered columns take {too_big} "
                f"bytes; an entry of a B-tree takes {limit}, and writes of such rows would fail. Choose other key "
                "columns; include long columns, with covering auto or none"
            )
    return EntrySize(limit, bound, biggest)


def _bound(source: Source, entry: Entry, positions: Sequence[int]) -> int | None:
    bytes_of = [source.columns[entry.columns[i].source].max_bytes for i in positions]
    bounds = [size + ALIGNMENT_BYTES for size in bytes_of if size is not None]
    return HEADER_BYTES + sum(bounds) if len(bounds) == len(bytes_of) else None


def _sampled(connection: Connection, source: Source, size: str, limit: int) -> Iterator[tuple[str, int, list[str]]]:
    """For each leaf its name, the size of its biggest row that was read, and the addresses of rows that may not fit."""

    def read(rows: Sequence[str]) -> Iterator[tuple[str, int, list[str]]]:
        for row in owner.rows(
            connection,
            source,
            BIGGEST.format(limit=limit, most=MOST_TRIED, rows=" UNION ALL ".join(rows)),
            "leaf oid, biggest int, tids text[]",
        ):
            # Not named in the query: the owner's code may have set another search_path there.
            name = named[row.leaf]
            seen.add(name)
            yield name, row.biggest, row.tids or []

    files = files_of(connection, source.leaves)
    total = sum(file.blocks for file in files)
    named = names_of(connection, source.leaves)
    stretches: list[str] = []
    rest: list[str] = []
    seen: set[str] = set()

    def some_rows(file: File, some: str) -> str:
        return SOME_ROWS.format(size=size, leaf=named[file.relation], some=some)

    for file in files:
        if not file.heap:
            rest.append(some_rows(file, f"LIMIT {ROWS_OF_LEAF}"))
            continue
        stretches += [some_rows(file, where) for where in _stretches(file, total)]
    for first in range(0, len(stretches), STRETCHES_PER_STATEMENT):
        yield from read(stretches[first : first + STRETCHES_PER_STATEMENT])
    # The chosen blocks may have no row, though others do.
    rest += [
        some_rows(file, f"LIMIT {ROWS_OF_LEAF}")
        for file in files
        if file.heap and file.blocks > BLOCKS_OF_LEAF and named[file.relation] not in seen
    ]
    for first in range(0, len(rest), STRETCHES_PER_STATEMENT):
        yield from read(rest[first : first + STRETCHES_PER_STATEMENT])


def names_of(connection: Connection, leaves: Sequence[int]) -> dict[int, str]:
    """The names of relations by oid, as SQL."""
    listed = "SELECT oid::bigint, oid::regclass::text AS name FROM pg_class WHERE oid = ANY (%(leaves)s::oid[])"
    return {row.oid: row.name for row in execute(connection, listed, {"leaves": list(leaves)})}


def _stretches(file: File, total: int) -> Iterator[str]:
    """Conditions on the leaf `s`: none for a small leaf, random blocks for a big one, as many as its share."""
    if file.blocks <= BLOCKS_OF_LEAF:
        yield ""
        return
    share = max(BLOCKS_OF_LEAF, SAMPLE_BLOCKS * file.blocks // total)
    for block in sorted(random.sample(range(file.blocks), min(share, file.blocks))):
        yield f"WHERE s.ctid >= '({block},0)'::tid AND s.ctid < '({block + 1},0)'::tid"


def _refused(connection: Connection, source: Source, entry: Entry, leaf: str, tids: Sequence[str]) -> int | None:
    """The size of an entry of these rows that the server refuses; None if it accepts all. Leaves nothing.

    The entries are stored as in a segment, and indexed both ways: as by the seal, and as by a write.
    """
    read = ", ".join(column.of("r") for column in entry.columns)
    savepoint = connection.begin_nested()
    try:
        # Named by the session, so that two plans at once don't wait for each other.
        table = f"{DATA_SCHEMA}.size_{execute(connection, 'SELECT pg_backend_pid()').scalar_one()}"
        execute(connection, f"CREATE TABLE {table} ({entry.definitions()})")
        query = f"SELECT {read} FROM ONLY {leaf} r WHERE r.ctid = ANY (%(tids)s::tid[])"
        types = owner.row_type(connection, table)
        item, values = owner.relation(connection, source, query, types, {"tids": list(tids)})
        put = f"INSERT INTO {table} SELECT * FROM {item}"
        execute(connection, put, values)
        execute(connection, f"CREATE INDEX ON {table} {physical.key_clause(entry)}")
        execute(connection, f"TRUNCATE {table}")
        execute(connection, put, values)
    except DBAPIError as error:
        if sqlstate(error) != TOO_BIG:
            raise
        size = re.search(r"\d+", str(error.orig))
        return int(size[0]) if size else 0
    finally:
        savepoint.rollback()
    return None
