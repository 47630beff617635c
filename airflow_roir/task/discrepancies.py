"""Logs the differences that a comparison found, in its task."""

from __future__ import annotations

from logging import Logger
from typing import TYPE_CHECKING

from airflow_roir.engine.verify.report import described

if TYPE_CHECKING:
    from airflow_roir.engine.verify.report import VerifyReport


def log_report(log: Logger, report: VerifyReport) -> None:
    """Logs the counts, the first few discrepancies, and where the others are."""
    log.info("Index %s compared with its table: %s", report.index, report)
    for one in report.first:
        log.warning("%s", described(one))
    if report.found > len(report.first):
        log.warning("… and more: see the table roir.discrepancy, verification %s", report.verification_id)
