"""The task that verifies, on a real PostgreSQL: it begins once, waits, continues, and logs its result."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)
from test_operators import INDEX, SWITCH, UNTIL_PAUSED, WHAT, context, driver_code, prepare, when_driven

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.generation import physical
from airflow_roir.engine.prepare import prepare as prepare_index
from airflow_roir.engine.verify import record
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.engine import steps
from tests.engine.verifying import units

pytestmark = pytest.mark.sample(1)

__all__ = ["context", "driver_code"]  # fixtures
ROWS = 20_000

# The driver's work, without Spark.
COMPARE = """
import os, sys
from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
lifecycle.drive(
    Database(os.environ["ROIR_DSN"]), "public.item_by_kind", "airflow rebuild_index run_1", take_over=True
)
"""
NEVER = "raise SystemExit(9)"


@pytest.fixture
def base(shop: Any, context: dict[str, Any]) -> str:
    """The base of a published index."""
    context["ti"].task_id = "verify"
    prepared = built(shop)
    steps.finish_all(shop.database, start_run(shop.database, INDEX, "test"))
    return physical.base(prepared.generation_id)


def built(shop: Any, table: str | None = "public.item") -> Any:
    definition = IndexDefinition.parse(INDEX, table, table and "kind", table and "price")
    return prepare_index(shop.database, definition, BuildOptions(ranges=2, segments=2), "test")


def verified(context: dict[str, Any], **more: Any) -> dict[str, Any]:
    return VerifyIndexOperator(task_id="verify", **WHAT, **more).execute(context)  # type: ignore[arg-type]


def verifications(shop: Any) -> list[tuple[int, str]]:
    """The verifications, as operations."""
    return shop.run("SELECT id, status FROM roir.operation WHERE kind = 'verify' ORDER BY id")  # type: ignore[no-any-return]


@pytest.mark.by_hand("sweeps")
def test_the_counts_are_returned(context: dict[str, Any], shop: Any, base: str, driver_code: Any) -> None:
    driver_code(COMPARE)
    counts = verified(context, parallelism="3")
    assert (counts["rows"], counts["entries"], counts["missing"], counts["complete"]) == (ROWS, ROWS, 0, True)
    # No row's values, and nothing that would make a cleared task return this once more.
    assert "first" not in counts
    seeded = {"parallelism": 3, "throttle": "off", "windows": "off", "max_duration_s": 0, "priority": 0}
    assert context["task_state_store"].values == seeded | {"in_effect": seeded}
    verified(context)
    assert [status for _, status in verifications(shop)] == ["completed", "completed"]


@pytest.mark.by_hand("sweeps")
def test_what_is_wrong_fails_the_task_and_is_named(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.run(f"DELETE FROM {base} WHERE c2 = 77")
    driver_code(COMPARE)
    with pytest.raises(AirflowFailException, match="missing 1, extra 0, different 0"):
        verified(context)
    assert "missing: kind k77, id 77" in capsys.readouterr().out
    assert context["ti"].xcoms["return_value"]["missing"] == 1
    assert verified(context, fail_on_difference=False)["missing"] == 1
    repaired = verified(context, repair="True")
    assert (repaired["missing"], repaired["repaired"]) == (1, 1)
    assert "missing: kind k77, id 77 (repaired)" in capsys.readouterr().out
    # Each of them, the one that was cleared after its failure too, was another one.
    assert len(verifications(shop)) == 3
    steps.assert_exact(shop.database, INDEX)


@pytest.mark.by_hand("sweeps")
def test_a_retry_returns_what_the_try_before_it_has_found(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any
) -> None:
    shop.run(f"DELETE FROM {base} WHERE c2 = 77")
    driver_code(COMPARE + "\nsys.exit(1)")
    with pytest.raises(AirflowException) as failure:
        verified(context, fail_on_difference=False)
    assert not isinstance(failure.value, AirflowFailException)
    # A verification that another user runs meanwhile doesn't concern the task.
    lifecycle.verify(shop.database, INDEX, VerifyOptions(repair=True))
    asked = driver_code(NEVER)
    assert verified(context, fail_on_difference=False)["missing"] == 1
    assert asked == []
    assert len(verifications(shop)) == 2


@pytest.mark.by_hand("sweeps")
def test_a_try_that_died_is_gone_on_with_at_once(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any
) -> None:
    driver_code("import sys; print('lost', file=sys.stderr); sys.exit(1)")
    with pytest.raises(AirflowException, match="lost"):
        verified(context)
    # Killed: its heart has just beaten, and one unit of several is done.
    run = start_run(shop.database, INDEX, "airflow rebuild_index run_1")
    next(iter(units(shop.database, run)))
    asked = driver_code(COMPARE)
    assert verified(context)["rows"] == ROWS
    assert "--take-over" in asked[0]
    assert len(verifications(shop)) == 1


@pytest.mark.by_hand("sweeps")
def test_the_switch_pauses_and_resumes_with_another_parallelism(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any
) -> None:
    context["ti"].paused = True
    with pytest.raises(AirflowRescheduleException):
        verified(context)
    assert verifications(shop) == []

    context["ti"].paused = False
    driver_code(UNTIL_PAUSED)

    def switch_off() -> None:
        context["ti"].paused = True

    when_driven(context, shop, switch_off)
    with pytest.raises(AirflowRescheduleException):
        verified(context, parallelism=2)
    paused = operations.find_operation(shop.database, INDEX)
    assert (paused.status, paused.paused_by, paused.phase) == ("paused", SWITCH, "sum")

    context["ti"].paused = False
    context["task_state_store"].values["parallelism"] = "5"
    driver_code(COMPARE)
    assert verified(context, parallelism=2)["rows"] == ROWS
    assert operations.find_operation(shop.database, INDEX).parallelism == 5
    assert [status for _, status in verifications(shop)] == ["completed"]


@pytest.mark.by_hand("sweeps")
def test_an_unfinished_build_is_waited_for(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rebuild = built(shop, table=None)
    asked = driver_code(COMPARE)
    with pytest.raises(AirflowRescheduleException):
        verified(context)
    said = f"Waiting: index {INDEX}: operation {rebuild.operation_id} (rebuild) builds the index and is running"
    assert said in capsys.readouterr().out
    assert (asked, verifications(shop)) == ([], [])
    steps.finish_all(shop.database, start_run(shop.database, INDEX, "test"))
    assert verified(context)["rows"] == ROWS


@pytest.mark.by_hand("sweeps")
def test_an_unfinished_verification_is_adopted_when_nobody_drives_it(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = record.begin(shop.database, INDEX, VerifyOptions(repair=True), "ann@desk")
    run = start_run(shop.database, INDEX, "roir of ann@desk")
    asked = driver_code(COMPARE)
    with pytest.raises(AirflowRescheduleException):
        verified(context)
    assert asked == []
    end_run(shop.database, run)
    verified(context)
    assert (
        f"Continuing unfinished verification {begun.operation_id} with the options that it has"
        in capsys.readouterr().out
    )
    assert verifications(shop) == [(begun.operation_id, "completed")]


@pytest.mark.by_hand("sweeps")
def test_one_that_was_aborted_fails_the_task_and_is_forgotten(
    context: dict[str, Any], shop: Any, base: str, driver_code: Any
) -> None:
    driver_code("raise SystemExit(1)")
    with pytest.raises(AirflowException):
        verified(context)
    abort.abort(shop.database, INDEX, "ann@desk")
    with pytest.raises(AirflowFailException, match="was aborted"):
        verified(context)
    driver_code(COMPARE)
    assert verified(context)["rows"] == ROWS
    assert [status for _, status in verifications(shop)] == ["aborted", "completed"]


@pytest.mark.parametrize("more", [{"sample": "0"}, {"sample": "much"}, {"slices": "-1"}, {"mode": "after"}])
def test_bad_input_fails_at_once(context: dict[str, Any], shop: Any, base: str, more: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException):
        verified(context, **more)
    assert verifications(shop) == []


@pytest.mark.by_hand("sweeps")
def test_before_a_build_there_may_be_nothing_to_verify(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    asked = driver_code(NEVER)
    with pytest.raises(AirflowFailException, match="there is no index"):
        verified(context)
    for mode in ("none", "before"):
        with pytest.raises(AirflowSkipException):
            verified(context, mode=mode)
    built(shop)
    # The build continues it; to wait for it would be to wait for the tasks that follow.
    with pytest.raises(AirflowSkipException, match="the build continues an unfinished one"):
        verified(context, mode="before")
    steps.finish_all(shop.database, start_run(shop.database, INDEX, "test"))
    assert asked == []
    driver_code(COMPARE)
    assert verified(context, mode="before")["mode"] == "before"


def test_prepare_waits_for_an_unfinished_verification(context: dict[str, Any], shop: Any, base: str) -> None:
    record.begin(shop.database, INDEX, VerifyOptions(), "ann@desk")
    with pytest.raises(AirflowRescheduleException):
        prepare(context)
    abort.abort(shop.database, INDEX, "ann@desk")
    assert prepare(context) == operations.find_operation(shop.database, INDEX).id


@pytest.mark.by_hand("sweeps")
def test_a_build_that_differs_fails_without_a_retry_until_it_is_cleared(
    context: dict[str, Any], shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = built(shop)
    run = start_run(shop.database, INDEX, "test")
    steps.build_all(shop.database, run)
    steps.seal_all(shop.database, run)
    end_run(shop.database, run)
    base = physical.base(prepared.generation_id)
    shop.run(f"UPDATE {base} SET c3 = -1 WHERE c2 = 77")
    task = FinalizeIndexBuildOperator(task_id="finalize", operation_id=prepared.operation_id, **WHAT)
    with pytest.raises(AirflowFailException, match="nothing was published"):
        task.execute(context)  # type: ignore[arg-type]
    assert "different: kind k77, id 77" in capsys.readouterr().out
    found = operations.find_operation(shop.database, INDEX)
    assert (found.status, found.phase) == ("paused", "publish")
    assert "nothing was published" in found.pause_reason
    shop.run(f"UPDATE {base} SET c3 = 77 WHERE c2 = 77")
    assert task.execute(context) == prepared.operation_id  # type: ignore[arg-type]
    # A try that is made once more finds it published, although a verification has begun since.
    record.begin(shop.database, INDEX, VerifyOptions(), "ann@desk")
    assert task.execute(context) == prepared.operation_id  # type: ignore[arg-type]
