"""pg_partman's maintenance of an indexed table, when it has fallen behind: rows are in the default partition then.

pg_partman reports the error to the session that runs the maintenance, mostly a background worker. It can't make the
next partitions as long as the default one has their rows, so its maintenance fails every time.
"""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.capture.plpgsql import literal
from airflow_roir.engine.database import execute
from airflow_roir.engine.source import Source

# The default partition that has rows, by the server's counts: to read it would wait for locks.
FILLED = """
SELECT n.nspname AS schema, p.partdefid::regclass::text AS rest
  FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace, pg_partitioned_table p
 WHERE e.extname = 'pg_partman' AND p.partrelid = %(source)s AND p.partdefid <> 0
   AND pg_stat_get_live_tuples(p.partdefid) > 0
   AND has_schema_privilege(n.oid, 'USAGE')
   AND has_table_privilege(to_regclass(quote_ident(n.nspname) || '.part_config'), 'SELECT')
"""


def behind(connection: Connection, source: Source) -> list[str]:
    """What status says of it, with the remedy: no line, or one."""
    row = execute(connection, FILLED, {"source": source.oid}).first()
    if row is None:
        return []
    config = f"{quote(row.schema)}.part_config"
    # As it writes names: without quotes.
    name = f"{source.name.schema}.{source.name.name}"
    if execute(connection, f"SELECT 1 FROM {config} WHERE parent_table = %(name)s", {"name": name}).first() is None:
        return []
    return [
        f"rows of {source.sql} are in its default partition {row.rest}, so pg_partman's maintenance of it has failed, "
        f"or makes too few partitions ahead. Look for its error in the server's log, then move the rows: "
        f"CALL {quote(row.schema)}.partition_data_proc({literal(name)})"
    ]
