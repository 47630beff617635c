"""Claims, fences, pauses and runs: what one worker or run may do while another holds the operation."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, build, fold, lifecycle, prepare, publish, seal, switch
from airflow_roir.engine.build import Claim
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.compact.worker import finish as finish_compaction
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import end_run, settle, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import (
    Fenced,
    IllegalTransition,
    InvariantViolated,
    OperationFailed,
    OperationPaused,
    OperationRunning,
    SourceChanged,
)
from airflow_roir.operation import OF_A_BUILD
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.interposed import before

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 1000)


def test_two_workers_hold_different_ranges(database: Database) -> None:
    _, run = steps.begin(database, ranges=4)
    first, second = (steps.worker(database, run, number) for number in range(2))
    assert steps.claim_of(first).ordinal != steps.claim_of(second).ordinal


def test_a_second_try_of_a_worker_gets_its_range_back_and_fences_the_first(database: Database) -> None:
    """Spark speculates, or lost an executor: the zombie's batch changes nothing (I4)."""
    _, run = steps.begin(database, ranges=4, batch_rows=50)
    zombie, retry = steps.worker(database, run, 0), steps.worker(database, run, 0)
    claim = steps.claim_of(zombie)
    batch = zombie.step(claim)
    assert isinstance(batch, Step)
    assert batch.rest is not None
    again = steps.claim_of(retry)
    assert (again.id, again.scan.watermark) == (claim.id, batch.rest.scan.watermark)
    with pytest.raises(Fenced):
        zombie.step(batch.rest)
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_new_run_fences_every_older_worker_at_its_next_commit(database: Database) -> None:
    _, run = steps.begin(database, batch_rows=50)
    zombie = steps.worker(database, run)
    claim = steps.claim_of(zombie)
    newer = start_run(database, "ix", "other", take_over=True)
    with pytest.raises(Fenced, match="other"):
        zombie.step(claim)
    with pytest.raises(Fenced):
        zombie.claim()
    with pytest.raises(Fenced):
        build.finish(database, run)
    steps.finish_all(database, newer)
    steps.assert_exact(database)


def test_pause_takes_effect_at_the_next_batch_and_keeps_what_is_committed(database: Database) -> None:
    prepared, run = steps.begin(database, batch_rows=100, ranges=2)
    worker = steps.worker(database, run)
    batch = worker.step(steps.claim_of(worker))
    assert isinstance(batch, Step)
    assert batch.rest is not None
    requests.pause(database, "ix", "me", "lunch")
    before = operation_status(database, prepared.operation_id)
    assert (before.status, before.rows, before.pause_reason, before.paused_by) == ("paused", 100, "lunch", "me")
    assert worker.step(batch.rest) == Stop("paused")
    assert worker.claim() == Stop("paused")
    requests.change_options(database, "ix", actor="me", parallelism=5, batch_rows=7000)
    resumed = start_run(database, "ix", "test")
    after = operation_status(database, prepared.operation_id)
    assert (after.status, after.rows, after.options["parallelism"], after.options["batch_rows"]) == (
        "running",
        100,
        5,
        7000,
    )
    again = steps.worker(database, resumed)
    assert steps.claim_of(again).scan.watermark == batch.rest.scan.watermark
    again.connection.close()
    steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    steps.assert_exact(database)


