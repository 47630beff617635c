"""A new index on the page *Indexes*: the tables that it can be of, and all that is against it, before the trigger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine.database import execute
from airflow_roir.engine.forecast import objections
from airflow_roir.errors import Complaints
from airflow_roir.options import BuildOptions
from airflow_roir.page import databases

# A list to choose from; a table beyond it can be typed.
MOST_TABLES = 500
# Partitioned tables come first: of these most indexes are.
TABLES = """
SELECT n.nspname AS schema, c.relname AS name,
       array(SELECT a.attname::text FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum) AS columns
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname !~ '^pg_'
   AND n.nspname NOT IN ('information_schema', 'roir', 'roir_data')
 ORDER BY c.relkind, n.nspname, c.relname LIMIT %(most)s
"""


@dataclass(frozen=True)
class Asked:
    """An index as a user types it, in the texts of the form of `rebuild_index`."""

    index: str
    table: str
    keys: str
    include: str
    unique: bool
    where: str = ""


def tables_of(connection_id: str) -> dict[str, Any]:
    """The tables of a connection's database with their columns, for JSON; each name as the form takes it."""
    with databases.reading(connection_id) as database, database.transaction() as connection:
        rows = execute(connection, TABLES, {"most": MOST_TABLES}).all()
    return {
        "tables": [
            {
                "table": str(QualifiedName(row.schema, row.name)),
                "columns": [str(QualifiedName(None, column)) for column in row.columns],
            }
            for row in rows
        ]
    }


def check(connection_id: str, asked: Asked) -> dict[str, Any]:
    """All that is against a build, for JSON: sentences with their remedies. Changes nothing.

    The first task of a run looks again: the database may change, and the run's Spark isn't looked at here.
    """
    complaints = Complaints()
    definition = IndexDefinition.parse(
        asked.index,
        asked.table or None,
        asked.keys,
        asked.include,
        asked.unique,
        where=asked.where,
        complaints=complaints,
    )
    database = databases.open_database(connection_id, "new index")
    found = objections.find(database, definition, BuildOptions(), complaints)
    return {"refused": [*map(str, found.missing), *found.refused]}
