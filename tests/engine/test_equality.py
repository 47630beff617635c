"""Is this the entry of that row? A predicate in Python and one in SQL, compared with the server's own unique index."""

from __future__ import annotations

import json

import psycopg2.errors
import pytest
from sqlalchemy import text

from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.entry import Entry, is_null
from airflow_roir.engine.verify import differences
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.values import SETUP

# Some of these values are equal but not the same; some look alike and aren't equal.
ODD = {
    "integer": ["0", "1", "-1"],
    "numeric": ["'1'", "'1.0'", "'1.00'", "'0'", "'-0.0'", "'NaN'", "'Infinity'"],
    "numeric(6,2)": ["'1'", "'1.00'", "'NaN'"],
    "double precision": ["'0'", "'-0'", "'NaN'", "'-NaN'", "'Infinity'", "'5e-324'"],
    "text": ["''", "' '", "'a'", "'A'", "'a '", "U&'\\00e9'", "U&'e\\0301'"],
    "character(5)": ["'a'", "'a  '", "''", "'A'"],
    '"char"': ["''", "'a'"],
    'text COLLATE "ignore_case"': ["'a'", "'A'", "U&'\\00e9'", "U&'e\\0301'", "'e'", "'b'"],
    "citext": ["'a'", "'A'", "'a '"],
    "interval": ["'1 mon'", "'30 days'", "'720 hours'", "'31 days'"],
    "time with time zone": ["'12:00+00'", "'13:00+01'"],
    "timestamp with time zone": ["'2026-11-01 01:30-04'", "'2026-11-01 05:30Z'", "'infinity'"],
    "bytea": ["''", "'\\x00'"],
    "inet": ["'10.0.0.1'", "'10.0.0.1/32'", "'10.0.0.1/8'"],
    "jsonb": ["'1'", "'1.0'", "'null'", "'{\"a\": 1.10}'", "'{\"a\": 1.1}'", "'[]'"],
    "integer[]": ["'{1,2}'", "'[0:1]={1,2}'", "'{NULL}'", "'{}'"],
    "numeric[]": ["'{1.0}'", "'{1.00}'", "'{NaN}'", "'{NULL}'"],
    "numrange": ["'[1.0,2)'", "'[1.00,2.0)'", "'empty'"],
    "int4multirange": ["'{[1,2)}'", "'{[1,1]}'", "'{}'"],
    "mood": ["'sad'", "'ok'", "''"],
    "moody": ["'sad'", "'ok'", "''"],
    "pair": ["'(1,a)'", "'(1,)'", "'(,)'", "ROW(NULL, NULL)"],
    "paired": ["'(1,a)'", "'(,)'"],
    "priced": ["'(1,1.0)'", "'(1,1.00)'", "'(,NaN)'", "'(,)'"],
    "span": ["'[-0,1)'", "'[0,1)'", "'empty'"],
    "padded": ["'b'", "'b  '", "''"],
    "amount": ["'1'", "'1.00'"],
    "inner_code": ["''", "'a'", "'a '"],
    "ints": ["'{1}'", "'[2:2]={1}'", "'{NULL}'"],
    "regclass": ["'pg_class'", "'pg_type'"],
}
# The ways of a value into the row. The predicate reads the row, and the entry has the value that was stored.
COLUMNS = {
    "key": 'CREATE TABLE t ("the ""id""" int PRIMARY KEY, "K %% 1" {type})',
    "primary key": 'CREATE TABLE t ("the ""id""" int, "K %% 1" {type}, PRIMARY KEY ("K %% 1", "the ""id"""))',
    "generated": (
        'CREATE TABLE t ("the ""id""" int PRIMARY KEY, v {type}, "K %% 1" {type} GENERATED ALWAYS AS (v) STORED)'
    ),
}


@pytest.fixture(params=[*ODD])
def kind(dsn: str, request: pytest.FixtureRequest) -> str:
    run_sql(dsn, *SETUP)
    try:
        if request.param == "citext":
            run_sql(dsn, "CREATE EXTENSION citext SCHEMA pg_catalog")
        run_sql(dsn, f"CREATE TABLE probe (x {request.param})", "DROP TABLE probe")
    except psycopg2.Error as error:
        pytest.skip(f"this server has no {request.param}: {error}")
    return str(request.param)


def _entry(database: Database, keys: str) -> tuple[Entry, str]:
    steps.begin(database, keys=keys)
    with database.transaction() as connection:
        found = connection.execute(text("SELECT entry FROM roir.generation")).scalar_one()
    return Entry.from_json(found), json.dumps(found)


