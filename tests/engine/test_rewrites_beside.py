"""A rewrite of the table, or of one leaf, in the gaps of a command, beside a transaction with an older snapshot that
writes afterwards: the index is exact, or that transaction is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import psycopg2.errors
import pytest
from sqlalchemy import event

from airflow_roir.engine import clean_up
from airflow_roir.engine.control import run
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.partitions import attach
from airflow_roir.errors import RoirError
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.compacting import act
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

REWRITES = {
    "type": "ALTER TABLE t ALTER note TYPE bigint",
    "volatile default": "ALTER TABLE t ADD COLUMN more float8 DEFAULT random()",
    "cluster": "CLUSTER t1 USING t1_pkey",
    "vacuum full": "VACUUM FULL t1",
    "unlogged and logged": "ALTER TABLE t1 SET UNLOGGED; ALTER TABLE t1 SET LOGGED",
    "truncate": "TRUNCATE t",
    "truncate of a leaf": "TRUNCATE t1",
}
SOURCE = (
    "CREATE TABLE t (d int, id int, k text, v int, note int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(3)),
    "INSERT INTO t SELECT i % 30, i, nullif(i % 7, 3)::text, i FROM generate_series(1, 200) i",
    "ANALYZE t",
)
WRITES = (
    "UPDATE t SET k = 'old', v = -1 WHERE id % 11 = 0",
    "DELETE FROM t WHERE id % 13 = 0",
    "INSERT INTO t (d, id, k, v) SELECT 10 + i % 10, 900 + i, 'new', i FROM generate_series(1, 5) i",
)


def published(database: Database) -> None:
    steps.make_index(database, include="v", segments=2)


def compaction(database: Database) -> None:
    compacting.compact(database, act("rewrite", 1))


def damaged(database: Database) -> None:
    published(database)
    run_sql(database.dsn, "DELETE FROM roir_data.g1 WHERE c3 % 10 = 3")


def repair(database: Database) -> None:
    verify(database, "ix", VerifyOptions(repair=True, parallelism=1))


def begun(database: Database) -> None:
    steps.begin(database, include="v", segments=2, ranges=3)
    run_sql(database.dsn, "UPDATE t SET k = 'touched' WHERE id % 5 = 0", "DELETE FROM t WHERE id % 17 = 0")


def seal_and_fold(database: Database) -> None:
    steps.finish_all(database, run.start_run(database, "ix", "test", take_over=True))


def loaded(database: Database) -> None:
    published(database)
    rows = "INSERT INTO n3 SELECT 30, 500 + i, 'n', i FROM generate_series(1, 50) i"
    run_sql(database.dsn, "CREATE TABLE n3 (LIKE t INCLUDING ALL)", rows)


def joining(database: Database) -> None:
    attach.attach_partition(database, "t", "n3", "FOR VALUES FROM (30) TO (40)", "test", patience_s=0)


COMMANDS: dict[Callable[[Database], None], Callable[[Database], None]] = {
    compaction: published,
    repair: damaged,
    seal_and_fold: begun,
    joining: loaded,
}


class Disturbance:
    """Before transaction number `at`, takes an old snapshot and rewrites the table."""

    def __init__(self, dsn: str, rewrite: str, isolation: str, at: int) -> None:
        self.dsn, self.rewrite, self.isolation, self.left = dsn, rewrite, isolation, at
        self.user: Any = None

    def come(self, *_: Any) -> None:
        self.left -= 1
        if self.left > 0 or self.user is not None:
            return
        self.user = steps.old_session(self.dsn, self.isolation)
        with closing(steps.session(self.dsn)) as other:
            other.autocommit = True
            sql(other, "SET lock_timeout = '100ms'")
            with suppress(psycopg2.errors.LockNotAvailable, psycopg2.errors.ObjectInUse):
                for statement in REWRITES[self.rewrite].split("; "):
                    sql(other, statement)

    def write(self) -> None:
        """The writes of the old transaction after the rewrite."""
        if self.user is None:
            return
        try:
            for statement in WRITES:
                sql(self.user, statement)
            self.user.commit()
        except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
            self.user.rollback()
        self.user.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("at", [1, 3, 6, 10, 15, 21, 28])
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED"])
@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_rewrite_in_a_gap_beside_an_older_snapshot_that_writes(
    database: Database, dsn: str, command: Callable[[Database], None], rewrite: str, isolation: str, at: int
) -> None:
    run_sql(dsn, *SOURCE)
    COMMANDS[command](database)
    disturbance = Disturbance(dsn, rewrite, isolation, at)
    event.listen(database.engine, "begin", disturbance.come)
    try:
        # A command that gives way, or pauses, is repeated.
        with suppress(RoirError):
            command(database)
    finally:
        event.remove(database.engine, "begin", disturbance.come)
    disturbance.write()
    if command is joining:
        with suppress(RoirError):
            command(database)
    elif command is seal_and_fold and not _shown(dsn):
        command(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


def _shown(dsn: str) -> bool:
    with closing(steps.session(dsn)) as user:
        return bool(sql(user, "SELECT to_regclass('ix') IS NOT NULL")[0][0])
