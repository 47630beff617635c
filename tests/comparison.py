"""Compares the active generation with its source, in one snapshot, to the row.

Simple, slow and independent of `engine.verify`: what the tests judge by.
"""

from __future__ import annotations

from dataclasses import dataclass

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.source import catalog
from airflow_roir.errors import NotFound


@dataclass(frozen=True)
class Comparison:
    """Counts of one comparison. different: the entry is there, but its included or equal-yet-distinct values differ."""

    index: str
    rows: int
    missing: int
    extra: int
    different: int


def compare(database: Database, index: str) -> Comparison:
    """Compare index and source in one REPEATABLE READ snapshot, under writers too. Raises NotFound.

    A plain comparison: it reads both sides once and holds its snapshot for as long as that takes.
    """
    with database.connect() as connection:
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            check_schema(connection)
            found = operations.find_index(connection, parse_name(index, "index"))
            row = execute(connection, operations.ACTIVE_GENERATION, {"index": found.id}).first()
            if row is None:
                raise NotFound(f"index {index} isn't published yet; finish its operation first: roir resume")
            name = catalog.name_of(connection, found.source_oid)
            # The rows that readers see: without the entries of partitions that are leaving or joining.
            shown = execute(
                connection, "SELECT coalesce(roir.is_shown(%(id)s, 'x'), 'true')", {"id": row.id}
            ).scalar_one()
            counts = execute(connection, _comparison(name.sql, row.id, Entry.from_json(row.entry), shown)).one()
            return Comparison(
                str(operations.index_name(found)), counts.rows, counts.missing, counts.extra, counts.different
            )


def _comparison(source: str, generation_id: int, entry: Entry, shown: str) -> str:
    """By primary key: a source row must have exactly one entry, and that with the same image."""
    columns = entry.columns
    key = [i for i in entry.identity_positions if columns[i].primary_key]
    join = " AND ".join(f"s.c{i + 1} {columns[i].equals} b.c{i + 1}" for i in key)
    # In words of its own: where both are there the operator says it, where neither is they are the same.
    same = " AND ".join(
        f"coalesce(s.c{i + 1} {columns[i].equals} b.c{i + 1}, num_nonnulls(s.c{i + 1}, b.c{i + 1}) = 0)"
        for i in entry.identity_positions
    )
    group = ", ".join(f"coalesce(s.c{i + 1}, b.c{i + 1})" for i in key)
    projected = ", ".join(f"{c.of(None)} AS c{i + 1}" for i, c in enumerate(columns))
    entries = ", ".join(f"c{i + 1}{c.to_base_type} AS c{i + 1}" for i, c in enumerate(columns))
    ours, theirs = (f"ROW({', '.join(entry.physical(prefix=prefix))})::record" for prefix in ("s.", "b."))
    return f"""
SELECT count(*) FILTER (WHERE present) AS rows,
       count(*) FILTER (WHERE present AND NOT matched AND NOT same) AS missing,
       coalesce(sum(entries - CASE WHEN present AND (matched OR same) THEN 1 ELSE 0 END), 0)::bigint AS extra,
       count(*) FILTER (WHERE present AND NOT matched AND same) AS different
  FROM (SELECT coalesce(bool_or(s.present), false) AS present,
               count(b.present) AS entries,
               coalesce(bool_or({ours} *= {theirs}), false) AS matched,
               coalesce(bool_or({same}), false) AS same
          FROM (SELECT {projected}, true AS present FROM {source} WHERE {entry.satisfied(None)}) s
          FULL JOIN (SELECT {entries}, true AS present FROM {physical.base(generation_id)} x WHERE {shown}) b ON {join}
         GROUP BY {group}) compared"""
