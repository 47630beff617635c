"""The one way to the control tables: finds operations, moves them along their transitions, records events.

The file is long because each move is refused, recorded and announced by its neighbours here, and nowhere else.
"""

from __future__ import annotations

import getpass
import os
import shlex
import socket
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import QualifiedName, argument, key_list, parse_name, quote
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import Fenced, IllegalTransition, InvalidInput, NotFound, OperationAborted, OperationPaused
from airflow_roir.nearest import meant
from airflow_roir.one_line import one_line
from airflow_roir.operation import TRANSITIONS, Kind, Phase, Status, Verb, following

OperationRow = Row[Any]

LIVE = (Status.RUNNING, Status.PAUSED, Status.FAILED, Status.ABORTING)
ABORT = (Status.ABORTING, Status.ABORTED)
LIVE_INDEXES = """
SELECT * FROM roir.index
 WHERE name = %(name)s AND schema_name = coalesce(%(schema)s, schema_name) AND dropped_at IS NULL
"""
ACTIVE_GENERATION = "SELECT * FROM roir.generation WHERE index_id = %(index)s AND status = 'active'"
NEWEST_OPERATION = "SELECT * FROM roir.operation WHERE index_id = %(index)s ORDER BY id DESC LIMIT 1"
NEWEST_OF_ALL = """
SELECT o.id, i.schema_name, i.name FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 ORDER BY o.id DESC LIMIT 1
"""
OPERATION = "SELECT * FROM roir.operation WHERE id = %(operation)s"
OPERATION_OF = """
SELECT o.* FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE o.id = %(operation)s AND i.name = %(name)s AND i.schema_name = coalesce(%(schema)s, i.schema_name)
"""
# also: further columns that the arrow changes.
MOVE = """
UPDATE roir.operation SET status = %(to_status)s, phase = %(to_phase)s{also}
 WHERE id = %(operation)s AND status = ANY (%(statuses)s) AND phase = %(phase)s AND epoch = coalesce(%(epoch)s, epoch)
"""
PAUSE = "SELECT roir.pause_operation(%(operation)s, %(epoch)s, %(actor)s, %(reason)s, %(reason)s)"
RECORD_EVENT = """
INSERT INTO roir.event (index_id, operation_id, actor, action, detail)
VALUES (%(index)s, %(operation)s, %(actor)s, %(action)s, %(detail)s)
"""
NOTE_SPARK = "UPDATE roir.operation SET without_spark = %(without)s WHERE id = %(operation)s"
END_OF_PAUSED = """
UPDATE roir.operation SET heartbeat_at = NULL, ticked_at = NULL
 WHERE id = %(operation)s AND owner = %(owner)s AND status = 'paused'
"""
NEWEST_CENSUS = """
SELECT o.* FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE i.name = %(name)s AND i.schema_name = coalesce(%(schema)s, i.schema_name)
   AND (o.options ->> 'census')::boolean AND o.status IN ('aborting', 'aborted')
 ORDER BY o.id DESC LIMIT 1
"""
# The newest operation of a name that no index has, if it is a build that was aborted.
ABORTED_BUILD = """
SELECT * FROM (
  SELECT o.*, i.schema_name, i.name, i.key_columns, i.included_columns, i.is_unique, i.nulls_not_distinct,
         i.expressions, i.condition,
         (SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid = i.source_oid::oid) AS source
    FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
   WHERE i.name = %(name)s AND i.schema_name = coalesce(%(schema)s, i.schema_name)
   ORDER BY o.id DESC LIMIT 1) newest
 WHERE kind = 'create' AND status IN ('aborting', 'aborted') AND NOT coalesce((options ->> 'census')::boolean, false)
"""
LAST_EVENT = """
SELECT * FROM roir.event WHERE operation_id = %(operation)s AND action = %(action)s ORDER BY id DESC LIMIT 1
"""
IS_ACTOR = "SELECT EXISTS (SELECT FROM roir.event WHERE operation_id = %(operation)s AND actor = %(actor)s)"
EVENTS = "SELECT * FROM roir.event WHERE index_id = %(index)s ORDER BY id"


