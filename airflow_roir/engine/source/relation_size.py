"""The sizes of tables on disk. Waits for no lock: a status must not queue behind a session that holds up a build."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute, sqlstate

# The wait if another session takes such a lock after the check: then an estimate is better than a status that hangs.
PATIENCE_MS = 100
LOCK_TIMEOUT = "55P03"

# A size is read under an ACCESS SHARE lock on the table, its indexes and its TOAST table. Even a session that only
# waits for an ACCESS EXCLUSIVE lock blocks it.
LOCKED = """
WITH locked AS (
    SELECT relation FROM pg_locks
     WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock' AND pid <> pg_backend_pid()
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT relation::bigint FROM locked
 UNION SELECT i.indrelid::bigint FROM pg_index i JOIN locked ON locked.relation = i.indexrelid
 UNION SELECT c.oid::bigint FROM pg_class c JOIN locked ON locked.relation = c.reltoastrelid
"""
# NULL if the table was dropped meanwhile.
MEASURED = """
SELECT oid::bigint, coalesce(pg_relation_size(oid), 0) AS heap, coalesce(pg_table_size(oid), 0) AS own,
       coalesce(pg_total_relation_size(oid), 0) AS total,
       coalesce((SELECT sum(pg_relation_size(i.indexrelid)) FROM pg_index i WHERE i.indrelid = c.oid), 0) AS trees
  FROM pg_class c WHERE oid = ANY (%(oids)s::oid[]) AND relkind IN ('r', 'm', 't')
"""
# As of the last VACUUM, ANALYZE or CREATE INDEX.
ESTIMATED = """
SELECT c.oid::bigint, c.relpages * b.size AS heap, (c.relpages + coalesce(t.relpages, 0)) * b.size AS own,
       (c.relpages + coalesce(t.relpages, 0) + coalesce((
          SELECT sum(x.relpages) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
           WHERE i.indrelid IN (c.oid, t.oid)), 0)) * b.size AS total,
       coalesce((SELECT sum(x.relpages) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
                  WHERE i.indrelid = c.oid), 0) * b.size AS trees
  FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
 CROSS JOIN (SELECT current_setting('block_size')::bigint AS size) b
 WHERE c.oid = ANY (%(oids)s::oid[]) AND c.relkind IN ('r', 'm', 't')
"""


@dataclass(frozen=True)
class RelationSize:
    """Sizes in bytes. heap: only the rows; own: with TOAST and maps; total: with all indexes; trees: only these."""

    heap: int
    own: int
    total: int
    trees: int


def relation_sizes(connection: Connection, oids: Iterable[int]) -> dict[int, RelationSize]:
    """The sizes of ordinary tables by oid, in the caller's transaction; other relations are left out.

    If another session holds a table's ACCESS EXCLUSIVE lock, or waits for it, the size is that of the last VACUUM or
    ANALYZE.
    """
    wanted = set(oids)
    if not wanted:
        return {}
    locked = held(connection, wanted)
    sizes = _estimated(connection, locked)
    try:
        return sizes | _measured(connection, wanted - locked)
    except DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT:
            raise
        return _estimated(connection, wanted)


def held(connection: Connection, oids: Iterable[int]) -> set[int]:
    """Those of the tables whose ACCESS EXCLUSIVE lock another session holds, or waits for."""
    return set(oids) & set(execute(connection, LOCKED).scalars())


def _measured(connection: Connection, oids: set[int]) -> dict[int, RelationSize]:
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        return _read(connection, MEASURED, oids)
    finally:
        # This ends the time-out, and releases the locks that were taken to measure.
        savepoint.rollback()


def _estimated(connection: Connection, oids: set[int]) -> dict[int, RelationSize]:
    return _read(connection, ESTIMATED, oids) if oids else {}


def _read(connection: Connection, sql: str, oids: set[int]) -> dict[int, RelationSize]:
    return {
        row.oid: RelationSize(int(row.heap), int(row.own), int(row.total), int(row.trees))
        for row in execute(connection, sql, {"oids": sorted(oids)})
    }
