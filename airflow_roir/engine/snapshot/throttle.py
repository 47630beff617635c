"""An operation's throttle, the time lost to it, and the readings of each signal: for the page and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.parts import Lost, Point, SignalHistory, Throttle
from airflow_roir.one_line import one_line
from airflow_roir.quantity import lost
from airflow_roir.signals import SIGNALS, Reading

if TYPE_CHECKING:
    from airflow_roir.engine.snapshot.operation import OperationStatus

# The most points of one signal: a chart isn't wider.
MOST_POINTS = 120
# The database keeps some hundreds of samples.
MOST_SAMPLES = 500
MOST_SAID = 500

SAMPLES = """
SELECT extract(epoch FROM s.at)::float8 AS at, s.granted, s.readings FROM roir.signal_sample s
 WHERE s.operation_id = %(operation)s ORDER BY s.at DESC LIMIT %(most)s
"""


def read_throttle(connection: Connection, one: OperationStatus) -> Throttle | None:
    """The throttle of an operation; None if it has no limits, samples and lost time."""
    found = execute(connection, SAMPLES, {"operation": one.operation_id, "most": MOST_SAMPLES}).all()[::-1]
    limits = one.options["throttle"] or ""
    if not (limits or one.throttle_seconds or one.throttled or found):
        return None
    worked = max(one.total_execution_time, 0.001)
    causes = sorted(one.throttle_seconds.items(), key=lambda item: -item[1])
    limited = {item.partition("=")[0] for item in limits.split()}
    names = sorted(limited | {name for one in found for name in one.readings})
    return Throttle(
        limits=limits,
        throttled=one.throttled,
        since=one.throttled_since,
        granted=one.granted,
        lost=tuple(Lost(cause, float(s), round(min(float(s) / worked, 1.0), 4)) for cause, s in causes),
        signals=tuple(_history(name, found, name in limited) for name in names if name in SIGNALS),
        grants=tuple((some[-1].at, min(one.granted for one in some)) for some in _groups(found)),
    )


def lost_line(database: Database, operation_id: int) -> str:
    """A line with the time that an operation has lost to its throttle; '' if none."""
    query = "SELECT cause, seconds FROM roir.throttle_time WHERE operation_id = %(operation)s"
    with database.transaction() as connection:
        rows = execute(connection, query, {"operation": operation_id}).all()
    # Less than a second isn't worth a mention.
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
    """How bad a reading is; a signal that couldn't be read is the worst."""
    if reading["value"] is None:
        return float("inf")
    return Reading(SIGNALS[name], reading["limit"], reading["value"]).load


def _groups(items: Sequence[Any]) -> list[Sequence[Any]]:
    """The items in groups of neighbours, at most `MOST_POINTS`; the page shows the worst of each group."""
    each = -(-len(items) // MOST_POINTS) or 1
    return [items[n : n + each] for n in range(0, len(items), each)]
