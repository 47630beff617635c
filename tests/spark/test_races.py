"""Moments at which a run could lose a wish, a worker or itself: each through a driver process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import OperationPaused
from airflow_roir.spark.session import why
from tests.spark.driving import (
    ROWS,
    Running,
    at_work,
    events,
    finish_and_check,
    lift_rate,
    one,
    prepared,
    rows_committed,
)

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(1)]


def jvm_of(driver: Running) -> psutil.Process:
    (jvm,) = [
        child
        for child in psutil.Process(driver.pid).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and Path((child.cmdline() or [""])[0]).name == "java"
    ]
    return jvm


@pytest.mark.by_hand("sweeps")
def test_workers_leave_and_come_back_as_the_parallelism_changes(database: Database) -> None:
    """Workers that left come back at once, not when the others have ended; none of their ranges waits for that.

    If no master is named, Spark has a slot for each worker, however many there are.
    """
    prepared(database, rate=1_000, parallelism=3, ranges=24)
    with Running(database, master=None) as driver:
        driver.wait_for(lambda: at_work(database) == {0, 1, 2})
        requests.change_options(database, "ix", actor="me", parallelism=1)
        driver.wait_for(lambda: at_work(database) == {0})
        requests.change_options(database, "ix", actor="me", parallelism=18)
        driver.wait_for(lambda: at_work(database) == set(range(18)))
        lift_rate(database)
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


@pytest.mark.by_hand("sweeps")
def test_sigterm_pauses_and_leaves_no_process(database: Database) -> None:
    """The signal goes to the driver alone, as from `kill` and Kubernetes."""
    operation = prepared(database, rate=2_000)
    with Running(database) as driver:
        driver.wait_for(lambda: rows_committed(database) > 1_000)
        family = psutil.Process(driver.pid).children(recursive=True)
        os.kill(driver.pid, signal.SIGTERM)
        assert driver.wait() == 3, driver.said
        assert psutil.wait_procs(family, timeout=60)[1] == []
    paused = operation_status(database, operation.operation_id)
    assert (paused.status, paused.pause_reason) == ("paused", "interrupted")
    assert 0 < paused.rows < ROWS
    assert at_work(database) == set()
    assert one(database, "SELECT heartbeat_at FROM roir.operation") is None


@pytest.mark.slow
def test_a_killed_jvm_pauses_with_the_reason_and_the_next_run_goes_on(database: Database) -> None:
    operation = prepared(database, rate=2_000)
    with Running(database) as driver:
        driver.wait_for(lambda: rows_committed(database) > 1_000)
        jvm_of(driver).kill()
        assert driver.wait() == 1, driver.said
    paused = operation_status(database, operation.operation_id)
    assert paused.status == "paused"
    assert (paused.pause_reason or "").startswith("Spark gave up on worker")
    lift_rate(database)
    with Running(database) as driver:
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


def test_a_pause_before_the_driver_is_up_is_kept_and_costs_no_spark(database: Database) -> None:
    operation = prepared(database)
    requests.pause(database, "ix", "me", "second thoughts")
    with Running(database, "spark://127.0.0.1:1", lift_pause=False) as driver:
        assert driver.wait() == 3, driver.said
    assert "paused by me: second thoughts" in driver.said
    assert operation_status(database, operation.operation_id).status == "paused"
    assert [what for what, _ in events(database)] == ["prepare", "pause"]
    with pytest.raises(OperationPaused, match="second thoughts"):
        start_run(database, "ix", "test", lift_pause=False)
    assert start_run(database, "ix", "test").operation_id == operation.operation_id


def test_a_pause_while_spark_starts_ends_the_run_before_any_batch(database: Database) -> None:
    operation = prepared(database)
    with Running(database) as driver:
        driver.wait_for(lambda: "starting Spark" in driver.said)
        requests.pause(database, "ix", "me", "tea")
        assert driver.wait() == 3, driver.said
    assert operation_status(database, operation.operation_id).rows == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "An error occurred while calling o62.collectToPython.\n: org.apache.spark.SparkException: Job aborted due "
            "to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3: "
            "ExecutorLostFailure (executor 1 exited)\nDriver stacktrace:\n\tat org.apache.spark",
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, "
            "most recent failure: Lost task 0.3: ExecutorLostFailure (executor 1 exited)",
        ),
        (
            "\n  An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
            "  File \"worker.py\", line 1, in <module>\nModuleNotFoundError: No module named 'sqlalchemy'\n",
            "ModuleNotFoundError: No module named 'sqlalchemy'",
        ),
        ("[Errno 111] Connection refused", "[Errno 111] Connection refused"),
        ("", "RuntimeError"),
    ],
)
def test_what_spark_says_in_many_lines_is_told_in_one(said: str, told: str) -> None:
    assert why(RuntimeError(said)) == told
