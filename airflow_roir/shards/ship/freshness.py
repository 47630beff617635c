"""How far a shard's part of an index is behind, and who is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.quantity import duration
from airflow_roir.shards.ship.lanes import SHIPPERS

LAGS = f"""
SELECT v.schema_name, v.index, v.shard, v.generation, v.fresh_at, extract(epoch FROM v.lag)::float8 AS lag_s, v.pending,
       v.pending_bytes, extract(epoch FROM v.oldest_age)::float8 AS oldest_s, v.shipped, v.shipper, v.problem, v.doubt,
       v.lane_id, v.index_id, v.generation_id, (SELECT count(*) FROM {SHIPPERS}) AS shippers
  FROM roir.shard_lag v
 WHERE (%(indexes)s::bigint[] IS NULL OR v.index_id = ANY (%(indexes)s))
 ORDER BY v.schema_name, v.index, v.generation_id DESC, v.shard
"""
NOT_CAUGHT_UP = """
SELECT s.name, s.problem, l.pending, l.fresh_at > %(began)s AS fresh
  FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
   AND (l.fresh_at > %(began)s AND l.pending <= %(few)s) IS NOT TRUE
 ORDER BY s.name
"""
UNFIT = """
SELECT s.name, l.doubt, l.captured_at IS NULL AS uncaptured
  FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
   AND (l.captured_at IS NOT NULL AND l.doubt IS NULL
        AND l.fresh_at > clock_timestamp() - make_interval(secs => %(lag)s)) IS NOT TRUE
 ORDER BY s.name LIMIT 1
"""


@dataclass(frozen=True)
class ShardLag:
    """One shard's part of one generation, as `roir.shard_lag` has it. Seconds are by the index server's clock.

    lag_s: all that was committed in the shard so long ago is in the index; None: not shipped to the end yet. shipper:
    who has it now; shippers: how many run in this database, maybe for other shards alone.
    """

    index: str
    shard: str
    generation: str
    lag_s: float | None
    pending: int | None
    pending_bytes: int | None
    oldest_s: float | None
    shipped: int
    shipper: str | None
    problem: str | None
    doubt: str | None
    lane_id: int
    index_id: int
    shippers: int = 0

    @classmethod
    def of(cls, row: Row[Any]) -> ShardLag:
        """Of a row of the view."""
        name = str(QualifiedName(row.schema_name, row._mapping["index"]))
        return cls(
            name,
            row.shard,
            row.generation,
            row.lag_s,
            row.pending,
            row.pending_bytes,
            row.oldest_s,
            row.shipped,
            row.shipper,
            row.problem,
            row.doubt,
            row.lane_id,
            row.index_id,
            row.shippers,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shard": self.shard,
            "generation": self.generation,
            "lag_seconds": self.lag_s,
            "pending": self.pending,
            "pending_bytes": self.pending_bytes,
            "oldest_seconds": self.oldest_s,
            "shipped": self.shipped,
            "shipper": self.shipper,
            "shippers": self.shippers,
            "problem": self.problem,
            "doubt": self.doubt,
        }

    def __str__(self) -> str:
        """`shard s1: 1.2 s behind, 40 rows to ship`."""
        behind = "not shipped to the end yet" if self.lag_s is None else f"{_seconds(self.lag_s)} behind"
        pending = f", {self.pending:,} rows to ship" if self.pending else ""
        return f"shard {quote(self.shard)}: {behind}{pending}{self._alone()}"

    def _alone(self) -> str:
        if self.shipper:
            return ""
        # No shipper keeps a shard that it can't work with.
        if self.problem:
            return ", and has no shipper"
        if self.shippers:
            return ", and no shipper that runs has taken it yet"
        return ", and has no shipper: roir ship"


def lags(connection: Connection, indexes: Sequence[int] | None = None) -> list[ShardLag]:
    """Of all shards and indexes apart, or of these indexes."""
    values = {"indexes": None if indexes is None else list(indexes)}
    return [ShardLag.of(row) for row in execute(connection, LAGS, values)]


def unfit(connection: Connection, generation_id: int, lag_s: float) -> str | None:
    """Why a generation can't be shown: a shard that isn't captured, in doubt, or more than `lag_s` behind."""
    row = execute(connection, UNFIT, {"generation": generation_id, "lag": lag_s}).first()
    if row is None:
        return None
    if row.uncaptured:
        return f"shard {quote(row.name)} isn't captured yet"
    if row.doubt is not None:
        return f"{row.doubt}. Abort the operation and start again"
    return f"shard {quote(row.name)} was not shipped within {_seconds(lag_s)} (--max-lag)"


class Alarm:
    """Tells once of each lane that is too far behind, by an event and a line, and once that it isn't any more.

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
                now[lag.lane_id] = line = f"index {lag.index}: {lag}"
                if lag.lane_id not in self.behind:
                    operations.record_event(connection, lag.index_id, None, actor, "behind", line)
                    lines.append(line)
            elif lag.lane_id in self.behind:
                lines.append(f"index {lag.index}: shard {quote(lag.shard)} has caught up")
                operations.record_event(connection, lag.index_id, None, actor, "caught up", lines[-1])
        self.behind = now
        return lines


class Waiting:
    """What a generation lacks to be published: since when all must have been shipped, and what is left of that."""

    def __init__(self, connection: Connection, generation_id: int) -> None:
        self.generation_id = generation_id
        self.began = execute(connection, "SELECT clock_timestamp()").scalar_one()
        counted = "SELECT count(*) FROM roir.lane WHERE generation_id = %(id)s AND removed_at IS NULL"
        self.lanes = int(execute(connection, counted, {"id": generation_id}).scalar_one())

    def doubt(self, connection: Connection) -> str | None:
        """Why entries of a shard may be wrong, if they may."""
        query = "SELECT min(doubt) FROM roir.lane WHERE generation_id = %(id)s AND removed_at IS NULL"
        found: str | None = execute(connection, query, {"id": self.generation_id}).scalar_one()
        return found

    def left(self, connection: Connection, few: int) -> str | None:
        """Whom it waits for; None if every lane has been shipped to its end since, and has few rows left."""
        values = {"generation": self.generation_id, "began": self.began, "few": few}
        found = execute(connection, NOT_CAUGHT_UP, values).all()
        if not found:
            return None
        told = [f"{quote(row.name)} ({row.problem})" if row.problem else f"{quote(row.name)}" for row in found[:5]]
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        return f"waiting for what shards have to ship: {', '.join(told)}{more}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else duration(value)
