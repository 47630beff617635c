"""Writes the rows of a new partition into an enforced unique index, and lists those whose keys collide.

It does the work of a write (docs/architecture.md#uniqueness) for many rows at a time: an entry that has a key of theirs
keeps it if its row still has the key, in the source or in the same table; else the entry is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.capture.target import DIRECT
from airflow_roir.engine.database import as_it_is, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.locks.table_lock import lock_table
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.unique import duplicates, shared_keys
from airflow_roir.errors import LockNotAcquired

# By the oids of the tables, so that their names don't matter.
HAS_ROW = """
SELECT roir.has_row(g.entry, %(source)s::oid, 'x') || ' OR ' || roir.has_row(g.entry, %(relation)s::oid, 'x')
  FROM roir.generation g WHERE g.id = %(generation)s
"""
OTHERS_JOINING = """
SELECT p.name, roir.entry_condition(g.entry, p.condition, 'x') AS within
  FROM roir.source_partition p JOIN roir.generation g ON g.id = p.generation_id
 WHERE p.generation_id = %(generation)s AND p.status = 'joining' AND p.relation <> %(relation)s
   AND NOT EXISTS (SELECT FROM pg_inherits h WHERE h.inhrelid = p.relation::oid)
"""
WRITE = """
INSERT INTO roir.duplicate (operation_id, shared_key, key, primary_key, partition, phase)
SELECT %(operation)s, r.shared_key, r.key, r.primary_key, CASE WHEN r.own THEN %(name)s END, 'attach' FROM {found}
    ON CONFLICT (operation_id, key, primary_key) WHERE healed_at IS NULL DO NOTHING
"""
MADE_BY = "SELECT min(id) FROM roir.operation WHERE generation_id = %(generation)s AND kind IN ('create', 'rebuild')"
FORGET = """
UPDATE roir.duplicate d SET healed_at = clock_timestamp() FROM roir.operation o
 WHERE o.id = d.operation_id AND o.generation_id = %(generation)s AND d.phase = 'attach' AND d.healed_at IS NULL
"""

RECORDED = """
WITH found AS (
  SELECT d.* FROM roir.duplicate d JOIN roir.operation o ON o.id = d.operation_id
   WHERE o.generation_id = %(generation)s AND d.phase = 'attach' AND d.healed_at IS NULL)
SELECT (SELECT string_agg(coalesce(k, 'null'), ', ') FROM jsonb_array_elements_text(f.shared_key) k) AS key,
       string_agg(concat('(', (SELECT string_agg(p, ', ') FROM jsonb_array_elements_text(f.primary_key) p), ')',
                         ' of ' || f.partition), ' and ' ORDER BY f.id) AS members,
       count(*) OVER () AS groups, (SELECT count(*) FROM found) AS rows
  FROM found f GROUP BY f.shared_key ORDER BY min(f.id) LIMIT 3
"""


# The statements of `put`. Each begins with {given}: the rows as entries, `n`. {of}: those of one pattern of NULLs,
# since only a condition for one pattern uses an index. {same_key}, {same_rest}: of an entry `x` and `n`.
GIVEN = "WITH n ({columns}) AS MATERIALIZED (SELECT {projected} FROM {locked})"
OF_PATTERN = "(SELECT * FROM n WHERE {nulls} = '{pattern}') n"
REMOVE_FROM_DELTA = "{given} DELETE FROM {delta} d USING n WHERE {same}"
PATTERNS = "{given} SELECT {nulls} AS nulls, count(*) AS rows FROM n GROUP BY 1"
# A NULL makes their keys differ from all others.
PUT_APART = """
{given}
INSERT INTO {rest} ({columns}) SELECT {columns} FROM n WHERE {nulls} = '{pattern}' {on_conflict}
"""
OTHERS_IN_DELTA = """
{given}
SELECT x.ctid::text AS spot FROM {of} JOIN {delta} x ON {same_key} AND NOT ({same_rest}) FOR UPDATE OF x
"""
PUT = """
{given}
INSERT INTO {base} ({columns}) SELECT {columns} FROM {of} ORDER BY {key} ON CONFLICT ({key}) DO NOTHING
"""
# The row's own entry, from an earlier copy. The UPDATE locks it, as an upsert does.
PUT_AGAIN = """
{given}
UPDATE {base} x SET {assigned} FROM {of} WHERE {same_key} AND {same_rest} AND x.xmin <> pg_current_xact_id()::xid
"""
OTHERS_IN_BASE = """
{given}
SELECT x.ctid::text AS spot, x.tableoid::regclass::text AS place
  FROM {of} JOIN {base} x ON {same_key} AND NOT ({same_rest}) FOR UPDATE OF x
