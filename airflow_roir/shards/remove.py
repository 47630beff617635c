"""Removes the capture of dropped generations in every shard that can be reached; records those that are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import reason_of, trouble_of
from airflow_roir.errors import RoirError
from airflow_roir.shards import home
from airflow_roir.shards.announce import intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import shape_table
from airflow_roir.shards.shard import Shard, by_id, set_away
from airflow_roir.shards.ship.feeds import held
from airflow_roir.shards.unique import holders

UNUSED = """
SELECT g.id FROM roir.generation g
 WHERE g.status = 'dropped' AND to_regclass('roir_data.g' || g.id || '_intent') IS NOT NULL
   AND NOT EXISTS (SELECT FROM roir.feed l WHERE l.generation_id = g.id AND l.removed_at IS NULL)
 ORDER BY g.id
"""

DROPPED_FEEDS = """
SELECT l.id, l.outbox, l.shard_id, i.schema_name, i.name, s.removed_at
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
  JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE g.status = 'dropped' AND l.removed_at IS NULL
   AND i.id = coalesce(%(index)s, i.id) AND s.id = coalesce(%(shard)s, s.id)
 ORDER BY l.id
"""
FORGET = "UPDATE roir.feed SET removed_at = clock_timestamp() WHERE id = %(feed)s AND removed_at IS NULL"


def release(
    database: Database,
    index_id: int | None,
    patience_s: float,
    report: Callable[[str], None] = lambda line: None,
    shard_id: int | None = None,
) -> list[str]:
    """Removes the outboxes and triggers of dropped generations, and shape tables of dropped indexes: of one index or of
    all.

    shard_id: only in this shard. Safe to call again. Returns a line for each shard that still has some: the next
    clean-up tries again.
    """
    waiting = _drop_faces(database)
    with database.transaction() as connection:
        rows: list[Row[Any]] = list(execute(connection, DROPPED_FEEDS, {"index": index_id, "shard": shard_id}))
        left = [(row, by_id(connection, row.shard_id)) for row in rows]
    # A shard that is away isn't tried for its other feeds, since each try takes time.
    away: dict[int, str] = {}
    for row, one in left:
        if row.removed_at is not None:
            # The shard was removed, and its capture with it given up.
            _forget(database, row.id)
            continue
        if one.id not in away and (problem := _remove(database, row.id, row.outbox, one, patience_s, report)):
            away[one.id] = problem
        if one.id in away:
            name = operations.index_name(row)
            waiting.append(
                f"index {name}: its capture in shard {quote(one.name)} is left ({row.outbox}): {away[one.id]}"
            )
    return waiting + _drop_intents(database)


def _drop_intents(database: Database) -> list[str]:
    """Drops the intents of dropped generations whose writers announce no more: as long as they do, each commit needs
    the table."""
    with database.transaction() as connection:
        left = list(execute(connection, UNUSED).scalars())
    waiting = []
    for generation_id in left:
        try:
            with database.transaction() as connection:
                execute(connection, f"SET LOCAL lock_timeout = {database.limits.attempt_ms}")
                intents.drop(connection, generation_id)
                holders.drop(connection, generation_id)
        except DBAPIError as error:
            if trouble_of(error) is None or error.connection_invalidated:
                raise
            waiting.append(f"the intents of generation {generation_id} are left: {reason_of(error)}")
    return waiting


def _drop_faces(database: Database) -> list[str]:
    try:
        with database.transaction() as connection:
            execute(connection, f"SET LOCAL lock_timeout = {database.limits.attempt_ms}")
            # A shape table is created in the transaction that creates its index: none is of a prepare under way.
            for name in shape_table.left_over(connection):
                shape_table.drop(connection, name)
    except DBAPIError as error:
        if trouble_of(error) is None or error.connection_invalidated:
            raise
        return [f"the shape table of an index that was dropped is left: {reason_of(error)}"]
    return []


def _remove(
    database: Database, feed_id: int, name: str, one: Shard, patience_s: float, report: Callable[[str], None]
) -> str | None:
    try:
        with held(database, feed_id):
            there = one.database(database.application_name, database.limits)
            with there.transaction() as connection:
                # In another database there is nothing of ours, which says nothing of the right one.
                home.check(connection, one)
            outbox.remove(there, name, database.limits.attempt_ms, patience_s, report)
            _forget(database, feed_id)
        return None
    except (DBAPIError, RoirError) as error:
        problem = reason_of(error)
        if isinstance(error, DBAPIError):
            with database.transaction() as connection:
                set_away(connection, one.id, problem)
        return problem


def _forget(database: Database, feed_id: int) -> None:
    with database.transaction() as connection:
        execute(connection, FORGET, {"feed": feed_id})
