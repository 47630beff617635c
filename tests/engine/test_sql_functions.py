"""Control by SQL: functions for users who have neither the command nor Airflow at hand."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.engine.control import operations, requests, sign_of_life
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import InvalidInput
from airflow_roir.options import LIVE
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn,
        'CREATE SCHEMA "Weird ""S"""',
        'CREATE TABLE "Weird ""S""".t (id int PRIMARY KEY, k text)',
        'INSERT INTO "Weird ""S""".t SELECT i, i::text FROM generate_series(1, 100) i',
    )


NAME = '"Weird ""S"""."My % index"'


def test_pause_resume_and_abort_by_the_name_as_sql_writes_it(database: Database, dsn: str) -> None:
    prepared, run = steps.begin(database, NAME, '"Weird ""S""".t', "k")
    user = steps.session(dsn)
    assert sql(user, "SELECT roir.pause(%s, 'lunch')", NAME) == [("paused at 0.0 %",)]
    user.commit()
    assert "already paused" in sql(user, "SELECT roir.pause(%s)", NAME)[0][0]
    # Found: the history said that it paused at 0.0 %, although the open batches then brought it to 0.3 %.
    [(detail,)] = sql(user, "SELECT detail FROM roir.event WHERE action = 'pause'")
    assert detail == "asked for at 0.0 %: lunch"
    paused = operation_status(database, prepared.operation_id)
    assert (paused.status, paused.pause_reason, paused.paused_by) == ("paused", "lunch", "postgres")
    sql(user, "SELECT roir.resume(%s, parallelism => 7)", NAME)
    user.commit()
    resumed = operation_status(database, prepared.operation_id)
    assert (resumed.status, resumed.options["parallelism"], resumed.pause_reason) == ("running", 7, None)
    again = start_run(database, NAME, "the run that waited")  # no heartbeat: free to be taken up
    assert again.epoch > run.epoch
    sql(user, "SELECT roir.abort(%s, 'enough')", NAME)
    user.commit()
    assert operation_status(database, prepared.operation_id).status == "aborting"
    assert [event.action for event in operations.events(database, NAME)] == [
        "prepare",
        "start",
        "pause",
        "change parallelism",
        "resume",
        "start",
        "abort",
    ]


@pytest.mark.parametrize("call", ["roir.resume('ix')", "roir.abort('nothing')", "roir.pause('a.b.c')"])
def test_what_cant_be_done_is_an_error(database: Database, dsn: str, call: str) -> None:
    _, run = steps.begin(database, "ix", '"Weird ""S""".t', "k")
    end_run(database, run)
    user = steps.session(dsn)
    with pytest.raises((psycopg2.errors.NoDataFound, psycopg2.errors.ObjectNotInPrerequisiteState)):
        sql(user, f"SELECT {call}")


@pytest.mark.parametrize("value", [0, -1, 257])
def test_a_bad_parallelism_is_refused_and_the_old_one_stays(database: Database, dsn: str, value: int) -> None:
    prepared, _ = steps.begin(database, "ix", '"Weird ""S""".t', "k", parallelism=3)
    requests.pause(database, "ix", "me")
    with pytest.raises(psycopg2.errors.InvalidParameterValue):
        sql(steps.session(dsn), "SELECT roir.resume('ix', parallelism => %s)", value)
    kept = operation_status(database, prepared.operation_id)
    assert (kept.status, kept.options["parallelism"]) == ("paused", 3)


