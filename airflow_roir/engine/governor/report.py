"""What an operation's throttle is, what it has cost, and what was read of each signal: for the page and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.as_json import number
from airflow_roir.engine.database import Database, execute
from airflow_roir.one_line import one_line
from airflow_roir.quantity import lost
from airflow_roir.signals import SIGNALS, Reading

# Of each signal: a chart is no wider.
MOST_POINTS = 120
# The database keeps some hundreds.
MOST_SAMPLES = 500
MOST_SAID = 500

SAMPLES = """
SELECT extract(epoch FROM s.at)::float8 AS at, s.granted, s.readings FROM roir.signal_sample s
 WHERE s.operation_id = %(operation)s ORDER BY s.at DESC LIMIT %(most)s
"""


@dataclass(frozen=True)
class Lost:
    """share: of the time that the operation has worked."""

    cause: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Point:
    """value: None if it couldn't be read. of: whose it is, of several replicas the worst."""

    at: float
    value: float | None
    limit: float
    of: str | None


@dataclass(frozen=True)
class SignalHistory:
    """One signal. below: it is bad below its limit. problem: why it can't be read now. has_limit: still."""

    name: str
    unit: str
    per: str
    below: bool
    stops: bool
    has_limit: bool
    problem: str | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Throttle:
    """limits: as users write them, '' for none. throttled: why it may not work as it could, since when; granted: how
    many workers may work, both None if all. grants: unix seconds, workers.
    """

    limits: str
    throttled: str | None
    since: datetime | None
    granted: float | None
    lost: tuple[Lost, ...]
    signals: tuple[SignalHistory, ...]
    grants: tuple[tuple[float, float], ...]


def read_throttle(connection: Connection, row: Row[Any]) -> Throttle | None:
    """Of an operation, whose row of the view `roir.resumable_operations` it is; None if there is nothing to tell."""
    found = execute(connection, SAMPLES, {"operation": row.operation_id, "most": MOST_SAMPLES}).all()[::-1]
    if not (row.throttle or row.throttle_seconds or row.throttled or found):
        return None
    worked = max(float(row.total_execution_time), 0.001)
    causes = sorted(row.throttle_seconds.items(), key=lambda item: -item[1])
    limits = row.throttle or ""
    limited = {item.partition("=")[0] for item in limits.split()}
    names = sorted(limited | {name for one in found for name in one.readings})
    return Throttle(
        limits=limits,
        throttled=None if row.throttled is None else one_line(row.throttled, MOST_SAID),
        since=row.throttled_since,
        granted=number(row.granted),
        lost=tuple(Lost(cause, float(s), round(min(float(s) / worked, 1.0), 4)) for cause, s in causes),
        signals=tuple(_history(name, found, name in limited) for name in names if name in SIGNALS),
        grants=tuple((some[-1].at, min(one.granted for one in some)) for some in _groups(found)),
    )


def lost_line(database: Database, operation_id: int) -> str:
    """What an operation has lost to its throttle, as a line; '' if nothing."""
    query = "SELECT cause, seconds FROM roir.throttle_time WHERE operation_id = %(operation)s"
    with database.transaction() as connection:
        rows = execute(connection, query, {"operation": operation_id}).all()
    # What takes less than the line is no news.
    return lost({row.cause: row.seconds for row in rows if row.seconds >= 1})


def _history(name: str, found: Sequence[Row[Any]], has_limit: bool) -> SignalHistory:
    signal = SIGNALS[name]
    samples = [(one.at, one.readings[name]) for one in found if name in one.readings]
    points = []
    for some in _groups(samples):
        at, worst = max(some, key=lambda one: _badness(name, one[1]))
        of = worst.get("of")
        points.append(Point(at, worst["value"], worst["limit"], None if of is None else one_line(of, MOST_SAID)))
    problem = samples[-1][1].get("problem") if samples and has_limit else None
    return SignalHistory(
        name=name,
        unit=signal.unit,
        per=signal.per,
        below=signal.below,
        stops=signal.stops,
        has_limit=has_limit,
        problem=None if problem is None else one_line(problem, MOST_SAID),
        points=tuple(points),
    )


def _badness(name: str, reading: dict[str, Any]) -> float:
    """What couldn't be read is the worst."""
    if reading["value"] is None:
        return float("inf")
    return Reading(SIGNALS[name], reading["limit"], reading["value"]).load


def _groups(items: Sequence[Any]) -> list[Sequence[Any]]:
    """Neighbours, so that there are few: of each group the page shows the worst."""
    each = -(-len(items) // MOST_POINTS) or 1
    return [items[n : n + each] for n in range(0, len(items), each)]
