"""A verification, step by step, and corruption by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, read_running, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify.comparing import load
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.repairer import Repairer
from airflow_roir.engine.verify.report import VerifyReport, report_of
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.engine.work.phase_work import WorkerMetrics
from airflow_roir.operation import Phase
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps


def build_index(dsn: str, database: Database, *setup: str, index: str = "ix", **definition: Any) -> str:
    """Runs the statements, builds an index and publishes it; returns its base."""
    run_sql(dsn, *setup)
    prepared, run = steps.begin(database, index, **{"ranges": 3, "segments": 3, **definition})
    steps.finish_all(database, run)
    return physical.base(prepared.generation_id)


def begin(database: Database, **options: Any) -> Run:
    """Begins a verification of `ix`, and a run of it."""
    record.begin(database, "ix", VerifyOptions(**options), "test")
    return start_run(database, "ix", "test", take_over=True)


def worker(database: Database, run: Run, number: int = 0, kind: type[VerifyWorker] = VerifyWorker) -> VerifyWorker:
    """A worker to be stepped, in a session of its own. The session ends with the process."""
    connection = database.engine.connect()
    with connection.begin():
        verify_job = load(connection, run)
    return kind(connection, verify_job, number)


def claim(one: VerifyWorker) -> UnitClaim:
    """Claims the next unit."""
    found = one.claim()
    assert isinstance(found, UnitClaim)
    return found


def units(database: Database, run: Run) -> Iterator[WorkerMetrics]:
    """Compares the units of a stage by one worker."""
    phase = operations.find_operation(database, run.index).phase
    yield from lifecycle.PHASES[Phase(phase)].work(database, run, 0)


def go_through(database: Database, run: Run, stages: int = 1) -> None:
    """Goes through this many stages by one worker."""
    for _ in range(stages):
        for _ in units(database, run):
            pass
        comparing.finish(database, run)


def is_done(database: Database, run: Run) -> bool:
    """True if the run's verification has ended."""
    with database.transaction() as connection:
        last = record.last(connection, run.operation_id)
        return last is None or last.finished_at is not None


def of_build(database: Database, run: Run, wait: Callable[[float], object] | None = None) -> VerifyReport:
    """Compares the generation of a build that is folded, by one worker."""
    comparing.begin_of_build(database, run)
    while not is_done(database, run):
        for _ in lifecycle.PHASES[Phase.PUBLISH].work(database, run, 0, wait):
            pass
        with database.transaction() as connection:
            read_running(connection, run)
        comparing.finish(database, run)
    return report_of(database, run.operation_id)


def to_check(database: Database, run: Run) -> None:
    """Goes on to the stage that compares rows one by one."""
    while True:
        with database.transaction() as connection:
            found = record.unfinished(connection, run.operation_id)
            if record.stage(connection, found.id) == "check":
                return
        go_through(database, run)


def found(dsn: str) -> list[tuple[Any, ...]]:
    """All discrepancies of the last verification: kind, primary key, outcome."""
    return steps.sql(
        steps.session(dsn),
        "SELECT kind, primary_key #>> '{0}', outcome FROM roir.discrepancy WHERE verification_id = "
        "(SELECT max(id) FROM roir.verification) ORDER BY 1, 2",
    )


def repairer(database: Database, run: Run) -> Repairer:
    """A repairer in a session of its own."""
    one = worker(database, run)
    return Repairer(one.connection, one.job)


def ids(dsn: str, kinds: Sequence[str] = ("missing", "different", "extra")) -> list[int]:
    """The ids of the discrepancies that aren't settled."""
    rows = steps.sql(
        steps.session(dsn),
        "SELECT id FROM roir.discrepancy WHERE outcome IS NULL AND kind = ANY (%s) ORDER BY id",
        list(kinds),
    )
    return [one for (one,) in rows]
