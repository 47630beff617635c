"""Logs an operation's progress in its task's log, at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.engine.snapshot.words import figures
from airflow_roir.quantity import percent

# Often enough to show that it moves, seldom enough to keep the log of a night readable.
EVERY_S = 30.0


class Progress:
    """Reports an operation's progress, at most every `EVERY_S` seconds.

    read: returns the status; called only when it is time. say: takes the line. clock: seconds that never go back.
    before: the status when this stretch began: until something is committed, the rate of before isn't said again.
    """

    def __init__(
        self,
        read: Callable[[], OperationStatus],
        say: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        before: OperationStatus | None = None,
    ) -> None:
        self._before = before
        self._read = read
        self._say = say
        self._clock = clock
        self._last = clock()

    def turn(self) -> None:
        """Reports if it is time. Raises the errors of `read`; then the next turn tries again."""
        if self._clock() - self._last < EVERY_S:
            return
        self._say(progress_line(self._read(), self._before))
        self._last = self._clock()


def progress_line(status: OperationStatus, before: OperationStatus | None = None) -> str:
    """A line for people: `build: 43.4 %, 120,000 of about 300,000 rows, 1,785 rows/s, about 12 s left`.

    before: as in `Progress`.
    """
    held = [status.throttled] if status.throttled is not None else []
    return f"{status.phase_shown}: {', '.join([percent(status.percent_complete), *figures(status, before), *held])}"
