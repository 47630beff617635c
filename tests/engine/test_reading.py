"""Rows through an index: `roir.rows` and `roir_client.rows` find what the plain query of the source finds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest
from sqlalchemy import Integer, Text, column, create_engine, func, select
from sqlalchemy import table as new_table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.orm import Session as OrmSession

from airflow_roir.engine.database import Database
from roir_client.rows import rows
from tests.conftest import database_dsn, run_sql
from tests.engine import isolation, steps
from tests.engine.steps import sql
from tests.engine.values import ARRAYS, ORDERED, SETUP, supported

pytestmark = pytest.mark.sample(3)

_numbers = itertools.count(1)
PARTITIONED = (
    "CREATE TABLE t (d int, id int, k text, gone int, v json, n int DEFAULT 1, PRIMARY KEY (d, id)) "
    "PARTITION BY RANGE (d)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}) TO ({n + 1})" for n in range(30)),
    "INSERT INTO t SELECT i % 30, i, nullif(i % 20, 3)::text, 0, '{\"a\": 1}' FROM generate_series(1, 300) i",
    "ALTER TABLE t DROP COLUMN gone",
)


@pytest.fixture(scope="module")
def template(server: str) -> str:
    """A database with a source of 30 partitions and index `ix` on k. The source has a column without equality."""
    run_sql(server, "CREATE DATABASE reading TEMPLATE roir_template")
    dsn = database_dsn(server, "reading")
    run_sql(dsn, *PARTITIONED)
    database = Database(dsn, "roir tests")
    steps.make_index(database, include="v")
    database.engine.dispose()
    return "reading"


@pytest.fixture
def indexed(template: str, server: str) -> Iterator[str]:
    """The DSN of a copy of the template."""
    name = f"reading_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield database_dsn(server, name)
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


def both(
    user: psycopg2.extensions.connection, key: dict[str, Any], condition: str, source: str = "t"
) -> list[tuple[Any, ...]]:
    """The rows by each form of the function. They must be those of the plain query."""
    plain = sql(user, f"SELECT x::text FROM t x WHERE {condition} ORDER BY 1")
    by_key = "SELECT x::text FROM roir.rows(NULL::t, 'ix', %s) x ORDER BY 1"
    assert sql(user, by_key, json.dumps(key)) == plain
    by_entries = f"SELECT x::text FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE {condition})) x ORDER BY 1"
    assert sql(user, by_entries) == plain
    return plain


@pytest.mark.parametrize("key", [{"k": "7"}, {"k": None}, {"k": "7", "id": 67}, {"d": 5}, {"k": "none"}], ids=str)
def test_the_rows_are_those_of_the_plain_query(indexed: str, key: dict[str, Any]) -> None:
    user = steps.session(indexed)
    condition = " AND ".join(
        f"{name} IS NULL" if value is None else f"{name} = '{value}'" for name, value in key.items()
    )
    found = both(user, key, condition)
    assert bool(found) == (key.get("k") != "none")


def test_only_the_partitions_of_the_rows_are_locked(indexed: str) -> None:
    user = steps.session(indexed)
    locked = (
        "SELECT DISTINCT relation::regclass::text FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation'"
    )
    sql(user, "SET plan_cache_mode = force_generic_plan")
    sql(
        user,
        "PREPARE prepared AS SELECT count(*) FROM "
        "roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE k = $1 AND d = $2))",
    )
    user.commit()
    for read in (
        'SELECT count(*) FROM roir.rows(NULL::t, \'ix\', \'{"k": "7", "d": 7}\')',
        "SELECT count(*) FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE k = '7' AND d = 7))",
        "EXECUTE prepared ('7', 7)",
    ):
        assert sql(user, read) == [(5,)]
        assert {name for (name,) in sql(user, locked) if name in {f"t{n}" for n in range(30)}} == {"t7"}
        user.rollback()


@pytest.mark.parametrize(
    "call",
    ["'ix', '{\"k\": \"7\"}'", "ARRAY(SELECT i FROM ix i WHERE k = '7' ORDER BY d, id)"],
    ids=["by key", "by entries"],
)
@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_rows_that_move_between_partitions_are_each_found_once(indexed: str, call: str, broken: bool) -> None:
    """At READ COMMITTED: the reader has read rows of t7 and waits for t17, while rows leave both.

    broken: each statement of a volatile function has a snapshot of its own, and rows are lost.
    """
    if broken:
        run_sql(
            indexed,
            *(
                f"ALTER FUNCTION roir.rows(anyelement, {rest}) VOLATILE"
                for rest in ("anycompatiblearray", "regclass, jsonb")
            ),
        )
    writer, reader, watcher = isolation.Session(indexed), isolation.Session(indexed), isolation.Watcher(indexed)
    user = steps.session(indexed)
    before = sql(user, "SELECT x::text FROM t x WHERE k = '7' ORDER BY 1")
    user.rollback()
    do(writer, "BEGIN; LOCK TABLE t17 IN ACCESS EXCLUSIVE MODE")
    reader.send(f"SELECT x::text FROM roir.rows(NULL::t, {call}) x ORDER BY 1")
    while not watcher.is_blocked(reader, [writer]):
        assert not reader.ended(0.01)
    do(writer, "UPDATE t SET d = CASE d WHEN 7 THEN 27 WHEN 17 THEN 3 ELSE 7 END, n = 2 WHERE k = '7'; COMMIT")
    while not reader.ended(0.1):
        pass
    assert reader.error == ""
    assert (reader.cursor.fetchall() == before) is not broken
    after = both(user, {"k": "7"}, "k = '7'")
    assert len(after) == len(before)
    assert set(after).isdisjoint(before)
    for session in (writer, reader):
        session.close()


def do(session: isolation.Session, statement: str) -> None:
    session.send(statement)
    while not session.ended(0.1):
        pass
    assert session.error == ""


def test_rights_and_row_security_are_the_callers(indexed: str, server: str) -> None:
    role = f"reader_{indexed.split('?')[0].rsplit('_', 1)[1]}"
    run_sql(
        indexed,
        f"CREATE ROLE {role}",
        "CREATE SCHEMA own",
        f"GRANT USAGE ON SCHEMA own TO {role}",
        # Functions that a policy calls find names as the caller's queries do.
        "CREATE TABLE own.allowed AS SELECT 7 AS d",
        f"GRANT SELECT ON own.allowed TO {role}",
        "CREATE FUNCTION own.may(d int) RETURNS boolean LANGUAGE plpgsql STABLE AS "
        "$$ BEGIN RETURN EXISTS (SELECT FROM allowed a WHERE a.d = may.d); END $$",
    )
    user = steps.session(indexed)
    user.autocommit = True
    calls = (
        "SELECT count(*) FROM roir.rows(NULL::t, 'ix', '{\"k\": \"7\"}')",
        "SELECT count(*) FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE k = '7'))",
    )
    try:
        sql(user, f"SET ROLE {role}; SET search_path = public, own")
        for granted in ("USAGE ON SCHEMA public", "SELECT ON ix", "SELECT (d, id, k) ON t"):
            sql(user, f"RESET ROLE; GRANT {granted} TO {role}; SET ROLE {role}")
            for call in calls:
                with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                    sql(user, call)
        sql(user, f"RESET ROLE; GRANT SELECT ON t TO {role}; SET ROLE {role}")
        assert [sql(user, call) for call in calls] == [[(15,)], [(15,)]]
        sql(user, "RESET ROLE; ALTER TABLE t ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON t USING (own.may(d))")
        sql(user, f"SET ROLE {role}")
        assert [sql(user, call) for call in calls] == [[(5,)], [(5,)]]
        assert sql(user, "SELECT count(*) FROM t WHERE k = '7'") == [(5,)]
    finally:
        sql(user, f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


def test_reading_writes_nothing_and_may_be_prepared(indexed: str) -> None:
    user = steps.session(indexed, "SERIALIZABLE")
    user.set_session(readonly=True)
    sql(user, "PREPARE p (text) AS SELECT count(*) FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE k = $1))")
    sql(user, "PREPARE q (jsonb) AS SELECT count(*) FROM roir.rows(NULL::t, 'ix', $1)")
    for _ in range(7):
        assert sql(user, "EXECUTE p ('7')") == sql(user, 'EXECUTE q (\'{"k": "7"}\')') == [(15,)]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("NULL::t, 'ix', '{}'", "at least one key column"),
        ("NULL::t, 'ix', NULL", "at least one key column"),
        ("NULL::t, 'ix', '[1]'", "at least one key column"),
        ("NULL::t, 'ix', '{\"v\": 1}'", "v isn't a column of its key or of the primary key: k, d, id"),
        ("NULL::t7, 'ix', '{\"k\": 1}'", "not a roir index of table public.t7"),
        ("NULL::t, 't', '{\"k\": 1}'", "not a roir index"),
        ("1, 'ix', '{\"k\": 1}'", "integer is not the row type of a table"),
        ("NULL::t, ARRAY[1]", "no rows of an index"),
        ("NULL::t, ARRAY(SELECT c FROM pg_class c)", "lacks d, id, a part of the primary key"),
        ("NULL::heap, ARRAY(SELECT i FROM ix i)", "table public.heap has no primary key"),
    ],
)
@pytest.mark.sample(1)
def test_what_cant_be_read_is_refused(indexed: str, call: str, said: str) -> None:
    run_sql(indexed, "CREATE TABLE heap (k text)")
    with pytest.raises(psycopg2.Error, match=said):
        sql(steps.session(indexed), f"SELECT * FROM roir.rows({call})")


def test_names_are_only_names(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE SCHEMA "S.""x"',
        'CREATE TABLE "S.""x"."%s;" ("$1" int, "k"" %I" text, "E" int, v int, PRIMARY KEY ("E", "$1")) '
        'PARTITION BY LIST ("E")',
        'CREATE TABLE "S.""x"."p""1" PARTITION OF "S.""x"."%s;" FOR VALUES IN (1)',
        'INSERT INTO "S.""x"."%s;" SELECT i, i::text, 1 FROM generate_series(1, 9) i',
    )
    steps.make_index(database, '"S.""x"."ix%s"', '"S.""x"."%s;"', '"k"" %I"', include="v")
    user = steps.session(dsn)
    query = """SELECT * FROM roir.rows(NULL::"S.""x"."%%s;", '"S.""x"."ix%%s"', %s)"""
    assert sql(user, query, json.dumps({'k" %I': "7"})) == [(7, "7", 1, None)]


def test_entries_may_come_by_a_view_of_ones_own(indexed: str) -> None:
    run_sql(indexed, "CREATE VIEW mine WITH (security_barrier) AS SELECT id, d FROM ix WHERE k = '7'")
    user = steps.session(indexed)
    assert sql(user, "SELECT count(*), min(k) FROM roir.rows(NULL::t, ARRAY(SELECT m FROM mine m))") == [(15, "7")]


def test_a_row_that_has_another_key_by_now_is_not_the_entrys(indexed: str) -> None:
    user = steps.session(indexed)
    sql(user, "CREATE TEMP TABLE kept AS SELECT ARRAY(SELECT i FROM ix i WHERE k = '7') AS entries; COMMIT")
    sql(user, "UPDATE t SET k = NULL WHERE k = '7' AND d = 7; COMMIT")
    assert sql(user, "SELECT count(*) FROM kept, roir.rows(NULL::t, entries)") == [(10,)]


# Values that no row has unless they are cut or rounded to their column's length; and one value with two spellings.
LENGTHS: dict[str, tuple[str, list[Any]]] = {
    "numeric(5,2)": ("1.01", ["1.005", "12345678"]),
    "varchar(3)": ("abc", ["abc  ", "abcd"]),
    "char(3)": ("abc", ["abcd", "abc  "]),
    "timestamptz(0)": ("2020-01-01 12:00:00", ["2020-01-01 12:00:00.4"]),
    "interval day": ("1 day", ["1 day 1 hour", "24:00"]),
    "bit(3)": ("100", ["1", "1000"]),
    "varbit(3)": ("101", ["10111"]),
    "numeric(3,1)[]": ("{1.0}", [[1.04], "{1.04}"]),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.sample(0)
def test_a_value_is_not_cut_to_its_columns_length(database: Database, dsn: str, name: str) -> None:
    has, asked = LENGTHS[name]
    run_sql(
        dsn,
        f"CREATE TABLE t (id {name} PRIMARY KEY, x {name}) PARTITION BY RANGE (id)",
        "CREATE TABLE t_default PARTITION OF t DEFAULT",
        f"INSERT INTO t VALUES ('{has}', '{has}')",
    )
    steps.make_index(database, keys="x")
    user = steps.session(dsn)
    base = name.partition("(")[0].replace("interval day", "interval").replace("char", "bpchar")
    base = {"varbpchar": "varchar", "bit": 'pg_catalog."bit"'}.get(base, base) + ("[]" if "[]" in name else "")
    for value in [has, *asked]:
        literal = "{1.04}" if isinstance(value, list) else value
        for asks in ("x", "id"):
            plain = sql(user, f"SELECT x FROM t WHERE {asks} = '{literal}'::{base}")
            assert sql(user, "SELECT x FROM roir.rows(NULL::t, 'ix', %s)", json.dumps({asks: value})) == plain, value
    assert plain == sql(user, f"SELECT x FROM t WHERE id = '{literal}'")


TYPES = {name: values for name, values in {**ORDERED, **ARRAYS}.items() if name != '"char"'}


@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sample(0)
def test_every_type_is_a_key_and_a_primary_key(database: Database, dsn: str, name: str, partitioned: bool) -> None:
    """As key beside another one, each NULL or not, and as primary key: by a list of values, the plainest pruning."""
    run_sql(dsn, *SETUP)
    values = supported(dsn, name, TYPES[name])
    listed = ", ".join(f"({i}, {value}::{name})" for i, value in enumerate(values, start=1))
    by = "PARTITION BY RANGE (p)" if partitioned else ""
    run_sql(
        dsn,
        f"CREATE TABLE t (p {name}, x {name}, y int, j json, PRIMARY KEY (p, y)) {by}",
        *(["CREATE TABLE t_default PARTITION OF t DEFAULT"] if partitioned else []),
        f"INSERT INTO t SELECT x, x, n, '{{}}' FROM (VALUES {listed}) v (i, x), generate_series(0, 1) n "
        "ON CONFLICT DO NOTHING",
        "UPDATE t SET x = NULL WHERE y = 1",
    )
    steps.make_index(database, keys="x, y", include="j")
    user = steps.session(dsn)
    sql(user, "SET timezone = 'Asia/Kolkata'; SET datestyle = 'SQL, DMY'; SET intervalstyle = 'iso_8601'")
    for value in values:
        asked = (
            f"(SELECT jsonb_build_object('x', {value}::{name}))"
            if name in ("jsonb", "pair", "paired", "priced")
            else (f"(SELECT jsonb_build_object('x', ({value}::{name})::text))")
        )
        # A domain over an enum has no operator of its own.
        same = "{0}::mood = {1}::mood" if name == "moody" else "{0} = {1}::{2}"
        for condition, key in (
            (f"{same.format('x', value, name)} AND y = 0", f"{asked} || '{{\"y\": 0}}'"),
            (
                f"{same.format('p', value, name)} AND x IS NOT DISTINCT FROM NULL",
                f"jsonb_build_object('p', {asked} -> 'x', 'x', NULL)",
            ),
        ):
            plain = sql(user, f"SELECT x::text FROM t x WHERE {condition} ORDER BY 1")
            by_entries = (
                f"SELECT x::text FROM roir.rows(NULL::t, ARRAY(SELECT i FROM ix i WHERE {condition})) x ORDER BY 1"
            )
            assert sql(user, by_entries) == plain
            if value != "'null'":  # JSON's null means SQL's NULL
                by_key = f"SELECT x::text FROM roir.rows(NULL::t, 'ix', {key}) x ORDER BY 1"
                assert sql(user, by_key) == plain, (value, condition)


class Base(DeclarativeBase):
    """The base of the ORM's classes."""


