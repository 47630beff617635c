"""Announcing: before a transaction of a shard commits, its intents are committed on the index server.

By the shard's server: a deferred trigger of the outbox writes them through postgres_fdw, whose remote transaction
commits just before its own. By a client: it writes them itself (`airflow_roir.announcing`), and the same trigger
refuses the commit if it hasn't (docs/architecture-shards.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name, quote
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.retry.trouble import reason_of
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import InvalidInput, NotFound, RoirError
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.shards import home
from airflow_roir.shards.announce import end, foreign, functions, intents
from airflow_roir.shards.announce.functions import CLIENT, SERVER
from airflow_roir.shards.capture import outbox, strays
from airflow_roir.shards.shard import SHARD_SCHEMA, Feed, feeds_of
from airflow_roir.shards.ship import feeds
from airflow_roir.shards.unique import holders

# The time that a drain outside an operation tries.
PATIENCE_S = 120.0
LIVE = """
SELECT g.id, g.status FROM roir.generation g WHERE g.index_id = %(index)s AND g.status <> 'dropped' ORDER BY g.id
"""
# The generations whose intents the login must write: a shard's server logs in as one role for all that it announces.
SERVED = """
SELECT DISTINCT l.generation_id FROM roir.feed l
 WHERE l.shard_id = %(shard)s AND l.announced_by = 'server' AND l.removed_at IS NULL
   AND to_regclass(format('roir_data.g%%s_intent', l.generation_id)) IS NOT NULL
 ORDER BY 1
"""
# The feeds whose shards may announce: also those whose announcements a failover has lost.
MAY_ANNOUNCE = """
UPDATE roir.feed SET announced_by = coalesce(announced_by, 'server')
 WHERE id = ANY (%(feeds)s::bigint[]) AND removed_at IS NULL
"""
# Even if the clock was set back, a feed that was fresh before announcing began must not look younger than that.
BEGUN = """
UPDATE roir.feed SET strict_from = clock_timestamp(), strict_history = roir.server_history(),
       strict_start = pg_postmaster_start_time(),
       fresh_at = CASE WHEN fresh_at <= clock_timestamp() THEN fresh_at END,
       evidence = evidence || jsonb_build_object('announcing', %(evidence)s::jsonb)
 WHERE id = %(feed)s AND removed_at IS NULL
"""
ANNOUNCING = f"SELECT {SHARD_SCHEMA}.announcing_evidence(%(name)s)"
ENDED = "UPDATE roir.feed SET strict_from = NULL, strict_history = NULL WHERE generation_id = ANY (%(ids)s::bigint[])"
NOW_CALLED = f"UPDATE {SHARD_SCHEMA}.outbox SET server = %(server)s WHERE name = %(name)s AND server <> %(server)s"
UNGUARDED = f"SELECT {SHARD_SCHEMA}.unique_problem(name) FROM {SHARD_SCHEMA}.outbox WHERE name = %(name)s AND is_unique"
UNIQUE = """
SELECT i.name FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(id)s AND i.is_unique
"""
BY = """
UPDATE roir.feed l SET announced_by = %(by)s FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE l.id = %(feed)s AND g.id = l.generation_id AND i.announced_by = %(by)s
"""


def announce(
    database: Database, index: str, by: str | None, report: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Lets a shard's server (`server`), its clients (`client`) or neither (None) announce the writes of an index.

    Waits in each shard until the writers in flight have ended. It is safe to call again, and then continues; after a
    failover of the index server it must be called again. Strict reads are refused until every shard is done and has
    been shipped to its end once more. A unique index isn't enforced any more until `enforce.enforce_index` begins that
    again. None ends strict reads at once, and returns a line for each shard that is away: its writers announce until
    the next call, or clean-up, that reaches it. If a shard that only a replaced generation is over fails, it is left
    out and reported. Raises NotFound, InvalidInput, RightMissing, LockNotAcquired, and DBAPIError.
    """
    with database.transaction() as connection:
        row = operations.find_index(connection, parse_name(index, "index"))
        apart = execute(connection, "SELECT shard_table FROM roir.index WHERE id = %(id)s", {"id": row.id}).scalar_one()
        if apart is None:
            raise InvalidInput(f"index {index} isn't over shards: every read of it is strict")
        if row.is_unique and by == CLIENT:
            raise InvalidInput(
                f"index {index} is unique over shards, and a client that announces wrongly would break that for all "
                "others: let the servers announce (--by server)"
            )
        found = execute(connection, LIVE, {"index": row.id}).all()
        generations = [one.id for one in found]
        shown = {one.id for one in found if one.status == GenerationStatus.ACTIVE.value}
        feeds = [feed for one in generations for feed in feeds_of(connection, one) if is_captured(connection, feed)]

    def is_needed(feed: Feed) -> bool:
        return not shown or feed.generation_id in shown

    if by is not None:
        feeds = [feed for feed in feeds if _done(partial(check, feed, by, database), feed, is_needed(feed), report)]
    with database.transaction() as connection:
        values = {"id": row.id, "by": by}
        execute(connection, "UPDATE roir.index SET announced_by = %(by)s WHERE id = %(id)s", values)
        execute(connection, ENDED, {"ids": generations})
        if by is None:
            execute(connection, MAY_ANNOUNCE, {"feeds": [feed.id for feed in feeds]})
        for one in generations if row.is_unique else ():
            holders.end(connection, one, None, operations.default_actor())
    if by is None:
        return end.end_left(database, row.id, PATIENCE_S, report)
    for shard in {feed.shard.id: feed.shard for feed in feeds if is_needed(feed)}.values():
        strays.remove(database, shard, PATIENCE_S, report)
    for feed in feeds:
        if _done(partial(install, database, feed, by, report), feed, is_needed(feed), report):
            report(f"shard {quote(feed.shard.name)}, generation {feed.generation_id}: done")
    return []


