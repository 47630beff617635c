"""Partitioned sources of every shape: scanned leaf by leaf, written through the parent and straight to a leaf."""

from __future__ import annotations

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run
from airflow_roir.engine.build import Claim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import InvalidInput, PartitionsChanged, SourceChanged
from airflow_roir.operation import Status
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.stages import through_modes

pytestmark = pytest.mark.sample(2)

# Sources over the same columns, `t (d, id, k, v)`; rows have d from 0 to 29.
SHAPES = {
    "range": [
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(3)),
    ],
    "range with default": [
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (MINVALUE) TO (10)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE t2 PARTITION OF t DEFAULT",
    ],
    "list": [
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY LIST (d)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES IN (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (10, 11, 12, 13, 14, 15)",
        "CREATE TABLE t2 PARTITION OF t DEFAULT",
    ],
    "hash": [
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY HASH (d, id)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER {n})" for n in range(3)),
    ],
    "two levels": [
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE tx PARTITION OF t FOR VALUES FROM (10) TO (30) PARTITION BY HASH (id)",
        "CREATE TABLE t1 PARTITION OF tx FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE t2 PARTITION OF tx FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    ],
    # A leaf with its columns in another order, and a name like the engine's own.
    "three levels, attached, strange names": [
        'CREATE SCHEMA "S.""x"',
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        'CREATE TABLE "S.""x"."%s;" PARTITION OF t DEFAULT PARTITION BY LIST (d)',
        'CREATE TABLE "S.""x"."c1" PARTITION OF "S.""x"."%s;" DEFAULT PARTITION BY HASH (id)',
        'CREATE TABLE t2 PARTITION OF "S.""x"."c1" FOR VALUES WITH (MODULUS 1, REMAINDER 0)',
        "CREATE TABLE t1 (v int, gone int, k text, id int NOT NULL, d int NOT NULL)",
        "ALTER TABLE t1 DROP COLUMN gone",
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (10)",
    ],
}
FILL = "INSERT INTO t (d, id, k, v) SELECT i % 30, i, nullif(i % 7, 3)::text, i FROM generate_series(1, 300) i"

shapes = pytest.mark.parametrize("shape", SHAPES)


def make(dsn: str, shape: str = "range") -> None:
    run_sql(dsn, *SHAPES[shape], FILL, "ANALYZE t")


def one(database: Database, query: str) -> object:
    with database.transaction() as connection:
        return execute(connection, query).scalar_one()


@shapes
def test_writes_by_the_parent_and_by_a_leaf_in_each_mode(database: Database, dsn: str, shape: str) -> None:
    make(dsn, shape)
    user = steps.session(dsn)

    def write(mode: str) -> None:
        steps.sql(user, "UPDATE t SET k = k || 'x' WHERE id % 5 = 0")
        steps.sql(user, "DELETE FROM t1 WHERE id % 7 = 0")
        steps.sql(user, "UPDATE t2 SET k = 'leaf', v = v + 1 WHERE id % 3 = 0")
        # rows that move, there and back and onto another's place
        steps.sql(user, "UPDATE t SET d = 29 - d WHERE id % 4 = 1")
        steps.sql(user, "UPDATE t SET d = (d + 10) % 30, k = NULL WHERE id % 11 = 2")
        steps.sql(user, "DELETE FROM t WHERE id = 13")
        base = {"capture": 1000, "direct": 2000, "active": 3000}[mode]
        steps.sql(user, f"INSERT INTO t SELECT i % 30, {base} + i, i % 5, i FROM generate_series(1, 60) i")
        steps.sql(
            user,
            "MERGE INTO t USING (SELECT d, id FROM t WHERE id % 6 = 0) s ON t.d = s.d AND t.id = s.id "
            "WHEN MATCHED AND s.id % 12 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET k = 'merged'",
        )
        user.commit()

    through_modes(database, write, include="v")


def test_a_level_of_partitions_is_no_source(database: Database, dsn: str) -> None:
    make(dsn, "two levels")
    with pytest.raises(InvalidInput, match="is a partition and has partitions"):
        dry_run.run(database, IndexDefinition.parse("other", "tx", "k"), BuildOptions())


