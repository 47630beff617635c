"""The facts of each index: the generation that readers see, its size and age, its last verification, its warnings.

They are there also while no operation runs; `details.progress` has the facts of an operation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.as_json import plain_fields
from airflow_roir.definition import QualifiedName, argument, parse_name, quote
from airflow_roir.definition_text import defined, listed
from airflow_roir.engine.compact.bloat import Bloat, bloat_of
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.engine.compact.segments import segments_of_many
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import TABLE_OF
from airflow_roir.engine.health.in_passing import warnings_of_many
from airflow_roir.engine.partitions.remove_entries import still_hidden
from airflow_roir.engine.reference.listing import References, references_to
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.enforced import why_not_of_many
from airflow_roir.engine.snapshot.querying import QUERIES
from airflow_roir.engine.snapshot.shards import ShardLag, lags
from airflow_roir.engine.snapshot.verified import Verified, verifications
from airflow_roir.engine.source.relation_size import relation_sizes

# newest: the newest operation. An index whose drop was killed half-way has no generation any more.
INDEXES = f"""
SELECT {TABLE_OF} AS table_apart, i.announced_by, i.id, i.schema_name, i.name, i.source_oid, i.is_unique,
       i.nulls_not_distinct, i.key_columns, i.included_columns, i.expressions, i.condition,
       n.nspname AS source_schema, c.relname AS source_name, {QUERIES} AS queries,
       clock_timestamp() AS now,
       CASE WHEN i.shard_table IS NOT NULL THEN (
            SELECT roir.strict_problem(g.id) FROM roir.generation g
             WHERE g.index_id = i.id AND g.status = 'active') END AS strict_problem,
       CASE WHEN i.announced_by IS NULL THEN ARRAY(
            SELECT DISTINCT s.name FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id
              JOIN roir.shard s ON s.id = l.shard_id
             WHERE g.index_id = i.id AND g.status <> 'dropped' AND l.announced_by IS NOT NULL AND l.removed_at IS NULL
             ORDER BY s.name) END AS still_announcing,
       CASE WHEN i.rows_view IS NOT NULL THEN roir.full_name(roir.rows_view_of(i.id)) END AS rows_view,
       (SELECT max(o.id) FROM roir.operation o WHERE o.index_id = i.id) AS newest,
       (SELECT o.id FROM roir.operation o
         WHERE o.index_id = i.id AND o.status NOT IN ('completed', 'aborted')) AS unfinished
  FROM roir.index i
  LEFT JOIN pg_class c ON c.oid = i.source_oid::oid AND c.relkind IN ('r', 'p')
  LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE i.dropped_at IS NULL AND (%(index)s IS NULL OR i.id = %(index)s)
 ORDER BY i.schema_name, i.name
"""
GENERATIONS = """
SELECT id, index_id, status, published_at, retired_at, drop_after, ghosts, unique_from,
       CASE WHEN status = 'active' THEN roir.unique_problem(id) END AS unique_problem
  FROM roir.generation WHERE status <> 'dropped' AND index_id = ANY (%(indexes)s)
 ORDER BY id DESC
"""
# The tables of each generation: its segments and its delta.
STORES = """
SELECT g.id AS generation, s.oid::bigint
  FROM unnest(%(generations)s::bigint[]) g (id)
 CROSS JOIN LATERAL (
       SELECT h.inhrelid AS oid FROM pg_inherits h WHERE h.inhparent = to_regclass(format('roir_data.g%%s', g.id))
       UNION ALL SELECT to_regclass(format('roir_data.g%%s_delta', g.id))) s
 WHERE s.oid IS NOT NULL
"""
LEAVES = """
SELECT s.oid AS source, t.relation::bigint AS leaf
  FROM unnest(%(sources)s::bigint[]) s (oid)
 CROSS JOIN LATERAL (
       SELECT relation FROM roir.partition_tree(s.oid::oid) WHERE leaf
       UNION ALL SELECT oid FROM pg_class WHERE oid = s.oid::oid AND relkind = 'r') t
"""
# As `read_indexes` finds them.
STATES = """
SELECT i.schema_name, i.name, bool_or(g.status = 'active') AS published, bool_or(g.status = 'building') AS building,
       (SELECT o.id FROM roir.operation o
         WHERE o.index_id = i.id AND o.status NOT IN ('completed', 'aborted')) AS unfinished
  FROM roir.index i LEFT JOIN roir.generation g ON g.index_id = i.id
 WHERE i.dropped_at IS NULL GROUP BY i.id
"""
NO_REFERENCES = References((), ())
NOT_PUBLISHED = "it isn't published yet"
# Partitions whose entries the readers of the index still see.
GONE = """
SELECT g.index_id, c.name
  FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 CROSS JOIN LATERAL roir.partition_changes(g.id, i.source_oid::oid) c
 WHERE g.status = 'active' AND g.index_id = ANY (%(indexes)s) AND c.gone ORDER BY g.index_id, c.name