def _done(work: Callable[[], None], feed: Feed, needed: bool, report: Callable[[str], None]) -> bool:
    """Does the work. If it fails for a generation that readers don't see, reports that and returns False."""
    try:
        work()
    except (DBAPIError, RoirError) as error:
        if needed:
            raise
        report(
            f"shard {quote(feed.shard.name)}, generation {feed.generation_id}: left, since readers see another "
            f"generation: {reason_of(error)}"
        )
        return False
    return True


def nothing_to_announce(connection: Connection, name: str) -> None:
    """Lets a transaction commit that touches entries of an outbox but changes no row, as a repair does.

    connection: in the shard.
    """
    execute(connection, outbox.NOTHING, {"mark": f"{SHARD_SCHEMA}.{name}"})


def is_captured(connection: Connection, feed: Feed) -> bool:
    """False before the capture of a feed is committed in its shard, and after it was removed."""
    query = "SELECT captured_at IS NOT NULL AND removed_at IS NULL FROM roir.feed WHERE id = %(id)s"
    return bool(execute(connection, query, {"id": feed.id}).scalar_one())


def keep_on(database: Database, generation_id: int, report: Callable[[str], None] = lambda line: None) -> None:
    """Makes the shards announce the writes for a new generation as for its index, so that strict reads go on across its
    publish. Feeds that are announced already are left."""
    query = "SELECT i.announced_by FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %(id)s"
    begun = (
        "SELECT strict_from IS NOT NULL AND strict_history IS NOT DISTINCT FROM roir.server_history() "
        "FROM roir.feed WHERE id = %(id)s"
    )
    with database.transaction() as connection:
        by = execute(connection, query, {"id": generation_id}).scalar_one()
        feeds = [
            feed
            for feed in feeds_of(connection, generation_id)
            if is_captured(connection, feed) and not execute(connection, begun, {"id": feed.id}).scalar_one()
        ]
    for feed in feeds if by is not None else ():
        install(database, feed, by, report)


def strict_problem(connection: Connection, generation_id: int) -> str | None:
    """Why a generation can't be read strictly; None if it can. connection: to the index server."""
    query = "SELECT roir.strict_problem(%(id)s)"
    found: str | None = execute(connection, query, {"id": generation_id}).scalar_one()
    return found


def check(feed: Feed, by: str, database: Database) -> None:
    """Raises InvalidInput or RightMissing if the writes of a feed can't be announced; changes nothing."""
    shard = feed.shard
    with shard.database("roir announce", database.limits).transaction() as connection:
        home.check(connection, shard)
        source = catalog.read_source_by_oid(connection, feed.source_oid)
        if source.partitioned:
            raise InvalidInput(
                f"shard {quote(shard.name)}: {source.name} has partitions. An attach or a detach changes "
                "rows without a write that could be announced, so its index has no strict reads"
            )
        if by == SERVER:
            foreign.connection_of(feed)
            foreign.check_extension(connection, feed, source)
        unguarded = execute(connection, UNGUARDED, {"name": feed.outbox}).scalar()
        if unguarded is not None:
            raise InvalidInput(f"shard {quote(shard.name)}: {unguarded}; make it before writes are announced")


