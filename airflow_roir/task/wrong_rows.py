"""Reports the rows that a task found wrong: duplicates of a unique index, and rows that differ from their entries."""

from __future__ import annotations

from logging import Logger
from typing import TYPE_CHECKING, Any

from airflow_roir.engine.unique import duplicate_report
from airflow_roir.engine.verify.report import described
from airflow_roir.operation import BY_DUPLICATES

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.control.operations import OperationRow
    from airflow_roir.engine.database import Database
    from airflow_roir.engine.verify.report import VerifyReport

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


def log_report(log: Logger, report: VerifyReport) -> None:
    """Logs the counts, the first few discrepancies, and where the others are."""
    log.info("Index %s compared with its table: %s", report.index, report)
    for one in report.first:
        log.warning("%s", described(one))
    if report.found > len(report.first):
        log.warning("… and more: see the table roir.discrepancy, verification %s", report.verification_id)
    for line in report.warnings:
        log.warning("%s", line)
