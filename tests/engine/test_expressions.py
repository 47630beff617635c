"""Keys that are expressions, and partial indexes, against PostgreSQL's own over a table without partitions."""

from __future__ import annotations

import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.errors import InvalidInput
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

KEYS, WHERE = "lower(email) AS address", "deleted_at IS NULL"


def make_users(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE users (id int, joined date, email text, deleted_at timestamptz, v int, PRIMARY KEY (id, joined)) "
        "PARTITION BY RANGE (joined)",
        "CREATE TABLE users_1 PARTITION OF users FOR VALUES FROM ('2025-01-01') TO ('2025-07-01')",
        "CREATE TABLE users_2 (v int, deleted_at timestamptz, email text, joined date NOT NULL, id int NOT NULL)",
        "ALTER TABLE users ATTACH PARTITION users_2 FOR VALUES FROM ('2025-07-01') TO ('2026-01-01')",
        "INSERT INTO users SELECT i, date '2025-01-01' + i, format('User%s@x', i), "
        "CASE WHEN i % 3 = 0 THEN now() END, i FROM generate_series(1, 200) i",
        "CREATE TABLE twin (LIKE users)",
        "INSERT INTO twin SELECT * FROM users",
        "CREATE UNIQUE INDEX twin_key ON twin (lower(email)) WHERE deleted_at IS NULL",
        "ANALYZE users",
    )


def warnings(database: Database) -> list[str]:
    with database.transaction() as connection:
        return faults.warnings(connection)


def entries(dsn: str) -> tuple[list, list]:
    user = steps.session(dsn)
    ours = sql(user, "SELECT address, id, joined FROM ix ORDER BY 1, 2")
    theirs = sql(user, "SELECT lower(email), id, joined FROM users WHERE deleted_at IS NULL ORDER BY 1, 2")
    return ours, theirs


@pytest.mark.parametrize("unique", [False, True])
def test_a_partial_index_of_an_expression_is_exact(database: Database, dsn: str, unique: bool) -> None:
    make_users(dsn)
    writes = [
        "UPDATE users SET deleted_at = now() WHERE id = {n}",
        "UPDATE users SET deleted_at = NULL WHERE id = {n} + 2",
        "UPDATE users SET email = upper(email) || '{n}' WHERE id = {n} + 4",
        "DELETE FROM users WHERE id = {n} + 5",
        "INSERT INTO users SELECT 1000 + {n}, '2025-03-01', 'New{n}@x', NULL, 1",
        "INSERT INTO users SELECT 2000 + {n}, '2025-09-01', 'New{n}@x', now(), 1",
        "UPDATE users SET joined = joined + 150, email = 'moved' || id WHERE id = {n} + 7 AND joined < '2025-06-01'",
        "UPDATE users SET v = v + 1",
        "UPDATE users SET joined = joined - 100 WHERE id = {n} + 9 AND joined > '2025-06-01'",
    ]
    moments = steps.moments(database, "ix", "users", KEYS, "v", where=WHERE, unique=unique)
    for n, _moment in enumerate(moments):
        for write in writes:
            run_sql(dsn, write.format(n=n * 11 + 1))
    ours, theirs = entries(dsn)
    assert ours == theirs
    steps.make_index(database, "ix", None, None)
    ours, theirs = entries(dsn)
    assert ours == theirs


def test_a_function_with_another_body_is_reported_until_the_index_is_right(database: Database, dsn: str) -> None:
    """PostgreSQL's own index is wrong in silence then."""
    norm = "CREATE OR REPLACE FUNCTION norm(text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT {}($1)'"
    run_sql(
        dsn,
        norm.format("lower"),
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, 'K' || i, i FROM generate_series(1, 50) i",
    )
    steps.make_index(database, "ix", "t", "norm(k) AS key", "v")
    assert warnings(database) == []
    run_sql(dsn, "ALTER FUNCTION norm RENAME TO normal", "INSERT INTO t VALUES (51, 'K51', 51)")
    assert warnings(database) == []
    run_sql(dsn, norm.format("upper").replace("norm(", "normal("))
    [said] = warnings(database)
    assert "function public.normal(text), which computes its keys or its condition, has another body now" in said
    steps.make_index(database, "ix", None, None)
    assert warnings(database) == []
    assert sql(steps.session(dsn), "SELECT key FROM ix WHERE id = 7") == [("K7",)]


