"""Shards that are Airflow connections: a task looks them up, and keeps their DSNs where workers read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from airflow.sdk.exceptions import AirflowNotFoundException
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import tables
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.shards import registry
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.hooks.roir import RoirHook

THERE = "SELECT to_regclass('roir.shard') IS NOT NULL"


def add_shards(database: Database, names: Sequence[str]) -> None:
    """Add the shards that aren't known yet, each by the Airflow connection of its name.

    Raises NotFound for a name that is neither a shard nor a connection, and what `registry.add` raises.
    """
    known = {one.name for one in registry.listed(database)}
    for name in names:
        if name in known:
            continue
        try:
            dsn = RoirHook(name).get_dsn()
        except AirflowNotFoundException:
            raise NotFound(
                f"there is neither a shard {name!r} nor an Airflow connection of that name. Add the connection, or the "
                "shard: roir shard add"
            ) from None
        registry.add(database, name, dsn, conn_id=name)


def keep_connections(database: Database, warn: Callable[..., None]) -> None:
    """Write down the DSNs that the shards' connections have now: passwords change. Silent if the server is away."""
    try:
        with database.transaction() as connection:
            if not execute(connection, THERE).scalar_one():
                return
            shard = tables.shard
            known = connection.execute(
                select(shard.c.name, shard.c.conn_id).where(shard.c.removed_at.is_(None), shard.c.conn_id.is_not(None))
            ).all()
            for name, conn_id in known:
                try:
                    registry.keep_dsn(connection, name, RoirHook(conn_id).get_dsn())
                except (AirflowNotFoundException, InvalidInput) as error:
                    warn("Shard %s: connection %s can't be used, its last DSN stays: %s", name, conn_id, error)
    except DBAPIError:
        # Whoever works next meets it, and waits for it.
        return
