"""Partitions that came or went without roir: detected, reported and repaired, in every phase."""

from __future__ import annotations

import pytest

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.control import run
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.partitions.sync import sync_partitions
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.errors import LockNotAcquired, NotFound, PartitionsChanged
from airflow_roir.operation import Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.test_detach import assert_shown, published
from tests.engine.test_partitions import make, one

pytestmark = pytest.mark.sample(1)

MODES = ("capture", "direct", "active")

RAW = {
    "dropped": ["DROP TABLE t1"],
    "detached": ["ALTER TABLE t DETACH PARTITION t1"],
    "detached concurrently": ["ALTER TABLE t DETACH PARTITION t1 CONCURRENTLY"],
    "dropped and made anew": [
        "DROP TABLE t1",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (10) TO (20)",
        "INSERT INTO t VALUES (10, 40, '5', 40), (11, 41, 'new', 41), (12, 9000, NULL, 1)",
    ],
    "attached with rows": [
        "CREATE TABLE t3 (v int, id int NOT NULL, k text, d int NOT NULL)",
        "INSERT INTO t3 SELECT i, i, nullif(i % 7, 3), 30 + i % 10 FROM generate_series(1, 100) i",
        "ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)",
        "INSERT INTO t VALUES (31, 9000, 'captured', 1)",
    ],
    "detached and attached again": [
        "ALTER TABLE t DETACH PARTITION t1",
        "DELETE FROM t1 WHERE id % 2 = 0",
        "UPDATE t1 SET k = 'changed' WHERE id % 3 = 0",
        "INSERT INTO t1 VALUES (13, 9000, 'new', 1)",
        "ALTER TABLE t ATTACH PARTITION t1 FOR VALUES FROM (10) TO (20)",
    ],
    "exchanged": [
        "CREATE TABLE x (LIKE t INCLUDING ALL)",
        "INSERT INTO x SELECT d, id, 'other', v FROM t1 WHERE id % 3 > 0",
        "ALTER TABLE t DETACH PARTITION t1",
        "ALTER TABLE t ATTACH PARTITION x FOR VALUES FROM (10) TO (20)",
    ],
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", RAW)
def test_it_is_detected_and_put_right(database: Database, dsn: str, case: str, mode: str) -> None:
    """Found: the clean-up after a `sync-partitions` said that the capture was made for another owner or another
    version, and asked for a verification. It holds: it makes the capture again for the newer layout, and says nothing:
    what was written before is right.
    """
    make(dsn)
    user = steps.session(dsn)
    _, drive = steps.begin(database, include="v", ranges=4, segments=2, batch_rows=30)
    steps.sql(user, "UPDATE t SET k = 'touched' WHERE id % 4 = 0; DELETE FROM t WHERE id % 9 = 0")
    user.commit()
    if mode != "capture":
        steps.switch_all(database, drive)
    if mode == "active":
        steps.fold_and_publish(database, drive)
    else:
        steps.worker(database, drive).connection.close()
    run_sql(dsn, *RAW[case])
    if mode == "active":
        assert [line for line in clean_up.clean_up(database).waiting if "roir sync-partitions public.t" in line]
    else:
        with pytest.raises(PartitionsChanged), run.driving(database, drive):
            finish(database, drive, mode)
        assert one(database, "SELECT status FROM roir.operation") == Status.PAUSED
    sync_partitions(database, "t", "test")
    if mode != "active":
        finish(database, run.start_run(database, "ix", "again"), mode)
    steps.assert_exact(database)
    assert_shown(database)
    steps.sql(user, "UPDATE t SET k = k || 'z'; DELETE FROM t WHERE id % 5 = 0")
    user.commit()
    steps.assert_exact(database)
    last = clean_up.clean_up(database)
    # The capture is created again for the newer layout. The old one was right, so there is no warning.
    assert (last.waiting, last.warnings) == ([], [])
    assert one(database, "SELECT count(*) FROM roir.source_partition WHERE status <> 'present'") == 0


def finish(database: Database, drive: run.Run, mode: str) -> None:
    if mode == "capture":
        steps.finish_all(database, drive)
    else:
        lifecycle.run_phases(database, drive)


@pytest.mark.parametrize("statement", ["DROP TABLE t3", "ALTER TABLE t DETACH PARTITION t3"])
def test_a_partition_that_goes_again_before_it_is_read(database: Database, dsn: str, statement: str) -> None:
    """A dropped partition has only its number for a name by then."""
    make(dsn)
    steps.make_index(database, table="t", keys="k", include="v")
    run_sql(dsn, *RAW["attached with rows"][:3])
    with (
        before(database, "SELECT %(leaf)s::oid::regclass", lambda: run_sql(dsn, statement)),
        pytest.raises(LockNotAcquired, match=r"(dropped|detached) meanwhile"),
    ):
        sync_partitions(database, "t", "test")
    sync_partitions(database, "t", "test")
    steps.assert_exact(database)
    assert_shown(database)


@pytest.mark.sample(0)
def test_a_level_that_was_dropped_with_all_below(database: Database, dsn: str) -> None:
    """The conditions of its hash partitions can't be evaluated any more; its own can."""
    published(database, dsn, "two levels")
    run_sql(dsn, "DROP TABLE tx")
    assert "partition public.tx was dropped" in " ".join(indexes(database, "ix")[0].warnings)
    assert sync_partitions(database, "t", "test").as_dict() == {
        "gone": ["public.tx"],
        "came": [],
        "entries_removed": 200,
        "entries_added": 0,
    }
    steps.assert_exact(database)
    assert not indexes(database, "ix")[0].warnings


@pytest.mark.by_hand("sweeps")
def test_a_level_that_was_out_for_a_while(database: Database, dsn: str) -> None:
    published(database, dsn, "two levels")
    run_sql(
        dsn,
        "ALTER TABLE t DETACH PARTITION tx",
        "DELETE FROM tx WHERE id % 3 = 0",
        "INSERT INTO tx VALUES (11, 9000, 'new', 1)",
        "ALTER TABLE t ATTACH PARTITION tx FOR VALUES FROM (10) TO (30)",
    )
    report = sync_partitions(database, "t", "test")
    assert (report.gone, report.came) == (["public.tx"], ["public.t1", "public.t2"])
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_a_partition_that_clean_up_takes_in_is_followed(database: Database, dsn: str) -> None:
    """Even if it was truncated before. Seen to leave its entries if only the catalog is compared."""
    published(database, dsn)
    run_sql(
        dsn,
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (30) TO (40)",
        "INSERT INTO t VALUES (31, 1, 'a', 1), (32, 2, NULL, 1)",
        "TRUNCATE t3",
        "INSERT INTO t VALUES (32, 2, NULL, 2)",
        "CREATE TABLE t4 PARTITION OF t FOR VALUES FROM (40) TO (50) PARTITION BY HASH (id)",
        "CREATE TABLE t5 PARTITION OF t4 FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
        "INSERT INTO t VALUES (41, 1, 'a', 1)",
    )
    report = clean_up.clean_up(database)
    assert (report.waiting, report.partition_entries) == ([], 1)
    steps.assert_exact(database)
    run_sql(dsn, "TRUNCATE t3, t4")
    steps.assert_exact(database)


def test_a_table_without_index_is_said(database: Database, dsn: str) -> None:
    make(dsn)
    with pytest.raises(NotFound, match="no roir index"):
        sync_partitions(database, "t", "test")


@pytest.mark.by_hand("sweeps")
def test_what_is_wrong_is_found_while_a_partition_is_leaving(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(
        dsn,
        "SELECT roir.detach_partition('t1')",
        "INSERT INTO roir_data.g1 SELECT c1, c2, 9999, c4 FROM roir_data.g1 WHERE c2 = 5 LIMIT 1",
        "DELETE FROM roir_data.g1 WHERE c3 = (SELECT min(c3) FROM roir_data.g1 WHERE c2 = 6)",
    )
    report = verify(database, "ix")
    assert (report.missing, report.extra, report.different) == (1, 1, 0)
