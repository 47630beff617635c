"""The facts of a throttle that users see: its reason, its beginning, its cost, the readings. On a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_roir.cli.overview import operation_notes
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.governing import Governor
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import OperationStatus, operation_status
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.engine.snapshot.throttle import MOST_POINTS, lost_line
from airflow_roir.quantity import lost
from airflow_roir.task.progress import progress_line
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

HELD = "throttled: the throttle's query says 7, limit 6"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def held(database: Database, dsn: str) -> Iterator[Run]:
    """A run on hold that has lost 8 s of work to the user's own query."""
    steps.make_table(dsn)
    _, run = steps.begin(database, throttle="query=6 lock_waits=50")
    begins_to_work(dsn)
    clock = Clock()
    governor = Governor(database, run, Surroundings(query="SELECT 7"), clock=clock)
    with database.connect() as connection:
        for _ in range(5):
            governor.look(connection)
            clock.now += 2
    yield run
    governor.close()


def begins_to_work(dsn: str) -> None:
    run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp(), ticked_at = clock_timestamp()")


def seen(database: Database, run: Run) -> OperationStatus:
    return progress(database, operation_id=run.operation_id)


def test_the_reason_is_in_the_status_its_json_the_progress_and_the_tasks_log(database: Database, held: Run) -> None:
    one = operation_status(database, held.operation_id)
    assert (one.options["throttle"], one.throttled, one.granted) == ("lock_waits=50 query=6", HELD, 0)
    assert one.throttle_seconds == {"query": 8.0}
    assert one.throttled_since is not None
    assert progress_line(one).endswith(f", {HELD}")
    found = overview(database)
    [told] = json.loads(json.dumps(found.as_dict()))["operations"]
    assert told["held_up"] == {"by": "throttled", "text": HELD}
    assert (told["throttled"], told["throttle_seconds"]) == (HELD, {"query": 8.0})
    notes = list(operation_notes(found, found.operations[0]))
    assert notes[1:] == [HELD, "limits: lock_waits=50 query=6", "lost 8 s to query"]
    throttle = seen(database, held).governor
    assert throttle is not None
    assert (throttle.limits, throttle.throttled, throttle.granted) == ("lock_waits=50 query=6", HELD, 0)
    [cost] = throttle.lost
    assert (cost.cause, cost.seconds) == ("query", 8.0)
    assert 0 < cost.share <= 1
    signals = {one.name: one for one in throttle.signals}
    assert [point.value for point in signals["query"].points] == [7] * 5
    assert {point.limit for point in signals["query"].points} == {6}
    assert signals["query"].stops
    assert signals["lock_waits"].points[-1].value == 0
    assert {workers for _, workers in throttle.grants} == {0}


def test_a_governor_that_is_gone_is_told_and_what_it_said_is_not(database: Database, dsn: str, held: Run) -> None:
    run_sql(dsn, "UPDATE roir.operation SET granted_at = clock_timestamp() - interval '40 s'")
    told = operation_status(database, held.operation_id).throttled or ""
    # The number of seconds depends on how busy the machine is.
    expected = r"throttled: no governor has read the signals for \d+ s"
    assert re.fullmatch(expected, told)
    assert re.fullmatch(expected, seen(database, held).held_up.text)
    run_sql(dsn, "UPDATE roir.operation SET granted_at = NULL, throttled = NULL")
    told = operation_status(database, held.operation_id).throttled or ""
    assert told == "throttled: no governor has read the signals yet"


@pytest.mark.parametrize("gone", ["killed", "paused"])
def test_what_a_run_that_is_gone_has_left_holds_nothing(database: Database, dsn: str, held: Run, gone: str) -> None:
    if gone == "paused":
        requests.pause(database, "ix", "ann")
    else:
        run_sql(dsn, "UPDATE roir.operation SET heartbeat_at = clock_timestamp() - interval '1 min'")
    one = operation_status(database, held.operation_id)
    assert (one.throttled, one.throttled_since) == (None, None)
    assert one.throttle_seconds == {"query": 8.0}
    assert seen(database, held).held_up.by == ("pause" if gone == "paused" else "no run")


