"""How big entries are: a B-tree's tuple holds a third of a page, and a user's write must not fail because of an index.

Bounded by the columns' types, an entry fits or doesn't. Else the biggest one of a sample tells what there is; what
will be written later can't be known.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine import owner
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.database import execute
from airflow_roir.engine.entry import Entry
from airflow_roir.errors import InvalidInput

SAMPLE_ROWS = 30_000
# A tuple's header with its bitmap of NULLs, and what alignment may add for each column.
HEADER_BYTES = 16
ALIGNMENT_BYTES = 7
# BTMaxItemSize: a third of a page without its header and its special space, less the row's address.
LIMIT = "SELECT ((current_setting('block_size')::int - 40 - 16) / 3) / 8 * 8 - 8"


@dataclass(frozen=True)
class EntrySize:
    """Bytes. limit: what a B-tree takes; bound: what the types allow, None where they don't say; biggest: sampled."""

    limit: int
    bound: int | None
    biggest: int | None

    def __str__(self) -> str:
        if self.biggest is None:
            return f"at most {self.bound} of {self.limit} bytes"
        allowed = "any size" if self.bound is None else f"{self.bound} bytes"
        return f"{self.biggest} of {self.limit} bytes at most in a sample; the types allow {allowed}"


def measure(connection: Connection, index: QualifiedName, source: Source, entry: Entry, rows: int) -> EntrySize:
    """The size of the indexed part of entries: key, primary key, covered columns. rows: the source's, about.

    Raises InvalidInput where an entry that is there already wouldn't fit.
    """
    limit = int(execute(connection, LIMIT).scalar_one())
    names = [c.source for i, c in enumerate(entry.columns) if i < entry.identity or c.covered]
    bytes_of = [source.columns[name].max_bytes for name in names]
    bounds = [size + ALIGNMENT_BYTES for size in bytes_of if size is not None]
    bound = HEADER_BYTES + sum(bounds) if len(bounds) == len(names) else None
    if bound is not None and bound <= limit:
        return EntrySize(limit, bound, None)
    sizes = " + ".join(f"coalesce(pg_column_size(s.{quote(name)}), 0)" for name in names)
    share = SAMPLE_ROWS * 100 / rows if rows else 100.0
    sample = "" if share >= 50 else f" TABLESAMPLE SYSTEM ({share:.6f}) REPEATABLE (1)"
    query = f"SELECT coalesce(max({sizes}), 0) FROM {source.sql} s{sample}"
    biggest = HEADER_BYTES + int(owner.rows(connection, source, query, "bytes int").scalar_one())
    if biggest > limit:
        raise InvalidInput(
            f"index {index}: {source.name} has a row whose key, primary key and covered columns take {biggest} bytes; "
            f"an entry of a B-tree takes {limit}, and writes of such rows would fail. Choose other key columns; "
            "include long columns, with covering auto or none"
        )
    return EntrySize(limit, bound, biggest)
