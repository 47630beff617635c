"""The tasks of a unique index on a real PostgreSQL: duplicates make them wait for a resume, a census is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException, AirflowSkipException

from airflow_roir.assets import published_alias
from airflow_roir.engine.control import operations
from airflow_roir.operators.control import ResumeIndexBuildOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from tests.airflow.test_operators import INDEX, TAKE_UP, WHAT, build, context, driver_code, prepare

__all__ = ["context", "driver_code"]
pytestmark = pytest.mark.sample(2)

# As Spark's driver does it, without Spark.
SEALS = (
    TAKE_UP
    + """
from airflow_roir.engine import build, seal
from airflow_roir.engine.control.run import driving
from airflow_roir.errors import DuplicatesFound
try:
    with driving(database, run):
        list(build.PHASE.work(database, run, 0))
        build.finish(database, run)
        list(seal.PHASE.work(database, run, 0))
        seal.finish(database, run)
except DuplicatesFound as error:
    print(f"roir: {error}")
    sys.exit(3)
"""
)


def finalize(context: dict[str, Any], operation: int) -> int:
    operator = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
    return operator.execute(context)  # type: ignore[arg-type]


def resume(context: dict[str, Any]) -> None:
    ResumeIndexBuildOperator(task_id="resume", **WHAT).execute(context)  # type: ignore[arg-type]


@pytest.mark.by_hand("sweeps")
def test_tasks_wait_for_a_resume_where_rows_share_a_key(
    context: dict[str, Any], shop: Any, driver_code: Callable[[str], list[list[str]]], capsys: Any
) -> None:
    asked = driver_code(SEALS)
    operation = prepare(context, unique="True")
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    found = context["ti"].xcoms.pop("duplicates")
    assert (found["groups"], found["rows"], len(found["first"])) == (97, 20000, 20)
    assert len(found["first"][0]["rows"]) == 20
    assert operations.find_operation(shop.database, INDEX).paused_by == "duplicates"
    # The next stretch starts no driver, and tells it again.
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    assert len(asked) == 1
    assert context["ti"].xcoms["duplicates"]["groups"] == 97
    assert "paused by duplicates" in capsys.readouterr().out
    shop.run("UPDATE public.item SET kind = 'k' || id")
    resume(context)
    assert build(context, operation) == operation
    assert context["ti"].xcoms["duplicates"]["groups"] == 0
    shop.run("INSERT INTO public.item VALUES (30000, 'k5', 0)")
    with pytest.raises(AirflowRescheduleException):
        finalize(context, operation)
    assert context["ti"].xcoms["duplicates"]["rows"] == 2
    with pytest.raises(AirflowRescheduleException):
        finalize(context, operation)
    told = capsys.readouterr().out
    assert "duplicate (kind)=(k5): " in told
    assert "(id)=(30000) in public.item" in told
    shop.run("DELETE FROM public.item WHERE id = 5")
    resume(context)
    assert finalize(context, operation) == operation
    assert context["ti"].xcoms["duplicates"]["groups"] == 0


@pytest.mark.by_hand("sweeps")
def test_a_census_is_skipped_where_it_would_publish(
    context: dict[str, Any], shop: Any, driver_code: Callable[[str], list[list[str]]]
) -> None:
    driver_code(SEALS)
    operation = prepare(context, unique=True, census="true")
    assert build(context, operation) == operation
    for _ in range(2):
        # Cleared, it tells the same.
        context["ti"].xcoms.clear()
        with pytest.raises(AirflowSkipException, match="20,000 rows share 97 keys; nothing is published"):
            finalize(context, operation)
        assert context["ti"].xcoms["duplicates"]["groups"] == 97
    assert build(context, operation) == operation
    assert context["outlet_events"].get(published_alias()) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"nulls_not_distinct": True}, "give unique, too"),
        ({"census": "True"}, "give unique, too"),
        ({"on_duplicate": "stop"}, "leave on_duplicate out"),
        ({"unique": "perhaps"}, "must be true or false"),
    ],
)
def test_what_cant_be_fails_at_once(context: dict[str, Any], shop: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(AirflowFailException, match=said):
        prepare(context, **more)
    with pytest.raises(Exception, match="there is no index"):
        operations.find_operation(shop.database, INDEX)