def test_a_wait_of_a_run_without_limits_is_told_too(database: Database, dsn: str) -> None:
    """A server without room holds the work as a limit does."""
    steps.make_table(dsn)
    _, run = steps.begin(database)
    begins_to_work(dsn)
    assert seen(database, run).governor is None
    run_sql(dsn, "UPDATE roir.operation SET throttled = 'the server has no room', throttled_since = now()")
    assert operation_status(database, run.operation_id).throttled == "the server has no room"
    assert seen(database, run).held_up.by == "throttled"


def test_the_end_says_what_was_lost_to_what(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    run = steps.sealed(database)
    causes = "('replica_lag', 192), ('commit_latency', 40.2), ('lock_waits', 0.01)"
    rows = f"SELECT {run.operation_id}, v.* FROM (VALUES {causes}) v"
    run_sql(dsn, f"INSERT INTO roir.throttle_time (operation_id, cause, seconds) {rows}")
    lines: list[str] = []
    ended = lifecycle.finalize(database, "ix", "test", lines.append, take_over=True)
    assert ended.status == "completed"
    assert lines[-1] == "lost 3 min 12 s to replica_lag, 40 s to commit_latency"
    assert operation_status(database, run.operation_id).throttle_seconds == {"replica_lag": 192, "commit_latency": 40.2}


def test_nothing_lost_is_not_told(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    run = steps.make_index(database)
    assert lost_line(database, run.operation_id) == lost({}) == ""


def test_a_chart_has_few_points_and_hides_neither_a_gap_nor_a_peak(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    _, run = steps.begin(database, throttle="replica_lag=100")
    reading = "CASE n WHEN 77 THEN NULL WHEN 33 THEN 340 ELSE n % 9 END"
    run_sql(
        dsn,
        "INSERT INTO roir.signal_sample (operation_id, at, granted, readings) "
        f"SELECT {run.operation_id}, now() - n * interval '2 s', CASE n WHEN 33 THEN 0 ELSE 2 END, jsonb_build_object("
        f"'replica_lag', jsonb_build_object('limit', 100, 'value', {reading}, 'of', 'r' || n, "
        "'problem', CASE n WHEN 77 THEN 'gone' END)) FROM generate_series(1, 400) n",
    )
    throttle = seen(database, run).governor
    assert throttle is not None
    [signal] = throttle.signals
    assert 60 <= len(signal.points) <= MOST_POINTS
    values: list[Any] = [point.value for point in signal.points]
    assert values.count(None) == 1
    assert [point.of for point in signal.points if point.value == 340] == ["r33"]
    assert [workers for _, workers in throttle.grants].count(0) == 1
    assert [point.at for point in signal.points] == sorted(point.at for point in signal.points)


def test_names_of_replicas_and_problems_are_shown_in_one_line_and_not_for_ever(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    _, run = steps.begin(database, throttle="replica_lag=100")
    hostile = "x\x1b[31m\n" * 300
    sample = {"replica_lag": {"limit": 100, "value": None, "of": hostile, "problem": hostile}}
    user = steps.session(dsn)
    user.autocommit = True
    add = "INSERT INTO roir.signal_sample (operation_id, granted, readings) VALUES (%s, 0, %s)"
    sql(user, add, run.operation_id, json.dumps(sample))
    sql(user, "UPDATE roir.operation SET throttled = %s, granted_at = now(), heartbeat_at = now()", hostile)
    throttle = seen(database, run).governor
    assert throttle is not None
    [signal] = throttle.signals
    for text in (throttle.throttled, signal.problem, signal.points[0].of):
        assert text is not None
        assert text.rstrip("…").isprintable()
        assert len(text) <= 501


def test_windows_duration_and_priority_are_in_the_status(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.begin(database, windows="0 0 * * * for 24h", max_duration_s=7200, priority=3)
    found = overview(database)
    [told] = json.loads(json.dumps(found.as_dict()))["operations"]
    assert (told["windows"], told["max_duration_s"], told["priority"]) == ("0 0 * * * for 24h", 7200, 3)
    notes = list(operation_notes(found, found.operations[0]))
    assert notes[-2:] == ["windows: 0 0 * * * for 24h", "longest duration: 2 h"]
