"""The physical tables of a generation: the base with its segments, and the delta. Named by id, never by user text.

Also its view of the source. The server binds the view to the table and its columns, even if they are renamed, and
refuses to drop or retype a column that the view has.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sqlalchemy import Connection

from airflow_roir.definition import DATA_SCHEMA, SCHEMA, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.cut import Bound, Plan
from airflow_roir.engine.generation.entry import Entry, equality_operators
from airflow_roir.engine.schema import rights
from airflow_roir.engine.source.catalog import columns_of
from airflow_roir.engine.source.source import Source

DEFAULT_SEGMENT = 0
# A publication of all tables includes roir's. Without a replica identity, such a table refuses every UPDATE and DELETE,
# and so a user's write to the source. Keys may be NULL, so no index can be the identity. A partition inherits none.
REPLICA_IDENTITY = "REPLICA IDENTITY FULL"
# Until the segment has its index, autovacuum would only be in the way.
LOADED = "WITH (autovacuum_enabled = false)"
HAS_ROWS = """
SELECT coalesce(bool_or(t.typtype = 'c' OR b.typtype = 'c'), false)
  FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype
 WHERE a.attrelid = to_regclass(%(parent)s) AND a.attname = ANY (%(columns)s)
"""
SEGMENT_OIDS = "SELECT relation::bigint FROM roir.partition_tree(to_regclass(%(base)s)) WHERE leaf ORDER BY relation"


def base(generation_id: int) -> str:
    """The partitioned table of a generation's entries."""
    return f"{DATA_SCHEMA}.g{generation_id}"


def base_key(generation_id: int) -> str:
    """The unique index of the base on `(key, pk)`; valid once every segment's index is attached."""
    return f"{DATA_SCHEMA}.g{generation_id}_key"


def segment(generation_id: int, ordinal: int) -> str:
    """One partition of the base; ordinal 0 is the default one, for NULL keys."""
    return f"{DATA_SCHEMA}.g{generation_id}_s{ordinal:03d}"


# SQL for the name that `segment` gives a row `s` of roir.segment, without the schema.
SEGMENT_NAME = "concat('g', s.generation_id, '_s', lpad(s.ordinal::text, greatest(3, length(s.ordinal::text)), '0'))"


def segment_key(generation_id: int, ordinal: int) -> str:
    """The unique index of one segment."""
    return f"{segment(generation_id, ordinal)}_key"


def pair_key(generation_id: int) -> str:
    """A unique generation's index on `(key, pk)` of its default segment, where keys with NULLs need not be unique."""
    return f"{segment(generation_id, DEFAULT_SEGMENT)}_pair"


def delta(generation_id: int) -> str:
    """The table of entries that DML wrote while the generation was being built."""
    return f"{DATA_SCHEMA}.g{generation_id}_delta"


def source_view(generation_id: int) -> str:
    """The view of the source as entries: c1, c2, … with their types, and `written`, the row's writing transaction."""
    return f"{DATA_SCHEMA}.g{generation_id}_source"


def shown(generation_id: int) -> str:
    """The view of the entries that the index's view reads; it allows only reads (`roir.only_read`)."""
    return f"{DATA_SCHEMA}.g{generation_id}_shown"


def seen(generation_id: int) -> str:
    """SQL for the FROM of a view that shows the entries, with the alias `b`, and lets no role write or lock them.

    A view of two items can't be updated. The planner removes the first item; by it the view depends on the base, and
    readers lock the base before the other.
    """
    return f"(SELECT EXISTS (SELECT FROM {base(generation_id)})) r, {shown(generation_id)} b"


def names(generation_id: int) -> list[str]:
    """The relations that the drop of a generation locks; segments belong to the base."""
    return [base(generation_id), delta(generation_id), source_view(generation_id)]


