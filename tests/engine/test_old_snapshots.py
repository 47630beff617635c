"""Transactions whose snapshot is older than the switch or the publish: 40001, or an exact index; nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

OLD = ["REPEATABLE READ", "SERIALIZABLE"]
WRITES = {
    "delete": "DELETE FROM t WHERE id = 42",
    "insert": "INSERT INTO t VALUES (142, '2', 1)",
    "move the key": "UPDATE t SET k = 'new' WHERE id = 42",
    "change what is included": "UPDATE t SET v = -1 WHERE id = 42",
    "move the primary key": "UPDATE t SET id = 4200 WHERE id = 42",
    "insert what was deleted": "INSERT INTO t VALUES (43, '3', 43)",
    "insert what was deleted, or update": "INSERT INTO t VALUES (43, '3', 4) ON CONFLICT (id) DO UPDATE SET k = 'new'",
}
# After some of the snapshots key 43's row goes, row 150 comes, row 44 gets another key, and row 45 gets key 44.
UNIQUE_WRITES = {
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


@dataclass(frozen=True)
class Ground:
    """Writes of old snapshots to `t`. began: writes before the snapshot, taken after prepare; then: after it."""

    writes: Mapping[str, str]
    began: tuple[str, ...] = ()
    then: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unique: bool = False

    def make(self, dsn: str) -> None:
        """Creates table `t`, with unique keys or with five keys."""
        steps.make_table(dsn)
        if self.unique:
            run_sql(dsn, "UPDATE t SET k = id::text", "ANALYZE t")


TOUCH = "UPDATE t SET k = 'x' || k, v = v + 1 WHERE id IN (42, 142)"
BACK = "UPDATE t SET k = substr(k, 2), v = v - 1 WHERE id IN (42, 142)"
GONE = {"after prepare": ("DELETE FROM t WHERE id = 43",)}
UNIQUE = Ground(
    UNIQUE_WRITES,
    then={
        "after prepare": (*GONE["after prepare"], "INSERT INTO t VALUES (150, 'came', 1)"),
        "after seal": ("UPDATE t SET k = 'handed on' WHERE id = 44", "UPDATE t SET k = '44' WHERE id = 45"),
    },
    unique=True,
)
GROUNDS = {
    "nothing": Ground(WRITES, then=GONE),
    "touched": Ground(WRITES, (TOUCH,), GONE),
    "touched there and back": Ground(WRITES, (TOUCH, BACK), GONE),
    "unique": UNIQUE,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("kind", GROUNDS)
@pytest.mark.parametrize("taken", [moment for moment in steps.MOMENTS if moment != "after seal"])
def test_every_write_by_a_snapshot_from_every_moment_is_exact_or_refused(
    database: Database, dsn: str, isolation: str, kind: str, taken: str
) -> None:
    """A snapshot is taken at one moment. Its writes come at each later one, each in a transaction of its own."""
    ground = GROUNDS[kind]
    ground.make(dsn)
    users: dict[str, list[psycopg2.extensions.connection]] = {}

    def write_all(which: int) -> None:
        for write, sessions in users.items():
            with closing(sessions[which]) as user:
                try:
                    sql(user, ground.writes[write])
                    user.commit()
                except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
                    user.rollback()
        if ground.unique:
            with closing(steps.session(dsn)) as user:
                twice = "SELECT k, count(*) FROM t WHERE k IS NOT NULL GROUP BY k HAVING count(*) > 1"
                assert sql(user, twice) == []

    for moment in steps.moments(database, include="v", ranges=3, segments=2, unique=ground.unique):
        if moment == "after prepare":
            run_sql(dsn, *ground.began)
        if moment == taken:
            for write in ground.writes:
                users[write] = [steps.old_session(dsn, isolation) for _ in range(2)]
        run_sql(dsn, *ground.then.get(moment, ()))
        if moment == "after switch":
            write_all(0)
    steps.assert_exact(database)
    write_all(1)
    steps.assert_exact(database)


@pytest.mark.parametrize("isolation", OLD)
def test_a_removal_that_finds_its_entry_in_the_delta_must_not_miss_the_copy_in_the_base(
    database: Database, dsn: str, isolation: str
) -> None:
    """The delta's entry is older than the snapshot, and the copy in the base is younger: one of the two would stay."""
    steps.make_table(dsn)
    _, run = steps.begin(database)
    run_sql(dsn, "UPDATE t SET k = 'touched' WHERE id = 42")
    user = steps.old_session(dsn, isolation)
    steps.switch_all(database, run)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "DELETE FROM t WHERE id = 42")
    user.rollback()
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("isolation", OLD)
def test_an_insert_must_not_miss_antimatter_that_is_younger_than_its_snapshot(
    database: Database, dsn: str, isolation: str
) -> None:
    """The fold would apply that antimatter to the new entry."""
    steps.make_table(dsn)
    _, run = steps.begin(database)
    user = steps.old_session(dsn, isolation)
    run_sql(dsn, "DELETE FROM t WHERE id = 42")
    steps.switch_all(database, run)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "INSERT INTO t VALUES (42, '2', 1)")
    user.rollback()
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("isolation", OLD)
def test_a_key_that_came_after_the_snapshot_is_40001_and_the_retry_is_told_that_it_is_taken(
    database: Database, dsn: str, isolation: str
) -> None:
    UNIQUE.make(dsn)
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
    """The snapshot shows both entries. Seen to ask for the row that was gone, and to get 40001."""
    UNIQUE.make(dsn)
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
    """docs/limits.md says so."""
    UNIQUE.make(dsn)
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
        # Applications do this: they ask first, and catch the error if a row comes between.
        known = "SELECT 1 FROM t o WHERE o.k = '7'"
        sql(user, f"INSERT INTO t SELECT 151, '7', 1 WHERE NOT EXISTS ({known})")
        sql(user, "INSERT INTO t VALUES (7, '7', 1) ON CONFLICT (id) DO UPDATE SET v = excluded.v")
        sql(user, "MERGE INTO t USING (VALUES ('7')) s (k) ON t.k = s.k WHEN MATCHED THEN UPDATE SET v = 5 "
            "WHEN NOT MATCHED THEN INSERT VALUES (151, s.k, 1)")  # fmt: skip
        user.commit()
    stage.assert_exact("written")
    stage.finish()
