"""Removes generations from the control tables, the capture and the database; then a capture that serves none."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.engine.capture import installation
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.feeds import ends
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.source import catalog, expressions
from airflow_roir.engine.source.source import Source

WITH_TABLES = "SELECT id FROM roir.generation WHERE index_id = %(index)s AND status <> 'dropped' ORDER BY id"
RETIRE_FOR_GOOD = """
UPDATE roir.generation SET status = 'dropped', capture_mode = 'none'
 WHERE id = ANY (%(generations)s::bigint[]) AND status <> 'dropped'
"""
FORGET = "UPDATE roir.index SET dropped_at = clock_timestamp() WHERE id = %(index)s"


def generations_of(connection: Connection, index_id: int) -> list[int]:
    """The ids of an index's generations that have tables."""
    return list(execute(connection, WITH_TABLES, {"index": index_id}).scalars())


def remove(
    database: Database,
    index_id: int,
    retire: Callable[[Connection], list[int]],
    report: Callable[[str], None],
    patience_s: float,
) -> None:
    """Removes generations under the drain lock: from the control tables, the capture, and the database.

    retire: marks them in the control tables, and returns their ids.
    """
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, index_id)
        known = generations_of(connection, index_id)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        if source is not None:
            lock()
        generation_ids = retire(connection)
        # If nothing was left to remove, the function may be gone already, and must not come back.
        if source is not None and generation_ids:
            installation.refresh(connection, source)
        for generation_id in generation_ids:
            physical.drop(connection, generation_id)

    with telling_of_names():
        _drain(database, source, index_id, patience_s).run(
            body, report, [name for one in known for name in physical.names(one)]
        )


def release_source(
    database: Database,
    index_id: int,
    conclude: Callable[[Connection], None],
    report: Callable[[str], None],
    patience_s: float,
) -> None:
    """Drops the capture of a source that has no generation left, and calls `conclude` in the same transaction."""
    with database.transaction() as connection:
        source = catalog.source_if_there(connection, index_id)
        oid = operations.read_index(connection, index_id).source_oid

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        if source is None:
            installation.drop_functions(connection, oid)
        else:
            lock()
            if not installation.targets(connection, source.oid):
                installation.drop_functions(connection, source.oid)
        conclude(connection)

    # To drop a trigger needs an ACCESS EXCLUSIVE lock on the source.
    exclusive = [] if source is None else [source.sql]
    with telling_of_names():
        _drain(database, source, index_id, patience_s).run(body, report, exclusive)


def retire_for_good(connection: Connection, generation_ids: list[int]) -> None:
    """Marks generations as dropped; the capture maintains them until it is rendered again."""
    for generation_id in generation_ids:
        # They aren't shipped any more, but writers of a shard that can't be reached still announce.
        ends().retire(connection, generation_id, operations.default_actor())
    execute(connection, RETIRE_FOR_GOOD, {"generations": generation_ids})


def forget_index(connection: Connection, index_id: int) -> None:
    """Marks an index as dropped, so that its name is free, and revokes roir's grants from owners without an index."""
    execute(connection, FORGET, {"index": index_id})
    expressions.drop_of_index(connection, index_id)
    execute(connection, "SELECT roir.take_from_former_owners(0::oid)")


def _drain(database: Database, source: Source | None, index_id: int, patience_s: float) -> Drain:
    with database.transaction() as connection:
        row = operations.read_index(connection, index_id)
    waiter = Waiter("removal", str(operations.index_name(row)))
    if source is None:
        return Drain(database, f"index {index_id}", (), database.limits.attempt_ms, patience_s, waiter)
    return Drain(database, source.sql, source.relations, database.limits.attempt_ms, patience_s, waiter)