"""
ARE_LEFT = """
{given}
SELECT EXISTS (SELECT FROM {of} WHERE NOT EXISTS (SELECT FROM {base} x WHERE {same_key} AND {same_rest}))
"""
# Entries at the {spots} of a store. {has_row}: by `HAS_ROW`; {within}: by `OTHERS_JOINING`.
IS_HELD = """
SELECT EXISTS (SELECT FROM {place} x WHERE x.ctid = ANY (ARRAY[{spots}]::tid[]) AND ({has_row}))
"""
IS_HELD_IN_DELTA = """
SELECT EXISTS (SELECT FROM {place} x WHERE x.ctid = ANY (ARRAY[{spots}]::tid[]) AND x.{regular} AND ({has_row}))
"""
IS_JOINING = "SELECT EXISTS (SELECT FROM {place} x WHERE x.ctid = ANY (ARRAY[{spots}]::tid[]) AND {within})"
REMOVE = "DELETE FROM {place} x WHERE x.ctid = ANY (ARRAY[{spots}]::tid[])"

# The statements of `record`, over the new partition's rows, `n`. {identity}: all columns of (key, primary key).
NULLS_OF_ROWS = """
WITH n ({identity}) AS MATERIALIZED (SELECT {projected} FROM {name} s WHERE {satisfied})
SELECT DISTINCT {nulls} FROM n
"""
# {held}: for each store the entries that have a key of `m` and a row; {same_key}: of `x` and `m`.
HELD = "SELECT {x_identity}, false FROM m JOIN (SELECT {identity} FROM {base} x) x ON {same_key} WHERE ({has_row})"
HELD_IN_DELTA = """
SELECT {x_identity}, false FROM m JOIN (SELECT {identity} FROM {delta} x WHERE x.{regular}) x ON {same_key}
 WHERE ({has_row})
"""
SHARING = """
WITH n ({identity}) AS MATERIALIZED (SELECT {projected} FROM {name} s WHERE {satisfied}),
     m AS MATERIALIZED (SELECT * FROM n WHERE {nulls} = '{pattern}'),
     live AS (
       SELECT {identity}, bool_or(own) AS own
         FROM (SELECT {identity}, true FROM m UNION ALL {held}) u ({identity}, own) GROUP BY {identity}),
     l AS (SELECT *, count(*) OVER (PARTITION BY {key}) AS sharing FROM live)
SELECT min({texts}::text) OVER (PARTITION BY {l_key})::jsonb AS shared_key, {texts} AS key,
       {primary_key} AS primary_key, l.own
  FROM l WHERE l.sharing > 1
