"""A compaction on Spark: a lock that it doesn't get pauses it, a revert fails it, and a later run continues it."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_roir.engine import revert
from airflow_roir.engine.compact import compaction, worker
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.options import CompactOptions
from airflow_roir.spark import task
from tests.engine import steps
from tests.engine.steps import session, sql
from tests.spark.driving import ROWS, Running

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(1)]


@pytest.fixture
def generation(database: Database) -> int:
    """The generation of a published index of three segments."""
    prepared, run = steps.begin(database, include="v", ranges=4, segments=3)
    steps.finish_all(database, run)
    return prepared.generation_id


def begun(database: Database, **options: Any) -> int:
    """A rewrite of each segment, whatever it is worth."""
    actions = [
        Action(Kind.REWRITE, (one,), 1, 8192, 8192, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked")
        for one in (1, 2, 3)
    ]
    return compaction.begin(database, "ix", actions, CompactOptions(**options), "test").operation_id


def test_a_lock_that_cant_be_had_pauses_it_with_the_reason(dsn: str, database: Database, generation: int) -> None:
    begun(database, lock_patience_s=0, lock_timeout_ms=20)
    run = start_run(database, "ix", "test")
    holder = session(dsn)
    sql(holder, f"LOCK TABLE {physical.segment(generation, 1)} IN ROW EXCLUSIVE MODE")
    [failed] = [one for one in task.work(database, run, "compact", 0) if one.error is not None]
    paused = operations.find_operation(database, "ix")
    assert paused.status == "paused"
    assert f"pid {holder.info.backend_pid} " in paused.pause_reason
    assert paused.pause_reason == failed.error
    holder.rollback()
    told: list[str] = []
    run = start_run(database, "ix", "test", take_over=True)
    news = PhaseLog(database, run, worker.PHASE, told.append)
    news.begin(1)
    assert [one.error for one in task.work(database, run, "compact", 0) if one.done] == [None] * 3
    news.pieces(last=True)
    assert told[0] == "compact: 1 worker"
    assert told[1:] == [f"compact: 3 of 3 units done, {sum(rows_of(database)):,} rows"]


def units_done(database: Database, operation: int) -> int:
    now = operation_status(database, operation).compaction
    return 0 if now is None else now.done


def rows_of(database: Database) -> list[int]:
    report = compaction.report_of(database, operations.find_operation(database, "ix").id)
    return [unit["rows"] for unit in report.units]


@pytest.mark.sample(0)
def test_it_fails_where_readers_see_another_generation(database: Database, generation: int) -> None:
    run = steps.make_index(database, include="v", ranges=4, segments=3)
    begun(database)
    run = start_run(database, "ix", "test")
    revert.revert(database, "ix", "somebody")
    [failed] = task.work(database, run, "compact", 0)
    assert failed.error is not None
    now = operations.find_operation(database, "ix")
    assert now.status == "failed"
    assert "readers see another generation" in str(now.error)
    # No other try could succeed; Spark's driver ends at once.
    assert failed.error == f"{task.PERMANENT}{now.error}"


@pytest.mark.slow
def test_two_workers_are_paused_and_three_go_on(dsn: str, database: Database, generation: int) -> None:
    operation = begun(database)
    holder = session(dsn)
    sql(holder, f"LOCK TABLE {physical.segment(generation, 2)} IN ROW EXCLUSIVE MODE")
    with Running(database, "local[4]") as driver:
        driver.wait_for(lambda: units_done(database, operation) >= 1)
        requests.pause(database, "ix", "me", "a look")
        assert driver.wait() == 3, driver.said
    assert "compact: 2 workers" in driver.said
    assert "paused by me" in driver.last_told
    holder.rollback()
    now = operation_status(database, operation)
    assert now.compaction is not None
    assert 1 <= now.compaction.done < 3
    requests.change_options(database, "ix", actor="me", parallelism=3)
    with Running(database, "local[4]") as driver:
        assert driver.wait() == 0, driver.said
    assert "compact: 3 workers" in driver.said
    assert f"compact: {now.compaction.done} of 3 units done before" in driver.said
    assert "compact: done, worked " in driver.said
    assert sum(rows_of(database)) == ROWS
    assert operation_status(database, operation).status == "completed"
    steps.assert_exact(database)
