"""Finds and removes strays: outboxes in a shard that belong to this index server but are unknown to it.

Either the index server has lost the commit that recorded them, by a failover or a restore; or the shard was restored
from a backup from before their removal; or the shard was away when it was removed for good. No shipper ships them.
Their writers may still announce into a table that doesn't exist: then they can't commit.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import LockNotAcquired
from airflow_roir.shards import home
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import SHARD_SCHEMA, Shard

PRESENT = f"SELECT to_regclass('{SHARD_SCHEMA}.outbox') IS NOT NULL"
OURS = f"SELECT name FROM {SHARD_SCHEMA}.outbox WHERE server = %(server)s ORDER BY name"
KNOWN = "SELECT outbox FROM roir.feed WHERE outbox = ANY (%(names)s) AND removed_at IS NULL"


def find(database: Database, shard: Shard) -> list[str]:
    """The names of a shard's strays. database: the index server's. Raises as `home.check`, and DBAPIError."""
    with database.transaction() as connection:
        called = home.server_of(connection)
    with shard.database(database.application_name, database.limits).transaction() as connection:
        if not execute(connection, PRESENT).scalar_one():
            return []
        home.check(connection, shard)
        names = list(execute(connection, OURS, {"server": called}).scalars())
    # Read after the shard: a feed is committed here before its outbox is created, and deleted after that was dropped.
    with database.transaction() as connection:
        return [name for name in names if name not in _known(connection, names)]


def remove(
    database: Database, shard: Shard, patience_s: float, report: Callable[[str], None] = lambda line: None
) -> None:
    """Removes a shard's strays; leaves and reports those that can't be locked in time. Raises as `find`."""
    there = shard.database(database.application_name, database.limits)
    for name in find(database, shard):
        where = f"shard {quote(shard.name)}: what captured there for a generation that this server doesn't know"
        try:
            outbox.remove(there, name, database.limits.attempt_ms, patience_s, report)
        except LockNotAcquired as error:
            report(f"{where} is left ({name}): {error}")
        else:
            report(f"{where} is removed ({name})")


def _known(connection: Connection, names: list[str]) -> set[str]:
    return set(execute(connection, KNOWN, {"names": names}).scalars())
