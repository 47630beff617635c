"""The lines about a server that is out of reach: one at the beginning, one each minute, one at the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import psycopg2
from sqlalchemy.exc import OperationalError

from airflow_roir.engine.control.shortage import Shortage
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.patience import OutageLog, Patience
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.task.spark_task import SparkDrivingOperator

REFUSED = OperationalError(None, None, psycopg2.OperationalError("connection refused\n\tIs the server running?\n"))


def test_an_outage_is_said_at_its_beginning_each_minute_and_at_its_end() -> None:
    """Found: the task's log had two lines a second, and a command said nothing."""
    said: list[str] = []
    now = [0.0]
    log = OutageLog(said.append, lambda: now[0])
    log.away("one lost session")
    log.back()
    assert said == []
    for second in range(130):
        now[0] = float(second)
        log.away("connection refused")
    log.back()
    log.back()
    assert said == [
        "can't reach PostgreSQL: connection refused; waiting for it",
        "can't reach PostgreSQL since 1 min 1 s: connection refused",
        "can't reach PostgreSQL since 2 min 1 s: connection refused",
        "PostgreSQL is back after 2 min 9 s",
    ]


def test_a_run_says_an_outage() -> None:
    said: list[str] = []
    # Without a database: in an outage nothing is written.
    told = Shortage(cast(Database, None), cast(Any, None), said.append)
    patience = Patience(DEFAULT, lambda seconds: None, told)
    for _ in range(5):
        assert patience.waits(REFUSED)
    patience.renew()
    patience.renew()
    assert said == ["can't reach PostgreSQL: connection refused; waiting for it", "PostgreSQL is back after 0 s"]


def test_a_task_leaves_an_outage_to_a_driver_that_is_up() -> None:
    said: list[str] = []

    def fail() -> None:
        raise REFUSED

    task: Any = SimpleNamespace(
        _driver=SimpleNamespace(is_starting=False), _settled=None, outage=OutageLog(said.append)
    )
    turn: Any = SparkDrivingOperator._turn
    for _ in range(5):
        turn(task, None, SimpleNamespace(found=lambda: None), SimpleNamespace(turn=fail), 1, "me")
    assert said == []
