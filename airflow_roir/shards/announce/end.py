"""Ends the announcing of an index in its shards; if a shard is away, a later call or clean-up ends it there."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.source import catalog
from airflow_roir.errors import RoirError
from airflow_roir.shards import home
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed, feeds_of
from airflow_roir.shards.ship import feeds

OUTBOX = f"SELECT announced_by FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s"
# The feeds that still announce in shards though it was turned off; without those of dropped generations, whose capture
# is removed anyway.
IS_LEFT = """l.announced_by IS NOT NULL AND i.announced_by IS NULL AND l.removed_at IS NULL AND g.status <> 'dropped'"""
STILL_ANNOUNCED = f"""
SELECT l.id, l.generation_id, format('%%I.%%I', i.schema_name, i.name) AS index
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE {IS_LEFT} AND (%(index)s::bigint IS NULL OR i.id = %(index)s) ORDER BY l.id
"""
LEFT_OF = f"""
SELECT EXISTS (SELECT FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id
                 JOIN roir.index i ON i.id = g.index_id WHERE l.id = %(feed)s AND {IS_LEFT})
"""


def end_left(
    database: Database,
    index_id: int | None,
    patience_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Ends the announcing that is left in shards though it was turned off, for one index or all. Safe to call again.

    Returns a line for each shard where that failed: its writers still need this server.
    """
    with database.transaction() as connection:
        rows = execute(connection, STILL_ANNOUNCED, {"index": index_id}).all()
        left = [(row, next(one for one in feeds_of(connection, row.generation_id) if one.id == row.id)) for row in rows]
    waiting, away = [], dict[str, str]()
    for row, feed in left:
        shard = feed.shard.name
        # A shard that is away isn't tried for its other feeds, since each try takes time.
        if shard not in away:
            try:
                with feeds.held(database, feed.id):
                    _end(database, feed, patience_s, report)
                report(f"shard {quote(shard)}, generation {feed.generation_id}: done")
                continue
            except (DBAPIError, RoirError) as error:
                away[shard] = reason_of(error)
        waiting.append(
            f"index {row.index}: writers of shard {quote(shard)} still announce, which harms nothing, and "
            f"still need the index server: {away[shard]}"
        )
    return list(dict.fromkeys(waiting))


def _end(database: Database, feed: Feed, patience_s: float, report: Callable[[str], None]) -> None:
    with database.transaction() as connection:
        # It may have been turned on again.
        if not execute(connection, LEFT_OF, {"feed": feed.id}).scalar_one():
            return
    remove(feed, database, patience_s, report)
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.feed SET announced_by = NULL WHERE id = %(feed)s", {"feed": feed.id})


def remove(
    feed: Feed, database: Database, patience_s: float, report: Callable[[str], None] = lambda line: None
) -> None:
    """Ends the announcing of one feed; strict reads are refused already. Raises LockNotAcquired."""
    shard = feed.shard.database("roir announce", database.limits)
    with shard.transaction() as connection:
        # Another database has nothing of ours; that mustn't count as ended.
        home.check(connection, feed.shard)
        found = execute(connection, OUTBOX, {"name": feed.outbox}).first()
        if found is None or found.announced_by is None:
            return
        if (oid := outbox.relation(connection, feed.outbox)) is None:
            _drop(connection, feed, None)
            return
        source = catalog.read_source_by_oid(connection, oid, check=False)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        lock()
        _drop(connection, feed, source.name)

    drain = Drain(shard, source.sql, source.relations, database.limits.attempt_ms, patience_s)
    with telling_of_names():
        drain.run(body, report, [source.sql])


def _drop(connection: Connection, feed: Feed, source: QualifiedName | None) -> None:
    outbox.drop_announcing(connection, feed.outbox, source)
    ended = f"UPDATE {SHARD_SCHEMA}.outbox SET announced_by = NULL, announcing = NULL WHERE name = %(name)s"
    execute(connection, ended, {"name": feed.outbox})
