"""A census: lists the rows that share a key. It builds a unique index, looks for duplicates, and aborts the build."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, read_running
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.unique import duplicates
from airflow_roir.errors import IllegalTransition, LockNotAcquired, SourceChanged
from airflow_roir.quantity import shared


def conclude(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Look for duplicates among all entries, record the outcome, and begin to abort the build.

    The outcome is that of one snapshot, committed together with the abort's first half. If the process is killed before
    that commit, the next run looks again; after it, an abort or a clean-up removes the tables. Raises Fenced,
    OperationPaused, IllegalTransition (the operation has ended).
    """

    def look() -> None:
        with database.transaction() as connection:
            duplicates.look(connection, load_job(connection, run))

    def locate() -> None:
        # As in `duplicates.refuse`.
        with suppress(DBAPIError, LockNotAcquired, SourceChanged), database.transaction() as connection:
            job = load_job(connection, run)
            duplicates.locate(connection, job.source, run.operation_id)

    def end() -> None:
        with database.transaction() as connection:
            row = read_running(connection, run)
            # Looks at rows written since. The next statements lock the operation's row, also against heartbeats.
            duplicates.look(connection, load_job(connection, run))
            said = shared(*duplicates.groups(connection, run.operation_id))
            newest = execute(connection, "SELECT (roir.latest_operation(%(index)s)).id", {"index": run.index})
            if newest.scalar_one() != run.operation_id:
                raise IllegalTransition(f"index {run.index}: operation {run.operation_id} has ended")
            operations.record_event(connection, row.index_id, row.id, run.owner, "census", said)
            execute(
                connection,
                "SELECT roir.abort(%(index)s, reason => %(reason)s, actor => %(actor)s)",
                {"index": run.index, "reason": f"census: {said}", "actor": run.owner},
            )

    duplicates.gather_statistics(database)
    persist(database, run, look, report)
    locate()
    persist(database, run, end, report)
