"""The segments of a published generation with their figures: estimated, or measured.

An estimate uses the catalogs and statistics, and reads no entry. The extension pgstattuple measures the same figures,
which reads all entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import DATA_SCHEMA
from airflow_roir.engine.compact.fresh_size import (
    HEAP_HEADER,
    INDEX_HEADER,
    Width,
    entry_bytes,
    heap_pages,
    leaf_room,
    leaves_of,
    tree_pages,
)
from airflow_roir.engine.compact.pgstattuple import Measured, measure
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.sessions.side_by_side import side_by_side
from airflow_roir.engine.source.relation_size import RelationSize, relation_sizes

# Each segment with its unique index. In a unique index the segment of NULLs has two, and so two rows here. live: the
# count since the last ANALYZE; unlike the density of the last VACUUM it knows of deletes. A crash of the server resets
# this count to zero: it isn't `counted` until the next VACUUM or ANALYZE. A crash also renews the reset times of all of
# the server's counters. A user may reset single ones, so the earliest reset time is taken for the crash's.
SEGMENTS = f"""
SELECT s.ordinal, s.lower, s.upper, s.sealed_at,
       greatest(s.sealed_at, pg_stat_get_db_stat_reset_time(d.oid), f.since) AS since,
       c.oid::bigint, c.oid::regclass::text AS name,
       CASE WHEN c.reltuples BETWEEN 0 AND 1e15 THEN c.reltuples ELSE -1 END AS reltuples,
       pg_stat_get_live_tuples(c.oid) AS live, pg_stat_get_dead_tuples(c.oid) AS dead,
       coalesce(pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid),
                pg_stat_get_last_analyze_time(c.oid), pg_stat_get_last_autoanalyze_time(c.oid)) IS NOT NULL AS counted,
       coalesce((SELECT option_value::int FROM pg_options_to_table(c.reloptions) WHERE option_name = 'fillfactor'), 100)
       AS fillfactor,
       has_table_privilege(c.oid, 'SELECT') AS readable, current_setting('block_size')::int AS page,
       pg_stat_get_blocks_fetched(c.oid) AS fetched, pg_stat_get_blocks_hit(c.oid) AS hit,
       x.indexrelid::bigint AS tree, x.indkey::int[] AS columns, pg_stat_get_numscans(x.indexrelid) AS scans,
       pg_stat_get_tuples_returned(x.indexrelid) AS returned,
       pg_stat_get_blocks_fetched(x.indexrelid) AS tree_fetched, pg_stat_get_blocks_hit(x.indexrelid) AS tree_hit
  FROM roir.segment s
  JOIN pg_inherits h ON h.inhparent = to_regclass(%(base)s)
  JOIN pg_class c ON c.oid = h.inhrelid AND c.relkind = 'r' AND c.relname = {physical.SEGMENT_NAME}
  JOIN pg_database d ON d.datname = current_database()
 CROSS JOIN (SELECT least((SELECT stats_reset FROM pg_stat_bgwriter), (SELECT stats_reset FROM pg_stat_archiver),
                          (SELECT stats_reset FROM pg_stat_wal)) AS since) f
  LEFT JOIN pg_index x ON x.indrelid = c.oid AND x.indisunique AND x.indisvalid
 WHERE s.generation_id = %(generation)s
 ORDER BY s.ordinal, x.indexrelid
"""
# Each column of the entries, with its statistics in each segment. If no segment has statistics of a column, and its
# type has no fixed length, its width is unknown.
WIDTHS = """
SELECT a.attnum, a.attlen, a.attalign::text AS alignment, s.oid, s.avg_width, s.null_frac
  FROM pg_attribute a
  LEFT JOIN (SELECT c.oid::bigint AS oid, p.attname, p.avg_width,
                    CASE WHEN p.null_frac BETWEEN 0 AND 1 THEN p.null_frac ELSE 0 END AS null_frac
               FROM pg_stats p
               JOIN pg_class c ON c.oid = to_regclass(format('%%I.%%I', p.schemaname, p.tablename))
               JOIN pg_inherits h ON h.inhrelid = c.oid AND h.inhparent = to_regclass(%(base)s)
              WHERE p.schemaname = %(schema)s AND p.tablename = ANY (%(tables)s)) s ON s.attname = a.attname
 WHERE a.attrelid = to_regclass(%(base)s) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""