def create(connection: Connection, generation_id: int, entry: Entry, plan: Plan) -> Entry:
    """Create base, segments and delta; returns the entry with its equality operators filled in.

    The operators are read from the delta's own index, so that the server alone decides a type's operator class.
    """
    columns = entry.definitions()
    table = base(generation_id)
    partition_by = ", ".join(entry.physical(range(entry.partition)))
    execute(connection, f"CREATE TABLE {table} ({columns}) PARTITION BY RANGE ({partition_by})")
    for ordinal, (lower, upper) in enumerate(segment_bounds(plan), start=1):
        create_segment(connection, segment(generation_id, ordinal), table, entry, lower, upper)
    create_default_segment(connection, segment(generation_id, DEFAULT_SEGMENT), table, entry)
    execute(
        connection,
        f"CREATE UNIQUE INDEX {_index_name(base_key(generation_id))} ON ONLY {table} {key_clause(entry)}",
    )
    # The state has a type of its own: a CHECK of a text made each write to the delta a third dearer.
    execute(
        connection,
        f"CREATE TABLE {delta(generation_id)} ({columns}, state {SCHEMA}.entry_state NOT NULL)",
    )
    stores = {"stores": [table, delta(generation_id)]}
    execute(connection, "SELECT roir.leave_statistics_out(%(stores)s::text[]::regclass[]::oid[])", stores)
    identity = ", ".join(entry.physical(entry.identity_positions))
    execute(
        connection,
        f"CREATE UNIQUE INDEX g{generation_id}_delta_key ON {delta(generation_id)} ({identity}) NULLS NOT DISTINCT",
    )
    for name in _stored_in(generation_id, plan):
        execute(connection, f"ALTER TABLE {name} {REPLICA_IDENTITY}")
    execute(connection, f"CREATE VIEW {shown(generation_id)} AS SELECT {', '.join(entry.physical())} FROM {table}")
    rights.take_back(connection, [table, shown(generation_id), *_stored_in(generation_id, plan)])
    execute(connection, "SELECT roir.only_read(%(id)s)", {"id": generation_id})
    return entry.comparing_by(equality_operators(connection, f"{delta(generation_id)}_key"))


def create_segment(
    connection: Connection, name: str, parent: str, entry: Entry, lower: Bound | None, upper: Bound | None
) -> None:
    """Create a partition for a range of keys, half-open, without its index; None is unbounded."""
    values: dict[str, str] = {}
    low = _bound_list(lower, "MINVALUE", entry.partition, "l", values)
    high = _bound_list(upper, "MAXVALUE", entry.partition, "u", values)
    execute(
        connection,
        f"CREATE TABLE {name} PARTITION OF {parent} FOR VALUES FROM ({low}) TO ({high}) {LOADED}",
        values,
    )


def attach_segment(
    connection: Connection, name: str, parent: str, entry: Entry, lower: Bound | None, upper: Bound | None
) -> None:
    """Make a table with its indexes a partition for a range of keys, as `create_segment` does."""
    values: dict[str, str] = {}
    low = _bound_list(lower, "MINVALUE", entry.partition, "l", values)
    high = _bound_list(upper, "MAXVALUE", entry.partition, "u", values)
    execute(connection, f"ALTER TABLE {parent} ATTACH PARTITION {name} FOR VALUES FROM ({low}) TO ({high})", values)


def create_default_segment(connection: Connection, name: str, parent: str, entry: Entry) -> None:
    """Create the partition for NULLs, without its indexes. The others cover all other keys.

    It gets a CHECK of that: without it, each attach of a partition, also its own, would read all of it under a lock.
    """
    cut_by = entry.physical(range(entry.partition))
    execute(connection, f"CREATE TABLE {name} PARTITION OF {parent} DEFAULT {LOADED}")
    # IS NULL has another meaning for a row type.
    if not execute(connection, HAS_ROWS, {"parent": parent, "columns": cut_by}).scalar_one():
        nulls = " OR ".join(f"{column} IS NULL" for column in cut_by)
        execute(connection, f"ALTER TABLE {name} ADD CONSTRAINT roir_nulls CHECK ({nulls})")


def followed(connection: Connection, generation_id: int, entry: Entry) -> Entry:
    """A generation's entry with the present names of its types, collations and operators, read from its own tables.

    The owners of these may rename them, or move them to another schema: `ALTER EXTENSION … SET SCHEMA`.
    """
    names = {"base": base(generation_id), "key": base_key(generation_id)}
    found = execute(connection, "SELECT to_regclass(%(base)s)::oid AS base, to_regclass(%(key)s) AS key", names).one()
    if found.base is None or found.key is None:
        return entry
    stored = columns_of(connection, found.base)
    index = _identity_index(connection, generation_id, entry)
    if index is None:
        return entry
    operators = equality_operators(connection, index)
    columns = []
    for i, column in enumerate(entry.columns):
        now = stored.get(f"c{i + 1}")
        if now is None or len(operators) < entry.identity:
            return entry
        equals = operators[i] if i < entry.identity else column.equals
        columns.append(replace(column, type=now.type, cast=now.cast, collation=now.collation, equals=equals))
    return replace(entry, columns=tuple(columns))


