"""How a worker reads its ranges: in the order of the primary key, or block by block (DESIGN section 6).

By key each batch looks up its rows where they happen to lie; by blocks it reads them as they lie. Blocks are right
because every row that is not where it was at prepare has been written since, so that touched wins for it: an insert,
and an update that moves a row to another block even if its entry stays the same (`Target.follows_moves`). A row that
is met twice by that is removed by the seal (`generation.remove_touched`).

The rows are those of the source, or, in a rebuild, the entries of the generation that readers see, which is narrower:
each of them is the projection of its row in every snapshot (I1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection

from airflow_roir.definition import Scan, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.run import Job
from airflow_roir.errors import SourceChanged
from airflow_roir.scan_range import Key, ScanRange

# A batch by blocks, or of wide rows, reads no more than this: 64 MB.
BATCH_BYTES = 64 << 20
BLOCK_BYTES = 8_192
# Of a table that nobody has analyzed, until the first batch has shown how many there are.
ROWS_PER_BLOCK = 50.0


@dataclass(frozen=True)
class Stretch:
    """What one batch copies. watermark: where the range stands then; where, values: SQL for its rows."""

    watermark: Key | None
    done: bool
    where: str
    values: dict[str, str]


class Reader(Protocol):
    """Cuts the next batch off a range. Both lock the relation against ALTER, to the end of the transaction."""

    def next(self, relation: str, scan: ScanRange, rows: int) -> Stretch:
        """The next stretch, of about so many rows. relation: its quoted name. Raises SourceChanged."""
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

    def next(self, relation: str, scan: ScanRange, rows: int) -> Stretch:
        """Looks the batch's last key up: exactly `rows` rows, but for the range's last batch."""
        # The scan must come out of the key's index, whatever the statistics say.
        execute(self.connection, "SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off")
        last, done = self._last_key(relation, scan, rows)
        values: dict[str, str] = {}
        where = scan.condition(self.source.primary_key, self._casts, None if done else last, values)
        # What is bounded comes out of the index still: in the middle of a composite key the planner takes a batch for a
        # quarter of the table, and would read all of it for each.
        execute(self.connection, f"SET LOCAL enable_sort = on; SET LOCAL enable_seqscan = {'off' if values else 'on'}")
        return Stretch(last if last is not None else scan.watermark, done, where, values)

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Nothing to learn."""

    def _last_key(self, relation: str, scan: ScanRange, limit: int) -> tuple[Key | None, bool]:
        """The key of the batch's last row, and whether the range ends with this batch."""
        values: dict[str, str] = {}
        where = scan.condition(self.source.primary_key, self._casts, None, values)
        # Qualified, or ORDER BY would sort the texts, which have the columns' names.
        key = ", ".join(f"s.{quote(name)}" for name in self.source.primary_key)
        texts = ", ".join(self.source.columns[name].text("s") for name in self.source.primary_key)
        head = f"SELECT {texts} FROM {relation} s WHERE {where} ORDER BY"
        found = execute(self.connection, f"{head} {key} OFFSET {limit - 1} LIMIT 1", values).first()
        if found is not None:
            return list(found), False
        descending = ", ".join(f"s.{quote(name)} DESC" for name in self.source.primary_key)
        found = execute(self.connection, f"{head} {descending} LIMIT 1", values).first()
        return (None if found is None else list(found)), True


# The file that the range was planned for, and whether a TRUNCATE has taken everything since: what came then is touched.
FILE = """
SELECT pg_relation_filenode(to_regclass(%(relation)s))::bigint AS filenode, g.emptied
  FROM roir.generation g WHERE g.id = %(generation)s
"""


class BlockReader:
    """Reads block by block, as many blocks at a time as held about the wanted rows before. Bounds are block numbers."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self._rows_per_block: float | None = None

    def next(self, relation: str, scan: ScanRange, rows: int) -> Stretch:
        """As many blocks as hold about so many rows.

        Raises SourceChanged where the relation's file isn't the one of the plan (VACUUM FULL, CLUSTER, pg_repack):
        its rows are in other blocks then, and no capture told of that.
        """
        assert scan.lower is not None
        assert scan.upper is not None
        if self.job.scan is Scan.INDEX and relation.isdigit():
            raise SourceChanged(
                f"index {self.job.run.index}: the generation that is read was dropped meanwhile (reverted from, and "
                "cleaned up); abort the operation and begin anew"
            )
        execute(self.connection, "SET LOCAL enable_seqscan = off")
        execute(self.connection, f"LOCK TABLE ONLY {relation} IN ACCESS SHARE MODE")
        values = {"relation": relation, "generation": self.job.generation_id}
        file = execute(self.connection, FILE, values).one()
        if file.emptied:
            return Stretch(scan.watermark, True, "false", {})
        if file.filenode != scan.filenode:
            raise SourceChanged(
                f"index {self.job.run.index}: {relation} was rewritten since the operation was prepared (VACUUM FULL, "
                "CLUSTER, pg_repack, SET TABLESPACE), so that its blocks hold other rows; abort the operation and "
                "begin anew, with --scan key where that may happen again"
            )
        first = self._first(scan)
        blocks = max(1, min(int(rows / (self._rows_per_block or ROWS_PER_BLOCK)), BATCH_BYTES // BLOCK_BYTES))
        end = min(first + blocks, int(scan.upper[0]))
        where = f"ctid >= '({first},0)'::tid AND ctid < '({end},0)'::tid"
        return Stretch([str(end - 1)] if end > first else scan.watermark, end >= int(scan.upper[0]), where, {})

    def copied(self, scan: ScanRange, stretch: Stretch, rows: int) -> None:
        """Learns how many rows a block holds."""
        if stretch.watermark is not None and stretch.watermark != scan.watermark:
            blocks = int(stretch.watermark[0]) + 1 - self._first(scan)
            # Not less than one: a stretch of empty blocks says nothing of the next one.
            self._rows_per_block = max(1.0, rows / blocks)

    def _first(self, scan: ScanRange) -> int:
        """Go on after what was done."""
        assert scan.lower is not None
        return int(scan.lower[0]) if scan.watermark is None else int(scan.watermark[0]) + 1


def reader_of(connection: Connection, job: Job) -> Reader:
    """How the operation's ranges are read."""
    return BlockReader(connection, job) if job.scan.by_blocks else KeyReader(connection, job)


def columns_of(job: Job) -> list[str]:
    """SQL for the columns of an entry, in the relations that the ranges are pieces of."""
    if job.scan is Scan.INDEX:
        return job.entry.physical()
    return [quote(column.source) for column in job.entry.columns]
