"""A phase's workers on Spark: each is one Spark job with one task, so that workers come, leave and fail one by one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.run import Run, show_spark_ui
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.patience import BackOff
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.engine.work.phase_work import PhaseWork, WorkerMetrics
from airflow_roir.engine.work.pool import LOOK_EVERY_S, Ended, Pool
from airflow_roir.engine.work.worker import worker_failed
from airflow_roir.errors import SparkFailed
from airflow_roir.quantity import counted, duration
from airflow_roir.spark.driver_process import SPARK_IS_UP
from airflow_roir.spark.session import Session, is_python_error, why
from airflow_roir.spark.start_timings import mark
from airflow_roir.spark.task import error_of, worker_job

if TYPE_CHECKING:
    from airflow_roir.spark.start import SparkStart

# A worker without a session for this long: Spark never started it, or has lost it.
LOST_AFTER_S = 3.0
# Spark has this long to say that an interrupted job has ended.
INTERRUPTED_S = 15.0
# Spark gives up on a worker after four lost tries in a row, which a dying node or a full memory can cause. A pool then
# submits lost workers again, LOST_WORKERS times; after LOST_WINDOW_S without a loss the count begins again.
LOST_WORKERS = 5
LOST_WINDOW_S = 600.0
# If other workers have their slots, a worker gets its slot this soon after it was submitted. If none has, or that isn't
# known, Spark may just be slow to start: then the longer time counts.
SLOT_S = 10.0
FIRST_SLOT_S = 30.0


class SparkPool(Pool):
    """The workers of one phase of a run that are on Spark now."""

    def __init__(self, spark: Session, database: Database, run: Run, phase: PhaseWork) -> None:
        super().__init__(database, run, phase)
        self._spark = spark
        self.shared_cores = spark.shared_cores
        self._lost = 0
        self._lost_at = 0.0
        self._patience = BackOff(database.limits.outage_s, self.wait)
        self._submitted_at = 0.0
        # The numbers of workers without a slot: those that the log has reported, and those of the last look.
        self._waiting = self._short = 0

    def start(self, number: int, description: str) -> None:
        """Submits a worker to Spark, which starts it as soon as it has a free slot."""
        self._submitted_at = time.monotonic()
        mark("job")
        super().start(number, description)

    def work(self, number: int, description: str) -> list[WorkerMetrics]:
        """Runs a worker on Spark, to its end."""
        job = worker_job(self.database, self.run, self.phase.name.value)
        return self._spark.run(number, self._tag(number), description, job)

    def _tag(self, number: int) -> str:
        run, phase = self.run, self.phase.name.value
        return f"roir {run.index} operation {run.operation_id}.{run.epoch} {phase} worker {number}"

    def leave(self, at_work: Callable[[], Collection[int]], patience_s: float) -> list[Ended]:
        """As in any pool; but a worker without a slot, or one that Spark has lost, is interrupted.

        After patience_s seconds without an answer of the database all jobs are. at_work: returns the numbers of the
        workers that have a session in the server; raises the database's errors.
        """
        ended = self.collect()
        seen_at = dict.fromkeys(self._jobs, time.monotonic())
        asked_at = time.monotonic()
        while self._jobs:
            self.wait(LOOK_EVERY_S)
            ended += self.collect()
            now = time.monotonic()
            try:
                seen_at |= dict.fromkeys(at_work(), now)
                asked_at = now
            except DBAPIError:
                # The server is away, and so are its sessions; a worker that had one notices that itself.
                if now - asked_at < patience_s:
                    continue
            lost = [number for number in self._jobs if now - seen_at[number] >= LOST_AFTER_S]
            ended += self._interrupt(lost)
        return ended

    def _interrupt(self, numbers: list[int]) -> list[Ended]:
        # A Spark that is gone says nothing more, and through Connect each question to it takes half a minute.
        if numbers and self._spark.is_alive:
            for number in numbers:
                self._spark.interrupt(self._tag(number))
            deadline = time.monotonic() + INTERRUPTED_S
            while any(not self._jobs[number].done() for number in numbers) and time.monotonic() < deadline:
                self.wait(LOOK_EVERY_S)
        jobs = {number: self._jobs.pop(number) for number in numbers}
        # An error of the others only means that they were interrupted; their work is in the database.
        return [Ended(number, job.result(), None) for number, job in jobs.items() if job.done() and not job.exception()]

    def failure(self, ended: Ended, log: PhaseLog, leaving: bool) -> BaseException | None:
        """As in any pool. A worker that Spark lost starts again; the loss of Spark itself ends the phase."""
        said = error_of(ended.rows)
        if said is not None or ended.error is None:
            return super().failure(Ended(ended.worker, ended.rows, said), log, leaving)
        failure = why(ended.error)
        if is_python_error(ended.error):
            return worker_failed(ended.worker, failure)
        if leaving:
            # It had to leave, and its work is committed: the way it ended is only for Spark's own log.
            with suppress(OSError):
                print(f"worker {ended.worker} has left: {failure}", file=sys.stderr, flush=True)  # noqa: T201
            return None
        if self._spark.is_alive and self._may_try_again():
            log.say(f"Spark lost worker {ended.worker}, which starts again after its last batch: {failure}")
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

    def look(self, log: PhaseLog, at_work: Callable[[], Collection[int]]) -> None:
        """Says when all workers are at work, or how many wait for a slot of Spark's."""
        if log.all_began and not self._waiting:
            self._short = 0
            return
        busy = len(set(at_work()) & self.busy)
        log.at_work(busy)
        waiting = 0 if log.all_began else self._short_of_slots(busy)
        # One look alone may find a worker between its slot and its session.
        if min(waiting, self._short) > self._waiting:
            self._waiting = min(waiting, self._short)
            log.say(f"no free slot of Spark's yet for {self._waiting} of {counted(len(self.busy), 'worker')}")
        self._waiting, self._short = min(self._waiting, waiting), waiting

    def _short_of_slots(self, at_work: int) -> int:
        """The number of workers that should have a slot by now but have none."""
        since = time.monotonic() - self._submitted_at
        if since < SLOT_S:
            return 0
        busy, known = len(self.busy), self._spark.tasks_without_slot
        waiting = busy - at_work if known is None else min(known, busy - at_work)
        return 0 if (known is None or waiting >= busy) and since < FIRST_SLOT_S else waiting


class SparkPools:
    """Workers on Spark, as `engine.pool.Pools`. start: of the session; log: the file of Spark's log, for messages."""

    def __init__(self, start: SparkStart, log: Path | None = None) -> None:
        self._start = start
        self._log = log

    @contextmanager
    def open(
        self, database: Database, run: Run, report: Callable[[str], None]
    ) -> Iterator[Callable[[PhaseWork], Pool]]:
        """Waits until Spark is up. Its pages are shown with the operation meanwhile. Raises SparkFailed."""
        mark("begun")
        report(f"operation {run.operation_id}: starting Spark ({self._start.where})")
        if self._log is not None:
            report(f"Spark's own log: {self._log}")
        session = self._start.session(f"roir {run.index} operation {run.operation_id}")
        report(f"{SPARK_IS_UP}, {duration(time.monotonic() - self._start.begun)} after its start")
        if session.pages is not None:
            report(f"Spark's pages: {session.pages}")
        persist(database, run, lambda: show_spark_ui(database, run, session.pages), report)
        try:
            yield lambda phase: SparkPool(session, database, run, phase)
            mark("done")
        finally:
            # The pages go with the driver. If the server can't be reached, the next run shows its own.
            with suppress(DBAPIError):
                show_spark_ui(database, run, None)