class Flight(Base):
    """A class whose attributes are named otherwise than its columns."""

    __tablename__ = "t"
    day: Mapped[int] = mapped_column("d", Integer, primary_key=True)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    plane: Mapped[str | None] = mapped_column("k", Text)


def test_sqlalchemy_reads_tables_and_classes(indexed: str) -> None:
    with OrmSession(create_engine(indexed.replace("postgresql://", "postgresql+psycopg2://"))) as session:
        flight = rows(Flight, "ix", (Flight.plane == "7") & Flight.day.in_([7, 17]))
        found = session.scalars(select(flight).where(flight.id > 10).order_by(flight.id)).all()
        assert [type(one) for one in found] == [Flight] * len(found)
        wanted = (
            select(Flight.id).where(Flight.plane == "7", Flight.day.in_([7, 17]), Flight.id > 10).order_by(Flight.id)
        )
        assert [one.id for one in found] == session.scalars(wanted).all() != []
        table = rows(Flight.__table__, "public.ix", Flight.__table__.c.k.is_(None))
        assert session.scalar(select(func.count()).select_from(table)) == 15
        assert 'roir.rows(NULL::"t", array(' in str(select(table))
        of_the_view = new_table("ix", column("k", Text), column("d", Integer))
        assert session.execute(select(rows(Flight.__table__, of_the_view, of_the_view.c.d == 7).c.k)).all() != []


def test_sqlalchemy_knows_names_with_a_percent_sign_and_not_all_columns(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE TABLE "a%s" (id int PRIMARY KEY, "k%(x)s" text, i int)',
        """INSERT INTO "a%s" VALUES (1, '%s', 5)""",
    )
    steps.make_index(database, '"ix%s"', '"a%s"', '"k%(x)s", i')
    table = new_table("a%s", column("id", Integer), column("k%(x)s", Text))
    with create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://")).connect() as connection:
        found = connection.execute(select(rows(table, '"ix%s"', table.c["k%(x)s"] == "%s"))).all()
    assert found == [(1, "%s")]


def test_a_temporary_table_is_that_one_and_no_other_of_its_name(indexed: str) -> None:
    user = steps.session(indexed)
    sql(user, "CREATE TEMP TABLE t (d int, id int, k text, PRIMARY KEY (d, id))")
    sql(user, "INSERT INTO pg_temp.t VALUES (7, 7, 'temporary'); SET search_path = public, pg_temp")
    query = "SELECT k FROM roir.rows(NULL::pg_temp.t, ARRAY(SELECT (7, 7, NULL)::pg_temp.t))"
    assert sql(user, query) == [("temporary",)]
