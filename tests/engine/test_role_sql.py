"""The SQL of `roir role-sql`, run on a real server: the role that it makes builds an index, and may no more."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import psycopg2.errors
import pytest
from psycopg2.extensions import make_dsn

from airflow_roir.definition import QualifiedName
from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.engine.schema import role
from airflow_roir.errors import InvalidInput
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

# Ends a literal, an identifier, a dollar quote and a comment, if it is let.
HOSTILE = "O'Neil \\ $roir$ \"x\n; DROP TABLE t; --"
TABLE = QualifiedName('odd "schema', "a,b 'c'")


@pytest.fixture
def empty(dsn: str) -> Iterator[str]:
    """The DSN of a database without a control schema, where a role owns a table."""
    [(name,)] = sql(steps.session(dsn), "SELECT 'r_' || current_database()")
    run_sql(dsn, f"CREATE DATABASE {name}", f"CREATE ROLE owner_{name} NOLOGIN")
    there = database_dsn(dsn, name)
    run_sql(
        there,
        'CREATE SCHEMA "odd ""schema"',
        f'GRANT USAGE, CREATE ON SCHEMA "odd ""schema" TO owner_{name}',
        f"CREATE TABLE {TABLE.sql} (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO {TABLE.sql} SELECT i, i::text, i FROM generate_series(1, 100) i",
        f"ALTER TABLE {TABLE.sql} OWNER TO owner_{name}",
    )
    yield there
    run_sql(dsn, f"DROP DATABASE {name} WITH (FORCE)", f"DROP ROLE owner_{name}")


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", ["builder", HOSTILE])
def test_the_role_builds_a_table_of_others_and_is_none_of_the_mighty(empty: str, name: str) -> None:
    name = f"{name} {empty.rpartition('/')[2]}"
    script = role.role_sql(name, ["public", 'odd "schema'], [TABLE])
    # A second time it changes nothing.
    run_sql(empty, script, script)
    builder = make_dsn(empty, user=name)
    try:
        database = Database(builder)
        install.init(database)
        steps.make_index(database, "public.ix", TABLE.sql, include="v", parallelism=1)
        session = steps.session(builder)
        assert sql(session, "SELECT count(*), current_user FROM public.ix") == [(100, name)]
        assert sql(
            session,
            "SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls FROM pg_roles "
            "WHERE rolname = current_user",
        ) == [(False,)]
        session.close()
    finally:
        quoted = '"' + name.replace('"', '""') + '"'
        run_sql(empty, f"DROP OWNED BY {quoted} CASCADE", f"DROP ROLE {quoted}")


def test_a_control_schema_of_a_superuser_that_has_indexes_is_not_handed_over(empty: str) -> None:
    """Without an index it is: "schema of a superuser" in refusals.py."""
    database = Database(empty)
    install.init(database)
    steps.make_index(database, "public.ix", TABLE.sql)
    with pytest.raises(psycopg2.errors.RaiseException, match="the control schema of superuser postgres has indexes"):
        run_sql(empty, role.role_sql(f"late {empty.rpartition('/')[2]}"))


@pytest.mark.parametrize("name", ["public", "none", "pg_any"])
def test_a_name_that_no_role_can_have_is_refused_at_once(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"role {name}: PostgreSQL reserves"):
        role.role_sql(name)


def test_nobody_becomes_a_member_of_a_superuser(empty: str) -> None:
    """A member of a superuser's role is as good as a superuser. The refusal leaves nothing behind."""
    run_sql(empty, "CREATE TABLE t (id int PRIMARY KEY)")
    with pytest.raises(psycopg2.errors.RaiseException, match='table "t" belongs to a superuser'):
        run_sql(empty, role.role_sql("never made", tables=[QualifiedName(None, "t")]))
    assert sql(steps.session(empty), "SELECT count(*) FROM pg_roles WHERE rolname = 'never made'") == [(0,)]
