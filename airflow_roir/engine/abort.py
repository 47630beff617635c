"""Aborts an operation: removes all that it built; the source and the index's other generations stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from sqlalchemy import Connection

from airflow_roir.engine.compact import undo
from airflow_roir.engine.control import long_pause, operations, removal, requests
from airflow_roir.engine.control.long_pause import LongPause
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.reference import removal as removal_of_references
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.engine.verify import record
from airflow_roir.errors import LockNotAcquired
from airflow_roir.operation import Kind, Status, Verb
from airflow_roir.quantity import duration

IS_SHOWN_OR_KEPT = """
SELECT EXISTS (SELECT FROM roir.generation WHERE index_id = %(index)s AND status IN ('active', 'retired'))
"""


@in_one_history
def abort(
    database: Database,
    index: str,
    actor: str,
    reason: str = "",
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> operations.OperationRow:
    """Abort the unfinished operation of an index: fence its workers, then remove the generation it was building.

    patience_s: how long to try for the locks. Without them the operation stays `aborting`, `report` says so, and the
    next clean-up finishes it. Raises NotFound, IllegalTransition (nothing to abort).
    """
    row = requests.request_abort(database, index, actor, reason)
    try:
        finish_abort(database, row.id, actor, report, patience_s)
    except LockNotAcquired as error:
        report(f"operation {row.id} stays aborting until the next clean-up finishes it: {error}")
    with database.transaction() as connection:
        return operations.read_operation(connection, row.id)


@in_one_history
def finish_abort(
    database: Database,
    operation_id: int,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 5.0,
) -> None:
    """Remove all that an aborting operation built. Safe to repeat, and in several processes at once.

    Removes the generation first, under the drain lock; then, if the source has no other generation, the triggers.
    Readers can hold up the ACCESS EXCLUSIVE lock that the triggers need. Raises LockNotAcquired.
    """
    with database.transaction() as connection:
        row = operations.read_operation(connection, operation_id)
        if row.kind == Kind.VERIFY:
            conclude(connection, row, actor)
            return
    if row.kind == Kind.REFERENCE:
        made = removal_of_references.of_operation(database, operation_id)
        if made is not None:
            removal_of_references.remove(database, made, actor, report, patience_s)
        with database.transaction() as connection:
            conclude(connection, row, actor)
        return
    if row.kind == Kind.COMPACT:
        # Segments that are swapped in stay.
        undo.take_back(database, operation_id, report, patience_s)
        with database.transaction() as connection:
            conclude(connection, row, actor)
        return
    with database.transaction() as connection:
        # Nothing is shipped to it from shards any more.
        ends().retire(connection, row.generation_id, actor)

    def remove(connection: Connection) -> list[int]:
        # Again, under the lock: another process may have removed it meanwhile.
        if operations.read_operation(connection, operation_id).status != Status.ABORTING:
            return []
        removal.retire_for_good(connection, [row.generation_id])
        return [row.generation_id]

    removal.remove(database, row.index_id, remove, report, patience_s)

    def release(connection: Connection) -> None:
        if not conclude(connection, row, actor):
            return
        if not execute(connection, IS_SHOWN_OR_KEPT, {"index": row.index_id}).scalar_one():
            removal.forget_index(connection, row.index_id)

    removal.release_source(database, row.index_id, release, report, patience_s)
    for line in ends().release(database, row.index_id, patience_s, report):
        report(f"{line}; the next clean-up tries again")


def conclude(connection: Connection, row: operations.OperationRow, actor: str) -> bool:
    """Moves an operation from aborting to aborted, once all that it built is gone. False if another process did."""
    now = operations.lock_operation(connection, row.id)
    if now.status != Status.ABORTING:
        return False
    # First: this move keeps the progress, which is counted in units that the next statement deletes.
    operations.move(connection, now, Verb.REMOVE, also="finished_at = clock_timestamp()")
    record.give_up(connection, row.id)
    operations.record_event(connection, row.index_id, row.id, actor, "aborted")
    return True


def settle_pauses(
    database: Database,
    actor: str,
    operation_id: int | None = None,
    tell: Callable[[LongPause], object] = lambda pause: None,
    report: Callable[[str], None] = lambda line: None,
) -> list[LongPause]:
    """Warns of long pauses, of one operation or of all, and aborts operations whose time is over. Returns all pauses.

    An abandoned operation counts as paused since a run has driven it last, or since its runs are known to have ended.

    tell: called for each pause that this call has written an event of: first once, then once a day, and for an abort.
    """
    with database.transaction() as connection:
        found = [row.operation_id for row in long_pause.paused(connection, operation_id)]
    return [pause for one in found if (pause := _settle_pause(database, one, actor, tell, report)) is not None]


def _settle_pause(
    database: Database,
    operation_id: int,
    actor: str,
    tell: Callable[[LongPause], object],
    report: Callable[[str], None],
) -> LongPause | None:
    with database.transaction() as connection:
        # The lock orders this and a resume: the resume comes before this look, or after the abort.
        operations.lock_operation(connection, operation_id)
        row = next(iter(long_pause.paused(connection, operation_id)), None)
        pause = None if row is None else long_pause.warning(connection, row)
        if row is None or pause is None:
            return None
        is_due = row.abort_after_s is not None and pause.aborts_in == 0.0
        if is_due:
            pause = LongPause(**{**asdict(pause), "aborts_in": None, "aborted": True})
            how = long_pause.OF_ABANDONED if row.abandoned else "paused"
            reason = f"{how} for {duration(row.seconds)}, longer than abort_after_s ({duration(row.abort_after_s)})"
            name = str(operations.index_name(row))
            values = {"index": name, "reason": reason, "actor": actor}
            execute(connection, "SELECT roir.abort(%(index)s, %(reason)s, %(actor)s)", values)
        is_new = row.warned_at is None or (row.now - row.warned_at).total_seconds() >= long_pause.AGAIN_S
        if is_new and not is_due:
            index_id = operations.read_operation(connection, operation_id).index_id
            action = long_pause.OF_ABANDONED if row.abandoned else long_pause.EVENT
            operations.record_event(connection, index_id, operation_id, actor, action, pause.text)
    if is_due:
        report(pause.text)
        try:
            finish_abort(database, operation_id, actor, report)
        except LockNotAcquired as error:
            report(f"operation {operation_id} stays aborting until the next clean-up finishes it: {error}")
    if is_due or is_new:
        tell(pause)
    return pause
