"""Every text that a user gives to a command or a function is a value or a name, and never a statement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, drop, lifecycle, prepare, revert
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.engine.schema.role import role_sql
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions, VerifyOptions, WorkOptions
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

EVIL = "DROP TABLE public.canary"
TEXTS = (
    f"'; {EVIL}; --",
    f'"; {EVIL}; --',
    f"x; {EVIL}",
    f"x'); {EVIL}; --",
    f"$$; {EVIL}; $$",
    f"$roir$; {EVIL}; $roir$",
    f"\\'; {EVIL}; --",
    f"\\; {EVIL}",
    f"E'\\''; {EVIL}; --",
    f"/* */ ; {EVIL} /*",
    f"--\n; {EVIL}",
    f"x\r\n; {EVIL}",
    f"public.t; {EVIL}",
    f'public."t"; {EVIL}; --',
    f"off; {EVIL}",
    f"0 22 * * * for 8h; {EVIL}",
    "%s %(name)s %% %",
    "{} {0} {{ x }} ${HOME} `id` $(id)",
    "x" * 64,
    "é" * 40,
    "x" * 100_000,
    "\0",
    f"t\0; {EVIL}",
    "\ud800",
    "\x1b[2J\x07",
    "\u202e\u2028",
    "",
    " ",
    "\\",
    "'",
    '"',
)


def build_of(**given: Any) -> Callable[[Database, str], object]:
    def way(database: Database, text: str) -> None:
        what = {"index": "another", "table": "public.t", "keys": "k"}
        what |= {name: value.format(text) if "{" in value else text for name, value in given.items()}
        definition = IndexDefinition.parse(**what)
        prepare.prepare(database, definition, BuildOptions(lock_patience_s=0), "test")
        abort.abort(database, str(definition.name), "test")

    return way


def by_sql(call: str) -> Callable[[Database, str], object]:
    """Calls a function in the user's own session, and rolls back."""

    def way(database: Database, text: str) -> None:
        session = steps.session(database.dsn)
        try:
            sql(session, f"SELECT {call}", text)
        finally:
            session.close()

    return way


def of_role(database: Database, text: str, schemas: tuple[str, ...] = ("public",)) -> None:
    statements = role_sql(text, schemas)
    session = steps.session(database.dsn)
    try:
        sql(session, statements.replace("BEGIN;", "", 1).rsplit("COMMIT;", 1)[0])
    finally:
        session.close()


WAYS: dict[str, Callable[[Database, str], object]] = {
    "status": lambda database, text: status(database, text),
    "pause, index": lambda database, text: requests.pause(database, text, "test"),
    "pause, reason": lambda database, text: requests.pause(database, "building", "test", text),
    "pause, actor": lambda database, text: requests.pause(database, "building", text),
    "resume, index": lambda database, text: requests.resume(database, text, "test"),
    "change, throttle": lambda database, text: requests.change_options(
        database, "building", actor="test", throttle=text
    ),
    "change, windows": lambda database, text: requests.change_options(database, "building", actor="test", windows=text),
    "change, actor": lambda database, text: requests.change_options(database, "building", actor=text, priority=1),
    "abort, index": lambda database, text: abort.abort(database, text, "test"),
    "revert, index": lambda database, text: revert.revert(database, text, "test"),
    "drop, index": lambda database, text: drop.drop_index(database, text, "test"),
    "verify, index": lambda database, text: lifecycle.verify(database, text, VerifyOptions(), "test"),
    "prepare, index": build_of(index=""),
    "prepare, quoted index": build_of(index='"{}"'),
    "prepare, schema": build_of(index='"{}".ix'),
    "prepare, table": build_of(table=""),
    "prepare, keys": build_of(keys=""),
    "prepare, quoted keys": build_of(keys='"{}"'),
    "prepare, include": build_of(include=""),
    "work, throttle": lambda database, text: WorkOptions(throttle=text),
    "detach": lambda database, text: detach.detach_partition(database, text, "test"),
    "attach, table": lambda database, text: attach.attach_partition(database, text, "loaded", "DEFAULT", "test"),
    "attach, partition": lambda database, text: attach.attach_partition(database, "t", text, "DEFAULT", "test"),
    "attach, bounds": lambda database, text: attach.attach_partition(database, "t", "loaded", text, "test"),
    "attach, value": lambda database, text: attach.attach_partition(
        database, "t", "loaded", f"FOR VALUES FROM ('{text}') TO (9)", "test"
    ),
    "sync": lambda database, text: sync.sync_partitions(database, text, "test"),
    "role": of_role,
    "role, schema": lambda database, text: of_role(database, "fine", (text,)),
    **{
        call: by_sql(call)
        for call in (
            "roir.pause(%s)",
            "roir.pause('building', %s)",
            "roir.pause('building', 'x', %s)",
            "roir.resume(%s)",
            "roir.resume('building', throttle => %s)",
            "roir.abort(%s)",
            "roir.abort('building', %s)",
            "roir.change('building', throttle => %s)",
            "roir.change(%s, priority => 1)",
            "roir.detach_partition('public.t1', %s)",
            "roir.detach_partition('public.t1', actor => %s)",
            "roir.begin_attach('public.t', 'public.loaded', %s)",
            "roir.begin_attach('public.t', 'public.loaded', 'DEFAULT', %s)",
        )
    },
}


@pytest.fixture(scope="module")
def shared(server: str) -> Iterator[Database]:
    """A published index, and one whose build is paused."""
    run_sql(server, "CREATE DATABASE hostile_texts TEMPLATE roir_template")
    dsn = database_dsn(server, "hostile_texts")
    run_sql(
        dsn,
        "CREATE TABLE public.canary (id int)",
        "CREATE TABLE public.t (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)",
        "CREATE TABLE public.t1 PARTITION OF public.t FOR VALUES FROM (0) TO (1)",
        "CREATE TABLE public.loaded (LIKE t INCLUDING ALL)",
    )
    database = Database(dsn, "roir tests")
    steps.make_index(database)
    steps.begin(database, "building")
    yield database
    run_sql(server, "DROP DATABASE hostile_texts WITH (FORCE)")


@pytest.mark.parametrize("way", WAYS)
def test_no_text_becomes_a_statement(shared: Database, way: str) -> None:
    for text in TEXTS:
        case = f"{way}: {text[:100]!r}"
        refused: Exception | None = None
        try:
            WAYS[way](shared, text)
        except (RoirError, psycopg2.Error, ValueError) as error:
            refused = error
        if isinstance(refused, RoirError):
            assert str(refused), case
            assert "\n" not in str(refused).replace(text, ""), f"{case}: {refused}"
            assert len(str(refused)) < 1000 + 2 * len(text), case
        elif refused is not None:
            # The user's own session or driver refuses it.
            assert "roir." in way or "role" in way, f"{case}: {refused!r}"
        session = steps.session(shared.dsn)
        assert sql(session, "SELECT to_regclass('public.canary') IS NULL") == [(False,)], case
        session.close()
    session = steps.session(shared.dsn)
    assert sql(session, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'roir_joining%'") == [(0,)]
    live = "SELECT DISTINCT name FROM roir.index WHERE dropped_at IS NULL ORDER BY 1"
    assert sql(session, live) == [("building",), ("ix",)]
    session.close()