def test_a_rate_limit_that_changes_is_followed_while_the_worker_waits(database: Database) -> None:
    _, run = steps.begin(database, parallelism=1, ranges=1, max_rows_per_second=100)
    slept: list[float] = []

    def wait(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            requests.change_options(database, "ix", actor="me", max_rows_per_second=0)

    assert sum(done.rows for done in build.PHASE.work(database, run, 0, wait)) == 1000
    # Ten seconds' worth of rows at the old rate: after the change no worker waits.
    assert len(slept) == 3


def test_a_worker_above_a_lowered_parallelism_leaves_its_range_to_others(database: Database) -> None:
    _, run = steps.begin(database, batch_rows=50, ranges=1)
    worker = steps.worker(database, run, 1)
    batch = worker.step(steps.claim_of(worker))
    assert isinstance(batch, Step)
    assert batch.rest is not None
    requests.change_options(database, "ix", actor="me", parallelism=1)
    assert worker.step(batch.rest) == Stop("leave")
    assert steps.claim_of(steps.worker(database, run, 0)).scan.watermark == batch.rest.scan.watermark


def test_ranges_of_a_worker_that_vanished_are_claimed_again(database: Database) -> None:
    _, run = steps.begin(database, ranges=2)
    steps.claim_of(steps.worker(database, run, 1))
    for _ in build.PHASE.work(database, run, 0):
        pass
    with pytest.raises(InvariantViolated, match="1 ranges"):
        build.finish(database, run)
    with database.transaction() as connection:
        assert build.PHASE.left(connection, run, busy=[1]).free == 0
        assert build.PHASE.left(connection, run, busy=[0]).free == 1
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_second_run_is_refused_while_the_first_ones_heart_beats(database: Database) -> None:
    _, run = steps.begin(database)
    with pytest.raises(OperationRunning, match="driven by test"):
        start_run(database, "ix", "second")
    with pytest.raises(OperationRunning, match="driven by test"):
        steps.prepare.prepare(database, steps.IndexDefinition.parse("ix"), steps.BuildOptions())
    end_run(database, run)
    assert start_run(database, "ix", "second").epoch > run.epoch


def test_an_unfinished_operation_is_adopted_from_its_watermarks(database: Database) -> None:
    prepared, run = steps.begin(database, batch_rows=100, ranges=2)
    worker = steps.worker(database, run)
    worker.step(steps.claim_of(worker))
    end_run(database, run)
    again = prepare.prepare(database, steps.IndexDefinition.parse("ix", "t", "k"), steps.BuildOptions(parallelism=3))
    assert again.adopted
    assert again.operation_id == prepared.operation_id
    found = operation_status(database, prepared.operation_id)
    assert (found.rows, found.options["parallelism"]) == (100, 3)


# After such a change a batch may not even parse.
@pytest.mark.parametrize("change", ["RENAME COLUMN k TO q", "DROP COLUMN k CASCADE"])
def test_an_altered_source_stops_the_build_and_nothing_is_copied(database: Database, dsn: str, change: str) -> None:
    prepared, run = steps.begin(database, batch_rows=100, ranges=2)
    worker = steps.worker(database, run)
    batch = worker.step(steps.claim_of(worker))
    assert isinstance(batch, Step)
    assert batch.rest is not None
    run_sql(dsn, f"ALTER TABLE t {change}")
    with pytest.raises(SourceChanged, match="altered"):
        worker.step(batch.rest)
    with pytest.raises(SourceChanged):
        steps.worker(database, run)
    assert operation_status(database, prepared.operation_id).rows == 100


def test_a_disabled_capture_trigger_counts_as_an_altered_source(database: Database, dsn: str) -> None:
    _, run = steps.begin(database)
    run_sql(dsn, f"ALTER TABLE t DISABLE TRIGGER {steps.capture_triggers(dsn)[0]}")
    with pytest.raises(SourceChanged):
        steps.build_all(database, run)


def test_nothing_to_pause_or_abort_is_said(database: Database) -> None:
    steps.make_index(database)
    with pytest.raises(IllegalTransition, match="completed"):
        requests.pause(database, "ix", "me")
    with pytest.raises(IllegalTransition, match="completed"):
        abort.abort(database, "ix", "me")
    with pytest.raises(IllegalTransition, match="completed"):
        start_run(database, "ix", "me")


def test_progress_never_goes_backwards(database: Database) -> None:
    prepared, run = steps.begin(database, batch_rows=90, ranges=3, segments=4)
    seen = [0.0]
    worker = steps.worker(database, run)
    while isinstance(claim := worker.claim(), Claim):
        held: Claim | None = claim
        while held is not None:
            batch = worker.step(held)
            assert isinstance(batch, Step)
            held = batch.rest
            seen.append(operation_status(database, prepared.operation_id).percent_complete)
    build.finish(database, run)
    for _ in seal.PHASE.work(database, run, 0):
        seen.append(operation_status(database, prepared.operation_id).percent_complete)
    seal.finish(database, run)
    steps.fold_all(database, run)
    seen.append(operation_status(database, prepared.operation_id).percent_complete)
    steps.publish_all(database, run)
    seen.append(operation_status(database, prepared.operation_id).percent_complete)
    assert seen == sorted(seen)
    assert seen[-1] == 100


def test_what_an_older_run_pauses_for_is_not_kept_by_the_run_that_takes_over(database: Database) -> None:
    """Say the older run's terminal is gone. It learns that between the user's resume and the new run's start."""
    _, older = steps.begin(database)
    settle(database, older, OSError("nobody listens"), fatal=False)
    # A new run whose Spark is starting isn't affected either.
    assert not operations.has_paused(database, older.operation_id, "newer")
    assert operations.has_paused(database, older.operation_id, older.owner)
    newer = start_run(database, "ix", "newer", take_over=True, lift_pause=False)
    requests.pause(database, "ix", "somebody")
    assert operations.has_paused(database, newer.operation_id, "newest")
    with pytest.raises(OperationPaused, match="somebody"):
        start_run(database, "ix", "newest", take_over=True, lift_pause=False)
    assert newer.epoch > older.epoch


def test_a_fold_and_a_publish_of_an_operation_that_has_failed_say_why(database: Database) -> None:
    run = steps.sealed(database)
    settle(database, run, SourceChanged("the table was altered"), fatal=True)
    for step in (switch.switch, fold.fold_here, publish.publish):
        with pytest.raises(OperationFailed, match="the table was altered"):
            step(database, run)


# The number of times that a run of that kind ends a phase, the last one included.
PHASES_ENDED = [("build", len(OF_A_BUILD)), ("verify", 1), ("compact", 1)]


@pytest.mark.parametrize(("kind", "end"), [(kind, 1 + end) for kind, ends in PHASES_ENDED for end in range(ends)])
def test_a_pause_at_the_end_of_a_phase_is_a_pause(database: Database, dsn: str, kind: str, end: int) -> None:
    """The pause comes between the look at the operation and the end of its phase: nothing fails, and it continues."""
    if kind != "build":
        steps.make_index(database)

    def drive() -> None:
        if kind == "build":
            steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
        elif kind == "verify":
            lifecycle.verify(database, "ix")
        else:
            run = start_run(database, "ix", "test", take_over=True)
            list(compacting.stages(database, run))
            finish_compaction(database, run)

    if kind == "build":
        steps.begin(database)
    elif kind == "compact":
        compacting.begin(database, compacting.act("rewrite", 1))

    def pause() -> None:
        requests.pause(Database(dsn, "another"), "ix", "test", "a look")

    with before(database, "SELECT roir.tick", pause, end), pytest.raises(OperationPaused, match="a look"):
        drive()
    now = operations.find_operation(database, "ix")
    assert (now.status, now.error) == ("paused", None)
    requests.resume(database, "ix", "test")
    drive()
    assert operations.find_operation(database, "ix").status == "completed"
    steps.assert_exact(database)


def test_a_publish_whose_generation_an_abort_drops_says_so(database: Database, dsn: str) -> None:
    """The publish is fenced, and doesn't report a change of the table."""
    run = steps.switched(database)
    other = Database(dsn, "another")
    steps.fold_delta(database, run)
    with (
        before(database, "SET LOCAL lock_timeout", lambda: abort.abort(other, "ix", "test")),
        pytest.raises(Fenced),
    ):
        publish.publish(database, run)
