"""Notices that pg_partman's maintenance of an indexed table has fallen behind: the default partition has rows then.

pg_partman reports the error to the session that runs the maintenance, mostly a background worker. It can't create the
next partitions as long as the default one has their rows, so its maintenance fails every time.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.capture.plpgsql import literal
from airflow_roir.engine.database import execute
from airflow_roir.engine.source.source import Source

# The default partitions that have rows, of the table and of levels below it, by the server's counts: to read one would
# wait for locks. parent: as pg_partman writes names, without quotes.
FILLED = """
SELECT n.nspname AS schema, p.partdefid::regclass::text AS rest, w.nspname || '.' || c.relname AS parent
  FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace, pg_partition_tree(%(source)s) t
  JOIN pg_partitioned_table p ON p.partrelid = t.relid
  JOIN pg_class c ON c.oid = p.partrelid JOIN pg_namespace w ON w.oid = c.relnamespace
 WHERE e.extname = 'pg_partman' AND p.partdefid <> 0 AND pg_stat_get_live_tuples(p.partdefid) > 0
   AND has_schema_privilege(n.oid, 'USAGE')
   AND has_table_privilege(to_regclass(quote_ident(n.nspname) || '.part_config'), 'SELECT')
 ORDER BY t.level, 3
"""


def behind(connection: Connection, source: Source) -> list[str]:
    """The line of the status, with the remedy, if the maintenance is behind; else no line."""
    found = execute(connection, FILLED, {"source": source.oid}).all()
    if not found:
        return []
    config = f"{quote(found[0].schema)}.part_config"
    names = f"SELECT parent_table FROM {config} WHERE parent_table = ANY (%(names)s)"
    kept = set(execute(connection, names, {"names": [row.parent for row in found]}).scalars())
    row = next((row for row in found if row.parent in kept), None)
    if row is None:
        return []
    return [
        f"rows of {source.sql} are in its default partition {row.rest}, so pg_partman's maintenance of it has failed, "
        f"or makes too few partitions ahead. Look for its error in the server's log, then move the rows: "
        f"CALL {quote(row.schema)}.partition_data_proc({literal(row.parent)})"
    ]
