"""One worker of a compaction: claims units and takes each of them to its swap, step by step.

Each step commits under the unit's claim token, and the unit's row says where the next step continues. So another worker
can continue the unit of a worker that was killed, paused or fenced.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine.claims import Stop, why_stop
from airflow_roir.engine.compact import applying, begin_unit, copying, obstacles, swap, undo
from airflow_roir.engine.compact.copying import Rewritten
from airflow_roir.engine.compact.unit import ENDED, UNITS, UnitClaim
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.physical import DEFAULT_SEGMENT
from airflow_roir.engine.locks.giving_way import GaveWay
from airflow_roir.engine.work.phase_work import PhaseWork, Step, Worker, begin_work
from airflow_roir.errors import InvariantViolated
from airflow_roir.generation_state import UnitStatus
from airflow_roir.operation import Phase

READ = f"""
SELECT id, ordinal, claim_token, {UNITS.columns},
       (SELECT o.epoch FROM roir.operation o WHERE o.id = operation_id) AS epoch
  FROM roir.compaction_unit WHERE id = %(id)s
"""
# Units that other workers may swap meanwhile. A swap locks the default segment, too, since an attach checks it.
OTHERS = f"""
SELECT EXISTS (SELECT FROM roir.compaction_unit
                WHERE operation_id = %(operation)s AND id <> %(unit)s AND NOT {ENDED}
                  AND (SELECT o.parallelism FROM roir.operation o WHERE o.id = operation_id) > 1)
"""
WORKED = "UPDATE roir.compaction_unit SET seconds = seconds + %(took)s WHERE id = %(id)s AND claim_token = %(token)s"


class CompactWorker(Worker):
    """One of an operation's parallel workers. Each call of `step` is one step, so that tests can act between steps."""

    def __init__(
        self,
        database: Database,
        connection: Connection,
        job: Job,
        worker: int,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.database = database
        self.connection = connection
        self.job = job
        self.worker = worker
        self.report = report
        # State of the current unit: the next block of the list in this pass, and the pass's end; whether it was
        # compared, and how often the comparison gave way.
        self._forget()

    def _forget(self) -> None:
        """Resets the state of the current unit."""
        self._at = self._end = self._retreats = 0
        self._compared = False

    def claim(self) -> UnitClaim | Stop:
        """Claims a unit. Raises Fenced, OperationFailed."""
        run = self.job.run
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker, Phase.COMPACT):
                return stop
            swap.check_active(self.connection, self.job)
            found = UNITS.claim(self.connection, run, self.worker)
        self._forget()
        return Stop("done") if found is None else UnitClaim.of(found)

    def step(self, hold: UnitClaim) -> Step | Stop:
        """Takes the next step of a unit. Raises Fenced, LockNotAcquired, OperationPaused, InvariantViolated."""
        begun = time.monotonic()
        rest, rows = self.advance(hold)
        took = time.monotonic() - begun
        with self.connection.begin():
            execute(self.connection, WORKED, {"id": hold.id, "token": hold.token, "took": round(took, 3)})
            stop = why_stop(read_control(self.connection, self.job.run), self.worker, Phase.COMPACT)
            if stop and rest is not None:
                UNITS.release(self.connection, self.job.run, rest)
                return stop
        return Step(rows, took, rest, paced=rows)

    def advance(self, claim: UnitClaim) -> tuple[UnitClaim | None, int]:
        """Takes the next step of a unit; returns its claim after that, None once it has ended, and the rows copied.

        Raises Fenced, LockNotAcquired, OperationPaused, InvariantViolated.
        """
        with UNITS.telling_fenced(self.connection, self.job.run, self.worker, claim):
            try:
                return self._step(claim)
            except Rewritten as found:
                undo.begin_anew(self.database, self.job, self.worker, claim, str(found), self.report)
                self._forget()
                return self._now(claim), 0

    def _step(self, claim: UnitClaim) -> tuple[UnitClaim | None, int]:
        database, connection, job, worker = self.database, self.connection, self.job, self.worker
        rows = 0
        if claim.status is not UnitStatus.WAITING:
            with connection.begin():
                copying.check_files(connection, claim)
                # Each write to the new segments evaluates their bounds.
                found = obstacles.unread(connection, claim, job.entry) or obstacles.missed(connection, claim)
                if found is not None:
                    raise Rewritten(found)
        if claim.status is UnitStatus.WAITING:
            begin_unit.begin(database, job, worker, claim, self.report)
        elif claim.status is UnitStatus.COPYING:
            limits = database.limits
            with connection.begin():
                rows = copying.copy(connection, job, worker, claim, limits.compaction_blocks, limits.table_lock_ms)
        elif claim.status is UnitStatus.INDEXING:
            with connection.begin():
                named = copying.index(connection, job, worker, claim)
            if named is None:
                copying.vacuum(database, connection, job, worker, claim)
        elif claim.status is UnitStatus.FOLDING:
            self._fold(claim)
        return self._now(claim), rows

    def _fold(self, claim: UnitClaim) -> None:
        """Applies some blocks of the list; once the list is short, compares, then swaps."""
        if self._at < self._end:
            applying.step(self.database, self.connection, self.job, self.worker, claim, self._at)
            self._at += applying.BLOCKS_PER_STEP
            return
        with self.connection.begin():
            left, blocks = applying.left(self.connection, claim), applying.blocks(self.connection, claim)
        if left > swap.MOST_UNDER_LOCK or (left and not self._compared and not self._end):
            if self._end:
                applying.clear(self.database, claim)
            self._at, self._end = 0, blocks
            return
        if not self._compared and self.job.options.get("verify", True):
            insists = self._retreats >= self.database.limits.seal_retreats and not self._is_awaited(claim)
            try:
                found = applying.differs(self.database, self.connection, self.job, self.worker, claim, insists)
            except GaveWay:
                self._retreats += 1
                return
            if found is not None:
                note = f"its copy differs from it: {found}"
                undo.begin_anew(self.database, self.job, self.worker, claim, note, self.report)
                raise InvariantViolated(
                    f"index {self.job.run.index}: compaction unit {claim.ordinal} wasn't swapped in: {note}. Once the "
                    f"compaction is done or aborted, run: roir verify {argument(self.job.run.index)}"
                )
        self._compared = True
        if not swap.swap(self.database, self.job, self.worker, claim, self.report):
            self._at, self._end = 0, blocks

    def _is_awaited(self, claim: UnitClaim) -> bool:
        """True if other swaps of the operation may wait for a reader of this unit's segment."""
        if claim.segments[0] != DEFAULT_SEGMENT:
            return False
        of = {"operation": self.job.run.operation_id, "unit": claim.id}
        with self.connection.begin():
            return bool(execute(self.connection, OTHERS, of).scalar_one())

    def _now(self, claim: UnitClaim) -> UnitClaim | None:
        with self.connection.begin():
            row = execute(self.connection, READ, {"id": claim.id}).one()
        now = UnitClaim.of(row)
        if (now.token, row.epoch) != (claim.token, self.job.run.epoch):
            raise UNITS.fenced(self.job.run, self.worker, claim)
        return None if now.status in (UnitStatus.DONE, UnitStatus.LEFT) else now


