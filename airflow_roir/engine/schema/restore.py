"""Adopts a database that was restored from a dump or upgraded by pg_upgrade: its catalogs are new.

A dump gives every table another oid than the control schema says. pg_upgrade keeps the oids of tables, but links their
partitions again. A single table that was dropped and restored is neither: no capture has seen its rows.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine.capture import installation
from airflow_roir.engine.database import execute
from airflow_roir.engine.schema.schema import RESTORED
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog

REPLACED = """
SELECT quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, r.recorded, r.present::regclass::text AS name
  FROM roir.replaced_sources() r JOIN roir.index i ON i.id = r.index
 WHERE %(operation)s IS NULL OR i.id = (SELECT index_id FROM roir.operation WHERE id = %(operation)s) ORDER BY 1
"""
# Of types, tables and columns that have other oids and numbers now.
KEEP_SHAPES = """
SELECT roir.keep_shape(g.id) FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired')
"""


def adopt(connection: Connection) -> None:
    """Make indexes, partitions and capture functions name the tables that there are. No-op if nothing has moved.

    In the caller's transaction; after a restore it locks the sources against writers. Operations that were unfinished
    in a dump become `failed`; after a pg_upgrade they can continue. A single source that was replaced isn't adopted.
    """
    restored = execute(connection, RESTORED).all()
    if restored:
        execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).attempt_ms}")
        for row in restored:
            execute(connection, f"LOCK TABLE {row.name} IN SHARE ROW EXCLUSIVE MODE")
        execute(connection, "SELECT roir.adopt_restored()")
        for row in restored:
            execute(connection, KEEP_SHAPES, {"source": row.present})
            installation.refresh(connection, catalog.read_source_by_oid(connection, row.present))
    execute(connection, "SELECT roir.adopt_upgraded()")
    execute(connection, "SELECT roir.settle() WHERE roir.moved() IS NOT NULL")


def replaced(connection: Connection, operation_id: int | None = None) -> list[str]:
    """Indexes whose source was dropped, and another table has its place and its capture trigger: with the remedy.

    operation_id: of that operation's index only.
    """
    return [
        f"index {row.index}: its table (oid {row.recorded}) was dropped, and {row.name} has taken its place, as "
        "after a restore of that table alone. Its rows have no entries. Drop the index and build it again: "
        f"roir drop {argument(str(row.index))}"
        for row in execute(connection, REPLACED, {"operation": operation_id})
    ]
