"""Measures segments by the extension pgstattuple, which reads all entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.compact.fresh_size import FILLED, HALF_PADDING, LINE_POINTER, PAGE_HEADER, aligned, heap_pages
from airflow_roir.engine.database import execute, sqlstate
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT, PATIENCE_MS, held

# Only functions that belong to the extension: another function by that name could do anything.
MEASURES = """
SELECT quote_ident(n.nspname) AS schema, quote_ident(current_user) AS role,
       has_schema_privilege(n.oid, 'USAGE') AS reaches,
       (SELECT count(*) FROM pg_depend d JOIN pg_proc p ON p.oid = d.objid
         WHERE d.classid = 'pg_proc'::regclass AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
           AND d.deptype = 'e' AND has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE')
           AND p.oid IN (to_regprocedure(format('%I.pgstattuple(regclass)', n.nspname)),
                         to_regprocedure(format('%I.pgstatindex(regclass)', n.nspname)))) = 2 AS readable
  FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'pgstattuple'
"""
REFUSED = "42501"
NOT_THERE = "estimated, since the extension pgstattuple isn't installed"
LOCKED = "estimated, since the tables are locked now"
NOT_ALLOWED = "estimated, since role {role} may not use pgstattuple: {grant}"


@dataclass(frozen=True)
class Measured:
    """The measured figures of one segment, as in `Segment`."""

    rows: int
    dead_rows: int
    heap_bytes: int
    heap_needed: int
    tree_bytes: int
    tree_needed: int
    leaf_density: float | None


def measure(
    connection: Connection, stores: Mapping[int, Sequence[Row[Any]]]
) -> tuple[dict[int, Measured], dict[int, str]]:
    """Measures the segments that can be measured, in the caller's transaction, and says why others can't be.

    Waits for no lock. stores: the tables by oid, with a row for each B-tree.
    """
    extension = execute(connection, MEASURES).first()
    if extension is None or not extension.readable:
        return {}, dict.fromkeys(stores, NOT_THERE if extension is None else _not_allowed(extension))
    measured: dict[int, Measured] = {}
    locked = held(connection, stores)
    why = dict.fromkeys(locked, LOCKED)
    for oid, trees in stores.items():
        if oid in locked:
            continue
        savepoint = connection.begin_nested()
        try:
            execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
            measured[oid] = _measure(connection, extension.schema, oid, trees)
        except DBAPIError as error:
            if sqlstate(error) == REFUSED:
                return {}, dict.fromkeys(stores, _not_allowed(extension))
            if sqlstate(error) != LOCK_TIMEOUT:
                raise
            why[oid] = LOCKED
        finally:
            savepoint.rollback()
    return measured, why


def _not_allowed(extension: Row[Any]) -> str:
    grants = [] if extension.reaches else [f"GRANT USAGE ON SCHEMA {extension.schema} TO {extension.role}"]
    return NOT_ALLOWED.format(
        role=extension.role, grant="; ".join([*grants, f"GRANT pg_stat_scan_tables TO {extension.role}"])
    )


def _measure(connection: Connection, extension: str, oid: int, trees: Sequence[Row[Any]]) -> Measured:
    page, fillfactor = trees[0].page, trees[0].fillfactor
    heap = execute(
        connection,
        "SELECT table_len, tuple_count, tuple_len, dead_tuple_count AS dead, dead_tuple_len AS dead_len, free_space "
        f"FROM {extension}.pgstattuple(%(oid)s::oid::regclass)",
        {"oid": oid},
    ).one()
    heap_needed = 0
    if heap.tuple_count:
        heap_needed = heap_pages(heap.tuple_count, _tuple(heap, page), page, fillfactor) * page
    taken = needed = leaves = 0
    filled = 0.0
    for one in trees:
        if one.tree is None:
            continue
        tree = execute(
            connection,
            "SELECT index_size, leaf_pages, internal_pages, avg_leaf_density AS density "
            f"FROM {extension}.pgstatindex(%(oid)s::oid::regclass)",
            {"oid": one.tree},
        ).one()
        # The density of a B-tree without leaves is NaN.
        full = tree.leaf_pages * tree.density / 100 if tree.leaf_pages else 0.0
        taken += tree.index_size
        # Each leaf but the last begins with a key that is no entry. Entries of pruned rows look like live ones until a
        # vacuum removes them.
        share = heap.tuple_count / max(1, heap.tuple_count + heap.dead + tree.leaf_pages - 1)
        fresh = math.ceil(full * share / FILLED)
        # Assumes that a page above the leaves points to as many leaves as now.
        inner = math.ceil(tree.internal_pages * fresh / tree.leaf_pages) if fresh > 1 else 0
        needed += min(fresh + inner + 1, tree.index_size // page) * page
        leaves += tree.leaf_pages
        filled += full
    density = round(filled / leaves, 3) if leaves else None
    return Measured(heap.tuple_count, heap.dead, heap.table_len, heap_needed, taken, needed, density)


def _tuple(heap: Row[Any], page: int) -> float:
    """The bytes of an average tuple with its line pointer and padding.

    pgstattuple measures lengths without the padding behind a tuple. The taken room of the pages has this padding, but
    also unused line pointers; so the widest padding is the limit.
    """
    length = float(heap.tuple_len) / heap.tuple_count
    dead = float(heap.dead_len) + (LINE_POINTER + HALF_PADDING) * heap.dead
    taken = float(heap.table_len * (1 - PAGE_HEADER / page) - heap.free_space) - dead
    padded: float = max(length, taken / heap.tuple_count - LINE_POINTER)
    return LINE_POINTER + min(float(aligned(math.ceil(length))), padded)