def _by_the_index(user: psycopg2.extensions.connection, entry: Entry) -> set[tuple[int, int]]:
    """The pairs that the server's own unique index takes for one entry: the second of a pair isn't inserted."""
    columns, identity = entry.definitions(), ", ".join(entry.physical(entry.identity_positions))
    pairs = f"""
    CREATE TEMP TABLE u ({columns}, UNIQUE NULLS NOT DISTINCT ({identity}));
    CREATE TEMP TABLE same (ours int, theirs int);
    DO $$
    DECLARE p record;
    BEGIN
        FOR p IN SELECT a.n AS ours, b.n AS theirs FROM entries a, entries b LOOP
            DELETE FROM u;
            INSERT INTO u SELECT {identity} FROM entries WHERE n = p.ours;
            INSERT INTO u SELECT {identity} FROM entries WHERE n = p.theirs ON CONFLICT DO NOTHING;
            INSERT INTO same SELECT p.ours, p.theirs FROM u HAVING count(*) = 1;
        END LOOP;
    END $$"""
    sql(user, pairs)
    return set(sql(user, "SELECT * FROM same"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("column", COLUMNS)
def test_python_sql_and_the_unique_index_say_the_same_of_every_pair(
    database: Database, dsn: str, kind: str, column: str
) -> None:
    run_sql(dsn, COLUMNS[column].format(type=kind).replace("%%", "%"))
    entry, kept = _entry(database, '"K % 1"')
    values = [*ODD[kind], *(["NULL"] if column != "primary key" else [])]
    user = steps.session(dsn)
    sql(user, f'CREATE TEMP TABLE rows ("the ""id""" int, "K %% 1" {kind}, n int)', ())
    sql(user, f"CREATE TEMP TABLE entries ({entry.definitions()}, n int)")
    physical = ", ".join(entry.physical(entry.identity_positions))
    projected = ", ".join(c.of("r") for c in entry.columns[: entry.identity])
    for n, value in enumerate(values):
        sql(user, f"INSERT INTO rows SELECT 7, v, {n} FROM (SELECT {value}::{kind.split(' COLLATE')[0]}) x (v)")
        sql(user, f"INSERT INTO entries ({physical}, n) SELECT {projected}, n FROM rows r WHERE n = {n}")
    expected = _by_the_index(user, entry)
    assert {(n, n) for n in range(len(values))} <= expected

    def asked(condition: str) -> set[tuple[int, int]]:
        with user.cursor() as cursor:
            cursor.execute(f"SELECT s.n, x.n FROM rows s CROSS JOIN entries x WHERE {condition}")
            return set(cursor.fetchall())

    [(in_sql,)] = sql(user, "SELECT roir.is_same(%s, 's', 'x')", kept)
    assert in_sql == entry.has_row("s", "x.")  # to the letter: these names need their quotes
    assert asked(in_sql) == expected
    assert asked(entry.equal("s.", "x.").replace("s.c", "(SELECT e FROM entries e WHERE e.n = s.n).c")) == expected
    # Lookups compare a row, as an entry, with each entry alone.
    with user.cursor() as cursor:
        looked = differences.lookup(entry, "(SELECT * FROM entries x WHERE x.n = p.n)", "true AS present")
        cursor.execute(f"SELECT s.n, p.n FROM entries s CROSS JOIN entries p WHERE EXISTS ({looked})")
        assert set(cursor.fetchall()) == expected
    # Comparisons for each pattern of NULLs, if the other side is known to have it.
    nullable = entry.nullable_positions
    by_pattern = set()
    for null in (False, True) if nullable else (False,):
        known = dict.fromkeys(nullable, null)
        of_them = " AND ".join(f"({is_null(f'x.c{i + 1}')}) = {null}" for i in nullable) or "true"
        by_pattern |= asked(
            f"{entry.same([c.of('s') for c in entry.columns], entry.physical(prefix='x.'), known)} AND {of_them}"
        )
    assert by_pattern == expected


@pytest.mark.sample(0)
def test_a_partition_leaves_an_index_on_a_type_that_was_renamed_just_now(database: Database, dsn: str) -> None:
    """Only a domain must be cast, by its base type's name: every other value is compared as it is."""
    run_sql(
        dsn,
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE t (id int PRIMARY KEY, k mood) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF t FOR VALUES FROM (10) TO (20)",
        "INSERT INTO t VALUES (1, 'sad'), (2, NULL), (11, 'ok'), (12, NULL)",
    )
    steps.finish_all(database, steps.begin(database)[1])
    run_sql(dsn, "ALTER TYPE mood RENAME TO temper", "SELECT roir.detach_partition('low')")
    assert steps.sql(steps.session(dsn), "SELECT id FROM ix ORDER BY id") == [(11,), (12,)]
    assert steps.assert_exact(database).rows == 2