@pytest.mark.parametrize("by", ["a user", "its run"])
def test_a_pause_needs_no_room_for_its_event(database: Database, dsn: str, by: str) -> None:
    """A full disk has no page for another row, but the operation's own row is there."""
    _, run = steps.begin(database, "ix", '"Weird ""S""".t', "k")
    full = "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE disk_full; END $$"
    run_sql(dsn, full, "CREATE TRIGGER full_disk BEFORE INSERT ON roir.event EXECUTE FUNCTION full_disk()")
    if by == "a user":
        user = steps.session(dsn)
        assert sql(user, "SELECT roir.pause('ix', 'lunch')") == [("paused at 0.0 %",)]
        user.commit()
    else:
        with database.transaction() as connection:
            row = operations.read_operation(connection, run.operation_id)
            operations.pause_operation(connection, row, run.owner, "lunch", run.epoch)
    with database.transaction() as connection:
        now = operations.read_operation(connection, run.operation_id)
        assert (now.status, now.pause_reason) == ("paused", "lunch")
        assert operations.last_event(connection, run.operation_id, "pause") is None


def test_the_limits_in_sql_are_those_of_the_code(database: Database, dsn: str) -> None:
    user = steps.session(dsn)
    longest = f"longest numeric DEFAULT {sign_of_life.LONGEST_TICK_S}"
    [(arguments,)] = sql(user, "SELECT pg_get_function_arguments('roir.tick'::regproc)")
    assert arguments.endswith(longest)
    # All functions but those for which a user's own DDL waits.
    heads = (
        "SELECT DISTINCT x FROM pg_proc, unnest(proconfig) x "
        "WHERE pronamespace = 'roir'::regnamespace AND proname NOT IN ('hide_if_free', 'follow_tables')"
    )
    assert sql(user, f"{heads} AND x LIKE 'lock_timeout=%%'", ()) == [(f"lock_timeout={DEFAULT.attempt_ms}ms",)]
    steps.begin(database, "ix", '"Weird ""S""".t', "k")
    for name, option in LIVE.items():
        if option.kind.is_text or option.apart:
            continue
        least, most = option.least_asked, option.most
        # 0 means none.
        too_small = -1 if option.zero and least == 1 else least - 1
        # The limits allow these values. The call is refused nevertheless, because no operation is paused.
        for value, refusal, said in (
            (least, psycopg2.errors.ObjectNotInPrerequisiteState, "no paused operation"),
            (most, psycopg2.errors.ObjectNotInPrerequisiteState, "no paused operation"),
            (too_small, psycopg2.errors.InvalidParameterValue, f"{name} is {too_small}; it must be from {least} to"),
            (most + 1, psycopg2.errors.InvalidParameterValue, f"it must be from {least} to {most}"),
        ):
            with pytest.raises(refusal, match=said):
                sql(user, f"SELECT roir.resume('ix', {name} => %s)", value)
            user.rollback()


def test_options_change_by_name_and_each_change_is_an_event(database: Database, dsn: str) -> None:
    steps.begin(database, "ix", '"Weird ""S""".t', "k", batch_rows=7)
    user = steps.session(dsn)
    user.autocommit = True
    change = "SELECT roir.change('ix', parallelism => %s, max_rows_per_second => %s, actor => 'ann')"
    assert sql(user, change, 3, 900) == [("changed: parallelism 2 -> 3, max_rows_per_second no limit -> 900",)]
    assert sql(user, change, 3, 900) == [("nothing changes: these values are in effect already",)]
    assert sql(user, change, None, 0) == [("changed: max_rows_per_second 900 -> no limit",)]
    changes = [(event.actor, event.action, event.detail) for event in operations.events(database, "ix")[2:]]
    assert changes == [
        ("ann", "change parallelism", "2 -> 3"),
        ("ann", "change max_rows_per_second", "no limit -> 900"),
        ("ann", "change max_rows_per_second", "900 -> no limit"),
    ]
    with pytest.raises(psycopg2.errors.InvalidParameterValue, match="nothing to change"):
        sql(user, change, None, None)
    requests.request_abort(database, "ix", "ann")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="no operation to change"):
        sql(user, change, 4, None)
    for bad in ({"parallelism": 0}, {"parallelism": True}, {"batch_rows": 10**12}, {"max_rows_per_second": 99}, {}):
        with pytest.raises(InvalidInput):
            requests.change_options(database, "ix", actor="ann", **bad)  # type: ignore[arg-type]
