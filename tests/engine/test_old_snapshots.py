"""Transactions whose snapshot is older than the switch or the publish: 40001, or an exact index; nothing else."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine import fold, switch
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

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


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def switched(database: Database, run: Run) -> None:
    steps.switch_all(database, run)


def finish(database: Database, run: Run) -> None:
    steps.fold_and_publish(database, run)


@pytest.mark.parametrize("isolation", OLD)
def test_a_removal_that_finds_its_entry_in_the_delta_must_not_miss_the_copy_in_the_base(
    database: Database, dsn: str, isolation: str
) -> None:
    """The delta's entry is older than the snapshot, the builder's copy younger: one of the two would stay."""
    _, run = steps.begin(database)
    run_sql(dsn, "UPDATE t SET k = 'touched' WHERE id = 42")
    user = steps.old_session(dsn, isolation)
    switched(database, run)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "DELETE FROM t WHERE id = 42")
    user.rollback()
    finish(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("isolation", OLD)
def test_an_insert_must_not_miss_antimatter_that_is_younger_than_its_snapshot(
    database: Database, dsn: str, isolation: str
) -> None:
    """The fold would take that antimatter for the new entry's deletion."""
    _, run = steps.begin(database)
    user = steps.old_session(dsn, isolation)
    run_sql(dsn, "DELETE FROM t WHERE id = 42")
    switched(database, run)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "INSERT INTO t VALUES (42, '2', 1)")
    user.rollback()
    finish(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("before", ["nothing", "touched", "touched there and back"])
@pytest.mark.parametrize("taken", ["before prepare", "after prepare", "after build", "after switch", "after fold"])
def test_every_write_by_a_snapshot_from_every_moment_is_exact_or_refused(
    database: Database, dsn: str, isolation: str, before: str, taken: str
) -> None:
    """A snapshot is taken at one moment; its writes come at each later one, in a transaction of their own each."""
    users: dict[str, list[psycopg2.extensions.connection]] = {}

    def take(moment: str) -> None:
        if moment == taken:
            for write in WRITES:
                users[write] = [steps.old_session(dsn, isolation) for _ in range(2)]

    def write_all(which: int) -> None:
        for write, sessions in users.items():
            user = sessions[which]
            try:
                sql(user, WRITES[write])
                user.commit()
            except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
                user.rollback()

    take("before prepare")
    _, run = steps.begin(database, include="v", ranges=3, segments=2)
    if before != "nothing":
        run_sql(dsn, "UPDATE t SET k = 'x' || k, v = v + 1 WHERE id IN (42, 142)")
    if before == "touched there and back":
        run_sql(dsn, "UPDATE t SET k = substr(k, 2), v = v - 1 WHERE id IN (42, 142)")
    take("after prepare")
    run_sql(dsn, "DELETE FROM t WHERE id = 43")
    steps.build_all(database, run)
    take("after build")
    steps.seal_all(database, run)
    switch.switch(database, run)
    take("after switch")
    write_all(0)
    fold.fold_here(database, run)
    take("after fold")
    fold.finish(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)
    write_all(1)
    steps.assert_exact(database)