def resorted(connection: Connection, generation_id: int, entry: Entry) -> list[str]:
    """Columns of `(key, pk)` whose collation's library has another version than when the entries were sorted."""
    sorted_by = {f"c{i + 1}": one for i, one in enumerate(entry.columns[: entry.identity]) if one.collation_version}
    table = execute(connection, "SELECT to_regclass(%(base)s)::oid", {"base": base(generation_id)}).scalar()
    if not sorted_by or table is None:
        return []
    now = {name: stored.collation_version for name, stored in columns_of(connection, table).items()}
    return [
        f"{one.collation} of {one.text or f'column {quote(one.source)}'} ({one.collation_version}, now {now[name]})"
        for name, one in sorted_by.items()
        if name in now and now[name] != one.collation_version
    ]


def _identity_index(connection: Connection, generation_id: int, entry: Entry) -> str | None:
    """An index on `(key, pk)`. A unique base has none: then that of the default segment, or before it the delta's."""
    if not entry.enforced:
        return base_key(generation_id)
    names = [pair_key(generation_id), f"{delta(generation_id)}_key"]
    there = (
        "SELECT n FROM unnest(%(names)s) WITH ORDINALITY x (n, i) WHERE to_regclass(n) IS NOT NULL ORDER BY i LIMIT 1"
    )
    found: str | None = execute(connection, there, {"names": names}).scalar()
    return found


def create_source_view(connection: Connection, generation_id: int, source: Source, entry: Entry) -> None:
    """Create a generation's view of its source, if it has none. Locks the source in ACCESS SHARE mode."""
    found = "SELECT to_regclass(%(name)s)"
    if execute(connection, found, {"name": source_view(generation_id)}).scalar() is not None:
        return
    columns = [f"{column.of('s')} AS c{i + 1}" for i, column in enumerate(entry.columns)]
    execute(
        connection,
        f"CREATE VIEW {source_view(generation_id)} AS SELECT {', '.join([*columns, 's.xmin AS written'])} "
        # Rows of inheritance children don't belong to the table.
        f"FROM {'' if source.partitioned else 'ONLY '}{source.sql} s"
        + ("" if entry.condition is None else f" WHERE {entry.satisfied('s')}"),
    )
    rights.take_back(connection, [source_view(generation_id)])


def _stored_in(generation_id: int, plan: Plan) -> list[str]:
    """The tables that have rows: segments and delta."""
    return [*(segment(generation_id, n) for n in range(plan.segments + 1)), delta(generation_id)]


def segment_bounds(plan: Plan) -> list[tuple[Bound | None, Bound | None]]:
    """Half-open bounds of the segments 1, 2, …; None is unbounded."""
    edges: list[Bound | None] = [None, *plan.segment_bounds, None]
    return list(pairwise(edges))


def seal_segment(connection: Connection, generation_id: int, ordinal: int, entry: Entry) -> None:
    """Build one segment's unique index and attach it, in the caller's transaction (docs/architecture.md#phases)."""
    index_segment(connection, segment(generation_id, ordinal), entry, is_default=ordinal == DEFAULT_SEGMENT)
    execute(
        connection,
        f"ALTER INDEX {base_key(generation_id)} ATTACH PARTITION {segment_key(generation_id, ordinal)}",
    )


def index_segment(connection: Connection, name: str, entry: Entry, is_default: bool) -> None:
    """Build a segment's unique index, named after it; the default one of a unique generation gets two."""
    execute(connection, f"CREATE UNIQUE INDEX {_index_name(name)}_key ON {name} {key_clause(entry)}")
    if entry.enforced and is_default:
        identity = ", ".join(entry.physical(entry.identity_positions))
        execute(connection, f"CREATE UNIQUE INDEX {_index_name(name)}_pair ON {name} ({identity}) NULLS NOT DISTINCT")
    execute(connection, f"ALTER TABLE {name} RESET (autovacuum_enabled)")