def default_actor() -> str:
    """`user@host`, for events; the process may have no user name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def named(operation: Row[Any]) -> str:
    """An operation for messages: `operation 3 (rebuild)`. operation: its id and kind."""
    return f"operation {operation.id} ({Kind(operation.kind).noun})"


def find_index(connection: Connection, name: QualifiedName) -> Row[Any]:
    """The row of an index that isn't dropped, by name. Raises NotFound, InvalidInput (no schema, and ambiguous)."""
    found = index_if_there(connection, name)
    if found is None:
        if aborted := aborted_build(connection, name):
            event = last_event(connection, aborted.id, "abort")
            at = f" at {event.at:%Y-%m-%d %H:%M:%S %Z}" if event else ""
            raise NotFound(
                f"there is no index {name}: its build, operation {aborted.id}, was aborted{at} by "
                f"{aborted_by(connection, aborted)}; {build_again(aborted)}"
            )
        raise NotFound(f"there is no index {name}; `roir status` lists all indexes{near_index(connection, name)}")
    return found


def aborted_build(connection: Connection, name: QualifiedName) -> Row[Any] | None:
    """The operation whose abort took away the index of that name, with the index's definition; None if none did."""
    return execute(connection, ABORTED_BUILD, {"name": name.name, "schema": name.schema}).first()


def build_again(index: Row[Any]) -> str:
    """How to build an index that is gone: the command with its definition. index: with `source`, or None."""
    if index.source is None:
        return "its table was dropped, too"
    expressions = dict(index.expressions)
    options = ["--table", index.source, "--keys", key_list(index.key_columns, expressions, ",")]
    if index.included_columns:
        options += ["--include", key_list(index.included_columns, expressions, ",")]
    options += ["--where", index.condition] if index.condition else []
    options += ["--unique"] * index.is_unique + ["--nulls-not-distinct"] * index.nulls_not_distinct
    return f"build it again: roir build {argument(str(index_name(index)))} {shlex.join(options)}"


def index_if_there(connection: Connection, name: QualifiedName) -> Row[Any] | None:
    """As `find_index`; None if there is no such index."""
    found = execute(connection, LIVE_INDEXES, {"name": name.name, "schema": name.schema}).all()
    if len(found) > 1:
        schemas = ", ".join(quote(row.schema_name) for row in found)
        raise InvalidInput(f"index {name} is ambiguous: it exists in {schemas}; name the schema too")
    return found[0] if found else None


def near_index(connection: Connection, name: QualifiedName) -> str:
    """The end of the refusal of an index's name that doesn't exist: the nearest index, if one is like it."""
    values = {"schema": name.schema, "name": name.name}
    return meant(execute(connection, "SELECT roir.nearest_index(%(schema)s, %(name)s)", values).scalar())


def read_index(connection: Connection, index_id: int) -> Row[Any]:
    """The row of an index, dropped or not."""
    return execute(connection, "SELECT * FROM roir.index WHERE id = %(index)s", {"index": index_id}).one()


def index_name(row: Row[Any]) -> QualifiedName:
    """The index's full name."""
    return QualifiedName(row.schema_name, row.name)


def active_generation(connection: Connection, index: Row[Any]) -> Row[Any]:
    """The active generation of an index, which readers see. Raises NotFound if none is published."""
    found = execute(connection, ACTIVE_GENERATION, {"index": index.id}).first()
    if found is None:
        name = index_name(index)
        if is_kept(connection, index.id):
            raise NotFound(KEPT.format(index=name))
        raise NotFound(f"index {name} isn't published yet; finish its operation first: roir resume {argument(name)}")
    return found


# The text for a drop that waits for the end of transactions.
KEPT = (
    "index {index}: its view is dropped; its entries are kept, and maintained, since SERIALIZABLE transactions have "
    "read them: roir clean-up drops the entries, or names the transaction that still needs them"
)
IS_KEPT = """
SELECT coalesce(bool_and(status = 'retired'), false) FROM roir.generation
 WHERE index_id = %(index)s AND status <> 'dropped'
"""


def is_kept(connection: Connection, index_id: int) -> bool:
    """True if an index's view is dropped, but its entries aren't yet."""
    return bool(execute(connection, IS_KEPT, {"index": index_id}).scalar_one())


def newest_operation(connection: Connection, index_id: int) -> OperationRow | None:
    """The latest operation of an index, live or ended; None if there is none."""
    return execute(connection, NEWEST_OPERATION, {"index": index_id}).first()


def read_operation(connection: Connection, operation_id: int) -> OperationRow:
    """One operation by id. Raises NotFound."""
    row = execute(connection, OPERATION, {"operation": operation_id}).first()
    if row is None:
        raise no_operation(connection, operation_id)
    return row


def lock_operation(connection: Connection, operation_id: int) -> OperationRow:
    """One operation by id, locked until the end of the transaction."""
    return execute(connection, f"{OPERATION} FOR UPDATE", {"operation": operation_id}).one()