def install(database: Database, feed: Feed, by: str, report: Callable[[str], None] = lambda line: None) -> None:
    """Begins to announce the writes of one feed; when it returns, its shard's writers in flight have ended.

    database: the index server's. Raises InvalidInput, RightMissing, LockNotAcquired.
    """
    check(feed, by, database)
    with feeds.held(database, feed.id):
        _install(database, feed, by, report)


def _install(database: Database, feed: Feed, by: str, report: Callable[[str], None]) -> None:
    shard = feed.shard.database("roir announce", database.limits)
    with database.transaction() as connection:
        if not execute(connection, BY, {"feed": feed.id, "by": by}).rowcount:
            # It was turned off meanwhile.
            return
        called = home.server_of(connection)
        shape = intents.shape_of(connection, feed.generation_id)
        unique: str | None = execute(connection, UNIQUE, {"id": feed.generation_id}).scalar()
        if by == SERVER:
            role = foreign.connection_of(feed)["user"]
            for one in execute(connection, SERVED, {"shard": feed.shard.id}).scalars().all():
                execute(connection, f"GRANT INSERT ON {intents.table(one)} TO {quote(role)}")
    with shard.transaction() as connection:
        source = catalog.read_source_by_oid(connection, feed.source_oid)
        entry = outbox.read_entry(connection, feed.outbox)
        if entry is None:
            raise NotFound(f"shard {quote(feed.shard.name)}: the outbox {feed.outbox} is gone")
        # It has another name after an ALTER DATABASE or a pg_upgrade, and clients announce by that.
        execute(connection, NOW_CALLED, {"name": feed.outbox, "server": called})
        if by == SERVER:
            server = foreign.reach(connection, feed, source)
    if by == SERVER:
        with shard.transaction() as connection:
            foreign.make_foreign_table(connection, feed, shape, server)
        foreign.probe(database, shard, feed, server)

    def body(connection: Connection, lock: Callable[[], None]) -> str:
        for name, text in functions.functions(feed, entry, shape, by, source, unique):
            execute(connection, text)
            rights.take_back(connection, (), [f"{SHARD_SCHEMA}.{name}()"])
        if by == CLIENT:
            functions.let_clients_ask(connection, feed)
        lock()
        _drop_triggers(connection, feed.outbox, source)
        table = outbox.table(feed.outbox)
        execute(
            connection,
            f"CREATE CONSTRAINT TRIGGER roir_announce AFTER INSERT OR UPDATE ON {table} DEFERRABLE INITIALLY DEFERRED "
            f"FOR EACH ROW EXECUTE FUNCTION {table}_announce()",
        )
        execute(connection, f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER roir_announce")
        name = f"{outbox.trigger(feed.outbox)}_w"
        execute(
            connection,
            f"CREATE TRIGGER {name} BEFORE TRUNCATE ON {source.sql} FOR EACH STATEMENT "
            f"EXECUTE FUNCTION {table}_whole()",
        )
        execute(connection, f"ALTER TABLE {source.sql} ENABLE ALWAYS TRIGGER {name}")
        execute(
            connection,
            f"UPDATE {SHARD_SCHEMA}.outbox SET announced_by = %(by)s, "
            f"announcing = {SHARD_SCHEMA}.announcing_of(name) WHERE name = %(name)s",
            {"by": by, "name": feed.outbox},
        )
        return json.dumps(execute(connection, ANNOUNCING, {"name": feed.outbox}).scalar_one())

    drain = Drain(shard, source.sql, source.relations, database.limits.attempt_ms, PATIENCE_S)
    with telling_of_names():
        kept = drain.run(body, report, [source.sql])
    with database.transaction() as connection:
        execute(connection, BEGUN, {"feed": feed.id, "evidence": kept})


def _drop_triggers(connection: Connection, name: str, source: Source) -> None:
    execute(connection, f"DROP TRIGGER IF EXISTS roir_announce ON {outbox.table(name)}")
    execute(connection, f"DROP TRIGGER IF EXISTS {outbox.trigger(name)}_w ON {source.sql}")
