"""Abort an operation, or drop an index: source and other generations stay as they are, nothing of ours is left."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, func, select, update

from airflow_roir.definition import parse_name
from airflow_roir.engine import capture, catalog, control, tables
from airflow_roir.engine import generation as physical
from airflow_roir.engine.catalog import Source
from airflow_roir.engine.database import Database, Drain, execute
from airflow_roir.engine.schema import check_schema
from airflow_roir.errors import IllegalTransition, NotFound, OperationRunning
from airflow_roir.operation import Status, Verb

Report = Callable[[str], None]
DROP_LOCK_TIMEOUT_MS = 500


def abort(
    database: Database,
    index: str,
    actor: str,
    reason: str = "",
    report: Report = lambda line: None,
    patience_s: float = 60.0,
) -> control.OperationRow:
    """Abort the live operation of an index: fence its workers, then remove the generation it was building.

    patience_s: how long to try for the locks. Raises NotFound, IllegalTransition (nothing to abort), and
    LockNotAcquired, where workers are fenced and the operation is paused, but the generation is still there:
    abort again.
    """
    with database.transaction() as connection:
        check_schema(connection)
        row = control.live_or_last(connection, parse_name(index, "index"))
        if row.status not in control.LIVE:
            raise IllegalTransition(f"index {index} has no operation to abort: its last one is {row.status}")
        # Every worker of every run is fenced from here on, at its next commit.
        connection.execute(
            update(tables.operation)
            .where(tables.operation.c.id == row.id)
            .values(epoch=tables.operation.c.epoch + 1, owner=actor, heartbeat_at=None)
        )
        if row.status == Status.RUNNING:
            row = control.read_operation(connection, row.id)
            control.pause_operation(connection, row, actor, "being aborted")

    def remove(connection: Connection) -> None:
        now = control.read_operation(connection, row.id)
        control.move(connection, now, Verb.ABORT, finished_at=func.clock_timestamp(), heartbeat_at=None, ticked_at=None)
        _retire_for_good(connection, [row.generation_id])
        active = connection.execute(
            select(tables.generation.c.id).where(
                tables.generation.c.index_id == row.index_id,
                tables.generation.c.status.in_(("active", "retired")),
            )
        ).first()
        if active is None:
            _forget_index(connection, row.index_id)
        control.record_event(connection, row.index_id, row.id, actor, "abort", reason or "on request")

    _remove_generations(database, row.index_id, [row.generation_id], remove, report, patience_s)
    with database.transaction() as connection:
        return control.read_operation(connection, row.id)


def drop_index(
    database: Database,
    index: str,
    actor: str,
    report: Report = lambda line: None,
    patience_s: float = 60.0,
) -> None:
    """Drop an index: its view, generations and, with the source's last index, the capture triggers.

    Raises NotFound, OperationRunning (abort that first), LockNotAcquired (nothing was changed), and the
    database's own error where other objects depend on the view.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = control.find_index(connection, parse_name(index, "index"))
        last = control.newest_operation(connection, found.id)
        if last is not None and last.status in control.LIVE:
            raise OperationRunning(f"index {index} has an unfinished operation; abort it first: roir abort {index}")
        generation = tables.generation
        ids = list(
            connection.execute(
                select(generation.c.id).where(generation.c.index_id == found.id, generation.c.status != "dropped")
            ).scalars()
        )

    def remove(connection: Connection) -> None:
        execute(connection, f"DROP VIEW IF EXISTS {control.index_name(found).sql}")
        _retire_for_good(connection, ids)
        _forget_index(connection, found.id)
        control.record_event(connection, found.id, None, actor, "drop")

    _remove_generations(database, found.id, ids, remove, report, patience_s)


def _remove_generations(
    database: Database,
    index_id: int,
    generation_ids: list[int],
    remove: Callable[[Connection], None],
    report: Report,
    patience_s: float,
) -> None:
    with database.transaction() as connection:
        source = source_of(connection, index_id)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        if source is not None:
            lock()
        else:
            execute(connection, f"SET LOCAL lock_timeout = {DROP_LOCK_TIMEOUT_MS}")
        remove(connection)
        if source is not None:
            release_source(connection, source)
        for generation_id in generation_ids:
            physical.drop(connection, generation_id)

    sql = source.sql if source is not None else f"index {index_id}"
    relations = source.relations if source is not None else ()
    Drain(database, sql, relations, DROP_LOCK_TIMEOUT_MS, patience_s).run(body, report, any_mode=True)


def source_of(connection: Connection, index_id: int) -> Source | None:
    """The source of an index, None where it was dropped itself."""
    oid = connection.execute(select(tables.index.c.source_oid).where(tables.index.c.id == index_id)).scalar_one()
    try:
        return catalog.read_source(connection, catalog.name_of(connection, oid))
    except NotFound:
        return None


def release_source(connection: Connection, source: Source) -> None:
    """Render the capture for the generations that are left; without any, take triggers and function away."""
    if capture.targets(connection, source.oid):
        capture.install(connection, source)
    else:
        capture.uninstall(connection, source)


def _retire_for_good(connection: Connection, generation_ids: list[int]) -> None:
    connection.execute(
        update(tables.generation)
        .where(tables.generation.c.id.in_(generation_ids))
        .values(status="dropped", capture_mode="none")
    )


def _forget_index(connection: Connection, index_id: int) -> None:
    connection.execute(
        update(tables.index).where(tables.index.c.id == index_id).values(dropped_at=func.clock_timestamp())
    )
