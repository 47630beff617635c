"""Bloat: how much of a published generation's tables holds no entry, and what a rebuild would win.

An estimate from the catalogs and the statistics of the last ANALYZE, which reads no entry. With the extension
pgstattuple the same is measured, which reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import generation as physical
from airflow_roir.engine.database import execute, sqlstate
from airflow_roir.engine.relation_size import LOCK_TIMEOUT, PATIENCE_MS, relation_sizes

# A gain below this is not worth a rebuild, nor a word: tables grow by whole blocks, and estimates err.
LEAST_WIN_BYTES = 256 * 1024
# What a freshly built B-tree leaves free in its leaves, and how many of its leaves one page of the level above names.
FILLED = 0.9
FANOUT = 150
PAGE_HEADER = 24
BTREE_SPECIAL = 16
LINE_POINTER = 4
HEAP_HEADER = 23
INDEX_HEADER = 8
# The bitmap of NULLs in an entry of a B-tree: for 32 columns, always.
INDEX_NULLS = 4
# What a varlena column takes at the most before its length takes four bytes, which are aligned.
SHORT = 127
_ALIGNED = {"c": 1, "s": 2, "i": 4, "d": 8}

# Each segment with its unique index; that of NULLs has two in a unique index, and is there again for the other. rows:
# counted live since the last ANALYZE, which knows of deletes what the density of the last VACUUM doesn't; a server that
# crashed has forgotten the count, and begins it at nothing: it isn't `counted` until the next VACUUM or ANALYZE.
SEGMENTS = """
SELECT c.oid::bigint, c.oid::regclass::text AS name, c.relpages, c.reltuples, pg_stat_get_live_tuples(c.oid) AS live,
       coalesce(pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid),
                pg_stat_get_last_analyze_time(c.oid), pg_stat_get_last_autoanalyze_time(c.oid)) IS NOT NULL AS counted,
       coalesce((SELECT option_value::int FROM pg_options_to_table(c.reloptions) WHERE option_name = 'fillfactor'), 100)
       AS fillfactor,
       row_number() OVER (PARTITION BY c.oid ORDER BY x.indexrelid) > 1 AS again,
       x.indexrelid::bigint AS key_oid, x.indexrelid::regclass::text AS key_name, x.indkey::int[] AS key_columns
  FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid
  LEFT JOIN pg_index x ON x.indrelid = c.oid AND x.indisunique AND x.indisvalid
 WHERE h.inhparent = to_regclass(%(base)s) AND c.relkind = 'r'
 ORDER BY c.oid, again
"""
# A column that no segment has statistics of, and whose type has no fixed length, is of unknown width.
WIDTHS = """
SELECT a.attnum, a.attlen, a.attalign::text AS alignment, s.width, s.nulls
  FROM pg_attribute a
  LEFT JOIN (SELECT p.attname, sum(p.avg_width * greatest(c.reltuples, 1)::float8)
                               / sum(greatest(c.reltuples, 1)::float8) AS width,
                    sum(p.null_frac * greatest(c.reltuples, 1)::float8)
                    / sum(greatest(c.reltuples, 1)::float8) AS nulls
               FROM pg_stats p
               JOIN pg_class c ON c.oid = to_regclass(format('%%I.%%I', p.schemaname, p.tablename))
               JOIN pg_inherits h ON h.inhrelid = c.oid AND h.inhparent = to_regclass(%(base)s)
              WHERE p.schemaname = %(schema)s AND p.tablename = ANY (%(tables)s)
              GROUP BY p.attname) s ON s.attname = a.attname
 WHERE a.attrelid = to_regclass(%(base)s) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
