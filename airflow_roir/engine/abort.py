"""Abort an operation, or drop an index: source and other generations stay as they are, nothing of ours is left."""

from __future__ import annotations

from collections.abc import Callable

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection, func, select, update
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name
from airflow_roir.engine import catalog, operations, tables, view
from airflow_roir.engine import generation as physical
from airflow_roir.engine.capture import installation
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks import LOCK_TIMEOUT_MS, Drain, telling_of_names
from airflow_roir.engine.schema import check_schema
from airflow_roir.engine.verify import verification
from airflow_roir.errors import InvalidInput, LockNotAcquired, NotFound, OperationRunning
from airflow_roir.generation_state import CaptureMode, GenerationStatus
from airflow_roir.operation import Status, Verb

Report = Callable[[str], None]


def abort(
    database: Database,
    index: str,
    actor: str,
    reason: str = "",
    report: Report = lambda line: None,
    patience_s: float = 60.0,
) -> operations.OperationRow:
    """Abort the unfinished operation of an index: fence its workers, then remove the generation it was building.

    patience_s: how long to try for the locks. Where they can't be had the operation stays `aborting`, which the
    report says, and the next clean-up finishes it. Raises NotFound, IllegalTransition (nothing to abort).
    """
    row = operations.request_abort(database, index, actor, reason)
    try:
        finish_abort(database, row.id, actor, report, patience_s)
    except LockNotAcquired as error:
        report(f"operation {row.id} stays aborting until the next clean-up: {error}")
    with database.transaction() as connection:
        return operations.read_operation(connection, row.id)


def finish_abort(
    database: Database, operation_id: int, actor: str, report: Report = lambda line: None, patience_s: float = 5.0
) -> None:
    """Remove what an aborting operation built. Safe to repeat, and for several at once.

    First the generation, under the drain lock; then, if the source has no other, the triggers, whose ACCESS
    EXCLUSIVE lock readers can hold up. Raises LockNotAcquired.
    """
    with database.transaction() as connection:
        row = operations.read_operation(connection, operation_id)
        if row.kind == "verify":
            _conclude(connection, row, actor)
            return

    def remove(connection: Connection) -> list[int]:
        _retire_for_good(connection, [row.generation_id])
        return [row.generation_id]

    _remove_generations(database, row.index_id, remove, report, patience_s)

    def conclude(connection: Connection) -> None:
        if not _conclude(connection, row, actor):
            return
        generation = tables.generation
        others = connection.execute(
            select(generation.c.id).where(
                generation.c.index_id == row.index_id,
                generation.c.status.in_((GenerationStatus.ACTIVE.value, GenerationStatus.RETIRED.value)),
            )
        ).first()
        if others is None:
            _forget_index(connection, row.index_id)

    _release_source(database, row.index_id, conclude, report, patience_s)


def _conclude(connection: Connection, row: operations.OperationRow, actor: str) -> bool:
    """From aborting to aborted, once what the operation made is gone. False where somebody else was faster."""
    operation = tables.operation
    now = connection.execute(select(operation).where(operation.c.id == row.id).with_for_update()).one()
    if now.status != Status.ABORTING:
        return False
    verification.give_up(connection, row.id)
    operations.move(connection, now, Verb.REMOVE, finished_at=func.clock_timestamp())
    operations.record_event(connection, row.index_id, row.id, actor, "aborted")
    return True


