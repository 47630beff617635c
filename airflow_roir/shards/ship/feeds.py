"""Lists the feeds to ship, and claims one for a shipper. A feed's token fences its former shipper (I4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.feeds import IS_AWAY
from airflow_roir.errors import Fenced, LockNotAcquired
from airflow_roir.shards.shard import Feed, by_id

# Longer than an outage of a second or a slow batch; a shipper that takes over meanwhile does no harm.
HEARTBEAT_FRESH_S = 10
# Numbers of a token's polls, which are the lower part of a tick.
POLLS = 1 << 32

# A building generation is shipped after its copies: these would overwrite shipped entries by older ones.
LIVE = """
(g.status IN ('active', 'retired')
 OR g.status = 'building' AND EXISTS (
    SELECT FROM roir.operation o
     WHERE o.generation_id = g.id AND o.kind IN ('create', 'rebuild') AND o.status IN ('running', 'paused')
       AND o.phase IN ('fold', 'publish')))
"""
SHIPPED = f"l.captured_at IS NOT NULL AND l.removed_at IS NULL AND {LIVE}"
FEEDS = f"""
SELECT l.id, l.shard_id, {IS_AWAY} AS away, l.owner,
       abs(extract(epoch FROM clock_timestamp() - l.heartbeat_at)) < {HEARTBEAT_FRESH_S} AS held
  FROM roir.feed l
  JOIN roir.generation g ON g.id = l.generation_id
  JOIN roir.index i ON i.id = g.index_id
  JOIN roir.shard s ON s.id = l.shard_id
 WHERE {SHIPPED}
   AND (%(generation)s::bigint IS NULL OR g.id = %(generation)s)
   AND (%(shards)s::text[] IS NULL OR s.name = ANY (%(shards)s))
   AND (%(indexes)s::bigint[] IS NULL OR i.id = ANY (%(indexes)s))
 ORDER BY l.id
"""
CLAIM = f"""
UPDATE roir.feed l SET token = greatest(l.token, %(above)s) + 1, owner = %(owner)s, heartbeat_at = clock_timestamp()
  FROM roir.generation g
 WHERE l.id = %(feed)s AND g.id = l.generation_id AND {SHIPPED}
   AND (l.owner IS NULL OR l.owner = %(owner)s
        OR abs(extract(epoch FROM clock_timestamp() - l.heartbeat_at)) >= {HEARTBEAT_FRESH_S} OR %(take_over)s)
RETURNING l.token, l.tick, l.step, l.emptied, md5(l.evidence::text) AS evidence
"""
ROUTE = """
SELECT l.id, l.generation_id, l.shard_id, l.outbox, l.source_oid, g.entry, i.id AS index_id, i.schema_name,
       i.name, i.shard_column,
       to_regclass(format('roir_data.g%%s_intent', g.id)) IS NOT NULL AS announced,
       g.unique_mode IS NOT NULL AS unique
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.index i ON i.id = g.index_id
 WHERE l.id = %(feed)s
"""


@dataclass(frozen=True)
class Route:
    """The facts of a feed for its shipper. entry: of the index server; column: the position of the shard's name in it.

    announced: whether there is room for intents. unique: whether keys have holders.
    """

    feed: Feed
    entry: Entry
    column: int
    index_id: int
    index: str
    announced: bool
    unique: bool

    @property
    def name(self) -> str:
        """The index and the shard, for messages."""
        return f"index {self.index}, shard {self.feed.shard.name}"


@dataclass
class Claim:
    """A shipper's hold on a feed.

    known: the tick of the last poll that was applied; polls: the number of polls under this token; step, emptied: as
    on the index server; evidence: a hash of that. start: the index server's start, if strict reads wait for a proof
    since; horizon: a transaction id that the shard assigned after it, 0 until the next poll has drawn one.
    """

    owner: str
    token: int
    known: int
    step: int
    emptied: int
    evidence: str | None = None
    polls: int = 0
    start: datetime | None = None
    horizon: int = 0

    def next_tick(self) -> int:
        """The tick of another poll. No two polls have the same, and a newer claim's are greater."""
        self.polls += 1
        return self.token * POLLS + self.polls