# Expressions of real life. `norm` and `slug` are functions of users, `code` an enum, `tags` an array.
EXPRESSIONS = (
    "lower(email)", "upper(email)", "lower(trim(email))", "md5(email)", "length(email)", "left(email, 3)",
    "split_part(email, '@', 2)", "reverse(email)", "email || ':' || id", "coalesce(nick, email)", "nullif(nick, '')",
    "substring(email from '@(.*)$')", "regexp_replace(email, '[0-9]+', '', 'g')", "hashtext(email)",
    "(doc ->> 'sku')", "((doc ->> 'price')::numeric)", "(doc #>> '{a,b}')", "(doc -> 'tags' ->> 0)",
    "jsonb_typeof(doc)",
    "date_trunc('day', ts AT TIME ZONE 'UTC')", "((ts AT TIME ZONE 'Europe/Berlin')::date)",
    "extract(year from joined)", "date_part('month', joined)", "(joined + 30)", "(joined - date '2020-01-01')",
    "amount * 100", "round(amount)", "(amount > 10)", "abs(id - 50)", "id % 7", "(id::bigint << 3)", "id / 10 * 10",
    "(code = 'a')", "tags[1]", "cardinality(tags)", "array_length(tags, 1)", "norm(email)", "slug(email, id)",
    "CASE WHEN id > 50 THEN lower(email) ELSE nick END", "(nick IS NULL)", "greatest(id, 10)", "int4range(id, id + 5)",
    "(ROW(id, email) = ROW(3, 'x'))", "md5(coalesce(nick, '') || email COLLATE \"C\")", "(email COLLATE \"C\")",
    "starts_with(email, 'U')", "(E'it''s;--' || email)",
)  # fmt: skip
ZOO = (
    "CREATE TYPE code AS ENUM ('a', 'b')",
    "CREATE FUNCTION norm(text) RETURNS text LANGUAGE sql IMMUTABLE STRICT AS 'SELECT lower(trim($1))'",
    "CREATE FUNCTION slug(t text, n int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS "
    "$$BEGIN RETURN concat(left(t, 2), '-', n); END$$",
    "CREATE TABLE zoo (id int, joined date, email text, nick text, doc jsonb, ts timestamptz, amount numeric(10, 2), "
    "code code, tags text[], PRIMARY KEY (id, joined)) PARTITION BY RANGE (joined)",
    "CREATE TABLE zoo_1 PARTITION OF zoo FOR VALUES FROM ('2020-01-01') TO ('2020-03-01')",
    "CREATE TABLE zoo_2 PARTITION OF zoo DEFAULT",
)
ROWS = (
    "INSERT INTO zoo SELECT i, date '2020-01-01' + i, 'User' || i || '@x.org', CASE i % 3 WHEN 0 THEN 'n' || i END, "
    "jsonb_build_object('sku', i, 'price', i / 3.0, 'a', jsonb_build_object('b', i), "
    "'tags', jsonb_build_array('t', i)), "
    "timestamptz '2020-01-01 23:30+00' + i * interval '1 hour', i / 7.0, (ARRAY['a', 'b'])[1 + i % 2]::code, "
    "CASE WHEN i % 5 > 0 THEN ARRAY['x' || i, 'y'] END FROM generate_series({}, {}) i"
)


