"""Loaded tables that become partitions: their entries are copied hidden, and shown at the moment of the attach."""

from __future__ import annotations

from contextlib import closing

import psycopg2
import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput, LockNotAcquired
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.test_detach import assert_shown, published
from tests.engine.test_partitions import make, one

pytestmark = pytest.mark.sample(1)

LOADED = [
    "CREATE TABLE t3 (v int, id int, k text, d int, PRIMARY KEY (d, id))",
    "INSERT INTO t3 SELECT i, i, nullif(i % 7, 3), 30 + i % 10 FROM generate_series(1, 100) i",
]
BOUNDS = "FOR VALUES FROM (30) TO (40)"


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("mode", ["capture", "direct", "active"])
def test_a_loaded_table_is_attached_in_each_mode(database: Database, dsn: str, mode: str, guarded: bool) -> None:
    make(dsn)
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")
    run_sql(dsn, *LOADED)
    _, run = steps.begin(database, include="v", ranges=4, segments=2)
    if mode != "capture":
        steps.switch_all(database, run)
    if mode == "active":
        steps.fold_and_publish(database, run)
    assert attach.attach_partition(database, "t", "t3", BOUNDS, "test") == 100
    run_sql(dsn, "UPDATE t SET k = 'x' WHERE d = 33", "DELETE FROM t3 WHERE d = 34", "INSERT INTO t VALUES (35, 900)")
    if mode == "capture":
        steps.finish_all(database, run)
    elif mode == "direct":
        steps.fold_and_publish(database, run)
    assert steps.assert_exact(database).rows == 391
    run_sql(dsn, "TRUNCATE t3")
    assert steps.assert_exact(database).rows == 300
    assert one(database, "SELECT count(*) FROM pg_constraint WHERE conname = 'roir_bounds'") == 0
    assert clean_up.clean_up(database).waiting == []


