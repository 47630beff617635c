"""Shards that are Airflow connections: named by the index server's own one alone, and looked up again by each task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from psycopg2.extensions import parse_dsn

from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.shards import registry
from airflow_roir.task import shard_connections
from airflow_roir.task.shard_connections import connections_of
from tests.conftest import run_sql


class Connections:
    """The connections that Airflow knows."""

    def __init__(self) -> None:
        self.known: dict[str, Connection] = {}

    def get(self, conn_id: str) -> Connection:
        if conn_id not in self.known:
            raise AirflowNotFoundException(conn_id)
        return self.known[conn_id]


INDEX = "the_index_server"


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Connections:
    found = Connections()
    found.known[INDEX] = Connection(conn_id=INDEX, conn_type="postgres", host="index")
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
    name_shards(connections, "orders_0")
    yield connections.known["orders_0"]
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)", f"DROP DATABASE {name}_2 WITH (FORCE)")


def name_shards(connections: Connections, *given: object) -> None:
    """Lets the index server's connection name the shards."""
    connections.known[INDEX].extra = json.dumps({"roir_shards": given[0] if isinstance(given[0], dict) else given})


def add_shards(database: Database, names: list[str]) -> None:
    shard_connections.add_shards(database, INDEX, names)


def keep_connections(database: Database, warned: Warned) -> None:
    shard_connections.keep_connections(database, INDEX, warned)


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
    assert [one.name for one in registry.listed(database)] == ["orders_0"]
    name_shards(connections, "orders_0", "orders_1", "reports")
    with pytest.raises(NotFound, match="names 'orders_1' for shard 'orders_1', and there is no such connection"):
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
    # The list of shards has no secret.
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
    # A connection that can't be used leaves the last one in place, and is named.
    shard.conn_type = "mysql"
    keep_connections(database, warned)
    shard.conn_type = "postgres"
    shard.extra = json.dumps({"sslmodus": "require"})
    keep_connections(database, warned)
    shard_of = connections.known.pop("orders_0")
    assert shard_of is shard
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


# Each is a way to name a connection whose password the database's owner, or the user who triggers, would like to read.
def by_a_row(database: Database, name: str) -> None:
    with database.transaction() as connection:
        execute(connection, "INSERT INTO roir.shard (name, dsn) VALUES (%(name)s, '')", {"name": name})
    keep_connections(database, Warned())


def by_a_row_of_a_known_shard(database: Database, name: str) -> None:
    add_shards(database, ["orders_0"])
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.shard SET name = %(name)s", {"name": name})
    keep_connections(database, Warned())


def by_the_form(database: Database, name: str) -> None:
    with pytest.raises(NotFound, match=r"there is no shard .* in the extra of connection 'the_index_server'"):
        add_shards(database, [name])


@pytest.mark.parametrize("way", [by_a_row, by_a_row_of_a_known_shard, by_the_form])
@pytest.mark.parametrize("name", ["prod_warehouse", INDEX])
def test_no_name_of_a_row_or_of_the_form_chooses_a_connection(
    way: Callable[[Database, str], None], name: str, database: Database, connections: Connections, shard: Connection
) -> None:
    """Found: `INSERT INTO roir.shard (name, conn_id) VALUES ('x', 'prod_warehouse')`, or that name in the form's
    *Shards*: the next task wrote the connection's DSN, with its password, into that database. It holds: the index
    server's own connection names those of its shards; rows and forms name none.
    """
    connections.known["prod_warehouse"] = Connection(
        conn_id="prod_warehouse", conn_type="postgres", host=shard.host, login=shard.login, password="never seen"
    )
    connections.known[INDEX].password = "never seen"
    way(database, name)
    with database.transaction() as connection:
        assert "never seen" not in str(execute(connection, "SELECT s::text FROM roir.shard s").all())


def test_a_column_that_named_connections_is_not_read_any_more(
    database: Database, connections: Connections, shard: Connection
) -> None:
    """A control schema that was made before has it; its owner may write to it, or make one."""
    with database.transaction() as connection:
        execute(connection, "ALTER TABLE roir.shard ADD conn_id text, DROP CONSTRAINT shard_reached")
        execute(connection, "INSERT INTO roir.shard (name, conn_id) VALUES ('x', 'orders_0')")
    shard.password = "never seen"
    keep_connections(database, Warned())
    with database.transaction() as connection:
        assert execute(connection, "SELECT dsn FROM roir.shard").scalar_one() is None
    # What to do instead is said.
    assert "in the extra roir_shards of the index server's connection" in (registry.probe(database, "x") or "")
    name_shards(connections, {"x": "orders_0"})
    keep_connections(database, Warned())
    assert kept(database)["dbname"] == shard.schema


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ([], {}),
        ("a, b,", {"a": "a", "b": "b"}),
        (["a", "b"], {"a": "a", "b": "b"}),
        ({"a": "of a"}, {"a": "of a"}),
        (["a", 1], None),
        ([""], None),
        ({"a": ["b"]}, None),
        (7, None),
    ],
)
def test_how_connections_are_named(given: object, expected: dict[str, str] | None, connections: Connections) -> None:
    connections.known[INDEX].extra = json.dumps({"roir_shards": given})
    if expected is not None:
        assert connections_of(INDEX) == expected
        # It is none of libpq's settings.
        assert "roir_shards" not in RoirHook(INDEX).get_dsn()
        return
    with pytest.raises(InvalidInput, match="'roir_shards' must be a list"):
        connections_of(INDEX)
