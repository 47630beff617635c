"""The DAG files as they are shipped: what they are made of, and what a user sees of them."""

from __future__ import annotations

import ast
import json
import runpy
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

from airflow_roir import run_notes
from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import LIVE, BuildOptions, VerifyOptions
from airflow_roir.task.unknown_keys import refuse_unknown_keys

ROOT = Path(__file__).parents[2]
SECRET = "never-to-be-seen"


@pytest.fixture(scope="module")
def bag(dags_folder: Path) -> DagBag:
    return DagBag(dag_folder=str(dags_folder), load_op_links=False, collect_dags=True)


@pytest.fixture
def rebuild(bag: DagBag) -> DAG:
    return bag.dags["rebuild_index"]


@pytest.fixture
def verify(bag: DagBag) -> DAG:
    return bag.dags["verify_index"]


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> str:
    value = {"conn_type": "postgres", "host": "db", "login": "builder", "password": SECRET}
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps(value))
    return "warehouse"


def rendered(dag: DAG, task_id: str, **conf: Any) -> Any:
    """The task as its templates make it for a run with this form."""
    form = deepcopy(dag.params)
    form.update(conf)
    params = form.validate()
    task = dag.get_task(task_id).prepare_for_execution()
    task.render_template_fields(
        {"params": params, "ti": SimpleNamespace(xcom_pull=lambda task_ids: {"prepare": 17}[task_ids])}
    )
    return task


def test_every_file_is_a_dag_without_an_error(bag: DagBag) -> None:
    assert bag.import_errors == {}
    shipped = {"rebuild_index", "verify_index", "clean_up_indexes", "control_index", "ship_changes"}
    shipped.add("keep_indexes_young")
    examples = {"rebuild_bloated_indexes", "verify_indexes_weekly"}
    assert set(bag.dags) == shipped | examples
    # A user who copies the whole folder hasn't asked for builds at night.
    assert all(bag.dags[name].is_paused_upon_creation and bag.dags[name].max_active_runs == 1 for name in examples)


@pytest.mark.parametrize(
    ("dag", "given", "meant"),
    [
        ("rebuild_index", "Parallelism", "parallelism"),
        ("rebuild_index", "throtle", "throttle"),
        ("verify_index", "throtle", "throttle"),
        ("control_index", "max_rows_per_seconds", "max_rows_per_second"),
        ("clean_up_indexes", "conn_id", "postgres_conn_id"),
        ("ship_changes", "warnage", "warn_age"),
        ("keep_indexes_young", "Exact", "exact"),
    ],
)
def test_a_run_with_a_key_that_is_no_parameter_fails(bag: DagBag, dag: str, given: str, meant: str) -> None:
    """Before any of its tasks begins. Keys that Airflow itself adds pass."""
    assert all(task._pre_execute_hook is refuse_unknown_keys for task in bag.dags[dag].roots)
    refuse_unknown_keys({"dag": bag.dags[dag], "dag_run": SimpleNamespace(conf={meant: 1, "openlineage": {}})})
    refuse_unknown_keys({"dag": bag.dags[dag], "dag_run": SimpleNamespace(conf=None)})
    with pytest.raises(AirflowFailException, match=rf"{given}: did you mean {meant}\?"):
        refuse_unknown_keys({"dag": bag.dags[dag], "dag_run": SimpleNamespace(conf={given: 1})})


def test_no_dag_file_imports_another(dags_folder: Path) -> None:
    files = {path.stem for path in dags_folder.rglob("*.py")}
    for path in dags_folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                assert (node.module or "").split(".")[0] not in files
            elif isinstance(node, ast.Import):
                assert not files & {alias.name for alias in node.names}


