"""A run: one process tree that drives an operation (an Airflow try, a CLI). Starting one fences every older worker.

The file is long because a run's start, clock, errors and end are one protocol: each refers to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import admission, expected, operations, requests, sign_of_life
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.database import Database, execute, is_transient
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.retry.patience import Patience, Saying
from airflow_roir.engine.retry.repeat import meanwhile
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.kept_session import KeptSession
from airflow_roir.errors import (
    DuplicatesFound,
    Fenced,
    IllegalTransition,
    OperationFailed,
    OperationPaused,
    OperationQueued,
    RoirError,
    SchemaVersionMismatch,
    SourceChanged,
)
from airflow_roir.operation import (
    BLOCK_FORMAT_VERSION,
    BUILDS,
    BY_DUPLICATES,
    FORMAT_VERSION,
    QUEUED,
    Phase,
    Status,
    Verb,
)

# Takes a line for the user.
Report = Callable[[str], None]

# To continue after these would be wrong. OperationFailed: readers see another generation than the compacted one.
FATAL = (SourceChanged, OperationFailed)

BEGUN = """
owner = %(owner)s, heartbeat_at = clock_timestamp(), ticked_at = NULL, pause_reason = NULL, paused_by = NULL,
       queued_at = NULL, queued_seen_at = NULL,
       grace_s = CASE WHEN awaited_by = %(owner)s THEN grace_s ELSE %(grace)s END,
       last_try = last_try AND coalesce(awaited_by = %(owner)s, false),
       awaited_by = NULL, awaited_until = NULL, run_ended_at = NULL,
       notice = CASE WHEN NOT starts_with(notice, %(queue_notice)s) THEN notice END,
       working_since = CASE WHEN %(begins_anew)s THEN clock_timestamp() ELSE working_since END
""".strip()
NEXT_EPOCH = """
UPDATE roir.operation SET epoch = roir.next_epoch(epoch) WHERE id = %(operation)s RETURNING epoch
"""
END_RUN = """
UPDATE roir.operation
   SET heartbeat_at = NULL, ticked_at = NULL, awaited_until = greatest(awaited_until, clock_timestamp()),
       -- A run whose part is done: the next task of the DAG run has tries of its own.
       last_try = last_try AND status = 'paused'
 WHERE id = %(operation)s AND epoch = %(epoch)s
"""
IS_KNOWN = """
SELECT EXISTS (
  SELECT FROM roir.event
   WHERE operation_id = %(operation)s AND actor = %(actor)s AND detail = %(detail)s AND at >= %(since)s)
