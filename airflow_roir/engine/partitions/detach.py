"""Detaches a partition from an indexed source, the supported way to drop old partitions."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, parse_name
from airflow_roir.engine.database import Database, execute, has_vanished, said, sqlstate
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.partitions import remove_entries
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import one_history
from airflow_roir.engine.source.catalog import default_schemas, how_to_name, near
from airflow_roir.errors import InvalidInput, LockNotAcquired, NotFound, RoirError

FIND = """
SELECT c.oid::bigint AS oid, n.nspname, c.relname, c.relkind = 'f' AS is_foreign
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relname = %(name)s AND n.nspname = ANY (%(schemas)s) AND c.relkind IN ('r', 'p', 'f')
 ORDER BY array_position(%(schemas)s::text[], n.nspname::text) LIMIT 1
"""
# The relations that a detach locks in ACCESS EXCLUSIVE mode: parent, partition, and the views of the source's indexes.
LOCKED = """
SELECT i.inhparent::regclass::text FROM pg_inherits i WHERE i.inhrelid = %(partition)s
UNION ALL SELECT %(partition)s::oid::regclass::text
UNION ALL SELECT format('%%I.%%I', x.schema_name, x.name)
  FROM roir.index x JOIN pg_partition_ancestors(%(partition)s) a ON a.relid::oid = x.source_oid
 WHERE x.dropped_at IS NULL
"""


def detach_partition(
    database: Database,
    partition: str,
    actor: str,
    reason: str = "",
    drop: bool = False,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> int:
    """Detaches a partition from its table, with its entries in all indexes; returns how many entries were removed.

    After one short transaction, `roir.detach_partition`, neither table nor indexes show the rows. Then the entries are
    removed in batches; if this is interrupted, a later `clean_up` finishes it. drop: also drop the partition. Raises
    NotFound, InvalidInput, LockNotAcquired (nothing was changed, or only the entries are left to remove).
    """
    with one_history(database):
        return _detach(database, partition, reason, actor, drop, report, patience_s)


def _detach(
    database: Database,
    partition: str,
    reason: str,
    actor: str,
    drop: bool,
    report: Callable[[str], None],
    patience_s: float,
) -> int:
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        oid, name = find_table(connection, partition)
        locked = list(execute(connection, LOCKED, {"partition": oid}).scalars())

    def body(connection: Connection) -> None:
        values = {"partition": oid, "reason": reason or None, "drop": drop, "actor": actor}
        call = "SELECT roir.detach_partition(%(partition)s::oid, %(reason)s, %(drop)s, %(actor)s)"
        attempts.outlast(connection, [oid])
        execute(connection, call, values)

    attempts = Attempts(database, name.sql, [oid], database.limits.attempt_ms, patience_s, waiter=Waiter("detach"))
    try:
        attempts.run(body, report, locked)
    except DBAPIError as error:
        if sqlstate(error) == "P0002":
            raise NotFound(said(error)) from None
        if sqlstate(error) in ("55006", "2BP01", "42501"):
            raise InvalidInput(said(error)) from None
        if has_vanished(error):
            raise LockNotAcquired(
                f"{said(error)}. Something was renamed meanwhile; nothing was changed. Run roir clean-up, which "
                "adopts new names, and try again"
            ) from error
        raise
    try:
        with database.transaction() as connection:
            rows = [row for row in remove_entries.leaving(connection) if row.relation == oid]
        return sum(remove_entries.remove(database, row, report, patience_s) for row in rows)
    except (DBAPIError, RoirError):
        report(f"{name} is {'dropped' if drop else 'detached'}, and its entries are hidden: roir clean-up removes them")
        raise


def find_table(connection: Connection, table: str) -> tuple[int, QualifiedName]:
    """A table's oid and full name, by its name as SQL writes it. Raises NotFound, InvalidInput."""
    name = parse_name(table, "table")
    schemas = [name.schema] if name.schema is not None else default_schemas(connection)
    row = execute(connection, FIND, {"name": name.name, "schemas": schemas}).first()
    if row is None:
        found = near(connection, name, schemas, "rpf", partitions=True)
        raise NotFound(f"table {name} doesn't exist{how_to_name(found)}")
    if row.is_foreign:
        raise InvalidInput(
            f"{name} is a foreign table; PostgreSQL doesn't allow it as a partition of a table with a primary key"
        )
    return row.oid, QualifiedName(row.nspname, row.relname)
