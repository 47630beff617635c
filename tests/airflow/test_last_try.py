"""A task at its last try says so before it drives: if it is killed then, no surface promises a next try."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowRescheduleException

from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import OperationStatus, operation_status
from airflow_roir.engine.snapshot.words import state_of
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.compact import CompactIndexOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.task.dag_switch import LEAVE_S
from airflow_roir.task.fates import leaves
from tests.airflow.test_abandoned import silent
from tests.airflow.test_causes import Finalizing
from tests.airflow.test_compact_operator import age, built
from tests.airflow.test_operators import (
    INDEX,
    SEALS,
    TAKE_UP,
    UNTIL_PAUSED,
    WHAT,
    build,
    context,
    driver_code,
    prepare,
    when_driven,
)

pytestmark = pytest.mark.sample(2)

__all__ = ["context", "driver_code"]  # fixtures
# The number of the try, and Airflow's max_tries: retries is 0; six of them; after a clear.
LAST, EARLIER = [(1, 0), (7, 6)], [(1, 6), (6, 6), (8, 13)]


def now(database: Database) -> OperationStatus:
    return operation_status(database, operations.find_operation(database, INDEX).id)


@pytest.mark.parametrize("kind", ["build", "verify", "compact"])
@pytest.mark.parametrize(("number", "most"), [*LAST, *EARLIER])
def test_a_task_that_is_killed_at_its_last_try_is_not_awaited(
    context: dict[str, Any], shop: Any, driver_code: Any, kind: str, number: int, most: int
) -> None:
    """Found: the tab said that the run has ended; `roir status` promised a next try."""
    ti = context["ti"]
    ti.task_id, ti.try_number, ti.max_tries = kind, number, most
    driver_code(UNTIL_PAUSED)
    operation = prepare(context) if kind == "build" else None
    if operation is None:
        built(shop)
    if kind == "compact":
        age(shop)
    seen: list[OperationStatus] = []

    def killed() -> None:
        # As it is seen after everything of the task was killed; then a user's pause ends the test's driver.
        silent(shop, 100)
        seen.append(progress(shop.database, INDEX))
        requests.pause(shop.database, INDEX, "ann")

    when_driven(context, shop, killed)
    task: Any = {
        "build": BuildIndexOperator(task_id="build", operation_id=operation, **WHAT),
        "verify": VerifyIndexOperator(task_id="verify", **WHAT),
        "compact": CompactIndexOperator(task_id="compact", **WHAT),
    }[kind]
    with pytest.raises(AirflowRescheduleException):
        task.execute(context)
    [one] = seen
    assert one.last_try == ((number, most) in LAST)
    assert one.held_up is not None
    if one.last_try:
        assert one.expected_at is None
        assert "and its task has no try left; clear its task in run run_1 of DAG" in str(state_of(one))
        assert "its task has no try left" in one.held_up.text
    else:
        assert one.expected_at is not None
        assert "goes on by itself at the next try, within " in str(state_of(one))
    # It waits for the user, and comes back with the try that it has.
    assert not now(shop.database).last_try


@pytest.mark.parametrize(("number", "most"), [LAST[0], EARLIER[0]])
def test_a_finalize_says_it_and_a_build_that_is_done_leaves_it_to_the_finalize(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch, number: int, most: int
) -> None:
    work = Finalizing(context, shop, monkeypatch)
    context["ti"].try_number, context["ti"].max_tries = number, most
    seen: list[bool] = []
    work.act = lambda: seen.append(now(shop.database).last_try)
    work.over.set()
    with pytest.raises(AirflowRescheduleException):
        work.operator.execute(context)
    assert seen == [(number, most) in LAST]
    assert not now(shop.database).last_try


def test_between_two_tasks_the_next_one_is_awaited(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    """The finalize has tries of its own."""
    context["ti"].max_tries = 0
    driver_code(SEALS)
    build(context, prepare(context))
    one = now(shop.database)
    assert (one.status, one.last_try) == ("running", False)
    assert "no try left" not in str(state_of(one))


@pytest.mark.parametrize("supervisor", ["alive", "gone"])
def test_a_task_whose_supervisor_is_gone_does_not_come_back(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch, supervisor: str
) -> None:
    """At a shutdown a task leaves, which Airflow hears of its supervisor."""
    operation = prepare(context)
    ti = context["ti"]
    ti.max_tries, ti.states = 0, {"build": "running"}

    def gone(*_: Any) -> None:
        raise EOFError

    if supervisor == "gone":
        monkeypatch.setattr(ti, "get_dagrun_state", gone)
    task = VerifyIndexOperator(task_id="build", **WHAT)
    assert leaves(shop.database, operation, task, ti, LEAVE_S) is None
    assert now(shop.database).last_try == (supervisor == "gone")


@pytest.mark.parametrize("tries", [0, 1])
def test_after_the_drivers_death_the_silence_says_the_same(
    context: dict[str, Any], shop: Any, driver_code: Any, tries: int
) -> None:
    """Spark's driver was killed, and the task with it: nothing more could be written."""
    operation = prepare(context)
    context["ti"].max_tries = tries
    driver_code(TAKE_UP + "os._exit(9)")
    with pytest.raises(AirflowException):
        build(context, operation)
    shop.run("UPDATE roir.operation SET run_ended_at = NULL")
    silent(shop, 100)
    one = now(shop.database)
    assert (one.last_try, one.expected_at is None) == (tries == 0, tries == 0)
