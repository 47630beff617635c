"""Mistakes of the best, each by its name in their project: docs/regressions.md lists them all."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, build, clean_up, publish, switch
from airflow_roir.engine.build import Claim
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import Run, settle, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, InvariantViolated, LockNotAcquired, SourceChanged
from airflow_roir.operation import Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

ROWS = 100
KEYS_OF_ONE_SCAN = {"a": "k", "b": "v", "c": "v, k"}


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, ROWS)


def copied(dsn: str, operation_id: int) -> int:
    """The rows that all committed batches of an operation have copied."""
    return int(
        sql(steps.session(dsn), "SELECT sum(rows) FROM roir.scan_range WHERE operation_id = %s", operation_id)[0][0]
    )


def one_batch(database: Database, run: Run) -> bool:
    """A worker of its own claims a range and copies one batch. False if no range is left."""
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        if not isinstance(claim, Claim):
            return False
        assert isinstance(worker.step(claim), Step)
    return True


def run_per_batch(database: Database, dsn: str, table: str = "t", **options: int) -> None:
    """Copies each batch by a run of its own, and checks that every row is copied once."""
    prepared, run = steps.begin(database, table=table, **options)
    while one_batch(database, run):
        run = start_run(database, "ix", "the next", take_over=True)
    assert copied(dsn, prepared.operation_id) == sql(steps.session(dsn), f"SELECT count(*) FROM {table}")[0][0]
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_cockroach_75658_delete_then_reinsert_while_building(database: Database, dsn: str) -> None:
    """There the merge erased the live row."""
    _, run = steps.begin(database, include="v")
    user = steps.session(dsn)
    for where in ("id <= 10", "id > 90"):
        sql(user, f"DELETE FROM t WHERE {where}")
        user.commit()
    steps.build_all(database, run)
    sql(user, "INSERT INTO t SELECT i, (i % 5)::text, 7 FROM generate_series(1, 5) i")
    sql(user, "DELETE FROM t WHERE id = 50")
    sql(user, "INSERT INTO t VALUES (50, '0', -50)")
    user.commit()
    steps.seal_all(database, run)
    folded = steps.fold_all(database, run)
    assert folded.upserted == 6
    assert folded.ghosts == 15, "deleted before they were scanned: antimatter without a base entry"
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_cockroach_pr_76959_pairs_of_delete_and_put_that_seem_equal(database: Database, dsn: str) -> None:
    """There their cancellation left stale entries. Here equal values that differ are one entry, with the last image."""
    run_sql(
        dsn,
        "CREATE TABLE n (id int PRIMARY KEY, k numeric)",
        "INSERT INTO n SELECT i, 1.0 FROM generate_series(1, 9) i",
    )
    _, run = steps.begin(database, table="n", include=None)
    user = steps.session(dsn)
    writes = (
        "UPDATE n SET k = 2 WHERE id < 4", "UPDATE n SET k = 1.00 WHERE id < 3", "DELETE FROM n WHERE id = 1",
        "INSERT INTO n VALUES (1, 1.000)", "UPDATE n SET k = 1 WHERE id = 9", "UPDATE n SET k = 1.0 WHERE id = 9",
    )  # fmt: skip
    for write in writes:
        sql(user, write)
        user.commit()
    steps.build_all(database, run)
    for write in writes:
        sql(user, write)
        user.commit()
    steps.seal_all(database, run)
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_cockroach_18533_yugabyte_7376_writer_in_flight_at_the_start(database: Database, dsn: str) -> None:
    """There a writer that began before the capture was missed. Here prepare waits for the writer, and names it."""
    user = steps.session(dsn)
    sql(user, "DELETE FROM t WHERE id = 1")
    reported: list[str] = []
    with pytest.raises(LockNotAcquired, match=r"pid \d+"):
        steps.prepare.prepare(
            database,
            steps.IndexDefinition.parse("ix", "t", "k"),
            steps.BuildOptions(lock_timeout_ms=50, lock_patience_s=0),
            "test",
            reported.append,
        )
    assert reported
    assert "idle in transaction" in next(line for line in reported if not line.startswith("expected"))
    user.commit()
    steps.make_index(database)
    steps.assert_exact(database)


def test_yugabyte_25250_row_deleted_between_read_and_write(database: Database, dsn: str) -> None:
    """A batch copies a row whose deletion commits before the batch. There it came back to life; here touched wins."""
    _, run = steps.begin(database)
    worker, claim = steps.claimed(database, run)
    user = steps.session(dsn)
    with worker.connection.begin():
        rows = steps.half_a_batch(worker, claim)
        assert rows > 0
        sql(user, "DELETE FROM t WHERE id = 1")
        user.commit()
    run_sql(dsn, "DELETE FROM roir_data.g1")  # the batch's watermark wasn't written, so remove its rows
    worker.step(claim)
    sql(user, "INSERT INTO t VALUES (1, 'again', 1)")
    sql(user, "DELETE FROM t WHERE id = 2")
    user.commit()
    worker.connection.close()
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_tidb_49233_57670_resume_after_a_lost_answer(database: Database) -> None:
    """A batch was committed and its answer lost. There the next try copied it again and found false duplicates."""
    _, run = steps.begin(database, batch_rows=10)
    worker, claim = steps.claimed(database, run)
    worker.step(claim)
    with pytest.raises(Fenced):
        worker.step(claim)  # as if the worker hadn't got the answer
    worker.connection.close()
    run = start_run(database, "ix", "the next", take_over=True)
    steps.finish_all(database, run)  # the unique indexes are built
    steps.assert_exact(database)


def test_tidb_69776_cockroach_159930_incomplete_index_is_not_published(database: Database, dsn: str) -> None:
    """There a worker's error was dropped, or a resume saw a part of the rows, and an incomplete index was published."""
    _, run = steps.begin(database, batch_rows=10, ranges=4)
    assert one_batch(database, run)
    with pytest.raises(InvariantViolated, match="ranges are not done"):
        build.finish(database, run)
    run_sql(dsn, "SET session_replication_role = replica", "UPDATE roir.operation SET phase = 'publish'")
    with pytest.raises(InvariantViolated, match="unfinished"):
        publish.publish(database, run)
    assert sql(steps.session(dsn), "SELECT to_regclass('ix')") == [(None,)]


