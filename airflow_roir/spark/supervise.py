"""The Spark application: drives an operation's workers, phase by phase, and keeps as many as it asks for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import build, seal
from airflow_roir.engine.claims import WorkLeft, granted_workers
from airflow_roir.engine.compact import worker as compact
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast.slow import slow
from airflow_roir.engine.governor.governing import governing
from airflow_roir.engine.governor.report import lost_line
from airflow_roir.engine.retry.patience import BackOff
from airflow_roir.engine.retry.shortage import persist
from airflow_roir.engine.run import Run, driving, heartbeat, read_control, settle, show_spark_ui, start_clock, start_run
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.engine.unique.early.detecting import detecting
from airflow_roir.engine.verify import compare
from airflow_roir.errors import DuplicatesFound, OperationFailed, OperationPaused, RoirError, SparkFailed, WorkerFailed
from airflow_roir.operation import Phase, Status
from airflow_roir.quantity import counted, duration
from airflow_roir.spark.driver_process import SPARK_IS_UP
from airflow_roir.spark.news import UNITS, News
from airflow_roir.spark.session import Session, Start, is_python_error, why
from airflow_roir.spark.start_timings import mark
from airflow_roir.spark.task import worker_failed, workers_at_work
from airflow_roir.spark.worker_pool import Ended, Workers

T = TypeVar("T")

# How soon a raised parallelism is followed while running.
WATCH_EVERY_S = 1.0
# Spark gives up on a worker after four lost tries in a row, which is what a dying node or a full memory can cause.
# So often within this time a worker is submitted anew.
LOST_WORKERS = 5
LOST_WINDOW_S = 600.0
# A worker has a slot so soon after it was submitted, where others have got theirs. Where none has, or nobody can say,
# Spark may just be slow to start.
SLOT_S = 10.0
FIRST_SLOT_S = 30.0
ENGINE = {Phase.BUILD: build, Phase.SEAL: seal, Phase.SUM: compare, Phase.CHECK: compare, Phase.COMPACT: compact}


def drive(
    database: Database,
    index: str,
    owner: str,
    spark: Start,
    take_over: bool = False,
    report: Callable[[str], None] = lambda line: None,
    lift_pause: bool = True,
    log: Path | None = None,
    operation: int | None = None,
) -> OperationStatus:
    """Take the index's live operation through the phases that are for workers, on Spark, in a run of its own.

    log: the file that Spark's own log goes to; only told. operation: as of `start_run`. Returns the operation's status:
    phase `fold` when sealed, `done` when verified or compacted, or `paused`. Raises what `start_run` raises,
    SparkFailed, and WorkerFailed for what workers reported; the operation then holds the reason.
    """
    run = start_run(database, index, owner, take_over, lift_pause, report, operation)
    with driving(database, run), heartbeat(database, run), governing(database, run, report):
        mark("begun")
        if _control(database, run, report).phase in ENGINE:
            report(f"operation {run.operation_id}: starting Spark")
            if log is not None:
                report(f"Spark's own log: {log}")
            session = spark.session(f"roir {run.index} operation {run.operation_id}")
            report(SPARK_IS_UP)
            with _pages_shown(database, run, session.pages, report):
                # A stage of a verification may have to be followed by another one in the same phase.
                while (phase := Phase(_control(database, run, report).phase)) in ENGINE:
                    _PhaseOnSpark(session, database, run, phase, report).run()
            mark("done")
        if line := database.retry(lambda: lost_line(database, run.operation_id)):
            report(line)
    return operation_status(database, run.operation_id)


@contextmanager
def _pages_shown(database: Database, run: Run, url: str | None, report: Callable[[str], None]) -> Iterator[None]:
    if url is not None:
        report(f"Spark's pages: {url}")
    persist(database, run, lambda: show_spark_ui(database, run, url), report)
    try:
        yield
    finally:
        # They go with the driver. If the server can't be reached, the next run shows its own.
        with suppress(DBAPIError):
            show_spark_ui(database, run, None)


class _PhaseOnSpark:
    """One phase of a run: starts workers while there is work, follows the operation's row, hears every worker out."""

    def __init__(
        self,
        spark: Session,
        database: Database,
        run: Run,
        phase: Phase,
        report: Callable[[str], None],
    ) -> None:
        self._spark = spark
        self._database = database
        self._run = run
        self._phase = phase
        self._news = News(database, run, phase, report)
        self._workers = Workers(spark, database, run, phase)
        self._lost = 0
        self._lost_at = 0.0
        self._patience = BackOff(database.limits.outage_s, self._workers.wait)
        self._submitted_at = 0.0
        # Of the workers without a slot: those that were told of, and those of the last look.
        self._waiting = self._short = 0
        self._told_of: set[str] = set()

    def run(self) -> None:
        """Return when the phase is done. Raises OperationPaused, OperationFailed, SparkFailed, WorkerFailed, Fenced."""
        row = _control(self._database, self._run, self._news.say)
        if row.phase != self._phase:
            return
        self._news.begin(row.parallelism)
        if self._phase == Phase.BUILD:
            # The rest is told when the options are given.
            for line in slow(row, 0, cores=self._spark.shared_cores):
                self._news.say(line)
        is_build = self._phase == Phase.BUILD
        with detecting(self._database, self._run, self._news.say) if is_build else nullcontext():
            row = self._work()
        self._news.pieces(last=True)
        if row.status == Status.PAUSED:
            raise OperationPaused(f"index {self._run.index}: paused by {row.paused_by}: {row.pause_reason}")
        if row.status == Status.FAILED:
            raise OperationFailed(f"index {self._run.index}: {row.error}")
        try:
            self._persist(lambda: ENGINE[self._phase].finish(self._database, self._run))
        except DuplicatesFound:
            self._news.duplicates(again=True)
            raise
        # Of all its stretches, as the status tells it: a clock of this one would count Spark's start, too.
        worked = _control(self._database, self._run, self._news.say).phase_seconds.get(self._phase.value, 0)
        self._news.say(f"done, worked {duration(worked)}")

    def _work(self) -> Any:
        """Until nothing is left, or the operation isn't running: its row then."""
        while True:
            try:
                self._supervise()
            except BaseException as error:
                # Written down first: else the other workers would go on to the end of the phase before this is heard
                # of.
                settle(self._database, self._run, error, fatal=False)
                self._leave(error)
                raise
            row = _control(self._database, self._run, self._news.say)
            # Paused, and resumed while its workers still left: this run works on.
            if row.status != Status.RUNNING or row.phase != self._phase or not self._work_left().undone:
                return row

    def _supervise(self) -> None:
        workers = self._workers
        while True:
            row = _control(self._database, self._run, self._news.say)
            if failures := self._hear(workers.collect()):
                raise failures[0]
            if row.status == Status.PAUSED and workers.busy:
                self._news.say(
                    f"paused by {row.paused_by}; waiting for the open batches of {counted(len(workers.busy), 'worker')}"
                )
            self._news.pieces()
            if row.status != Status.RUNNING or row.phase != self._phase:
                break
            self._news.workers(row.parallelism)
            left = self._work_left()
            self._tell_of_one_scan(left)
            # Under a hold none comes: those that are there wait.
            wanted = 0 if row.granted == 0 else granted_workers(row)
            missing = sorted(set(range(wanted)) - workers.busy)
            # Who is busy and holds nothing is still starting, and is about to claim a piece that is free now.
            for number in missing[: max(0, min(left.free, left.undone - len(workers.busy)))]:
                self._submitted_at = time.monotonic()
                mark("job")
                workers.start(
                    number,
                    f"{self._run.index}: {self._phase.value}, worker {number} of {row.parallelism}, "
                    f"{left.free} {UNITS[self._phase]}s unclaimed",
                )
            if not left.undone and not (workers.busy and self._persist(self._at_work) & workers.busy):
                # Whom Spark has no slot for, or has lost, need not come any more. A session of a worker that has ended
                # says nothing: a server doesn't notice for hours that its machine is gone.
                break
            self._watch_slots()
            workers.wait(WATCH_EVERY_S)
        self._leave(None)

    def _tell_of_one_scan(self, left: WorkLeft) -> None:
        """Others build their indexes by the same scan: then there may be nothing to claim for workers of this one."""
        if self._phase != Phase.BUILD:
            return

        def read() -> tuple[str, ...]:
            with self._database.transaction() as connection:
                return sharing.others(connection, [self._run.operation_id]).get(self._run.operation_id, ())

        names = self._database.retry(read)
        if set(names) - self._told_of:
            self._told_of |= set(names)
            self._news.say(sharing.told(names))
        if names and left.undone and not left.free and not self._workers.busy:
            # It is worked for.
            self._database.retry(lambda: start_clock(self._database, self._run))

    def _leave(self, cause: BaseException | None) -> None:
        """Hear out those who are still at work; raises the first error among them unless there is a `cause` already."""
        failures = self._hear(self._workers.leave(self._at_work, self._database.limits.outage_s), leaving=True)
        if failures and cause is None:
            raise failures[0]

    def _hear(self, ended: list[Ended], leaving: bool = False) -> list[RoirError]:
        """Report what workers did. Whatever failed is kept with the operation, so that no error hides another."""
        failures = [failure for one in ended if (failure := self._failure(one, leaving)) is not None]
        for failure in failures:
            self._news.say(str(failure))
            settle(self._database, self._run, failure, fatal=False)
        return failures

    def _failure(self, ended: Ended, leaving: bool) -> RoirError | None:
        """The error, if trying again won't help: a worker's own error, or a Spark that is of no more use."""
        for row in ended.rows:
            if row.error is None:
                # The news have told it from the committed state, when it was done.
                continue
            if row.error.startswith("fenced: "):
                self._news.say(f"worker {row.worker} stopped: a newer worker has taken its place")
            else:
                return WorkerFailed(row.error)
        if ended.error is None:
            return None
        failure = why(ended.error)
        if is_python_error(ended.error):
            return worker_failed(ended.worker, failure)
        if leaving:
            # It was to go, and what it has done is committed: how Spark ended it is for Spark's own log.
            with suppress(OSError):
                print(f"worker {ended.worker} has left: {failure}", file=sys.stderr, flush=True)  # noqa: T201
            return None
        if self._spark.is_alive and self._may_try_again():
            self._news.say(f"Spark lost worker {ended.worker}, which starts again after its last batch: {failure}")
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
        """Say when all workers are at work, or how many wait for a slot of Spark's."""
        if self._news.all_began and not self._waiting:
            self._short = 0
            return
        at_work = self._persist(self._at_work) & self._workers.busy
        self._news.at_work(len(at_work))
        waiting = 0 if self._news.all_began else self._short_of_slots(len(at_work))
        # One look alone may find a worker between its slot and its session.
        if min(waiting, self._short) > self._waiting:
            self._waiting = min(waiting, self._short)
            busy = counted(len(self._workers.busy), "worker")
            self._news.say(f"no free slot of Spark's yet for {self._waiting} of {busy}")
        self._waiting, self._short = min(self._waiting, waiting), waiting

    def _short_of_slots(self, at_work: int) -> int:
        """How many workers should have a slot by now, and have none."""
        since = time.monotonic() - self._submitted_at
        if since < SLOT_S:
            return 0
        busy, known = len(self._workers.busy), self._spark.tasks_without_slot
        waiting = busy - at_work if known is None else min(known, busy - at_work)
        return 0 if (known is None or waiting >= busy) and since < FIRST_SLOT_S else waiting

    def _persist(self, work: Callable[[], T]) -> T:
        return persist(self._database, self._run, work, self._news.say)

    def _at_work(self) -> set[int]:
        with self._database.transaction() as connection:
            return workers_at_work(connection, self._run)

    def _work_left(self) -> WorkLeft:
        def read() -> WorkLeft:
            with self._database.transaction() as connection:
                left: WorkLeft = ENGINE[self._phase].work_left(connection, self._run, self._workers.busy)
                return left

        return self._persist(read)


def _control(database: Database, run: Run, report: Callable[[str], None]) -> Any:
    def read() -> Any:
        with database.transaction() as connection:
            return read_control(connection, run)

    return persist(database, run, read, report)
