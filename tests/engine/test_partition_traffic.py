"""Writers that move rows among partitions, and partitions that come, go, are emptied and return, by seeds."""

from __future__ import annotations

import random
from typing import Any

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, lifecycle, seal
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.errors import InvalidInput, LockNotAcquired, NotFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_detach import assert_shown
from tests.engine.writers import Writer, at_work

pytestmark = pytest.mark.sample(0)

SLOTS = 6  # partitions p0 to p5 of ten days each, where they are there; the default one takes all else


class Mover(Writer):
    """Inserts, updates, deletes, and moves rows to other partitions, through the source and through the default one."""

    def _write(self, cursor: Any, identity: int) -> None:
        day, other = self.random.randrange(SLOTS * 10), self.random.randrange(SLOTS * 10)
        key = self.random.choice([None, *map(str, range(9))])
        match self.random.randrange(6):
            case 0:
                cursor.execute("DELETE FROM t WHERE id = %s", (identity,))
            case 1:
                cursor.execute("UPDATE t SET k = %s, v = v + 1 WHERE id = %s", (key, identity))
            case 2:
                # Keys that would meet another row's are left alone.
                cursor.execute(
                    "UPDATE t SET d = %s WHERE id = %s AND NOT EXISTS (SELECT FROM t x WHERE x.id = t.id AND x.d = %s)",
                    (other, identity, other),
                )
            case 3:
                cursor.execute("UPDATE rest SET k = %s WHERE id = %s", (key, identity))
            case _:
                cursor.execute(
                    "INSERT INTO t VALUES (%s, %s, %s, 1) "
                    "ON CONFLICT (d, id) DO UPDATE SET k = excluded.k, v = t.v + 1",
                    (day, identity, key),
                )

    def run(self) -> None:
        connection = steps.session(self.dsn, self.isolation)
        refused = (psycopg2.errors.SerializationFailure, psycopg2.errors.DeadlockDetected)
        # Errors of two sessions that insert one key at a time, or of a partition that left while its row was being
        # routed.
        gone = (psycopg2.errors.UniqueViolation, psycopg2.errors.CheckViolation, psycopg2.errors.UndefinedTable)
        try:
            while not self.halt.is_set():
                try:
                    self._transaction(connection)
                    connection.commit()
                    self.commits += 1
                except (*refused, *gone):
                    connection.rollback()
                    self.retried += 1
        except BaseException as error:
            self.error = error
        finally:
            connection.close()


class Traffic:
    """Partitions that come and go at random. An action that doesn't get its locks at once is skipped."""

    def __init__(self, database: Database, dsn: str, chance: random.Random) -> None:
        self.database = database
        self.dsn = dsn
        self.chance = chance

    def step(self) -> None:
        """Does one random action."""
        n = self.chance.randrange(SLOTS)
        act = self.chance.choice([self.create, self.detach, self.truncate, self.drop, self.attach, self.clean_up])
        unlucky = (
            psycopg2.errors.LockNotAvailable,
            psycopg2.errors.DeadlockDetected,
            psycopg2.errors.CheckViolation,  # the default partition has such rows
            psycopg2.errors.UndefinedTable,
            psycopg2.errors.SerializationFailure,  # a row moved to another partition
            psycopg2.errors.DuplicateTable,
            psycopg2.errors.InvalidObjectDefinition,
            LockNotAcquired,
            InvalidInput,
            NotFound,
        )
        try:
            act(n)
            print(f"{act.__name__} {n}")
        except unlucky as error:
            print(f"no {act.__name__} {n}: {type(error).__name__}")

    def sql(self, *statements: str) -> None:
        run_sql(self.dsn, *(f"SET lock_timeout = '300ms'; {statement}" for statement in statements))

    def create(self, n: int) -> None:
        self.sql(
            f"DELETE FROM rest WHERE d >= {n}0 AND d < {n + 1}0; "
            f"CREATE TABLE p{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)"
        )

    def detach(self, n: int) -> None:
        if self.chance.random() < 0.5:
            self.sql(f"SELECT roir.detach_partition('p{n}', and_drop => true)")
        else:
            detach.detach_partition(self.database, f"p{n}", "test", drop=True, patience_s=0.5)

    def truncate(self, n: int) -> None:
        self.sql(f"TRUNCATE p{n}")

    def drop(self, n: int) -> None:
        self.sql(f"DROP TABLE p{n}")
        sync.sync_partitions(self.database, "t", "test")

    def attach(self, n: int) -> None:
        self.sql(f"CREATE TABLE p{n} (LIKE t INCLUDING ALL)")
        try:
            self.sql(f"INSERT INTO p{n} SELECT {n}0 + i % 10, i, i % 5, -1 FROM generate_series(1, 90) i")
            self.sql(f"DELETE FROM rest WHERE d >= {n}0 AND d < {n + 1}0")
            bounds = f"FOR VALUES FROM ({n}0) TO ({n + 1}0)"
            attach.attach_partition(self.database, "t", f"p{n}", bounds, "test", patience_s=2)
        except BaseException:
            run_sql(self.dsn, f"DROP TABLE p{n}")
            raise

    def clean_up(self, _: int) -> None:
        clean_up.clean_up(self.database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("seed", range(6))
def test_the_index_is_exact_whatever_partitions_do(database: Database, dsn: str, seed: int) -> None:
    print(f"seed {seed}")
    run_sql(
        dsn,
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "CREATE TABLE rest PARTITION OF t DEFAULT",
        *(f"CREATE TABLE p{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(0, SLOTS, 2)),
        "INSERT INTO t SELECT i % 60, i, nullif(i % 9, 4)::text, i FROM generate_series(1, 400) i",
    )
    chance = random.Random(seed)
    traffic = Traffic(database, dsn, chance)
    writers = [Mover(dsn, seed, number, 400) for number in range(3)]

    def now_and_then() -> None:
        if chance.random() < 0.15:
            traffic.step()

    with at_work(writers):
        for scan in chance.sample(("key", "block"), 2):  # a create and a rebuild
            _, run = steps.begin(database, include="v", table="t", batch_rows=25, ranges=9, segments=3, scan=scan)
            steps.build_by_chance(database, run, chance, now_and_then)
            for _ in seal.PHASE.work(database, run, 0):
                traffic.step()
            seal.finish(database, run)
            lifecycle.run_phases(database, run)
            for _ in range(4):
                traffic.step()
                assert_shown_now(database)
                steps.assert_exact(database)
    assert sum(writer.commits for writer in writers) > 0
    assert_shown(database)
    clean_up.clean_up(database)
    assert_shown(database)
    steps.assert_exact(database)


def assert_shown_now(database: Database) -> None:
    """Checks that readers see exact entries in one snapshot, under writers."""
    with database.connect() as connection:
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            rows = execute(connection, "SELECT d, id, k, v FROM public.t ORDER BY d, id").all()
            shown = execute(connection, "SELECT d, id, k, v FROM public.ix ORDER BY d, id").all()
    assert shown == rows
