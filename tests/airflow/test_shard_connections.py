"""Shards that are Airflow connections: added by their names, and looked up again by each task."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_roir.engine.database import Database
from airflow_roir.engine.shards import registry
from airflow_roir.errors import NotFound
from airflow_roir.hooks.roir import RoirHook
from airflow_roir.task.shard_connections import add_shards, keep_connections
from tests.conftest import database_dsn, run_sql


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


def test_a_name_is_a_shard_or_a_connection(dsn: str, server: str, database: Database, connections: Connections) -> None:
    from psycopg2.extensions import parse_dsn

    shard = "shard_" + parse_dsn(dsn)["dbname"]
    run_sql(server, f"CREATE DATABASE {shard}")
    try:
        given: dict[str, Any] = parse_dsn(database_dsn(server, shard))
        connections.known["orders_0"] = Connection(
            conn_id="orders_0",
            conn_type="postgres",
            host=given["host"],
            login=given["user"],
            schema=shard,
        )
        add_shards(database, ["orders_0"])
        add_shards(database, ["orders_0"])
        assert [(one.name, one.conn_id) for one in registry.listed(database)] == [("orders_0", "orders_0")]
        with pytest.raises(NotFound, match="neither a shard 'orders_1' nor"):
            add_shards(database, ["orders_0", "orders_1"])
        connections.known["orders_0"].password = "changed since"
        warned: list[Any] = []
        keep_connections(database, lambda *line: warned.append(line))
        kept = "SELECT dsn LIKE '%changed since%' FROM roir.shard"
        with database.transaction() as connection:
            from airflow_roir.engine.database import execute

            assert execute(connection, kept).scalar_one()
        del connections.known["orders_0"]
        keep_connections(database, lambda *line: warned.append(line))
        assert len(warned) == 1
        assert "changed" not in str(warned)
    finally:
        run_sql(server, f"DROP DATABASE {shard} WITH (FORCE)")