def make_worker(database: Database, connection: Connection, run: Run, number: int) -> CompactWorker:
    """Makes a worker of a compaction. Raises Fenced, SourceChanged."""
    job = begin_work(connection, run, load_job)
    return CompactWorker(database, connection, job, number)


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Ends the operation, once each unit is swapped in or left out. Raises InvariantViolated, Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.COMPACT:
            return
        left = UNITS.left(connection, run, ())
        if left.undone:
            raise InvariantViolated(
                f"index {run.index}: {left.undone} units aren't done yet; run: roir resume {argument(run.index)}"
            )
        operations.complete(connection, row, run.epoch)
        counts = execute(connection, COUNTS, {"operation": run.operation_id}).one()
        said = f"{counts.done} units swapped in, {counts.bytes_before} bytes before, {counts.bytes_after} after"
        said += f"; {counts.left} left out" if counts.left else ""
        operations.record_event(connection, row.index_id, row.id, run.owner, "compacted", said)


COUNTS = """
SELECT count(*) FILTER (WHERE status = 'done') AS done, count(*) FILTER (WHERE status = 'left') AS left,
       coalesce(sum(bytes_before) FILTER (WHERE status = 'done'), 0) AS bytes_before,
       coalesce(sum(bytes_after) FILTER (WHERE status = 'done'), 0) AS bytes_after
  FROM roir.compaction_unit WHERE operation_id = %(operation)s
"""


PHASE = PhaseWork(
    Phase.COMPACT,
    UNITS,
    make_worker,
    finish,
    """
SELECT ordinal, CASE WHEN status <> 'left' THEN rows END AS rows, seconds, status IN ('done', 'left') AS done
  FROM roir.compaction_unit WHERE operation_id = %(operation)s
""",
    "rewrites the chosen segments of a published index, and swaps each in",
)