@pytest.mark.parametrize("part", range(4))
def test_expressions_of_real_life(database: Database, dsn: str, part: int) -> None:
    """The view has what the server computes for the rows, whatever the writer's session has set."""
    run_sql(dsn, *ZOO, ROWS.format(1, 60), "ANALYZE zoo")
    chosen = {f"x{n}": text for n, text in enumerate(EXPRESSIONS[part::4])}
    keys = ", ".join(f"{text} AS {name}" for name, text in list(chosen.items())[:8])
    include = ", ".join(f"{text} AS {name}" for name, text in list(chosen.items())[8:])
    settings = "SET datestyle = 'German'; SET intervalstyle = 'iso_8601'; SET timezone = 'Asia/Tokyo'; "
    user = steps.session(dsn)
    sql(user, settings + "SET extra_float_digits = -3; SET standard_conforming_strings = off; SET search_path = zoo")
    user.commit()
    moments = steps.moments(database, "ix", "zoo", keys, include, ranges=3, segments=2, batch_rows=11)
    for n, _ in enumerate(moments):
        sql(user, "SET search_path = public; " + ROWS.format(100 + n * 3, 102 + n * 3))
        sql(user, f"UPDATE zoo SET email = 'Changed' || id, doc = doc || '{{\"sku\": \"z\"}}' WHERE id % 9 = {n}")
        sql(user, f"UPDATE zoo SET joined = joined + 70, ts = ts + interval '1 day' WHERE id % 9 = {n} AND id < 60")
        sql(user, f"DELETE FROM zoo WHERE id = {n + 20}")
        user.commit()
    listed = ", ".join(f"({text}) AS {name}" for name, text in chosen.items())
    ours = sql(steps.session(dsn), f"SELECT {', '.join(chosen)}, id, joined FROM ix ORDER BY id")
    theirs = sql(steps.session(dsn), f"SELECT {listed}, id, joined FROM zoo ORDER BY id")
    assert ours == theirs
    assert lifecycle.verify(database, "ix", VerifyOptions()).is_exact


def test_a_function_that_depends_on_the_sessions_settings_gives_one_value(database: Database, dsn: str) -> None:
    """It is declared immutable and isn't. Found: each writer computed by its own settings, the build by others."""
    run_sql(
        dsn,
        *ZOO,
        "CREATE FUNCTION told(timestamptz) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT $1::text || $1::date'",
        "CREATE FUNCTION span(int) RETURNS text LANGUAGE plpgsql IMMUTABLE AS "
        "$$BEGIN RETURN make_interval(hours => $1)::text || to_char($1, '9D9') || (1/7.0::float8)::text; END$$",
        ROWS.format(1, 30),
    )
    users = [steps.session(dsn) for _ in range(3)]
    sql(users[1], "SET timezone = 'Asia/Tokyo'; SET datestyle = 'German'; SET intervalstyle = 'iso_8601'")
    sql(users[2], "SET timezone = 'America/Lima'; SET datestyle = 'SQL, DMY'; SET extra_float_digits = -9")
    for user in users:
        user.commit()
    where = "told(ts) > '2020-01-02 09' AND span(id) <> ''"
    for n, _ in enumerate(steps.moments(database, "ix", "zoo", "told(ts) AS day, span(id) AS s", "nick", where=where)):
        for number, user in enumerate(users):
            sql(user, ROWS.format(100 + 10 * n + 3 * number, 102 + 10 * n + 3 * number))
            sql(user, f"UPDATE zoo SET ts = ts - interval '1 hour' WHERE id % 27 = {3 * n + number}")
            sql(user, f"DELETE FROM zoo WHERE id % 29 = {3 * n + number}")
            user.commit()
    assert lifecycle.verify(database, "ix", VerifyOptions()).is_exact
    pinned = "SET timezone = 'UTC'; SET datestyle = 'ISO, YMD'; SET extra_float_digits = 3; "
    theirs = sql(users[0], f"{pinned} SELECT told(ts), span(id), id FROM zoo WHERE {where} ORDER BY id")
    assert sql(users[0], "SELECT day, s, id FROM ix ORDER BY id") == theirs