"""


class Collision(Exception):
    """Another row has a row's key: nothing of this batch can be written. `record` lists all such rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of a partition as entries. projected: the entry's columns; locked: the SQL after FROM, which locks them."""

    relation: int
    name: str
    projected: str
    locked: str
    values: Mapping[str, Any]


def put(connection: Connection, source: Source, generation_id: int, entry: Entry, mode: str, rows: Rows) -> int:
    """Writes the entries of rows, in direct or active mode; returns how many. Raises Collision, LockNotAcquired."""
    return _Put(connection, source, generation_id, entry, mode, rows).all()


class _Put:
    def __init__(
        self, connection: Connection, source: Source, generation_id: int, entry: Entry, mode: str, rows: Rows
    ) -> None:
        self.connection = connection
        self.source = source
        self.generation_id = generation_id
        self.entry = entry
        self.direct = mode == DIRECT
        self.rows = rows
        self.base, self.delta = physical.base(generation_id), physical.delta(generation_id)
        columns = ", ".join(entry.physical())
        self._parts = {
            "given": GIVEN.format(columns=columns, projected=rows.projected, locked=rows.locked),
            "base": self.base,
            "delta": self.delta,
            "columns": columns,
            "nulls": _pattern(entry),
        }

    def all(self) -> int:
        """Writes all entries, pattern of NULLs by pattern; returns how many."""
        if self.direct:
            self._send(REMOVE_FROM_DELTA, same=self.entry.equal("d.", "n."))
        patterns = self._send(PATTERNS).all()
        for pattern in patterns:
            if any(pattern.nulls[i] == "1" for i in self.entry.apart_positions):
                rest = physical.segment(self.generation_id, physical.DEFAULT_SEGMENT)
                self._send(PUT_APART, rest=rest, pattern=pattern.nulls, on_conflict=self.entry.on_conflict())
            else:
                self._put(pattern.nulls, pattern.rows)
        return sum(pattern.rows for pattern in patterns)

    def _put(self, pattern: str, rows: int) -> None:
        entry = self.entry
        of = OF_PATTERN.format(nulls=_pattern(entry), pattern=pattern)
        these = {"of": of, "same_key": _same_key(entry, pattern, "n."), "same_rest": _same_rest(entry)}
        key = ", ".join(entry.physical(entry.key_positions))
        assigned = ", ".join(f"{name} = n.{name}" for name in entry.physical())
        # The delta before the base: the fold makes entries of the base from it.
        if self.direct:
            self._make_room(self.delta, OTHERS_IN_DELTA, these)
        while True:
            if self._send(PUT, of=of, key=key).rowcount == rows:
                return
            self._send(PUT_AGAIN, **these, assigned=assigned)
            if self._make_room(None, OTHERS_IN_BASE, these):
                continue
            # Another writer's entry may have gone between the statements.
            if not self._send(ARE_LEFT, **these).scalar_one():
                return

    def _make_room(self, store: str | None, locking: str, these: Mapping[str, str]) -> bool:
        """Locks and deletes entries with a key that no row has now; returns True if there were any.

        A writer that brings a row with that key later waits for us, and then meets our entry. Raises Collision,
        LockNotAcquired.
        """
        found: dict[str, list[str]] = {}
        for row in self._send(locking, **these):
            found.setdefault(store or row.place, []).append(row.spot)
        asked = {"source": self.source.oid, "relation": self.rows.relation, "generation": self.generation_id}
        if found:
            catalog.hold(self.connection, self.source)
            has_row = execute(self.connection, HAS_ROW, asked).scalar_one()
            joining = execute(self.connection, OTHERS_JOINING, asked).all()
        for place, spots in found.items():
            at = {"place": place, "spots": ", ".join(f"'{spot}'" for spot in spots)}
            held = IS_HELD_IN_DELTA if store else IS_HELD
            query = held.format(**at, has_row=has_row, regular=shared_keys.REGULAR)
            reads = [*_names(self.connection, self.source), self.rows.name]
            if owner.rows(self.connection, self.source, query, "held boolean", reads=reads).scalar_one():
                raise Collision
            for other in joining if not store else ():
                if execute(self.connection, IS_JOINING.format(**at, within=other.within)).scalar():
                    raise LockNotAcquired(
                        f"rows of {self.rows.name} share keys with {other.name}, which is being attached, too. "
                        "Try again when that is done"
                    )
            execute(self.connection, REMOVE.format(**at))
        return bool(found)

    def _send(self, statement: str, **parts: str) -> Any:
        return execute(self.connection, statement.strip().format(**self._parts, **parts), self.rows.values)


def record(
    connection: Connection, source: Source, generation_id: int, entry: Entry, mode: str, relation: int, name: str
) -> None:
    """Writes down all groups of a new partition's rows that share a key with each other or with the source's rows."""
    catalog.hold(connection, source)
    lock_table(connection, name, relation, "ACCESS SHARE", only=True)
    asked = {"source": source.oid, "relation": relation, "generation": generation_id}
    has_row = execute(connection, HAS_ROW, asked).scalar_one()
    operation = execute(connection, MADE_BY, asked).scalar_one()
    reads = [*_names(connection, source), name]
    parts = {
        "identity": ", ".join(entry.physical(entry.identity_positions)),
        "x_identity": ", ".join(entry.physical(entry.identity_positions, prefix="x.")),
        "key": ", ".join(entry.physical(entry.key_positions)),
        "l_key": ", ".join(entry.physical(entry.key_positions, prefix="l.")),
        "projected": ", ".join(entry.columns[i].of("s") for i in entry.identity_positions),
        "name": name,
        "satisfied": entry.satisfied("s"),
        "nulls": _pattern(entry),
        "base": physical.base(generation_id),
        "delta": physical.delta(generation_id),
        "regular": shared_keys.REGULAR,
        "has_row": has_row,
        "texts": shared_keys.texts(entry, entry.key_positions, "l."),
        "primary_key": shared_keys.primary_key(source, entry, "l."),
    }
    patterns = owner.rows(connection, source, NULLS_OF_ROWS.format(**parts), "nulls text", reads=reads).scalars()
    stores = [HELD, HELD_IN_DELTA] if mode == DIRECT else [HELD]
    for pattern in patterns.all():
        if any(pattern[i] == "1" for i in entry.apart_positions):
            continue
        same_key = _same_key(entry, pattern, "m.")
        held = " UNION ALL ".join(store.strip().format(**parts, same_key=same_key) for store in stores)
        query = SHARING.format(**parts, pattern=pattern, held=held)
        found, values = owner.relation(
            connection, source, query, "shared_key jsonb, key jsonb, primary_key jsonb, own boolean", reads=reads
        )
        # For a trusted owner the query has no values to bind.
        found = found if values else as_it_is(found)
        execute(connection, WRITE.format(found=found), {**values, "operation": operation, "name": name})
    duplicates.locate(connection, source, operation)


def forget(connection: Connection, generation_id: int) -> None:
    """Marks the recorded duplicates of an attempt that is over as healed."""
    execute(connection, FORGET, {"generation": generation_id})


def recorded(connection: Connection, generation_id: int) -> tuple[int, int, list[str]]:
    """The numbers of keys and of rows that `record` has written down, and the first keys with their rows, in words."""
    rows = execute(connection, RECORDED, {"generation": generation_id}).all()
    if not rows:
        return 0, 0, []
    return rows[0].groups, rows[0].rows, [f"({row.key}): rows {row.members}" for row in rows]


def _names(connection: Connection, source: Source) -> list[str]:
    names = "SELECT r::regclass::text FROM unnest(%(oids)s::oid[]) r"
    return list(execute(connection, names, {"oids": [source.oid, *source.relations]}).scalars())


def _pattern(entry: Entry) -> str:
    """SQL for which columns of the key are NULL, as a string of 0s and 1s."""
    return entry.null_pattern(entry.key_positions, "n.")


def _same_key(entry: Entry, pattern: Sequence[str], prefix: str) -> str:
    """SQL, true if `x` has the key of the row with this prefix, `alias.`."""
    return " AND ".join(
        entry.same_column(i, f"x.c{i + 1}", f"{prefix}c{i + 1}", pattern[i] == "1") for i in entry.key_positions
    )


def _same_rest(entry: Entry) -> str:
    """SQL, true if `x` has the primary key of `n`, as far as the key doesn't have it."""
    return " AND ".join(f"x.c{i + 1} {entry.columns[i].equals} n.c{i + 1}" for i in entry.rest_positions)