def no_operation(connection: Connection, operation_id: int) -> NotFound:
    """The error for the id of an operation that doesn't exist."""
    newest = execute(connection, NEWEST_OF_ALL).first()
    known = "none yet" if newest is None else f"{newest.id} is the newest, of index {index_name(newest)}"
    return NotFound(
        f"there is no operation {operation_id}; {known}. If it was there, the server has lost it, by a failover to a "
        "replica or a restore: begin it again"
    )


def operation_of(connection: Connection, operation_id: int, index: QualifiedName) -> OperationRow | None:
    """An operation by id, if it belongs to the index with that name, dropped or not; else None.

    A server that lost its last commits gives the ids of these again, maybe to operations of another index.
    """
    values = {"operation": operation_id, "name": index.name, "schema": index.schema}
    return execute(connection, OPERATION_OF, values).first()


def note_spark(database: Database, operation_id: int, without: bool) -> None:
    """Writes whether threads of a command drive the operation, which a later command then uses, too."""
    with database.transaction() as connection:
        execute(connection, NOTE_SPARK, {"operation": operation_id, "without": without})


def find_operation(database: Database, index: str) -> OperationRow:
    """The latest operation of the index with that name. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        return live_or_last(connection, parse_name(index, "index"))


def find_resumable(database: Database, index: str) -> OperationRow:
    """The latest operation of the index with that name, if a run can complete it.

    Raises NotFound, and InvalidInput if it has ended, failed or is being aborted.
    """
    row = find_operation(database, index)
    name = parse_name(index, "index")
    why = {
        Status.COMPLETED: "is completed: there is nothing to resume. roir status shows the index",
        Status.ABORTED: f"was aborted: there is nothing to resume. Begin again: roir build {argument(name)}",
        Status.ABORTING: "is being aborted and can't be resumed. roir clean-up finishes that",
        Status.FAILED: f"has failed and can't be resumed: {row.error}. Abort it: roir abort {argument(name)}. "
        "Then build again",
    }.get(Status(row.status))
    if why is not None:
        raise InvalidInput(f"index {name}: {named(row)} {why}")
    return row


def live_or_last(connection: Connection, name: QualifiedName) -> OperationRow:
    """As `find_operation`, in the caller's transaction."""
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
    """Records an action with its actor, time and detail, in the transaction that does it."""
    values = {"index": index_id, "operation": operation_id, "actor": actor, "action": action, "detail": detail}
    execute(connection, RECORD_EVENT, values)


def move(
    connection: Connection,
    row: OperationRow,
    verb: Verb,
    *,
    epoch: int | None = None,
    also: str = "",
    **values: Any,
) -> None:
    """Moves an operation along one arrow: one UPDATE that names the states it expects (I8).

    epoch: the run that must still hold the operation. also: SQL, `column = value, …`, for further columns that the
    arrow changes. values: bound there. Raises Fenced, OperationPaused (at the end of a phase) or IllegalTransition if
    no row matched.
    """
    arrows = [arrow for arrow in TRANSITIONS if arrow.verb == verb]
    # An arrow's target differs by phase only for ADVANCE, which starts from the phase that the caller worked in.
    arrows = [arrow for arrow in arrows if arrow.phase == row.phase]
    if not arrows:
        raise IllegalTransition(f"operation {row.id} is in phase {row.phase}; it can't {verb.value} from there")
    arrow = arrows[0]
    moved = {
        "operation": row.id,
        "epoch": epoch,
        "statuses": [one.status.value for one in arrows],
        "phase": arrow.phase.value,
        "to_status": arrow.to_status.value,
        "to_phase": arrow.to_phase.value,
    }
    if execute(connection, MOVE.format(also=also and f", {also}"), {**moved, **values}).rowcount == 1:
        return
    raise _refusal(connection, row, verb, epoch)


def _refusal(
    connection: Connection, row: OperationRow, verb: Verb, epoch: int | None
) -> Fenced | OperationPaused | IllegalTransition:
    """The error that says why an operation can't move along an arrow."""
    now = read_operation(connection, row.id)
    if epoch is not None and now.epoch != epoch:
        return overtaken(connection, row.id)
    if verb in (Verb.ADVANCE, Verb.COMPLETE) and now.status == Status.PAUSED:
        # It was paused after the run last read it.
        return OperationPaused(f"operation {row.id} was paused: {now.pause_reason}")
    return IllegalTransition(
        f"operation {row.id} is {now.status} in phase {now.phase}; it can't {verb.value} from there"
    )


