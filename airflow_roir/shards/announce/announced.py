"""The view by which strict readers see the intents of a generation (docs/architecture.md#reading-apart)."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry


def view(generation_id: int) -> str:
    """The identities that intents name, under the names that the index's view gives them."""
    return f"{DATA_SCHEMA}.g{generation_id}_announced"


def create(connection: Connection, generation_id: int, entry: Entry) -> None:
    """Make it, once the table of intents is there. entry: the index server's.

    Whoever may read the index may read it: it asks for that, and whether strict reads are possible, once per query.
    """
    row = next(i for i in entry.identity_positions if entry.columns[i].primary_key)
    columns = ", ".join(f"c{i + 1} AS {quote(entry.columns[i].source)}" for i in entry.identity_positions)
    execute(
        connection,
        f"CREATE VIEW {view(generation_id)} AS SELECT {columns} "
        f"FROM {DATA_SCHEMA}.g{generation_id}_intent "
        # That by which `roir announce` tries the way names nothing. In this order: another generation may be shown
        # meanwhile.
        f"WHERE c{row + 1} IS NOT NULL "
        f"AND (SELECT CASE WHEN roir.is_strict({generation_id}) THEN roir.may_read({generation_id}) END)",
    )
    execute(connection, f"GRANT SELECT ON {view(generation_id)} TO PUBLIC")


def drop(connection: Connection, generation_id: int) -> None:
    """Drop it, where there is one."""
    execute(connection, f"DROP VIEW IF EXISTS {view(generation_id)}")
