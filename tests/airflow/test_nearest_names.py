"""Operators refuse a name with the nearest that exists, and name all that is wrong with a form in one error."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.operators.compact import CompactIndexOperator
from airflow_roir.operators.control import (
    AbortIndexBuildOperator,
    ChangeIndexBuildOperator,
    PauseIndexBuildOperator,
    ResumeIndexBuildOperator,
    RevertIndexOperator,
)
from airflow_roir.operators.partitions import AttachPartitionOperator, DetachPartitionOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from tests.airflow.test_dags import bag, rendered
from tests.airflow.test_operators import INDEX, context
from tests.engine import steps

__all__ = ["bag", "context"]
pytestmark = pytest.mark.sample(2, 2)

NEW = {"index": "public.new", "table": "public.item", "keys": "kind"}
WRONG_INDEX = INDEX[:-1]
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "prepare, table": (PrepareIndexBuildOperator, {**NEW, "table": "public.itme"}, "public.item"),
    "prepare, table in other case": (PrepareIndexBuildOperator, {**NEW, "table": '"Item"'}, "public.item"),
    "prepare, keys": (PrepareIndexBuildOperator, {**NEW, "keys": '"Kind"'}, "kind"),
    "prepare, include": (PrepareIndexBuildOperator, {**NEW, "include": "prise"}, "price"),
    "prepare, schema": (PrepareIndexBuildOperator, {**NEW, "index": "publik.new"}, "public"),
    **{
        one.__name__: (one, {"index": WRONG_INDEX}, INDEX)
        for one in (
            PrepareIndexBuildOperator,
            VerifyIndexOperator,
            CompactIndexOperator,
            ChangeIndexBuildOperator,
            ResumeIndexBuildOperator,
            PauseIndexBuildOperator,
            AbortIndexBuildOperator,
            RevertIndexOperator,
        )
    },
    "attach": (
        AttachPartitionOperator,
        {"table": "public.itm", "partition": "public.item", "bounds": "DEFAULT"},
        "public.item",
    ),
    "detach": (DetachPartitionOperator, {"partition": "itemm"}, "public.item"),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_names_the_nearest_name(context: dict[str, Any], shop: Any, name: str) -> None:
    operator, given, meant = CASES[name]
    steps.make_index(shop.database, INDEX, "public.item", "kind")
    if operator is ChangeIndexBuildOperator:
        given = {**given, "priority": 1}
    with pytest.raises(AirflowFailException) as refused:
        operator(task_id="task", postgres_conn_id="warehouse", **given).execute(context)
    assert f"Did you mean {meant}?" in str(refused.value)


@pytest.mark.parametrize("verify", ["after", "before"])
def test_prepare_names_all_that_is_wrong_with_a_form(
    bag: DagBag, context: dict[str, Any], shop: Any, verify: str
) -> None:
    """Found: the task that compares before a rebuild, which comes first, named its own wrong options alone, also if
    there was nothing to compare."""
    form = {
        "index": "publik.new",
        "table": "public.item",
        "keys": "kindd",
        "include": "id",
        "windows": "0 22 * * * for 8h in Europe/Berln",
        "warn_after_s": "400d",
        "on_duplicate": "stop",
        "spark": "sparky",
        "verify": verify,
        "postgres_conn_id": "warehouse",
    }
    dag = bag.dags["rebuild_index"]
    with pytest.raises(AirflowSkipException):
        rendered(dag, "verify_before", **form).execute(context)
    with pytest.raises(AirflowFailException) as refused:
        rendered(dag, "prepare", **form).execute(context)
    said = str(refused.value)
    assert said.startswith("7 errors:"), said
    for part in (
        "Did you mean public?",
        "Did you mean kind?",
        '"id" belongs to the primary key',
        "Did you mean Europe/Berlin?",
        "warn_after_s is '400d'",
        "spark is 'sparky'",
        "on_duplicate",
    ):
        assert part in said, (part, said)
