"""The statements by which users query a published index: its view, and whole rows of the table by `roir.rows`."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# An array for index `i`, whose table is `c` in schema `n`; … stands for a value. Over shards it has the view alone:
# roir.rows reads tables of this database.
QUERIES = """
CASE WHEN c.oid IS NOT NULL THEN array_remove(ARRAY[
     (SELECT format('SELECT %%s FROM %%I.%%I WHERE %%I = …', string_agg(quote_ident(k.name), ', ' ORDER BY k.first),
                    i.schema_name, i.name, i.key_columns ->> 0)
        FROM (SELECT e.name, min(e.place) AS first
                FROM jsonb_array_elements_text(i.key_columns || i.included_columns)
                     WITH ORDINALITY AS e (name, place) GROUP BY e.name) k),
     CASE WHEN i.shard_table IS NULL THEN
          format('SELECT * FROM roir.rows(NULL::%%I.%%I, %%L, %%L)', n.nspname, c.relname,
                 format('%%I.%%I', i.schema_name, i.name), format('{%%s: …}', to_json(i.key_columns ->> 0))) END], NULL)
END
"""
OF_OPERATION = f"""
SELECT {QUERIES} AS queries
  FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
  LEFT JOIN pg_class c ON c.oid = i.source_oid::oid LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE o.id = %(operation)s
   AND EXISTS (SELECT FROM roir.generation g WHERE g.index_id = i.id AND g.status = 'active')
"""


def queries(connection: Connection, operation_id: int) -> tuple[str, ...]:
    """The statements for the index of an operation; none if nothing is published, or the table was dropped."""
    found: Sequence[str] | None = execute(connection, OF_OPERATION, {"operation": operation_id}).scalar()
    return tuple(found or ())


def lines(statements: Sequence[str]) -> list[str]:
    """The statements as lines for people."""
    whole = "whole rows: "
    return [f"query it: {whole if n else ''}{statement}" for n, statement in enumerate(statements)]
