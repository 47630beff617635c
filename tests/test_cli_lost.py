"""The command, where the server loses in a failover what Spark's driver has committed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import psycopg2
import pytest
import typer
from sqlalchemy.exc import OperationalError

from airflow_roir.cli import execute
from airflow_roir.cli.last_line import LastLine
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import admission, operations
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from tests.engine import steps

pytestmark = pytest.mark.sample(1)


class Spark:
    """Stands in for Spark: its driver ends well each time; what it did is lost at first."""

    relay = None

    def __init__(self, database: Database, lost: int) -> None:
        self.database, self.lost, self.driven = database, lost, 0
        self.last_line = LastLine()

    def drive(self, operation_id: int, index: str, owner: str, take_over: bool) -> Any:
        run = start_run(self.database, index, owner, take_over)
        self.driven += 1
        if self.driven > self.lost:
            steps.build_all(self.database, run)
            steps.seal_all(self.database, run)
            end_run(self.database, run)
        return SimpleNamespace(is_starting=False, wait_for_order=lambda: 0)

    def release(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("lost", [1, execute.MOST_FAILOVERS])
def test_what_was_lost_is_done_again_and_never_taken_for_done(dsn: str, lost: int) -> None:
    steps.make_table(dsn)
    database = Database(dsn)
    prepare.prepare(database, IndexDefinition.parse("ix", "t", "k", None), BuildOptions(), "test")
    spark: Any = Spark(database, lost)
    if lost < execute.MOST_FAILOVERS:
        execute.run_and_print(database, "ix", spark, False, True)
        assert operations.find_operation(database, "ix").status == "completed"
        steps.assert_exact(database)
    else:
        with pytest.raises(typer.Exit) as ended:
            execute.run_and_print(database, "ix", spark, False, True)
        assert ended.value.exit_code == 1


@pytest.mark.sample(0)
def test_who_waits_for_its_turn_outlives_a_server_that_is_away(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.make_table(dsn)
    database = Database(dsn)
    prepare.prepare(database, IndexDefinition.parse("ix", "t", "k", None), BuildOptions(), "test")
    ask, away = admission.ask, [psycopg2.OperationalError("server closed the connection unexpectedly")] * 2

    def asked(*what: Any) -> Any:
        if away:
            raise OperationalError("SELECT 1", None, away.pop())
        return ask(*what)

    monkeypatch.setattr(admission, "ask", asked)
    spark: Any = Spark(database, 0)
    execute.run_and_print(database, "ix", spark, False, True)
    assert not away
    assert operations.find_operation(database, "ix").status == "completed"


def test_a_driver_s_end_is_heard_while_the_server_hangs() -> None:
    """The server owes the answer to whether the operation is paused."""
    asked, answered = threading.Event(), threading.Event()

    def hangs() -> bool:
        asked.set()
        return not answered.wait()

    def wait_for_order(seconds: float) -> int | None:
        return 1 if asked.wait(seconds) else None

    driver: Any = SimpleNamespace(is_starting=True, wait_for_order=wait_for_order)
    assert execute._follow(driver, lambda: None, hangs) == 1
    answered.set()
