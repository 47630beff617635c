"""Adds shards by Airflow connections that the index server's connection names, and keeps their DSNs for the workers.

Only the deployment says which connection is which shard's. A row of `roir.shard`, or the trigger form, could name any
connection of Airflow, and the connection's password would then be written to that database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from airflow.sdk.exceptions import AirflowNotFoundException
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import Complaints, InvalidInput, NotFound
from airflow_roir.hooks.roir import SHARDS_EXTRA, RoirHook, extras_of
from airflow_roir.nearest import meant_of
from airflow_roir.shards import registry

LIVE = "SELECT name FROM roir.shard WHERE removed_at IS NULL"
THERE = "SELECT to_regclass('roir.shard') IS NOT NULL"


def connections_of(postgres_conn_id: str) -> dict[str, str]:
    """The connections of an index server's shards by the shards' names, as the extra `roir_shards` of its own
    connection says: an object, or names that are ids, too, as a list or separated by commas. Raises InvalidInput.
    """
    given = extras_of(RoirHook.get_connection(postgres_conn_id)).get(SHARDS_EXTRA) or {}
    if isinstance(given, str):
        given = [name for part in given.split(",") if (name := part.strip())]
    if isinstance(given, list):
        given = {name: name for name in given if isinstance(name, str)} if all(map(_is_text, given)) else None
    if not isinstance(given, Mapping) or not all(map(_is_text, given.values())):
        raise InvalidInput(
            f"connection {postgres_conn_id!r}: the extra {SHARDS_EXTRA!r} must be a list of ids of connections, "
            'or an object as {"orders_0": "id of its connection"}'
        )
    return {str(name): str(conn_id) for name, conn_id in given.items()}


def add_shards(database: Database, postgres_conn_id: str, names: Sequence[str]) -> None:
    """Adds the shards that aren't known yet, each by the connection that the index server's own one names for it.

    Raises one error for all names that are neither: NotFound, or InvalidInput; and the errors of `registry.add`.
    """
    known = {one.name for one in registry.listed(database)}
    complaints = Complaints()
    dsns: dict[str, str] = {}
    for name in names:
        if name not in known:
            with complaints.noted():
                dsns[name] = _dsn(postgres_conn_id, name, known)
    complaints.settle()
    for name, dsn in dsns.items():
        registry.add(database, name, dsn)


def _dsn(postgres_conn_id: str, name: str, known: Iterable[str]) -> str:
    """The DSN of a shard that isn't known yet."""
    connections = connections_of(postgres_conn_id)
    conn_id = connections.get(name)
    if conn_id is None:
        raise NotFound(
            f"there is no shard {name!r}. Add it: roir shard add; or, if an Airflow connection leads to it, name "
            f"that one in the extra of connection {postgres_conn_id!r}: "
            f'{{"{SHARDS_EXTRA}": {{"{name}": "id of its connection"}}}}{meant_of(name, {*known, *connections})}'
        )
    try:
        return RoirHook(conn_id).get_dsn()
    except AirflowNotFoundException:
        raise NotFound(
            f"connection {postgres_conn_id!r} names {conn_id!r} for shard {name!r}, and there is no such "
            "connection. Add it (Admin, Connections)"
        ) from None


def keep_connections(database: Database, postgres_conn_id: str, warn: Callable[..., None]) -> None:
    """Records the present DSNs of the shards' connections, since passwords change. Silent if the server is away."""
    try:
        named = connections_of(postgres_conn_id)
    except InvalidInput as error:
        warn("%s", error)
        return
    if not named:
        return
    try:
        with database.transaction() as connection:
            if not execute(connection, THERE).scalar_one():
                return
            live = execute(connection, LIVE).scalars().all()
            for name in sorted(named.keys() & set(live)):
                try:
                    registry.keep_dsn(connection, name, RoirHook(named[name]).get_dsn())
                except (AirflowNotFoundException, InvalidInput) as error:
                    warn("Shard %s: connection %s can't be used, its last DSN stays: %s", name, named[name], error)
    except DBAPIError:
        # The task's next step meets the same error, and waits until the database is back.
        return


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
