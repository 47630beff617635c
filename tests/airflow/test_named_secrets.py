"""Which fields of the operators may choose an Airflow connection: two, and no row chooses any. Held field by field."""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseHook, BaseOperator, Connection
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException

from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.operation import Kind
from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.provider import get_provider_info
from tests.engine import steps

INDEX = "public.item_by_kind"
# A connection of the deployment's that is none of the index's business, and what is in it.
OTHER, SECRET = "prod_warehouse", "never-to-be-seen"
MAY_CHOOSE = {"postgres_conn_id", "spark"}
GIVEN = {
    "index": INDEX,
    "postgres_conn_id": "warehouse",
    "table": "public.item",
    "keys": "kind",
    "partition": "public.item",
    "bounds": "DEFAULT",
    "ship_for": "0",
    "spark": "local",
}


def operators() -> list[type[BaseOperator]]:
    """The operators that the provider offers."""
    modules = [import_module(name) for name in get_provider_info()["operators"][0]["python-modules"]]
    return [
        found
        for module in modules
        for _, found in inspect.getmembers(module, inspect.isclass)
        if found.__module__ == module.__name__ and issubclass(found, BaseOperator) and "execute" in dir(found)
    ]


class Asked:
    """Airflow's connections; remembers which were asked for."""

    def __init__(self, known: dict[str, dict[str, Any]]) -> None:
        self.known, self.ids = known, set[str]()

    def get(self, conn_id: str) -> Connection:
        self.ids.add(conn_id)
        if conn_id not in self.known:
            raise AirflowNotFoundException(conn_id)
        return Connection(conn_id=conn_id, **self.known[conn_id])


@pytest.fixture
def asked(shop: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    fields = {name: value for name, value in shop.fields.items() if value}
    other = {"conn_type": "postgres"} | fields | {"schema": "nowhere", "password": SECRET}
    found = Asked({"warehouse": {"conn_type": "postgres"} | fields, OTHER: other})
    monkeypatch.setattr(BaseHook, "get_connection", classmethod(lambda _, conn_id: found.get(conn_id)))
    # No Spark: what becomes of a driver isn't asked here.
    ends = [sys.executable, "-c", "raise SystemExit(2)"]
    monkeypatch.setattr("airflow_roir.task.spark_task.driver_command", lambda *_a, **_o: ends)
    steps.make_index(shop.database, INDEX, "public.item", "kind")
    return found


def context() -> Any:
    """A task's context, with the parts that are read."""
    task = SimpleNamespace(dag_id="d", task_id="t", run_id="r", map_index=-1, try_number=1)
    task.xcom_push = lambda **_: None
    task.get_dag = lambda _dag_id: SimpleNamespace(is_paused=False)
    store: dict[str, Any] = {}
    kept = SimpleNamespace(
        get=store.get, set=lambda key, value, **_: store.update({key: value}), delete=lambda key: store.pop(key, None)
    )
    return {"ti": task, "task_state_store": kept, "outlet_events": defaultdict(lambda: SimpleNamespace(add=id))}


def run(operator: type[BaseOperator], **more: Any) -> None:
    """Lets a task execute, however it ends."""
    known = inspect.signature(operator.__init__).parameters.keys() | {"index", "postgres_conn_id"}
    given = {name: value for name, value in (GIVEN | more).items() if name in known | set(operator.template_fields)}
    if "index" not in operator.template_fields:
        given.pop("index")
    with suppress(Exception):
        operator(task_id="t", **given).execute(context())


@pytest.mark.sample(0)
@pytest.mark.parametrize("operator", operators())
def test_no_other_field_chooses_a_connection(
    operator: type[BaseOperator], asked: Asked, shop: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Found: `INSERT INTO roir.shard (name, conn_id) VALUES ('x', 'prod_warehouse')`, or that name in the form's
    *Shards*: the next task wrote the connection's DSN, with its password, into that database. It holds: the index
    server's own connection names those of its shards; rows and forms name none.
    """
    values = (OTHER, f"{{{{ conn.{OTHER}.password }}}}")
    choosing = set()
    for field in operator.template_fields:
        for value in values:
            asked.ids.clear()
            run(operator, **{field: value})
            if asked.ids - {"warehouse"}:
                choosing.add(field)
            assert asked.ids <= {"warehouse", *values}
    assert choosing <= MAY_CHOOSE
    with shop.database.transaction() as connection:
        named = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'roir'::regnamespace AND relkind = 'r'"
        for table in list(execute(connection, named).scalars()):
            assert SECRET not in str(execute(connection, f"SELECT t::text FROM {table} t").all()), table
    assert SECRET not in "".join(capfd.readouterr())


@pytest.mark.sample(0)
@pytest.mark.parametrize("spark", ["spark://127.0.0.1:9", "sc://127.0.0.1:9", OTHER])
def test_a_spark_of_one_s_own_is_refused_before_anything_begins(spark: str, asked: Asked, shop: Any) -> None:
    """Found: `spark://…` in the form: that Spark got the DSN with its password; a connection of any type was taken for
    a Spark's. It holds: `local`, connections of type `spark` and `spark_connect`, and what `[roir] spark_masters`
    lists.
    """
    before = operations.find_operation(shop.database, INDEX).id
    verify = VerifyIndexOperator(task_id="t", index=INDEX, postgres_conn_id="warehouse", spark=spark)
    with pytest.raises(AirflowFailException, match=r"spark_masters|of type 'postgres'") as refused:
        verify.execute(context())
    assert SECRET not in str(refused.value)
    assert operations.find_operation(shop.database, INDEX).id == before


@pytest.mark.sample(1)
def test_tasks_work_on_the_databases_that_the_deployment_names(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__ROIR__CONNECTIONS", "shop, warehouse")
    CleanUpIndexesOperator(task_id="t", postgres_conn_id="warehouse").execute(context())
    with pytest.raises(AirflowFailException, match=f"'{OTHER}' isn't among those of .roir. connections"):
        CleanUpIndexesOperator(task_id="t", postgres_conn_id=OTHER).execute(context())
    assert OTHER not in asked.ids


@pytest.mark.sample(0)
def test_a_replica_that_the_dag_names_needs_no_leave(asked: Asked, shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: the task that builds accepted such a replica, and the task that prepares refused it."""
    monkeypatch.setenv("AIRFLOW__ROIR__CONNECTIONS", "warehouse")
    PrepareIndexBuildOperator(task_id="t", index=INDEX, postgres_conn_id="warehouse", replica_conn_ids=[OTHER]).execute(
        context()
    )
    assert operations.find_operation(shop.database, INDEX).kind == Kind.REBUILD


@pytest.mark.sample(1)
def test_the_extra_is_read_of_the_index_server_s_connection_alone(asked: Asked, shop: Any) -> None:
    """A connection that is named as a shard names no further ones."""
    asked.known["a"] = {
        "conn_type": "postgres",
        "host": "127.0.0.1",
        "port": 1,
        "extra": json.dumps({"roir_shards": [OTHER]}),
    }
    asked.known["warehouse"] |= {"extra": json.dumps({"roir_shards": ["a"]})}
    with shop.database.transaction() as connection:
        execute(connection, f"INSERT INTO roir.shard (name, dsn) VALUES ('a', ''), ('{OTHER}', '')")
    run(VerifyIndexOperator)
    assert asked.ids == {"warehouse", "a"}
