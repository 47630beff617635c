"""Abandoned: what tasks write of their return, and what they and the clean-up find out of Airflow's runs."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRescheduleException, AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse

from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.snapshot.operation import ABANDONED, operation_status
from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.task.dag_switch import LEAVE_S, LOOK_AGAIN_S
from airflow_roir.task.fates import START_S, grace_s, leaves
from airflow_roir.task.roir_operator import owner_of
from tests.airflow.test_operators import INDEX, SWITCH, TAKE_UP, WHAT, build, context, driver_code, prepare
from tests.conftest import run_sql

__all__ = ["context", "driver_code"]

NEVER = float("inf")


def state(shop: Any, operation: int) -> str:
    return operation_status(shop.database, operation).status


def promise(shop: Any) -> tuple[str | None, float]:
    """The run that is waited for, and the seconds that it still has."""
    seconds = "CASE WHEN isfinite(awaited_until) THEN extract(epoch FROM awaited_until - clock_timestamp())::float8 END"
    [(by, left)] = shop.run(f"SELECT awaited_by, {seconds} FROM roir.operation ORDER BY id DESC LIMIT 1")
    return by, NEVER if left is None else left


def silent(shop: Any, seconds: float) -> None:
    at = f"clock_timestamp() - interval '{seconds} s'"
    run_sql(shop.dsn, f"UPDATE roir.operation SET heartbeat_at = {at}, awaited_until = {at}, queued_seen_at = NULL")


def cleaned(context: dict[str, Any]) -> Any:
    return CleanUpIndexesOperator(task_id="clean_up", postgres_conn_id="warehouse").execute(context)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("retries", "tries", "seconds"),
    [
        ({}, 1, 300 + 10 + 300 + 90),
        ({"retry_delay": timedelta(seconds=30)}, 1, 430),
        ({"retry_delay": timedelta(seconds=30), "retry_exponential_backoff": 2.0}, 1, 460),
        ({"retry_delay": timedelta(seconds=30), "retry_exponential_backoff": 2.0}, 3, 640),
        (
            {
                "retry_delay": timedelta(seconds=30),
                "retry_exponential_backoff": 2.0,
                "max_retry_delay": timedelta(minutes=10),
            },
            7,
            1000,
        ),
        ({"retry_delay": timedelta(days=9)}, 1, 300 + 10 + 86_400 + 90),
    ],
)
def test_a_run_may_be_silent_until_airflow_has_tried_again(retries: dict[str, Any], tries: int, seconds: int) -> None:
    """Airflow finds a dead task after `task_instance_heartbeat_timeout`, waits, and starts the next try."""
    assert grace_s(VerifyIndexOperator(task_id="verify", index="i", **retries), tries) == seconds


def test_between_two_tries_of_a_killed_worker_it_is_not_abandoned(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    """The word never flickers: the next try says that it comes before its driver does."""
    driver_code(TAKE_UP + "os._exit(9)\n")
    operation = prepare(context)
    assert promise(shop) == (owner_of(context["ti"]), NEVER)
    run_sql(shop.dsn, "UPDATE roir.operation SET started_at = started_at - interval '9 h'")
    assert state(shop, operation) == "running"
    seen: list[Any] = []
    context["ti"].meanwhile = lambda: seen.append(promise(shop))
    with pytest.raises(Exception, match="Spark's driver ended"):
        build(context, operation)
    by, seconds = next(one for one in seen if one[1] < NEVER)
    assert (by, seconds) == (owner_of(context["ti"]), pytest.approx(START_S, abs=30))
    # As if nothing at all could have been written any more.
    run_sql(shop.dsn, "UPDATE roir.operation SET status = 'running', paused_by = NULL")
    silent(shop, 600)
    assert state(shop, operation) == "running"
    silent(shop, 720)
    assert state(shop, operation) == ABANDONED


def test_a_task_that_waits_says_when_it_looks_again(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    operation = prepare(context)
    start_run(shop.database, INDEX, "ann@desk pid 4711")
    from airflow_roir.operators.build import BuildIndexOperator

    task = BuildIndexOperator(task_id="build", operation_id=operation, **WHAT)
    task._context = context
    with pytest.raises(AirflowRescheduleException):
        task.execute(context)  # type: ignore[arg-type]
    assert promise(shop) == (owner_of(context["ti"]), pytest.approx(LOOK_AGAIN_S, abs=10))
    # The command dies, and the task is late.
    run_sql(shop.dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '100 s'")
    cleaned(context)
    assert state(shop, operation) == "running"


@pytest.mark.sample(1)
@pytest.mark.parametrize("run", ["running", "success", "failed", "deleted"])
def test_a_task_that_airflow_ends_says_whether_it_comes_back(context: dict[str, Any], shop: Any, run: str) -> None:
    """A mark of the run, or a shutdown of the machine: the signal is the same."""
    operation = prepare(context)
    ti = context["ti"]
    task = VerifyIndexOperator(task_id="build", **WHAT)
    start_run(shop.database, INDEX, owner_of(ti))
    ti.runs = {} if run == "deleted" else {"run_1": run}
    leaves(shop.database, operation, task, ti, LEAVE_S)
    assert state(shop, operation) == "running", "its driver is still leaving"
    run_sql(shop.dsn, "UPDATE roir.operation SET heartbeat_at = NULL")
    assert state(shop, operation) == ("running" if run == "running" else ABANDONED)


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["success", "failed", "deleted", "alive", "switch off", "queued", "unknown"])
def test_the_clean_up_finds_out_what_became_of_a_run(
    context: dict[str, Any], shop: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: of a build whose run had ended the clean-up said nothing, and did nothing."""
    operation = prepare(context)
    ti = context["ti"]
    start_run(shop.database, INDEX, "airflow rebuild_index other", take_over=True)
    run_sql(shop.dsn, "UPDATE roir.operation SET grace_s = 700, warn_after_s = 1, abort_after_s = 3600")
    silent(shop, 60)
    ti.runs |= {"other": "running"}
    if way in ("success", "failed"):
        ti.runs["other"] = way
    elif way == "deleted":
        del ti.runs["other"]
    elif way == "queued":
        ti.states = {"build": "queued"}
    elif way == "switch off":
        ti.paused = True
    elif way == "unknown":

        def refuses(dag_id: str, run_id: str) -> str:
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 500}))

        monkeypatch.setattr(ti, "get_dagrun_state", refuses)
    warned: list[str] = []
    task = CleanUpIndexesOperator(
        task_id="clean_up",
        postgres_conn_id="warehouse",
        on_long_pause_callback=lambda context: warned.append(context["long_pause"].text),
    )
    task.execute(context)  # type: ignore[arg-type]
    found = operation_status(shop.database, operation)
    meant = {"switch off": "paused", "alive": "running", "queued": "running", "unknown": "running"}.get(way, ABANDONED)
    assert found.status == meant
    assert [ABANDONED in text for text in warned if meant == ABANDONED] == ([True] if meant == ABANDONED else [])
    if way == "switch off":
        assert found.paused_by == SWITCH
    # Cleared: its run is back before its task is.
    ti.runs["other"], ti.paused = "running", False
    cleaned(context)
    assert state(shop, operation) == ("paused" if meant == "paused" else "running")


