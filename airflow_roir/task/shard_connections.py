"""Shards that are Airflow connections: what a task resolves is written down, for workers that know no connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_roir.engine.shards import registry
from airflow_roir.hooks.roir import RoirHook

if TYPE_CHECKING:
    from airflow_roir.engine.database import Database


def resolve_shards(database: Database) -> None:
    """Look up the connection of each shard that is one. Raises what Airflow raises for one that isn't defined."""
    for one in registry.listed(database):
        if one.conn_id is not None:
            dsn = RoirHook(one.conn_id).get_dsn()
            with database.transaction() as connection:
                registry.keep_dsn(connection, one.name, dsn)
