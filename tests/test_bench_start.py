"""The parts that `make bench-start` tells are the intervals between the points of a log, and add up to the whole."""

from __future__ import annotations

import pytest

from airflow_roir.spark import start_timings
from benchmarks.start import report, summarize
from benchmarks.start_parts import BESIDE, PARTS, Event, parts, points, statements, sums

# A worker of an older run, a statement of two lines, sessions of others, a worker that ends after the phase's event.
LOG = """\
90.000 roir 7.1 worker 0 public.i|LOG:  statement: SELECT 1
100.500 roir cli|LOG:  statement: SET x
100.600 roir bench|LOG:  statement: COMMIT
101.000 roir cli|LOG:  statement: COMMIT
101.200 |LOG:  checkpoint starting: time
101.900 roir cli|LOG:  statement: INSERT INTO roir.operation
\tVALUES (1)
102.000 roir cli|LOG:  statement: COMMIT
102.500 roir cli|LOG:  statement: COMMIT
103.000 roir public.i driver|LOG:  statement: SELECT 1
110.000 roir 7.2 worker 1 public.i|LOG:  statement: SELECT 1
110.250 roir 7.2 worker 0 public.i|LOG:  statement: SELECT 1
112.000 roir 7.2 worker 0 public.i|LOG:  statement: COMMIT
112.500 roir 7.2 worker 1 public.i|LOG:  statement: COMMIT
113.000 roir 7.2 worker 0 public.i|LOG:  statement: SELECT 1
115.000 roir 7.2 worker 0 public.i|LOG:  statement: COMMIT
117.000 roir cli|LOG:  statement: SELECT 1
"""
EVENTS = [
    Event(80.0, "start", "in phase fold"),
    Event(101.95, "prepare", "first build over public.t"),
    Event(103.0, "start", "in phase build"),
    Event(112.75, "phase", "seal"),
    Event(115.25, "phase", "fold"),
    Event(116.0, "start", "in phase fold"),
    Event(118.0, "publish", "0 ghosts left for the clean-up"),
]
MARKS = {"driver": 101.0, "java": 101.5, "session": 105.0, "begun": 103.0, "job": 107.0, "done": 115.5, "stopped": 119}


def test_points_are_found_in_log_events_and_marks() -> None:
    assert points(100.0, statements(LOG), EVENTS, MARKS, "roir cli") == MARKS | {
        "asked": 100.5,
        "prepared": 102.0,
        "first": 110.0,
        "built": 112.5,
        "sealing": 113.0,
        "sealed": 115.0,
        "folding": 116.0,
        "published": 118.0,
    }


def test_parts_add_up_and_what_ran_beside_prepare_adds_nothing() -> None:
    reached = points(100.0, statements(LOG), EVENTS, MARKS, "roir cli") | {"ended": 118.5}
    seconds = parts(100.0, reached)
    assert seconds == {
        "asked": 0.5,
        "prepared": 1.5,
        "driver": 0.0,
        "java": 0.0,
        "session": 3.0,
        "begun": 0.0,
        "job": 2.0,
        "first": 3.0,
        "built": 2.5,
        "sealing": 0.5,
        "sealed": 2.0,
        "folding": 1.0,
        "published": 2.0,
        "ended": 0.5,
    }
    # Spark's end isn't part of the time.
    assert sums(seconds) == {"all": 18.5, "besides": 10.5, "first": 10.0}


def test_without_marks_their_time_is_in_the_part_after_them() -> None:
    seconds = parts(100.0, points(100.0, statements(LOG), EVENTS, {}, "roir cli"))
    assert seconds["first"] == 8.0
    assert sums(seconds)["all"] == 18.0


def test_a_commit_in_the_millisecond_of_its_event_is_found() -> None:
    events = [Event(102.0004, "prepare", "first build over public.t")]
    assert points(100.0, statements(LOG), events, {}, "roir cli")["prepared"] == 102.0


def test_a_resume_has_no_prepare_and_marks_of_an_older_start_dont_count() -> None:
    found = points(102.2, statements(LOG), EVENTS, MARKS | {"session": 90.0}, "roir cli")
    assert not {"prepared", "driver", "session"} & set(found)
    assert parts(102.2, found)["asked"] == pytest.approx(0.3)


def test_a_run_that_ended_in_its_build_has_no_later_parts() -> None:
    found = points(100.0, statements(LOG), EVENTS[:3], {}, "roir cli")
    assert list(parts(100.0, found)) == ["asked", "prepared", "first"]


def test_the_marks_are_parts_or_beside_them() -> None:
    assert set(start_timings.MARKS) <= {part.name for part in PARTS} | set(BESIDE)


def test_the_tables_have_medians_and_a_dash_for_what_a_side_has_not() -> None:
    rounds = [
        {"parts": {"asked": at, "prepared": 1.0}, "sums": {"all": at + 1}, "at": {"asked": at, "prepared": at + 1}}
        for at in (9.0, 2.0, 3.0)
    ]
    resumed = {"parts": {"asked": 0.5}, "sums": {"all": 0.5}, "at": {"asked": 0.5}}
    results = {"resume": {"medians": summarize([resumed])}, "build": {"medians": summarize(rounds)}}
    assert report(results).splitlines() == [
        "| seconds | build | resume |",
        "| --- | ---: | ---: |",
        "| process and imports | 3.0 | 0.5 |",
        "| prepare, the engine's | 1.0 | - |",
        "| **all of it** | 4.0 | 0.5 |",
        "",
        "| at second | build | resume |",
        "| --- | ---: | ---: |",
        "| the first statement | 3.0 | 0.5 |",
        "| prepared | 4.0 | - |",
    ]
