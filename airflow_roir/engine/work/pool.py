"""A pool: the workers of one phase of a run that are at work now, and the threads or tasks that run them.

`driver.py` starts and follows them. Here they are threads of this process; those of `spark.pool` are on Spark.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.work import worker
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.engine.work.phase_work import PhaseWork, WorkerMetrics
from airflow_roir.errors import Fenced, OperationPaused

# While workers are leaving, how often the server is asked which are still at work.
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class Ended:
    """A worker that has ended. rows: its metrics; error: the error that ended it, None if it returned."""

    worker: int
    rows: list[WorkerMetrics]
    error: BaseException | None


class Pool(ABC):
    """The workers of one phase of a run. A subclass reports its own trouble by `failure` and `look`."""

    # The cores of the one machine that all workers share, if more workers than that slow each other down.
    shared_cores: int | None = None

    def __init__(self, database: Database, run: Run, phase: PhaseWork) -> None:
        self.database = database
        self.run = run
        self.phase = phase
        self._jobs: dict[int, Future[list[WorkerMetrics]]] = {}
        self._woken = threading.Event()

    @property
    def busy(self) -> frozenset[int]:
        """The numbers of the workers that haven't been collected yet."""
        return frozenset(self._jobs)

    def start(self, number: int, description: str) -> None:
        """Start a worker, which works as soon as it has a place. description: for users who look at the pool."""
        job: Future[list[WorkerMetrics]] = Future()
        job.add_done_callback(lambda _: self._woken.set())
        self._jobs[number] = job
        # A daemon thread: one that never gets an answer must not keep the process alive.
        threading.Thread(
            target=self._submit, args=(job, number, description), name=f"roir-worker-{number}", daemon=True
        ).start()

    def _submit(self, job: Future[list[WorkerMetrics]], number: int, description: str) -> None:
        try:
            job.set_result(self.work(number, description))
        except BaseException as error:  # handed on whole, in `Ended`
            job.set_exception(error)

    @abstractmethod
    def work(self, number: int, description: str) -> list[WorkerMetrics]:
        """Run a worker to its end, in the calling thread."""

    def wait(self, seconds: float) -> None:
        """Wait until a worker ends, at most this many seconds."""
        self._woken.wait(seconds)
        self._woken.clear()

    def collect(self) -> list[Ended]:
        """Take the workers that have ended since the last time."""
        ended = []
        for number in [number for number, job in self._jobs.items() if job.done()]:
            job = self._jobs.pop(number)
            error = job.exception()
            ended.append(Ended(number, [] if error else job.result(), error))
        return ended

    def leave(self, at_work: Callable[[], Collection[int]], patience_s: float) -> list[Ended]:
        """Wait until all workers have left, which they do at their next step once the operation isn't running.

        at_work, patience_s: for a pool that can lose workers, so that it doesn't wait for them without end.
        """
        ended = self.collect()
        while self._jobs:
            self.wait(LOOK_EVERY_S)
            ended += self.collect()
        return ended

    def look(self, log: PhaseLog, at_work: Callable[[], Collection[int]]) -> None:
        """Called at each look of the driver: logs how many workers are at work. at_work: those with a session."""
        if not log.all_began:
            log.at_work(len(set(at_work()) & self.busy))

    def failure(self, ended: Ended, log: PhaseLog, leaving: bool) -> BaseException | None:
        """The error that ends the phase; None if the worker has ended normally, or may be started again.

        leaving: all workers must leave. The log says why a worker may be started again.
        """
        if isinstance(ended.error, Fenced):
            log.say(f"worker {ended.worker} stopped: {log.why_fenced()}")
            return None
        return None if isinstance(ended.error, OperationPaused) else ended.error


class Pools(Protocol):
    """The place where the workers of an operation run."""

    def open(
        self, database: Database, run: Run, report: Callable[[str], None]
    ) -> AbstractContextManager[Callable[[PhaseWork], Pool]]:
        """Open what the workers need, for the block. Yields a function that makes a phase's pool."""


class ThreadPool(Pool):
    """Workers that are threads of this process: PostgreSQL does the work, they wait for it."""

    def work(self, number: int, description: str) -> list[WorkerMetrics]:
        """Run a worker to its end."""
        named = self.database.named(worker.session_name(self.run, number))
        return list(worker.work(named, self.run, self.phase, number))


class Threads:
    """Workers in this process, as `Pools`."""

    @contextmanager
    def open(
        self, database: Database, run: Run, report: Callable[[str], None]
    ) -> Iterator[Callable[[PhaseWork], Pool]]:
        """Opens nothing."""
        yield lambda phase: ThreadPool(database, run, phase)
