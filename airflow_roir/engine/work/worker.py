"""Runs one worker, in a thread of this process or in a task of Spark.

It waits while an error may pass, and writes down an error that won't, so that the operation's other workers stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.run import FATAL, Run, settle
from airflow_roir.engine.control.shortage import patience_of
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import is_permanent, reason_of
from airflow_roir.engine.sessions.server_timeline import one_history
from airflow_roir.engine.work.phase_work import PhaseWork, WorkerMetrics
from airflow_roir.errors import DuplicatesFound, Fenced, OperationFailed, OperationPaused, RoirError, WorkerFailed

# PostgreSQL cuts long names off, so the numbers that identify a session come first.
SESSION_NAME = "roir {operation}.{epoch} worker {number} {index}"
AT_WORK = r"""
SELECT DISTINCT substring(application_name FROM ' worker (\d+) ')::int AS worker FROM pg_stat_activity
 WHERE datname = current_database() AND starts_with(application_name, %(prefix)s)
"""


def session_name(run: Run, number: int) -> str:
    """The name of a worker's session, which PostgreSQL may cut off (`pg_stat_activity.application_name`)."""
    return SESSION_NAME.format(operation=run.operation_id, epoch=run.epoch, number=number, index=run.index)


def workers_at_work(connection: Connection, run: Run) -> set[int]:
    """The numbers of the run's workers that have a session in the server."""
    values = {"prefix": session_name(run, 0).partition(" worker ")[0] + " worker "}
    return {row.worker for row in execute(connection, AT_WORK, values)}


def work(
    database: Database, run: Run, phase: PhaseWork, number: int, wait: Callable[[float], object] | None = None
) -> Iterator[WorkerMetrics]:
    """Work on a phase until nothing is left to claim; yields the metrics of each piece.

    Waits for lost connections, restarting servers and shortages of the server. Any other error is written to the
    operation, so that its other workers stop at their next step, and raised as WorkerFailed. Raises Fenced if a newer
    run, or a newer try of this worker, has taken over.
    """
    patience = patience_of(database, run, wait)
    while True:
        try:
            with one_history(database):
                yield from phase.work(database, run, number, wait, patience.renew)
            return
        except (Fenced, OperationPaused):
            raise
        except DuplicatesFound as error:
            settle(database, run, error, fatal=False)
            raise OperationPaused(str(error)) from error
        except (RoirError, DBAPIError) as error:
            try:
                if patience.waits(error):
                    continue
            except OperationFailed as failed:
                # Another worker has failed the operation while this one waited.
                raise OperationPaused(str(failed)) from failed
            failure = worker_failed(number, error)
            settle(database, run, failure, fatal=isinstance(error, FATAL))
            raise failure from error
        except MemoryError as error:
            # Written down here, as any other error: Spark would give up this worker, while the others continue.
            failure = worker_failed(number, "out of memory on the executor. Give it more, or resume with fewer workers")
            settle(database, run, failure, fatal=False)
            raise failure from error


def worker_failed(number: int, error: BaseException | str) -> WorkerFailed:
    """The error of a worker, as the operation, its events and the log show it; without a statement's values."""
    said = reason_of(error) if isinstance(error, BaseException) else error.strip().split("\n", 1)[0]
    return WorkerFailed(f"worker {number}: {said}", isinstance(error, BaseException) and is_permanent(error))