def overtaken(connection: Connection, operation_id: int, owner: str = "this run") -> Fenced:
    """The error of a run that lost its operation: a user aborted the operation, or another run drives it now.

    owner: the run's name. Raises NotFound.
    """
    now = read_operation(connection, operation_id)
    index = index_name(read_index(connection, now.index_id))
    if now.status in ABORT:
        newest = newest_operation(connection, now.index_id)
        since = f"; {named(newest)} has begun since" if newest and newest.id != now.id else ""
        return OperationAborted(
            f"index {index}: operation {now.id} was aborted by {aborted_by(connection, now)}; {owner} stops{since}"
        )
    if now.status == Status.COMPLETED:
        return Fenced(f"index {index}: {now.owner} has completed operation {now.id}; {owner} stops")
    return Fenced(f"index {index}: {now.owner} drives operation {now.id} now; {owner} stops")


def aborted_by(connection: Connection, row: OperationRow) -> str:
    """The actor who aborted an operation, with the reason: `ann@desk: too slow`."""
    event = last_event(connection, row.id, "abort")
    return f"{one_line(event.actor if event else row.owner)}: {one_line((event and event.detail) or 'no reason given')}"


def advance(connection: Connection, row: OperationRow, epoch: int, owner: str, said: str = "") -> None:
    """Moves an operation to its next phase, and records that as an event. said: a text for the event."""
    sign_of_life.tick(connection, row.id, epoch)
    move(connection, row, Verb.ADVANCE, epoch=epoch)
    record_event(connection, row.index_id, row.id, owner, "phase", following(Phase(row.phase)).shown + said)


def complete(connection: Connection, row: OperationRow, epoch: int) -> None:
    """Completes an operation, and stops its clock. Raises as `move`."""
    sign_of_life.tick(connection, row.id, epoch)
    ended = "finished_at = clock_timestamp(), heartbeat_at = NULL, ticked_at = NULL"
    move(connection, row, Verb.COMPLETE, epoch=epoch, also=ended)


def pause_operation(
    connection: Connection, row: OperationRow, actor: str, reason: str, epoch: int | None = None
) -> None:
    """Pauses an operation in the caller's transaction. epoch: the run's, if a run pauses its own. Raises as `move`."""
    values = {"operation": row.id, "epoch": epoch, "actor": actor, "reason": reason}
    if not execute(connection, PAUSE, values).scalar_one():
        raise _refusal(connection, row, Verb.PAUSE, epoch)


def fail(connection: Connection, row: OperationRow, actor: str, error: str, epoch: int) -> None:
    """Marks an operation as failed, since to continue would be wrong. It can only be aborted."""
    failed = "error = %(error)s, heartbeat_at = NULL, ticked_at = NULL"
    move(connection, row, Verb.FAIL, epoch=epoch, also=failed, error=error)
    record_event(connection, row.index_id, row.id, actor, "fail", error)


def has_paused(database: Database, operation_id: int, owner: str) -> bool:
    """True if an operation is paused, so that a driver whose Spark is still starting need not start at all.

    owner: the driver's run; if it is paused, its heartbeat is cleared, as at a run's end. A pause by the failure of the
    run before doesn't count: `start_run` lifts it.
    """
    with database.transaction() as connection:
        row = read_operation(connection, operation_id)
        if row.status != Status.PAUSED or (row.paused_by == row.owner and row.owner != owner):
            return False
        execute(connection, END_OF_PAUSED, {"operation": operation_id, "owner": owner})
        return True


def last_event(connection: Connection, operation_id: int, action: str) -> Row[Any] | None:
    """The newest event with that action of an operation; None if there is none."""
    return execute(connection, LAST_EVENT, {"operation": operation_id, "action": action}).first()


def is_actor(connection: Connection, operation_id: int, actor: str) -> bool:
    """True if an event of the operation has that actor."""
    return bool(execute(connection, IS_ACTOR, {"operation": operation_id, "actor": actor}).scalar_one())


def newest_census(connection: Connection, name: QualifiedName) -> OperationRow | None:
    """The newest census with that name that has its outcome, and so has no index any more; None if there is none."""
    return execute(connection, NEWEST_CENSUS, {"name": name.name, "schema": name.schema}).first()


def has_outcome(row: OperationRow) -> bool:
    """True if an operation is a census that has ended with its outcome. Its tables may still exist."""
    return bool(row.options.get("census")) and row.status in ABORT


def events(database: Database, index: str) -> Sequence[Row[Any]]:
    """All events of an index, oldest first; if there is no index with that name, those of its newest census."""
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
        return execute(connection, EVENTS, {"index": index_id}).all()
