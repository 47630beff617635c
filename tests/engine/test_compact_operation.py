"""A compaction is an operation as any other: its window, its place in the queue, a pause that lasts, its metrics."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.compact import compaction, worker
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.control import admission, long_pause, requests
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.metrics.reading import metrics
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.errors import InvalidInput, OperationPaused, OperationQueued
from airflow_roir.operation import BY_WINDOW
from airflow_roir.options import CompactOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)
LEFT_OVER = "SELECT relname FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace AND relname ~ '_u[0-9]+'"


@pytest.fixture(autouse=True)
def index(dsn: str, database: Database) -> None:
    steps.make_table(dsn, 3000)
    steps.make_index(database, include="v", ranges=2, segments=2)


def begun(database: Database, **options: Any) -> int:
    """Begins a rewrite of each segment, whether or not it is worthwhile."""
    with database.transaction() as connection:
        found = compaction.execute(
            connection, "SELECT ordinal FROM roir.segment WHERE ordinal > 0 ORDER BY 1"
        ).scalars()
        actions = [
            Action(Kind.REWRITE, (one,), 1, 1 << 20, 1 << 20, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked")
            for one in found
        ]
    return compaction.begin(database, "ix", actions, CompactOptions(**options), "test").operation_id


def samples(database: Database) -> dict[str, float]:
    """The metrics of the index or its compaction."""
    found, why = metrics(database)
    assert why is None
    return {
        f"{sample.name}{sample.labels.get('state', '')}": sample.value
        for metric in found
        for sample in metric.samples
        if sample.labels.get("kind", "compact") == "compact" and not sample.labels.get("phase")
    }


def test_outside_of_its_window_it_waits(database: Database) -> None:
    operation = begun(database, windows="0 0 29 2 * for 1m in UTC")
    with pytest.raises(OperationPaused, match="window"):
        start_run(database, "ix", "test")
    assert operation_status(database, operation).paused_by == BY_WINDOW
    requests.change_options(database, "ix", actor="me", windows="off")
    run = start_run(database, "ix", "test")
    assert [one.done for one in worker.PHASE.work(database, run, 0)].count(True) == 2
    worker.finish(database, run)
    assert operation_status(database, operation).status == "completed"


def test_it_takes_a_place_in_the_queue(dsn: str, database: Database) -> None:
    """Found: compactions weren't queued: any number ran at once. It holds: as many as all operations may."""
    begun(database)
    run_sql(dsn, "CREATE TABLE other (id int PRIMARY KEY, k int)")
    admission.set_most(database, 1)
    _, run = steps.begin(database, "iy", "other", "k")
    with pytest.raises(OperationQueued, match="1 running"):
        start_run(database, "ix", "test")
    assert [(one.kind, one.phase) for one in admission.queue(database).waiting] == [("compact", "compact")]
    end_run(database, run)
    assert start_run(database, "ix", "test")


def test_a_pause_that_lasts_is_warned_of_and_ends_it(dsn: str, database: Database) -> None:
    operation = begun(database, warn_after_s=3600, abort_after_s=7200)
    run = start_run(database, "ix", "test")
    step = steps.step_by_step(database, run, worker.PHASE)
    for _ in range(3):
        next(step)
    requests.pause(database, "ix", "somebody", "lunch")
    assert list(step) == []
    end_run(database, run)
    assert sql(session(dsn), LEFT_OVER) != []
    for hours, ended in ((1.5, False), (1, True)):
        for table, column in (("operation", "paused_at"), ("event", "at")):
            run_sql(dsn, f"UPDATE roir.{table} SET {column} = {column} - interval '{hours} hours'")
        told: list[long_pause.LongPause] = []
        abort.settle_pauses(database, "clean-up", tell=told.append)
        assert [one.aborted for one in told] == [ended]
    assert operation_status(database, operation).status == "aborted"
    assert sql(session(dsn), LEFT_OVER) == []
    steps.assert_exact(database)


def test_a_build_s_options_are_refused_and_its_own_change(database: Database) -> None:
    begun(database)
    for wrong in ({"batch_rows": 5000}, {"max_rows_per_second": 5000}):
        with pytest.raises(InvalidInput, match="a compaction has no such option"):
            requests.change_options(database, "ix", actor="me", **wrong)
    changed = requests.change_options(
        database, "ix", actor="me", parallelism=5, priority=7, throttle="commit_latency=20ms"
    )
    assert (changed.parallelism, changed.priority, set(changed.throttle)) == (5, 7, {"commit_latency"})


@pytest.mark.by_hand("sweeps")
def test_metrics_and_status_count_what_is_swapped_in(database: Database) -> None:
    assert "roir_index_compaction_age_seconds" not in samples(database)
    operation = begun(database)
    run = start_run(database, "ix", "test")
    seen = [0.0]
    for _ in steps.step_by_step(database, run, worker.PHASE):
        now = samples(database)
        seen.append(now["roir_operation_percent"])
        assert now["roir_operation_workers"] <= 1
    assert seen == sorted(seen)
    worker.finish(database, run)
    found = samples(database)
    assert found["roir_operation_statecompleted"] == 1
    assert found["roir_index_compacted_units_total"] == 2
    assert found["roir_index_compacted_bytes_total"] == 2 << 20
    assert 0 < found["roir_index_compaction_saved_bytes_total"] < 2 << 20
    assert found["roir_index_compaction_age_seconds"] >= 0
    [shown] = overview(database).operations
    assert (shown.operation_id, shown.kind, shown.phase) == (operation, "compact", "done")
    assert shown.compaction is not None
    assert (shown.compaction.units, shown.compaction.done, shown.compaction.left_out) == (2, 2, 0)
    # A second compaction's units are added.
    begun(database)
    lifecycle.compact(database, "ix")
    assert samples(database)["roir_index_compacted_units_total"] == 4


def test_one_that_is_aborted_before_it_has_done_anything_leaves_nothing(dsn: str, database: Database) -> None:
    from airflow_roir.engine import abort

    operation = begun(database)
    abort.abort(database, "ix", "me", "enough")
    now = operation_status(database, operation)
    assert (now.status, now.ended_by, now.end_reason) == ("aborted", "me", "enough")
    assert sql(session(dsn), LEFT_OVER) == []
    assert begun(database) > operation