NO_STATISTICS = "its tables have no statistics: ANALYZE makes them"
NOT_READABLE = "this role can't read the statistics of its tables: it needs SELECT on them"
EMPTY_TREE = "its B-tree has no leaf"


def segments(connection: Connection, generation_id: int, exact: bool = False) -> tuple[Segment, ...]:
    """The segments of a sealed generation by ordinal, in the caller's transaction. Waits for no lock.

    exact: measure them by pgstattuple, which reads all entries; a segment that can't be measured is estimated, and its
    `note` says why. Empty if the generation's tables are gone. If another session locks a segment exclusively, or waits
    for that, its size is that of the last VACUUM or ANALYZE. The counters may lag a second behind. TOAST isn't counted.
    """
    return segments_of_many(connection, [generation_id], exact)[generation_id]


def segments_of_many(
    connection: Connection, generation_ids: Sequence[int], exact: bool = False
) -> dict[int, tuple[Segment, ...]]:
    """As `segments`, by generation; as many statements for many as for two, unless they are measured."""
    looks = side_by_side(connection, [partial(_stores, generation_id=one) for one in generation_ids])
    stores = dict(zip(generation_ids, looks, strict=True))
    measured: dict[int, Measured] = {}
    why: dict[int, str] = {}
    for of in stores.values() if exact else ():
        more, reasons = measure(connection, of)
        measured, why = measured | more, why | reasons
    sizes = relation_sizes(connection, [oid for of in stores.values() for oid in of])
    left = [one for one, of in stores.items() if of.keys() - measured.keys()]
    looks_at_widths = [partial(_widths, generation_id=one, stores=stores[one]) for one in left]
    widths = dict(zip(left, side_by_side(connection, looks_at_widths), strict=True))
    found = {}
    for generation_id, of in stores.items():
        some = []
        for oid, trees in of.items():
            if oid in measured:
                some.append(_known(trees, measured[oid]))
            elif oid in sizes:  # else dropped meanwhile
                some.append(_estimated(trees, sizes[oid], widths[generation_id][oid], why.get(oid)))
        found[generation_id] = tuple(_beside_siblings(some))
    return found


def _stores(connection: Connection, generation_id: int) -> dict[int, list[Row[Any]]]:
    """The rows of SEGMENTS by the segment's oid."""
    stores: dict[int, list[Row[Any]]] = defaultdict(list)
    for row in execute(connection, SEGMENTS, {"generation": generation_id, "base": physical.base(generation_id)}).all():
        stores[row.oid].append(row)
    return stores


def rows_of(row: Row[Any]) -> int | None:
    """About how many live entries a segment has; None if they weren't counted yet."""
    if row.counted:
        return max(0, int(row.live))
    if row.reltuples >= 0:
        return int(row.reltuples)
    return int(row.live) if row.live > 0 else None


def _widths(
    connection: Connection, generation_id: int, stores: dict[int, list[Row[Any]]]
) -> dict[int, dict[int, Width]]:
    """The column widths of each segment, by column number: by its own statistics, else the average of the others."""
    rows = execute(
        connection,
        WIDTHS,
        {
            "base": physical.base(generation_id),
            "schema": DATA_SCHEMA,
            "tables": [trees[0].name.rsplit(".", 1)[-1] for trees in stores.values()],
        },
    ).all()
    columns = {row.attnum: row for row in rows}
    own = {(row.oid, row.attnum): (row.avg_width, row.null_frac) for row in rows if row.oid is not None}
    average = {}
    for number in columns:
        weights = {oid: max(trees[0].reltuples, 1.0) for oid, trees in stores.items() if (oid, number) in own}
        if weights:
            total = sum(weights.values())
            average[number] = tuple(
                sum(own[oid, number][part] * weight for oid, weight in weights.items()) / total for part in (0, 1)
            )
    return {
        oid: {
            number: _width(column, own.get((oid, number)) or average.get(number)) for number, column in columns.items()
        }
        for oid in stores
    }


