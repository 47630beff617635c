"""A census: which rows share a key of a unique index that isn't kept. It is built, looked over, and aborted."""

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
    """Look over all that was built and written since, record the outcome, and give up what was built.

    The outcome is one snapshot's, committed together with the abort's first half: whoever is killed before it looks
    again, and after it an abort, or a clean-up, removes the rest. Raises Fenced, OperationPaused, IllegalTransition (it
    has ended).
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
            # What was written since. From the next statement on the operation is locked, and its heart can't beat.
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
