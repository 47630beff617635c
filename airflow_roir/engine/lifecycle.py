"""The life of an operation, from the first lock to the last, phase by phase.

A build copies rows (`build`), indexes the copied entries (`seal`), applies what writers did meanwhile (`fold`), and
shows the result to readers (`publish`). A verification sums and checks; a compaction rewrites segments. Each phase
consists of pieces that workers claim, and of a last step once no piece is left: `PHASES` lists them all. A worker
commits a piece's result together with its progress. So a run may end at any instruction: the next run continues from
there, in the phase that the operation's row names. A phase ends in one transaction, which names the next phase.

`drive` is a run: it takes an operation through its phases, with workers in threads of this process or on Spark.
`prepare`, `verify` and `compact` begin an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, argument
from airflow_roir.engine import build, seal
from airflow_roir.engine import prepare as preparing
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact import worker as compact_worker
from airflow_roir.engine.compact.action import Action
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.compaction import CompactionReport
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.control.run import Report, Run, driving, heartbeat, read_now, start_clock, start_run
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database, sqlstate
from airflow_roir.engine.early.detecting import detecting
from airflow_roir.engine.finalize import FOLD, PUBLISH
from airflow_roir.engine.forecast import forecast, objections
from airflow_roir.engine.governor.governing import governing
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.locks.table_lock import DENIED
from airflow_roir.engine.reference import filling
from airflow_roir.engine.sessions.kept_session import kept_sessions
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.snapshot.operation import OperationStatus, operation_status
from airflow_roir.engine.snapshot.throttle import lost_line
from airflow_roir.engine.snapshot.words import paused_by
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify import report as reports
from airflow_roir.engine.verify.report import VerifyReport
from airflow_roir.engine.work.driver import PhaseDriver
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.engine.work.pool import Pool, Pools, Threads
from airflow_roir.errors import IllegalTransition, InvalidInput, NotFound, OperationPaused, RoirError, WorkerFailed
from airflow_roir.operation import FINAL, Phase, Status
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions

PHASES: dict[Phase, PhaseWork] = {
    one.name: one
    for one in (
        # A build. `prepare` has cut the table into ranges, and has installed the capture before any range is read.
        replace(build.PHASE, beside=detecting),
        seal.PHASE,
        FOLD,
        PUBLISH,
        # A verification.
        comparing.SUM,
        comparing.CHECK,
        # A compaction.
        compact_worker.PHASE,
        # A reference.
        filling.PHASE,
    )
}


def drive(
    database: Database,
    index: str,
    owner: str,
    pools: Pools | None = None,
    report: Report = lambda line: None,
    *,
    take_over: bool = False,
    lift_pause: bool = True,
    operation: int | None = None,
    phases: Collection[Phase] = tuple(PHASES),
    surroundings: Surroundings | None = None,
    began: Callable[[Run], object] = lambda run: None,
) -> OperationStatus:
    """Take the index's live operation through its phases, in a run of its own.

    owner, take_over, lift_pause, operation: as for `start_run`. pools: where the workers run, by default in threads of
    this process. phases: those that this run may work on; the run ends before any other. surroundings: those of the
    throttle, by default from the environment. began: called with the run.
    Returns the operation's status, `paused` if it was paused. Raises what `start_run` raises, and the error that
    ended the work, which has paused or failed the operation: DuplicatesFound, LockNotAcquired (with the blockers'
    names), InvariantViolated, SourceChanged (failed), VerificationFailed, WorkerFailed, SparkFailed. Raises
    IllegalTransition if the operation is in an earlier phase than `phases`.
    """
    with kept_sessions(database):
        run = start_run(database, index, owner, take_over, lift_pause, report, operation)
        began(run)
        try:
            with driving(database, run), heartbeat(database, run), governing(database, run, report, surroundings):
                run_phases(database, run, report, pools, phases)
                if line := database.retry(lambda: lost_line(database, run.operation_id)):
                    report(line)
        except WorkerFailed as error:
            # If the worker was a thread of this process, its own error is raised.
            if isinstance(error.__cause__, RoirError | DBAPIError):
                raise error.__cause__ from error
            raise
    return database.retry(lambda: operation_status(database, run.operation_id))


def run_phases(
    database: Database,
    run: Run,
    report: Report = lambda line: None,
    pools: Pools | None = None,
    phases: Collection[Phase] = tuple(PHASES),
) -> None:
    """As `drive`, inside a run that the caller has started: phase by phase, until the operation has ended.

    Also raises OperationPaused.
    """
    with ExitStack() as stack, kept_sessions(database):
        make_pool = None
        while True:
            row = persist(database, run, lambda: read_now(database, run), report)
            if row.status == Status.PAUSED:
                raise OperationPaused(f"index {run.index}: paused by {row.paused_by}: {row.pause_reason}")
            if row.status != Status.RUNNING or row.phase not in PHASES:
                return
            if row.phase not in phases:
                if row.phase in (Phase.BUILD, Phase.SEAL):
                    raise IllegalTransition(
                        f"index {run.index} is still in {row.phase}; finish that first: roir resume "
                        f"{argument(run.index)}. If that phase had ended before, the server has lost its last "
                        "commits, by a failover to a replica or a restore"
                    )
                return
            if make_pool is None:
                make_pool = stack.enter_context((pools or Threads()).open(database, run, report))
            phase = PHASES[Phase(row.phase)]
            pool = make_pool(phase)
            if phase.name in FINAL:
                if not _final_phase(database, run, phase, pool, report):
                    return
            else:
                PhaseDriver(database, run, phase, pool, report).run()


@in_one_history
def _final_phase(database: Database, run: Run, phase: PhaseWork, pool: Pool, report: Report) -> bool:
    """Runs a final phase; False if it ended the operation. After a failover in between, the phase begins again."""
    if persist(database, run, lambda: read_now(database, run), report).phase != phase.name:
        # The new server has lost the end of the phase before: a switch or a comparison would come too early.
        return True
    persist(database, run, lambda: start_clock(database, run), report)
    if not phase.before(database, run, report):
        return False
    PhaseDriver(database, run, phase, pool, report).run()
    return True


def finalize(
    database: Database,
    index: str,
    owner: str,
    report: Report = lambda line: None,
    take_over: bool = False,
    surroundings: Surroundings | None = None,
    operation: int | None = None,
    began: Callable[[Run], object] = lambda run: None,
) -> OperationStatus:
    """Fold and publish the sealed generation of an index, in a run of its own, or end a census.

    Parameters, results and errors are those of `drive`.
    """
    known: dict[str, Any] = {"surroundings": surroundings, "operation": operation, "began": began}
    return drive(database, index, owner, None, report, take_over=take_over, phases=FINAL, **known)


def prepare(
    database: Database,
    definition: IndexDefinition,
    options: BuildOptions,
    actor: str | None = None,
    report: Report = lambda line: None,
    on_spark: bool = True,
) -> BegunOperation:
    """As `prepare.prepare`, but first says how long the build is expected to take. on_spark: False for threads.

    A refusal names all objections to the build.
    """
    try:
        said = partial(forecast.foresee, on_spark=on_spark)
        return preparing.prepare(database, definition, options, actor, report, said)
    except (InvalidInput, NotFound) as refusal:
        raise objections.with_others(refusal, database, definition, options) from None
    except DBAPIError as error:
        if sqlstate(error) != DENIED:
            raise
        # The server's message names no remedy.
        objections.raise_missing(database, definition, options)
        raise


def verify(
    database: Database,
    index: str,
    options: VerifyOptions | None = None,
    actor: str | None = None,
    mode: str = "only",
    report: Report = lambda line: None,
) -> VerifyReport:
    """Compare an index with its source, from beginning to end, with threads of this process, while users write.

    PostgreSQL does the work of comparing, so threads are as fast as Spark if one machine can hold the connections.
    Raises what `record.begin` and `drive` raise, and OperationPaused if it was paused.
    """
    owner = actor or operations.default_actor()
    begun = record.begin(database, index, options or VerifyOptions(), owner, mode)
    _to_its_end(database, begun.index, begun.operation_id, owner, report)
    return reports.report_of(database, begun.operation_id)


def compact(
    database: Database,
    index: str,
    budget: Budget | None = None,
    actor: str | None = None,
    parallelism: int = 2,
    options: CompactOptions | None = None,
    report: Report = lambda line: None,
) -> CompactionReport | None:
    """Choose the actions that gain most within the budget, and do them with threads of this process.

    Others read and write meanwhile. Continues an unfinished compaction. Returns None if no action is worth its cost.
    Raises what `compaction.begin` and `drive` raise, and OperationPaused if it was paused.
    """
    # Imported late: numpy starts threads at its import, and no worker should have those.
    from airflow_roir.engine.compact import choosing

    owner = actor or operations.default_actor()
    actions: Sequence[Action] = ()
    if not compaction.is_unfinished(database, index):
        actions = choosing.choose(database, index, budget).actions
        if not actions:
            return None
    begun = compaction.begin(database, index, actions, options or CompactOptions(parallelism=parallelism), owner)
    _to_its_end(database, begun.index, begun.operation_id, owner, report)
    return database.retry(lambda: compaction.report_of(database, begun.operation_id))


def _to_its_end(database: Database, index: str, operation: int, owner: str, report: Report) -> None:
    ended = drive(database, index, owner, None, report, operation=operation)
    if ended.status == Status.PAUSED:
        raise OperationPaused(f"index {index}: {paused_by(ended)}")
