"""The one way to the control tables: finds operations, moves them along their transitions, keeps clock and events."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update
from sqlalchemy.exc import DBAPIError, OperationalError

from airflow_roir.definition import QualifiedName, argument, parse_name, quote
from airflow_roir.engine import tables
from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.locks import WAITING
from airflow_roir.engine.schema import check_schema
from airflow_roir.errors import Fenced, IllegalTransition, InvalidInput, NotFound, OperationPaused, OperationRunning
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.operation import TRANSITIONS, Status, Verb
from airflow_roir.options import LIVE_OPTIONS, check_live_options

OperationRow = Row[Any]

# A run writes its heartbeat every few seconds; after this long without one it is taken for dead, as `roir.tick` has it.
HEARTBEAT_FRESH_S = 30
LIVE = (Status.RUNNING, Status.PAUSED, Status.FAILED, Status.ABORTING)


def default_actor() -> str:
    """`user@host`, for events; the process may have no user name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def find_index(connection: Connection, name: QualifiedName) -> Row[Any]:
    """The row of a live index by its name; a name without schema must be unambiguous. Raises NotFound."""
    index = tables.index
    query = select(index).where(index.c.name == name.name, index.c.dropped_at.is_(None))
    if name.schema is not None:
        query = query.where(index.c.schema_name == name.schema)
    found = connection.execute(query).all()
    if not found:
        raise NotFound(f"there is no index {name}; `roir status` lists all indexes")
    if len(found) > 1:
        schemas = ", ".join(quote(row.schema_name) for row in found)
        raise InvalidInput(f"index {name} is ambiguous: it exists in {schemas}; name the schema too")
    return found[0]


def index_name(row: Row[Any]) -> QualifiedName:
    """The index's full name."""
    return QualifiedName(row.schema_name, row.name)


def active_generation(connection: Connection, index: Row[Any]) -> Row[Any]:
    """The generation that readers of an index see. Raises NotFound if none is published."""
    generation = tables.generation
    found = connection.execute(
        select(generation).where(
            generation.c.index_id == index.id, generation.c.status == GenerationStatus.ACTIVE.value
        )
    ).first()
    if found is None:
        name = index_name(index)
        if is_kept(connection, index.id):
            raise NotFound(KEPT.format(index=name))
        raise NotFound(f"index {name} isn't published yet; finish its operation first: roir resume")
    return found


# A drop that waits for the end of transactions.
KEPT = (
    "index {index}: its view is dropped; its entries are kept, and maintained, for what SERIALIZABLE transactions have "
    "read: roir clean-up drops them, or names the transaction that they are kept for"
)
IS_KEPT = """
SELECT coalesce(bool_and(status = 'retired'), false) FROM roir.generation
 WHERE index_id = %(index)s AND status <> 'dropped'
"""


def is_kept(connection: Connection, index_id: int) -> bool:
    """True if an index is dropped, and its entries aren't yet."""
    return bool(execute(connection, IS_KEPT, {"index": index_id}).scalar_one())


def newest_operation(connection: Connection, index_id: int) -> OperationRow | None:
    """The latest operation of an index, live or ended."""
    operation = tables.operation
    return connection.execute(
        select(operation).where(operation.c.index_id == index_id).order_by(operation.c.id.desc()).limit(1)
    ).first()


def read_operation(connection: Connection, operation_id: int) -> OperationRow:
    """One operation by id. Raises NotFound."""
    row = connection.execute(select(tables.operation).where(tables.operation.c.id == operation_id)).first()
    if row is None:
        raise no_operation(operation_id)
    return row


def no_operation(operation_id: int) -> NotFound:
    """The error of a run whose operation isn't there."""
    return NotFound(
        f"there is no operation {operation_id}. If it was there, the server has lost it, by a failover to a replica or "
        "a restore: begin it again"
    )


def operation_of(connection: Connection, operation_id: int, index: QualifiedName) -> OperationRow | None:
    """An operation by id, if it is one of the index of that name, dropped or not: a server that lost its last commits
    gives the ids of these again."""
    found = tables.index
    query = select(tables.operation).join(found, found.c.id == tables.operation.c.index_id)
    query = query.where(tables.operation.c.id == operation_id, found.c.name == index.name)
    if index.schema is not None:
        query = query.where(found.c.schema_name == index.schema)
    return connection.execute(query).first()


