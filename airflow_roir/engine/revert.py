"""Revert: readers see the replaced generation again, within its revert window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection, Row, func, select, text, update

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine import catalog, operations, tables
from airflow_roir.engine.database import Database
from airflow_roir.engine.lock_waits import Waiter
from airflow_roir.engine.locks import Drain, telling_of_names
from airflow_roir.engine.readers import view
from airflow_roir.engine.schema import check_schema
from airflow_roir.engine.shards.shard import lanes_of
from airflow_roir.errors import InvariantViolated, NotFound
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.operation import BUILDS


@dataclass(frozen=True)
class Reverted:
    """What a revert did. shown, retired: the ids of the generations that readers see now, and saw until now."""

    index: str
    shown: int
    retired: int


def revert(
    database: Database,
    index: str,
    actor: str,
    reason: str = "",
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> Reverted:
    """Flip an index back to the generation that its last rebuild replaced; a second revert flips forth again.

    Both are maintained by every write, so nothing is lost and it takes one short lock, like a publish. The generation
    that is taken out of view is kept for the revert window that it was built with. An operation that is under way
    continues, and its publish replaces what is shown then.
    reason: what the `event` table keeps. patience_s: how long to try for the lock.
    Raises NotFound (no such index, or nothing to go back to), LockNotAcquired. Doesn't check whether that generation is
    right: `roir verify` does.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = operations.find_index(connection, parse_name(index, "index"))
        source = catalog.source_if_there(connection, found.id)
    name = operations.index_name(found)
    if source is None:
        raise NotFound(f"index {name}: its table was dropped; drop the index too: roir drop {argument(name)}")

    def body(connection: Connection, lock: Callable[[], None]) -> Reverted:
        lock()
        view.hold(connection, found.id)
        shown, replaced = _active(connection, found.id), _replaced(connection, found.id)
        if shown is None and operations.is_kept(connection, found.id):
            raise NotFound(operations.KEPT.format(index=name))
        if shown is None or replaced is None:
            raise NotFound(
                f"index {name} has no replaced generation to show: a rebuild keeps that one for its revert window only"
            )
        view.show(connection, name, found.id, replaced.id)
        _retire(connection, shown)
        _activate(connection, replaced, is_apart=bool(lanes_of(connection, replaced.id)))
        said = f"generation {replaced.id} is shown again, not {shown.id}" + (f": {reason}" if reason else "")
        operations.record_event(connection, found.id, None, actor, "revert", said)
        return Reverted(str(name), replaced.id, shown.id)

    drain = Drain(
        database, source.sql, source.relations, database.limits.attempt_ms, patience_s, Waiter("revert", str(name))
    )
    with telling_of_names():
        return drain.run(body, report, [name.sql])


def _active(connection: Connection, index_id: int) -> Row[tuple[object, ...]] | None:
    generation, operation = tables.generation, tables.operation
    return connection.execute(
        select(generation.c.id, operation.c.options["revert_window_s"].as_integer().label("window"))
        .join(operation, operation.c.generation_id == generation.c.id)
        .where(
            generation.c.index_id == index_id,
            generation.c.status == GenerationStatus.ACTIVE.value,
            operation.c.kind.in_([kind.value for kind in BUILDS]),
        )
    ).first()


def _replaced(connection: Connection, index_id: int) -> Row[tuple[object, ...]] | None:
    generation = tables.generation
    return connection.execute(
        select(generation)
        .where(generation.c.index_id == index_id, generation.c.status == GenerationStatus.RETIRED.value)
        .order_by(generation.c.retired_at.desc())
        .limit(1)
    ).first()


def _retire(connection: Connection, shown: Row[tuple[object, ...]]) -> None:
    _change(
        connection,
        shown.id,
        GenerationStatus.ACTIVE,
        status=GenerationStatus.RETIRED.value,
        retired_at=func.clock_timestamp(),
        drop_after=func.clock_timestamp() + text(f"interval '{int(shown.window)} seconds'"),
    )


def _activate(connection: Connection, replaced: Row[tuple[object, ...]], is_apart: bool) -> None:
    # Its publish stays what it was: every younger snapshot has seen each of its entries ever since. That isn't so of a
    # generation that is shipped to: its view is guarded until no snapshot is older than this.
    values: dict[str, object] = {"status": GenerationStatus.ACTIVE.value, "retired_at": None, "drop_after": None}
    if is_apart:
        values |= {"mode_xid": text("pg_current_xact_id()::text"), "published_at": func.clock_timestamp()}
    _change(connection, replaced.id, GenerationStatus.RETIRED, **values)


def _change(connection: Connection, generation_id: int, expected: GenerationStatus, **values: object) -> None:
    generation = tables.generation
    changed = connection.execute(
        update(generation)
        .where(generation.c.id == generation_id, generation.c.status == expected.value)
        .values(**values)
    )
    if changed.rowcount != 1:
        raise InvariantViolated(f"generation {generation_id} is not {expected.value} any more; nothing was reverted")
