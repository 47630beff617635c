"""Takes a database up that was restored from a dump or upgraded by pg_upgrade: its catalogs were made anew.

A dump gives every table another oid than the control schema says. pg_upgrade keeps the oids of tables, and links their
partitions anew. A single table that was dropped and restored is neither: what rows it brought no capture has seen.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine import capture, catalog
from airflow_roir.engine.database import LOCK_TIMEOUT_MS, execute

RESTORED = "SELECT recorded, present, present::regclass::text AS name FROM roir.restored_sources() ORDER BY 1"
UPGRADED = "SELECT source::regclass::text FROM roir.upgraded_sources() ORDER BY 1 LIMIT 1"
REPLACED = """
SELECT quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index, r.recorded, r.present::regclass::text AS name
  FROM roir.replaced_sources() r JOIN roir.index i ON i.id = r.index ORDER BY 1
"""


def problem(connection: Connection) -> str | None:
    """What happened to the database that its indexes don't know yet, None where nothing did."""
    restored = execute(connection, RESTORED).first()
    if restored is not None:
        return (
            f"this database was restored from a dump: table {restored.name} has another oid now than its indexes know"
        )
    upgraded = execute(connection, UPGRADED).scalar()
    if upgraded is not None:
        return (
            f"this database was upgraded by pg_upgrade: the partitions of {upgraded} have other links now than its "
            "indexes know"
        )
    return None


def adopt(connection: Connection) -> None:
    """Make indexes, partitions and capture functions name the tables that there are. No-op where nothing has moved.

    In the caller's transaction; after a restore it locks the sources against writers. Operations that were unfinished
    in a dump become `failed`; after a pg_upgrade they go on. A source that was replaced alone is left as it is.
    """
    restored = execute(connection, RESTORED).all()
    if restored:
        execute(connection, f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
        for row in restored:
            execute(connection, f"LOCK TABLE {row.name} IN SHARE ROW EXCLUSIVE MODE")
        execute(connection, "SELECT roir.adopt_restored()")
        for row in restored:
            capture.refresh(connection, catalog.read_source(connection, catalog.name_of(connection, row.present)))
    execute(connection, "SELECT roir.adopt_upgraded()")
    execute(connection, "SELECT roir.settle() WHERE roir.moved() IS NOT NULL")


def replaced(connection: Connection) -> list[str]:
    """Indexes whose source was dropped, and another table has its place and its capture trigger: with the remedy."""
    return [
        f"index {row.index}: its table (oid {row.recorded}) was dropped, and {row.name} was put in its place, as a "
        f"restore of that table alone does. Its rows came without their entries. Drop the index and build it anew: "
        f"roir drop '{row.index}'"
        for row in execute(connection, REPLACED)
    ]