def find_operation(database: Database, index: str) -> OperationRow:
    """The latest operation of the index of that name. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        return live_or_last(connection, parse_name(index, "index"))


def find_resumable(database: Database, index: str) -> OperationRow:
    """The latest operation of the index of that name, if a run can carry it to its end.

    Raises NotFound, and InvalidInput if it has ended, failed or is being aborted.
    """
    row = find_operation(database, index)
    why = {
        Status.COMPLETED: "is completed: there is nothing to resume. roir status shows the index",
        Status.ABORTED: "was aborted: there is nothing to resume. Begin again: roir build",
        Status.ABORTING: "is being aborted and can't be resumed. roir clean-up finishes that",
        Status.FAILED: f"has failed and can't be resumed: {row.error}. Abort it, then build again: roir abort",
    }.get(Status(row.status))
    if why is not None:
        raise InvalidInput(f"index {parse_name(index, 'index')}: operation {row.id} ({row.kind}) {why}")
    return row


def live_or_last(connection: Connection, name: QualifiedName) -> OperationRow:
    """As `find_operation`, inside a transaction."""
    row = newest_operation(connection, find_index(connection, name).id)
    if row is None:
        raise NotFound(f"index {name} has no operation yet")
    return row


def record_event(
    connection: Connection,
    index_id: int,
    operation_id: int | None,
    actor: str,
    action: str,
    detail: str | None = None,
) -> None:
    """Record who did what, when and why, in the transaction that does it."""
    connection.execute(
        insert(tables.event).values(
            index_id=index_id, operation_id=operation_id, actor=actor, action=action, detail=detail
        )
    )


def move(
    connection: Connection,
    row: OperationRow,
    verb: Verb,
    *,
    epoch: int | None = None,
    **values: Any,
) -> None:
    """Take an operation along one arrow: one UPDATE that names the states it expects (I8).

    epoch: the run that must still hold the operation. Raises Fenced, OperationPaused (at the end of a phase) or
    IllegalTransition if no row matched.
    """
    operation = tables.operation
    arrows = [arrow for arrow in TRANSITIONS if arrow.verb == verb]
    # An arrow's target differs by phase only for ADVANCE, which starts from the phase that the caller worked in.
    arrows = [arrow for arrow in arrows if arrow.phase == row.phase]
    if not arrows:
        raise IllegalTransition(f"operation {row.id} is in phase {row.phase}; it can't {verb.value} from there")
    arrow = arrows[0]
    statement = (
        update(operation)
        .where(
            operation.c.id == row.id,
            operation.c.status.in_([a.status.value for a in arrows]),
            operation.c.phase == arrow.phase.value,
        )
        .values(status=arrow.to_status.value, phase=arrow.to_phase.value, **values)
    )
    if epoch is not None:
        statement = statement.where(operation.c.epoch == epoch)
    if connection.execute(statement).rowcount == 1:
        return
    now = read_operation(connection, row.id)
    if epoch is not None and now.epoch != epoch:
        raise Fenced(
            f"operation {row.id} is driven by a newer run now ({now.owner}); this run stops, and has changed nothing"
        )
    if verb in (Verb.ADVANCE, Verb.COMPLETE) and now.status == Status.PAUSED:
        # Between the run's look at it and this.
        raise OperationPaused(f"operation {row.id} was paused: {now.pause_reason}")
    raise IllegalTransition(
        f"operation {row.id} is {now.status} in phase {now.phase}; it can't {verb.value} from there"
    )


def complete(connection: Connection, row: OperationRow, epoch: int) -> None:
    """Take an operation to its end, and stop its clock. Raises as `move`."""
    tick(connection, row.id, epoch)
    move(
        connection,
        row,
        Verb.COMPLETE,
        epoch=epoch,
        finished_at=func.clock_timestamp(),
        heartbeat_at=None,
        ticked_at=None,
    )


def tick(connection: Connection, operation_id: int, epoch: int) -> bool:
    """Count the time since the last tick to the phase, and beat the run's heart. False if the run is over.

    A gap longer than a fresh heartbeat (a machine that slept, a clock that jumped) counts as that at most.
    """
    values = {"operation": operation_id, "epoch": epoch}
    return bool(execute(connection, "SELECT roir.tick(%(operation)s, %(epoch)s)", values).scalar_one())


def start_clock(connection: Connection, operation_id: int, epoch: int) -> None:
    """Begin to count a run's time, unless that has begun. Until then its heart only beats: Spark is starting."""
    execute(
        connection,
        "UPDATE roir.operation SET ticked_at = clock_timestamp(), heartbeat_at = clock_timestamp() "
        "WHERE id = %(operation)s AND epoch = %(epoch)s AND status = 'running' AND ticked_at IS NULL",
        {"operation": operation_id, "epoch": epoch},
    )


def heart_beats(row: OperationRow, connection: Connection) -> bool:
    """True while the run that drives the operation has given a sign of life lately, by the server's clock."""
    if row.heartbeat_at is None or row.status != Status.RUNNING:
        return False
    age = connection.execute(select(func.extract("epoch", func.clock_timestamp() - row.heartbeat_at))).scalar_one()
    # One from the future is no sign of life either: the server's clock was set back, and who lives beats again soon.
    return abs(float(age)) < HEARTBEAT_FRESH_S


