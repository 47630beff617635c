"""The task that compacts, on a real PostgreSQL: it chooses, begins once, waits, continues; and the work of a night."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)
from test_operators import INDEX, WHAT, context, driver_code

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.compact import compaction, worker
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.ranking import rank
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.prepare import prepare as prepare_index
from airflow_roir.engine.verify import record
from airflow_roir.operators.compact import CompactIndexOperator
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions
from airflow_roir.task.ranked_indexes import ranked_indexes
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

__all__ = ["context", "driver_code"]  # fixtures
ROWS = 20_000
# The driver's work, without Spark.
COMPACT = """
import os, sys
from airflow_roir.engine.compact import worker
from airflow_roir.engine.database import Database
from airflow_roir.engine.control.run import driving, start_run
database = Database(os.environ["ROIR_DSN"])
run = start_run(database, "public.item_by_kind", "airflow rebuild_index run_1", take_over=True)
with driving(database, run):
    list(worker.PHASE.work(database, run, 0))
    worker.finish(database, run)
"""
NIGHT = {
    "indexes": None,
    "exact": False,
    "even_if_rebuild_is_cheaper": True,
    "budget_of_index": "20GB",
    "budget_of_run": "100GB",
    "postgres_conn_id": "warehouse",
}


def built(shop: Any, index: str = INDEX, keys: str = "kind", include: str | None = "price") -> None:
    definition = IndexDefinition.parse(index, "public.item", keys, include)
    prepare_index(shop.database, definition, BuildOptions(ranges=2, segments=2), "test")
    steps.finish_all(shop.database, start_run(shop.database, index, "test"))


def age(shop: Any, left: int = 10) -> None:
    """Deletes all but one of `left` entries; their space isn't freed."""
    shop.run(f"DELETE FROM public.item WHERE id % {left} <> 0")
    for (name,) in shop.run("SELECT c.oid::regclass::text FROM pg_class c WHERE c.relname ~ '^g[0-9]+_s[0-9]+$'"):
        run_sql(shop.dsn, f"VACUUM ANALYZE {name}")


@pytest.fixture
def aged(shop: Any, context: dict[str, Any]) -> None:
    context["ti"].task_id = "compact"
    built(shop)
    age(shop)


