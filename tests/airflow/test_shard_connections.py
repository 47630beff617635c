"""Shards that are Airflow connections: added by their names, and looked up again by each task."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from psycopg2.extensions import parse_dsn

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.shards import registry
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.task.shard_connections import add_shards, keep_connections
from tests.conftest import run_sql


class Connections:
    """What Airflow knows."""

    def __init__(self) -> None:
        self.known: dict[str, Connection] = {}

    def get(self, conn_id: str) -> Connection:
        if conn_id not in self.known:
            raise AirflowNotFoundException(conn_id)
        return self.known[conn_id]


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    found = Connections()
    monkeypatch.setattr(RoirHook, "get_connection", classmethod(lambda _, conn_id: found.get(conn_id)))
    return found


@pytest.fixture
def shard(dsn: str, server: str, connections: Connections) -> Iterator[Connection]:
    """A database that the connection `orders_0` leads to."""
    name = "shard_" + parse_dsn(dsn)["dbname"]
    run_sql(server, f"CREATE DATABASE {name}", f"CREATE DATABASE {name}_2")
    given = parse_dsn(server)
    connections.known["orders_0"] = Connection(
        conn_id="orders_0", conn_type="postgres", host=given["host"], login=given["user"], schema=name
    )
    yield connections.known["orders_0"]
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)", f"DROP DATABASE {name}_2 WITH (FORCE)")


def kept(database: Database) -> dict[str, str]:
    """The DSN of the only shard, as workers read it."""
    with database.transaction() as connection:
        found = execute(connection, "SELECT dsn FROM roir.shard WHERE removed_at IS NULL").scalar_one()
    return dict(parse_dsn(found))


class Warned(list[str]):
    def __call__(self, line: str, *values: object) -> None:
        self.append(line % values)


def test_a_name_is_a_shard_or_a_connection(database: Database, connections: Connections, shard: Connection) -> None:
    add_shards(database, ["orders_0"])
    add_shards(database, ["orders_0"])
    assert [(one.name, one.conn_id) for one in registry.listed(database)] == [("orders_0", "orders_0")]
    with pytest.raises(NotFound, match="neither a shard 'orders_1' nor an Airflow connection"):
        add_shards(database, ["orders_0", "orders_1"])
    connections.known["reports"] = Connection(conn_id="reports", conn_type="mysql", host="h", password="s3cret word")
    with pytest.raises(InvalidInput, match="'reports' is of type 'mysql'") as refused:
        add_shards(database, ["reports"])
    assert "s3cret" not in str(refused.value)


def test_a_connection_is_kept_with_whatever_is_in_it(database: Database, shard: Connection) -> None:
    """Passwords of any signs, and extras that libpq knows; those of Airflow's own hook are for Airflow alone."""
    shard.password = r"p@ss 'word' \\ /:?#%41 %s {x} ü$1"
    shard.extra = json.dumps({"application_name": "it's \\ here", "connect_timeout": 7, "cursor": "dictcursor"})
    add_shards(database, ["orders_0"])
    found = kept(database)
    assert found["password"] == shard.password
    assert (found["application_name"], found["connect_timeout"]) == ("it's \\ here", "7")
    assert "cursor" not in found
    # What is listed has no secret.
    assert "word" not in repr(registry.listed(database))
    assert registry.probe(database, "orders_0") is None


def test_a_connection_that_changes_is_followed_by_the_next_task(
    database: Database, connections: Connections, shard: Connection
) -> None:
    add_shards(database, ["orders_0"])
    warned = Warned()
    shard.password = "changed since"
    keep_connections(database, warned)
    assert kept(database)["password"] == "changed since"
    # What can't be used leaves the last one in place, and is named.
    shard.conn_type = "mysql"
    keep_connections(database, warned)
    shard.conn_type = "postgres"
    shard.extra = json.dumps({"sslmodus": "require"})
    keep_connections(database, warned)
    del connections.known["orders_0"]
    keep_connections(database, warned)
    assert [line.partition(":")[0] for line in warned] == ["Shard orders_0"] * 3
    assert "type 'mysql'" in warned[0]
    assert "sslmodus" in warned[1]
    assert "connection orders_0 " in warned[2]
    assert "since" not in "".join(warned)
    assert kept(database)["password"] == "changed since"


def test_a_connection_that_leads_to_another_database_since_is_not_worked_with(
    database: Database, connections: Connections, shard: Connection
) -> None:
    add_shards(database, ["orders_0"])
    shard.schema += "_2"
    keep_connections(database, Warned())
    assert "another database" in (registry.probe(database, "orders_0") or "")


def test_a_shard_whose_connection_no_task_can_find_says_which_one(
    database: Database, connections: Connections, shard: Connection
) -> None:
    """`roir shard add` by a connection alone: the command line can't look it up, a task does."""
    registry.add(database, "s0", conn_id="orders_0")
    assert "orders_0" in (registry.probe(database, "s0") or "")
    keep_connections(database, Warned())
    assert kept(database)["dbname"] == shard.schema
    registry.add(database, "s1", conn_id="orders_7")
    warned = Warned()
    keep_connections(database, warned)
    assert len(warned) == 1
    assert "connection orders_7 " in warned[0]
    assert "orders_7" in (registry.probe(database, "s1") or "")