"""
SHOW_SPARK_UI = "UPDATE roir.operation SET spark_ui = %(url)s WHERE id = %(operation)s AND epoch = %(epoch)s"


@dataclass(frozen=True)
class Run:
    """A run's hold on an operation. epoch: the fencing token; a newer run has a greater one.

    No two runs have the same epoch, even if the server lost one of them. It may give ids of operations again.
    """

    operation_id: int
    epoch: int
    index: str
    owner: str


def start_run(
    database: Database,
    index: str,
    owner: str,
    take_over: bool = False,
    lift_pause: bool = True,
    report: Callable[[str], None] = lambda line: None,
    operation: int | None = None,
) -> Run:
    """Starts a run of an operation that is paused, or whose run has died, and fences all older runs at once.

    owner: names this run to others. take_over: also take the operation from a run that is alive. lift_pause: False if
    the caller lifted an older pause before, so that a pause is a newer wish, and stays. report: hears of waits.
    operation: the id of the only operation that this run may drive; None is the latest of the index.
    Raises OperationRunning (with the run that drives it); OperationFailed; IllegalTransition (nothing to drive, or
    another operation has begun since); OperationAborted; SchemaVersionMismatch (begun by other code); OperationQueued
    (as many others run as may). Raises OperationPaused if the operation is paused and `lift_pause` is False (nothing is
    changed), or if it is outside of its window or past its `max_duration` (then it is paused now).
    """

    # Raises at once if the server can't be reached; waits for room or memory that ran out.
    return database.retry(
        lambda: _start_run(database, index, owner, take_over, lift_pause, operation),
        Patience(database.limits, told=Saying(report), outage_s=0),
    )


def _start_run(
    database: Database, index: str, owner: str, take_over: bool, lift_pause: bool, operation: int | None
) -> Run:
    with database.transaction() as connection:
        begun = _start(connection, index, owner, take_over, lift_pause, operation)
    # Raised only after the commit, which writes down why the run can't start.
    if isinstance(begun, admission.Wait):
        raise (OperationQueued if begun.is_queued else OperationPaused)(f"index {index}: {begun.why}")
    return begun


def _start(
    connection: Connection, index: str, owner: str, take_over: bool, lift_pause: bool, operation: int | None
) -> Run | admission.Wait:
    check_schema(connection, writes=True)
    name = parse_name(index, "index")
    wanted = None if operation is None else operations.operation_of(connection, operation, name)
    if wanted is not None and wanted.status in operations.ABORT:
        raise operations.overtaken(connection, wanted.id, owner)
    found = operations.live_or_last(connection, name)
    row = operations.lock_operation(connection, found.id)
    if operation is not None and row.id != operation:
        raise requests.has_begun_since(index, operation, row)
    if row.status == Status.FAILED:
        raise OperationFailed(
            f"index {index}: operation {row.id} failed: {row.error}. Abort it: roir abort {argument(index)}. Then "
            "start again"
        )
    if row.status == Status.ABORTING:
        raise IllegalTransition(f"index {index}: operation {row.id} is being aborted; roir clean-up finishes that")
    if row.status not in (Status.RUNNING, Status.PAUSED):
        raise IllegalTransition(f"index {index} has no operation to resume: its last one is {row.status}")
    # If the run before paused the operation itself, because something failed, no user wished for that pause.
    if row.status == Status.PAUSED and not lift_pause and row.paused_by != row.owner:
        raise OperationPaused(f"index {index}: paused by {row.paused_by}: {row.pause_reason}")
    if row.format_version not in (FORMAT_VERSION, BLOCK_FORMAT_VERSION):
        raise SchemaVersionMismatch(
            f"operation {row.id} began with checkpoint format {row.format_version}, but this code writes "
            f"{FORMAT_VERSION}. Finish it with the version that began it, or abort it"
        )
    if sign_of_life.heart_beats(row, connection) and not take_over:
        raise sign_of_life.running_elsewhere(row, index, connection)
    if (wait := admission.admit(connection, row)) is not None:
        return wait
    operations.move(
        connection,
        row,
        Verb.START,
        epoch=row.epoch,
        also=BEGUN,
        owner=owner,
        grace=expected.GRACE_S,
        begins_anew=admission.begins_anew(row),
        queue_notice=QUEUED,
    )
    epoch = int(execute(connection, NEXT_EPOCH, {"operation": row.id}).scalar_one())
    action = "resume" if row.status == Status.PAUSED else "start"
    operations.record_event(connection, row.index_id, row.id, owner, action, f"in phase {Phase(row.phase).shown}")
    full_name = operations.read_index(connection, row.index_id)
    return Run(row.id, epoch, str(operations.index_name(full_name)), owner)


def end_run(database: Database, run: Run) -> None:
    """Records that this run no longer drives the operation, so that the next run needn't wait for its heartbeat."""
    with database.transaction() as connection:
        sign_of_life.tick(connection, run.operation_id, run.epoch)
        execute(connection, END_RUN, {"operation": run.operation_id, "epoch": run.epoch})


def read_control(connection: Connection, run: Run) -> Row[Any]:
    """The operation's row, which workers read in every batch. Raises Fenced if a newer run holds the operation."""
    row = operations.read_operation(connection, run.operation_id)
    check_epoch(connection, row, run)
    return row


def read_now(database: Database, run: Run) -> Row[Any]:
    """As `read_control`, in a transaction of its own."""
    with database.transaction() as connection:
        return read_control(connection, run)


def check_epoch(connection: Connection, row: Row[Any], run: Run) -> None:
    """Raises Fenced if this run doesn't hold the operation any more, OperationAborted if that was aborted.

    row: with the epoch, just read.
    """
    # The upper half of an epoch counts the runs.
    if row.epoch >> 32 < run.epoch >> 32:
        raise Fenced(
            f"index {run.index}: by a failover to a replica or a restore, the server has lost the start of this run of "
            f"operation {run.operation_id} by {run.owner}; this run stops. Continue after the server's last commit: "
            f"roir resume {argument(run.index)}"
        )
    if row.epoch != run.epoch:
        raise operations.overtaken(connection, run.operation_id, run.owner)


@contextmanager
def heartbeat(database: Database, run: Run) -> Iterator[None]:
    """Writes the run's heartbeat, and counts its time from `start_clock` on, in a thread while the block runs.

    A heartbeat that fails is no error: the work itself will meet the same trouble. A run without heartbeats for long
    can be taken over, which its epoch makes harmless.
    """

    # One session for all heartbeats: if no connection is left on the server, a new one for each heartbeat would fail,
    # and a run that works would be taken for dead.
    session = KeptSession(database)

    def beat() -> None:
        with suppress(DBAPIError, RoirError), session.transaction() as connection:
            sign_of_life.tick(connection, run.operation_id, run.epoch)

    try:
        with meanwhile(beat, database.limits.heartbeat_every_s, "roir-heartbeat"):
            yield
    finally:
        session.close()


