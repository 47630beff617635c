"""Operators refuse a name with the nearest that exists, and name all that is wrong with a form in one error."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from airflow_roir.groups import rebuild_index_group
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
from tests.engine.test_bad_input import CATALOG

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


@pytest.mark.parametrize("verify", ["after", "before", "none", "both"])
def test_the_first_task_names_all_that_is_wrong_with_a_form(
    bag: DagBag, context: dict[str, Any], shop: Any, verify: str
) -> None:
    """Found: the task that compares before a rebuild, which comes first, named its own wrong options alone, also if
    there was nothing to compare. Found: it was skipped, and only the next task named a misspelt table.

    A value that the form itself refuses never gets here.
    """
    form = {
        "index": "publik.new",
        "table": "public.item",
        "keys": "kindd",
        "include": "id",
        "on_duplicate": "stop",
        "spark": "sparky",
        "verify": verify,
        "postgres_conn_id": "warehouse",
    }
    dag = bag.dags["rebuild_index"]
    with pytest.raises(AirflowFailException) as first:
        rendered(dag, "verify_before", **form).execute(context)
    with pytest.raises(AirflowFailException) as refused:
        rendered(dag, "prepare", **form).execute(context)
    said = str(refused.value)
    assert str(first.value) == said
    assert said.startswith("5 errors:"), said
    for part in (
        "Did you mean public?",
        "Did you mean kind?",
        '"id" belongs to the primary key',
        "spark is 'sparky'",
        "on_duplicate",
    ):
        assert part in said, (part, said)


@pytest.mark.parametrize("verify", ["after", "before", "none", "both"])
def test_a_misspelt_table_fails_the_first_task_of_a_run(
    bag: DagBag, context: dict[str, Any], shop: Any, verify: str
) -> None:
    form = {**NEW, "table": "public.itme", "verify": verify, "postgres_conn_id": "warehouse"}
    with pytest.raises(AirflowFailException, match=r"Did you mean public\.item\?"):
        rendered(bag.dags["rebuild_index"], "verify_before", **form).execute(context)
    # A right one is skipped, and has changed nothing.
    before = shop.run(CATALOG)
    form["table"] = "public.item"
    with pytest.raises(AirflowSkipException, match="nothing to verify"):
        rendered(bag.dags["rebuild_index"], "verify_before", **form).execute(context)
    assert shop.run(CATALOG) == before


def test_the_first_task_refuses_what_prepare_would_and_no_more(bag: DagBag, context: dict[str, Any], shop: Any) -> None:
    """A rebuild, also one of an index whose unfinished build will be continued."""
    steps.make_index(shop.database, INDEX, "public.item", "kind")
    form: dict[str, Any] = {"index": INDEX, "verify": "none", "postgres_conn_id": "warehouse"}

    def first(**more: Any) -> None:
        rendered(bag.dags["rebuild_index"], "verify_before", **{**form, **more}).execute(context)

    with pytest.raises(AirflowFailException, match=f"Did you mean {INDEX}"):
        first(index=WRONG_INDEX)
    with pytest.raises(AirflowFailException):
        first(table="public.item", keys="price")
    for _ in range(2):
        with pytest.raises(AirflowSkipException):
            first()
        PrepareIndexBuildOperator(task_id="prepare", index=INDEX, postgres_conn_id="warehouse").execute(context)  # type: ignore[arg-type]


def test_the_first_task_of_a_group_names_all_that_is_wrong_with_the_build(context: dict[str, Any], shop: Any) -> None:
    with DAG("nightly") as dag:
        rebuild_index_group(
            **{**NEW, "table": "public.itme"},
            verify_before=True,
            options={"warn_after_s": "400d", "windows": "0 22 * * * for 8h in Europe/Berln"},
            postgres_conn_id="warehouse",
        )
    with pytest.raises(AirflowFailException) as refused:
        dag.get_task("rebuild_index_group.verify_before").execute(context)
    for part in ("3 errors:", "Did you mean public.item?", "warn_after_s is '400d'", "Did you mean Europe/Berlin?"):
        assert part in str(refused.value)
