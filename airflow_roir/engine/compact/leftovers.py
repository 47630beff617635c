"""Invalid indexes on segments: leftovers of a killed `REINDEX CONCURRENTLY` or `CREATE INDEX CONCURRENTLY`.

Roir sends neither. Each write maintains such an index, and no reader uses it.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts

# Without indexes that are being built now: such a session has a lock on the table that no writer has. The base's own
# index is invalid until its last segment is sealed, but it is on the base, not on a segment.
INVALID = """
SELECT x.indexrelid::bigint AS oid, x.indexrelid::regclass::text AS name, x.indrelid::bigint AS segment
  FROM roir.generation g
  JOIN pg_inherits h ON h.inhparent = to_regclass(format('roir_data.g%s', g.id))
  JOIN pg_index x ON x.indrelid = h.inhrelid AND NOT x.indisvalid
 WHERE g.status IN ('active', 'retired')
   AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = x.indexrelid)
   AND NOT EXISTS (SELECT FROM pg_locks l WHERE l.locktype = 'relation' AND l.relation = x.indrelid AND l.granted
                      AND l.mode = 'ShareUpdateExclusiveLock' AND l.pid <> pg_backend_pid()
                      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
 ORDER BY 1
"""
TABLE = "SELECT indrelid::regclass::text FROM pg_index WHERE indexrelid = %(oid)s"


def drop(database: Database, report: Callable[[str], None], patience_s: float) -> int:
    """Drops all of them, each under a short lock; returns how many it found. Raises LockNotAcquired."""
    with database.transaction() as connection:
        found = execute(connection, INVALID).all()
    for one in found:

        def body(connection: Connection, oid: int = one.oid, name: str = one.name) -> None:
            # Checked again under the lock: the index may be valid by now, or another index may have its name.
            table = execute(connection, TABLE, {"oid": oid}).scalar()
            if table is None:
                return
            execute(connection, f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
            if any(row.oid == oid and row.name == name for row in execute(connection, INVALID)):
                execute(connection, f"DROP INDEX {name}")

        Attempts(
            database, one.name, [one.segment], database.limits.attempt_ms, patience_s, waiter=Waiter("clean-up")
        ).run(body, report, [one.name])
    return len(found)