def show_spark_ui(database: Database, run: Run, url: str | None) -> None:
    """Records the address of this run's Spark pages, for the status; None once they are gone."""
    with database.transaction() as connection:
        execute(connection, SHOW_SPARK_UI, {"operation": run.operation_id, "epoch": run.epoch, "url": url})


def start_clock(database: Database, run: Run) -> None:
    """Begins to count this run's time."""
    with database.transaction() as connection:
        sign_of_life.start_clock(connection, run.operation_id, run.epoch)


@contextmanager
def driving(database: Database, run: Run) -> Iterator[None]:
    """Around a run's work: an error leaves the operation paused with the reason, so that it can be resumed.

    After an error with which it would be wrong to continue, the operation fails. The caller gets the error. A pause
    ends the block without one.
    """
    try:
        yield
    except OperationPaused:
        pass
    except FATAL as error:
        settle(database, run, error, fatal=True)
        raise
    except BaseException as error:
        # Also for a bug or Ctrl-C: no run drives the operation any more, and users must see why.
        settle(database, run, error, fatal=False)
        ending = _ending(error)
        if ending is not None and ending is not error:
            raise ending from None
        raise
    finally:
        try:
            end_run(database, run)
        except DBAPIError as error:
            # The server is gone: the next run waits until the heartbeat is too old.
            if not is_transient(error):
                raise


def settle(database: Database, run: Run, error: BaseException, fatal: bool) -> None:
    """Records why a run or worker stops: pauses the operation with the reason, or fails it if `fatal`.

    If the operation is paused already, the reason becomes an event, so that a pause hides no error.
    """
    ending = _ending(error)
    if ending is None:
        reason = reason_of(error)
    else:
        # The text of a SystemExit is only its code.
        reason = (isinstance(ending, KeyboardInterrupt) and str(ending)) or "interrupted"
    try:
        with database.transaction() as connection:
            row = operations.read_operation(connection, run.operation_id)
            if row.epoch != run.epoch:
                return
            # Duplicates need no event: they are listed in roir.duplicate, and the next run finds them again.
            if row.status == Status.PAUSED and not (ending is not None or isinstance(error, DuplicatesFound)):
                _keep_error(connection, row, run, reason)
            if row.status != Status.RUNNING:
                return
            if fatal:
                operations.fail(connection, row, run.owner, reason, run.epoch)
                if row.kind in BUILDS:
                    # Shards don't ship to the generation any more.
                    ends().retire(connection, row.generation_id, run.owner)
            elif isinstance(error, DuplicatesFound):
                operations.pause_operation(connection, row, BY_DUPLICATES, reason, run.epoch)
            else:
                operations.pause_operation(connection, row, run.owner, reason, run.epoch)
    except (DBAPIError, RoirError):
        # The user must see the first error. Without this record the operation can be resumed all the same.
        return


def _ending(error: BaseException) -> KeyboardInterrupt | SystemExit | None:
    """The request to end that a run has got; None for an error of the work.

    Also of an error that the run met while it left: the JVM got the same signal, and refuses connections.
    """
    met: BaseException | None = error
    while not (met is None or isinstance(met, KeyboardInterrupt | SystemExit)):
        met = met.__cause__ or met.__context__
    return met


def leave_run(database: Database, run: Run, error: BaseException) -> None:
    """Records why a run stops, as `settle`, and ends it, from outside of the run. A no-op if another run drives it."""
    settle(database, run, error, fatal=False)
    end_run(database, run)


def settle_lost(database: Database, index: str, owner: str, error: RoirError) -> None:
    """Does the work of `leave_run` after a run's process has died. A no-op if another run drives the operation.

    owner: the owner that the run gave to `start_run`. Raises NotFound.
    """
    row = operations.find_operation(database, index)
    if row.status == Status.RUNNING and row.owner == owner:
        leave_run(database, Run(row.id, row.epoch, index, owner), error)


def _keep_error(connection: Connection, row: Row[Any], run: Run, reason: str) -> None:
    """Records an error as an event, unless that was done since the pause (by the worker, before its driver)."""
    values = {"operation": row.id, "actor": run.owner, "detail": reason, "since": row.paused_at}
    known = execute(connection, IS_KNOWN, values).scalar_one()
    if (row.paused_by, row.pause_reason) != (run.owner, reason) and not known:
        operations.record_event(connection, row.index_id, row.id, run.owner, "error", reason)


def read_running(connection: Connection, run: Run) -> OperationRow:
    """The operation's row. Raises OperationPaused, OperationFailed (a worker of this run found why), Fenced."""
    row = read_control(connection, run)
    if row.status == Status.FAILED:
        raise OperationFailed(f"index {run.index}: {row.error}")
    if row.status != Status.RUNNING:
        raise OperationPaused(f"index {run.index}: operation {row.id} was paused: {row.pause_reason}")
    return row
