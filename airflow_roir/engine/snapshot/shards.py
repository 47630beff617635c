"""How far each shard of an index is: how much of it an operation has read, and how far its part of the index is behind.

All of this is in the control schema; no shard is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.as_json import plain_fields
from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.database import execute
from airflow_roir.quantity import duration

# Each shipper of a database holds this lock, shared; so its holders can be counted.
PRESENT = 1919904115  # 'rois'
# The locks of the shippers, as `l`.
SHIPPERS = f"""
pg_locks l
 WHERE l.locktype = 'advisory' AND l.classid = {PRESENT} AND l.objid = 1 AND l.granted
   AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
"""
LAGS = f"""
SELECT v.schema_name, v.index, v.shard, v.generation, v.fresh_at, extract(epoch FROM v.lag)::float8 AS lag_s, v.pending,
       v.pending_bytes, extract(epoch FROM v.oldest_age)::float8 AS oldest_s, v.shipped, v.shipper, v.problem, v.doubt,
       v.feed_id, v.index_id, v.generation_id, (SELECT count(*) FROM {SHIPPERS}) AS shippers
  FROM roir.shard_lag v
 WHERE (%(indexes)s::bigint[] IS NULL OR v.index_id = ANY (%(indexes)s))
 ORDER BY v.schema_name, v.index, v.generation_id DESC, v.shard
"""
# A verification has no ranges. shipper: as in roir.shard_lag.
PROGRESS = """
SELECT s.name AS shard, s.problem, l.doubt, l.captured_at IS NOT NULL AS captured,
       coalesce(r.ranges, 0) AS ranges, coalesce(r.done, 0) AS ranges_done, coalesce(r.rows, 0)::bigint AS rows,
       coalesce(r.readers, 0) AS readers, extract(epoch FROM clock_timestamp() - l.fresh_at)::float8 AS lag_seconds,
       l.pending, abs(extract(epoch FROM clock_timestamp() - l.heartbeat_at)) < 10 AS is_shipped
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
  LEFT JOIN (SELECT shard_id, count(*) AS ranges, count(*) FILTER (WHERE done) AS done, sum(rows) AS rows,
                    count(*) FILTER (WHERE NOT done AND claim_epoch = %(epoch)s) AS readers
               FROM roir.scan_range WHERE operation_id = %(operation)s GROUP BY shard_id) r ON r.shard_id = s.id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
 ORDER BY s.name
"""


@dataclass(frozen=True)
class ShardStanding:
    """One shard of an operation.

    problem: why roir can't work with the shard now. captured: its writers leave their changes in the outbox. readers:
    workers that hold ranges of it. lag_seconds: commits of the shard that are at least this old are in the generation;
    None: it wasn't shipped to the end yet. pending: rows to ship, about. is_shipped: a shipper has it now.
    """

    shard: str
    problem: str | None
    doubt: str | None
    captured: bool
    ranges: int
    ranges_done: int
    rows: int
    readers: int
    lag_seconds: float | None
    pending: int | None
    is_shipped: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return plain_fields(self)


def standing(connection: Connection, operation_id: int, generation_id: int, epoch: int) -> tuple[ShardStanding, ...]:
    """All shards of an operation by name; none if its source is in this database."""
    values = {"operation": operation_id, "generation": generation_id, "epoch": epoch}
    return tuple(
        ShardStanding(**{**row._mapping, "is_shipped": bool(row.is_shipped)})
        for row in execute(connection, PROGRESS, values)
    )


@dataclass(frozen=True)
class ShardLag:
    """One shard's part of one generation, as `roir.shard_lag` has it. Seconds are by the index server's clock.

    `as_dict` says what the fields mean.
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
    feed_id: int
    index_id: int
    shippers: int = 0

    @classmethod
    def of(cls, row: Row[Any]) -> ShardLag:
        """The lag by a row of the view."""
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
            row.feed_id,
            row.index_id,
            row.shippers,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON.

        shard: its name.
        generation: the state of the generation.
        lag_seconds: commits of the shard that are at least this old are in the index; null: not shipped to the end yet.
        pending, pending_bytes, oldest_seconds: rows to ship, about; the size of the outbox; the age of the oldest row.
        shipped: rows that were shipped to this generation.
        shipper, shippers: the shipper that has the shard now; how many shippers run in this database, for any shards.
        problem: why roir can't work with the shard.
        doubt: why entries of the shard may be wrong.
        """
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
        behind = "not shipped to the end yet" if self.lag_s is None else f"{seconds(self.lag_s)} behind"
        pending = f", {self.pending:,} rows to ship" if self.pending else ""
        return f"shard {quote(self.shard)}: {behind}{pending}{self._alone()}"

    def _alone(self) -> str:
        if self.shipper:
            return ""
        # Shippers give up a shard that they can't work with.
        if self.problem:
            return ", and has no shipper"
        if self.shippers:
            return ", and no shipper that runs has taken it yet"
        return ", and has no shipper: roir ship"


def lags(connection: Connection, indexes: Sequence[int] | None = None) -> list[ShardLag]:
    """The lags of the shards of all indexes over shards, or of these indexes."""
    values = {"indexes": None if indexes is None else list(indexes)}
    return [ShardLag.of(row) for row in execute(connection, LAGS, values)]


def seconds(value: float) -> str:
    """`1.2 s`; from a minute on `5 min`."""
    return f"{value:.1f} s" if value < 60 else duration(value)
