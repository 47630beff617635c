"""One worker of a run, whatever it runs in: a thread of this process, or a task of Spark's.

It waits for what passes, and writes down what doesn't, so that the operation's other workers stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.run import FATAL, Run, settle
from airflow_roir.engine.control.shortage import patience_of
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.sessions.server_timeline import one_history
from airflow_roir.engine.work.phase_work import PhaseWork, WorkerMetrics
from airflow_roir.errors import DuplicatesFound, Fenced, OperationFailed, OperationPaused, RoirError, WorkerFailed

# PostgreSQL cuts longer names off, so what tells sessions apart comes first.
SESSION_NAME = "roir {operation}.{epoch} worker {number} {index}"
AT_WORK = r"""
SELECT DISTINCT substring(application_name FROM ' worker (\d+) ')::int AS worker FROM pg_stat_activity
 WHERE datname = current_database() AND starts_with(application_name, %(prefix)s)
"""


def session_name(run: Run, number: int) -> str:
    """What `pg_stat_activity.application_name` begins with for a worker."""
    return SESSION_NAME.format(operation=run.operation_id, epoch=run.epoch, number=number, index=run.index)


def workers_at_work(connection: Connection, run: Run) -> set[int]:
    """The numbers of the run's workers that have a session in the server."""
    values = {"prefix": session_name(run, 0).partition(" worker ")[0] + " worker "}
    return {row.worker for row in execute(connection, AT_WORK, values)}


def work(
    database: Database, run: Run, phase: PhaseWork, number: int, wait: Callable[[float], object] | None = None
) -> Iterator[WorkerMetrics]:
    """Work on a phase until nothing is left to claim; yields the metrics of each piece.

    Lost connections, restarting servers and what the server ran out of are waited for. Whatever else goes wrong is
    written to the operation, so that its other workers stop at their next step, and raised as WorkerFailed, or as
    Fenced where a newer run, or a newer try of this worker, has taken over.
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
                # Another worker has found why while this one waited.
                raise OperationPaused(str(failed)) from failed
            failure = worker_failed(number, error)
            settle(database, run, failure, fatal=isinstance(error, FATAL))
            raise failure from error
        except MemoryError as error:
            # Written down here, as any other: Spark would give up on the worker, and the others go on.
            failure = worker_failed(number, "out of memory on the executor. Give it more, or resume with fewer workers")
            settle(database, run, failure, fatal=False)
            raise failure from error


def worker_failed(number: int, error: BaseException | str) -> WorkerFailed:
    """The same words in the operation, its events and the driver's log. A statement's values are in none of them."""
    said = reason_of(error) if isinstance(error, BaseException) else error.strip().split("\n", 1)[0]
    return WorkerFailed(f"worker {number}: {said}")