@dataclass(frozen=True)
class Found:
    """A feed to ship. away: its shard is not tried now; owner: the shipper that has it, if that lives."""

    id: int
    shard_id: int
    away: bool
    owner: str | None


def to_ship(
    connection: Connection,
    shards: list[str] | None = None,
    indexes: list[int] | None = None,
    generation_id: int | None = None,
) -> list[Found]:
    """The feeds that are shipped now; only of these shards, indexes and this generation, if they are given."""
    values = {"shards": shards, "indexes": indexes, "generation": generation_id}
    return [
        Found(row.id, row.shard_id, bool(row.away), row.owner if row.held else None)
        for row in execute(connection, FEEDS, values)
    ]


def route(connection: Connection, feed_id: int) -> Route:
    """The facts of a feed."""
    row = execute(connection, ROUTE, {"feed": feed_id}).one()
    entry = physical.followed(connection, row.generation_id, Entry.from_json(row.entry))
    feed = Feed(row.id, row.generation_id, by_id(connection, row.shard_id), row.outbox, row.source_oid)
    column = next(i for i, one in enumerate(entry.columns) if one.source == row.shard_column)
    return Route(feed, entry, column, row.index_id, str(operations.index_name(row)), row.announced, row.unique)


def claim(connection: Connection, feed_id: int, owner: str, take_over: bool = False, above: int = 0) -> Claim | None:
    """Claims a feed that is free, or whose shipper has died; None if another shipper has it, or it isn't shipped.

    Waits for a transaction that applies a poll to the feed, so all polls from now on are younger than that one.
    take_over: take it from a shipper that lives. above: a token in the shard's tick that this server has lost.
    """
    values = {"feed": feed_id, "owner": owner, "take_over": take_over, "above": above}
    row = execute(connection, CLAIM, values).first()
    return None if row is None else Claim(owner, row.token, row.tick, row.step, row.emptied, row.evidence)


def renew(connection: Connection, feed_id: int, held: Claim) -> None:
    """A sign of life. Raises Fenced."""
    beat = (
        "UPDATE roir.feed SET heartbeat_at = clock_timestamp() "
        "WHERE id = %(feed)s AND owner = %(owner)s AND token = %(token)s"
    )
    values = {"feed": feed_id, "owner": held.owner, "token": held.token}
    if execute(connection, beat, values).rowcount != 1:
        raise Fenced(f"feed {feed_id} has another shipper now; {held.owner} stops")


def release(connection: Connection, feed_id: int, held: Claim) -> None:
    """Gives a feed back; a no-op if another shipper has it."""
    execute(
        connection,
        "UPDATE roir.feed SET owner = NULL, heartbeat_at = NULL "
        "WHERE id = %(feed)s AND owner = %(owner)s AND token = %(token)s",
        {"feed": feed_id, "owner": held.owner, "token": held.token},
    )


# Two processes at once would wait for each other's drain, and a removal must not come before the installation.
HOLD = "SELECT pg_try_advisory_lock(hashtext('roir feed'), %(feed)s::int)"
LET_GO = "SELECT pg_advisory_unlock(hashtext('roir feed'), %(feed)s::int)"


@contextmanager
def held(database: Database, feed_id: int) -> Iterator[None]:
    """Keeps other processes from installing or removing a feed's capture in its shard. Raises LockNotAcquired."""
    with database.autocommit() as connection:
        if not execute(connection, HOLD, {"feed": feed_id}).scalar_one():
            raise LockNotAcquired(f"another process changes the capture of feed {feed_id} in its shard. Try again")
        try:
            yield
        finally:
            if not connection.invalidated:
                execute(connection, LET_GO, {"feed": feed_id})
