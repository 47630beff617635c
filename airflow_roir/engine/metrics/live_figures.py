"""The figures of one operation, for whoever sends them on while it runs: one statement that waits for nothing long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from airflow_roir.as_json import number
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import NotFound

# A task that is killed has five seconds to notice it.
PATIENCE_MS = 1_000

MEASURED = """
SELECT r.name, r.kind, r.percent_complete::float8 AS percent, r.rows, r.rows_per_second_now, r.seconds_left,
       r.parallelism, CASE WHEN o.status = 'running' THEN roir.granted(o) END AS granted,
       (SELECT jsonb_object_agg(t.cause, t.seconds) FROM roir.throttle_time t WHERE t.operation_id = o.id) AS throttled,
       coalesce(pg_stat_get_live_tuples(to_regclass(format('roir_data.g%%s_delta', o.generation_id))), 0) AS delta_rows
  FROM roir.resumable_operations r JOIN roir.operation o ON o.id = r.operation_id
 WHERE r.operation_id = %(operation)s
"""


@dataclass(frozen=True)
class Measured:
    """What `roir metrics` tells of an operation, as far as it changes while it runs. throttled: seconds by cause."""

    index: str
    kind: str
    percent: float
    rows: int
    rows_per_second: float | None
    seconds_left: float | None
    parallelism: int
    granted: float | None
    delta_rows: int
    throttled: Mapping[str, float]


def measure(database: Database, operation_id: int) -> Measured:
    """The operation's figures now. Raises NotFound, and what the database raises where it would have to wait."""
    with database.transaction() as connection:
        execute(connection, f"SET LOCAL statement_timeout = {PATIENCE_MS}; SET LOCAL lock_timeout = {PATIENCE_MS}")
        row = execute(connection, MEASURED, {"operation": operation_id}).first()
    if row is None:
        raise NotFound(f"there is no operation {operation_id}")
    return Measured(
        index=row.name,
        kind=row.kind,
        percent=row.percent,
        rows=row.rows,
        rows_per_second=number(row.rows_per_second_now),
        seconds_left=number(row.seconds_left),
        parallelism=row.parallelism,
        granted=row.granted,
        delta_rows=row.delta_rows,
        throttled=row.throttled or {},
    )
