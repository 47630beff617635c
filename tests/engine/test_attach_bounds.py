"""The bounds of an attach mean what they mean in ATTACH PARTITION; nothing behind them is run."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.errors import InvalidInput
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

CREATE = (
    "CREATE TABLE public.canary (id int)",
    "CREATE TYPE public.mood AS ENUM ('sad', 'so-so', 'happy')",
    "CREATE FUNCTION public.first() RETURNS date LANGUAGE sql IMMUTABLE AS $$ SELECT date '2031-01-01' $$",
)
# Type of the partition key; the bounds of the existing partition and of the new one, as the user writes them; the
# settings of the user's role.
MEANINGS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "time zone": (
        "timestamptz",
        "FROM ('2030-01-01') TO ('2030-01-02')",
        "FROM ('2030-01-02') TO ('2030-01-03')",
        {"TimeZone": "America/New_York"},
    ),
    "date style": (
        "date",
        "FROM ('1/2/2030') TO ('2/2/2030')",
        "FROM ('2/2/2030') TO ('3/2/2030')",
        {"DateStyle": "DMY"},
    ),
    "interval style": (
        "interval",
        "FROM ('-2 1:00:00') TO ('-1 1:00:00')",
        "FROM ('-1 1:00:00') TO ('1:00:00')",
        {"IntervalStyle": "sql_standard"},
    ),
    "type in public": ("public.mood", "FROM ('sad') TO ('so-so')", "FROM ('so-so'::mood) TO ('happy'::mood)", {}),
    "function in public": ("date", "FROM ('2030-01-01') TO ('2031-01-01')", "FROM (first()) TO (first() + 365)", {}),
    "its schema": (
        "date",
        "FROM ('2030-01-01') TO ('2031-01-01')",
        "FROM (last() - 365) TO (last())",
        {"search_path": "elsewhere, public"},
    ),
    "now": ("timestamptz", "FROM (MINVALUE) TO ('2030-01-01')", "FROM (now() + interval '20 years') TO (MAXVALUE)", {}),
    "zone by session": (
        "timestamptz",
        "FROM (MINVALUE) TO ('2030-01-01 00:00+05')",
        "FROM (timestamp '2030-01-01' at time zone 'Asia/Karachi') TO (MAXVALUE)",
        {"TimeZone": "Asia/Karachi"},
    ),
    "text": ("text", "FROM ('a''b\\') TO ('b')", "FROM ('b') TO ($x$c; DROP TABLE canary --$x$)", {}),
    "escapes": ("text", "FROM (MINVALUE) TO ('b')", "FROM (E'b') TO (E'c\\'; DROP TABLE canary; --')", {}),
    "comment": ("int", "FROM (1) TO (2)", "FROM (/* one */ 2) TO (3) -- and no more", {}),
    "semicolon": ("int", "FROM (1) TO (2)", "FROM (2) TO (3);", {}),
    "float": ("float8", "FROM (0.1) TO (0.30000000000000004)", "FROM (0.1 + 0.2::float8) TO ('Infinity')", {}),
    "numeric": ("numeric", "FROM (0) TO (1.10)", "FROM (1.1) TO ('NaN')", {}),
    "bytea": ("bytea", "FROM ('\\x00') TO ('\\x0102')", "FROM ('\\x0102') TO ('\\xff')", {"bytea_output": "escape"}),
}


def make(dsn: str, key: str, bounds: str) -> None:
    run_sql(
        dsn,
        *CREATE,
        "CREATE SCHEMA elsewhere",
        "CREATE FUNCTION elsewhere.last() RETURNS date LANGUAGE sql IMMUTABLE AS $$ SELECT date '2032-01-01' $$",
        f"CREATE TABLE public.t (d {key}, id int, k text, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        f"CREATE TABLE public.t1 PARTITION OF t FOR VALUES {bounds}",
        "CREATE TABLE public.t2 (LIKE t INCLUDING ALL)",
    )
    steps.make_index(Database(dsn, "roir tests"), parallelism=1)


def written(dsn: str) -> str:
    query = "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = 'public.t2'::regclass"
    session = steps.session(dsn)
    sql(
        session, "SET TimeZone = 'UTC'; SET DateStyle = 'ISO'; SET IntervalStyle = 'postgres'; SET bytea_output = 'hex'"
    )
    return str(sql(session, query)[0][0])


@pytest.mark.sample(0)
@pytest.mark.parametrize("by", ["command", "psql"])
@pytest.mark.parametrize("meaning", MEANINGS)
def test_bounds_mean_what_they_mean_to_their_user(dsn: str, server: str, meaning: str, by: str) -> None:
    """The oracle is ATTACH PARTITION in a session of the same role."""
    key, _, _, settings = MEANINGS[meaning]
    name = dsn.split("?")[0].rsplit("/", 1)[1]
    bounds = [f"FOR VALUES {one}" for one in MEANINGS[meaning][1:3]]
    for setting, value in settings.items():
        # Each part of a search_path is an identifier of its own.
        run_sql(server, f"ALTER DATABASE {name} SET {setting} = {', '.join(map(repr, value.split(', ')))}")
    make(dsn, key, bounds[0].removeprefix("FOR VALUES "))
    run_sql(dsn, f"ALTER TABLE t ATTACH PARTITION t2 {bounds[1]}")
    wanted = written(dsn)
    run_sql(dsn, "ALTER TABLE t DETACH PARTITION t2")
    if by == "command":
        attach.attach_partition(Database(dsn), "public.t", "public.t2", bounds[1], "test")
    else:
        user = steps.session(dsn)
        sql(user, "SELECT roir.begin_attach('t', 't2', %s)", bounds[1])
        assert sql(user, "SELECT roir.finish_attach('t', 't2')") == [(True,)]
        user.commit()
    if meaning == "now":
        assert datetime.datetime.fromisoformat(written(dsn).split("'")[1]) > datetime.datetime.fromisoformat(
            wanted.split("'")[1]
        )
    else:
        assert written(dsn) == wanted
    assert sql(steps.session(dsn), "SELECT to_regclass('public.canary') IS NULL") == [(False,)]


HEADS = ("DEFAULT", "FOR VALUES FROM (2) TO (3)", "FOR VALUES IN (2)", "FOR VALUES WITH (MODULUS 2, REMAINDER 0)", "")
TAILS = (
    "; DROP TABLE public.canary",
    ";; DROP TABLE public.canary; --",
    "; COMMIT; DROP TABLE public.canary; BEGIN",
    "; DO $$BEGIN DROP TABLE public.canary; END$$",
    "/* */; DROP TABLE public.canary",
    "--\n; DROP TABLE public.canary",
    " PARTITION BY LIST (id)",
    " USING heap",
    " WITH (fillfactor = 10)",
    " TABLESPACE pg_default",
    " ON COMMIT DROP",
    ", ADD COLUMN evil int",
    " /* open",
    " 'open",
    ' "open',
    " $$open",
    " (evil int)",
    "%s %(name)s {0} {{ x }}",
    "\\; DROP TABLE public.canary \\",
)
FRONTS = (
    ".x DEFAULT",
    "(CHECK (false)) FOR VALUES FROM (2) TO (3)",
    "FOR VALUES FROM ((SELECT 2)) TO (3)",
    "FOR VALUES FROM (id) TO (3)",
    "FOR VALUES FROM (generate_series(1, 2)) TO (3)",
    "FOR VALUES FROM (1/0) TO (3)",
    "FOR VALUES FROM ('x') TO (3)",
    "FOR VALUES FROM (3) TO (2)",
    "FOR VALUES FROM (1) TO (3)",
    "FOR VALUES FROM (2)) TO (3)",
    "FOR VALUES FROM (2) TO (3",
    "",
    " ",
    "\n",
    "x" * 10_000,
    "FOR VALUES FROM (2) TO (3)\0; DROP TABLE public.canary",
    "\ud800",
)
HOSTILE = (*(head + tail for head in HEADS for tail in TAILS), *FRONTS)


@pytest.fixture(scope="module")
def shared(server: str) -> Iterator[str]:
    """A database that no case may change."""
    run_sql(server, "CREATE DATABASE attach_bounds TEMPLATE roir_template")
    dsn = database_dsn(server, "attach_bounds")
    make(dsn, "int", "FROM (1) TO (2)")
    yield dsn
    run_sql(server, "DROP DATABASE attach_bounds WITH (FORCE)")


@pytest.mark.sample(1)
@pytest.mark.parametrize("bounds", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_behind_the_bounds_is_refused(shared: str, bounds: str) -> None:
    """Found: a NUL or half of a UTF-16 sign in a reason, in bounds or in another text ended a task or a command by a
    traceback. It holds: one sentence. Found: text behind the bounds of an attach was executed, in a field that Airflow
    templates. It holds: the server's parser must find the bounds, and nothing else.
    """
    dsn = shared
    with pytest.raises(InvalidInput) as refused:
        attach.attach_partition(Database(dsn), "public.t", "public.t2", bounds, "test")
    assert "\n" not in str(refused.value)
    assert "joining_" not in str(refused.value)
    user = steps.session(dsn)
    assert sql(user, "SELECT to_regclass('public.canary') IS NULL") == [(False,)]
    # Nothing was begun.
    sql(user, "INSERT INTO t2 VALUES (2, 1, 'a')")
    assert sql(user, "SELECT FROM roir.source_partition WHERE status <> 'present'") == []
    user.rollback()


@pytest.mark.sample(0)
def test_an_attach_continues_with_the_bounds_that_it_began_with(dsn: str) -> None:
    """Found: an attach that was begun with other bounds was continued with new ones, and hid and watched by the old
    ones; a typing error in them cancelled it. It holds: refused, and the attach stays.
    """
    make(dsn, "int", "FROM (1) TO (2)")
    run_sql(dsn, "SELECT roir.begin_attach('t', 't2', 'FOR VALUES FROM (2) TO (9)')")
    told = r"t2 is being attached to public.t already, FOR VALUES FROM \(2\) TO \(9\).*roir.cancel_attach"
    with pytest.raises(InvalidInput, match=told):
        attach.attach_partition(Database(dsn), "t", "t2", "FOR VALUES FROM (3) TO (9)", "test")
    with pytest.raises(InvalidInput, match=r"syntax error.*still refuses writes.*cancel it: SELECT roir.cancel_attach"):
        attach.attach_partition(Database(dsn), "t", "t2", "nonsense", "test")
    with pytest.raises(psycopg2.errors.ObjectInUse):
        run_sql(dsn, "INSERT INTO t2 VALUES (2, 1, 'a')")
    attach.attach_partition(Database(dsn), "t", "t2", "FOR VALUES FROM (1 + 1) TO (10 - 1)", "test")


SPOILT: dict[str, tuple[str, ...]] = {
    "identity": ("ALTER TABLE t2 ALTER id ADD GENERATED ALWAYS AS IDENTITY",),
    "a column more": ("ALTER TABLE t2 ADD extra int",),
    "a column less": ("ALTER TABLE t2 DROP k",),
    "another type": ("ALTER TABLE t2 ALTER k TYPE varchar(9)",),
    "another collation": ('ALTER TABLE t2 ALTER k TYPE text COLLATE "C"',),
    "a generated column": ("ALTER TABLE t2 DROP k", "ALTER TABLE t2 ADD k text GENERATED ALWAYS AS ('x') STORED"),
    "nulls": ("ALTER TABLE t ALTER k SET NOT NULL",),
    "a check less": ("ALTER TABLE t ADD CHECK (id > 0)",),
    "a check of its own": (
        "ALTER TABLE t ADD CONSTRAINT c CHECK (id > 0)",
        "ALTER TABLE t2 ADD CONSTRAINT c CHECK (id > 1)",
    ),
    "not inherited": (
        "ALTER TABLE t ADD CONSTRAINT c CHECK (id > 0)",
        "ALTER TABLE t2 ADD CONSTRAINT c CHECK (id > 0) NO INHERIT",
    ),
    "not valid": (
        "ALTER TABLE t ADD CONSTRAINT c CHECK (id > 0)",
        "ALTER TABLE t2 ADD CONSTRAINT c CHECK (id > 0) NOT VALID",
    ),
    "another key": ("ALTER TABLE t2 DROP CONSTRAINT t2_pkey", "ALTER TABLE t2 ADD PRIMARY KEY (id, d)"),
    "inherits": ("CREATE TABLE p (k text)", "ALTER TABLE t2 INHERIT p"),
    "is inherited": ("CREATE TABLE p () INHERITS (t2)",),
    "transition tables": (
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$",
        "CREATE TRIGGER r AFTER INSERT ON t2 REFERENCING NEW TABLE AS n FOR EACH ROW EXECUTE FUNCTION f()",
    ),
    "typed": (
        "DROP TABLE t2",
        "CREATE TYPE typed AS (d int, id int, k text)",
        "CREATE TABLE t2 OF typed (PRIMARY KEY (d, id))",
    ),
    "unlogged is fine": ("ALTER TABLE t2 SET UNLOGGED",),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("spoilt", SPOILT)
def test_what_the_table_is_is_found_before_the_first_change(dsn: str, spoilt: str) -> None:
    """The oracle is ATTACH PARTITION: both refuse, or neither does."""
    make(dsn, "int", "FROM (1) TO (2)")
    run_sql(dsn, "ALTER TABLE t2 ALTER d SET NOT NULL", "INSERT INTO t2 VALUES (2, 5, 'a')")
    try:
        run_sql(dsn, *SPOILT[spoilt])
    except psycopg2.Error as error:
        pytest.skip(str(error))
    user = steps.session(dsn)
    bounds = "FOR VALUES FROM (2) TO (3)"
    refused: Any = None
    try:
        sql(user, f"ALTER TABLE t ATTACH PARTITION t2 {bounds}")
    except psycopg2.Error as error:
        refused = error
    user.rollback()
    if refused is None:
        attach.attach_partition(Database(dsn), "t", "t2", bounds, "test")
        return
    with pytest.raises(InvalidInput) as ours:
        attach.attach_partition(Database(dsn), "t", "t2", bounds, "test")
    assert "cancelled" not in str(ours.value), "nothing was begun"
    assert refused.diag.message_primary in str(ours.value) or refused.pgcode == "42P16"
    assert sql(user, "SELECT action FROM roir.event WHERE action = 'attach partition'") == []