"""


@dataclass(frozen=True)
class Generation:
    """One generation that has tables.

    id: its number, which is in the names of its tables.
    status: `building`, `active` (readers see it) or `retired`.
    bytes: the size of its tables with their B-trees.
    published_at, retired_at: when readers began to see it, and when they stopped.
    drop_after: when the clean-up may drop it.
    """

    id: int
    status: str
    bytes: int
    published_at: datetime | None
    retired_at: datetime | None
    drop_after: datetime | None


@dataclass(frozen=True)
class IndexFacts:
    """One index.

    Sizes are in bytes. docs/reference/status.md is made from this list.

    index, source: the names of the index and of its source table; `source` is null if the table was dropped.
    state: `published`, `building` (for the first time), or `not published` (a drop was killed: repeat it).
    key, include: the key and included columns, each as `--keys` and `--include` take it: expressions with their names.
    where: the condition of a partial index, which lacks all other rows; '' if it has all rows.
    definition: what the index is, in one line.
    unique, nulls_not_distinct: whether two rows may have the same key, or the same NULLs in it.
    rows: entries, about.
    bytes: the size of the entries with their B-trees.
    source_bytes: the size of the table's rows with TOAST, without its indexes; unknown over shards.
    generation, published_at, age_seconds: the generation that readers see, since when, and for how long.
    revert_until: when the replaced generation is dropped (docs/operate.md#revert).
    generations: every generation that has tables.
    verified: the last verification of the generation that readers see; null: never.
    warnings: the problems of the index: capture triggers that don't fire, an altered table, partitions that are gone
        (docs/troubleshooting.md#a-warning-of-roir-status-or-the-clean-up).
    bloat: the room that holds no entry, and how much a rebuild would win; null if nothing is published.
    operation: the number of the unfinished operation.
    apart: whether the table is in shards (docs/shards.md).
    shards: how far each shard is behind, for each generation (docs/shards.md#ship).
    announced_by: the side that announces the writes of shards (docs/shards.md#strict): `server` or `client`; null:
        neither.
    strict_problem: why an index over shards can't be read strictly; null if it can.
    unique_since, unique_problem: of a unique index: since when a key is unique over shards; why rows may share a key
        now: the capture misses writes, or a verification found such rows (docs/unique.md); null if none can.
    queries: the statements that read the index: its view, and whole rows of the table; … stands for a value; and a
    GRANT if the table's owner may not read the view.
    rows_view: its view of whole rows (docs/reading.md#a-view-of-whole-rows); null if it has none.
    references: the foreign keys to a unique index, by `roir reference` (docs/unique.md#foreign-keys).
    segments: the segments that readers see; `--segments` alone shows them.
    """

    index: str
    source: str | None
    state: str
    key: tuple[str, ...]
    include: tuple[str, ...]
    where: str
    definition: str
    unique: bool
    nulls_not_distinct: bool
    rows: int | None
    bytes: int
    source_bytes: int
    generation: int | None
    published_at: datetime | None
    age_seconds: float | None
    revert_until: datetime | None
    generations: tuple[Generation, ...]
    verified: Verified | None
    warnings: tuple[str, ...]
    bloat: Bloat | None
    operation: int | None
    apart: bool = False
    shards: tuple[ShardLag, ...] = ()
    unique_since: datetime | None = None
    unique_problem: str | None = None
    announced_by: str | None = None
    strict_problem: str | None = None
    queries: tuple[str, ...] = ()
    rows_view: str | None = None
    references: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: moments in ISO 8601. Without segments, since there may be very many."""
        return {name: value for name, value in plain_fields(self).items() if name != "segments"}


def indexes(database: Database, index: str | None = None, exact: bool = False) -> list[IndexFacts]:
    """Every index that isn't dropped, or the one with that name; by name. Changes nothing and waits for no lock.

    exact: measure the bloat by pgstattuple, if it is installed, which reads all entries; else rows and bloat are
    estimates. If a session locks a table exclusively, its size is that of the last VACUUM or ANALYZE. Raises NotFound,
    InvalidInput (no name, or an ambiguous one), SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        wanted = None if index is None else operations.find_index(connection, parse_name(index, "index")).id
        return read_indexes(connection, wanted, exact)


def read_indexes(connection: Connection, index_id: int | None = None, exact: bool = False) -> list[IndexFacts]:
    """As `indexes`, in the caller's transaction, which has checked the schema; takes the index's id."""
    rows = execute(connection, INDEXES, {"index": index_id}).all()
    ids = [row.id for row in rows]
    if not ids:
        return []
    generations: dict[int, list[Row[Any]]] = defaultdict(list)
    for one in execute(connection, GENERATIONS, {"indexes": ids}):
        generations[one.index_id].append(one)
    stores = _grouped(
        execute(connection, STORES, {"generations": [g.id for of in generations.values() for g in of]}).all()
    )
    leaves = _grouped(execute(connection, LEAVES, {"sources": sorted({row.source_oid for row in rows})}).all())
    sizes = relation_sizes(connection, [oid for of in (stores, leaves) for oids in of.values() for oid in oids])
    verified = verifications(connection, ids)
    behind: dict[int, list[ShardLag]] = defaultdict(list)
    for lag in lags(connection, ids):
        behind[lag.index_id].append(lag)
    published = [g.id for of in generations.values() for g in of if g.status == "active"]
    parts_of = segments_of_many(connection, published, exact)
    asked = {row.id: (row.newest, str(operations.index_name(row))) for row in rows if row.newest is not None}
    faults = warnings_of_many(connection, asked, still_hidden)
    gone = _grouped(execute(connection, GONE, {"indexes": ids}).all())
    referring = references_to(connection, ids)
    unsure = why_not_of_many(connection, _unique(rows, generations))

    def takes(generation: int) -> int:
        return sum(sizes[oid].total for oid in stores.get(generation, ()) if oid in sizes)

    found = []
    for row in rows:
        name = operations.index_name(row)
        source = QualifiedName(row.source_schema, row.source_name) if row.source_name else None
        have = generations[row.id]
        active = next((g for g in have if g.status == "active"), None)
        shown = active or next((g for g in have if g.status == "building"), None)
        parts = () if active is None else parts_of[active.id]
        swollen = None if active is None else bloat_of(parts, active.ghosts)
        warnings = faults.get(row.id, []) + [
            f"index {name}: partition {partition} was dropped or detached without roir. Run: roir sync-partitions "
            f"{argument(source)}"
            for partition in gone.get(row.id, ())
            if source is not None
        ]
        referenced = referring.get(row.id, NO_REFERENCES)
        warnings += referenced.problems
        if shown is None and have:
            warnings.append(operations.KEPT.format(index=name))
        warnings += [
            f"writers of shard {quote(shard)} still announce, and need this server. Once the shard is there: "
            f"roir announce {argument(str(name))} --by off, or roir clean-up"
            for shard in row.still_announcing or ()
        ]
        texts = dict(row.expressions)
        named = row.table_apart or (None if source is None else str(source))
        found.append(
            IndexFacts(
                index=str(name),
                source=named,
                apart=row.table_apart is not None,
                state=_state(active, shown),
                key=listed(row.key_columns, texts),
                include=listed(row.included_columns, texts),
                where=row.condition,
                definition=defined(named, row),
                unique=row.is_unique,
                nulls_not_distinct=row.nulls_not_distinct,
                rows=None if swollen is None else swollen.rows,
                bytes=takes(shown.id) if shown else 0,
                # An index over shards has an empty table here in place of its source.
                source_bytes=0
                if row.table_apart
                else sum(sizes[oid].own for oid in leaves.get(row.source_oid, ()) if oid in sizes),
                generation=active.id if active else None,
                published_at=active.published_at if active else None,
                age_seconds=(row.now - active.published_at).total_seconds() if active else None,
                revert_until=max((g.drop_after for g in have if active and g.status == "retired"), default=None),
                generations=tuple(
                    Generation(g.id, g.status, takes(g.id), g.published_at, g.retired_at, g.drop_after) for g in have
                ),
                verified=verified.get(row.id),
                warnings=tuple(warnings),
                bloat=swollen,
                operation=row.unfinished,
                shards=tuple(behind[row.id]),
                unique_since=active.unique_from if active and active.unique_problem is None else None,
                unique_problem=(active.unique_problem if active else None) or unsure.get(row.id),
                announced_by=row.announced_by,
                strict_problem=NOT_PUBLISHED if row.table_apart and not active else row.strict_problem,
                queries=tuple(row.queries or ()) if active else (),
                rows_view=row.rows_view,
                references=referenced.lines,
                segments=parts,
            )
        )
    return found


def _unique(
    rows: Sequence[Row[Any]], generations: Mapping[int, Sequence[Row[Any]]]
) -> dict[int, tuple[int, int, str | None]]:
    """For each published unique index that isn't over shards: its generation, and its table's oid and name."""
    found: dict[int, tuple[int, int, str | None]] = {}
    for row in rows:
        active = next((g for g in generations[row.id] if g.status == "active"), None)
        if active is not None and row.is_unique and row.table_apart is None:
            table = QualifiedName(row.source_schema, row.source_name).sql if row.source_name else None
            found[row.id] = (active.id, row.source_oid, table)
    return found


def states(database: Database) -> dict[str, tuple[str, int | None]]:
    """The state of each index, and its unfinished operation, by its name."""
    with database.transaction() as connection:
        rows = execute(connection, STATES).all()
    return {str(operations.index_name(row)): (_state(row.published, row.building), row.unfinished) for row in rows}


def _state(published: object, building: object) -> str:
    return "published" if published else "building" if building else "not published"


def _grouped(rows: Sequence[Row[Any]]) -> dict[int, list[Any]]:
    groups: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        key, value = tuple(row)
        groups[key].append(value)
    return groups
