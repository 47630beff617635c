"""How each shard of an operation stands, for the page of the build: what is read of it, how far it is behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.as_json import plain_fields
from airflow_roir.engine.database import execute

# Of a verification there are no ranges. shipper: as in roir.shard_lag.
PROGRESS = """
SELECT s.name AS shard, s.problem, l.doubt, l.captured_at IS NOT NULL AS captured,
       coalesce(r.ranges, 0) AS ranges, coalesce(r.done, 0) AS ranges_done, coalesce(r.rows, 0)::bigint AS rows,
       coalesce(r.readers, 0) AS readers, extract(epoch FROM clock_timestamp() - l.fresh_at)::float8 AS lag_seconds,
       l.pending, abs(extract(epoch FROM clock_timestamp() - l.heartbeat_at)) < 10 AS is_shipped
  FROM roir.lane l JOIN roir.shard s ON s.id = l.shard_id
  LEFT JOIN (SELECT shard_id, count(*) AS ranges, count(*) FILTER (WHERE done) AS done, sum(rows) AS rows,
                    count(*) FILTER (WHERE NOT done AND claim_epoch = %(epoch)s) AS readers
               FROM roir.scan_range WHERE operation_id = %(operation)s GROUP BY shard_id) r ON r.shard_id = s.id
 WHERE l.generation_id = %(generation)s AND l.removed_at IS NULL
 ORDER BY s.name
"""


@dataclass(frozen=True)
class ShardStanding:
    """One shard of an operation.

    problem: why it can't be worked with now. captured: its writers leave what they change in the outbox. readers: the
    workers that hold ranges of it. lag_seconds: what was committed there so long ago is in the generation; None: it
    wasn't shipped to the end yet. pending: rows to ship, about. is_shipped: a shipper has it now.
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
    """All shards of an operation, by their names; none if its source is in this database."""
    values = {"operation": operation_id, "generation": generation_id, "epoch": epoch}
    return tuple(
        ShardStanding(**{**row._mapping, "is_shipped": bool(row.is_shipped)})
        for row in execute(connection, PROGRESS, values)
    )
