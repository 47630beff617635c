"""No false alarm: verifications beside writers, and beside partitions that come and go in the middle of their units."""

from __future__ import annotations

import random
from typing import Any

import pytest

from airflow_roir.engine import abort, fold, lifecycle, switch
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import comparing
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.errors import OperationPaused
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.interposed import before
from tests.engine.steps import sql
from tests.engine.verifying import begin, build_index, claim, found
from tests.engine.writers import Writer, at_work

pytestmark = pytest.mark.sample(1)

PARTITIONED = (
    "CREATE TABLE t (id int, p text, k text, PRIMARY KEY (id, p)) PARTITION BY LIST (p)",
    "CREATE TABLE p1 PARTITION OF t FOR VALUES IN ('a', '50% \"x')",
    "CREATE TABLE p2 PARTITION OF t FOR VALUES IN ('b', '%(where)s')",
    "CREATE TABLE p3 PARTITION OF t DEFAULT",
    "INSERT INTO t SELECT i, (ARRAY['a', '50% \"x', 'b', '%(where)s', 'c'])[1 + i % 5], i % 7 "
    "FROM generate_series(1, 200) i",
)
WAYS: dict[str, dict[str, Any]] = {"full": {}, "sample": {"sample": 60}, "slices": {"slices": 3}}


class _Restless(Writer):
    """A writer that also moves primary keys, and sometimes empties the table."""

    rest_s = 0.002

    def _write(self, cursor: Any, identity: int) -> None:
        chance = self.random.random()
        if chance < 0.1:
            cursor.execute(
                "UPDATE t SET id = -id WHERE id = %s AND NOT EXISTS (SELECT FROM t WHERE id = -%s)",
                (identity, identity),
            )
            cursor.execute("DELETE FROM t WHERE id = -%s", (identity,))
        else:
            super()._write(cursor, identity)

    def _transaction(self, connection: Any) -> None:
        if self.isolation == "READ COMMITTED" and self.random.random() < 0.02:
            # First: after a write of its own, TRUNCATE deadlocks with any writer that waits for that row.
            with connection.cursor() as cursor:
                cursor.execute("TRUNCATE t")
        super()._transaction(connection)


# The id is the same in every process of a test run, whatever the seed is.
@pytest.mark.parametrize("seed", [random.SystemRandom().randrange(2**32)], ids=["random"])
def test_verifications_beside_restless_writers_say_nothing(database: Database, dsn: str, seed: int) -> None:
    """Writers of every isolation level, with a TRUNCATE among them; and there is no deadlock."""
    print(f"seed {seed}")
    build_index(
        dsn,
        database,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i % 20, i FROM generate_series(1, 300) i",
        include="v",
    )
    with at_work([_Restless(dsn, seed, number, 300) for number in range(3)]):
        for way in [*WAYS, *WAYS]:
            report = lifecycle.verify(database, "ix", VerifyOptions(**WAYS[way], repair=way == "full"))
            assert report.found == 0, (way, found(dsn))
    steps.assert_exact(database)


def _go_on(one: VerifyWorker) -> None:
    while isinstance(held := one.claim(), UnitClaim):
        one.unit(held)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("way", WAYS)