def drop_index(
    database: Database,
    index: str,
    actor: str,
    report: Report = lambda line: None,
    patience_s: float = 60.0,
) -> None:
    """Drop an index: its view, generations and, with the source's last index, the capture triggers.

    Safe to kill and to repeat: the index can be found by its name until all is gone, and clean-up goes on with it.
    Raises NotFound, OperationRunning (abort that first), LockNotAcquired (nothing was changed, or what it says), and
    InvalidInput if other objects depend on the view: nothing was changed.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = operations.find_index(connection, parse_name(index, "index"))
        last = operations.newest_operation(connection, found.id)
        if last is not None and last.status in operations.LIVE:
            raise OperationRunning(f"index {index} has an unfinished operation; abort it first: roir abort {index}")

    def remove(connection: Connection) -> list[int]:
        # Once more, under the lock: an operation may have begun, or another drop have come to its end.
        now = operations.newest_operation(connection, found.id)
        if now is not None and now.status in operations.LIVE:
            raise OperationRunning(f"index {index} has an unfinished operation; abort it first: roir abort {index}")
        view.drop(connection, operations.index_name(found), found.id)
        ids = _generations(connection, found.id)
        _retire_for_good(connection, ids)
        if ids:
            operations.record_event(connection, found.id, None, actor, "drop")
        return ids

    try:
        _remove_generations(database, found.id, remove, report, patience_s)
    except DBAPIError as error:
        if not isinstance(error.orig, pg_errors.DependentObjectsStillExist):
            raise
        raise InvalidInput(
            f"index {index} can't be dropped: {error.orig.diag.message_detail}. Nothing was changed. Drop "
            "that first, or define it without the index; then drop the index again"
        ) from error
    try:
        finish_drop(database, found.id, report, patience_s)
    except LockNotAcquired as error:
        raise LockNotAcquired(
            f"index {index}: its view and entries are gone. What is left is the capture of its table's writes, which "
            f"maintains nothing any more; the next roir clean-up removes it, or roir drop {index} again: {error}"
        ) from error


def finish_drop(database: Database, index_id: int, report: Report = lambda line: None, patience_s: float = 5.0) -> None:
    """The second half of a drop, also where the first one was made by a process that died. Safe to repeat."""

    def conclude(connection: Connection) -> None:
        # A build of the same name may have begun since, where the definition was still there.
        last = operations.newest_operation(connection, index_id)
        if not _generations(connection, index_id) and (last is None or last.status not in operations.LIVE):
            _forget_index(connection, index_id)

    _release_source(database, index_id, conclude, report, patience_s)


HALF_DROPPED = """
SELECT i.id FROM roir.index i
 WHERE i.dropped_at IS NULL
   AND NOT EXISTS (SELECT FROM roir.generation g WHERE g.index_id = i.id AND g.status <> 'dropped')
   AND NOT EXISTS (SELECT FROM roir.operation o
                    WHERE o.index_id = i.id AND o.status IN ('running', 'paused', 'failed', 'aborting'))
 ORDER BY i.id
"""


def half_dropped(connection: Connection) -> list[int]:
    """Indexes, by id, whose drop has begun and not come to its end."""
    return list(execute(connection, HALF_DROPPED).scalars())


def _generations(connection: Connection, index_id: int) -> list[int]:
    generation = tables.generation
    query = select(generation.c.id).where(
        generation.c.index_id == index_id, generation.c.status != GenerationStatus.DROPPED.value
    )
    return list(connection.execute(query.order_by(generation.c.id)).scalars())


def _remove_generations(
    database: Database,
    index_id: int,
    remove: Callable[[Connection], list[int]],
    report: Report,
    patience_s: float,
) -> None:
    """Under the drain lock: `remove` them from the control tables, then from the capture, then drop their tables.

    remove: returns their ids.
    """
    with database.transaction() as connection:
        source = source_if_there(connection, index_id)
        known = _generations(connection, index_id)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        if source is not None:
            lock()
        generation_ids = remove(connection)
        # Where nothing was left to remove the function may be gone already, and must not come back.
        if source is not None and generation_ids:
            installation.refresh(connection, source)
        for generation_id in generation_ids:
            physical.drop(connection, generation_id)

    with telling_of_names():
        _drain(database, source, index_id, patience_s).run(
            body, report, [name for one in known for name in physical.names(one)]
        )


def _release_source(
    database: Database, index_id: int, conclude: Callable[[Connection], None], report: Report, patience_s: float
) -> None:
    """Take the triggers off a source that has no generation left, and `conclude` in the same transaction."""
    with database.transaction() as connection:
        source = source_if_there(connection, index_id)
        oid = connection.execute(select(tables.index.c.source_oid).where(tables.index.c.id == index_id)).scalar_one()

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        if source is None:
            installation.drop_functions(connection, oid)
        else:
            lock()
            if not installation.targets(connection, source.oid):
                installation.drop_functions(connection, source.oid)
        conclude(connection)

    # Dropping a trigger is what needs the source for itself.
    exclusive = [] if source is None else [source.sql]
    with telling_of_names():
        _drain(database, source, index_id, patience_s).run(body, report, exclusive)


def _drain(database: Database, source: Source | None, index_id: int, patience_s: float) -> Drain:
    if source is None:
        return Drain(database, f"index {index_id}", (), LOCK_TIMEOUT_MS, patience_s)
    return Drain(database, source.sql, source.relations, LOCK_TIMEOUT_MS, patience_s)


def source_if_there(connection: Connection, index_id: int, check: bool = False) -> Source | None:
    """The source of an index, None where it was dropped itself.

    check: raise InvalidInput where it can't be indexed any more. To take an index away that doesn't matter.
    """
    try:
        return catalog.source_of_index(connection, index_id, check)
    except NotFound:
        return None


def _retire_for_good(connection: Connection, generation_ids: list[int]) -> None:
    connection.execute(
        update(tables.generation)
        .where(tables.generation.c.id.in_(generation_ids), tables.generation.c.status != GenerationStatus.DROPPED.value)
        .values(status=GenerationStatus.DROPPED.value, capture_mode=CaptureMode.NONE.value)
    )


def _forget_index(connection: Connection, index_id: int) -> None:
    connection.execute(
        update(tables.index).where(tables.index.c.id == index_id).values(dropped_at=func.clock_timestamp())
    )
