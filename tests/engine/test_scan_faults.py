"""Errors that scans by blocks once had: locks of a seal, notes of a TRUNCATE, the size of batches."""

from __future__ import annotations

import threading

import psycopg2.errors
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, build, dry_run, seal
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute, is_transient
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import VerificationFailed
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.test_locks import in_thread, pid_of, watching

pytestmark = pytest.mark.sample(1)

WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND NOT granted)"


def seal_beside(database: Database, dsn: str, run: Run, statement: str, truncate: str) -> list[BaseException]:
    """Seals. Before the seal's `statement` a user truncates, and waits for us. Returns the user's errors."""
    user, watch = steps.session(dsn), watching(dsn)
    user.autocommit = True
    threads: list[tuple[threading.Thread, list[BaseException]]] = []

    def truncates() -> None:
        threads.append(in_thread(lambda: steps.sql(user, truncate)))
        while threads[0][0].is_alive() and not steps.sql(watch, WAITS, pid_of(user))[0][0]:
            pass

    with before(database, statement, truncates):
        try:
            for _ in seal.PHASE.work(database, run, 0):
                pass
        except Exception as error:  # the seal may be the one that gives way
            if not is_transient(error):  # type: ignore[arg-type]
                raise
    (thread, errors), *_ = threads
    thread.join()
    return errors


PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
    "INSERT INTO t SELECT i, i % 7, i FROM generate_series(1, 500) i",
)
PARTITIONED = (
    "CREATE TABLE t (id int PRIMARY KEY, k int, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (200)",
    "INSERT INTO t SELECT i, 1, i FROM generate_series(0, 199) i",
)


def test_a_truncate_and_the_seal_do_not_deadlock_over_segment_and_delta(dsn: str, database: Database) -> None:
    """The seal reads the delta and then locks the segment. TRUNCATE locks the base and then the delta."""
    run_sql(dsn, *PLAIN)
    _, run = steps.begin(database, scan="block", segments=1)
    run_sql(dsn, "UPDATE t SET v = v + 1, k = k + 1 WHERE id < 10")
    steps.build_all(database, run)
    assert seal_beside(database, dsn, run, "DELETE FROM roir_data.", "TRUNCATE t") == []


def test_a_truncate_of_a_leaf_and_the_seal_do_not_deadlock_over_entries(dsn: str, database: Database) -> None:
    """The seal has deleted touched entries and then locks the segment. The user deletes the leaf's entries from it."""
    run_sql(dsn, *PARTITIONED)
    _, run = steps.begin(database, scan="block", segments=1)
    run_sql(dsn, "UPDATE t SET k = 2 WHERE id = 5", "UPDATE t SET k = 1 WHERE id = 5")
    steps.build_all(database, run)
    assert seal_beside(database, dsn, run, "CREATE UNIQUE INDEX g1_s001", "TRUNCATE t0") == []


@pytest.mark.parametrize("scan", ["key", "block"])
def test_a_truncate_and_the_seal_do_not_deadlock_over_segment_and_base(dsn: str, database: Database, scan: str) -> None:
    run_sql(dsn, *PLAIN)
    run = steps.built(database, scan=scan, segments=1)
    assert seal_beside(database, dsn, run, "ALTER INDEX", "TRUNCATE t") == []


@pytest.mark.parametrize("scan", ["key", "block", "index"])
def test_a_truncate_by_a_snapshot_older_than_prepare(dsn: str, database: Database, scan: str) -> None:
    """The snapshot doesn't see the generation. The TRUNCATE may get 40001, but the operation must not fail."""
    run_sql(dsn, *PLAIN)
    if scan == "index":
        steps.finish_all(database, steps.begin(database, include="v")[1])
    old = steps.session(dsn, "REPEATABLE READ")
    steps.sql(old, "SELECT 1 FROM pg_class LIMIT 1")
    definition = {"table": None, "keys": None} if scan == "index" else {"include": "v"}
    _, run = steps.begin(database, scan=scan, ranges=2, batch_rows=1, **definition)
    try:
        steps.sql(old, "TRUNCATE t")
        steps.sql(old, "INSERT INTO t VALUES (1, 1, 1)")
        old.commit()
    except psycopg2.errors.SerializationFailure:
        old.rollback()
    steps.finish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("scan", ["key", "block"])
def test_a_truncate_of_a_leaf_and_the_seal_do_not_deadlock_over_the_bases_index(
    dsn: str, database: Database, scan: str
) -> None:
    """The user's DELETE from the base has locked its index, and waits for the segment, which the seal attaches."""
    run_sql(dsn, *PARTITIONED)
    run = steps.built(database, scan=scan, segments=1)
    assert seal_beside(database, dsn, run, "ALTER INDEX", "TRUNCATE t0") == []