def test_prepare_build_finalize(rebuild: DAG) -> None:
    assert rebuild.task_ids == ["verify_before", "prepare", "build", "finalize"]
    assert rebuild.get_task("verify_before").downstream_task_ids == {"prepare"}
    # Where there is nothing to verify that task is skipped.
    assert rebuild.get_task("prepare").trigger_rule == "none_failed"
    assert rebuild.get_task("prepare").downstream_task_ids == {"build"}
    assert rebuild.get_task("build").downstream_task_ids == {"finalize"}


@pytest.mark.parametrize("name", ["rebuild_index", "verify_index"])
def test_a_pause_may_last_and_a_retry_goes_on(bag: DagBag, name: str) -> None:
    dag = bag.dags[name]
    assert dag.dagrun_timeout is None
    assert dag.is_paused_upon_creation is False
    assert dag.max_active_runs > 1
    for task in dag.tasks:
        assert task.retries >= 2
        assert task.execution_timeout is None


def test_clean_up_is_scheduled_and_alone(bag: DagBag) -> None:
    dag = bag.dags["clean_up_indexes"]
    assert dag.timetable.can_be_scheduled
    assert (dag.max_active_runs, dag.catchup) == (1, False)
    assert dag.task_ids == ["clean_up"]


def test_shards_are_a_list_of_which_the_form_shows_every_line(bag: DagBag) -> None:
    """If a list has examples, the form lets users choose among these alone. Lines may be empty."""
    dag = bag.dags["rebuild_index"]
    assert "examples" not in dag.params.get_param("shards").schema
    for given, expected in ((None, ""), ([""], ""), (["orders_0", " orders_1 ", ""], "orders_0,orders_1")):
        assert rendered(dag, "prepare", index="public.i", shards=given).shards == expected


def test_one_run_that_ships_is_followed_by_the_next(bag: DagBag) -> None:
    """Computed as the scheduler does: it never makes a run of the same logical date as the one before."""
    dag = DagSerialization.from_dict(DagSerialization.to_dict(bag.dags["ship_changes"]))
    first = dag.next_dagrun_info(last_automated_run_info=None)
    second = dag.next_dagrun_info(last_automated_run_info=first)
    assert first is not None
    assert second is not None
    assert second.logical_date > first.logical_date


def test_a_night_chooses_and_compacts_one_index_after_the_other(bag: DagBag) -> None:
    dag = bag.dags["keep_indexes_young"]
    assert dag.timetable.can_be_scheduled
    assert (dag.max_active_runs, dag.catchup, dag.is_paused_upon_creation) == (1, False, True)
    assert dag.get_task("choose").downstream_task_ids == {"compact"}
    compact = dag.get_task("compact")
    assert compact.is_mapped
    assert compact.max_active_tis_per_dagrun == 1
    assert compact.retries >= 2
    assert compact.execution_timeout is None


def test_shipping_goes_on_all_the_time_and_waits_to_be_switched_on(bag: DagBag) -> None:
    dag = bag.dags["ship_changes"]
    assert type(dag.timetable).__name__ == "ContinuousTimetable"
    assert (dag.max_active_runs, dag.catchup, dag.is_paused_upon_creation) == (1, False, True)
    task = rendered(dag, "ship")
    assert (task.postgres_conn_id, task.ship_for, task.warn_age) == ("postgres_default", "10min", "5min")


def test_the_guide_explains_the_form_as_it_is() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "options.py"))["files"]()
    assert all(path.read_text() == content for path, content in made.items()), "make options"


def test_every_field_of_the_form_is_explained(bag: DagBag) -> None:
    for dag in bag.dags.values():
        for name in dag.params:
            param = dag.params.get_param(name)
            assert param.schema["title"], name
            assert param.description, name
            assert param.schema["type"], name


@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"index": ""},
        {"index": "i", "parallelism": 0},
        {"index": "i", "parallelism": "two"},
        {"index": "i", "batch_rows": LIVE["batch_rows"].least_asked - 1},
        {"index": "i", "ranges": 0},
        {"index": "i", "max_rows_per_second": LIVE["max_rows_per_second"].least_asked - 1},
        {"index": "i", "postgres_conn_id": ""},
        {"index": "i", "verify": "sometimes"},
    ],
)
def test_the_form_refuses_what_cannot_be_built(rebuild: DAG, conf: dict[str, Any]) -> None:
    with pytest.raises(ParamValidationError):
        rendered(rebuild, "prepare", **conf)


