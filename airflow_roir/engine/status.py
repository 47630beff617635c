"""The state of operations, for people and programs; every number is derived from committed rows (I9)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import parse_name
from airflow_roir.engine import health, operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.lock_waits import LockWait, lock_waits
from airflow_roir.engine.schema import check_schema
from airflow_roir.operation import Phase


@dataclass(frozen=True)
class OperationStatus:
    """One operation. Durations in seconds: total_execution_time counts neither pauses nor Spark's start-up.

    seconds_left and rows_per_second are None if there is nothing yet to derive them from. notice: whom it
    waits for, or the last option that was refused. warnings: of the published index (`health`), by `status` only.
    """

    index: str
    operation_id: int
    kind: str
    status: str
    phase: str
    percent_complete: float
    rows: int
    rows_estimate: int
    rows_per_second: float | None
    seconds_left: float | None
    total_execution_time: float
    phase_seconds: dict[str, float]
    parallelism: int
    batch_rows: int
    max_rows_per_second: int | None
    ranges_done: int
    ranges: int
    segments_sealed: int
    segments: int
    owner: str | None
    started_at: datetime
    paused_at: datetime | None
    finished_at: datetime | None
    pause_reason: str | None
    paused_by: str | None
    error: str | None
    notice: str | None
    partitions_gone: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: moments in ISO 8601."""
        return {
            name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(self).items()
        }


QUERY = "SELECT * FROM roir.resumable_operations WHERE operation_id = ANY (%(ids)s) ORDER BY name"


def status(database: Database, index: str | None = None) -> list[OperationStatus]:
    """The latest operation of one index, or of every live index, with what is wrong with the published indexes.

    Raises NotFound, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        if index is not None:
            ids = [operations.live_or_last(connection, parse_name(index, "index")).id]
        else:
            ids = list(
                execute(
                    connection,
                    "SELECT max(o.id) FROM roir.operation o JOIN roir.index i ON i.id = o.index_id "
                    "WHERE i.dropped_at IS NULL GROUP BY i.id",
                ).scalars()
            )
        return [
            replace(one, warnings=tuple(health.warnings(connection, one.operation_id)))
            for one in _read(connection, ids)
        ]


def waiting(database: Database, index: str | None = None) -> list[LockWait]:
    """Who of us waits for a lock, of one index or of all: also where there is no operation yet."""
    with database.transaction() as connection:
        check_schema(connection)
        waits = lock_waits(connection)
    name = None if index is None else parse_name(index, "index")
    return [one for one in waits if name is None or one.is_for(name)]


def operation_status(database: Database, operation_id: int) -> OperationStatus:
    """The status of one operation. Raises NotFound."""
    with database.transaction() as connection:
        operations.read_operation(connection, operation_id)
        return _read(connection, [operation_id])[0]


# Partitions whose entries the readers of the index still see.
GONE = """
SELECT o.id, array_agg(c.name ORDER BY c.name)::text[] AS names
  FROM roir.operation o
  JOIN roir.generation g ON g.index_id = o.index_id AND g.status = 'active'
  JOIN roir.index i ON i.id = g.index_id
 CROSS JOIN LATERAL roir.partition_changes(g.id, i.source_oid::oid) c
 WHERE o.id = ANY (%(ids)s) AND c.gone GROUP BY o.id
"""


def _read(connection: Connection, ids: list[int]) -> list[OperationStatus]:
    gone = {row.id: tuple(row.names) for row in execute(connection, GONE, {"ids": ids})}
    return [
        OperationStatus(
            index=row.name,
            operation_id=row.operation_id,
            kind=row.kind,
            status=row.state,
            phase=Phase(row.phase).value,
            percent_complete=float(row.percent_complete),
            rows=row.rows,
            rows_estimate=row.rows_estimate,
            rows_per_second=None if row.rows_per_second is None else float(row.rows_per_second),
            seconds_left=None if row.seconds_left is None else float(row.seconds_left),
            total_execution_time=float(row.total_execution_time),
            phase_seconds=dict(row.phase_seconds),
            parallelism=row.parallelism,
            batch_rows=row.batch_rows,
            max_rows_per_second=row.max_rows_per_second,
            ranges_done=row.ranges_done,
            ranges=row.ranges,
            segments_sealed=row.segments_sealed,
            segments=row.segments,
            owner=row.owner,
            started_at=row.start_time,
            paused_at=row.last_pause_time,
            finished_at=row.finish_time,
            pause_reason=row.pause_reason,
            paused_by=row.paused_by,
            error=row.error,
            notice=row.notice,
            partitions_gone=gone.get(row.operation_id, ()),
        )
        for row in execute(connection, QUERY, {"ids": ids})
    ]
