"""A wait's lines, over stepped times: one when it begins, one each hour, one when it ends."""

from __future__ import annotations

from typing import Any

from airflow_roir.engine.control.wait_log import WaitLog


class Task:
    """A waiting task: a new process, and so a new `WaitLog`, at each look."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None
        self.lines: list[str] = []
        self.now = 1_000_000.0
        self.attempt = 1

    def log(self) -> WaitLog:
        def keep(kept: dict[str, Any] | None) -> None:
            self.kept = kept

        return WaitLog(self.kept, keep, self.lines.append, self.attempt, lambda: self.now)

    def looks(self, seconds: float, every: float = 30, by: str = "ann") -> list[str]:
        """The lines of this many seconds of looks."""
        before = len(self.lines)
        until = self.now + seconds
        while self.now <= until:
            self.log().waits(by, f"paused by {by}")
            self.now += every
        return self.lines[before:]


def test_a_wait_of_five_hours_and_a_half_has_seven_lines() -> None:
    task = Task()
    said = task.looks(5.5 * 3600)
    task.log().over()
    assert said == ["paused by ann", *(f"paused by ann (waiting for {n} h)" for n in range(1, 6))]
    assert task.lines[-1] == "The wait is over after 5 h 30 min"
    assert task.kept is None


def test_hours_in_which_no_task_looked_are_one_line() -> None:
    task = Task()
    task.looks(60)
    task.now += 3 * 3600
    assert task.looks(60) == ["paused by ann (waiting for 3 h 2 min)"]


def test_another_reason_is_another_wait() -> None:
    task = Task()
    assert task.looks(600) == ["paused by ann"]
    assert task.looks(600, by="bob") == ["paused by bob"]
    assert task.log().is_on


def test_each_log_has_the_first_line() -> None:
    task = Task()
    task.looks(600)
    task.attempt = 2
    assert not task.log().is_on
    assert task.looks(600) == ["paused by ann"]


def test_a_wait_that_never_began_has_no_end_and_a_clock_may_go_back() -> None:
    task = Task()
    task.log().over()
    assert task.lines == []
    task.log().waits("ann", "paused by ann")
    task.now -= 7200
    assert task.log().waits("ann", "paused by ann") == 0.0
    task.log().over()
    assert task.lines == ["paused by ann", "The wait is over after 0 s"]


def test_what_somebody_else_wrote_into_the_store_is_no_wait() -> None:
    task = Task()
    for kept in ("", 3, [], {}, {"by": 1}):
        task.kept = kept  # type: ignore[assignment]
        assert not task.log().is_on
