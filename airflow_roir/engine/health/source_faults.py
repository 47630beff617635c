"""Finds faults of a source: columns that differ from those of a published generation, and pg_partman's maintenance."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import argument, quote
from airflow_roir.engine.capture.plpgsql import literal
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Column, Source


def of_columns(connection: Connection, index: str, source: Source, generation_id: int, entry: Entry) -> list[str]:
    """Differences between the source's columns and a published generation's, which the index's view can't follow."""
    base = execute(connection, "SELECT to_regclass(%(name)s)::oid", {"name": physical.base(generation_id)}).scalar_one()
    stored = {} if base is None else catalog.columns_of(connection, base)
    remedy = f"Drop the index and build it again: roir drop {argument(index)}"
    found = []
    for number, column in enumerate(entry.columns, start=1):
        gone = next((name for name in column.read if name not in source.columns), None)
        now, then = source.columns.get(column.source), stored.get(f"c{number}")
        if gone is not None:
            found.append(_gone(index, source, gone))
        elif column.call:
            continue
        elif now is not None and then is not None and (now.type, now.collation) != (then.type, then.collation):
            found.append(
                f"index {index}: column {quote(column.source)} of {source.sql} is {_type(now)} now and {_type(then)} "
                f"in its entries, which may therefore be wrong. {remedy}"
            )
    of_condition = entry.condition.arguments if entry.condition else ()
    found += [_gone(index, source, name) for name in of_condition if name not in source.columns]
    key = [column.source for column in entry.columns[: entry.key]]
    identity = [column.source for column in entry.columns[: entry.identity]]
    if [*key, *(name for name in source.primary_key if name not in key)] != identity:
        found.append(
            f"index {index}: the primary key of {source.sql} is another one now, and the old one doesn't identify its "
            f"rows any more. {remedy}"
        )
    return found


def _gone(index: str, source: Source, column: str) -> str:
    return (
        f"index {index}: {source.sql} has no column {quote(column)} any more, so writes to it fail. If it was renamed, "
        f"rename it back. If it was dropped, drop the index, too: roir drop {argument(index)}"
    )


def _type(column: Column) -> str:
    return column.type if column.collation is None else f"{column.type} COLLATE {column.collation}"


# pg_partman reports the error to the session that runs its maintenance, mostly a background worker. It can't create the
# next partitions as long as the default one has their rows, so its maintenance fails every time. These are the default
# partitions that have rows, of the table and of levels below it, by the server's counts: to read one would wait for
# locks. parent: as pg_partman writes names, without quotes.
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


def of_partman(connection: Connection, source: Source) -> list[str]:
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
