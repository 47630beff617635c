"""The view by which strict readers see the intents of a generation (docs/architecture.md#reading-apart)."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine import generation
from airflow_roir.engine.database import execute
from airflow_roir.engine.entry import Entry


def create(connection: Connection, generation_id: int, entry: Entry) -> None:
    """Make it, once the table of intents is there. entry: the index server's.

    Whoever may read the index may read it: it asks for that, and whether strict reads are possible, once per query.
    """
    columns = ", ".join(f"c{i + 1} AS {quote(entry.columns[i].source)}" for i in entry.identity_positions)
    execute(
        connection,
        f"CREATE VIEW {generation.announced(generation_id)} AS SELECT {columns} "
        f"FROM {generation.intent(generation_id)} "
        # In this order: another generation may be shown meanwhile.
        f"WHERE (SELECT CASE WHEN roir.is_strict({generation_id}) THEN roir.may_read({generation_id}) END)",
    )
    execute(connection, f"GRANT SELECT ON {generation.announced(generation_id)} TO PUBLIC")


def drop(connection: Connection, generation_id: int) -> None:
    """Drop it, where there is one."""
    execute(connection, f"DROP VIEW IF EXISTS {generation.announced(generation_id)}")