def pause(database: Database, index: str, actor: str, reason: str = "", operation: int | None = None) -> OperationRow:
    """Pause the running operation of an index; a no-op if it is paused already.

    Takes effect at once in the control tables and within one batch in the workers, which commit the batch that
    they are in. operation: the id of the only operation that is meant; None is the latest of the index.
    Raises NotFound, IllegalTransition (nothing is running, or another operation has begun since).
    """
    return _request(database, "pause", index, {"reason": reason or "on request", "actor": actor}, operation)


def resume(
    database: Database, index: str, actor: str, operation: int | None = None, **options: int | str | None
) -> OperationRow:
    """Lift the pause of an operation: a DAG run that waits for that continues. The options are as in `change_options`.

    `resume` drives nothing itself; `start_run` does. operation: as of `pause`.
    Raises NotFound, InvalidInput, IllegalTransition (not paused, or another operation has begun since).
    """
    _check_names(options)
    check_live_options(options)
    return _request(database, "resume", index, {"actor": actor, **options}, operation)


def change_options(
    database: Database, index: str, *, actor: str, operation: int | None = None, **options: int | str | None
) -> OperationRow:
    """Change a live operation's options, running or paused; workers follow at their next batch. None keeps a value.

    options: those of `LIVE_OPTIONS`, as `BuildOptions` has them; 0 is no limit, and never. A throttle is laid over the
    one that there is: `replica_lag=50MB` changes that limit, `replica_lag=off` takes it away, `off` all. An event is
    written for each value that really changes. operation: as of `pause`.
    Raises InvalidInput for a bad value (nothing is changed), or none at all; NotFound; IllegalTransition (nothing is
    live, or another operation has begun since).
    """
    _check_names(options)
    check_live_options(options)
    return _request(database, "change", index, {"actor": actor, **options}, operation)


def _check_names(options: Mapping[str, object]) -> None:
    unknown = set(options) - set(LIVE_OPTIONS)
    if unknown:
        raise TypeError(f"no options of a live operation: {', '.join(sorted(unknown))}")


def request_abort(
    database: Database, index: str, actor: str, reason: str = "", operation: int | None = None
) -> OperationRow:
    """Fence every worker of an operation at its next commit and mark it `aborting`; a no-op if it is that already.

    `abort.abort` or a clean-up then removes the generation. operation: as of `pause`. Raises NotFound,
    IllegalTransition.
    """
    return _request(database, "abort", index, {"reason": reason or "on request", "actor": actor}, operation)


# What the functions in migrations/sql/operations.sql raise.
_REFUSALS = {"P0002": NotFound, "55000": IllegalTransition, "42P09": InvalidInput, "22023": InvalidInput}


def _request(
    database: Database, function: str, index: str, values: dict[str, Any], operation: int | None = None
) -> OperationRow:
    """Call one of the SQL functions that users have too, so that there is one implementation of each."""
    arguments = ", ".join(f"{name} => %({name})s" for name in values)
    name = str(parse_name(index, "index"))
    try:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            if operation is not None:
                expect(connection, name, operation)
            execute(connection, f"SELECT roir.{function}(%(index)s, {arguments})", {"index": name, **values})
            return live_or_last(connection, parse_name(index, "index"))
    except DBAPIError as error:
        refusal = _REFUSALS.get(sqlstate(error))
        if refusal is None:
            raise
        raise refusal(said(error)) from None


def expect(connection: Connection, index: str, operation_id: int) -> None:
    """Lock the latest operation of an index, if that is the expected one: until the transaction's end no other begins.

    Raises IllegalTransition if another one has begun since, DBAPIError as the SQL functions do.
    """
    latest = execute(connection, "SELECT l.id, l.kind FROM roir.latest_operation(%(index)s) l", {"index": index}).one()
    if latest.id != operation_id:
        raise has_begun_since(index, operation_id, latest)


def has_begun_since(index: str, operation_id: int, latest: Row[Any]) -> IllegalTransition:
    """The error of a run whose operation isn't the latest of its index any more. latest: with its id and kind."""
    return IllegalTransition(
        f"index {index}: operation {operation_id} has ended; operation {latest.id} ({latest.kind}) has begun since"
    )


