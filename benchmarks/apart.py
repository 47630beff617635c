"""Servers of an index apart, for `benchmarks.shards`: an index server and shards, all with the same settings.

The table is `orders`, with a lookup by e-mail, of which the shards hold a share each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from benchmarks.server import BenchServer

ROWS_PER_EMAIL = 3
KEY, PK, INCLUDE = "email", "id", "at"
COLUMNS = f"{KEY}, {PK}, {INCLUDE}"

TABLE = "CREATE TABLE orders (id bigint, email text, at timestamptz NOT NULL, total numeric(12,2), note text)"
# A shard has every {step}-th row from {first} on: an e-mail's rows are in several shards.
FILL = """
INSERT INTO orders SELECT i, 'user' || i * 7919 % {emails} || '@example.org',
       '2026-01-01'::timestamptz + i * interval '1 s', (i % 100000) / 100.0, repeat('x', 60)
  FROM generate_series({first}::bigint, {rows}, {step}) i
"""
KEYED = ("ALTER TABLE orders ADD PRIMARY KEY (id)", "VACUUM (ANALYZE) orders", "CHECKPOINT")


def email(number: int) -> str:
    """The e-mail of a number below `emails`."""
    return f"user{number}@example.org"


def emails(rows: int) -> int:
    """The number of different e-mails in a table of `rows` rows."""
    return max(rows // ROWS_PER_EMAIL, 1)


@dataclass
class Apart:
    """An index server's database and the shards'. dsns: by the shards' names. rows: of all shards together."""

    index: str
    dsns: dict[str, str]
    servers: list[BenchServer] = field(default_factory=list)
    rows: int = 0

    @property
    def database(self) -> Database:
        """The index server's."""
        return Database(self.index, "roir bench")

    def load(self, rows: int, *more: str) -> None:
        """The table in every shard, and more statements there."""
        self.rows = rows
        for number, dsn in enumerate(self.dsns.values()):
            filled = FILL.format(emails=emails(rows), first=number + 1, rows=rows, step=len(self.dsns))
            run(dsn, TABLE, filled, *KEYED, *more)


def connect(dsn: str) -> Any:
    """A session outside any transaction block."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    return connection


def run(dsn: str, *statements: str) -> None:
    """Statements, each by itself."""
    session = connect(dsn)
    with session.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
    session.close()


def value(dsn: str, query: str, *values: Any) -> Any:
    """One value."""
    session = connect(dsn)
    with session.cursor() as cursor:
        cursor.execute(query, values or None)
        (found,) = cursor.fetchone()
    session.close()
    return found


@contextmanager
def apart(count: int, version: int, shared_buffers: str, of_one_server: bool = False) -> Iterator[Apart]:
    """An index server and `count` shards, s0…; of_one_server: the shards are databases of one other server."""
    with ExitStack() as stack:

        def server() -> BenchServer:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="roir-bench-"))
            made = BenchServer(Path(folder), version, shared_buffers, "wal_level = logical\nmax_connections = 200\n")
            made.start()
            stack.callback(made.close)
            return made

        index = server()
        shards = [server()] * count if of_one_server else [server() for _ in range(count)]
        index.execute("CREATE DATABASE x")
        dsns = {}
        for number, one in enumerate(shards):
            one.execute(f"CREATE DATABASE s{number}")
            dsns[f"s{number}"] = one.dsn(f"s{number}")
        install.init(Database(index.dsn("x"), "roir bench"))
        yield Apart(index.dsn("x"), dsns, [index, *dict.fromkeys(shards)])


def parsed(dsn: str, names: Sequence[str] = ("host", "port", "dbname")) -> dict[str, str]:
    """The server and database of a DSN, by libpq's names."""
    given = psycopg2.extensions.parse_dsn(dsn)
    return {name: str(given[name]) for name in names if name in given}