# Only functions that belong to the extension: of another one by that name nobody knows what it does.
MEASURES = """
SELECT quote_ident(n.nspname) AS schema,
       (SELECT count(*) FROM pg_depend d JOIN pg_proc p ON p.oid = d.objid
         WHERE d.classid = 'pg_proc'::regclass AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
           AND d.deptype = 'e' AND has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE')
           AND p.oid IN (to_regprocedure(format('%I.pgstattuple(regclass)', n.nspname)),
                         to_regprocedure(format('%I.pgstatindex(regclass)', n.nspname)))) = 2 AS readable
  FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'pgstattuple'
"""
REFUSED = "42501"


@dataclass(frozen=True)
class Bloat:
    """Bytes of a generation's tables and B-trees. None: it can't be known, and `note` says why.

    bytes: free or dead, and what a fresh B-tree leaves free isn't counted; share: of the tables' size, 0 to 1. ghosts:
    leftovers of the build, until the next clean-up. win_bytes, win_share: what a rebuild would win, 0 below 256 kB.
    rows: entries, about. exact: measured by pgstattuple, else estimated. TOAST counts neither way.
    """

    rows: int | None
    bytes: int | None
    share: float | None
    ghosts: int
    win_bytes: int | None
    win_share: float | None
    exact: bool = False
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the rows are the index's."""
        return {name: value for name, value in asdict(self).items() if name != "rows"}


def bloat(connection: Connection, generation_id: int, ghosts: int, exact: bool = False) -> Bloat:
    """The bloat of a published generation, in the caller's transaction. Waits for no lock.

    exact: measure it by pgstattuple, which reads all entries; if the extension isn't there, or may not be used, or
    a table is locked, `note` says so, and it is an estimate all the same.
    """
    segments = _segments(connection, generation_id)
    if not segments:
        return Bloat(None, None, None, ghosts, None, None, note="the index's tables are gone")
    note = None
    if exact:
        measured = _measured(connection, segments, ghosts)
        if isinstance(measured, Bloat):
            return measured
        note = measured
    estimated = _estimated(connection, generation_id, segments, ghosts)
    return replace(estimated, note="; ".join(filter(None, (note, estimated.note))) or None)


def _segments(connection: Connection, generation_id: int) -> Sequence[Row[Any]]:
    return execute(connection, SEGMENTS, {"base": physical.base(generation_id)}).all()


def _rows(segment: Row[Any]) -> int | None:
    if segment.reltuples >= 0 and not segment.counted:
        return int(segment.reltuples)
    return int(segment.live or max(segment.reltuples, 0)) if segment.live > 0 or segment.reltuples >= 0 else None


def _estimated(connection: Connection, generation_id: int, segments: Sequence[Row[Any]], ghosts: int) -> Bloat:
    widths = execute(
        connection,
        WIDTHS,
        {
            "base": physical.base(generation_id),
            "schema": physical.base(generation_id).split(".", 1)[0],
            "tables": [segment.name.rsplit(".", 1)[-1] for segment in segments],
        },
    ).all()
    columns = {row.attnum: row for row in widths}
    counts = [_rows(one) for one in segments if not one.again]
    known = [rows for rows in counts if rows is not None]
    total = sum(known) if len(known) == len(counts) else None
    if total is None or (total and any(row.width is None and row.attlen <= 0 for row in widths)):
        note = "its tables have no statistics: ANALYZE makes them"
        return Bloat(total, None, None, ghosts, None, None, note=note)
    page = int(execute(connection, "SELECT current_setting('block_size')::int").scalar_one())
    sizes = relation_sizes(connection, (one.oid for one in segments))
    heap = _tuple([columns[number] for number in sorted(columns)], HEAP_HEADER)
    now = needed = 0
    for one in segments:
        size = sizes.get(one.oid)
        rows = _rows(one) or 0
        if size is None:
            continue  # dropped meanwhile
        if not one.again:
            now += size.total - (size.own - size.heap)
            needed += _heap_pages(rows, heap, page, one.fillfactor) * page
        if one.key_columns is not None:
            key = [columns[number] for number in one.key_columns if number in columns]
            needed += _tree_pages(rows, _tuple(key, INDEX_HEADER), page) * page
    return _compared(total, now, needed, ghosts)


