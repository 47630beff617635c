"""Marks the points of a driver's start in Spark's own log, which `make bench-start` reads."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

# `driver`: the process runs; `java`: its JVM answers; `session`: Spark is up; `python`: a first job has run in a Python
# worker; `begun`: the run has begun in the database; `job`: its first worker is submitted; `done`: the results of its
# last one are read; `stopped`: Spark has ended.
MARKS = ("driver", "java", "session", "python", "begun", "job", "done", "stopped")
PREFIX = "roir-start"


class _Marks:
    is_on = False


def turn_on() -> None:
    """Turns marks on: standard error is Spark's own log now, not the stream of the user's lines."""
    _Marks.is_on = True


def mark(name: str) -> None:
    """Notes that a point is reached: `roir-start java 1700000000.123`, the seconds since 1970."""
    if _Marks.is_on:
        # A full disk is no reason to end.
        with suppress(OSError):
            print(f"{PREFIX} {name} {time.time():.3f}", file=sys.stderr, flush=True)  # noqa: T201


def read_marks(log: str) -> dict[str, float]:
    """The first time of each mark, from the text of a log of one start."""
    times: dict[str, float] = {}
    for line in log.splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == PREFIX:
            times.setdefault(words[1], float(words[2]))
    return times
