"""Progress in the task's log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_roir.task.progress import EVERY_S, Progress, progress_line

STATUS: Any = SimpleNamespace(
    status="running",
    phase="build",
    phase_shown="build",
    percent_complete=43.4,
    rows=120_000,
    rows_estimate=300_000,
    rows_per_second=1500.0,
    rows_per_second_now=1785.0,
    seconds_left=12.0,
    seconds_left_low=11.0,
    seconds_left_high=13.0,
    throttled=None,
)
# Neither seen recently nor estimated.
NOTHING = {"rows_per_second_now": None, "rows_estimate": 0}


def test_a_line_says_what_is_known() -> None:
    assert progress_line(STATUS) == "build: 43.4 %, 120,000 of about 300,000 rows, 1,785 rows/s, about 12 s left"
    steady = SimpleNamespace(**vars(STATUS) | {"rows_per_second_now": None})
    assert "1,500 rows/s until now" in progress_line(steady)  # type: ignore[arg-type]
    unknown = SimpleNamespace(**vars(STATUS) | {"rows_per_second": None, "seconds_left": None, "rows": 1, **NOTHING})
    assert progress_line(unknown) == "build: 43.4 %, 1 row"  # type: ignore[arg-type]
    held = SimpleNamespace(**vars(unknown) | {"throttled": "throttled: a commit takes 30 ms, limit 20 ms"})
    assert progress_line(held) == "build: 43.4 %, 1 row, throttled: a commit takes 30 ms, limit 20 ms"  # type: ignore[arg-type]


def test_the_rate_of_before_is_not_said_until_this_run_has_committed_something() -> None:
    """Found: while Spark started after a resume, each line had the rate and the time left of the former run."""
    lines: list[str] = []
    now, found = [0.0], [STATUS]
    progress = Progress(lambda: found[0], lines.append, lambda: now[0], before=STATUS)
    for moved in ({}, {"rows": 120_001}, {"percent_complete": 43.5}, {"phase": "seal"}):
        found[0] = SimpleNamespace(**vars(STATUS) | moved)
        now[0] += EVERY_S
        progress.turn()
    still, *others = lines
    assert still == "build: 43.4 %, 120,000 of about 300,000 rows, nothing committed yet since this run began"
    assert len(others) == 3
    assert all("1,785 rows/s, about 12 s left" in line for line in others)


def test_it_is_said_now_and_then_and_again_after_a_failure() -> None:
    now, lines, reads = [0.0], [], [0]

    def read() -> Any:
        reads[0] += 1
        if reads[0] == 2:
            raise ConnectionError
        return STATUS

    progress = Progress(read, lines.append, lambda: now[0])
    for now[0] in (0.0, 1.0, EVERY_S - 1):
        progress.turn()
    assert (reads, lines) == ([0], [])
    now[0] = EVERY_S
    progress.turn()
    progress.turn()
    assert (reads[0], len(lines)) == (1, 1)
    now[0] = 2 * EVERY_S
    with pytest.raises(ConnectionError):
        progress.turn()
    progress.turn()
    assert (reads[0], len(lines)) == (3, 2)
