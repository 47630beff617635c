"""Why Airflow has ended a task, as the pause of its operation says; and why a finalize found nothing to publish."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.snapshot.words import way_on
from airflow_roir.errors import OperationRunning
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from tests.airflow.test_operators import INDEX, WHAT, prepare
from tests.airflow.test_operators import context as context
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

CLEAR = (
    "clear its task in run run_1 of DAG rebuild_index with those that follow it (Downstream), if that run still "
    "exists, or trigger rebuild_index for this index: it continues; or: roir resume public.item_by_kind"
)


class Finalizing:
    """A finalize task at work, which hangs until `act` has ended it."""

    def __init__(self, context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context, self.shop = context, shop
        operation = prepare(context)
        run = start_run(shop.database, INDEX, "test", take_over=True)
        steps.build_all(shop.database, run)
        steps.seal_all(shop.database, run)
        end_run(shop.database, run)
        context["ti"].task_id = "finalize"
        self.operator = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
        self.begun, self.over = threading.Event(), threading.Event()
        self.act: Callable[[], None] = lambda: None

        def hang(*_: Any) -> None:
            self.begun.set()
            self.act()
            self.over.wait()
            raise OperationRunning("the test is over")

        monkeypatch.setattr("airflow_roir.engine.lifecycle.run_phases", hang)

    def ends(self, error: type[BaseException]) -> tuple[str, str]:
        """The reason of the pause, and the way on, once the task has ended by that error."""
        try:
            with pytest.raises(error):
                self.operator.execute(self.context)
            row = operations.find_operation(self.shop.database, INDEX)
            assert (row.status, row.paused_by) == ("paused", row.owner)
            return row.pause_reason, way_on(operation_status(self.shop.database, row.id))
        finally:
            self.over.set()


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("failed", "its task finalize was marked as failed"),
        ("success", "its task finalize was marked as success"),
        ("skipped", "its run has reached its dagrun_timeout, or was marked"),
        ("restarting", "its task finalize was cleared"),
        ("running", "interrupted"),
    ],
)
def test_a_mark_is_told_with_the_way_on(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, state: str, cause: str
) -> None:
    """Found: each was `interrupted`, and the next try was awaited; the log promised that the task continues."""
    work = Finalizing(context, shop, monkeypatch)
    context["ti"].states = {"finalize": state}
    work.act = work.operator.on_kill
    comes_back = state in ("restarting", "running")
    # Airflow's server refuses what a marked task says of its end: a reschedule would be a second, red error.
    reason, way = work.ends(AirflowRescheduleException if comes_back else AirflowSkipException)
    assert reason == cause
    [line] = [one for one in "".join(capsys.readouterr()).splitlines() if "Airflow has ended this task" in one]
    assert (cause if cause != "interrupted" else "a shutdown, a mark, a clear, or the end of its time") in line
    assert "Everything committed stays" in line
    who = {"restarting": "its next try continues", "running": "this task looks again in 16 s, and continues"}
    assert [one for one in who.values() if one in line] == ([who[state]] if comes_back else [])
    assert ("roir resume public.item_by_kind" in line) == (state != "restarting")
    if state in ("restarting", "running"):
        assert way.startswith("goes on by itself at the next try, within ")
    else:
        assert way == CLEAR


@pytest.mark.parametrize("tries_left", [0, 1])
def test_a_timeout_is_told_with_the_way_on(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch, tries_left: int
) -> None:
    work = Finalizing(context, shop, monkeypatch)
    context["ti"].max_tries = tries_left

    def timed_out(*_: Any, **_more: Any) -> None:
        work.begun.wait()
        raise AirflowTaskTimeout

    monkeypatch.setattr("airflow_roir.task.operation_task.follow", timed_out)
    reason, way = work.ends(AirflowTaskTimeout)
    assert reason == "its task finalize has reached its execution_timeout"
    assert way == CLEAR if tries_left == 0 else way.startswith("goes on by itself at the next try, within ")


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "its build task was marked as success before it had ended"),
        (7, "the server has lost its last commits, by a failover or a restore"),
    ],
)
def test_a_build_that_has_not_ended_was_marked_or_lost(
    context: dict[str, Any], shop: Any, returned: int | None, why: str
) -> None:
    """Found: the message named both, since a mark isn't seen in the operation."""
    operation = prepare(context)
    context["ti"].xcom_pull = lambda task_ids: returned if task_ids == "build" else operation
    with DAG("rebuild_index"):
        build = BuildIndexOperator(task_id="build", operation_id=operation, **WHAT)
        last = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
        build >> last
    with pytest.raises(AirflowFailException) as failure:
        last.execute(context)  # type: ignore[arg-type]
    assert f"nothing is published: {why}. Clear the build task" in str(failure.value)
