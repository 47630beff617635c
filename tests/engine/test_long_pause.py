"""Pauses that last: the warnings, how often they come, and the pauses that end in an abort."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, clean_up
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.operation import BY_WINDOW, Status
from tests.conftest import run_sql
from tests.engine import compacting, steps


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 200)


def paused(database: Database, **options: object) -> int:
    _, run = steps.begin(database, **options)
    requests.pause(database, "ix", "somebody", "lunch")
    end_run(database, run)
    return run.operation_id


def later(dsn: str, seconds: int) -> None:
    """Lets this many seconds pass: the pause and the events become that much older."""
    for table, column in (("operation", "paused_at"), ("event", "at")):
        run_sql(dsn, f"UPDATE roir.{table} SET {column} = {column} - interval '{seconds} s'")


def settle(database: Database) -> list[LongPause]:
    told: list[LongPause] = []
    abort.settle_pauses(database, "clean-up", tell=told.append)
    return told


def test_a_pause_of_a_day_is_warned_of_once_a_day_with_its_delta(database: Database, dsn: str) -> None:
    operation = paused(database)
    assert settle(database) == []
    assert operation_status(database, operation).long_pause is None
    run_sql(dsn, "UPDATE t SET v = v + 1 WHERE id <= 50")
    later(dsn, 90_000)
    [told] = settle(database)
    assert (told.index, told.paused_by, told.aborts_in, told.aborted) == ("public.ix", "somebody", None, False)
    assert told.delta_bytes > 0
    assert "still captures writes: its delta has about" in told.text
    assert "roir resume public.ix" in told.text
    # The status says it as long as it lasts; the callback hears it once a day.
    assert "has been paused for 1 d 1 h" in (operation_status(database, operation).long_pause or "")
    assert settle(database) == []
    assert any("still captures writes" in line for line in clean_up.clean_up(database).warnings)
    later(dsn, 86_400)
    assert len(settle(database)) == 1
    events = [event for event in operations.events(database, "ix") if event.action == "long pause"]
    assert len(events) == 2
    # A new pause counts from its own beginning.
    requests.resume(database, "ix", "somebody")
    requests.pause(database, "ix", "somebody")
    assert settle(database) == []


def test_a_big_delta_is_warned_of_at_once(dsn: str, database: Database) -> None:
    operation = paused(database)
    small = Database(dsn, limits=Limits(paused_delta_bytes=1))
    assert operation_status(small, operation).long_pause is not None
    requests.change_options(database, "ix", actor="somebody", warn_after_s=0)
    assert operation_status(small, operation).long_pause is None
    later(dsn, 900_000)
    assert settle(small) == []


@pytest.mark.sample(0)
def test_big_lists_of_a_compaction_are_warned_of_at_once(dsn: str, database: Database) -> None:
    """While it is paused, each write adds to the list of the current unit."""
    steps.make_index(database, segments=2)
    run = compacting.begin(database, compacting.act("rewrite", 1), compacting.act("rewrite", 2))
    going = compacting.stages(database, run)
    next(going)
    next(going)
    requests.pause(database, "ix", "somebody")
    small = Database(dsn, limits=Limits(paused_delta_bytes=20_000))
    assert settle(small) == []
    run_sql(dsn, *["UPDATE t SET k = k || '.'"] * 20, "ANALYZE roir_data.g1_u1_touched")
    [told] = settle(small)
    assert told.delta_bytes > 20_000
    assert told.delta_rows > 1000
    assert "its lists of written entries have about" in told.text
    abort.abort(database, "ix", "test")


def test_nobody_asked_for_an_abort(database: Database, dsn: str) -> None:
    operation = paused(database)
    later(dsn, 90 * 86_400)
    settle(database)
    clean_up.clean_up(database)
    assert operation_status(database, operation).status == Status.PAUSED


def test_an_abort_that_was_asked_for_comes_after_a_warning(database: Database, dsn: str) -> None:
    operation = paused(database, abort_after_s=8 * 3600)
    later(dsn, 3 * 3600)
    assert settle(database) == []
    later(dsn, 2 * 3600)
    [told] = settle(database)
    assert told.aborts_in == pytest.approx(3 * 3600, abs=60)
    assert "it is aborted in 3 h" in told.text
    later(dsn, 3 * 3600 + 60)
    assert clean_up.clean_up(database).operations_aborted == 1
    with database.transaction() as connection:
        assert operations.read_operation(connection, operation).status == Status.ABORTED
    event = steps.sql(steps.session(dsn), "SELECT actor, detail FROM roir.event WHERE action = 'abort'")
    assert event[0][1].startswith("paused for 8 h")
    assert steps.sql(steps.session(dsn), "SELECT FROM pg_trigger WHERE tgname LIKE 'roir%%'") == []


def test_who_looks_seldom_warns_first_and_aborts_an_hour_later(database: Database, dsn: str) -> None:
    operation = paused(database, abort_after_s=8 * 3600)
    later(dsn, 100 * 3600)
    [told] = settle(database)
    assert not told.aborted
    assert told.aborts_in == pytest.approx(3600, abs=5)
    later(dsn, 3500)
    assert settle(database) == []
    later(dsn, 101)
    [told] = settle(database)
    assert told.aborted
    assert operation_status(database, operation).status == Status.ABORTED


def test_a_planned_pause_outside_of_the_window_is_not_aborted(database: Database, dsn: str) -> None:
    operation = paused(database, abort_after_s=3600)
    run_sql(dsn, f"UPDATE roir.operation SET paused_by = '{BY_WINDOW}'")
    later(dsn, 90_000)
    [told] = settle(database)
    assert told.aborts_in is None
    later(dsn, 90_000)
    settle(database)
    assert operation_status(database, operation).status == Status.PAUSED


def test_a_resume_just_before_the_abort_wins(database: Database, dsn: str) -> None:
    operation = paused(database, abort_after_s=3600)
    later(dsn, 3601)
    settle(database)
    later(dsn, 3601)
    run = start_run(database, "ix", "test")
    assert settle(database) == []
    end_run(database, run)
    assert operation_status(database, operation).status == Status.RUNNING
