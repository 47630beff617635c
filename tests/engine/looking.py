"""A driver's looks, counted and interrupted: its workers wait for the looks, and its sessions are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.work import worker
from airflow_roir.engine.work.phase_work import PhaseWork, WorkerMetrics
from airflow_roir.engine.work.pool import Pool


class Sessions:
    """The sessions of a database and of its workers. opened: how many there were; open: the pids of those now."""

    def __init__(self, database: Database) -> None:
        self.opened = 0
        self._open: dict[int, int] = {}
        event.listen(database.engine, "connect", self._connect)
        event.listen(database.engine, "close", self._close)

    def _connect(self, connection: Any, _record: Any) -> None:
        self.opened += 1
        self._open[id(connection)] = connection.info.backend_pid

    def _close(self, connection: Any, _record: Any) -> None:
        self._open.pop(id(connection), None)

    @property
    def open(self) -> list[int]:
        return list(self._open.values())


class LookedPool(Pool):
    """Its workers work in the driver's thread, before look number `looks`. between: called between looks."""

    def __init__(self, looks: int, between: Callable[[PhaseWork], object], *of: Any) -> None:
        super().__init__(*of)
        self._looks = looks
        self._between = between

    def start(self, number: int, description: str) -> None:
        self._jobs[number] = Future()

    def work(self, number: int, description: str) -> list[WorkerMetrics]:
        named = self.database.named(worker.session_name(self.run, number))
        return list(worker.work(named, self.run, self.phase, number))

    def wait(self, seconds: float) -> None:
        self._looks -= 1
        for number, job in self._jobs.items():
            if self._looks <= 0 and not job.done():
                job.set_result(self.work(number, ""))
        self._between(self.phase)


class Looked:
    """Pools whose workers let the driver look `looks` times in each phase. between: called between two looks."""

    def __init__(self, looks: int, between: Callable[[PhaseWork], object] = lambda phase: None) -> None:
        self.looks = looks
        self.between = between

    @contextmanager
    def open(
        self, database: Database, run: Run, report: Callable[[str], None]
    ) -> Iterator[Callable[[PhaseWork], Pool]]:
        yield lambda phase: LookedPool(self.looks, self.between, database, run, phase)
