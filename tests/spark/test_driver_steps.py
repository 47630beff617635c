"""The driver's loop, one step at a time, without Spark: workers are started by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_roir.engine import build
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import Run, driving
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.kept_session import kept_sessions
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.work.driver import PhaseDriver
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.engine.work.worker import session_name
from airflow_roir.spark import pool, task
from airflow_roir.spark.session import why
from tests.engine import steps

SPARK = SimpleNamespace(shared_cores=2, tasks_without_slot=0)


class Workers(pool.SparkPool):
    """Stands in for the workers on Spark: `on_start` and `on_leave` are what a test lets happen then."""

    started: list[int]
    on_start: Callable[[Workers, int], None]
    on_leave: Callable[[], None]

    def __init__(self, spark: Any, database: Database, run: Run, phase: PhaseWork) -> None:
        super().__init__(spark, database, run, phase)
        self.starting: set[int] = set()

    @property
    def busy(self) -> frozenset[int]:
        return frozenset(self.starting)

    def start(self, number: int, _description: str) -> None:
        type(self).started.append(number)
        type(self).on_start(self, number)

    def do(self, number: int) -> None:
        assert [row.error for row in task.work(self.database, self.run, self.phase.name.value, number)] != []

    def collect(self) -> list[Any]:
        return []

    def wait(self, _seconds: float) -> None:
        type(self).on_wait(self)

    def on_wait(self) -> None:
        return

    def leave(self, *_: Any) -> list[Any]:
        type(self).on_leave()
        return []


@pytest.fixture
def workers(dsn: str) -> type[Workers]:
    steps.make_table(dsn, 1000)
    return type("These", (Workers,), {"started": [], "on_leave": staticmethod(lambda: None)})


def build_phase(workers: Any, database: Database, run: Run, said: list[str], spark: Any = SPARK) -> None:
    with kept_sessions(database):
        PhaseDriver(database, run, build.PHASE, workers(spark, database, run, build.PHASE), said.append).run()
    assert operations.find_operation(database, "ix").phase == "seal"


def test_a_resume_while_workers_of_the_paused_stretch_leave_works_on(database: Database, workers: Any) -> None:
    _, run = steps.begin(database, ranges=2, parallelism=1)

    def pause_first(these: Workers, number: int) -> None:
        if len(these.started) == 1:
            requests.pause(database, "ix", "me")
        else:
            these.do(number)

    def resume() -> None:
        if operations.find_operation(database, "ix").status == "paused":
            requests.resume(database, "ix", "me")

    workers.on_start, workers.on_leave = pause_first, staticmethod(resume)
    build_phase(workers, database, run, [])
    assert workers.started == [0, 0]


def test_no_more_workers_are_started_than_ranges_are_left(database: Database, workers: Any) -> None:
    _, run = steps.begin(database, ranges=2, parallelism=99)

    def begin(these: Workers, number: int) -> None:
        these.starting.add(number)

    looks: list[int] = []

    def on_wait(these: Workers) -> None:
        looks.append(len(these.starting))
        if len(looks) == 5:
            these.do(0)
            these.starting.clear()

    workers.on_start, workers.on_wait = begin, on_wait
    said: list[str] = []
    build_phase(workers, database, run, said)
    assert looks == [2] * 5
    assert any("slow: 99 workers share" in line for line in said)


def test_a_worker_between_its_slot_and_its_session_is_not_told_as_waiting(
    database: Database, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at Spark may find it there; a shortage lasts."""
    _, run = steps.begin(database, ranges=4, parallelism=2)
    monkeypatch.setattr(pool, "SLOT_S", 0.0)
    spark = SimpleNamespace(shared_cores=2)
    found = iter([1, 0, 1, 1, 1])
    said: list[str] = []

    def begin(these: Workers, number: int) -> None:
        these.starting.add(number)
        spark.tasks_without_slot = next(found)

    def on_wait(these: Workers) -> None:
        looks.append(len([line for line in said if "no free slot" in line]))
        if (known := next(found, None)) is not None:
            spark.tasks_without_slot = known
        else:
            these.do(0)
            these.starting.clear()

    looks: list[int] = []
    spark.tasks_without_slot = 0
    workers.on_start, workers.on_wait = begin, on_wait
    build_phase(workers, database, run, said, spark)
    assert [line for line in said if "no free slot" in line] == [
        "build: no free slot of Spark's yet for 1 of 2 workers"
    ]
    assert looks[:2] == [0, 0]


def test_a_session_of_a_worker_that_has_ended_holds_nobody_up(database: Database, workers: Any) -> None:
    """A pooler keeps one with its name, and so does a server whose worker's machine is gone."""
    _, run = steps.begin(database, ranges=2, parallelism=1)

    waits: list[int] = []

    def on_wait(_these: Workers) -> None:
        # The ranges that are left were read before the worker began.
        waits.append(len(waits))
        assert len(waits) < 3, "the driver waits for nobody"

    workers.on_start, workers.on_wait = Workers.do, on_wait
    with database.named(session_name(run, 0)).connect():
        build_phase(workers, database, run, [])


class OfAnEndedJava(Exception):
    """As Py4JJavaError, which asks the JVM for its text."""

    errmsg = "An error occurred while calling o1.collect.\n"

    def __str__(self) -> str:
        raise ConnectionRefusedError(111, "Connection refused")


def test_the_end_of_the_jvm_is_no_error_of_a_driver_that_is_ended(database: Database, workers: Any) -> None:
    """The signal that ends a driver ends its JVM, too: the refused connection was recorded as the operation's error."""
    _, run = steps.begin(database, ranges=2, parallelism=1)
    assert why(OfAnEndedJava()) == "OfAnEndedJava"

    def interrupt(_these: Workers, _number: int) -> None:
        raise KeyboardInterrupt

    def refuse() -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    workers.on_start, workers.on_leave = interrupt, staticmethod(refuse)
    with pytest.raises(KeyboardInterrupt), driving(database, run):
        build_phase(workers, database, run, [])
    found = progress(database, "ix")
    assert (found.status, found.pause_reason, found.errors) == ("paused", "interrupted", ())
