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
  FROM found f GROUP BY f.shared_key ORDER BY min(f.id) LIMIT %(first)s
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
        self.columns = ", ".join(entry.physical())
        self.given = f"WITH n ({self.columns}) AS MATERIALIZED (SELECT {rows.projected} FROM {rows.locked})"

    def all(self) -> int:
        """Writes all entries, by patterns of NULLs, since only a condition for one pattern uses an index."""
        if self.direct:
            own = self.entry.equal("d.", "n.")
            self._execute(f"DELETE FROM {self.delta} d USING n WHERE {own}")
        patterns = self._execute(f"SELECT {_pattern(self.entry)} AS nulls, count(*) AS rows FROM n GROUP BY 1").all()
        for pattern in patterns:
            if any(pattern.nulls[i] == "1" for i in self.entry.apart_positions):
                rest = physical.segment(self.generation_id, physical.DEFAULT_SEGMENT)
                self._execute(
                    f"INSERT INTO {rest} ({self.columns}) SELECT {self.columns} FROM n "
                    f"WHERE {_pattern(self.entry)} = '{pattern.nulls}' {self.entry.on_conflict()}"
                )
            else:
                self._put(pattern.nulls, pattern.rows)
        return sum(pattern.rows for pattern in patterns)

    def _put(self, pattern: str, rows: int) -> None:
        entry = self.entry
        of = f"(SELECT * FROM n WHERE {_pattern(entry)} = '{pattern}') n"
        key = _same_key(entry, pattern, "x.")
        assigned = ", ".join(f"{name} = n.{name}" for name in entry.physical())
        arbiter = ", ".join(entry.physical(entry.key_positions))
        # The delta before the base: the fold makes entries of the base from it.
        if self.direct:
            self._make_room(
                self.delta,
                f"SELECT x.ctid::text AS spot FROM {of} JOIN {self.delta} x "
                f"ON {key} AND NOT ({_same_rest(entry, 'x.')}) FOR UPDATE OF x",
            )
        while True:
            put = f"INSERT INTO {self.base} ({self.columns}) SELECT {self.columns} FROM {of} ORDER BY {arbiter}"
            if self._execute(f"{put} ON CONFLICT ({arbiter}) DO NOTHING").rowcount == rows:
                return
            # The row's own entry, from an earlier copy. The UPDATE locks it, as an upsert does.
            self._execute(
                f"UPDATE {self.base} x SET {assigned} FROM {of} WHERE {key} AND {_same_rest(entry, 'x.')} "
                "AND x.xmin <> pg_current_xact_id()::xid"
            )
            others = (
                f"SELECT x.ctid::text AS spot, x.tableoid::regclass::text AS place FROM {of} JOIN {self.base} x "
                f"ON {key} AND NOT ({_same_rest(entry, 'x.')}) FOR UPDATE OF x"
            )
            if self._make_room(None, others):
                continue
            # Another writer's entry may have gone between the statements.
            own = f"SELECT FROM {self.base} x WHERE {key} AND {_same_rest(entry, 'x.')}"
            left = f"SELECT EXISTS (SELECT FROM {of} WHERE NOT EXISTS ({own}))"
            if not self._execute(left).scalar_one():
                return

    def _make_room(self, store: str | None, locking: str) -> bool:
        """Locks and deletes entries with a key that no row has now; returns True if there were any.

        A writer that brings a row with that key later waits for us, and then meets our entry. Raises Collision,
        LockNotAcquired.
        """
        found: dict[str, list[str]] = {}
        for row in self._execute(locking):
            found.setdefault(store or row.place, []).append(row.spot)
        asked = {"source": self.source.oid, "relation": self.rows.relation, "generation": self.generation_id}
        if found:
            catalog.hold(self.connection, self.source)
            has_row = execute(self.connection, HAS_ROW, asked).scalar_one()
            joining = execute(self.connection, OTHERS_JOINING, asked).all()
        for place, spots in found.items():
            listed = ", ".join(f"'{spot}'" for spot in spots)
            these = f"FROM {place} x WHERE x.ctid = ANY (ARRAY[{listed}]::tid[])"
            regular = f" AND x.{shared_keys.REGULAR}" if store else ""
            query = f"SELECT EXISTS (SELECT {these}{regular} AND ({has_row}))"
            reads = [*_names(self.connection, self.source), self.rows.name]
            if owner.rows(self.connection, self.source, query, "held boolean", reads=reads).scalar_one():
                raise Collision
            for other in joining:
                if (
                    not store
                    and execute(self.connection, f"SELECT EXISTS (SELECT {these} AND {other.within})").scalar()
                ):
                    raise LockNotAcquired(
                        f"rows of {self.rows.name} share keys with {other.name}, which is being attached, too. "
                        "Try again when that is done"
                    )
            execute(self.connection, f"DELETE {these}")
        return bool(found)

    def _execute(self, statement: str) -> Any:
        return execute(self.connection, f"{self.given} {statement}", self.rows.values)


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
    every = ", ".join(entry.physical(entry.identity_positions))
    projected = ", ".join(entry.columns[i].of("s") for i in entry.identity_positions)
    given = f"n ({every}) AS MATERIALIZED (SELECT {projected} FROM {name} s)"
    patterns = owner.rows(
        connection, source, f"WITH {given} SELECT DISTINCT {_pattern(entry)} FROM n", "nulls text", reads=reads
    ).scalars()
    stores = [f"SELECT {every} FROM {physical.base(generation_id)} x"]
    if mode == DIRECT:
        stores.append(f"SELECT {every} FROM {physical.delta(generation_id)} x WHERE x.{shared_keys.REGULAR}")
    key = ", ".join(entry.physical(entry.key_positions))
    for pattern in patterns.all():
        if any(pattern[i] == "1" for i in entry.apart_positions):
            continue
        same = _same_key(entry, pattern, "x.")
        of = ", ".join(entry.physical(entry.identity_positions, prefix="x."))
        held = " UNION ALL ".join(
            f"SELECT {of}, false FROM m JOIN ({store}) x ON {same.replace('n.', 'm.')} WHERE ({has_row})"
            for store in stores
        )
        texts = shared_keys.texts(entry, entry.key_positions, "l.")
        of_l = ", ".join(entry.physical(entry.key_positions, prefix="l."))
        query = (
            f"WITH {given}, m AS MATERIALIZED (SELECT * FROM n WHERE {_pattern(entry)} = '{pattern}'), "
            f"live AS (SELECT {every}, bool_or(own) AS own FROM (SELECT {every}, true FROM m UNION ALL {held}) "
            f"u ({every}, own) GROUP BY {every}), "
            f"l AS (SELECT *, count(*) OVER (PARTITION BY {key}) AS sharing FROM live) "
            f"SELECT min({texts}::text) OVER (PARTITION BY {of_l})::jsonb AS shared_key, {texts} AS key, "
            f"{shared_keys.primary_key(source, entry, 'l.')} AS primary_key, l.own FROM l WHERE l.sharing > 1"
        )
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


def recorded(connection: Connection, generation_id: int, first: int) -> tuple[int, int, list[str]]:
    """The numbers of keys and of rows that `record` has written down, and the first keys with their rows, in words."""
    rows = execute(connection, RECORDED, {"generation": generation_id, "first": first}).all()
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
    return " AND ".join(
        entry.same_column(i, f"{prefix}c{i + 1}", f"n.c{i + 1}", pattern[i] == "1") for i in entry.key_positions
    )


def _same_rest(entry: Entry, prefix: str) -> str:
    return " AND ".join(f"{prefix}c{i + 1} {entry.columns[i].equals} n.c{i + 1}" for i in entry.rest_positions)
