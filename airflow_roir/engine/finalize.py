"""Fold and publish as phases: the steps before and after their pieces.

Before the fold the capture is switched; a census ends there instead. Before the publish the comparison with the table
is cut into units; the phase ends with the publish itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from airflow_roir.definition import argument
from airflow_roir.engine import abort, fold, switch
from airflow_roir.engine import publish as publishing
from airflow_roir.engine.apart import apart
from airflow_roir.engine.control.run import Report, Run, read_control
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.feeds import is_apart
from airflow_roir.engine.unique import census, duplicate_report
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify import report as reports
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, VerificationFailed
from airflow_roir.operation import Phase


def _before_fold(database: Database, run: Run, report: Report) -> bool:
    """Ends a census here, without a fold. Otherwise switches the capture and cuts the delta into parts."""
    row, is_over_shards = persist(database, run, lambda: _read(database, run), report)
    if row.options.get("census"):
        census.conclude(database, run, report)
        _remove(database, run, report)
        return False
    if is_over_shards:
        persist(database, run, lambda: apart().catch_up(database, run, report), report)
    # Duplicates of earlier phases are listed already.
    before = persist(database, run, lambda: duplicate_report.last_id(database, run.operation_id), report)
    try:
        persist(database, run, lambda: switch.switch(database, run, report), report)
    except DuplicatesFound:
        for line in duplicate_report.first_lines(database, run.operation_id, before):
            report(line)
        raise
    persist(database, run, lambda: fold.begin(database, run), report)
    return True


def _remove(database: Database, run: Run, report: Report) -> None:
    """Remove the tables that a census has built."""
    try:
        abort.finish_abort(database, run.operation_id, run.owner, report, patience_s=60.0)
    except LockNotAcquired as error:
        report(f"the census's entries stay until the next clean-up removes them ({error}): roir clean-up")


def _before_publish(database: Database, run: Run, report: Report) -> bool:
    """Cuts the comparison of the new generation with the table into units, if it is to be verified."""
    row, is_over_shards = persist(database, run, lambda: _read(database, run), report)
    if _is_verified(row):
        if not is_over_shards:
            persist(database, run, lambda: switch.follow_partitions(database, run, report), report)
        comparing.begin_of_build(database, run, report)
    return True


def _publish(database: Database, run: Run, report: Report) -> None:
    """Publish, once the comparison has ended and found no difference. Raises VerificationFailed."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.PUBLISH:
            return
        is_over_shards = is_apart(connection, row.generation_id)
        last = record.last(connection, run.operation_id) if _is_verified(row) else None
    if last is not None:
        if last.finished_at is None:
            comparing.finish(database, run)
        with database.transaction() as connection:
            if record.is_open(connection, last.id):
                return
        found = reports.report(database, last.id)
        report(f"compared with the table: {found}")
        if not found.is_exact:
            again = argument(run.index)
            raise VerificationFailed(
                f"index {run.index}: the new generation differs from its table ({found}); nothing was published. See "
                f"the table roir.discrepancy, verification {found.verification_id}. Then compare again (roir resume "
                f"{again}), or abort (roir abort {again})"
            )
    if is_over_shards:
        apart().before_publish(database, run, row.generation_id, report)
    publishing.publish(database, run, report)


def _is_verified(row: Any) -> bool:
    return row.options.get("verify", "after") in ("after", "both")


def _read(database: Database, run: Run) -> tuple[Any, bool]:
    """The operation's row, and whether its index is over shards."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        return row, is_apart(connection, row.generation_id)


FOLD = replace(fold.PHASE, before=_before_fold)
PUBLISH = replace(
    comparing.phase(Phase.PUBLISH, "compares the new generation with the table, then shows it to readers"),
    before=_before_publish,
    finish=_publish,
)
