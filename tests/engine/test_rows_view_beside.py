"""Users read and write by the rows view while its index is rebuilt, reverted and cleaned up, and its table changes."""

from __future__ import annotations

import random
import threading

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, revert, whole_rows
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach
from tests.comparison import compare
from tests.conftest import run_sql
from tests.engine import rows_ground, steps
from tests.engine.steps import session, sql

STATEMENTS = (
    "SELECT count(*), sum(n) FROM ix_rows WHERE k = '{key}'",
    "UPDATE ix_rows SET n = n % 900 + 1 WHERE k = '{key}' AND id = {id}",
    "UPDATE ix_rows SET k = '{key}' WHERE id = {id}",
    "UPDATE ix_rows SET d = (d + 1) % 7 WHERE id = {id} AND d < 7",
    "DELETE FROM ix_rows WHERE k = '{key}' AND n > 880 AND id = {id}",
    "INSERT INTO ix_rows (d, k) VALUES ({id} % 7, '{key}')",
    "UPDATE t SET note = 'plain' WHERE id = {id} AND d < 7",
)
# Between a user's transactions.
PAUSE_S = 0.05
# Errors that a user may get: a retry, and that the row's partition isn't there now.
EXPECTED = (psycopg2.errors.SerializationFailure, psycopg2.errors.CheckViolation)


def use(dsn: str, seed: int, over: threading.Event, unexpected: list[str], done: list[int]) -> None:
    draw = random.Random(seed)
    user = session(dsn, draw.choice(("READ COMMITTED", "READ COMMITTED", "REPEATABLE READ")))
    while not over.is_set():
        try:
            # Each user has rows of its own: users alone can't deadlock.
            for _ in range(draw.randint(1, 2)):
                text = draw.choice(STATEMENTS).format(key=draw.randrange(20), id=draw.randrange(seed, 120, 2))
                sql(user, text)
            user.commit()
            over.wait(PAUSE_S)
            done.append(1)
        except EXPECTED:
            user.rollback()
        except psycopg2.Error as error:
            unexpected.append(f"{text}: {error}")
            user.rollback()
    user.close()


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False], ids=["event triggers", "none"])
def test_users_get_no_error_but_a_retry_and_no_deadlock(dsn: str, database: Database, guarded: bool) -> None:
    rows_ground.make(dsn)
    run_sql(
        dsn,
        "DROP TRIGGER stamp ON t",
        "ALTER TABLE t ALTER id RESTART WITH 1000",
        *(["SELECT roir.guard()"] if guarded else []),
    )
    over, unexpected, done = threading.Event(), list[str](), list[int]()
    users = [threading.Thread(target=use, args=(dsn, seed, over, unexpected, done), daemon=True) for seed in range(2)]
    for user in users:
        user.start()
    try:
        for round_ in range(2):
            steps.make_index(database, "ix", None, None)
            revert.revert(database, "ix", "test")
            detach.detach_partition(database, "t11", "test")
            attach.attach_partition(database, "t", "t11", "FOR VALUES FROM (11) TO (12)", "test")
            run_sql(dsn, f"ALTER TABLE t ADD COLUMN extra{round_} int DEFAULT 3")
            clean_up.clean_up(database)
            whole_rows.make_rows_view(database, "ix", "test")
    finally:
        over.set()
        for user in users:
            user.join()
    assert unexpected == []
    assert len(done) > 10
    counts = compare(database, "ix")
    assert (counts.missing, counts.extra, counts.different) == (0, 0, 0)
    watch = session(dsn)
    columns = "id, d, k, v::text, n, g, note, at, extra0, extra1"
    rows = [sql(watch, f"SELECT {columns} FROM {name} ORDER BY id, d") for name in ("ix_rows", "t")]
    assert rows[0] == rows[1]