@pytest.mark.parametrize("batch_rows", [1, 7, ROWS, ROWS + 1])
def test_tidb_pr_55506_watermark_is_what_was_done_not_what_comes_next(
    database: Database, dsn: str, batch_rows: int
) -> None:
    """One row more or less at any boundary would show."""
    run_sql(dsn, f"DELETE FROM t WHERE id > {ROWS} - 60 AND id % 2 = 0")
    run_per_batch(database, dsn, batch_rows=batch_rows, ranges=3)


def test_tidb_47981_39308_56733_worker_cut_off_comes_back(database: Database, dsn: str) -> None:
    """There rows were missing or too many. Here the worker that comes back changes nothing."""
    prepared, run = steps.begin(database, batch_rows=10, ranges=2)
    cut_off, claim = steps.claimed(database, run)
    later = start_run(database, "ix", "the next", take_over=True)
    assert one_batch(database, later)
    with pytest.raises(Fenced):
        cut_off.step(claim)
    steps.build_all(database, later)
    with pytest.raises(Fenced):
        cut_off.step(claim)
    cut_off.connection.close()
    assert copied(dsn, prepared.operation_id) == ROWS
    steps.finish_all(database, later)
    steps.assert_exact(database)


def test_spirit_151_row_above_the_watermark_was_copied_then_deleted(database: Database, dsn: str) -> None:
    """There a phantom stayed after the resume. Here a batch's rows and its watermark commit together."""
    _, run = steps.begin(database, batch_rows=10)
    worker, claim = steps.claimed(database, run)
    with worker.connection.begin() as transaction:
        assert steps.half_a_batch(worker, claim) > 0
        transaction.rollback()  # the worker is killed before it writes the watermark
    worker.connection.close()
    run_sql(dsn, "DELETE FROM t WHERE id < 20")
    steps.finish_all(database, start_run(database, "ix", "the next", take_over=True))
    steps.assert_exact(database)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytea", "decode(repeat(to_hex(i + 128), 3) || '00', 'hex')"),
        ('text COLLATE "C"', "chr(i + 127) || E'\\\\\\'\"\\n' || chr(128512 + i)"),
        ("float8", "CASE i % 3 WHEN 0 THEN 'NaN' WHEN 1 THEN i / 3.0 ELSE -i * 1e300 END::float8 + i / 7.0"),
    ],
)
def test_spirit_binary_keys_round_trip_through_the_checkpoint(
    database: Database, dsn: str, name: str, value: str
) -> None:
    run_sql(
        dsn,
        f"CREATE TABLE b (id {name} PRIMARY KEY, k int)",
        f"INSERT INTO b SELECT {value}, i % 3 FROM generate_series(1, 60) i ON CONFLICT DO NOTHING",
        "ANALYZE b",
    )
    run_per_batch(database, dsn, "b", batch_rows=3)


def test_cockroach_140358_second_pause_loses_nothing(database: Database, dsn: str) -> None:
    prepared, run = steps.begin(database, batch_rows=10, ranges=2)
    seen = 0
    for _ in range(4):
        assert one_batch(database, run)
        requests.pause(database, "ix", "test", "again")
        assert copied(dsn, prepared.operation_id) == seen + 10
        seen += 10
        run = start_run(database, "ix", "test", take_over=True)
    steps.finish_all(database, run)
    assert copied(dsn, prepared.operation_id) == ROWS, "nothing was copied twice"
    steps.assert_exact(database)


