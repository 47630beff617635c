"""The Spark application: drives an operation's workers, phase by phase, and keeps as many as it asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from airflow_roir.engine import build, seal
from airflow_roir.engine.claims import WorkLeft
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import Run, driving, heartbeat, read_control, settle, start_run
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.engine.verify import compare
from airflow_roir.errors import OperationFailed, OperationPaused, RoirError, SparkFailed, WorkerFailed
from airflow_roir.operation import Phase, Status
from airflow_roir.spark.driver_process import SPARK_IS_UP
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.patience import Patience
from airflow_roir.spark.session import is_alive, is_python_error, spark_session, why
from airflow_roir.spark.task import worker_failed, workers_at_work
from airflow_roir.spark.worker_pool import Ended, Workers

# How soon a raised parallelism is followed while running.
WATCH_EVERY_S = 1.0
# Spark gives up on a worker after four lost tries in a row, which is what a dying node or a full memory can cause.
# So often within this time a worker is submitted anew.
LOST_WORKERS = 5
LOST_WINDOW_S = 600.0
# A worker should be at work so soon after it was submitted; later it waits for a slot.
SLOT_S = 10.0
ENGINE = {Phase.BUILD: build, Phase.SEAL: seal, Phase.SUM: compare, Phase.CHECK: compare}
UNITS = {Phase.BUILD: "ranges", Phase.SEAL: "segments", Phase.SUM: "units", Phase.CHECK: "units"}


def drive(
    database: Database,
    index: str,
    owner: str,
    options: SparkOptions,
    take_over: bool = False,
    report: Callable[[str], None] = lambda line: None,
    lift_pause: bool = True,
) -> OperationStatus:
    """Build and seal the index's live operation on Spark, or verify it, in a run of its own, from its present phase.

    Returns its status: phase `fold` when sealed, `done` when verified, or `paused`. Raises what `start_run` raises,
    SparkFailed, and WorkerFailed for what workers reported; the operation then holds the reason.
    """
    run = start_run(database, index, owner, take_over, lift_pause)
    with driving(database, run), heartbeat(database, run):
        if _control(database, run).phase in ENGINE:
            report(f"operation {run.operation_id}: starting Spark")
            with spark_session(options, f"roir {run.index} operation {run.operation_id}") as spark:
                report(SPARK_IS_UP)
                # A stage of a verification may have to be followed by another one in the same phase.
                while (phase := Phase(_control(database, run).phase)) in ENGINE:
                    _PhaseOnSpark(spark, database, run, phase, report).run()
    return operation_status(database, run.operation_id)


class _PhaseOnSpark:
    """One phase of a run: starts workers while there is work, follows the operation's row, hears every worker out."""

    def __init__(self, spark: Any, database: Database, run: Run, phase: Phase, report: Callable[[str], None]) -> None:
        self._spark = spark
        self._database = database
        self._run = run
        self._phase = phase
        self._report = report
        self._workers = Workers(spark, database, run, phase)
        self._lost = 0
        self._lost_at = 0.0
        self._patience = Patience(database.limits.outage_s, self._workers.wait)
        self._submitted_at: dict[int, float] = {}
        self._waiting: frozenset[int] = frozenset()

    def run(self) -> None:
        """Return when the phase is done. Raises OperationPaused, OperationFailed, SparkFailed, WorkerFailed, Fenced."""
        row = _control(self._database, self._run)
        if row.phase != self._phase:
            return
        begun = time.monotonic()
        self._report(f"{self._phase.value}: {row.parallelism} workers")
        try:
            self._supervise()
        except BaseException as error:
            # Written down first: else the other workers would go on to the end of the phase before this is heard of.
            settle(self._database, self._run, error, fatal=False)
            self._leave(error)
            raise
        row = _control(self._database, self._run)
        if row.status == Status.PAUSED:
            raise OperationPaused(f"index {self._run.index}: paused by {row.paused_by}: {row.pause_reason}")
        if row.status == Status.FAILED:
            raise OperationFailed(f"index {self._run.index}: {row.error}")
        self._database.retry(lambda: ENGINE[self._phase].finish(self._database, self._run))
        self._report(f"{self._phase.value}: done in {time.monotonic() - begun:.1f} s")

    def _supervise(self) -> None:
        workers = self._workers
        while True:
            row = _control(self._database, self._run)
            if failures := self._hear(workers.collect()):
                raise failures[0]
            if row.status != Status.RUNNING or row.phase != self._phase:
                break
            left = self._work_left()
            missing = sorted(set(range(row.parallelism)) - workers.busy)
            for number in missing[: left.free]:
                self._submitted_at[number] = time.monotonic()
                workers.start(
                    number,
                    f"{self._run.index}: {self._phase.value}, worker {number} of {row.parallelism}, "
                    f"{left.free} {UNITS[self._phase]} unclaimed",
                )
            if not left.undone and not self._database.retry(self._at_work):
                # Whom Spark has no slot for, or has lost, need not come any more.
                break
            self._watch_slots()
            workers.wait(WATCH_EVERY_S)
        self._leave(None)

    def _leave(self, cause: BaseException | None) -> None:
        """Hear out those who are still at work; raises the first error among them unless there is a `cause` already."""
        failures = self._hear(self._workers.leave(self._at_work, self._database.limits.outage_s), leaving=True)
        if failures and cause is None:
            raise failures[0]

    def _hear(self, ended: list[Ended], leaving: bool = False) -> list[RoirError]:
        """Report what workers did. Whatever failed is kept with the operation, so that no error hides another."""
        failures = [failure for one in ended if (failure := self._failure(one, leaving)) is not None]
        for failure in failures:
            self._report(f"{self._phase.value}: {failure}")
            settle(self._database, self._run, failure, fatal=False)
        return failures

    def _failure(self, ended: Ended, leaving: bool) -> RoirError | None:
        """The error, if trying again won't help: a worker's own error, or a Spark that is of no more use."""
        phase = self._phase.value
        for row in ended.rows:
            if row.error is None:
                what = f"{UNITS[self._phase].removesuffix('s')} {row.ordinal}"
                what += "" if self._phase == Phase.SEAL else f": {row.rows} rows"
                self._report(f"{phase}: worker {row.worker}, {what} in {row.seconds:.2f} s")
            elif row.error.startswith("fenced: "):
                self._report(f"{phase}: worker {row.worker} stopped: a newer worker has taken its place")
            else:
                return WorkerFailed(row.error)
        if ended.error is None:
            return None
        failure = why(ended.error)
        if is_python_error(ended.error):
            return worker_failed(ended.worker, failure)
        self._report(f"{phase}: Spark lost worker {ended.worker}: {failure}")
        if leaving or (is_alive(self._spark) and self._may_try_again()):
            return None
        return SparkFailed(f"Spark gave up on worker {ended.worker}: {failure}")

    def _may_try_again(self) -> bool:
        now = time.monotonic()
        if now - self._lost_at > LOST_WINDOW_S:
            self._lost = 0
            self._patience.renew()
        self._lost_at = now
        self._lost += 1
        return self._lost <= LOST_WORKERS and self._patience.wait()

    def _watch_slots(self) -> None:
        """Say how many workers Spark has no slot for; they begin as soon as others leave or the cluster grows."""
        now = time.monotonic()
        late = {number for number, since in self._submitted_at.items() if now - since >= SLOT_S}
        if not late:
            return
        for number in self._database.retry(self._at_work) | (late - self._workers.busy):
            self._submitted_at.pop(number, None)
        waiting = frozenset(late & self._submitted_at.keys())
        if waiting - self._waiting:
            self._report(
                f"{self._phase.value}: {len(waiting)} of {len(self._workers.busy)} workers have not begun in "
                f"{SLOT_S:g} s: Spark is slow, or has no free slot for them"
            )
        self._waiting = waiting

    def _at_work(self) -> set[int]:
        with self._database.transaction() as connection:
            return workers_at_work(connection, self._run)

    def _work_left(self) -> WorkLeft:
        def read() -> WorkLeft:
            with self._database.transaction() as connection:
                left: WorkLeft = ENGINE[self._phase].work_left(connection, self._run, self._workers.busy)
                return left

        return self._database.retry(read)


def _control(database: Database, run: Run) -> Any:
    def read() -> Any:
        with database.transaction() as connection:
            return read_control(connection, run)

    return database.retry(read)
