"""Tasks outside of a window, in the queue, and during a pause wait, rescheduled, and say so."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException

from airflow_roir.engine.control import admission, operations, requests
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from tests.airflow.test_operators import INDEX, SWITCH, TAKE_UP, WHAT, build, context, driver_code, prepare
from tests.conftest import run_sql
from tests.engine.test_allowed import OPEN, closed

pytestmark = pytest.mark.sample(1)

__all__ = ["context", "driver_code"]

SEALS = (
    TAKE_UP
    + """
from tests.engine import steps
steps.build_all(database, run)
steps.seal_all(database, run)
end_run(database, run)
"""
)


def row(shop: Any) -> Any:
    return operations.find_operation(shop.database, INDEX)


def leaves(context: dict[str, Any], operation: int, **more: Any) -> float:
    """The seconds until the task is to be looked at again."""
    before = datetime.now(timezone.utc)
    with pytest.raises(AirflowRescheduleException) as leaving:
        build(context, operation, **more)
    return (leaving.value.reschedule_date - before).total_seconds()


@pytest.mark.by_hand("sweeps")
def test_a_build_waits_for_its_window_without_spark_and_goes_on_inside(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    asked = driver_code(SEALS)
    operation = prepare(context, windows=closed(), max_duration_s="6h", priority="3")
    assert leaves(context, operation) == pytest.approx(300, abs=10)
    assert asked == []
    found = row(shop)
    assert (found.status, found.paused_by) == ("paused", "window")
    assert (found.max_duration_s, found.priority) == (21_600, 3)
    # A user takes over the pause: no window ends it.
    requests.pause(shop.database, INDEX, "ann", "month's end")
    requests.change_options(shop.database, INDEX, actor="ann", windows=OPEN)
    assert leaves(context, operation) == pytest.approx(30, abs=10)
    assert row(shop).paused_by == "ann"
    requests.resume(shop.database, INDEX, "ann")
    assert build(context, operation) == operation
    assert len(asked) == 1


@pytest.mark.by_hand("sweeps")
def test_a_window_that_closes_while_the_task_waits_elsewhere_holds_finalize(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    driver_code(SEALS)
    operation = prepare(context, windows=OPEN)
    build(context, operation)
    requests.change_options(shop.database, INDEX, actor="ann", windows=closed())
    finalize = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
    with pytest.raises(AirflowRescheduleException):
        finalize.execute(context)  # type: ignore[arg-type]
    assert row(shop).paused_by == "window"
    requests.change_options(shop.database, INDEX, actor="ann", windows="off")
    assert finalize.execute(context) == operation  # type: ignore[arg-type]
    assert row(shop).status == "completed"


@pytest.mark.by_hand("sweeps")
def test_a_switch_that_is_off_when_the_window_opens_is_told_and_obeyed(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    asked = driver_code(SEALS)
    operation = prepare(context, windows=closed())
    leaves(context, operation)
    requests.change_options(shop.database, INDEX, actor="ann", windows="off")
    context["ti"].paused = True
    leaves(context, operation)
    assert asked == []
    context["ti"].paused = False
    assert build(context, operation) == operation
    assert SWITCH not in {event.actor for event in operations.events(shop.database, INDEX)}


@pytest.mark.sample(0)
def test_a_build_waits_for_its_place(context: dict[str, Any], shop: Any, driver_code: Any, dsn: str) -> None:
    asked = driver_code(SEALS)
    operation = prepare(context)
    other = prepare(context, index="public.other", keys="price", include="")
    admission.set_most(shop.database, 1)
    with shop.database.transaction() as connection:
        assert admission.ask_for(connection, other) is None
    assert leaves(context, operation) == pytest.approx(30, abs=10)
    assert asked == []
    assert (row(shop).notice or "").startswith("queued: place 2 of 2")
    requests.pause(shop.database, "public.other", "ann")
    assert build(context, operation) == operation


@pytest.mark.sample(0)
def test_the_task_that_waits_tells_of_a_long_pause_once(
    context: dict[str, Any], shop: Any, driver_code: Any, dsn: str
) -> None:
    driver_code(SEALS)
    told: list[Any] = []

    def fails(context: Any) -> None:
        raise OSError("the network")

    operation = prepare(context, abort_after_s="2d")
    requests.pause(shop.database, INDEX, "ann")
    task = BuildIndexOperator(
        task_id="build",
        operation_id=operation,
        on_long_pause_callback=[fails, lambda context: told.append(context["long_pause"])],
        **WHAT,
    )
    task._context = context
    for _ in range(2):
        with pytest.raises(AirflowRescheduleException):
            task.execute(context)  # type: ignore[arg-type]
    assert told == []
    run_sql(dsn, "UPDATE roir.operation SET paused_at = paused_at - interval '25 h'")
    for _ in range(2):
        with pytest.raises(AirflowRescheduleException):
            task.execute(context)  # type: ignore[arg-type]
    [pause] = told
    assert (pause.index, pause.paused_by, pause.aborted) == (INDEX, "ann", False)
    assert "it is aborted in 23 h" in pause.text
    assert pause.as_dict()["text"] == pause.text
    for table, column in (("operation", "paused_at"), ("event", "at")):
        run_sql(dsn, f"UPDATE roir.{table} SET {column} = {column} - interval '25 h'")
    with pytest.raises(AirflowFailException, match=r"was aborted by .*longer than abort_after_s"):
        task.execute(context)  # type: ignore[arg-type]
    assert told[-1].aborted


def test_the_clean_up_tells_of_a_pause_that_no_task_waits_for(context: dict[str, Any], shop: Any, dsn: str) -> None:
    prepare(context)
    requests.pause(shop.database, INDEX, "ann")
    run_sql(dsn, "UPDATE roir.operation SET paused_at = paused_at - interval '2 d'")
    told: list[str] = []
    clean_up = CleanUpIndexesOperator(
        task_id="clean_up",
        postgres_conn_id="warehouse",
        on_long_pause_callback=lambda context: told.append(context["long_pause"].text),
    )
    for _ in range(2):
        clean_up.execute(context)  # type: ignore[arg-type]
    [text] = told
    assert "has been paused for 2 d by ann" in text
