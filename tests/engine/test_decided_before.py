"""A command reads partitions before it has the lock: another session changes them before the lock, and the command must
not act on what it read.

Seen to fail if it does: entries without rows, or rows without entries, which no message reports.
"""

from __future__ import annotations

import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, sync
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import InvalidInput
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.steps import sql
from tests.engine.test_locks import in_thread, wait_until, watching

N_BOUNDS = "FOR VALUES FROM (50) TO (60)"
ATTACH = f"ALTER TABLE t ATTACH PARTITION n {N_BOUNDS}"
DETACH = "ALTER TABLE t DETACH PARTITION n"
CHANGES = "SELECT name, gone FROM roir.partition_changes(1, 't'::regclass)"


@pytest.fixture
def indexed(database: Database, dsn: str) -> Database:
    """Table `t` with partitions, one of them in two levels, an index, and a table `n` to attach."""
    run_sql(
        dsn,
        "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(4)),
        "CREATE TABLE s PARTITION OF t FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (d)",
        "CREATE TABLE s1 PARTITION OF s FOR VALUES FROM (150) TO (200)",
        "INSERT INTO t SELECT i % 40, i, (i % 7)::text, i FROM generate_series(1, 80) i",
        "INSERT INTO t SELECT 150 + i, i, (i % 7)::text, i FROM generate_series(1, 20) i",
        "CREATE TABLE n (LIKE t INCLUDING ALL)",
        "INSERT INTO n SELECT 50 + i % 10, 500 + i, (i % 7)::text, i FROM generate_series(1, 20) i",
        "ANALYZE t",
    )
    steps.make_index(database, include="v")
    clean_up.clean_up(database)
    return database


@pytest.mark.sample(0)
def test_a_copy_beside_a_cancel_whose_entries_a_clean_up_has_removed(indexed: Database, dsn: str) -> None:
    """The copy has seen that the table joins, and hasn't locked it yet."""

    def cancel() -> None:
        run_sql(dsn, "SELECT roir.cancel_attach('n')")
        clean_up.clean_up(Database(dsn, "other"))
        assert sql(steps.session(dsn), "SELECT FROM roir.source_partition WHERE status <> 'present'") == []

    with before(indexed, "LOCK TABLE ONLY public.n", cancel), pytest.raises(InvalidInput, match="any more"):
        attach.attach_partition(indexed, "t", "n", N_BOUNDS, "test")
    steps.assert_exact(indexed)


@pytest.mark.sample(0)
@pytest.mark.parametrize("how", ["clean-up", "sync"])
def test_a_leaf_that_is_attached_again_with_rows_before_it_is_registered(indexed: Database, dsn: str, how: str) -> None:
    """The leaf was empty at the command's look."""
    run_sql(dsn, f"CREATE TABLE came PARTITION OF t {N_BOUNDS}")

    def load() -> None:
        run_sql(
            dsn,
            "ALTER TABLE t DETACH PARTITION came",
            "INSERT INTO came TABLE n",
            f"ALTER TABLE t ATTACH PARTITION came {N_BOUNDS}",
        )

    with before(indexed, "SELECT roir.adopt_partitions", load):
        if how == "sync":
            assert sync.sync_partitions(indexed, "t", "test").entries_added == 20
        else:
            clean_up.clean_up(indexed)
            [told] = clean_up.clean_up(indexed).waiting
            assert "public.came was attached to public.t with rows, without roir" in told
            sync.sync_partitions(indexed, "t", "test")
    steps.assert_exact(indexed)


@pytest.mark.sample(0)
@pytest.mark.parametrize("at", ['LOCK TABLE ONLY "public"."t" IN ROW EXCL', "UPDATE roir.source_partition SET status"])
def test_a_partition_that_is_detached_while_a_sync_copies_its_rows(indexed: Database, dsn: str, at: str) -> None:
    """Before a batch's first lock, and before the last step's lock: the detach waits for neither."""
    run_sql(dsn, ATTACH)
    detached = []
    with before(indexed, at, lambda: detached.append(run_sql(dsn, "SET lock_timeout = '5s'", DETACH))):
        sync.sync_partitions(indexed, "t", "test")
    assert detached
    sync.sync_partitions(indexed, "t", "test")
    clean_up.clean_up(indexed)
    assert sql(steps.session(dsn), CHANGES) == []
    steps.assert_exact(indexed)


@pytest.mark.sample(0)
def test_a_sync_that_was_killed_begins_anew_with_a_partition_that_was_out_since(indexed: Database, dsn: str) -> None:
    """Found: a `roir sync-partitions` that was killed continued behind its watermark with a partition that was
    detached, changed and attached since: changed rows stayed without entries. It holds: the partition is copied from
    its first row on.
    """
    run_sql(dsn, ATTACH)
    small = Database(dsn, "killed", limits=Limits(attach_rows=5))

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), before(small, "SELECT watermark FROM roir.source_partition", die, at=5):
        sync.sync_partitions(small, "t", "test")
    run_sql(dsn, DETACH, "UPDATE n SET v = 0, k = 'new'", ATTACH)
    sync.sync_partitions(indexed, "t", "test")
    steps.assert_exact(indexed)


@pytest.mark.sample(0)
def test_a_partition_that_has_left_a_level_for_another_place_stays_when_that_level_goes(
    indexed: Database, dsn: str
) -> None:
    """Its former entries are still to be removed."""
    run_sql(dsn, "SELECT roir.detach_partition('s1')", "UPDATE s1 SET d = d + 150")
    attach.attach_partition(indexed, "t", "s1", "FOR VALUES FROM (300) TO (400)", "test")
    run_sql(dsn, "SELECT roir.detach_partition('s')")
    assert sql(steps.session(dsn), CHANGES) == []
    run_sql(dsn, "DROP TABLE s1")
    assert sql(steps.session(dsn), CHANGES) == [("public.s1", True)]
    assert sync.sync_partitions(indexed, "t", "test").entries_removed == 40
    steps.assert_exact(indexed)


@pytest.mark.sample(0)
def test_an_attach_that_begins_again_beside_the_removal_of_its_first_copies_goes_on_being_noted(
    indexed: Database, dsn: str
) -> None:
    """The removal has seen that nothing joins, and waits for the default partition, which has the noting trigger."""
    run_sql(dsn, "CREATE TABLE rest PARTITION OF t DEFAULT", f"SELECT roir.begin_attach('t', 'n', '{N_BOUNDS}')")
    # The disturbed attach begins again: the copied entries leave.
    run_sql(dsn, "INSERT INTO t VALUES (55, 1, 'x', 1)", "DELETE FROM t WHERE id = 1 AND d = 55")
    run_sql(dsn, "SELECT roir.finish_attach('t', 'n')")
    assert sql(steps.session(dsn), "SELECT status FROM roir.source_partition WHERE name = 'public.n'") == [("leaving",)]
    attach_again = steps.session(dsn)
    watch = watching(dsn)
    threads = []

    def begin() -> None:
        sql(attach_again, f"SELECT roir.begin_attach('t', 'n', '{N_BOUNDS}')")
        threads.append(in_thread(commit))

    def commit() -> None:
        wait_until(watch, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 'rest'::regclass")
        attach_again.commit()

    with before(indexed, "SELECT roir.stop_noting", begin):
        clean_up.clean_up(indexed)
    for thread, failed in threads:
        thread.join()
        assert failed == []

    notes = "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'rest'::regclass AND tgname ~ '^roir_joining_'"
    assert sql(steps.session(dsn), notes) == [(1,)]