@pytest.mark.parametrize("shape", ["range", "range with default", "two levels", "hash"])
def test_shapes(database: Database, dsn: str, shape: str) -> None:
    published(database, dsn, shape)
    parent, bounds = {
        "range with default": ("t", "FOR VALUES FROM (40) TO (50)"),
        "two levels": ("tx", "FOR VALUES WITH (MODULUS 2, REMAINDER 1)"),
        "hash": ("t", "FOR VALUES WITH (MODULUS 3, REMAINDER 1)"),
    }.get(shape, ("t", BOUNDS))
    if shape in ("two levels", "hash"):
        leaf = "t2" if shape == "two levels" else "t1"
        run_sql(dsn, f"SELECT roir.detach_partition('{leaf}')", f"ALTER TABLE {leaf} RENAME TO n")
        run_sql(dsn, "UPDATE n SET k = 'changed' WHERE id % 2 = 0")
    else:
        run_sql(dsn, "CREATE TABLE n (LIKE t INCLUDING ALL)", "INSERT INTO n VALUES (49, 1, 'a', 1), (49, 2, NULL, 1)")
        run_sql(dsn, "UPDATE n SET d = 39 WHERE true" if shape == "range" else "SELECT 1")
    attach.attach_partition(database, parent, "n", bounds, "test")
    assert_shown(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_nothing_is_shown_before_and_nobody_writes_meanwhile(dsn: str) -> None:
    """The attach dies after two batches and continues after them. A rebuild that began meanwhile gets the rows too."""
    database = Database(dsn, limits=Limits(attach_rows=30))
    published(database, dsn)
    run_sql(dsn, *LOADED)

    def die() -> None:
        raise KeyboardInterrupt

    # Each batch reads its watermark before its lock and after it.
    with before(database, "SELECT watermark FROM roir.source_partition", die, at=5), pytest.raises(KeyboardInterrupt):
        attach.attach_partition(database, "t", "t3", BOUNDS, "test")
    assert one(database, "SELECT count(*) FROM roir_data.g1") == 360
    assert_shown(database)
    steps.assert_exact(database)
    for statement in ("INSERT INTO t3 VALUES (1, 900, 'a', 31)", "DELETE FROM t3", "TRUNCATE t3"):
        with pytest.raises(psycopg2.errors.ObjectInUse, match="is being attached"):
            run_sql(dsn, statement)
    _, run = steps.begin(database, "ix", None, None)
    assert attach.attach_partition(database, "t", "t3", BOUNDS, "test") == 140
    assert_shown(database)
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 400


@pytest.mark.sample(0)
def test_given_up_it_leaves_nothing(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(dsn, *LOADED, f"SELECT roir.begin_attach('t', 't3', '{BOUNDS}')")
    old = steps.session(dsn, "REPEATABLE READ")
    steps.sql(old, "SET application_name = 'old report'; SELECT 1 FROM t3 LIMIT 1")
    with pytest.raises(LockNotAcquired, match="old report"):
        attach.attach_partition(database, "t", "t3", BOUNDS, "test", patience_s=0.1)
    old.rollback()
    run_sql(dsn, "SELECT roir.cancel_attach('t3')", "INSERT INTO t3 VALUES (1, 900, 'a', 31)")
    assert_shown(database)
    assert clean_up.clean_up(database).partition_entries == 100
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_lock_that_a_batch_does_not_get_is_named(database: Database, dsn: str) -> None:
    """Seen to fail: a bare "canceling statement due to lock timeout"."""
    published(database, dsn)
    run_sql(dsn, *LOADED)
    with closing(steps.session(dsn)) as user:

        def lock() -> None:
            steps.sql(user, "SET application_name = 'a bulk load'; LOCK TABLE t IN SHARE MODE")

        with (
            before(database, 'LOCK TABLE ONLY "public"."t" IN ROW EXCLUSIVE', lock),
            pytest.raises(LockNotAcquired, match=r"the rows of (public\.)?t3 .*a bulk load.*run the command again"),
        ):
            attach.attach_partition(database, "t", "t3", BOUNDS, "test", patience_s=0)
    attach.attach_partition(database, "t", "t3", BOUNDS, "test")
    assert_shown(database)
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("beginning", "at"),
    [
        ("SELECT watermark", 1),
        ("SELECT watermark", 3),
        ("SELECT roir.finish_attach", 1),
        ("SELECT roir.validate_attach", 1),
    ],
)
def test_one_that_is_cancelled_while_it_runs_ends(dsn: str, beginning: str, at: int) -> None:
    """It ends, and doesn't close the table again."""
    database = Database(dsn, limits=Limits(attach_rows=30))
    published(database, dsn)
    run_sql(dsn, *LOADED)

    def cancel() -> None:
        run_sql(dsn, "SET deadlock_timeout = '10s'", "SELECT roir.cancel_attach('t3')")

    with (
        before(database, beginning, cancel, at),
        pytest.raises(InvalidInput, match=r"another session has cancelled") as ended,
    ):
        attach.attach_partition(database, "t", "t3", BOUNDS, "test")
    assert "still refuses" not in str(ended.value)
    run_sql(dsn, "INSERT INTO t3 VALUES (1, 900, 'a', 31)")
    assert_shown(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


@pytest.mark.parametrize(
    ("load", "bounds", "said"),
    [
        ([], "FOR VALUES FROM (20) TO (40)", "would overlap"),
        ([], "FOR VALUES FROM (30) TO (35)", "roir_bounds|violated by some row"),
        ([], "nonsense", "syntax error"),
        (["ALTER TABLE t3 DROP CONSTRAINT t3_pkey"], BOUNDS, "has no primary key"),
        (["ALTER TABLE t ATTACH PARTITION t3 FOR VALUES FROM (30) TO (40)"], BOUNDS, "is a partition"),
    ],
)
def test_what_does_not_fit_is_refused(database: Database, dsn: str, load: list[str], bounds: str, said: str) -> None:
    published(database, dsn)
    run_sql(dsn, *LOADED, *load)
    with pytest.raises(InvalidInput, match=said) as refused:
        attach.attach_partition(database, "t", "t3", bounds, "test")
    # Found: `partition "t3" would overlap partition "t2"`, of no index, and without a way on.
    assert "can't be attached to public.t, the table of public.ix: " in str(refused.value)
    assert "roir attach-partition public.t public.t3 '…'" in str(refused.value)


def test_the_last_step_without_the_copy_is_refused(database: Database, dsn: str) -> None:
    """Found: `roir.begin_attach`, then `roir.finish_attach`, in SQL, without the copy between them: the table was
    attached, and its rows had no entries. It holds: refused: `source_partition.copied` says whether the copy ended.
    """
    published(database, dsn, "range")
    run_sql(dsn, *LOADED, f"SELECT roir.begin_attach('t', 't3', '{BOUNDS}')")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="not all copied into the indexes"):
        run_sql(dsn, "SELECT roir.finish_attach('t', 't3')")
    steps.assert_exact(database)
    assert attach.attach_partition(database, "t", "t3", BOUNDS, "test") == 100
    steps.assert_exact(database)
