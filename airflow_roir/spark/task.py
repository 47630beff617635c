"""Runs one Spark task, which is one of an operation's workers.

Everything a task needs travels in the function that Spark ships: nothing is in Spark's configuration, its UI or
its event log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import PHASES
from airflow_roir.engine.work import worker
from airflow_roir.engine.work.phase_work import WorkerMetrics
from airflow_roir.errors import Fenced, OperationPaused, RoirError, WorkerFailed
from airflow_roir.operation import Phase

# The beginning of the error of a worker whose place another one has taken.
FENCED = "fenced: "
PERMANENT = "permanent: "


def worker_job(database: Database, run: Run, phase: str) -> Callable[[Iterator[int]], Iterator[WorkerMetrics]]:
    """A function of workers' numbers, for Spark to ship: it runs those workers."""

    def run_workers(numbers: Iterator[int]) -> Iterator[WorkerMetrics]:
        for number in numbers:
            yield from work(database.named(worker.session_name(run, number)), run, phase, number)

    return run_workers


def work(
    database: Database, run: Run, phase: str, number: int, wait: Callable[[float], object] | None = None
) -> Iterator[WorkerMetrics]:
    """As `worker.work`, but an error comes as a row, since Spark keeps only the text of an error that is raised."""
    try:
        yield from worker.work(database, run, PHASES[Phase(phase)], number, wait)
    except OperationPaused:
        return
    except Fenced as error:
        yield WorkerMetrics(number, phase, error=f"{FENCED}{error}")
    except WorkerFailed as error:
        yield WorkerMetrics(number, phase, error=f"{PERMANENT if error.permanent else ''}{error}")


def error_of(rows: list[WorkerMetrics]) -> RoirError | None:
    """The error among a worker's rows."""
    said = next((row.error for row in rows if row.error is not None), None)
    if said is None:
        return None
    if said.startswith(FENCED):
        return Fenced(said.removeprefix(FENCED))
    return WorkerFailed(said.removeprefix(PERMANENT), permanent=said.startswith(PERMANENT))