@shapes
def test_truncate_of_one_leaf_in_each_mode(database: Database, dsn: str, shape: str) -> None:
    """Seen to leave stale entries without the leaves' own triggers."""
    make(dsn, shape)
    user = steps.session(dsn)
    leaves = iter(("t1", "t2", "t0"))

    def write(_mode: str) -> None:
        steps.sql(user, "INSERT INTO t VALUES (5, 9001, 'n', 1), (15, 9002, NULL, 1), (25, 9003, 'n', 1)")
        steps.sql(user, "UPDATE t SET k = 'touched' WHERE id % 4 = 0")
        user.commit()
        steps.sql(user, f"TRUNCATE {next(leaves)}")
        steps.sql(user, "INSERT INTO t VALUES (5, 5, 'again', 1), (15, 15, 'again', 1) ON CONFLICT DO NOTHING")
        user.commit()
        steps.sql(user, "TRUNCATE t0, t1, t2")
        user.rollback()
        steps.sql(user, "DELETE FROM t WHERE id > 9000")
        user.commit()

    through_modes(database, write, include="v")
    assert steps.assert_exact(database).rows == one(database, "SELECT count(*) FROM public.t")


def test_truncate_of_the_whole_and_of_a_middle_level(database: Database, dsn: str) -> None:
    make(dsn, "two levels")
    user = steps.session(dsn)

    def write(mode: str) -> None:
        steps.sql(user, "TRUNCATE tx" if mode != "direct" else "TRUNCATE t")
        user.commit()
        steps.sql(
            user, "INSERT INTO t SELECT i % 30, i, i % 7, i FROM generate_series(1, 200) i ON CONFLICT DO NOTHING"
        )
        user.commit()

    through_modes(database, write, include="v")


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_truncate_of_a_leaf_under_an_old_snapshot_is_refused(database: Database, dsn: str, isolation: str) -> None:
    """The snapshot may not see entries that it would have to remove. Seen to leave one behind without the refusal."""
    make(dsn)
    _, run = steps.begin(database)
    old, other = steps.session(dsn, isolation), steps.session(dsn)
    steps.sql(old, "SELECT count(*) FROM public.t")
    steps.finish_all(database, run)
    steps.sql(other, "INSERT INTO t VALUES (15, 9001, 'n', 1)")
    other.commit()
    with pytest.raises(Exception, match="can't be truncated in a"):
        steps.sql(old, "TRUNCATE t1")
    old.rollback()
    steps.assert_exact(database)


def test_each_leaf_has_ranges_of_its_own_in_proportion(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        *SHAPES["range"],
        "INSERT INTO t SELECT 5, i, i % 7, i FROM generate_series(1, 9000) i",
        "INSERT INTO t SELECT 15, i, i % 7, i FROM generate_series(1, 3000) i",
    )
    _, run = steps.begin(database, ranges=9, segments=2, batch_rows=700)
    with database.transaction() as connection:
        ranges = execute(
            connection,
            "SELECT relation::oid::regclass::text, count(*) FROM roir.scan_range GROUP BY 1 ORDER BY 1",
        ).all()
    assert [tuple(row) for row in ranges] == [("public.t0", 7), ("public.t1", 2), ("public.t2", 1)]
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 12_000
    assert one(database, "SELECT max(rows) FROM roir.scan_range") <= 1600


