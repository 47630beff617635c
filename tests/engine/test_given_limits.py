"""Limits are given once, with the database, and its sessions know them everywhere."""

from __future__ import annotations

import pickle

from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import DEFAULT, Limits, limits_of

GIVEN = Limits(table_lock_ms=20)


def test_every_session_knows_them_in_another_process_too(dsn: str) -> None:
    """A worker on Spark gets the database like this."""
    sent = pickle.loads(pickle.dumps(Database(dsn, limits=GIVEN)))
    for database in (sent, sent.named("worker 1")):
        with database.connect() as session, database.transaction() as connection, database.autocommit() as plain:
            assert {limits_of(one) for one in (session, connection, plain)} == {GIVEN}


def test_without_them_there_are_defaults(database: Database) -> None:
    with database.connect() as connection:
        assert limits_of(connection) is DEFAULT
