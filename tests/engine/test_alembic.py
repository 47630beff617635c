"""Alembic, as an application has it, beside an index: it sees nothing of ours; its migrations pass or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg2
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, Text, create_engine, func
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

MINE = MetaData()
Table("t", MINE, Column("id", Integer, primary_key=True), Column("k", Text), Column("v", Integer), Column("note", Text))
NOW = func.clock_timestamp()
PASS: dict[str, Callable[[Operations], object]] = {
    "add a column": lambda op: op.add_column("t", Column("more", Integer, server_default="7")),
    "add a column with a volatile default": lambda op: op.add_column("t", Column("at", Text, server_default=NOW)),
    "drop a column": lambda op: op.drop_column("t", "note"),
    "alter a type": lambda op: op.alter_column("t", "note", type_=BigInteger, postgresql_using="length(note)"),
    "rename a column": lambda op: op.alter_column("t", "note", new_column_name="remark"),
    "create an index": lambda op: op.create_index("mine", "t", ["v"]),
    "add a check": lambda op: op.create_check_constraint("small", "t", "v < 1000000"),
    "rename the table": lambda op: op.rename_table("t", "other"),
    "insert": lambda op: op.execute("INSERT INTO t VALUES (9001, 'new', 1, 'x')"),
}
REFUSED: dict[str, Callable[[Operations], object]] = {
    "drop a key's column": lambda op: op.drop_column("t", "k"),
    "rename a key's column": lambda op: op.alter_column("t", "k", new_column_name="key"),
    "alter a key's type": lambda op: op.alter_column("t", "v", type_=BigInteger),
}


@pytest.fixture
def connection(database: Database, dsn: str) -> Iterator[Connection]:
    """A connection of the application. Its table has an index, and the guard is on."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, note text)",
        "INSERT INTO t SELECT i, i % 7, i, 'n' || i FROM generate_series(1, 100) i",
    )
    steps.make_index(database, include="v")
    run_sql(dsn, "SELECT roir.guard()")
    made = create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn), poolclass=NullPool)
    with made.connect() as connection:
        yield connection


def test_what_it_generates_names_nothing_of_ours(connection: Connection) -> None:
    assert compare_metadata(MigrationContext.configure(connection), MINE) == []


@pytest.mark.parametrize("what", PASS)
def test_its_migration_passes(database: Database, connection: Connection, what: str) -> None:
    PASS[what](Operations(MigrationContext.configure(connection)))
    connection.commit()
    clean_up.clean_up(database)
    steps.assert_exact(database)
    with database.transaction() as ours:
        assert faults.warnings(ours) == []


@pytest.mark.parametrize("what", REFUSED)
def test_its_migration_of_what_the_index_needs_is_refused(
    database: Database, connection: Connection, what: str
) -> None:
    with pytest.raises(DBAPIError, match=r"index public.ix|roir_data.g1_source"):
        REFUSED[what](Operations(MigrationContext.configure(connection)))
    connection.rollback()
    steps.assert_exact(database)
