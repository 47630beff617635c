"""Claims, fencing, pauses, limits, walks in slices and aborts of a verification, and its traces."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg2
import pytest

from airflow_roir.engine import abort, clean_up, drop, lifecycle, revert
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.report import report_of
from airflow_roir.errors import Fenced, OperationRunning, SourceChanged, VerificationFailed
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.interposed import before, changed
from tests.engine.steps import sql
from tests.engine.verifying import begin, build_index, claim, found, go_through

pytestmark = pytest.mark.sample(1)

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, nullif(i % 5, 2)::text, i FROM generate_series(1, 200) i",
)
STAGES = ("total", "sum", "check", "whole")


@pytest.fixture
def base(dsn: str, database: Database) -> str:
    """The base of an index without the entry of row 1."""
    name = build_index(dsn, database, *SETUP, include="v")
    run_sql(dsn, f"DELETE FROM {name} WHERE c2 = 1")
    return name


def _units(dsn: str) -> int:
    return int(sql(steps.session(dsn), "SELECT count(*) FROM roir.verification_unit")[0][0])


def _percent(database: Database) -> float:
    [one] = status(database, "ix")
    assert json.loads(json.dumps(one.as_dict()))["kind"] == "verify"
    return one.percent_complete


@pytest.mark.parametrize("stage", STAGES)
def test_in_every_stage_a_dead_worker_is_fenced_and_a_pause_resumes(
    database: Database, dsn: str, base: str, stage: str
) -> None:
    """A newer run resumes with another parallelism. Nothing counts twice, and the percentage never falls."""
    run = begin(database)
    go_through(database, run, STAGES.index(stage))
    seen = [_percent(database)]
    dead = verifying.worker(database, run)
    held = claim(dead)
    assert held.stage == stage
    requests.pause(database, "ix", "user", "later")
    assert not isinstance(dead.claim(), UnitClaim)
    newer = steps.start_with(database, 4, owner="another")
    with pytest.raises(Fenced):
        dead.unit(held)
    dead.close()
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir.verification_unit WHERE done AND stage = %s", stage) == [
        (0,)
    ]
    workers = [verifying.worker(database, newer, number) for number in range(4)]
    for one in workers:
        if isinstance(mine := one.claim(), UnitClaim):
            one.unit(mine)
            seen.append(_percent(database))
    for one in workers:
        one.close()
    for _ in STAGES[STAGES.index(stage) :]:
        go_through(database, newer)
        seen.append(_percent(database))
    assert seen == sorted(seen)
    assert seen[-1] == 100
    report = report_of(database, newer.operation_id)
    assert (report.rows, report.entries, report.missing, report.complete) == (200, 199, 1, True)
    assert _units(dsn) == 0


def test_whoever_held_the_snapshot_may_leave_at_any_moment(database: Database, dsn: str, base: str) -> None:
    """The snapshot's file is still there, and its process isn't: a session that ends looks like this."""
    run = begin(database, parallelism=2)
    one, other = verifying.worker(database, run, 0), verifying.worker(database, run, 1)
    held, next_one = claim(one), claim(other)
    one.unit(held)
    [(folder,)] = sql(steps.session(dsn), "SHOW data_directory")
    [(name,)] = sql(steps.session(dsn), "SELECT snapshot FROM roir.verification WHERE mode = 'only'")
    file = Path(folder, "pg_snapshots", name)
    said = file.read_bytes()
    holder = one.sums.snapshot._holding
    assert holder is not None
    [(pid,)] = holder.exec_driver_sql("SELECT pg_backend_pid()").all()
    run_sql(dsn, f"SELECT pg_terminate_backend({pid}, 10000)")
    file.write_bytes(said)
    file.chmod(0o644)
    other.unit(next_one)
    file.unlink()
    other.close()


def test_a_snapshot_is_not_another_one_of_the_same_name(database: Database, dsn: str, base: str) -> None:
    """A server that restarted, or took over, reuses names: sums of both snapshots would be taken for those of one."""
    run = begin(database, parallelism=2)
    one, other = verifying.worker(database, run, 0), verifying.worker(database, run, 1)
    held, next_one = claim(one), claim(other)
    one.unit(held)
    one.close()
    [(folder,)] = sql(steps.session(dsn), "SHOW data_directory")
    [(name,)] = sql(steps.session(dsn), "SELECT snapshot FROM roir.verification WHERE mode = 'only'")
    run_sql(dsn, "UPDATE t SET v = v")
    user = steps.session(dsn, "REPEATABLE READ")
    [(new,)] = sql(user, "SELECT pg_export_snapshot()")
    file = Path(folder, "pg_snapshots", name)
    file.write_bytes(Path(folder, "pg_snapshots", new).read_bytes())
    file.chmod(0o644)
    other.unit(next_one)
    file.unlink()
    other.close()
    user.rollback()
    assert sql(user, "SELECT count(DISTINCT snapshot) FROM roir.verification_unit WHERE done") == [(2,)]
    user.close()


@pytest.mark.usefixtures("base")
def test_a_verification_that_comes_second_takes_the_firsts_operation_up(database: Database) -> None:
    """Even if it has found no unfinished one at first."""
    first = []

    def overtake() -> None:
        first.append(record.begin(database, "ix", VerifyOptions(), "somebody else"))

    with before(database, "INSERT INTO roir.operation", overtake):
        second = record.begin(database, "ix", VerifyOptions(), "test")
    assert second.adopted
    assert second.operation_id == first[0].operation_id


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_in_any_stage_leaves_nothing_and_the_index_as_it_was(
    database: Database, dsn: str, base: str, stage: str
) -> None:
    run = begin(database, repair=True)
    go_through(database, run, STAGES.index(stage))
    one = verifying.worker(database, run)
    held = claim(one)
    abort.abort(database, "ix", "user")
    with pytest.raises(Fenced):
        one.unit(held)
    one.close()
    assert _units(dsn) == 0
    repaired = stage == "whole"
    assert len(found(dsn)) == repaired
    assert sql(steps.session(dsn), "SELECT complete FROM roir.verification WHERE mode = 'only'") == [(False,)]
    assert lifecycle.verify(database, "ix").missing == 1 - repaired


@pytest.mark.by_hand("sweeps")
def test_a_walk_in_slices_does_each_unit_once(database: Database, dsn: str, base: str) -> None:
    """Several workers claim in turns. An aborted slice is no part of the walk."""
    rows, entries, missing = 0, 0, 0
    for _ in range(4):
        run = begin(database, slices=4, parallelism=3)
        workers = [verifying.worker(database, run, number) for number in range(3)]
        while held := [(one, mine) for one in workers if isinstance(mine := one.claim(), UnitClaim)]:
            for one, mine in held:
                one.unit(mine)
        comparing.finish(database, run)
        report = report_of(database, run.operation_id)
        assert not report.complete
        rows, entries, missing = rows + report.rows, entries + report.entries, missing + report.missing
    assert (rows, entries, missing) == (200, 199, 1)
    assert _units(dsn) == 0


def test_what_a_walk_left_goes_with_its_generation(database: Database, dsn: str, base: str) -> None:
    lifecycle.verify(database, "ix", VerifyOptions(slices=4))
    assert _units(dsn) > 0
    drop.drop_index(database, "ix", "user")
    assert _units(dsn) == 0


def test_a_time_limit_ends_it_early_and_says_so(database: Database, dsn: str, base: str) -> None:
    run = begin(database, max_seconds=1)
    one = verifying.worker(database, run)
    one.unit(claim(one))
    run_sql(dsn, "UPDATE roir.operation SET phase_seconds = '{\"check\": 2}' WHERE status = 'running'")
    assert not isinstance(one.claim(), UnitClaim)
    comparing.finish(database, run)
    report = report_of(database, run.operation_id)
    assert not report.complete
    assert _units(dsn) == 0


def test_other_operations_and_a_verification_refuse_each_other(database: Database, dsn: str, base: str) -> None:
    run = begin(database)
    with pytest.raises(OperationRunning, match="verifies the index"):
        steps.begin(database, table=None, keys=None)
    with pytest.raises(OperationRunning):
        drop.drop_index(database, "ix", "user")
    with pytest.raises(OperationRunning):
        lifecycle.verify(database, "ix")
    assert clean_up.clean_up(database).waiting == []
    go_through(database, run, 4)
    steps.begin(database, table=None, keys=None)
    with pytest.raises(OperationRunning, match="rebuild"):
        lifecycle.verify(database, "ix")


@pytest.mark.by_hand("sweeps")
def test_a_revert_beside_it_leaves_it_with_the_generation_that_it_began_with(
    database: Database, dsn: str, base: str
) -> None:
    steps.make_index(database, table=None, keys=None, revert_window_s=1000)
    run = begin(database)
    revert.revert(database, "ix", "user")
    go_through(database, run)
    comparing.finish(database, run)
    assert report_of(database, run.operation_id).found == 0
    assert lifecycle.verify(database, "ix").missing == 1


def test_an_altered_source_ends_it(database: Database, dsn: str, base: str) -> None:
    run = begin(database)
    one = verifying.worker(database, run)
    held = claim(one)
    run_sql(dsn, "ALTER TABLE t RENAME v TO w")
    with pytest.raises(SourceChanged):
        one.unit(held)
    one.close()
    with pytest.raises(SourceChanged):
        verifying.worker(database, run)
    abort.abort(database, "ix", "user")
    assert _units(dsn) == 0


@pytest.mark.by_hand("sweeps")
def test_a_build_that_went_wrong_is_not_published(database: Database, dsn: str, base: str) -> None:
    prepared, run = steps.begin(database, table=None, keys=None)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    wrong = physical.base(prepared.generation_id)
    run_sql(dsn, f"UPDATE {wrong} SET c3 = 0 WHERE c2 = 7", f"INSERT INTO {wrong} VALUES ('x', 1000, 1)")
    with pytest.raises(VerificationFailed, match="extra 1, different 1"):
        lifecycle.finalize(database, "ix", "test", take_over=True)
    [paused] = status(database, "ix")
    assert paused.status == "paused"
    assert "nothing was published" in (paused.pause_reason or "")
    active = "SELECT to_regclass('roir_data.g' || id)::text FROM roir.generation WHERE status = 'active'"
    assert sql(steps.session(dsn), active) == [(base,)]
    run_sql(dsn, f"UPDATE {wrong} SET c3 = 7 WHERE c2 = 7", f"DELETE FROM {wrong} WHERE c2 = 1000")
    assert lifecycle.finalize(database, "ix", "test").status == "completed"
    steps.assert_exact(database)


def test_amcheck_looks_at_every_segment_wherever_it_is_installed(database: Database, dsn: str, base: str) -> None:
    try:
        run_sql(dsn, 'CREATE SCHEMA "Some Where"', 'CREATE EXTENSION amcheck SCHEMA "Some Where"')
    except psycopg2.Error as missing:
        pytest.skip(f"this server has no amcheck: {missing}")
    report = lifecycle.verify(database, "ix", VerifyOptions(amcheck=True))
    assert (report.missing, report.corrupt) == (1, 0)
    # An entry that the table has and its B-tree lacks: written while the index was not maintained.
    run_sql(
        dsn,
        f"UPDATE pg_index SET indisready = false, indisvalid = false WHERE indexrelid = '{base}_s001_key'::regclass",
        f"INSERT INTO {base}_s001 SELECT * FROM (SELECT * FROM {base}_s001 LIMIT 1) x",
        f"UPDATE pg_index SET indisready = true, indisvalid = true WHERE indexrelid = '{base}_s001_key'::regclass",
    )
    report = lifecycle.verify(database, "ix", VerifyOptions(amcheck=True))
    assert report.corrupt == 1
    assert not report.is_exact


def test_where_no_snapshot_can_be_shared_each_unit_has_its_own(database: Database, base: str) -> None:
    """The session that holds it may have ended each time. Then totals say nothing, and buckets are compared."""
    with changed(database, "SET TRANSACTION SNAPSHOT '.*'", "SET TRANSACTION SNAPSHOT '00000043-0000019C-1'"):
        report = lifecycle.verify(database, "ix")
    assert (report.found, report.complete) == (1, True)
    run = begin(database)
    go_through(database, run)
    with database.transaction() as connection:
        assert record.stage(connection, record.unfinished(connection, run.operation_id).id) == "sum"