@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("step", ["pause", "give back"])
def test_nobody_waits_for_an_open_truncate_of_a_leaf_to_let_go_of_a_range(
    dsn: str, database: Database, scan: str, step: str
) -> None:
    """The capture's UPDATE holds the row of `scan_range` as long as the user likes. Neither side has a lock_timeout."""
    run_sql(dsn, *PARTITIONED)
    _, run = steps.begin(database, scan=scan, batch_rows=1)
    worker, claim = steps.claimed(database, run)
    user = steps.session(dsn)
    steps.sql(user, "TRUNCATE t0")
    if step == "pause":
        requests.pause(database, "ix", "test", "")
        with worker.connection.begin():
            execute(worker.connection, "SET lock_timeout = '100ms'")  # an endless wait shows as an error
        assert worker.step(claim) == Stop("paused")
    else:
        with database.transaction() as connection:
            execute(connection, "SET lock_timeout = '100ms'")
            build.PHASE.left(connection, run, ())
    worker.connection.close()
    user.commit()


# -- what is chosen


def test_a_rebuild_of_a_wrong_index_mends_it_at_the_second_attempt_at_least(
    dsn: str,
) -> None:
    """The copy's verification has found that the index is wrong: the next rebuild doesn't read it."""
    database = Database(dsn, limits=Limits(small_source_bytes=1 << 20))
    run_sql(
        dsn,
        "CREATE TABLE t (id text PRIMARY KEY, k int, pad text)",
        "INSERT INTO t SELECT md5(i::text), i % 9, repeat('x', 400) FROM generate_series(1, 10000) i",
    )
    steps.make_index(database)
    # Only a comparison can find this.
    run_sql(dsn, "DELETE FROM roir_data.g1 WHERE c1 = 3")
    _, run = steps.begin(database, table=None, keys=None)
    with pytest.raises(VerificationFailed):
        steps.finish_all(database, run)
    abort.abort(database, "ix", "test")
    found = dry_run.run(database, IndexDefinition.parse("ix", "t", "k"), BuildOptions()).choice
    assert found.scan.value != "index", found.why


# -- how much a batch reads

# One row in 1,770 blocks.
BLOATED = (
    "CREATE TABLE t (id int PRIMARY KEY, k int) WITH (autovacuum_enabled = off)",
    "INSERT INTO t SELECT i, i FROM generate_series(1, 400000) i",
    "DELETE FROM t WHERE id < 400000",
    "VACUUM (ANALYZE) t",
)


def test_after_empty_blocks_a_batch_is_not_bigger_than_wanted(dsn: str, database: Database) -> None:
    """A table whose first half was deleted, and whose second half is full."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 200000) i",
        "DELETE FROM t WHERE id <= 100000",
        "VACUUM (ANALYZE) t",
    )
    _, run = steps.begin(database, scan="block", ranges=1, parallelism=1, batch_rows=1000)
    rows = steps.batches(database, run)
    assert sum(rows) == 100_000
    assert max(rows) <= 2_000, rows


def test_the_rate_limit_is_kept_by_blocks(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 2260) i",
        "VACUUM (ANALYZE) t",
    )
    _, run = steps.begin(database, scan="block", ranges=1, parallelism=1, max_rows_per_second=20)
    slept: list[float] = []
    rows = sum(metrics.rows for metrics in build.PHASE.work(database, run, 0, slept.append))
    assert rows == 2260
    assert rows / sum(slept) <= 2 * 20, f"{rows / sum(slept):.0f} rows/s"


@pytest.mark.parametrize("scan", ["key", "block"])
def test_a_batch_of_toasted_rows_keeps_to_its_bytes(dsn: str, scan: str) -> None:
    database = Database(dsn, limits=Limits(batch_bytes=1 << 20))
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v text)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, i, repeat('x', 20000) FROM generate_series(1, 500) i",
        "VACUUM (ANALYZE) t",
    )
    _, run = steps.begin(database, scan=scan, include="v", ranges=1, parallelism=1)
    rows = steps.batches(database, run)
    assert max(rows) * 20_000 <= 8 << 20, rows


def test_a_bloated_table_is_not_read_by_single_blocks(dsn: str, database: Database) -> None:
    """Few rows in many blocks aren't wide rows."""
    run_sql(dsn, *BLOATED)
    _, run = steps.begin(database, scan="block", ranges=1, parallelism=1)
    found = steps.batches(database, run)
    # 1,770 blocks, 14 MB: one batch of 64 MB, or a few until the batch knows how empty they are.
    assert len(found) <= 20, len(found)


def test_a_bloated_table_is_not_read_by_single_rows(dsn: str, database: Database) -> None:
    """By key as well, with statistics that are older than the present rows."""
    run_sql(
        dsn,
        *BLOATED,
        "INSERT INTO t SELECT i, i FROM generate_series(1, 4000) i",
    )
    _, run = steps.begin(database, scan="key", ranges=1, parallelism=1)
    found = steps.batches(database, run)
    assert len(found) <= 20, len(found)
