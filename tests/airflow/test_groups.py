"""Builds in users' own DAGs: the group of tasks, alone and mapped, and what a publish tells other systems."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, TaskGroup, task
from airflow.sdk.definitions._internal.expandinput import DictOfListsExpandInput
from airflow.sdk.definitions.taskgroup import MappedTaskGroup
from airflow.serialization.serialized_objects import DagSerialization

from airflow_roir.assets import published_alias
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from airflow_roir.groups import rebuild_index_group, rebuild_indexes_group
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.task import lineage as openlineage
from airflow_roir.task.lineage import lineage
from airflow_roir.task.published import published_facts
from tests.airflow.test_operators import MemoryStore
from tests.engine import steps

ROOT = Path(__file__).parents[2]


def test_a_group_prepares_builds_and_finalizes() -> None:
    with DAG("mine", schedule=None) as dag:
        first = rebuild_index_group(index="a", table="t", keys="k")
        second = rebuild_index_group.override(group_id="again")(
            index="b", verify_before=True, options={"parallelism": 3}, spark="local[2]"
        )
        first >> second
    assert isinstance(first, TaskGroup)
    ids = [f"rebuild_index_group.{name}" for name in ("prepare", "build", "finalize")]
    assert dag.task_ids == [*ids, *(f"again.{name}" for name in ("prepare", "build", "finalize", "verify_before"))]
    for before, after in itertools.pairwise(ids):
        assert after in dag.get_task(before).downstream_task_ids
    assert dag.get_task("rebuild_index_group.finalize").downstream_task_ids == {"again.verify_before"}
    prepare = dag.get_task("again.prepare")
    assert (prepare.parallelism, prepare.trigger_rule) == (3, "none_failed")
    assert dag.get_task("again.build").spark == "local[2]"
    assert all(task.retries == 6 for task in dag.tasks)
    DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))


def test_a_mapped_group_gives_each_index_its_own_operation() -> None:
    """The id is that of the prepare task with the same map index."""
    with DAG("mine", schedule=None) as dag:

        @task
        def names() -> list[str]:
            return ["a", "b"]

        group = rebuild_index_group.partial(builds_at_once=1, spark="{{ params.spark }}").expand(index=names())
    assert isinstance(group, MappedTaskGroup)
    build = dag.get_task("rebuild_index_group.build")
    assert build.max_active_tis_per_dagrun == 1
    assert build.get_closest_mapped_task_group() is group
    pulled: list[Any] = []
    ti = SimpleNamespace(
        map_index=1,
        get_relevant_upstream_map_indexes=lambda **_: 1,
        xcom_pull=lambda **how: pulled.append(how) or 17,
    )
    assert build.operation_id.resolve({"ti": ti}) == 17
    assert [(how["task_ids"], how["map_indexes"]) for how in pulled] == [("rebuild_index_group.prepare", 1)]
    assert build.map_index_template == "{{ task.index }}", "the UI shows the index, not a number"
    mapped = DictOfListsExpandInput({"index": ["a", "b"]})
    assert mapped.resolve({"ti": SimpleNamespace(map_index=1), "expanded_ti_count": 2})[0]["index"] == "b"
    restored = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))
    assert restored.get_task("rebuild_index_group.build").get_closest_mapped_task_group() is not None


def test_several_indexes_of_a_table_are_all_prepared_before_one_is_built() -> None:
    with DAG("mine", schedule=None) as dag:
        rebuild_indexes_group(indexes=["public.a", "public.b"], spark="local[2]", options={"parallelism": 3})
    group = "rebuild_indexes_group"
    gate = dag.get_task(f"{group}.all_are_prepared")
    assert gate.trigger_rule == "all_done"
    assert gate.upstream_task_ids == {f"{group}.index_{n}.prepare" for n in (1, 2)}
    for number, index in ((1, "public.a"), (2, "public.b")):
        prepare, build, finalize = (
            dag.get_task(f"{group}.index_{number}.{name}") for name in ("prepare", "build", "finalize")
        )
        assert (prepare.index, prepare.scan, prepare.parallelism) == (index, "source", 3)
        # One that wasn't prepared isn't built, and keeps no other one from being built.
        assert build.upstream_task_ids == {gate.task_id, prepare.task_id}
        assert (build.index, build.spark, build.trigger_rule) == (index, "local[2]", "all_success")
        assert finalize.upstream_task_ids >= {build.task_id}
        assert all(task.retries == 6 for task in (prepare, build, finalize))
    DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))


@pytest.mark.parametrize("group", ["rebuild_index_group", "rebuild_indexes_group", "mapped"])
def test_the_retries_of_the_dag_or_of_the_group_win(group: str) -> None:
    """The six of the group won over a DAG's own value."""

    def make(args: dict[str, Any], own: dict[str, Any]) -> set[tuple[int, Any]]:
        with DAG("mine", schedule=None, default_args=args) as dag:
            of = rebuild_indexes_group if group == "rebuild_indexes_group" else rebuild_index_group
            made = of.override(**own) if own else of
            if group == "mapped":
                made.partial(spark="local[2]").expand(index=["a", "b"])
            else:
                made(**({"indexes": ["a", "b"]} if of is rebuild_indexes_group else {"index": "a"}))
        return {(task.retries, task.retry_delay.total_seconds()) for task in dag.tasks}

    assert make({}, {}) == {(6, 30)}
    assert make({"retries": 0}, {}) == {(0, 30)}
    assert make({"retries": 2}, {"default_args": {"retries": 1}}) == {(1, 30)}
    assert make({}, {"group_id": "own"}) == {(6, 30)}


