"""Finalize: the phases after Spark's work, in one call: fold (with the switch and ghost-marking), then publish.

A census ends here, without either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from airflow_roir.definition import argument
from airflow_roir.engine import fold, publish
from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.governing import governing
from airflow_roir.engine.governor.report import lost_line
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.history import in_one_history
from airflow_roir.engine.retry.shortage import persist
from airflow_roir.engine.run import Run, driving, heartbeat, read_control, start_clock, start_run
from airflow_roir.engine.shards import enforce
from airflow_roir.engine.shards.catch_up import catch_up
from airflow_roir.engine.shards.shard import Lane, lanes_of
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.engine.unique import census, duplicate_report
from airflow_roir.engine.verify import compare
from airflow_roir.errors import DuplicatesFound, IllegalTransition, VerificationFailed
from airflow_roir.operation import Phase


def finalize(
    database: Database,
    index: str,
    owner: str,
    report: Callable[[str], None] = lambda line: None,
    take_over: bool = False,
    surroundings: Surroundings | None = None,
    operation: int | None = None,
    began: Callable[[Run], object] = lambda run: None,
) -> OperationStatus:
    """Fold and publish the sealed generation of an index, in a run of its own.

    surroundings: of the throttle, by default what the environment says. operation: as of `start_run`. began: called
    with the run.
    Returns the operation's status: `completed`, `paused` if it was paused meanwhile, or `aborted` for a census. Raises
    OperationRunning, DuplicatesFound (paused), IllegalTransition (still in build or seal, or another operation has
    begun since), LockNotAcquired (paused with the blockers' names, resumable), InvariantViolated (paused: a step of a
    fenced run may have come between; a resume folds what it left), and SourceChanged (failed).
    """
    run = start_run(database, index, owner, take_over=take_over, report=report, operation=operation)
    began(run)
    with driving(database, run), heartbeat(database, run), governing(database, run, report, surroundings):
        persist(database, run, lambda: start_clock(database, run), report)
        finalize_run(database, run, report)
        if line := database.retry(lambda: lost_line(database, run.operation_id)):
            report(line)
    return database.retry(lambda: operation_status(database, run.operation_id))


def finalize_run(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """As `finalize`, inside a run that the caller has started.

    Where the server fails over meanwhile it begins again, from the state that is committed there.
    """
    _finalize(database, run, report)


@in_one_history
def _finalize(database: Database, run: Run, report: Callable[[str], None]) -> None:
    row = persist(database, run, lambda: _read(database, run), report)
    phase = row.phase
    if phase in (Phase.BUILD, Phase.SEAL):
        raise IllegalTransition(
            f"index {run.index} is still in {phase}; finish that first: roir resume {argument(run.index)}. If it was "
            "finished already, the server has lost its last commits, by a failover to a replica or a restore"
        )
    is_apart = bool(persist(database, run, lambda: _lanes(database, row.generation_id), report))
    if row.options.get("census"):
        census.conclude(database, run, report)
        return
    if is_apart:
        persist(database, run, lambda: catch_up(database, run, report), report)
    try:
        persist(database, run, lambda: fold.switch(database, run, report), report)
    except DuplicatesFound:
        for line in duplicate_report.first_lines(database, run.operation_id):
            report(line)
        raise
    if phase == Phase.FOLD:
        folded = fold.work(database, run, report)
        persist(database, run, lambda: fold.finish(database, run, folded), report)
    if row.options.get("verify", "after") in ("after", "both"):
        if not is_apart:
            persist(database, run, lambda: fold.follow_partitions(database, run, report), report)
        found = compare.verify_build(database, run)
        report(f"compared with the table: {found}")
        if not found.is_exact:
            raise VerificationFailed(
                f"index {run.index}: the new generation differs from its table ({found}); not published. See the "
                f"table roir.discrepancy, verification {found.verification_id}. Resume to compare again, or abort"
            )
    if is_apart:
        # A verification takes its time, and nobody else may ship.
        persist(database, run, lambda: catch_up(database, run, report), report)
        persist(database, run, lambda: enforce.keep_on(database, row.generation_id, report), report)
    persist(database, run, lambda: publish.publish(database, run, report), report)


def _lanes(database: Database, generation_id: int) -> list[Lane]:
    with database.transaction() as connection:
        return lanes_of(connection, generation_id)


def _read(database: Database, run: Run) -> Any:
    with database.transaction() as connection:
        return read_control(connection, run)
