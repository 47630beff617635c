"""The facts of a publish in its asset event and in the lineage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time.context import InletEventsAccessor

from airflow_roir.definition import QualifiedName
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.verify.report import report_of
from airflow_roir.errors import NotFound

if TYPE_CHECKING:
    from airflow.sdk import Asset

    from airflow_roir.engine.database import Database

PARTS = """
SELECT i.schema_name, i.name, n.nspname AS source_schema, c.relname AS source_name, o.generation_id, i.shard_table
  FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
  LEFT JOIN pg_class c ON c.oid = i.source_oid::oid LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE o.id = %(operation)s
"""
# The lock: two runs that share the operation announce it one after the other.
SHOWN = """
SELECT o.index_id, g.status = 'active' AS is_shown
  FROM roir.operation o JOIN roir.generation g ON g.id = o.generation_id WHERE o.id = %(operation)s FOR UPDATE OF o
"""
ANNOUNCERS = "SELECT actor FROM roir.event WHERE operation_id = %(operation)s AND action = 'announce' ORDER BY id"
# The newest events of an index to look at: the event of the generation that readers see is almost always the newest.
EVENTS = 20
COUNTS = ("rows", "missing", "extra", "different", "corrupt", "damaged", "duplicate", "repaired")


def claim_announcement(
    database: Database, operation_id: int, run: str, was_sent: Callable[[], bool] = lambda: False
) -> str | None:
    """Records that this run announces the publish of an operation; returns the reason, in words, if it may not.

    A run may announce it again unless the event `was_sent`: Airflow sends it with the task's success, which a mark, a
    timeout or a kill can have prevented. Raises NotFound.
    """
    with database.transaction() as connection:
        row = execute(connection, SHOWN, {"operation": operation_id}).first()
        if row is None:
            raise operations.no_operation(connection, operation_id)
        if not row.is_shown:
            return "readers see another generation by now"
        before = execute(connection, ANNOUNCERS, {"operation": operation_id}).scalars().all()
        if before and run not in before:
            return f"{before[0]} has announced it"
        if not before:
            operations.record_event(connection, row.index_id, operation_id, run, "announce")
    return "an earlier try of this run has sent it" if before and was_sent() else None


def has_event(asset: Asset, facts: dict[str, Any]) -> bool:
    """True if Airflow has the event of that publish; False also if that isn't known, as outside of a task's process."""
    parts = ("operation_id", "generation_id")
    try:
        newest = InletEventsAccessor(asset_name=asset.name, asset_uri=asset.uri).ascending(False).limit(EVENTS)
        return any(all(event.extra.get(part) == facts[part] for part in parts) for event in newest)
    except (AirflowRuntimeError, ImportError):
        return False


def published_facts(database: Database, operation_id: int) -> dict[str, Any]:
    """The metadata of a publish's asset event, for JSON: names as SQL, `seconds` of work without pauses.

    `verified` has the counts of the comparison after the build, None if there was none. `source` is None if the table
    was dropped meanwhile. Raises NotFound.
    """
    with database.transaction() as connection:
        row = execute(connection, PARTS, {"operation": operation_id}).first()
        if row is None:
            raise operations.no_operation(connection, operation_id)
    now = operation_status(database, operation_id)
    verified = None
    try:
        report = report_of(database, operation_id)
    except NotFound:
        pass
    else:
        verified = {name: getattr(report, name) for name in COUNTS}
    return {
        "index": str(QualifiedName(row.schema_name, row.name)),
        # The shape table isn't a data set.
        "source": row.shard_table or (row.source_name and str(QualifiedName(row.source_schema, row.source_name))),
        "kind": now.kind,
        "operation_id": operation_id,
        "generation_id": row.generation_id,
        "rows": now.rows,
        "seconds": round(now.total_execution_time, 3),
        "verified": verified,
    }
