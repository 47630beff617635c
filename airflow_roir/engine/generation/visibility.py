"""Hidden entries, which readers don't see: those of partitions that are leaving, and of tables that are being attached.

No row of the source has them. In a unique index they have keys that are free: a write takes them over, a look for
duplicates ignores them, and seal and fold delete them, since no hidden entry may displace a live one.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.database import as_it_is, bound, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.source.source import Source

IS_SHOWN = "SELECT roir.is_shown(%(generation)s, %(alias)s)"


def shown(connection: Connection, source: Source, generation_id: int, alias: str = "x") -> str | None:
    """SQL, true if an entry, a row `alias` of base or delta, isn't hidden. None if no partition is leaving or joining.

    For a statement that binds values. Locks the source and its partitions against DDL until the transaction's end: so
    call it before the generation's own tables are locked.
    """
    asked = {"generation": generation_id, "alias": alias}
    if execute(connection, IS_SHOWN, asked).scalar() is None:
        return None
    catalog.hold(connection, source)
    # Again, since the source and its partitions keep their names from here on.
    condition = execute(connection, IS_SHOWN, asked).scalar()
    if condition is None:
        return None
    if owner.is_trusted(connection, source):
        return as_it_is(str(condition))
    stores = [physical.base(generation_id), physical.delta(generation_id)]
    query = " UNION ALL ".join(
        f"SELECT {alias}.tableoid, {alias}.ctid FROM {store} {alias} WHERE NOT {condition}"
        for store in stores
        if execute(connection, "SELECT to_regclass(%(name)s)", {"name": store}).scalar() is not None
    )
    item, values = owner.relation(connection, source, query, "place oid, spot tid")
    asking = f"NOT EXISTS (SELECT FROM {item} WHERE r.place = {alias}.tableoid AND r.spot = {alias}.ctid)"
    return as_it_is(bound(connection, asking, values))
