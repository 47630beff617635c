"""Windows and the longest duration: an operation pauses and resumes automatically, by the server's clock."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from airflow_roir.engine.control import admission, operations, requests
from airflow_roir.engine.control.run import Run, end_run, read_control, settle, start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import IllegalTransition, InvalidInput, OperationPaused
from airflow_roir.operation import BY_MAX_DURATION, BY_WINDOW, Phase, Status
from tests.conftest import run_sql
from tests.engine import steps, verifying

pytestmark = pytest.mark.sample(4)

OPEN = "* * * * * for 1h"


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 200)


def closed() -> str:
    """A window of one hour, closed now: it opens in twelve hours."""
    hour = (datetime.now(timezone.utc) + timedelta(hours=12)).hour
    return f"30 {hour} * * * for 1h"


def give(dsn: str, **columns: object) -> None:
    """Sets columns of the operation, without any check, as a user of SQL could."""
    for name, value in columns.items():
        run_sql(dsn, f"UPDATE roir.operation SET {name} = {value}")


def look(database: Database, run: Run) -> str | None:
    with database.transaction() as connection:
        return admission.pause_when_over(connection, read_control(connection, run), run.epoch, run.index)


def row(database: Database) -> Any:
    return operations.find_operation(database, "ix")


def test_what_is_outside_of_its_window_is_not_started_and_says_when_it_opens(database: Database) -> None:
    with pytest.raises(OperationPaused, match=r"outside of its window; opens at \d{4}-\d\d-\d\d \d\d:30 UTC"):
        steps.begin(database, windows=closed())
    found = row(database)
    assert (found.status, found.paused_by, found.heartbeat_at) == (Status.PAUSED, BY_WINDOW, None)
    wait = admission.ask(database, row(database).id)
    assert wait is not None
    assert (wait.by, wait.passes, wait.is_queued) == (BY_WINDOW, True, False)
    assert 0 < (wait.seconds or 0) <= 12.6 * 3600
    # No second event for the same pause.
    assert [event.action for event in operations.events(database, "ix")].count("pause") == 1
    requests.change_options(database, "ix", actor="somebody", windows="off")
    assert admission.ask(database, row(database).id) is None
    run = start_run(database, "ix", "test")
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_window_that_closes_pauses_the_run_at_the_next_look(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, windows=OPEN)
    assert look(database, run) is None
    requests.change_options(database, "ix", actor="somebody", windows=closed())
    assert (look(database, run) or "").startswith("outside of its window; opens at")
    assert look(database, run) is None
    found = row(database)
    assert (found.status, found.paused_by) == (Status.PAUSED, BY_WINDOW)
    assert list(steps.build.PHASE.work(database, run, 0)) == []
    end_run(database, run)
    give(dsn, windows=f"'{OPEN}'")
    # In the window, a run that waits lifts the pause.
    steps.finish_all(database, start_run(database, "ix", "test"))
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_window_that_closes_between_fold_and_publish_holds_the_comparison_but_not_the_publish(
    database: Database, dsn: str
) -> None:
    run = steps.folded(database, windows=OPEN)
    assert row(database).phase == Phase.PUBLISH
    give(dsn, windows=f"'{closed()}'")
    with database.transaction() as connection:
        assert not admission.is_last(connection, row(database))
    assert look(database, run) is not None
    with pytest.raises(OperationPaused):
        verifying.of_build(database, run)
    give(dsn, windows=f"'{OPEN}'")
    run = start_run(database, "ix", "test")
    verifying.of_build(database, run)
    # The comparison is done, and the publish is next.
    give(dsn, windows=f"'{closed()}'", max_duration_s=1, working_since="clock_timestamp() - interval '1 h'")
    assert look(database, run) is None
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_a_run_that_begins_with_the_publish_waits_for_the_window(database: Database, dsn: str) -> None:
    run = steps.sealed(database)
    end_run(database, run)
    give(dsn, windows=f"'{closed()}'")
    with pytest.raises(OperationPaused, match="outside of its window"):
        start_run(database, "ix", "test")


@pytest.mark.parametrize("text", ["nonsense", "0 0 31 2 * for 1h", "0 22 * * * for 1h in Europe/Atlantis"])
def test_windows_that_cant_be_read_fail_closed(database: Database, dsn: str, text: str) -> None:
    _, run = steps.begin(database)
    give(dsn, windows=f"'{text}'")
    said = look(database, run) or ""
    assert said.startswith("its windows can't be read: windows: ")
    assert "roir change public.ix --windows" in said
    end_run(database, run)
    wait = admission.ask(database, row(database).id)
    assert wait is not None
    assert (wait.by, wait.until) == (BY_WINDOW, None)


def test_a_users_pause_stays_a_users_pause(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, windows=OPEN)
    requests.pause(database, "ix", "somebody", "month's end")
    give(dsn, windows=f"'{closed()}'")
    assert look(database, run) is None
    assert row(database).paused_by == "somebody"
    end_run(database, run)
    give(dsn, windows="NULL")
    with pytest.raises(OperationPaused, match="somebody"):
        start_run(database, "ix", "another", lift_pause=False)


@pytest.mark.parametrize("by", [BY_WINDOW, "governor", "airflow switch of DAG rebuild_index"])
def test_a_pause_that_ends_by_itself_becomes_the_users_who_pauses(database: Database, by: str) -> None:
    _, run = steps.begin(database)
    with database.transaction() as connection:
        operations.pause_operation(connection, row(database), by, "for now", run.epoch)
    requests.pause(database, "ix", "somebody", "month's end")
    found = row(database)
    assert (found.paused_by, found.pause_reason) == ("somebody", "month's end")
    event = operations.events(database, "ix")[-1]
    assert (event.actor, event.action) == ("somebody", "pause")
    assert f"it was paused by {by}: for now" in event.detail
    # Another pause doesn't take this one over, least of all that of Airflow's switch.
    for other in ("another", "airflow switch of DAG rebuild_index"):
        requests.pause(database, "ix", other)
        assert row(database).paused_by == "somebody"


def test_a_resume_outside_of_the_window_waits_for_it(database: Database, dsn: str) -> None:
    _, run = steps.begin(database)
    requests.pause(database, "ix", "somebody")
    end_run(database, run)
    give(dsn, windows=f"'{closed()}'")
    with pytest.raises(OperationPaused, match="outside of its window"):
        start_run(database, "ix", "test")
    assert row(database).paused_by == BY_WINDOW
    requests.resume(database, "ix", "somebody", windows="off")
    assert start_run(database, "ix", "test").epoch > run.epoch


def test_the_longest_duration_counts_from_the_begin_and_anew_from_a_resume(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, max_duration_s=3600)
    assert look(database, run) is None
    give(dsn, working_since="clock_timestamp() - interval '59 min'")
    assert look(database, run) is None
    # Build and finalize are two runs of one stretch.
    end_run(database, run)
    run = start_run(database, "ix", "test")
    assert look(database, run) is None
    give(dsn, working_since="clock_timestamp() - interval '61 min'")
    assert look(database, run) == "it has worked for 1 h, as long as it may at a stretch"
    found = row(database)
    assert (found.status, found.paused_by) == (Status.PAUSED, BY_MAX_DURATION)
    end_run(database, run)
    requests.resume(database, "ix", "somebody")
    run = start_run(database, "ix", "test")
    assert look(database, run) is None


def test_a_second_run_does_not_begin_where_the_time_is_over(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, max_duration_s=3600)
    end_run(database, run)
    give(dsn, working_since="clock_timestamp() - interval '61 min'")
    with pytest.raises(OperationPaused, match="as long as it may"):
        start_run(database, "ix", "test")
    assert row(database).paused_by == BY_MAX_DURATION


def test_the_tries_of_a_task_share_their_time(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, max_duration_s=3600)
    give(dsn, working_since="clock_timestamp() - interval '30 min'")
    settle(database, run, OSError("the network"), fatal=False)
    end_run(database, run)
    # A task does this before it starts Spark, under the name of its run.
    requests.resume(database, "ix", "test")
    run = start_run(database, "ix", "test")
    give(dsn, working_since="working_since - interval '31 min'")
    assert look(database, run) is not None
    # A pause of the operation's own isn't a failure's.
    end_run(database, run)
    requests.resume(database, "ix", "test")
    run = start_run(database, "ix", "test")
    assert look(database, run) is None


def test_time_in_the_queue_does_not_count(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, max_duration_s=60)
    end_run(database, run)
    give(dsn, queued_at="clock_timestamp()", working_since="clock_timestamp() - interval '1 h'")
    run = start_run(database, "ix", "test")
    assert look(database, run) is None


def test_a_pause_in_the_same_moment_wins(database: Database, dsn: str) -> None:
    _, run = steps.begin(database, max_duration_s=60)
    give(dsn, working_since="clock_timestamp() - interval '1 h'")
    with database.transaction() as connection:
        read = read_control(connection, run)
    requests.pause(database, "ix", "somebody")
    with pytest.raises(IllegalTransition), database.transaction() as connection:
        admission.pause_when_over(connection, read, run.epoch, run.index)
    assert row(database).paused_by == "somebody"


def test_windows_are_checked_where_they_are_given(database: Database) -> None:
    steps.begin(database)
    for wrong in ("0 22 * * *", "0 0 31 2 * for 1h"):
        with pytest.raises(InvalidInput, match="windows"):
            requests.change_options(database, "ix", actor="somebody", windows=wrong)
