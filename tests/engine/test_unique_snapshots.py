"""A unique index and transactions with one snapshot, and what users' own ON CONFLICT can and can't do."""

from __future__ import annotations

from contextlib import closing

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine import fold, switch
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

OLD = ["REPEATABLE READ", "SERIALIZABLE"]
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 100) i",
)
# Key 43's row goes after some of the snapshots, and row 150 comes; row 44 gets another key, and row 45 that one.
WRITES = {
    "delete": "DELETE FROM t WHERE id = 42",
    "a key that nobody has any more": "INSERT INTO t VALUES (143, '43', 1)",
    "a key that came": "INSERT INTO t VALUES (145, 'came', 1)",
    "a key that was handed on": "UPDATE t SET k = '44' WHERE id = 46",
    "a key that is taken": "UPDATE t SET k = '7' WHERE id = 47",
    "swap": "UPDATE t SET k = (101 - id)::text WHERE id IN (50, 51)",
    "to NULL": "UPDATE t SET k = NULL WHERE id = 52",
    "change what is included": "UPDATE t SET v = -1 WHERE id = 45",
    "move the primary key": "UPDATE t SET id = 5300 WHERE id = 53",
    "upsert what was deleted": "INSERT INTO t VALUES (43, '43', 4) ON CONFLICT (id) DO UPDATE SET k = 'new'",
}
MOMENTS = ("before prepare", "after prepare", "after build", "after switch", "after fold")


@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("taken", MOMENTS)
def test_every_write_by_a_snapshot_from_every_moment_is_exact_or_refused(
    database: Database, dsn: str, isolation: str, taken: str
) -> None:
    run_sql(dsn, *TABLE)
    users: dict[str, list[psycopg2.extensions.connection]] = {}

    def take(moment: str) -> None:
        if moment == taken:
            for write in WRITES:
                users[write] = [steps.old_session(dsn, isolation) for _ in range(2)]

    def write_all(which: int) -> None:
        for write, sessions in users.items():
            with closing(sessions[which]) as user:
                try:
                    sql(user, WRITES[write])
                    user.commit()
                except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
                    user.rollback()
        assert twice(dsn) == []

    take("before prepare")
    _, run = steps.begin(database, include="v", ranges=3, segments=2, unique=True)
    take("after prepare")
    run_sql(dsn, "DELETE FROM t WHERE id = 43", "INSERT INTO t VALUES (150, 'came', 1)")
    steps.build_all(database, run)
    take("after build")
    steps.seal_all(database, run)
    run_sql(dsn, "UPDATE t SET k = 'handed on' WHERE id = 44", "UPDATE t SET k = '44' WHERE id = 45")
    switch.switch(database, run)
    take("after switch")
    write_all(0)
    fold.fold_here(database, run)
    take("after fold")
    fold.finish(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)
    if users:
        write_all(1)
    steps.assert_exact(database)


def twice(dsn: str) -> list[tuple[str, int]]:
    with closing(steps.session(dsn)) as user:
        return sql(user, "SELECT k, count(*) FROM t WHERE k IS NOT NULL GROUP BY k HAVING count(*) > 1")


@pytest.mark.parametrize("isolation", OLD)
def test_a_key_that_came_after_the_snapshot_is_40001_and_the_retry_is_told_that_it_is_taken(
    database: Database, dsn: str, isolation: str
) -> None:
    run_sql(dsn, *TABLE)
    Stage(database, "published", unique=True)
    with closing(steps.old_session(dsn, isolation)) as user:
        run_sql(dsn, "INSERT INTO t VALUES (150, 'came', 1)")
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(user, "INSERT INTO t VALUES (151, 'came', 1)")
        user.rollback()
        with pytest.raises(psycopg2.errors.UniqueViolation):
            sql(user, "INSERT INTO t VALUES (151, 'came', 1)")


@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("mode", ["direct", "active"])
@pytest.mark.parametrize("gone", ["DELETE FROM t WHERE id = 7", "UPDATE t SET k = 'moved' WHERE id = 7"])
def test_a_key_that_left_after_the_snapshot_can_be_taken_and_written_again(
    database: Database, dsn: str, gone: str, mode: str, isolation: str
) -> None:
    """The snapshot shows both entries. Seen to ask for the row that had gone, which is 40001."""
    run_sql(dsn, *TABLE)
    stage = Stage(database, mode, include="v", unique=True)
    with closing(steps.old_session(dsn, isolation)) as user:
        run_sql(dsn, gone)
        sql(user, "INSERT INTO t VALUES (150, '7', 1)")
        sql(user, "UPDATE t SET v = 2 WHERE id = 150")
        user.commit()
    stage.assert_exact("written")
    stage.finish()


@pytest.mark.parametrize("mode", ["direct", "active"])
def test_on_conflict_knows_the_primary_key_alone(database: Database, dsn: str, mode: str) -> None:
    """As docs/limits.md says."""
    run_sql(dsn, *TABLE)
    stage = Stage(database, mode, include="v", unique=True)
    with closing(steps.session(dsn)) as user:
        for statement in (
            "ON CONFLICT DO NOTHING",
            "ON CONFLICT (id) DO NOTHING",
            "ON CONFLICT (id) DO UPDATE SET v = 0",
        ):
            with pytest.raises(psycopg2.errors.UniqueViolation):
                sql(user, f"INSERT INTO t VALUES (151, '7', 1) {statement}")
            user.rollback()
        for action in ("NOTHING", "UPDATE SET v = 0"):
            with pytest.raises(psycopg2.errors.InvalidColumnReference):
                sql(user, f"INSERT INTO t VALUES (151, '7', 1) ON CONFLICT (k) DO {action}")
            user.rollback()
        # What the page on unique constraints advises: ask first, and catch what comes between.
        known = "SELECT 1 FROM t o WHERE o.k = '7'"
        sql(user, f"INSERT INTO t SELECT 151, '7', 1 WHERE NOT EXISTS ({known})")
        sql(user, "INSERT INTO t VALUES (7, '7', 1) ON CONFLICT (id) DO UPDATE SET v = excluded.v")
        sql(user, "MERGE INTO t USING (VALUES ('7')) s (k) ON t.k = s.k WHEN MATCHED THEN UPDATE SET v = 5 "
            "WHEN NOT MATCHED THEN INSERT VALUES (151, s.k, 1)")  # fmt: skip
        user.commit()
    stage.assert_exact("written")
    stage.finish()