# Expressions that CREATE INDEX or our own rules refuse, with a part of the refusal.
REFUSED = {
    "random()": "functions in index expression must be marked IMMUTABLE",
    "to_char(ts, 'YYYY')": "must be marked IMMUTABLE",
    "(SELECT 1)": "cannot use subquery in index expression",
    "count(id)": "aggregate functions are not allowed in index expressions",
    "row_number() OVER ()": "window functions are not allowed",
    "generate_series(1, id)": "set-returning functions are not allowed",
    "nothing(id)": "function nothing(integer) does not exist",
    "lower(emial)": 'column "emial" does not exist',
    "point(id, id)": "no default operator class",
    "lower(email) AS nick": "as a column of",
    "lower(email": "a bracket isn't closed",
    "lower(email); DROP TABLE zoo": "a semicolon can't be part of an expression",
    "lower(email) /* */": "a comment can't be part",
    "lower($$a$$)": "a dollar quote can't be part",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_an_index_cannot_have_is_refused_in_the_servers_words(database: Database, dsn: str, text: str) -> None:
    run_sql(dsn, *ZOO, ROWS.format(1, 10))
    with pytest.raises(InvalidInput) as refused:
        steps.begin(database, "ix", "zoo", text)
    assert REFUSED[text] in str(refused.value)
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir.index") == [(0,)]


@pytest.mark.parametrize("where", ["random() < 0.5", "count(id) > 1", "id", "id > 3, id < 5", "id IN (SELECT 1)"])
def test_a_condition_that_an_index_cannot_have_is_refused(database: Database, dsn: str, where: str) -> None:
    run_sql(dsn, *ZOO, ROWS.format(1, 10))
    with pytest.raises(InvalidInput):
        steps.begin(database, "ix", "zoo", "id", where=where)


def test_whole_rows_are_read_by_an_expression(database: Database, dsn: str) -> None:
    """Found: roir.rows looked for a column of the expression's name in the table."""
    run_sql(dsn, *ZOO, ROWS.format(1, 30))
    steps.make_index(database, "ix", "zoo", "lower(email) AS address")
    found = "SELECT id FROM roir.rows(NULL::zoo, 'ix', '{\"address\": \"user7@x.org\"}')"
    assert sql(steps.session(dsn), found) == [(7,)]
    entries_of = "ARRAY(SELECT i FROM ix i WHERE address = 'user8@x.org')"
    assert sql(steps.session(dsn), f"SELECT id FROM roir.rows(NULL::zoo, {entries_of})") == [(8,)]


def test_a_prefix_is_found_by_the_index_in_a_database_whose_order_is_linguistic(database: Database, dsn: str) -> None:
    """`email LIKE 'user1%'` reads all entries of a column whose collation isn't `C`, as with a native index."""
    user = steps.session(dsn)
    # Debian's server has ICU (--pg 15); the embedded ones know the order of bytes alone.
    is_linguistic = sql(user, "SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'") != []
    make_users(dsn)
    if is_linguistic:
        run_sql(dsn, 'ALTER TABLE users ALTER email TYPE text COLLATE "und-x-icu"')
    run_sql(dsn, "UPDATE users SET email = chr(64 + id % 60) || email || id")
    steps.make_index(database, "plain", "users", "email")
    steps.make_index(
        database, "ix", "users", "email text_pattern_ops, lower(email) varchar_pattern_ops AS low, (v) AS w"
    )
    run_sql(dsn, "INSERT INTO users SELECT 1000 + i, '2025-03-01', 'aUser' || i, NULL, i FROM generate_series(1, 50) i")
    for prefix in ("aUser1", "A", "aU", "B%s@", "\u00e9", ""):
        found = sql(user, "SELECT id FROM ix WHERE email_key LIKE %s || '%%' ORDER BY 1", prefix)
        assert found == sql(user, "SELECT id FROM users WHERE email LIKE %s || '%%' ORDER BY 1", prefix), prefix
    collations = "SELECT attname, attcollation::regcollation::text FROM pg_attribute WHERE attrelid = 'ix'::regclass"
    for is_rebuild in (False, True):
        if is_rebuild:
            user.rollback()
            steps.make_index(database, "ix", None, None)
        assert dict(sql(user, collations)).items() >= {"email_key": '"C"', "low": '"C"', "w": "-"}.items(), is_rebuild
    sql(user, "SET enable_seqscan = off")
    plans = {}
    for view, column in {"plain": "email", "ix": "email_key"}.items():
        lines = sql(user, f"EXPLAIN SELECT id FROM {view} WHERE {column} LIKE 'aUser1%'")
        plans[view] = "\n".join(line for (line,) in lines)
    if is_linguistic:
        assert ">= 'aUser1'" not in plans["plain"]