def prepare_of(dag: DAG, **conf: Any) -> PrepareIndexBuildOperator:
    task = rendered(dag, "prepare", **conf)
    assert isinstance(task, PrepareIndexBuildOperator)
    return task


def test_a_filled_in_form_becomes_a_definition_and_options(rebuild: DAG) -> None:
    task = prepare_of(
        rebuild,
        index='public."By Tail"',
        table="flights",
        keys='tailnum, "Time Hour"',
        include="origin,dest",
        parallelism=4,
        batch_rows=5000,
        ranges=64,
        max_rows_per_second=9000,
        verify="both",
        postgres_conn_id="warehouse",
    )
    assert task.definition() == IndexDefinition(
        QualifiedName("public", "By Tail"),
        QualifiedName(None, "flights"),
        ("tailnum", "Time Hour"),
        ("origin", "dest"),
    )
    assert task.options() == BuildOptions(
        parallelism=4, batch_rows=5000, ranges=64, max_rows_per_second=9000, verify="both"
    )
    assert task.postgres_conn_id == "warehouse"


def test_a_name_alone_is_a_rebuild_with_defaults(rebuild: DAG) -> None:
    task = prepare_of(rebuild, index="public.i")
    assert task.definition() == IndexDefinition(QualifiedName("public", "i"))
    assert task.options() == BuildOptions()


@pytest.mark.parametrize(
    ("when", "mode"), [("before", "before"), ("both", "before"), ("after", "none"), ("none", "none")]
)
def test_what_a_rebuild_replaces_is_verified_on_request(rebuild: DAG, when: str, mode: str) -> None:
    task = rendered(rebuild, "verify_before", index="i", verify=when, parallelism=3, spark="cluster")
    assert (task.mode, task.fail_on_difference, task.spark) == (mode, False, "cluster")
    assert task.options() == VerifyOptions(parallelism=3)
    assert prepare_of(rebuild, index="i", verify=when).options().verify == when


def verify_of(dag: DAG, **conf: Any) -> VerifyIndexOperator:
    task = rendered(dag, "verify", **conf)
    assert isinstance(task, VerifyIndexOperator)
    return task


def test_a_form_becomes_the_options_of_a_verification(verify: DAG) -> None:
    given = {"parallelism": 4, "repair": True, "amcheck": True, "max_seconds": 600}
    task = verify_of(verify, index="i", sample=0.5, spark="cluster", postgres_conn_id="warehouse", **given)
    assert task.options() == VerifyOptions(parallelism=4, sample=0.5, max_seconds=600, repair=True, amcheck=True)
    assert (task.mode, task.fail_on_difference) == ("only", True)
    assert (task.index, task.spark, task.postgres_conn_id) == ("i", "cluster", "warehouse")
    assert verify_of(verify, index="i", slices=30).options() == VerifyOptions(slices=30)
    assert verify_of(verify, index="i").options() == VerifyOptions()


@pytest.mark.parametrize(
    "conf", [{}, {"index": "i", "sample": 0}, {"index": "i", "sample": 101}, {"index": "i", "slices": 0}]
)
def test_the_form_refuses_what_cannot_be_verified(verify: DAG, conf: dict[str, Any]) -> None:
    with pytest.raises(ParamValidationError):
        verify_of(verify, **conf)