@pytest.mark.by_hand("sweeps")
def test_a_verification_that_waits_for_an_abandoned_build_says_so(context: dict[str, Any], shop: Any) -> None:
    """It would wait for ever: the build is warned of, and ended as its options say."""
    from tests.engine import steps

    run_sql(shop.dsn, "ANALYZE public.item")
    steps.make_index(shop.database, INDEX, "public.item", "kind")
    operation = prepare(context, table="", keys="", include="")
    start_run(shop.database, INDEX, "airflow rebuild_index gone")
    silent(shop, 100)
    run_sql(shop.dsn, f"UPDATE roir.operation SET grace_s = 700, warn_after_s = 1 WHERE id = {operation}")
    task = VerifyIndexOperator(task_id="verify", **WHAT)
    with pytest.raises(AirflowRescheduleException):
        task.execute(context)  # type: ignore[arg-type]
    assert state(shop, operation) == ABANDONED
    assert operations.events(shop.database, INDEX)[-1].action == ABANDONED


def test_a_pause_of_a_user_is_no_abandonment(context: dict[str, Any], shop: Any) -> None:
    operation = prepare(context)
    requests.pause(shop.database, INDEX, "ann")
    context["ti"].runs = {}
    cleaned(context)
    assert state(shop, operation) == "paused"
    assert SimpleNamespace(**operation_status(shop.database, operation).as_dict()).paused_by == "ann"