def test_a_partition_leaves_between_claim_and_unit(database: Database, dsn: str, way: str) -> None:
    """The entries are hidden, then removed. Neither counts as missing, whatever the bounds look like."""
    base = build_index(dsn, database, *PARTITIONED)
    run = begin(database, **WAYS[way])
    one = verifying.worker(database, run)
    held = claim(one)
    run_sql(dsn, "SELECT roir.detach_partition('p1')")
    one.unit(held)
    _go_on(one)
    one.close()
    assert found(dsn) == []
    abort.abort(database, "ix", "user")
    # While the partition leaves, an entry of another one is wrong.
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 = 2")
    if way == "full":
        assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).is_exact
        assert found(dsn) == [("missing", "2", "repaired")]
        steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_a_leaf_is_renamed_or_dropped_between_claim_and_unit(database: Database, dsn: str) -> None:
    build_index(dsn, database, *PARTITIONED)
    run = begin(database, sample=100)
    one = verifying.worker(database, run)
    held = claim(one)
    run_sql(dsn, "ALTER TABLE p2 RENAME TO renamed", "SELECT roir.detach_partition('p1', and_drop => true)")
    one.unit(held)
    _go_on(one)
    comparing.finish(database, run)
    assert found(dsn) == []
    [(rows,)] = sql(steps.session(dsn), "SELECT rows FROM roir.verification WHERE mode = 'only'")
    assert rows == sql(steps.session(dsn), "SELECT count(*) FROM t")[0][0]


@pytest.mark.by_hand("sweeps")
def test_entries_of_a_partition_that_joins_are_not_extra(database: Database, dsn: str) -> None:
    """Before, while and after its rows are copied."""
    build_index(dsn, database, *PARTITIONED)
    run_sql(
        dsn,
        "CREATE TABLE p4 (LIKE t INCLUDING ALL)",
        "INSERT INTO p4 SELECT i, '7%', 'x' FROM generate_series(1000, 1020) i",
        "SELECT roir.begin_attach('t', 'p4', $$FOR VALUES IN ('7%')$$)",
        "INSERT INTO roir_data.g1 SELECT k, id, p FROM p4",
    )
    for options in (VerifyOptions(), VerifyOptions(sample=100), VerifyOptions(repair=True)):
        assert lifecycle.verify(database, "ix", options).found == 0


def test_what_writers_hold_in_the_delta_is_no_difference(database: Database, dsn: str) -> None:
    """Before a publish the base is overridden by the delta. Then entries are wrong in either."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i % 20, i FROM generate_series(1, 300) i",
    )
    prepared, run = steps.begin(database, include="v", ranges=2, segments=2)
    steps.build_all(database, run)
    run_sql(
        dsn, "UPDATE t SET v = -1 WHERE id < 20", "UPDATE t SET k = 'z' WHERE id < 10", "DELETE FROM t WHERE id = 9"
    )
    steps.seal_all(database, run)
    switch.switch(database, run)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = 5 WHERE id IN (1, 2, 15)")
    fold.fold_here(database, run)
    fold.finish(database, run)
    assert sql(steps.session(dsn), f"SELECT count(*) FROM roir_data.g{prepared.generation_id}_delta")[0][0] > 0
    assert verifying.of_build(database, run).found == 0
    user.rollback()


def test_a_truncate_meets_a_verification_without_a_deadlock(database: Database, dsn: str) -> None:
    """Both lock the source before the base: the second one waits at the source, and holds nothing."""
    build_index(dsn, database, "CREATE TABLE t (id int PRIMARY KEY, k text)", "INSERT INTO t VALUES (1, 'a')")
    run = begin(database, sample=100)
    one = verifying.worker(database, run)
    held = claim(one)
    while held.side != "entry":
        one.unit(held)
        held = claim(one)
    with one.connection.begin():
        one.reading.hold(held)
        locks = "SELECT relation::regclass::text FROM pg_locks WHERE pid = %s AND mode = 'AccessShareLock'"
        pid = one.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        assert ("t",) in sql(steps.session(dsn), locks, pid)


def test_a_pause_is_no_report(database: Database, dsn: str) -> None:
    """A verification that has compared nothing finds nothing wrong. It must not say so."""
    build_index(dsn, database, *PARTITIONED)
    # At this statement a unit has been claimed, and its snapshot exists.
    pause = before(database, "SET TRANSACTION SNAPSHOT", lambda: run_sql(dsn, "SELECT roir.pause('ix')"))
    with pause, pytest.raises(OperationPaused):
        lifecycle.verify(database, "ix")
    assert lifecycle.verify(database, "ix", VerifyOptions(parallelism=3)).complete
