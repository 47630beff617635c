"""Reports the rows that share a key of a unique index: an XCom, and lines in the task's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_roir.engine.unique import duplicate_report
from airflow_roir.operation import BY_DUPLICATES

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.database import Database

# The XCom's value has index, operation_id, groups, rows, and the first groups.
XCOM = "duplicates"


def push_duplicates(database: Database, ti: RuntimeTaskInstanceProtocol, row: OperationRow) -> dict[str, Any] | None:
    """Pushes the numbers of duplicates, and the first ones; None, without a push, if the index isn't unique."""
    found, groups = duplicate_report.first(database, row.id)
    if not found.unique:
        return None
    summary = found.summary(groups)
    ti.xcom_push(XCOM, summary)
    return summary


def waits_for_healing(row: OperationRow) -> bool:
    """True if duplicates have paused an operation."""
    return bool(row.paused_by == BY_DUPLICATES)
