"""What one Spark task does: it drives the engine as one of an operation's workers, and returns its metrics.

Everything a task needs travels in the function that Spark ships: nothing is in Spark's configuration, its UI or
its event log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import build, seal
from airflow_roir.engine.compact import worker as compact
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.history import one_history
from airflow_roir.engine.retry.shortage import patience_of
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.run import FATAL, Run, settle
from airflow_roir.engine.verify import compare
from airflow_roir.errors import (
    DuplicatesFound,
    Fenced,
    OperationFailed,
    OperationPaused,
    RoirError,
    WorkerFailed,
)
from airflow_roir.spark.worker_metrics import WorkerMetrics

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
    """The numbers of the run's workers that have a session in the server, whatever Spark thinks of them."""
    values = {"prefix": session_name(run, 0).partition(" worker ")[0] + " worker "}
    return {row.worker for row in execute(connection, AT_WORK, values)}


def worker_job(database: Database, run: Run, phase: str) -> Callable[[Iterator[int]], Iterator[WorkerMetrics]]:
    """A function of workers' numbers, for Spark to ship: it is those workers."""

    def run_workers(numbers: Iterator[int]) -> Iterator[WorkerMetrics]:
        for number in numbers:
            yield from work(database.named(session_name(run, number)), run, phase, number)

    return run_workers


def work(
    database: Database,
    run: Run,
    phase: str,
    number: int,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[WorkerMetrics]:
    """Work on a phase until nothing is left to claim; yields the metrics of each range, segment or unit.

    Lost connections, restarting servers and what the server ran out of are waited for. Whatever else goes wrong is
    written to the operation, so that its other workers stop at their next batch, and returned, too: no error is ever
    dropped.
    """
    patience = patience_of(database, run, wait)
    while True:
        try:
            with one_history(database):
                for metrics in _steps(database, run, phase, number, wait):
                    patience.renew()
                    yield metrics
            return
        except Fenced as error:
            # A newer run works on, or a newer try of this worker; that is no failure of this operation.
            yield WorkerMetrics(number, phase, error=f"fenced: {error}")
            return
        except OperationPaused:
            return
        except DuplicatesFound as error:
            # The driver sees the pause.
            settle(database, run, error, fatal=False)
            return
        except (RoirError, DBAPIError) as error:
            try:
                if patience.waits(error):
                    continue
            except (OperationPaused, OperationFailed):
                # The run's end was seen while it waited.
                return
            except Fenced as fenced:
                yield WorkerMetrics(number, phase, error=f"fenced: {fenced}")
                return
            failure = worker_failed(number, error)
            settle(database, run, failure, fatal=isinstance(error, FATAL))
            yield WorkerMetrics(number, phase, error=str(failure))
            return
        except MemoryError:
            # Written down here, as any other: Spark would give up on the worker, and the others go on.
            failure = worker_failed(number, "out of memory on the executor. Give it more, or resume with fewer workers")
            settle(database, run, failure, fatal=False)
            yield WorkerMetrics(number, phase, error=str(failure))
            return


def worker_failed(number: int, error: BaseException | str) -> WorkerFailed:
    """The same words in the operation, its events and the driver's log. A statement's values are in none of them."""
    said = reason_of(error) if isinstance(error, BaseException) else error.strip().split("\n", 1)[0]
    return WorkerFailed(f"worker {number}: {said}")


def _steps(
    database: Database, run: Run, phase: str, number: int, wait: Callable[[float], None]
) -> Iterable[WorkerMetrics]:
    if phase == "build":
        for m in build.work(database, run, number, wait):
            yield WorkerMetrics(number, phase, m.ordinal, m.rows, m.batches, m.seconds, m.done)
    elif phase == "seal":
        for s in seal.work(database, run, number):
            yield WorkerMetrics(number, phase, s.ordinal, seconds=s.seconds, done=True)
    elif phase == "compact":
        for c in compact.work(database, run, number):
            yield WorkerMetrics(number, phase, c.ordinal, c.rows, seconds=c.seconds, done=c.done)
    else:
        for v in compare.work(database, run, number):
            yield WorkerMetrics(number, phase, v.ordinal, v.rows, seconds=v.seconds, done=True)