def _tuple(columns: Sequence[Row[Any]], header: int) -> float:
    """The bytes that an average tuple takes in a page."""
    nulls = any(column.nulls for column in columns)
    if header == HEAP_HEADER:
        size = float(_align(header + ((len(columns) + 7) // 8 if nulls else 0), 8))
    else:
        size = float(_align(header + (INDEX_NULLS if nulls else 0), 8))
    for column in columns:
        fixed = column.attlen > 0
        width = float(column.attlen if fixed else column.width or 0)
        share = 1.0 - float(column.nulls or 0)
        if fixed or width > SHORT:
            alignment = _ALIGNED.get(column.alignment, 8)
            size += share * (-size % alignment)
        size += share * width
    return size + (-size % 8) + LINE_POINTER


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _heap_pages(rows: int, size: float, page: int, fillfactor: int) -> int:
    a_page = max(1, int((page - PAGE_HEADER) * fillfactor / 100 / size))
    return -(-rows // a_page)


def _tree_pages(rows: int, size: float, page: int) -> int:
    """Of a B-tree that was just built, with the levels above its leaves and its first page."""
    a_leaf = max(1, int((page - PAGE_HEADER - BTREE_SPECIAL) * FILLED / size))
    pages, level = 1, -(-rows // a_leaf)
    while level > 1:
        pages += level
        level = -(-level // FANOUT)
    return pages + level


def _compared(rows: int, now: int, needed: int, ghosts: int, exact: bool = False) -> Bloat:
    free = max(0, now - needed)
    share = round(free / now, 3) if now else 0.0
    worth = free >= LEAST_WIN_BYTES
    return Bloat(rows, free, share, ghosts, free if worth else 0, share if worth else 0.0, exact)


def _measured(connection: Connection, segments: Sequence[Row[Any]], ghosts: int) -> Bloat | str:
    """The bloat by pgstattuple; or why it can't be measured."""
    found = execute(connection, MEASURES).first()
    if found is None:
        return "estimated, since the extension pgstattuple isn't installed"
    if not found.readable:
        return "estimated, since this role may not use pgstattuple: GRANT pg_stat_scan_tables TO the role"
    page = int(execute(connection, "SELECT current_setting('block_size')::int").scalar_one())
    savepoint = connection.begin_nested()
    rows = now = needed = 0
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        for one in segments:
            if not one.again:
                heap = execute(
                    connection,
                    f"SELECT table_len, tuple_count, tuple_len FROM {found.schema}.pgstattuple(%(oid)s::oid::regclass)",
                    {"oid": one.oid},
                ).one()
                now += heap.table_len
                rows += heap.tuple_count
                if heap.tuple_count:
                    size = -(-heap.tuple_len // heap.tuple_count)
                    needed += _heap_pages(heap.tuple_count, _align(size, 8) + LINE_POINTER, page, one.fillfactor) * page
            if one.key_oid is None:
                continue
            tree = execute(
                connection,
                "SELECT index_size, leaf_pages, internal_pages, avg_leaf_density AS density "
                f"FROM {found.schema}.pgstatindex(%(oid)s::oid::regclass)",
                {"oid": one.key_oid},
            ).one()
            now += tree.index_size
            # Without leaves its density is NaN.
            filled = tree.leaf_pages * tree.density / 100 if tree.leaf_pages else 0.0
            leaves = -(-filled // FILLED)
            needed += int(min(leaves + tree.internal_pages + 1, tree.index_size // page)) * page
    except DBAPIError as error:
        if sqlstate(error) not in (LOCK_TIMEOUT, REFUSED):
            raise
        locked = sqlstate(error) == LOCK_TIMEOUT
        return f"estimated, since {'the tables are locked' if locked else 'this role may not use pgstattuple'} now"
    finally:
        savepoint.rollback()
    return _compared(rows, now, needed, ghosts, exact=True)