def test_a_thousand_partitions_are_planned_and_prepared_at_once(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (d int, id int, k text, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        "DO $$ BEGIN FOR n IN 0..999 LOOP "
        "EXECUTE format('CREATE TABLE t%s PARTITION OF t FOR VALUES FROM (%s) TO (%s)', n, n, n + 1); "
        "END LOOP; END $$",
        "INSERT INTO t SELECT i % 1000, i, i % 7 FROM generate_series(1, 5000) i",
    )
    prepared, _ = steps.begin(database, ranges=8, segments=2)
    assert one(database, "SELECT count(DISTINCT relation) FROM roir.scan_range") == 1000
    assert one(database, "SELECT count(*) FROM roir.source_partition WHERE status = 'present'") == 1000
    assert prepared.kind == "create"


def test_a_partition_created_in_any_phase_is_harmless(database: Database, dsn: str) -> None:
    """The index follows it, and its TRUNCATE once a phase has ended."""
    make(dsn)
    user = steps.session(dsn)
    number = iter(range(3, 20))

    def write(mode: str) -> None:
        for _ in range(2):
            n = next(number)
            steps.sql(user, f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)")
            steps.sql(user, f"INSERT INTO t SELECT {n}0 + i % 10, i, nullif(i % 7, 3), i FROM generate_series(1, 50) i")
            user.commit()
            steps.sql(user, f"UPDATE t SET k = 'x' WHERE d >= {n}0 AND id % 3 = 0")
            steps.sql(user, f"DELETE FROM t{n} WHERE id % 5 = 0")
            user.commit()
        if mode == "direct":
            steps.sql(user, "TRUNCATE t3, t4")
            user.commit()

    through_modes(database, write)
    steps.sql(user, "TRUNCATE t5")
    user.commit()
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_partition_created_between_plan_and_lock_is_scanned(database: Database, dsn: str) -> None:
    """Seen to be missed if the ranges are those of the plan."""
    make(dsn)

    def change() -> None:
        run_sql(
            dsn,
            "DROP TABLE t0",
            "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)",
            "INSERT INTO t SELECT 30, i, 'k', i FROM generate_series(1, 50) i",
        )

    with before(database, "INSERT INTO roir.index", change):
        _, run = steps.begin(database)
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 250


@pytest.mark.parametrize("statement", ["DROP TABLE t1", "ALTER TABLE t DETACH PARTITION t1"])
def test_a_partition_that_goes_while_building_stops_the_batch(database: Database, dsn: str, statement: str) -> None:
    make(dsn)
    _, run = steps.begin(database, ranges=3, batch_rows=20)
    worker, claim = steps.claimed(database, run)
    assert isinstance(worker.step(claim), Step)
    run_sql(dsn, statement)
    claim = worker.claim()
    assert isinstance(claim, Claim)
    with pytest.raises(PartitionsChanged, match=r"public\.t1 of public\.t was dropped or detached without roir"):
        worker.step(claim)
    worker.connection.close()
    with pytest.raises(PartitionsChanged, match="roir sync-partitions"):
        steps.build_all(database, run)
    assert one(database, "SELECT status FROM roir.operation") == Status.RUNNING


@pytest.mark.parametrize("name", ["{0}", "{1}", "ALL"])
def test_a_partition_whose_capture_is_disabled_ends_the_build(database: Database, dsn: str, name: str) -> None:
    make(dsn)
    _, run = steps.begin(database, ranges=3, batch_rows=20)
    worker, claim = steps.claimed(database, run)
    run_sql(dsn, f"ALTER TABLE t1 DISABLE TRIGGER {name.format(*steps.capture_triggers(dsn))}")
    with pytest.raises(SourceChanged, match="the capture: its triggers"):
        worker.step(claim)
    worker.connection.close()


def test_a_partition_that_is_attached_with_rows_stops_the_batch(database: Database, dsn: str) -> None:
    make(dsn)
    _, run = steps.begin(database, ranges=3, batch_rows=20)
    worker, claim = steps.claimed(database, run)
    run_sql(
        dsn,
        "CREATE TABLE t3 (LIKE t INCLUDING ALL)",
        "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)",
        "INSERT INTO t VALUES (31, 1, NULL, 1), (32, 2, 'a', 1)",
    )
    outcome = worker.step(claim)
    assert isinstance(outcome, Step), "it was empty when it came"
    assert outcome.rest is not None
    run_sql(
        dsn,
        "CREATE TABLE t4 (LIKE t INCLUDING ALL)",
        "INSERT INTO t4 VALUES (41, 1, NULL, 1)",
        "ALTER TABLE t ATTACH PARTITION t4 FOR VALUES FROM (40) TO (50)",
    )
    with pytest.raises(PartitionsChanged, match=r"public\.t4 was attached to public\.t with rows"):
        worker.step(outcome.rest)
    worker.connection.close()
