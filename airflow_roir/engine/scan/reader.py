"""How a worker reads its ranges: in the order of the primary key, or block by block (docs/architecture.md#scan).

By key each batch looks up its rows where they happen to lie; by blocks it reads them as they lie. Blocks are right
because every row that is not where it was at prepare has been written since, so that touched wins for it: an insert,
and an update that moves a row to another block even if its entry stays the same. A row that
is met twice by that is removed by the seal (`physical.remove_touched`).

The rows are those of the source, or, in a rebuild, the entries of the generation that readers see, which is narrower:
each of them is the projection of its row in every snapshot (I1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from airflow_roir.definition import Scan, quote
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.scan.batch_size import GROWTH, REMEMBERED
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import SourceChanged
from airflow_roir.scan_range import Key, ScanRange

# Of narrow rows, where nobody has analyzed the table and no batch was copied yet.
ROWS_PER_BLOCK = 200.0
# Nothing is known of the first blocks, and then only of those that were copied.
FIRST_BLOCKS = 16


@dataclass(frozen=True)
class Stretch:
    """What one batch copies.

    watermark: where the range stands then; where, values: SQL for its rows; settings: SQL to read them by.
    """

    watermark: Key | None
    done: bool
    where: str
    values: dict[str, str]
    settings: str = ""


class Reader(Protocol):
    """Cuts the next batch off a range. The caller has locked the relation, which so keeps its name and its file."""

    def next(self, relation: str, scan: ScanRange, rows: int, usual: float | None = None) -> Stretch:
        """The next stretch, of about `rows` rows. relation: its quoted name; usual: rows per block when it was
        analyzed. Raises SourceChanged.
        """
        ...

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Told of each committed batch."""
        ...


class KeyReader:
    """Reads in the order of the primary key."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.source = job.source
        self._casts = job.source.comparands

    def next(self, relation: str, scan: ScanRange, rows: int, usual: float | None = None) -> Stretch:
        """Looks the batch's last key up: exactly `rows` rows, but for the range's last batch."""
        last, done = last_key(self.connection, self.source, relation, scan, rows)
        values: dict[str, str] = {}
        where = scan.condition(self.source.primary_key, self._casts, None if done else last, values)
        # What is bounded comes out of the index still: in the middle of a composite key the planner takes a batch for a
        # quarter of the table, and would read all of it for each.
        settings = f"SET LOCAL enable_sort = on; SET LOCAL enable_seqscan = {'off' if values else 'on'};"
        return Stretch(last if last is not None else scan.watermark, done, where, values, settings)

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Nothing to learn."""


def last_key(
    connection: Connection, source: Source, relation: str, scan: ScanRange, rows: int, only: str = "ONLY"
) -> tuple[Key | None, bool]:
    """The key of a batch's last row, in the order of the primary key, and whether the range ends with that batch.

    relation: the quoted name of the source, or of a table like it; only: '' reads what inherits from it, too. None, and
    True, if no row is left.
    """
    values: dict[str, str] = {}
    where = scan.condition(source.primary_key, source.comparands, None, values)
    # Qualified, or ORDER BY would sort the texts, which have the columns' names.
    key = ", ".join(f"s.{quote(name)}" for name in source.primary_key)
    descending = ", ".join(f"s.{quote(name)} DESC" for name in source.primary_key)
    texts = ", ".join(source.columns[name].text("s") for name in source.primary_key)
    # Within, so that the texts aren't made of each row that is passed over.
    columns = ", ".join(quote(name) for name in source.primary_key)
    head = f"SELECT {texts} FROM (SELECT {columns} FROM {only} {relation} s WHERE {where} ORDER BY"
    named = ", ".join(f"k{i} text" for i in range(len(source.primary_key)))
    for order, is_last in ((f"{key} OFFSET {rows - 1} LIMIT 1", False), (f"{descending} LIMIT 1", True)):
        found = owner.rows(connection, source, f"{head} {order}) s", named, values, [relation]).first()
        if found is not None:
            return list(found), is_last
    return None, True


# The file as it is, and whether a TRUNCATE has taken everything since the plan: what came then is touched.
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
        its rows are in other blocks then, and no capture told of that.
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
                "CLUSTER, pg_repack, SET TABLESPACE), so its blocks hold other rows now. Abort the operation and "
                "start again, with --scan key if that may happen again"
            )
        first = self._first(scan)
        # The densest of what is known: behind an empty stretch rows may lie close again.
        dense = max([*self._rows_per_block, usual or 0.0]) or ROWS_PER_BLOCK
        most = limits_of(self.connection).batch_bytes // file.block_bytes
        blocks = max(1, min(int(rows / dense), self._blocks * GROWTH, most))
        end = min(first + blocks, int(scan.upper[0]))
        where = f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid"
        return Stretch([str(end - 1)] if end > first else scan.watermark, end >= int(scan.upper[0]), where, {})

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Learns how many rows a block holds."""
        if stretch.watermark is not None and stretch.watermark != scan.watermark:
            blocks = int(stretch.watermark[0]) + 1 - self._first(scan)
            self._rows_per_block.append(rows / blocks)
            self._blocks = max(blocks, FIRST_BLOCKS)

    def _first(self, scan: ScanRange) -> int:
        """Continue after what was done."""
        assert scan.lower is not None
        return int(scan.lower[0]) if scan.watermark is None else int(scan.watermark[0]) + 1


def reader_of(connection: Connection, job: Job) -> Reader:
    """How the operation's ranges are read."""
    return BlockReader(connection, job) if job.scan.by_blocks else KeyReader(connection, job)


def selected(job: Job) -> list[str]:
    """SQL for the columns of an entry, in the relations that the ranges are pieces of."""
    if job.scan is Scan.INDEX:
        return job.entry.physical()
    return [f"{quote(column.source)}{column.to_base_type}" for column in job.entry.columns]
