"""Exchanges of names while roir's role isn't a superuser: errors that attacks have found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from psycopg2.extensions import make_dsn
from sqlalchemy import event

from airflow_roir.engine import abort, clean_up, drop, install, lifecycle
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import RoirError
from tests.conftest import database_dsn, run_sql
from tests.engine import steps

# roir's role may not lock the other table, which belongs to another role.
EXCHANGE = ("ALTER TABLE t RENAME TO lost", "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
BACK = ("DROP TABLE t", "ALTER TABLE lost RENAME TO t")


@pytest.fixture
def kept(server: str) -> Iterator[tuple[str, Database]]:
    """A database of a role of its own: a superuser's DSN, and the role's."""
    run_sql(server, "CREATE ROLE namer LOGIN", "CREATE DATABASE named OWNER namer")
    dsn = database_dsn(server, "named")
    try:
        run_sql(dsn, "GRANT CREATE ON SCHEMA public TO namer")
        mine = make_dsn(dsn, user="namer")
        database = Database(mine, "roir tests")
        install.init(database)
        run_sql(
            mine,
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
            "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 40) i",
        )
        yield dsn, database
    finally:
        run_sql(server, "DROP DATABASE named WITH (FORCE)", "DROP ROLE namer")


@contextmanager
def exchanged(dsn: str, database: Database) -> Iterator[None]:
    """In the block, the next lock on the table finds another table under its name."""
    done: list[str] = []

    def before(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not done and 'LOCK TABLE "public"."t"' in statement:
            done.append(statement)
            run_sql(dsn, *EXCHANGE)

    event.listen(database.engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        event.remove(database.engine, "before_cursor_execute", before)
        assert done, "no lock was taken"
        run_sql(dsn, *BACK)


@pytest.mark.sample(0)
def test_a_table_that_our_role_may_not_lock_has_the_name_by_then(kept: tuple[str, Database]) -> None:
    """Prepare, verification, abort and clean-up ended in the server's own error."""
    dsn, database = kept

    def build() -> None:
        steps.finish_all(database, start_run(database, "ix", "test", take_over=True))

    def refused(command: Callable[[], object]) -> None:
        with exchanged(dsn, database), pytest.raises(RoirError, match=r"another name|Try again"):
            command()

    refused(lambda: steps.begin(database, include="v"))
    steps.begin(database, include="v")
    build()
    refused(lambda: lifecycle.verify(database, "ix"))
    assert lifecycle.verify(database, "ix").complete
    refused(lambda: steps.begin(database, table=None, keys=None))
    steps.begin(database, table=None, keys=None)
    with exchanged(dsn, database):
        abort.abort(database, "ix", "test")  # the next clean-up ends it
    assert not clean_up.clean_up(database).warnings
    refused(lambda: drop.drop_index(database, "ix", "test"))
    steps.assert_exact(database)
    drop.drop_index(database, "ix", "test")