def pause_operation(
    connection: Connection, row: OperationRow, actor: str, reason: str, epoch: int | None = None
) -> None:
    """Pause an operation in the caller's transaction; `epoch`: of the run, if a run pauses its own."""
    # The time up to the request is work too; workers still finish their batch, which then counts for nothing.
    tick(connection, row.id, row.epoch)
    move(
        connection,
        row,
        Verb.PAUSE,
        epoch=epoch,
        paused_at=func.clock_timestamp(),
        paused_by=actor,
        pause_reason=reason,
        ticked_at=None,
        queued_at=None,
        queued_seen_at=None,
    )
    # An event may need a page that a full disk has no room for; the pause itself does not.
    with suppress(OperationalError), connection.begin_nested():
        record_event(connection, row.index_id, row.id, actor, "pause", reason)


def fail(connection: Connection, row: OperationRow, actor: str, error: str, epoch: int) -> None:
    """Mark an operation failed: to continue would be wrong. It can only be aborted."""
    move(connection, row, Verb.FAIL, epoch=epoch, error=error, heartbeat_at=None, ticked_at=None)
    record_event(connection, row.index_id, row.id, actor, "fail", error)


def has_paused(database: Database, operation_id: int, owner: str) -> bool:
    """True if an operation is paused, so that its driver, whose Spark isn't up yet, need not come up at all.

    owner: the run that it is; its heartbeat is forgotten, as the run itself would do at its end. A pause that the run
    before it took upon itself, because it fails meanwhile, doesn't count: `start_run` lifts it.
    """
    operation = tables.operation
    with database.transaction() as connection:
        row = read_operation(connection, operation_id)
        if row.status != Status.PAUSED or (row.paused_by == row.owner and row.owner != owner):
            return False
        connection.execute(
            update(operation)
            .where(
                operation.c.id == operation_id,
                operation.c.owner == owner,
                operation.c.status == Status.PAUSED.value,
            )
            .values(heartbeat_at=None, ticked_at=None)
        )
        return True


def note_wait(connection: Connection, operation_id: int, epoch: int, line: str | None) -> None:
    """Show in the status whom a run waits for; None: the wait is over. Doesn't touch another run's operation."""
    operation = tables.operation
    statement = update(operation).where(operation.c.id == operation_id, operation.c.epoch == epoch)
    if line is None:
        statement = statement.where(operation.c.notice.startswith(WAITING))
    connection.execute(statement.values(notice=line))


def running_elsewhere(row: OperationRow, index: str) -> OperationRunning:
    """The error that names the run which drives the operation."""
    return OperationRunning(
        f"index {index}: operation {row.id} is being driven by {row.owner}; wait for it, pause it "
        f"(roir pause {argument(index)}), or take over (--take-over)"
    )


def refuse_running(database: Database, row: OperationRow, index: str) -> None:
    """Raise OperationRunning while a run drives the operation."""
    with database.transaction() as connection:
        if heart_beats(row, connection):
            raise running_elsewhere(row, index)


def last_event(connection: Connection, operation_id: int, action: str) -> Row[Any] | None:
    """The newest event of that action of an operation."""
    event = tables.event
    return connection.execute(
        select(event)
        .where(event.c.operation_id == operation_id, event.c.action == action)
        .order_by(event.c.id.desc())
        .limit(1)
    ).first()


def is_actor(connection: Connection, operation_id: int, actor: str) -> bool:
    """Whether the events of an operation name that actor."""
    event = tables.event
    named = select(event.c.id).where(event.c.operation_id == operation_id, event.c.actor == actor)
    return connection.execute(named.limit(1)).first() is not None


def newest_census(connection: Connection, name: QualifiedName) -> OperationRow | None:
    """The newest census of that name which has its outcome: no index is left of it."""
    operation, index = tables.operation, tables.index
    query = select(operation).join(index, index.c.id == operation.c.index_id).where(index.c.name == name.name)
    if name.schema is not None:
        query = query.where(index.c.schema_name == name.schema)
    ended = (Status.ABORTING.value, Status.ABORTED.value)
    return connection.execute(
        query.where(operation.c.options["census"].as_boolean(), operation.c.status.in_(ended))
        .order_by(operation.c.id.desc())
        .limit(1)
    ).first()


def has_outcome(row: OperationRow) -> bool:
    """Whether an operation is a census that has ended with its outcome. What it had built may still be there."""
    return bool(row.options.get("census")) and row.status in (Status.ABORTING, Status.ABORTED)


def events(database: Database, index: str) -> Sequence[Row[Any]]:
    """All events of an index, oldest first; those of the newest census where only that is known."""
    name = parse_name(index, "index")
    with database.transaction() as connection:
        check_schema(connection)
        try:
            index_id = find_index(connection, name).id
        except NotFound:
            census = newest_census(connection, name)
            if census is None:
                raise
            index_id = census.index_id
        return connection.execute(
            select(tables.event).where(tables.event.c.index_id == index_id).order_by(tables.event.c.id)
        ).all()
