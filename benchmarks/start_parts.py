"""Where the time of a command goes: its points in time, and the parts between them. Measured by `benchmarks.start`.

The points come from the server's log (who sent which statement when), from the operation's events, and from the marks
in Spark's own log. All of them are of one machine's clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

# For `log_line_prefix`: the time with milliseconds, and the session's name.
PREFIX = "%n %a|"
# It cuts what is less off, which an event has.
TICK_S = 0.001
STATEMENT = re.compile(r"(\d+\.\d+) (.*?)\|LOG:  statement: (.*)")
WORKER = re.compile(r"roir \d+\.\d+ worker \d+ ")


@dataclass(frozen=True)
class Part:
    """What ends at a point. title: of the part; point: what is reached then; is_engine: PostgreSQL's work."""

    name: str
    title: str
    point: str
    is_engine: bool = False


# In the order in which one waits for them. From `driver` to `job` they are the marks of `spark.start_timings`.
PARTS = (
    Part("asked", "process and imports", "the first statement"),
    Part("prepared", "prepare", "prepared", True),
    Part("started", "until Airflow starts the task `build`", "the task `build` starts"),
    Part("task", "its process and imports", "its first statement"),
    Part("driver", "the driver's process", "the driver runs"),
    Part("java", "Java", "Java answers"),
    Part("session", "Spark's session", "Spark is up"),
    Part("python", "a first job in a Python worker", "a first job has run"),
    Part("begun", "the begin of the run", "the run has begun"),
    Part("job", "until a worker is submitted", "a worker is submitted"),
    Part("first", "until the worker's first statement", "the worker's first statement"),
    Part("built", "build", "the last statement of the build", True),
    Part("sealing", "between build and seal", "the first statement of the seal"),
    Part("sealed", "seal", "the last statement of the seal", True),
    Part("left", "until the task `build` has ended", "the task `build` has ended"),
    Part("folding", "between seal and fold", "the fold begins"),
    Part("published", "fold, verification, publish", "published", True),
    Part("ended", "until the end", "the end of the command or the run"),
)
# Points that no later part waits for: the fold may begin before.
BESIDE = {"done": "the last worker is heard out", "stopped": "Spark has ended"}
SUMS = {
    "all": "all of it",
    "besides": "besides the engine's phases",
    "first": "from the command to the first row",
}


@dataclass(frozen=True)
class Statement:
    """One statement that the server got. at: seconds since 1970; session: its name."""

    at: float
    session: str
    text: str


@dataclass(frozen=True)
class Event:
    """An event of the operation, in `roir.event`. at: seconds since 1970."""

    at: float
    action: str
    detail: str


def statements(log: str) -> list[Statement]:
    """The statements in the server's log; only the first line of a statement of several lines."""
    found = (STATEMENT.match(line) for line in log.splitlines())
    return [Statement(float(one[1]), one[2], one[3]) for one in found if one]


def points(
    begin: float,
    sent: Iterable[Statement],
    events: Iterable[Event],
    marks: Mapping[str, float],
    asking: str | None,
    building: str | None = None,
) -> dict[str, float]:
    """When each point was reached that is known, in seconds since 1970.

    asking: the name of the sessions of the command, or of the task that prepares; building: of the task that builds.
    """
    sent = [one for one in sent if one.at >= begin]
    events = [one for one in events if one.at >= begin]

    def event(action: str, detail: str = "") -> float | None:
        return next((one.at for one in events if one.action == action and one.detail.startswith(detail)), None)

    def of_workers(low: float | None, high: float | None) -> list[float]:
        low, high = inf if low is None else low, inf if high is None else high
        return [one.at for one in sent if WORKER.match(one.session) and low <= one.at <= high]

    prepared, sealing, sealed = event("prepare"), event("phase", "seal"), event("phase", "fold")
    of_command = [one for one in sent if one.session == asking]
    of_build, of_seal = of_workers(begin, sealing), of_workers(sealing, sealed)
    found = {
        "asked": next((one.at for one in of_command), None),
        "prepared": prepared
        and next((one.at for one in of_command if one.at > prepared - TICK_S and one.text == "COMMIT"), None),
        "task": next((one.at for one in sent if one.session == building), None),
        **{name: at for name, at in marks.items() if at >= begin},
        "first": min(of_build, default=None),
        "built": max(of_build, default=None) if sealing else None,
        "sealing": min(of_seal, default=None),
        "sealed": max(of_seal, default=None) if sealed else None,
        "folding": event("start", "in phase fold"),
        "published": event("publish"),
    }
    return {name: at for name, at in found.items() if at is not None}


def parts(begin: float, reached: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each part whose point is known; their sum is the whole.

    A part counts from the latest point of those before it: what runs beside an earlier part counts for what it adds.
    Where a point isn't known, its time is in the next part.
    """
    seconds: dict[str, float] = {}
    latest = begin
    for part in PARTS:
        if part.name in reached:
            seconds[part.name] = max(0.0, reached[part.name] - latest)
            latest = max(latest, reached[part.name])
    return seconds


def sums(seconds: Mapping[str, float]) -> dict[str, float]:
    """`all`, `besides` the engine's phases, and `first`: all parts, prepare too, until a worker's first statement."""
    names = [part.name for part in PARTS]
    until_first = names[: names.index("first") + 1]
    return {
        "all": sum(seconds.values()),
        "besides": sum(seconds.get(part.name, 0.0) for part in PARTS if not part.is_engine),
        "first": sum(seconds.get(name, 0.0) for name in until_first),
    }