def begun(shop: Any) -> int:
    """Begins a compaction that rewrites one segment, whatever it is worth; returns its id."""
    action = Action(Kind.REWRITE, (1,), 1, 8192, 8192, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked")
    return compaction.begin(shop.database, INDEX, [action], CompactOptions(), "test").operation_id


def compacted(context: dict[str, Any], **more: Any) -> dict[str, Any]:
    return CompactIndexOperator(task_id="compact", **WHAT, **more).execute(context)  # type: ignore[arg-type]


def compactions(shop: Any) -> list[tuple[int, str]]:
    return shop.run("SELECT id, status FROM roir.operation WHERE kind = 'compact' ORDER BY id")  # type: ignore[no-any-return]


@pytest.mark.by_hand("sweeps")
def test_what_was_done_is_returned_and_the_next_one_is_skipped(
    context: dict[str, Any], shop: Any, aged: None, driver_code: Any
) -> None:
    driver_code(COMPACT)
    done = compacted(context, budget="20GB", parallelism="3", verify="True", exact="False")
    assert (done["index"], done["status"]) == (INDEX, "completed")
    assert 0 < done["bytes_after"] < done["bytes_before"]
    assert {unit["status"] for unit in done["units"]} == {"done"}
    assert "note" not in done["units"][0]
    assert context["task_state_store"].values["parallelism"] == 3
    with pytest.raises(AirflowSkipException, match=r"index public\.item_by_kind: no segment is worth a compaction"):
        compacted(context)
    assert [status for _, status in compactions(shop)] == ["completed"]
    steps.assert_exact(shop.database, INDEX)


def test_a_paused_dag_begins_nothing_and_a_retry_goes_on(
    context: dict[str, Any], shop: Any, aged: None, driver_code: Any
) -> None:
    context["ti"].paused = True
    with pytest.raises(AirflowRescheduleException):
        compacted(context)
    assert compactions(shop) == []
    context["ti"].paused = False
    driver_code("import sys; print('lost', file=sys.stderr); sys.exit(1)")
    with pytest.raises(AirflowException, match="lost"):
        compacted(context)
    # Killed: its heart has just beaten.
    start_run(shop.database, INDEX, "airflow rebuild_index run_1")
    asked = driver_code(COMPACT)
    assert compacted(context)["status"] == "completed"
    assert "--take-over" in asked[0]
    assert len(compactions(shop)) == 1


def test_a_pause_by_the_switch_is_lifted_by_it(
    context: dict[str, Any], shop: Any, aged: None, driver_code: Any
) -> None:
    operation = begun(shop)
    requests.pause(shop.database, INDEX, "somebody", "a look")
    with pytest.raises(AirflowRescheduleException):
        compacted(context)
    requests.resume(shop.database, INDEX, "somebody")
    driver_code(COMPACT)
    # With what was chosen for it.
    assert [unit["segments"] for unit in compacted(context)["units"]] == [[1]]
    assert compactions(shop) == [(operation, "completed")]


def test_another_operation_is_waited_for(context: dict[str, Any], shop: Any, aged: None) -> None:
    record.begin(shop.database, INDEX, VerifyOptions(), "test")
    with pytest.raises(AirflowRescheduleException):
        compacted(context)
    assert compactions(shop) == []
    # The same holds for a compaction.
    assert rank(shop.database).worth == ()


@pytest.mark.parametrize("more", [{"budget": "7"}, {"segment_size": "2h"}, {"parallelism": "0"}, {"exact": "perhaps"}])
def test_bad_input_fails_at_once(context: dict[str, Any], shop: Any, aged: None, more: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException):
        compacted(context, **more)
    assert compactions(shop) == []


def test_a_rebuild_that_is_cheaper_is_suggested(context: dict[str, Any], shop: Any, aged: None) -> None:
    with pytest.raises(AirflowSkipException, match=r"a rebuild, which writes .* costs no more"):
        compacted(context, even_if_rebuild_is_cheaper="False")
    assert compactions(shop) == []
    said = context["ti"].xcoms["return_value"]["suggestion"]
    assert "roir build public.item_by_kind" in said
    assert shop.run("SELECT action, detail FROM roir.event WHERE action = 'suggest'") == [("suggest", said)]
    ti = context["ti"]
    assert ranked_indexes({**NIGHT, "even_if_rebuild_is_cheaper": False}, ti) == []
    assert list(ti.xcoms["suggestions"]) == [INDEX]


@pytest.mark.by_hand("sweeps")
def test_a_night_takes_the_worst_index_first_and_keeps_to_its_budget(context: dict[str, Any], shop: Any) -> None:
    ti = context["ti"]
    built(shop)
    built(shop, "public.second", "price, kind", None)
    age(shop)
    built(shop, "public.young", "price", None)
    found = rank(shop.database, even_if_rebuild_is_cheaper=True)
    gains = [one.gain_per_cost for one in found.worth]
    assert {one.index for one in found.worth} == {INDEX, "public.second"}
    assert found.left_out == (("public.young", "nothing is worth a compaction"),)
    assert gains == sorted(gains, reverse=True)
    night = ranked_indexes({**NIGHT, "budget_of_index": None, "budget_of_run": None}, ti)
    assert [one["index"] for one in night] == [one.index for one in found.worth]
    first = found.worth[0]
    assert first.choice is not None
    only = ranked_indexes({**NIGHT, "budget_of_run": f"{int(first.choice.totals['budgeted']) + 9000}B"}, ti)
    assert [one["index"] for one in only] == [first.index]
    assert Budget.parse(only[0]["budget"]).bytes == int(first.choice.totals["budgeted"]) + 9000
    # An unfinished one comes first, whatever there is to gain.
    begun(shop)
    assert ranked_indexes(NIGHT, ti)[0]["index"] == INDEX
    with pytest.raises(AirflowFailException, match="budget_of_run is"):
        ranked_indexes({**NIGHT, "budget_of_run": "much"}, ti)
    with pytest.raises(AirflowFailException, match="no_such"):
        ranked_indexes({**NIGHT, "indexes": ["no_such"]}, ti)
    assert [one["index"] for one in ranked_indexes({**NIGHT, "indexes": [INDEX, "", INDEX]}, ti)] == [INDEX]
    list(worker.PHASE.work(shop.database, start_run(shop.database, INDEX, "test"), 0))
