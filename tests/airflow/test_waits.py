"""The log and the cost of a task that waits, over stepped times: each look is a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S, MOST_S
from airflow_roir.task.waiting_operator import KEY
from tests.airflow.test_operators import INDEX, WHAT, prepare
from tests.airflow.test_operators import context as context
from tests.engine import steps

pytestmark = pytest.mark.sample(1)
HOUR_S = 3600.0
# A line of a task, as Airflow logs it.
SAID = re.compile(r"\[info +\] (.*?) +\[airflow\.task")


class Looks:
    """A task's looks, one after another: before each, the time until then passes at once."""

    def __init__(self, context: dict[str, Any], make: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
        self.context = context
        self.make = make
        self.capsys = capsys
        self.number = 0

    def look(self) -> float:
        """The seconds until the next look."""
        before = datetime.now(timezone.utc)
        with pytest.raises(AirflowRescheduleException) as leaving:
            self.make().execute(self.context)
        self.number += 1
        return (leaving.value.reschedule_date - before).total_seconds()

    def hours(self, hours: float) -> list[str]:
        """The lines of these hours of waiting."""
        self.capsys.readouterr()
        self.number, passed = 0, 0.0
        while passed < hours * HOUR_S:
            seconds = self.look()
            passed += seconds
            kept = self.context["task_state_store"].values[KEY]
            kept["since"] -= seconds
        return SAID.findall(self.capsys.readouterr().out)


def lines(
    context: dict[str, Any], capsys: pytest.CaptureFixture[str], make: Callable[[], Any]
) -> tuple[list[str], int]:
    looks = Looks(context, make, capsys)
    said = looks.hours(1.2)
    # Once, at the first look.
    once = [line for line in said if line.startswith(("Index ", "Options given"))]
    assert len(once) == len({line.partition(" ")[0] for line in once})
    return [line for line in said if line not in once], looks.number


def paused(database: Database, operation: int) -> str:
    requests.pause(database, INDEX, "ann@desk", "lunch")
    return "paused by ann@desk (lunch)"


def driven(database: Database, operation: int) -> str:
    start_run(database, INDEX, "bob@desk pid 7")
    return "driven by bob@desk pid 7"


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("make", [BuildIndexOperator, FinalizeIndexBuildOperator])
@pytest.mark.parametrize("why", [paused, driven])
def test_an_hour_of_waiting_is_two_lines_and_few_looks(
    context: dict[str, Any],
    shop: Any,
    capsys: pytest.CaptureFixture[str],
    make: Any,
    why: Callable[[Database, int], str],
) -> None:
    """Found: two lines and a process each half minute: 240 lines and 120 processes an hour."""
    operation = prepare(context)
    said = why(shop.database, operation)
    task = lambda: make(task_id="build", operation_id=operation, **WHAT)  # noqa: E731
    if why is driven:
        # The command lives all the while.
        keep = task
        beat = "UPDATE roir.operation SET heartbeat_at = clock_timestamp()"
        task = lambda: (shop.run(beat), keep())[1]  # noqa: E731
    looks = Looks(context, task, capsys)
    told = looks.hours(1.2)
    assert [line for line in told if line.startswith("Index ")] == [told[0]], "its name once"
    told = told[1:]
    assert len(told) == 2, told
    assert all(said in line for line in told)
    assert [" (waiting for 1 h" in line for line in told] == [False, True]
    assert looks.number < 30
    if why is paused:
        assert "resume with: roir resume public.item_by_kind" in told[0]
        requests.resume(shop.database, INDEX, "ann@desk")
    else:
        shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    capsys.readouterr()
    if make is BuildIndexOperator:
        # Not by `task`: the command lives no more.
        one = make(task_id="build", operation_id=operation, **WHAT)
        assert one.take_turn(one.begin_stretch(context), context["ti"]) is not None
        assert "The wait is over after 1 h" in capsys.readouterr().out
        assert KEY not in context["task_state_store"].values


def test_the_first_looks_are_soon_and_later_ones_after_minutes(
    context: dict[str, Any],
    shop: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    operation = prepare(context)
    requests.pause(shop.database, INDEX, "ann@desk", "lunch")
    looks = Looks(context, lambda: BuildIndexOperator(task_id="build", operation_id=operation, **WHAT), capsys)
    assert looks.look() == pytest.approx(LOOK_AGAIN_S, abs=5)
    for waited, seconds in ((100, LOOK_AGAIN_S), (400, 40), (900, 90), (3000, MOST_S), (90_000, MOST_S)):
        kept = context["task_state_store"].values[KEY]
        kept["since"] = datetime.now(timezone.utc).timestamp() - waited
        assert looks.look() == pytest.approx(seconds, abs=5)
        # The status and the page know when.
        with shop.database.transaction() as connection:
            row = operations.read_operation(connection, operation)
            now = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        assert (row.awaited_until - now).total_seconds() == pytest.approx(seconds, abs=5)


@pytest.mark.by_hand("sweeps")
def test_a_switch_that_is_off_costs_little_if_airflow_starts_tasks_all_the_same(
    context: dict[str, Any],
    shop: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Airflow may let the tasks of a paused DAG go on (apache/airflow #71697)."""
    operation = prepare(context)
    context["ti"].paused = True
    task = lambda: BuildIndexOperator(task_id="build", operation_id=operation, **WHAT)  # noqa: E731
    looks = Looks(context, task, capsys)
    assert looks.look() == pytest.approx(LEAVE_S, abs=5)
    told, number = lines(context, capsys, task)
    assert len(told) == 1, told
    assert number < 30


@pytest.mark.by_hand("sweeps")
def test_prepare_and_verify_that_wait_for_others_say_so_once_an_hour(
    context: dict[str, Any],
    shop: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = {"table": "item", "keys": "kind"} | WHAT
    steps.make_index(shop.database, INDEX, "item", "kind")
    steps.begin(shop.database, INDEX, None, None)
    beat = "UPDATE roir.operation SET heartbeat_at = clock_timestamp() WHERE status = 'running'"

    def prepares() -> Any:
        return PrepareIndexBuildOperator(task_id="prepare", **table)

    def verifies() -> Any:
        return VerifyIndexOperator(task_id="verify", **WHAT)

    def beside(make: Callable[[], Any]) -> Any:
        shop.run(beat)
        return make()

    for make in (prepares, verifies):
        context["task_state_store"].values.clear()
        told, number = lines(context, capsys, partial(beside, make))
        assert len(told) == 2, told
        assert all(line.startswith("Waiting: ") for line in told)
        assert number < 30
    context["ti"].paused = True
    context["task_state_store"].values.clear()
    told, _ = lines(context, capsys, prepares)
    assert len(told) == 2, told
    assert all("is paused; nothing is prepared yet" in line for line in told)
