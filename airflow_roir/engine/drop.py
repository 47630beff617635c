"""Drop an index: its view, its generations and, with the source's last index, the capture."""

from __future__ import annotations

from collections.abc import Callable

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, parse_name, quote
from airflow_roir.engine.control import operations, removal
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.readers import old_snapshots, rows_view, view
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.errors import InvalidInput, LockNotAcquired, OperationRunning


@in_one_history
def drop_index(
    database: Database,
    index: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> None:
    """Drop an index: its views, generations and, with the source's last index, the capture triggers.

    Safe to kill and to repeat: the index can be found by its name until all is gone, and a clean-up finishes the drop.
    Raises NotFound, OperationRunning (abort that first), LockNotAcquired (its text says what was changed, if anything),
    and InvalidInput if other objects depend on the view: nothing was changed.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        last = operations.newest_operation(connection, found.id)
        if last is not None and last.status in operations.LIVE:
            raise _unfinished(index, last)
        _refuse_while_referenced(connection, found.id, index)

    kept: list[str] = []

    def remove(connection: Connection) -> list[int]:
        kept.clear()
        # Check again, under the lock: an operation may have begun, or another drop may have finished.
        view.hold(connection, found.id)
        now = operations.newest_operation(connection, found.id)
        if now is not None and now.status in operations.LIVE:
            raise _unfinished(index, now)
        _refuse_while_referenced(connection, found.id, index)
        rows_view.drop(connection, found.id)
        view.drop(connection, operations.index_name(found), found.id)
        ids = removal.generations_of(connection, found.id)
        if ids:
            operations.record_event(connection, found.id, None, actor, "drop")
        # The view is locked: no session begins to read from here on.
        if overlapping := old_snapshots.overlapping(connection, ids):
            kept.append(old_snapshots.kept(overlapping))
            old_snapshots.retire(connection, ids)
            return []
        removal.retire_for_good(connection, ids)
        return ids

    try:
        removal.remove(database, found.id, remove, report, patience_s)
    except DBAPIError as error:
        if not isinstance(error.orig, pg_errors.DependentObjectsStillExist):
            raise
        raise InvalidInput(
            f"index {index} can't be dropped: {error.orig.diag.message_detail}. Nothing was changed. Drop these "
            f"objects first, or define them without the index. Then: roir drop {argument(index)}"
        ) from error
    if kept:
        raise LockNotAcquired(f"index {index}: its view is dropped; {kept[0]}")
    try:
        finish_drop(database, found.id, report, patience_s)
    except LockNotAcquired as error:
        raise LockNotAcquired(
            f"index {index}: its view and entries are dropped, but the capture triggers of its table aren't, and now "
            f"do nothing ({error}). The next roir clean-up removes them, or run again: roir drop {argument(index)}"
        ) from error


@in_one_history
def finish_drop(
    database: Database, index_id: int, report: Callable[[str], None] = lambda line: None, patience_s: float = 5.0
) -> None:
    """Does the second half of a drop, also if the process that did the first half died. Safe to repeat."""

    def conclude(connection: Connection) -> None:
        # A build of the same name may have begun meanwhile, since the definition was still there.
        last = operations.newest_operation(connection, index_id)
        if not removal.generations_of(connection, index_id) and (last is None or last.status not in operations.LIVE):
            removal.forget_index(connection, index_id)

    removal.release_source(database, index_id, conclude, report, patience_s)
    for line in ends().release(database, index_id, patience_s, report):
        report(f"{line}; the next clean-up tries again")


def _refuse_while_referenced(connection: Connection, index_id: int, index: str) -> None:
    name = execute(connection, REFERENCE, {"index": index_id}).scalar()
    if name is not None:
        raise InvalidInput(
            f"index {index} can't be dropped: foreign key {quote(name)} needs it. Nothing was changed. Remove the "
            f"foreign key first: roir reference --remove TABLE {argument(index)}"
        )


def _unfinished(index: str, row: operations.OperationRow) -> OperationRunning:
    return OperationRunning(
        f"index {index} can't be dropped: {operations.named(row)} is {row.status}; abort it first: "
        f"roir abort {argument(index)}"
    )


REFERENCE = "SELECT r.name FROM roir.reference r WHERE r.index_id = %(index)s ORDER BY r.id LIMIT 1"
HALF_DROPPED = """
SELECT i.id FROM roir.index i
 WHERE i.dropped_at IS NULL
   AND NOT EXISTS (SELECT FROM roir.generation g WHERE g.index_id = i.id AND g.status <> 'dropped')
   AND NOT EXISTS (SELECT FROM roir.operation o
                    WHERE o.index_id = i.id AND o.status IN ('running', 'paused', 'failed', 'aborting'))
 ORDER BY i.id
"""


def half_dropped(connection: Connection) -> list[int]:
    """The ids of the indexes whose drop has begun but not ended."""
    return list(execute(connection, HALF_DROPPED).scalars())
