"""Finds changes that users made to roir's own relations: an index's view, and the tables of its generation."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.definition import QualifiedName, argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.readers import view_check

# Looks the tables up by name, as writes do: a renamed table is missing for them.
TABLES = f"""
SELECT b.oid IS NOT NULL AS base,
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
         WHERE a.attrelid = b.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
       (SELECT count(*) FROM pg_index x WHERE x.indrelid = b.oid AND x.indisunique AND x.indisvalid
           AND x.indnkeyatts = %(keys)s) > 0 AS unique_key,
       EXISTS (SELECT FROM pg_index x WHERE x.indrelid = to_regclass(%(rest)s) AND x.indisunique AND x.indisvalid
                  AND x.indnkeyatts = %(identity)s) AS pair_key,
       (SELECT count(*) FROM roir.segment s WHERE s.generation_id = %(generation)s)
       - (SELECT count(*) FROM roir.partition_tree(b.oid) t JOIN pg_class c ON c.oid = t.relation
           WHERE c.relpersistence = 'p') AS segments_missing,
       (SELECT count(*) FROM roir.segment s
         WHERE s.generation_id = %(generation)s
           -- By the snapshot that has the segments: a look-up by name would miss those that a swap has dropped.
           AND NOT EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = 'roir_data'::regnamespace
                              AND c.relname = {physical.SEGMENT_NAME})) AS segments_renamed,
       roir.table_additions(%(generation)s) AS additions
  FROM (SELECT to_regclass(%(base)s)::oid AS oid) b
"""
VIEW = """
SELECT c.relkind::text AS kind, b.oid = ANY (r.relations) AS shows,
       (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_attribute a
         WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
       pg_get_userbyid(b.relowner)::text AS builder, roir.is_open(%(generation)s, c.oid) AS open,
       u.unread, pg_get_userbyid(u.reader) AS reader,
       u.reader = c.relowner AND c.relowner <> b.relowner AS is_given_away
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_class b ON b.oid = to_regclass(%(base)s)
  LEFT JOIN pg_class s ON s.oid = to_regclass(%(shown)s)
  -- The owner of each of the two views needs the rights on the relations that the view reads.
  LEFT JOIN LATERAL (
       SELECT x.reader, x.relation::regclass::text AS unread
         FROM (VALUES (c.relowner, b.oid), (c.relowner, s.oid), (s.relowner, b.oid)) AS x (reader, relation)
        WHERE NOT (has_table_privilege(x.reader, x.relation, 'SELECT')
                   AND has_schema_privilege(x.reader, 'roir_data', 'USAGE')) LIMIT 1) u ON true
 CROSS JOIN LATERAL (
       SELECT array_agg(d.refobjid) FILTER (WHERE d.refclassid = 'pg_class'::regclass AND d.refobjid <> c.oid)
              AS relations
         FROM pg_rewrite w JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = w.oid
        WHERE w.ev_class = c.oid) r
 WHERE n.nspname = %(schema)s AND c.relname = %(name)s
"""


def problems(connection: Connection, name: QualifiedName, generation_id: int, entry: Entry) -> list[str]:
    """Lines for faults of a published generation's tables, and of the index's view. Waits for no lock on them."""
    return [
        *(f"index {name}: {line}" for line in _tables(connection, name, generation_id, entry)),
        *(f"index {name}: {line}" for line in _view(connection, name, generation_id, entry)),
    ]


def _tables(connection: Connection, name: QualifiedName, generation_id: int, entry: Entry) -> list[str]:
    base = physical.base(generation_id)
    keys = entry.key if entry.enforced else entry.identity
    rest = physical.segment(generation_id, physical.DEFAULT_SEGMENT)
    asked = {"generation": generation_id, "base": base, "keys": keys, "rest": rest, "identity": entry.identity}
    row = execute(connection, TABLES, asked).one()
    remedy = f"Drop the index and build it again: roir drop {argument(name)}"
    if not row.base:
        return [f"its entries, {base}, are gone or have another name, so writes to its table fail. {remedy}"]
    found = []
    if row.columns != entry.physical():
        found.append(f"columns of {base} were altered, so writes to its table fail. {remedy}")
    if not row.unique_key:
        found.append(f"{base} has lost its unique index, so writes to its table fail. {remedy}")
    elif entry.apart_positions and not row.pair_key:
        found.append(f"{rest} has lost its index of keys with NULLs, so writes of them fail. {remedy}")
    if row.segments_missing:
        found.append(f"{base} has lost segments, or they are unlogged, so entries are missing. {remedy}")
    elif row.segments_renamed:
        found.append(
            f"segments of {base} have other names, so writes to its table may fail. Rename them back. Or: {remedy}"
        )
    if row.additions:
        found.append(
            f"{base}, its segments or its delta have got rules, triggers or row-level security, so writes may fail or "
            f"be missed. Drop these. Then run roir verify {argument(name)}; if it finds a difference, run "
            f"roir build {argument(name)}"
        )
    return found


def _view(connection: Connection, name: QualifiedName, generation_id: int, entry: Entry) -> list[str]:
    values = {
        "generation": generation_id,
        "base": physical.base(generation_id),
        "shown": physical.shown(generation_id),
        "schema": name.schema,
        "name": name.name,
    }
    row = execute(connection, VIEW, values).first()
    remedy = f"Rebuild the index, which creates the view again: roir build {argument(name)}"
    if row is None:
        return [f"its view {name.sql} is gone, or has another name. Rename it back. Or: {remedy}"]
    wrong = view_check.seen(connection, name, generation_id)
    if row.kind != "v" or (not row.shows and wrong is None):
        return [f"{name.sql} is another relation now, not its view. Drop or rename it. {remedy}"]
    if row.columns != [column.source for column in entry.columns]:
        return [f"its view {name.sql} was altered, and may show wrong entries. Drop it. {remedy}"]
    if row.unread is not None:
        unread = f"{row.reader}, who may not read {row.unread}, so no role can read the view"
        if row.is_given_away:
            back = f"Give the view back to roir's role: ALTER VIEW {name.sql} OWNER TO {quote(row.builder)}"
            return [f"its view {name.sql} belongs to {unread}. {back}"]
        return [f"its view {name.sql} reads by the rights of {unread}. Run: roir init, which gives them again"]
    if wrong is not None:
        return [f"its view {name.sql} {wrong}, so readers see other rows than its table's. {view_check.remedy(name)}"]
    if row.open:
        return [
            f"its view {name.sql} was replaced, or rights were given, so roles with more than SELECT on it may write "
            f"or lock entries. {view_check.remedy(name)}"
        ]
    return []
