"""Measures how far a shard's part of an index is behind, and warns about it."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.snapshot.shards import lags, seconds

UNFIT = """
SELECT s.name, l.doubt, l.captured_at IS NULL AS uncaptured
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
   AND (l.captured_at IS NOT NULL AND l.doubt IS NULL
        AND l.fresh_at > clock_timestamp() - make_interval(secs => %(lag)s)) IS NOT TRUE
 ORDER BY s.name LIMIT 1
"""


def unfit(connection: Connection, generation_id: int, lag_s: float) -> str | None:
    """Why a generation can't be shown: a shard that isn't captured, in doubt, or more than `lag_s` behind."""
    row = execute(connection, UNFIT, {"generation": generation_id, "lag": lag_s}).first()
    if row is None:
        return None
    if row.uncaptured:
        return f"shard {quote(row.name)} isn't captured yet"
    if row.doubt is not None:
        return f"{row.doubt}. Abort the operation and start again"
    return f"shard {quote(row.name)} was not shipped within {seconds(lag_s)} (--max-lag)"


class Alarm:
    """Reports each feed that gets too far behind, and each that has caught up: once, by an event and a line.

    age_s, rows: the limits; None: none.
    """

    def __init__(self, age_s: float | None = None, rows: int | None = None) -> None:
        self.age_s = age_s
        self.rows = rows
        self.behind: dict[int, str] = {}

    def look(self, connection: Connection, actor: str) -> list[str]:
        """The lines that are new. Writes the events in the caller's transaction."""
        lines, now = [], {}
        for lag in lags(connection):
            if lag.generation != "active":
                continue
            too_old = self.age_s is not None and (lag.lag_s is None or lag.lag_s > self.age_s)
            too_many = self.rows is not None and (lag.pending or 0) > self.rows
            if too_old or too_many:
                now[lag.feed_id] = line = f"index {lag.index}: {lag}"
                if lag.feed_id not in self.behind:
                    operations.record_event(connection, lag.index_id, None, actor, "behind", line)
                    lines.append(line)
            elif lag.feed_id in self.behind:
                lines.append(f"index {lag.index}: shard {quote(lag.shard)} has caught up")
                operations.record_event(connection, lag.index_id, None, actor, "caught up", lines[-1])
        self.behind = now
        return lines