@pytest.mark.parametrize("names", ["public.a", [], ["a", "a"], [1]])
def test_what_is_no_list_of_indexes_is_refused(names: Any) -> None:
    with DAG("mine", schedule=None), pytest.raises(InvalidInput, match="indexes"):
        rebuild_indexes_group(indexes=names)


RUN = """
from airflow.sdk import DAG, task
from airflow_roir.groups import rebuild_index_group, rebuild_indexes_group

with DAG("mine", schedule=None, is_paused_upon_creation=False) as dag:
    @task
    def names():
        return ["public.by_kind", "public.by_price"]

    rebuild_index_group.partial(
        postgres_conn_id="warehouse", options={"parallelism": 1}, builds_at_once=1
    ).expand(index=names())

if __name__ == "__main__":
    run = dag.test()
    assert str(run.state) == "success", run.state
"""


@pytest.mark.by_hand("sweeps")
def test_airflow_rebuilds_several_indexes_by_one_mapped_group(shop: Any, dsn: str, tmp_path: Path) -> None:
    for name in ("kind", "price"):
        steps.make_index(Database(dsn), f"public.by_{name}", "public.item", name)
    file = tmp_path / "mine.py"
    file.write_text(RUN)
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path),
        "AIRFLOW_CONN_WAREHOUSE": json.dumps({"conn_type": "postgres"} | shop.fields),
        "PYTHONPATH": str(ROOT),
    }
    for command in (["-m", "airflow", "db", "migrate"], [str(file)]):
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rebuilt = "SELECT name FROM roir.operation o JOIN roir.index i ON i.id = o.index_id WHERE kind = 'rebuild' "
    assert shop.run(f"{rebuilt} AND o.status = 'completed' ORDER BY 1") == [("by_kind",), ("by_price",)]


def test_what_shapes_the_group_is_not_mapped() -> None:
    with DAG("mine", schedule=None), pytest.raises(InvalidInput, match=r"by partial\(\)"):
        rebuild_index_group.expand_kwargs([{"index": "a"}])


@pytest.mark.by_hand("sweeps")
def test_a_publish_tells_what_was_built_and_from_what(shop: Any, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres"} | shop.fields))
    run = steps.make_index(Database(dsn), 'public."Item ""K"', "public.item", "kind", verify="after")
    with Database(dsn).transaction() as connection:
        index = operations.read_operation(connection, run.operation_id).index_id
        operations.record_event(connection, index, run.operation_id, "airflow d r", "adopt")
    facts = published_facts(Database(dsn), run.operation_id)
    counts = {"missing": 0, "extra": 0, "different": 0, "corrupt": 0, "damaged": 0, "duplicate": 0, "repaired": 0}
    assert facts.pop("seconds") >= 0
    assert facts == {
        "index": 'public."Item ""K"',
        "source": "public.item",
        "kind": "create",
        "operation_id": run.operation_id,
        "generation_id": 1,
        "rows": 20000,
        "verified": {"rows": 20000, **counts},
    }
    added: list[Any] = []
    context: Any = {
        "ti": SimpleNamespace(
            dag_id="d",
            task_id="t",
            run_id="r",
            map_index=-1,
            try_number=1,
            get_dag=lambda dag_id: SimpleNamespace(is_paused=False),
        ),
        "task_state_store": MemoryStore(),
        "outlet_events": {published_alias(): SimpleNamespace(add=lambda asset, extra: added.append(extra))},
    }
    finalize = FinalizeIndexBuildOperator(
        task_id="finalize", index='public."Item ""K"', postgres_conn_id="warehouse", operation_id=run.operation_id
    )
    assert finalize.get_openlineage_facets_on_complete(None) is None
    finalize.execute(context)
    [extra] = added
    assert json.loads(json.dumps(extra)) == extra
    assert extra | {"seconds": 0} == facts | {"seconds": 0}
    assert shop.fields["password"] not in json.dumps(extra) + repr(finalize._lineage)


@pytest.mark.parametrize(
    ("dsn", "namespace", "database"),
    [
        ("host=db port=5433 dbname=app user=u password=secret", "postgres://db:5433", "app"),
        ("host=a,b port=1,2 dbname=app", "postgres://a:1", "app"),
        ("host=/run/postgresql user=u", "postgres://localhost:5432", "u"),
        ("dbname=app", "postgres://localhost:5432", "app"),
    ],
)
def test_datasets_are_named_as_openlineage_names_them(dsn: str, namespace: str, database: str) -> None:
    names = lineage(dsn, 'public."By ""Kind"""', "shop.item")
    assert (names.namespace, names.index, names.source) == (
        namespace,
        f'{database}.public.By "Kind"',
        f"{database}.shop.item",
    )
    assert "secret" not in repr(names)
    assert lineage(dsn, "public.i", None).source is None


def test_lineage_needs_no_provider_and_suits_it_where_it_is_installed() -> None:
    made = openlineage.as_operator_lineage(lineage("dbname=app", "public.i", "public.t"))
    try:
        from airflow.providers.openlineage.extractors import OperatorLineage
    except ImportError:
        assert made is None
        return
    assert isinstance(made, OperatorLineage)
    assert [one.name for one in (*made.inputs, *made.outputs)] == ["app.public.t", "app.public.i"]
