"""Makes the setting `roir.on_conflict` work for a table, or takes it away (docs/unique.md#on-conflict)."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from airflow_roir.definition import parse_name
from airflow_roir.engine.capture import conflicts, installation
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.locks.table_lock import telling_of_names
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvalidInput

UNIQUE_INDEXES = """
SELECT DISTINCT i.id FROM roir.index i JOIN roir.generation g ON g.index_id = i.id
 WHERE i.source_oid = %(source)s AND i.dropped_at IS NULL AND g.status <> 'dropped' AND g.entry ->> 'unique' <> ''
 ORDER BY 1
"""


def set_on_conflict(
    database: Database,
    table: str,
    actor: str,
    remove: bool = False,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> None:
    """Creates the triggers by which `roir.on_conflict = 'nothing'` works for a table, or drops them.

    Safe to repeat: partitions that have come with partitions of their own get the triggers that they lack. Raises
    NotFound, InvalidInput (the table has no unique index), LockNotAcquired.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        source = catalog.read_source(connection, parse_name(table, "table"))

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        lock()
        indexes = execute(connection, UNIQUE_INDEXES, {"source": source.oid}).all()
        if remove:
            conflicts.remove(connection, source.oid)
        elif not indexes:
            raise InvalidInput(f"table {source.sql} has no unique index: build one by roir build --unique first")
        else:
            conflicts.refresh(connection, source, installation.targets(connection, source.oid))
            conflicts.add_triggers(connection, source)
        for index in indexes:
            said = "the triggers were dropped" if remove else "the triggers were created"
            operations.record_event(connection, index.id, None, actor, "on conflict", said)

    # To drop a trigger takes an ACCESS EXCLUSIVE lock on the table.
    exclusive = [source.sql] if remove else []
    waiter = Waiter("on-conflict", source.sql)
    with telling_of_names():
        Drain(database, source.sql, source.relations, database.limits.attempt_ms, patience_s, waiter).run(
            body, report, exclusive
        )
