"""Seal: each segment gets its unique index, attached to the base's, and is vacuumed (docs/architecture.md#phases).

One segment is one transaction, claimed like a range.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import build, operations
from airflow_roir.engine import generation as physical
from airflow_roir.engine.build import Stop
from airflow_roir.engine.database import Database, execute, is_transient
from airflow_roir.engine.giving_way import GaveWay, giving_way
from airflow_roir.engine.run import Job, Run, WorkLeft, load_job, read_control
from airflow_roir.errors import Fenced, InvariantViolated
from airflow_roir.operation import Phase, Verb

# A sort in memory is what makes a bulk B-tree build fast; half a million entries fit into this.
SORT_MEMORY_KB = 262_144
# So often a segment is begun anew for those who wait for it. Then it is finished first: somebody who truncates leaves
# all day long would else keep it from its end.
MOST_RETREATS = 8

CLAIM_SEGMENT = """
UPDATE roir.segment
   SET claim_epoch = %(epoch)s, claim_worker = %(worker)s, claim_token = claim_token + 1
 WHERE id = (SELECT id FROM roir.segment
              WHERE generation_id = %(generation)s AND status <> 'sealed'
                AND (claim_epoch IS NULL OR claim_epoch < %(epoch)s
                     OR claim_epoch = %(epoch)s AND claim_worker = %(worker)s)
              ORDER BY ordinal FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING id, ordinal, status, claim_token
"""

COMMIT_SEGMENT = """
UPDATE roir.segment s
   SET status = %(to)s,
       claim_epoch = CASE WHEN %(to)s = 'sealed' THEN NULL ELSE s.claim_epoch END,
       claim_worker = CASE WHEN %(to)s = 'sealed' THEN NULL ELSE s.claim_worker END
  FROM roir.operation o
 WHERE s.id = %(segment)s AND s.claim_token = %(token)s AND s.claim_epoch = %(epoch)s AND s.status = %(from)s
   AND o.id = %(operation)s AND o.epoch = %(epoch)s
"""

HOLDS = """
SELECT EXISTS (SELECT FROM roir.segment s, roir.operation o
                WHERE s.id = %(segment)s AND s.claim_token = %(token)s AND s.claim_epoch = %(epoch)s
                  AND o.id = %(operation)s AND o.epoch = %(epoch)s)
"""


@dataclass(frozen=True)
class SegmentClaim:
    """A worker's hold on a segment."""

    segment_id: int
    ordinal: int
    status: str
    token: int


@dataclass(frozen=True)
class SegmentMetrics:
    """What a worker did on one segment."""

    worker: int
    ordinal: int
    seconds: float


class SealWorker:
    """One of an operation's parallel workers, in the seal phase. Each method is one transaction."""

    def __init__(self, database: Database, connection: Connection, job: Job, worker: int) -> None:
        self.database = database
        self.connection = connection
        self.job = job
        self.worker = worker

    def claim(self) -> SegmentClaim | Stop:
        """Claim a segment that isn't sealed. Raises Fenced."""
        run = self.job.run
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := build.why_stop(row, self.worker):
                return stop
            found = execute(
                self.connection,
                CLAIM_SEGMENT,
                {"epoch": run.epoch, "worker": self.worker, "generation": self.job.generation_id},
            ).first()
        if found is None:
            return Stop("done")
        return SegmentClaim(found.id, found.ordinal, found.status, found.claim_token)

    def index(self, claim: SegmentClaim, gives_way: bool = True) -> SegmentClaim:
        """Build and attach the segment's unique index. Raises Fenced and GaveWay, with nothing changed.

        gives_way: to whoever waits for the segment, a TRUNCATE of the source above all.
        """
        try:
            with self._giving_way(self.connection, claim, gives_way), self.connection.begin():
                self._set_up()
                physical.hold_segment(self.connection, self.job.generation_id, claim.ordinal)
                if self.job.scan.by_blocks:
                    physical.remove_touched(self.connection, self.job.generation_id, claim.ordinal, self.job.entry)
                physical.seal_segment(self.connection, self.job.generation_id, claim.ordinal, self.job.entry)
                self._commit(claim, "loading", "indexed")
        except DBAPIError as error:
            # Whoever was cut off for long may find the index built, or the segment gone: no failure of the operation.
            if not is_transient(error) and not self._holds(claim):
                raise self._fenced(claim) from error
            raise
        return SegmentClaim(claim.segment_id, claim.ordinal, "indexed", claim.token)

    def vacuum(self, claim: SegmentClaim, gives_way: bool = True) -> None:
        """Make index-only scans work at once, and give the planner its statistics. Raises Fenced, GaveWay."""
        with self.database.autocommit() as connection:
            name = physical.segment(self.job.generation_id, claim.ordinal)
            execute(connection, f"SET lock_timeout = '{build.TABLE_LOCK_WAIT}'")
            with self._giving_way(connection, claim, gives_way):
                execute(connection, f"VACUUM (ANALYZE) {name}")
        with self.connection.begin():
            self._commit(claim, "indexed", "sealed")

    def _giving_way(self, connection: Connection, claim: SegmentClaim, gives_way: bool) -> AbstractContextManager[None]:
        if not gives_way:
            return nullcontext()
        generation_id = self.job.generation_id
        locked = [*physical.names(generation_id), physical.segment(generation_id, claim.ordinal)]
        return giving_way(self.database, connection, locked)

    def _set_up(self) -> None:
        # Our own workers are the parallelism that was asked for; the server shall add none of its own.
        execute(
            self.connection,
            "SELECT set_config('max_parallel_maintenance_workers', '0', true), "
            # An open TRUNCATE holds the segment: give up soon, to look for a pause.
            "set_config('lock_timeout', %(wait)s, true), "
            "set_config('maintenance_work_mem', greatest(setting::int, %(kb)s)::text || 'kB', true) "
            "FROM pg_settings WHERE name = 'maintenance_work_mem'",
            {"kb": SORT_MEMORY_KB, "wait": build.TABLE_LOCK_WAIT},
        )

    def _commit(self, claim: SegmentClaim, from_status: str, to_status: str) -> None:
        run = self.job.run
        committed = execute(
            self.connection,
            COMMIT_SEGMENT,
            {
                "segment": claim.segment_id,
                "token": claim.token,
                "epoch": run.epoch,
                "operation": run.operation_id,
                "from": from_status,
                "to": to_status,
            },
        )
        if committed.rowcount != 1:
            raise self._fenced(claim)

    def _holds(self, claim: SegmentClaim) -> bool:
        run = self.job.run
        values = {"segment": claim.segment_id, "token": claim.token, "epoch": run.epoch, "operation": run.operation_id}
        with self.connection.begin():
            return bool(execute(self.connection, HOLDS, values).scalar_one())

    def _fenced(self, claim: SegmentClaim) -> Fenced:
        run = self.job.run
        return Fenced(
            f"index {run.index}: segment {claim.ordinal} is held by another worker now; "
            f"worker {self.worker} of {run.owner} stops"
        )


def work(database: Database, run: Run, worker: int) -> Iterator[SegmentMetrics]:
    """Seal segments until none is free, the operation is paused, or this worker is one too many. Raises Fenced."""
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
            operations.start_clock(connection, run.operation_id, run.epoch)
        sealer = SealWorker(database, connection, job, worker)
        retreats: Counter[int] = Counter()
        while isinstance(claim := sealer.claim(), SegmentClaim):
            begun = time.monotonic()
            gives_way = retreats[claim.ordinal] < MOST_RETREATS
            try:
                if claim.status == "loading":
                    claim = sealer.index(claim, gives_way)
                sealer.vacuum(claim, gives_way)
            except GaveWay:
                # It is claimed anew, which looks for a pause on the way, and queues behind whoever was let by.
                retreats[claim.ordinal] += 1
                continue
            yield SegmentMetrics(worker, claim.ordinal, time.monotonic() - begun)


WORK_LEFT = """
SELECT count(*) FILTER (WHERE claim_epoch IS NULL OR claim_epoch < %(epoch)s) AS free, count(*) AS undone
  FROM roir.segment
 WHERE generation_id = (SELECT generation_id FROM roir.operation WHERE id = %(operation)s) AND status <> 'sealed'
"""
GIVE_BACK = """
UPDATE roir.segment SET claim_epoch = NULL, claim_worker = NULL
 WHERE generation_id = (SELECT generation_id FROM roir.operation WHERE id = %(operation)s)
   AND status <> 'sealed' AND claim_epoch = %(epoch)s AND claim_worker <> ALL (%(busy)s)
"""


def work_left(connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
    """How many segments are left. busy: the run's workers that are alive; what others held is free again."""
    values = {"operation": run.operation_id, "epoch": run.epoch, "busy": list(busy)}
    execute(connection, GIVE_BACK, values)
    row = execute(connection, WORK_LEFT, values).one()
    return WorkLeft(row.free, row.undone)


def finish(database: Database, run: Run) -> None:
    """Go on to fold, once every segment is sealed. Raises InvariantViolated where one isn't, Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.SEAL:
            return
        left = execute(
            connection,
            "SELECT count(*) FROM roir.segment WHERE generation_id = %(generation)s AND status <> 'sealed'",
            {"generation": row.generation_id},
        ).scalar_one()
        if left or not physical.is_sealed(connection, row.generation_id):
            raise InvariantViolated(f"index {run.index}: {left} segments are not sealed yet; resume the operation")
        operations.tick(connection, run.operation_id, run.epoch)
        operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)
        operations.record_event(connection, row.index_id, row.id, run.owner, "phase", "fold")
