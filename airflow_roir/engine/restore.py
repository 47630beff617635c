"""Takes a database up that was restored from a dump, where every table has another oid than the control schema says."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine import capture, catalog
from airflow_roir.engine.database import LOCK_TIMEOUT_MS, execute

RESTORED = "SELECT recorded, present, present::regclass::text AS name FROM roir.restored_sources() ORDER BY 1"

# Of types, tables and columns that have other oids and numbers now.
KEEP_SHAPES = """
SELECT roir.keep_shape(g.id) FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE i.source_oid = %(source)s AND g.status IN ('building', 'active', 'retired')
"""


def adopt(connection: Connection) -> None:
    """Make indexes, partitions and capture functions name the tables that there are. No-op where nothing was restored.

    In the caller's transaction; locks the sources against writers. Unfinished operations become `failed`.
    """
    restored = execute(connection, RESTORED).all()
    if not restored:
        return
    execute(connection, f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")
    for row in restored:
        execute(connection, f"LOCK TABLE {row.name} IN SHARE ROW EXCLUSIVE MODE")
    execute(connection, "SELECT roir.adopt_restored()")
    for row in restored:
        execute(connection, KEEP_SHAPES, {"source": row.present})
        capture.refresh(connection, catalog.read_source_by_oid(connection, row.present))
