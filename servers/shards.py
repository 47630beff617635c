"""An index server and its shards: databases of one server, or servers of their own that can be killed one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg2

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from servers.killable import Server
from servers.postgres import COPIED


@dataclass(frozen=True)
class Shards:
    """index: the DSN of the index server's database, which has the control schema. dsns: of the shards, by name.

    servers: where each is a server of its own, by name; the index server's is `index`.
    """

    index: str
    dsns: dict[str, str]
    servers: dict[str, Server] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return list(self.dsns)

    @property
    def database(self) -> Database:
        """The index server's, as the engine takes it."""
        return Database(self.index, "roir tests")

    def shard(self, name: str) -> Database:
        """A shard's, as the engine takes it."""
        return Database(self.dsns[name], "roir tests")

    def run(self, *statements: str, only: str | None = None) -> None:
        """Run statements in every shard, or in one; `{shard}` is its name, `{number}` its number from 0."""
        for number, (name, dsn) in enumerate(self.dsns.items()):
            if only in (None, name):
                run_sql(dsn, *(one.replace("{shard}", name).replace("{number}", str(number)) for one in statements))

    def ask(self, statement: str, *values: Any, shard: str | None = None) -> list[tuple[Any, ...]]:
        """The rows of a query, on the index server or in a shard."""
        with closing(psycopg2.connect(self.dsns[shard] if shard else self.index)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, values or None)
                return cursor.fetchall() if cursor.description else []


def make_databases(server: str, prefix: str, count: int, template: str | None = None) -> Shards:
    """Databases `<prefix>_x`, for the index, and `<prefix>_s0`…, for the shards s0…, on one server.

    template: a database with the control schema, which is made otherwise.
    """
    run_sql(server, f"CREATE DATABASE {prefix}_x {COPIED}" + (f" TEMPLATE {template}" if template else ""))
    index = on_server(server, f"{prefix}_x")
    if template is None:
        install.init(Database(index, "roir"))
    run_sql(server, *(f"CREATE DATABASE {prefix}_s{number} {COPIED}" for number in range(count)))
    return Shards(index, {f"s{number}": on_server(server, f"{prefix}_s{number}") for number in range(count)})


def drop_databases(server: str, shards: Shards) -> None:
    """Drop their databases, also if sessions are connected."""
    for dsn in (shards.index, *shards.dsns.values()):
        run_sql(server, f"DROP DATABASE IF EXISTS {urlsplit(dsn).path[1:]} WITH (FORCE)")


@contextmanager
def shard_servers(count: int, version: int = 18, settings: str = "") -> Iterator[Shards]:
    """An index server and shards s0…, each a server of its own on the loopback interface, in temporary folders.

    settings: lines for each postgresql.conf.
    """
    with ExitStack() as stack:
        servers = {}
        for name in ("index", *(f"s{number}" for number in range(count))):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"roir-{name}-")))
            servers[name] = Server(folder, version, settings=settings)
            servers[name].start()
            stack.callback(servers[name].close)
        install.init(Database(servers["index"].dsn(), "roir"))
        dsns = {name: server.dsn() for name, server in servers.items()}
        yield Shards(dsns.pop("index"), dsns, servers)


def on_server(dsn: str, name: str) -> str:
    """The DSN of another database of the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


def run_sql(dsn: str, *statements: str) -> None:
    """Run statements, each in a transaction of its own."""
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