def test_cockroach_pr_141714_failed_checkpoint_fails_its_batch(database: Database, dsn: str) -> None:
    """There it silently ended all checkpoints. Here the batch's rows are rolled back with it."""
    _, run = steps.begin(database, batch_rows=10)
    run_sql(dsn, "ALTER TABLE roir.scan_range ADD CONSTRAINT no_room CHECK (watermark IS NULL)")
    with pytest.raises(Exception, match="violates check constraint"):
        one_batch(database, run)
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir_data.g1") == [(0,)]
    run_sql(dsn, "ALTER TABLE roir.scan_range DROP CONSTRAINT no_room")
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_gh_ost_444_connection_error_is_not_the_end_of_the_copy(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, batch_rows=10)
    worker, claim = steps.claimed(database, run)
    with worker.connection.begin():
        pid = execute(worker.connection, "SELECT pg_backend_pid()").scalar_one()
    run_sql(dsn, f"SELECT pg_terminate_backend({pid}, 5000)")
    with pytest.raises(Exception, match=r"terminat|closed|connection"):
        worker.step(claim)
    with pytest.raises(InvariantViolated, match="not done"):
        build.finish(database, run)
    steps.finish_all(database, start_run(database, "ix", "the next", take_over=True))
    steps.assert_exact(database)


def test_spirit_pr_156_last_rows_before_the_cut_over(database: Database, dsn: str) -> None:
    """They were lost there. Here publish waits for the writer, and folds the writer's rows."""
    _, run = steps.begin(database, include="v", lock_timeout_ms=50, lock_patience_s=0)
    run_sql(dsn, "UPDATE t SET k = 'before'")
    steps.switch_all(database, run)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET k = 'last', v = 0 WHERE id = 1; INSERT INTO t VALUES (1000, 'last', 0)")
    steps.fold_delta(database, run)
    with pytest.raises(LockNotAcquired):
        publish.publish(database, run)
    user.commit()
    publish.publish(database, run)
    steps.assert_exact(database)


def test_pg_repack_399_postgresql_14_vacuum_and_hot_updates_beside_the_build(database: Database, dsn: str) -> None:
    """There VACUUM raced the swap, and concurrent builds missed rows that were updated in place."""
    run_sql(dsn, "ALTER TABLE t SET (fillfactor = 50)", "VACUUM FULL t")
    _, run = steps.begin(database, include="v", batch_rows=10, ranges=3)
    while True:
        run_sql(dsn, "UPDATE t SET v = v + 1 WHERE id % 7 = 0", "VACUUM t")
        if not one_batch(database, run):
            break
    steps.build_all(database, run)
    run_sql(dsn, "UPDATE t SET v = v + 1 WHERE id % 3 = 0", "VACUUM (FREEZE) t", "VACUUM roir_data.g1_delta")
    steps.seal_all(database, run)
    switch.switch(database, run)
    run_sql(dsn, "UPDATE t SET v = v + 1 WHERE id % 2 = 0", "VACUUM t", "VACUUM (FREEZE) roir_data.g1")
    steps.fold_all(database, run)
    run_sql(dsn, "UPDATE t SET v = v + 1", "VACUUM (FREEZE) roir_data.g1")
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_sp_blitzindex_3620_paused_work_is_never_aborted(database: Database, dsn: str) -> None:
    """There it was aborted after a day, without a warning. Here a pause lasts."""
    _, run = steps.begin(database, batch_rows=10)
    assert one_batch(database, run)
    requests.pause(database, "ix", "test", "for long")
    run_sql(dsn, "UPDATE roir.operation SET paused_at = paused_at - interval '400 days', heartbeat_at = NULL")
    clean_up.clean_up(database)
    assert operations.find_operation(database, "ix").status == Status.PAUSED
    steps.finish_all(database, start_run(database, "ix", "at last"))
    steps.assert_exact(database)


def test_tidb_51746_one_of_several_of_one_scan_fails_and_the_others_are_whole(database: Database, dsn: str) -> None:
    """There one of the indexes that one job added was left half built."""
    runs = {name: steps.begin(database, name, keys=keys, batch_rows=10)[1] for name, keys in KEYS_OF_ONE_SCAN.items()}
    worker, claim = steps.claimed(database, runs["a"])
    # In the middle of a batch for all three.
    with before(database, "WITH rows AS", lambda: settle(database, runs["b"], SourceChanged("a fault"), fatal=True)):
        assert isinstance(worker.step(claim), Step)
    worker.connection.close()
    assert operations.find_operation(database, "b").status == Status.FAILED
    for name in ("a", "c"):
        steps.finish_all(database, start_run(database, name, "the next", take_over=True))
        steps.assert_exact(database, name)
    abort.abort(database, "b", "test")
    steps.make_index(database, "b", keys="v")
    for name in KEYS_OF_ONE_SCAN:
        steps.assert_exact(database, name)