def remove_touched(connection: Connection, name: str, touched: str, entry: Entry) -> int:
    """Delete touched entries from a segment that has no index yet: a scan by blocks may have copied them twice.

    touched: a table of identities. Only entries that were written meanwhile can be there twice, and each is in it.
    """
    if not execute(connection, f"SELECT EXISTS (SELECT FROM {touched})").scalar_one():
        return 0
    # One pass over the segment, though the planner lacks statistics of these tables.
    execute(connection, "SET LOCAL enable_nestloop = off")
    # Only touched entries of this segment: its bounds are conditions on the same columns.
    bounds = execute(
        connection, "SELECT pg_get_partition_constraintdef(%(name)s::regclass)", {"name": name}
    ).scalar_one()
    # A segment without siblings has no bounds.
    rows = f"(SELECT * FROM {touched} WHERE {bounds or 'true'})"
    return execute(connection, f"DELETE FROM {name} s USING {rows} d WHERE {entry.equal('s.', 'd.')}").rowcount


def hold_segment(connection: Connection, generation_id: int, ordinal: int) -> None:
    """Lock the tables for the seal of a segment, the base before the segment, as a TRUNCATE of the source does."""
    execute(
        connection,
        f"LOCK TABLE ONLY {base(generation_id)} IN ACCESS SHARE MODE; "
        f"LOCK TABLE {segment(generation_id, ordinal)} IN SHARE MODE",
    )


def segments_of(connection: Connection, generation_id: int) -> tuple[int, ...]:
    """The oids of the segments of a generation's base."""
    return tuple(execute(connection, SEGMENT_OIDS, {"base": base(generation_id)}).scalars())


def is_sealed(connection: Connection, generation_id: int) -> bool:
    """True once the base's unique index is valid, which it becomes with the last attached segment."""
    return bool(
        execute(
            connection,
            "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%(name)s)",
            {"name": base_key(generation_id)},
        ).scalar()
    )


def drop(connection: Connection, generation_id: int) -> None:
    """Drop base and delta. The capture function must not know them any more."""
    execute(connection, "DELETE FROM roir.source_partition WHERE generation_id = %(id)s", {"id": generation_id})
    # A verification in slices has left its units.
    execute(
        connection,
        "DELETE FROM roir.verification_unit u USING roir.verification v "
        "WHERE v.id = u.verification_id AND v.generation_id = %(id)s",
        {"id": generation_id},
    )
    execute(connection, "DELETE FROM roir.emptied WHERE generation_id = %(id)s", {"id": generation_id})
    forget_hashes(connection, generation_id)
    execute(connection, f"DROP VIEW IF EXISTS {source_view(generation_id)}")
    if execute(connection, "SELECT to_regclass(%(name)s)", {"name": base(generation_id)}).scalar() is not None:
        # The base before its view, in the order in which readers lock them.
        execute(connection, f"LOCK TABLE ONLY {base(generation_id)} IN ACCESS EXCLUSIVE MODE")
    execute(connection, f"DROP VIEW IF EXISTS {shown(generation_id)}")
    execute(connection, f"DROP TABLE IF EXISTS {base(generation_id)}, {delta(generation_id)}")


def forget_hashes(connection: Connection, generation_id: int) -> None:
    """Delete the hashes that were kept to find duplicates early: once all is copied, the seal finds them all."""
    execute(connection, "DELETE FROM roir.early_hashes WHERE generation_id = %(id)s", {"id": generation_id})


def key_clause(entry: Entry) -> str:
    """SQL for the columns of a unique index of entries, and how it treats NULLs."""
    covered = [i for i in entry.included_positions if entry.columns[i].covered]
    keys = entry.identity_positions
    if entry.enforced:
        keys, covered = entry.key_positions, [*entry.rest_positions, *covered]
    include = f" INCLUDE ({', '.join(entry.physical(covered))})" if covered else ""
    nulls = "DISTINCT" if entry.enforced and entry.unique == "distinct" else "NOT DISTINCT"
    return f"({', '.join(entry.physical(keys))}){include} NULLS {nulls}"


def _index_name(qualified: str) -> str:
    return qualified.split(".", 1)[1]


def _bound_list(bound: Bound | None, unbounded: str, width: int, prefix: str, values: dict[str, str]) -> str:
    """SQL for a bound. If it has fewer columns than the segments are cut by, MINVALUE stands for the others."""
    if bound is None:
        return ", ".join([unbounded] * width)
    for i, value in enumerate(bound):
        values[f"{prefix}{i}"] = value
    return ", ".join([*(f"%({prefix}{i})s" for i in range(len(bound))), *["MINVALUE"] * (width - len(bound))])
