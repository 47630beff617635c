"""The statements by which users query a published index: its view, and whole rows of the table by `roir.rows`.

If the table's owner may not read the view, a GRANT follows them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from airflow_roir.engine.database import execute

# A partial index tells its condition in a comment, in one line.
ONLY = """CASE WHEN i.condition <> '' THEN
          ' -- only rows where ' || regexp_replace(i.condition, '[\\n\\r]+', ' ', 'g') ELSE '' END"""
# An array for index `i`, whose table is `c` in schema `n`; … stands for a value. Over shards it has the view alone:
# roir.rows reads tables of this database.
QUERIES = f"""
CASE WHEN c.oid IS NOT NULL THEN array_remove(ARRAY[
     (SELECT format('SELECT %%s FROM %%I.%%I WHERE %%I = …', string_agg(quote_ident(k.name), ', ' ORDER BY k.first),
                    i.schema_name, i.name, i.key_columns ->> 0) || {ONLY}
        FROM (SELECT e.name, min(e.place) AS first
                FROM jsonb_array_elements_text(i.key_columns || i.included_columns)
                     WITH ORDINALITY AS e (name, place) GROUP BY e.name) k),
     CASE WHEN i.shard_table IS NULL THEN
          format('SELECT * FROM roir.rows(NULL::%%I.%%I, %%L, %%L)', n.nspname, c.relname,
                 format('%%I.%%I', i.schema_name, i.name), format('{{%%s: …}}', to_json(i.key_columns ->> 0)))
          || {ONLY} END,
     (SELECT format('GRANT SELECT ON %%I.%%I TO %%I', i.schema_name, i.name, pg_get_userbyid(c.relowner))
        FROM pg_class v JOIN pg_namespace s ON s.oid = v.relnamespace
       WHERE s.nspname = i.schema_name AND v.relname = i.name AND v.relkind = 'v'
         AND NOT has_table_privilege(c.relowner, v.oid, 'SELECT'))], NULL)
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
    return [_line(n, statement) for n, statement in enumerate(statements)]


def _line(n: int, statement: str) -> str:
    if statement.startswith("GRANT "):
        return f"the table's owner may not read it yet: {statement}"
    return f"query it: {'whole rows: ' if n else ''}{statement}"
