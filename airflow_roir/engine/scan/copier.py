"""Copies a range's next rows into the base, in the transaction of a batch: here from a table of this database.

`shards/copy/copy_ranges.py` copies from another server, by the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import Scan
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks.table_lock import lock_table
from airflow_roir.engine.scan import failing_row
from airflow_roir.engine.scan.carrying import Carrier
from airflow_roir.engine.scan.reader import Stretch, has_entry, reader_of, selected
from airflow_roir.engine.source import owner
from airflow_roir.errors import Fenced, LockNotAcquired, RoirError
from airflow_roir.scan_range import ScanRange

# The watermark must still be where the batch began.
BATCH_STOOD = "NOT p.done AND p.watermark IS NOT DISTINCT FROM %(old_watermark)s::jsonb"
BATCH_DONE = """watermark = %(watermark)s::jsonb, done = %(done)s, rows = rows + %(rows)s, batches = batches + 1,
       seconds = seconds + %(seconds)s, mark = %(mark)s, moved_at = clock_timestamp()"""
# How many rows a batch may copy, by the bytes of a row; None: unknown.
Limit = Callable[[float | None], int]


@dataclass(frozen=True)
class Claim:
    """A worker's hold on a range. token: proves that the worker still has it.

    row_bytes, rows_per_block: those of the range's relation when it was analyzed; None if it never was. shard_id: the
    server that has the rows; None: this one. mark: that of the last batch there.
    """

    id: int
    ordinal: int
    token: int
    scan: ScanRange
    row_bytes: float | None = None
    rows_per_block: float | None = None
    shard_id: int | None = None
    mark: int | None = None


@dataclass(frozen=True)
class Copied:
    """The result of a batch's copy. mark: the mark that it leaves on the server of the rows, if that is another one."""

    stretch: Stretch
    rows: int
    mark: int | None = None


class Away(Exception):
    """The server that has a range's rows is out of reach now. The operation has not failed."""

    def write_down(self, connection: Connection) -> None:
        """Write it down for users, and for workers that claim ranges."""
        raise NotImplementedError


class Copier(Protocol):
    """Copies the batches of one worker. share: how many operations a batch copies for."""

    @property
    def share(self) -> int:
        """1, unless several operations share the scan."""

    def begin(self, claim: Claim) -> None:
        """Called before the transaction of a batch. Raises Away."""

    def copy(self, row: Row[Any], claim: Claim, limit: Limit) -> Copied | None:
        """Copy a batch. None if another operation's worker does it. row: of `build.CLAIM_STATE`.

        Raises Away, SourceChanged, LockNotAcquired.
        """

    def moved(self, row: Row[Any], committed: Row[Any], values: Mapping[str, Any]) -> None:
        """Called at the end of the transaction, after the watermark moved. Raises LockNotAcquired if a name changed."""

    def done(self, claim: Claim, copied: Copied) -> None:
        """Called after the commit."""

    def refusal(self, row: Row[Any], error: DBAPIError) -> RoirError | None:
        """Called after an error, in a new transaction: an error that names the row which brings it, if one does.

        row: of `build.CLAIM_STATE`. Raises LockNotAcquired.
        """

    def is_to_try_alone(self, error: BaseException) -> bool:
        """Called after an error: true if the batch must be tried again at once, for the worker's own operation only."""


class SourceCopier:
    """Reads the source; or the generation that readers see, if the index is rebuilt from itself."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self.reader = reader_of(connection, job)
        self.carrier = Carrier(connection, job)
        self._columns = selected(job)
        self._alone = False
        self._tried: Stretch | None = None

    @property
    def share(self) -> int:
        """How many operations the last batch copied for."""
        return self.carrier.share

    def begin(self, _claim: Claim) -> None:
        """Make the batch copy only for its own operation, until `copy` finds others."""
        self.carrier.none()

    def copy(self, row: Row[Any], claim: Claim, limit: Limit) -> Copied | None:
        """Cut and copy a batch; None if a worker of an older operation reads the range."""
        alone, self._alone = self._alone, False
        # Keeps ALTER out until the transaction ends: if the owner isn't trusted, the reads leave no lock.
        lock_table(self.connection, row.name, row.relation, "ACCESS SHARE", only=True)
        if row.accompanied and not alone:
            if self.carrier.is_read_by_older(claim.id):
                return None
            self.carrier.take(claim.id)
        self._tried = None
        self._tried = stretch = self.reader.next(row.name, claim.scan, limit(claim.row_bytes), claim.rows_per_block)
        return Copied(stretch, self.insert(row.name, stretch))

    def insert(self, relation: str, stretch: Stretch) -> int:
        """Copy a stretch of a relation, by name, in the open transaction; returns its rows."""
        job = self.job
        base = physical.base(job.generation_id)
        if stretch.settings:
            execute(self.connection, stretch.settings)
        if self.carrier.companions:
            return self.carrier.insert(relation, stretch)
        rows = f"SELECT {', '.join(self._columns)} FROM ONLY {relation} WHERE {stretch.where} AND {has_entry(job)}"
        values: dict[str, Any] = stretch.values
        # If an index is rebuilt from itself, the relation is roir's own.
        if job.scan is not Scan.INDEX and not owner.is_trusted(self.connection, job.source, [relation]):
            columns = owner.row_type(self.connection, base)
            item, values = owner.relation(self.connection, job.source, rows, columns, values, [relation])
            rows = f"SELECT * FROM {item}"
        copy = f"INSERT INTO {base} ({', '.join(job.entry.physical())}) {rows}"
        return execute(self.connection, copy, values).rowcount

    def moved(self, row: Row[Any], committed: Row[Any], values: Mapping[str, Any]) -> None:
        """Move the companions' watermarks, too."""
        if committed.name != row.name:
            # The table's schema was renamed meanwhile: the batch may have read another table.
            raise LockNotAcquired(
                f"index {self.job.run.index}: {row.name} was renamed while a batch read it; the batch changed nothing"
            )
        self.carrier.advance(BATCH_DONE, BATCH_STOOD, values, committed.stamp)

    def done(self, claim: Claim, copied: Copied) -> None:
        """Learn the table's density; clear the companions of suspicion."""
        self.reader.copied(claim.scan, copied.stretch, copied.rows)
        self.carrier.committed()

    def refusal(self, row: Row[Any], error: DBAPIError) -> RoirError | None:
        """Look for the row among those of the last batch."""
        if self._tried is None:
            return None
        lock_table(self.connection, row.name, row.relation, "ACCESS SHARE", only=True)
        return failing_row.refusal(self.connection, self.job, row.name, self._tried, error)

    def is_to_try_alone(self, error: BaseException) -> bool:
        """True if the batch had companions, one of which may be the cause of the error."""
        if isinstance(error, Fenced) or (isinstance(error, DBAPIError) and error.connection_invalidated):
            return False
        self._alone = self.carrier.blame()
        return self._alone
