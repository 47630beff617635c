"""Pause and resume of one operation by Airflow tasks, and the DAG `control_index` that offers them as a form."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowFailException, AirflowRescheduleException
from test_operators import INDEX, SEALS, TAKE_UP, WHAT, build, context, driver_code, prepare

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.prepare import prepare as prepare_index
from airflow_roir.engine.snapshot.operation import OperationStatus, status
from airflow_roir.operators.control import (
    AbortIndexBuildOperator,
    ChangeIndexBuildOperator,
    PauseIndexBuildOperator,
    ResumeIndexBuildOperator,
    RevertIndexOperator,
)
from airflow_roir.options import BuildOptions
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

__all__ = ["context", "driver_code"]  # fixtures


def standing(shop: Any) -> OperationStatus:
    return status(shop.database, INDEX)[0]


def test_a_paused_build_waits_and_goes_on_when_it_is_resumed(
    context: dict[str, Any],
    shop: Any,
    driver_code: Any,
) -> None:
    operation = prepare(context)
    asked = driver_code(SEALS)
    pause = PauseIndexBuildOperator(task_id="pause", reason="backup", **WHAT)
    assert pause.execute(context) == operation  # type: ignore[arg-type]
    assert (standing(shop).status, standing(shop).pause_reason) == ("paused", "backup")
    context["ti"].run_id = "run_2"  # not the run that paused it
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    assert asked == []
    resume = ResumeIndexBuildOperator(task_id="resume", parallelism="5", **WHAT)
    assert resume.execute(context) == operation  # type: ignore[arg-type]
    assert (standing(shop).status, standing(shop).options["parallelism"]) == ("running", 5)
    assert build(context, operation) == operation
    assert len(asked) == 1


def test_options_are_changed_by_a_task(context: dict[str, Any], shop: Any, capsys: Any) -> None:
    operation = prepare(context)

    def change(**options: str) -> str:
        task = ChangeIndexBuildOperator(task_id="change", **WHAT, **options)
        assert task.execute(context) == operation  # type: ignore[arg-type]
        return str(capsys.readouterr().out)

    wanted = {"parallelism": "5", "batch_rows": "", "max_rows_per_second": "700"}
    assert "changed: parallelism 2 -> 5, max_rows_per_second no limit -> 700" in change(**wanted)
    assert "nothing changes" in change(**wanted)
    assert "max_rows_per_second 700 -> no limit" in change(max_rows_per_second="0")
    for bad, said in (({}, "nothing to change"), ({"max_rows_per_second": "99"}, "or 0 for no limit")):
        with pytest.raises(AirflowFailException, match=said):
            change(**bad)
    options = standing(shop).options
    assert (options["parallelism"], options["batch_rows"], options["max_rows_per_second"]) == (5, 1000, None)


def test_what_cannot_be_done_fails_without_a_retry(context: dict[str, Any], shop: Any) -> None:
    prepare(context)
    with pytest.raises(AirflowFailException, match="no paused operation"):
        ResumeIndexBuildOperator(task_id="resume", **WHAT).execute(context)  # type: ignore[arg-type]
    PauseIndexBuildOperator(task_id="pause", **WHAT).execute(context)  # type: ignore[arg-type]
    with pytest.raises(AirflowFailException, match="parallelism"):
        ResumeIndexBuildOperator(task_id="resume", parallelism="999", **WHAT).execute(context)  # type: ignore[arg-type]
    assert (standing(shop).status, standing(shop).options["parallelism"]) == ("paused", 2)


def test_a_build_task_of_an_aborting_operation_fails_without_a_retry(
    context: dict[str, Any],
    shop: Any,
    driver_code: Any,
) -> None:
    operation = prepare(context)
    asked = driver_code("raise SystemExit(0)")
    shop.run(f"SELECT roir.abort('{INDEX}')")
    with pytest.raises(AirflowFailException, match="aborted"):
        build(context, operation)
    assert asked == []


def test_a_refused_option_shows_in_the_status_until_one_is_accepted(
    context: dict[str, Any],
    shop: Any,
    driver_code: Any,
) -> None:
    operation = prepare(context)
    driver_code(TAKE_UP + "end_run(database, run); sys.exit(3)")
    context["task_state_store"].set("parallelism", "a lot")
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    refused = standing(shop)
    assert refused.options["parallelism"] == 2
    assert refused.notice is not None
    assert "parallelism stays at 2" in refused.notice
    assert "refuse" in [event.action for event in operations.events(shop.database, INDEX)]
    requests.change_options(shop.database, INDEX, actor="me", parallelism=3)
    assert (standing(shop).options["parallelism"], standing(shop).notice) == (3, None)


def test_the_form_chooses_the_task(dags_folder: Path) -> None:
    dag = DagBag(dag_folder=str(dags_folder / "control_index.py"), load_op_links=False).dags["control_index"]
    choose = dag.get_task("choose")
    assert choose.downstream_task_ids == {"pause", "resume", "change", "abort", "revert"}
    assert set(dag.params.get_param("action").schema["enum"]) == choose.downstream_task_ids
    kinds = {task_id: type(dag.get_task(task_id)) for task_id in sorted(choose.downstream_task_ids)}
    # An empty field changes nothing, and 0 is a value.
    form = deepcopy(dag.params)
    form.update({"index": "i", "action": "change", "max_rows_per_second": 0, "batch_rows": 5000})
    change = dag.get_task("change").prepare_for_execution()
    change.render_template_fields({"params": form.validate()})
    assert (change.parallelism, change.batch_rows, change.max_rows_per_second) == ("None", "5000", "0")
    assert kinds == {
        "abort": AbortIndexBuildOperator,
        "change": ChangeIndexBuildOperator,
        "pause": PauseIndexBuildOperator,
        "resume": ResumeIndexBuildOperator,
        "revert": RevertIndexOperator,
    }


@pytest.mark.by_hand("sweeps")
def test_a_rebuild_is_reverted_by_a_task(context: dict[str, Any], shop: Any) -> None:
    task = RevertIndexOperator(task_id="revert", reason="slower", **WHAT)
    definition = IndexDefinition.parse(INDEX, "public.item", "kind", "price")
    for _ in range(2):
        prepared = prepare_index(shop.database, definition, BuildOptions(ranges=2, segments=2), "test")
        steps.finish_all(shop.database, start_run(shop.database, INDEX, "test"))
        if prepared.kind == "create":
            with pytest.raises(AirflowFailException, match="no replaced generation to show"):
                task.execute(context)  # type: ignore[arg-type]
    shop.run("UPDATE public.item SET kind = 'other' WHERE id % 10 = 0")
    assert task.execute(context) == 1  # type: ignore[arg-type]
    steps.assert_exact(shop.database, INDEX)
