"""A phase's workers on Spark: each is one Spark job with one task, so that workers come, leave and fail one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database
from airflow_roir.engine.run import Run
from airflow_roir.operation import Phase
from airflow_roir.spark.session import Session
from airflow_roir.spark.task import worker_job
from airflow_roir.spark.worker_metrics import WorkerMetrics

# How often a worker that should be about to leave is looked for in the server.
LOOK_EVERY_S = 1.0
# So long without a session of its own: Spark never started it, or has lost it.
LOST_AFTER_S = 3.0
# Spark has this long to say that an interrupted job has ended.
INTERRUPTED_S = 15.0


@dataclass(frozen=True)
class Ended:
    """A worker's job that has ended. rows: its metrics; error: what Spark raised, None if the worker returned."""

    worker: int
    rows: list[WorkerMetrics]
    error: BaseException | None


class Workers:
    """The workers of one phase of a run that are on Spark now."""

    def __init__(self, spark: Session, database: Database, run: Run, phase: Phase) -> None:
        self._spark = spark
        self._database = database
        self._run = run
        self._phase = phase
        self._jobs: dict[int, Future[list[WorkerMetrics]]] = {}
        self._woken = threading.Event()

    @property
    def busy(self) -> frozenset[int]:
        """The numbers of the workers whose jobs haven't been collected yet."""
        return frozenset(self._jobs)

    def start(self, number: int, description: str) -> None:
        """Submit a worker to Spark, which starts it as soon as it has a free slot."""
        job: Future[list[WorkerMetrics]] = Future()
        job.add_done_callback(lambda _: self._woken.set())
        self._jobs[number] = job
        # A daemon thread: one that Spark never answers must not keep the process.
        threading.Thread(
            target=self._submit, args=(job, number, description), name=f"roir-worker-{number}", daemon=True
        ).start()

    def _submit(self, job: Future[list[WorkerMetrics]], number: int, description: str) -> None:
        try:
            work = worker_job(self._database, self._run, self._phase.value)
            job.set_result(self._spark.run(number, self._tag(number), description, work))
        except BaseException as error:  # handed on whole, in `Ended`
            job.set_exception(error)

    def _tag(self, number: int) -> str:
        run = self._run
        return f"roir {run.index} operation {run.operation_id}.{run.epoch} {self._phase.value} worker {number}"

    def wait(self, seconds: float) -> None:
        """Wait until a worker ends, at most this many seconds."""
        self._woken.wait(seconds)
        self._woken.clear()

    def collect(self) -> list[Ended]:
        """Take the workers that have ended since the last time."""
        done = [number for number, job in self._jobs.items() if job.done()]
        ended = []
        for number in done:
            job = self._jobs.pop(number)
            error = job.exception()
            ended.append(Ended(number, [] if error else job.result(), error))
        return ended

    def leave(self, at_work: Callable[[], Collection[int]], patience_s: float) -> list[Ended]:
        """Wait until all workers have left at their batch boundary, which they do once the operation isn't running.

        Whom Spark never gave a slot, or lost, would be waited for without end: such jobs are interrupted. After
        patience_s seconds without an answer of the database all jobs are.
        at_work: the numbers of the workers that have a session in the server; raises whatever the database raises.
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
                # The server is away, and so are its sessions; whoever had one notices by itself.
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
        # What the others raise now is that they were interrupted; what they did is in the server.
        return [Ended(number, job.result(), None) for number, job in jobs.items() if job.done() and not job.exception()]