def test_a_copy_of_the_dag_runs_daily_as_its_text_says(dags_folder: Path, tmp_path: Path) -> None:
    text = (dags_folder / "verify_index.py").read_text()
    for old, new in {
        'dag_id="verify_index"': 'dag_id="verify_daily"',
        "schedule=None": 'schedule="@daily"',
        "max_active_runs=32": "max_active_runs=1",
        '"index": Param(\n': '"index": Param(\n        "public.i",\n',
        "when=WHEN)": "when=WHEN, slices=30)",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "verify_daily.py").write_text(text)
    bag = DagBag(dag_folder=str(tmp_path), load_op_links=False, collect_dags=True)
    assert bag.import_errors == {}
    daily = bag.dags["verify_daily"]
    assert daily.timetable.can_be_scheduled
    assert verify_of(daily).options() == VerifyOptions(slices=30)


@pytest.mark.parametrize("name", ['"123"', '"a", "b"', '"[1]"', '"{{ ti }}"', '"None"', '"it\'s %s"'])
def test_a_quoted_name_survives_the_template(rebuild: DAG, name: str) -> None:
    task = prepare_of(rebuild, index="i", table="t", keys=name)
    assert task.keys == name
    assert task.definition().key


def test_build_and_finalize_know_the_operation_by_its_id(rebuild: DAG) -> None:
    build = rendered(rebuild, "build", index="i", spark="cluster")
    assert build.operation_id == "17"
    assert build.spark == "cluster"
    assert rendered(rebuild, "finalize", index="i").operation_id == "17"


def test_no_secret_is_in_a_rendered_template_or_the_serialized_dag(rebuild: DAG, connection: str) -> None:
    for task_id in rebuild.task_ids:
        task = rendered(rebuild, task_id, index="i", postgres_conn_id=connection)
        for field in task.template_fields:
            assert SECRET not in repr(getattr(task, field))
    assert SECRET not in json.dumps(DagSerialization.to_dict(rebuild), default=str)


def test_the_finished_index_is_an_outlet_and_the_parallelism_is_a_button(rebuild: DAG) -> None:
    encoded = DagSerialization.to_dict(rebuild)
    tasks = {task["__var"]["task_id"]: task["__var"] for task in encoded["dag"]["tasks"]}
    assert "roir_index_published" in json.dumps(tasks["finalize"]["outlets"])
    assert tasks["build"]["_operator_extra_links"] == {
        "Change parallelism": "_link_LiveOptionsLink",
        "Index build": "_link_IndexBuildLink",
    }


def test_a_runs_note_names_its_index(bag: DagBag) -> None:
    def note(dag: Any, conf: dict[str, Any] | None, note: str | None = None) -> str | None:
        decoded = DagSerialization.from_dict(DagSerialization.to_dict(dag))
        run = SimpleNamespace(dag=decoded, conf=conf, note=note)
        run_notes.on_dag_run_running(run, "started")  # type: ignore[arg-type]
        return run.note

    rebuild, clean_up = bag.dags["rebuild_index"], bag.dags["clean_up_indexes"]
    assert note(rebuild, {"index": "public.f"}) == "`public.f`"
    assert note(bag.dags["control_index"], {"index": "public.f", "action": "pause"}) == "pause `public.f`"
    assert note(rebuild, {"index": '"`<b>\n`"' + "x" * 2000}) == "`" + ('" <b>  "' + "x" * 2000)[:200] + "`"
    # A note that a user has written stays, and notes of other DAGs aren't touched.
    assert note(rebuild, {"index": "public.f"}, "mine") == "mine"
    assert note(clean_up, {}) is note(rebuild, {}) is note(rebuild, {"index": 7}) is None
    with DAG("theirs") as theirs:
        pass
    assert note(theirs, {"index": "public.f"}) is None


def test_what_a_form_offers_may_be_taken(bag: DagBag) -> None:
    for dag in bag.dags.values():
        for name in dag.params:
            schema = dag.params.get_param(name).schema
            assert set(schema.get("values_display", ())) <= set(schema.get("enum", ())), name
            for offered in (*schema.get("enum", ()), *schema.get("examples", ())):
                form = deepcopy(dag.params)
                form.update({"index": "i"} if "index" in form else {})
                form.update({name: offered})
                form.validate()
