"""An Airflow home for the tests of this folder: nothing of the machine's own Airflow is read or changed."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from airflow_roir.engine.database import Database
from tests.airflow.orders import ORDERS, ORDERS_EACH
from tests.conftest import run_sql

# Before the first import of Airflow, which reads its configuration then and only then.
_HOME = tempfile.TemporaryDirectory(prefix="roir-airflow-tests-")
for _name in [name for name in os.environ if name.startswith(("AIRFLOW", "_AIRFLOW"))]:
    del os.environ[_name]
os.environ |= {
    "AIRFLOW_HOME": _HOME.name,
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME.name}/airflow.db",
}


@pytest.fixture(scope="session")
def dags_folder() -> Path:
    """The DAG files as they are shipped."""
    return Path(__file__).parents[2] / "dags"


@dataclass(frozen=True)
class Shop:
    """A database of its own with the control schema and a table `public.item`, and how to reach it.

    fields: host, port, login, password and schema, as an Airflow connection has them.
    """

    fields: dict[str, Any]

    @property
    def database(self) -> Database:
        """The engine's handle."""
        return Database(self.dsn, "roir tests")

    @property
    def dsn(self) -> str:
        """The DSN, password included."""
        names = {"schema": "dbname", "login": "user"}
        return make_dsn(**{names.get(name, name): value for name, value in self.fields.items() if value})

    def run(self, sql: str) -> list[Any]:
        """Runs one statement in a transaction of its own; returns its rows."""
        with closing(psycopg2.connect(self.dsn)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def shop(dsn: str) -> Shop:
    """See `Shop`. The role's password is like nothing else, so that it can be looked for."""
    role, password = f"builder_{secrets.token_hex(4)}", f"never-seen '{secrets.token_hex(8)}'"
    admin = parse_dsn(dsn)
    fields = {"host": admin["host"], "port": admin.get("port"), "schema": admin["dbname"]}
    shop = Shop(fields | {"login": admin["user"]})
    # It outlives its database, harmlessly: the server goes with the session.
    shop.run(f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD $${password}$$")
    shop = Shop(fields | {"login": role, "password": password})
    shop.run("CREATE TABLE public.item (id bigint PRIMARY KEY, kind text, price int)")
    shop.run("INSERT INTO public.item SELECT n, 'k' || n % 97, n % 1000 FROM generate_series(1, 20000) n")
    return shop


@pytest.fixture
def orders(airflow: Any, shop: Shop) -> Iterator[dict[str, str]]:
    """Two shards with a table `public.orders`, each an Airflow connection; their DSNs by its id.

    The shop is the index server, and the connection that `ship_changes` has by default.
    """
    role, password = f"app_{shop.fields['schema']}", f"unheard of '{shop.fields['schema']}' \\ %s ü"
    fields = {name: value for name, value in shop.fields.items() if value}
    run_sql(shop.dsn, f"CREATE ROLE {role} LOGIN PASSWORD $${password}$$")
    found = {}
    for name in ORDERS:
        database = f"{name}_{shop.fields['schema']}"
        run_sql(shop.dsn, f"CREATE DATABASE {database} OWNER {role}")
        there = fields | {"schema": database, "login": role, "password": password}
        airflow.add_connection(name, "postgres", **there, extra={"application_name": f"of {name}"})
        names = {"schema": "dbname", "login": "user"}
        found[name] = make_dsn(**{names.get(key, key): value for key, value in there.items()})
        run_sql(
            found[name],
            "CREATE TABLE public.orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text, total int)",
            f"INSERT INTO orders (email, total) SELECT n || '@of.{name}', n FROM generate_series(1, {ORDERS_EACH}) n",
            "ANALYZE orders",
        )
    airflow.add_connection("postgres_default", "postgres", **fields, extra={"roir_shards": list(ORDERS)})
    try:
        yield found
    finally:
        airflow.pause("ship_changes")
        for name in (*ORDERS, "postgres_default"):
            airflow.call("DELETE", f"/api/v2/connections/{name}")
        for name in ORDERS:
            run_sql(shop.dsn, f"DROP DATABASE {name}_{shop.fields['schema']} WITH (FORCE)")