def _width(column: Row[Any], known: Sequence[float] | None) -> Width:
    fixed = column.attlen > 0
    width = float(column.attlen) if fixed else None if known is None else float(known[0])
    return Width(width, float(known[1]) if known else 0.0, fixed, column.alignment)


def _estimated(trees: Sequence[Row[Any]], size: RelationSize, columns: dict[int, Width], why: str | None) -> Segment:
    first = trees[0]
    page, rows = first.page, rows_of(first)
    base = _counted(trees, rows, first.dead, size.heap, size.trees)
    unknown = any(column.bytes is None for column in columns.values())
    if rows is None or (rows and unknown):
        said = NO_STATISTICS if first.readable else NOT_READABLE
        return replace(base, note="; ".join(filter(None, (why, said))))
    heap = heap_pages(rows, entry_bytes([columns[n] for n in sorted(columns)], HEAP_HEADER), page, first.fillfactor)
    needed = 0
    filled = 0.0
    for one in trees:
        if one.tree is None:
            continue
        entry = entry_bytes([columns[number] for number in one.columns if number in columns], INDEX_HEADER)
        needed += tree_pages(rows, entry, page)
        # Dead entries fill a leaf, too, until a vacuum removes them.
        filled += (rows + first.dead) * entry
    leaves = leaves_of(size.trees // page) * leaf_room(page)
    density = min(1.0, round(filled / leaves, 3)) if leaves > 0 else None
    note = "; ".join(filter(None, (why, EMPTY_TREE if density is None else None))) or None
    return replace(base, heap_needed=heap * page, tree_needed=needed * page, leaf_density=density, note=note)


def _known(trees: Sequence[Row[Any]], found: Measured) -> Segment:
    base = _counted(trees, found.rows, found.dead_rows, found.heap_bytes, found.tree_bytes)
    return replace(
        base,
        heap_needed=found.heap_needed,
        tree_needed=found.tree_needed,
        leaf_density=found.leaf_density,
        exact=True,
        note=EMPTY_TREE if found.leaf_density is None else None,
    )


def _counted(trees: Sequence[Row[Any]], rows: int | None, dead: int, heap_bytes: int, tree_bytes: int) -> Segment:
    """A segment with its sizes and counters; the caller adds what it needs and how full it is."""
    first = trees[0]
    have = [one for one in trees if one.tree is not None]
    fetched = first.fetched + sum(one.tree_fetched for one in have)
    hit = first.hit + sum(one.tree_hit for one in have)
    return Segment(
        ordinal=first.ordinal,
        name=first.name,
        lower=None if first.lower is None else tuple(first.lower),
        upper=None if first.upper is None else tuple(first.upper),
        rows=rows,
        heap_bytes=heap_bytes,
        tree_bytes=tree_bytes,
        heap_needed=None,
        tree_needed=None,
        leaf_density=None,
        dead_rows=dead,
        scans=sum(one.scans for one in have),
        rows_read=sum(one.returned for one in have),
        blocks_read=max(0, fetched - hit),
        blocks_hit=hit,
        since=first.since,
        sealed_at=first.sealed_at,
        growth=None,
    )


def _beside_siblings(found: Sequence[Segment]) -> list[Segment]:
    """The segments with their growth. The default segment, of NULLs, has no siblings."""
    counts = {one.ordinal: one.rows for one in found if one.ordinal != physical.DEFAULT_SEGMENT}
    told = []
    for one in found:
        others = [rows for ordinal, rows in counts.items() if ordinal != one.ordinal and rows is not None]
        usual = median(others) if others and one.ordinal in counts else 0
        told.append(replace(one, growth=round(one.rows / usual, 3) if usual and one.rows is not None else None))
    return told
