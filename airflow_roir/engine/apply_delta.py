"""Applies the delta of a generation to its base: some blocks in a step of a fold, all that is left at the publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, CursorResult

from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical, visibility
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.entry_state import EntryState

SOURCE = """
SELECT i.source_oid FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(generation)s
"""

# The statements of a step, in the order in which it sends them. {where}: the step's blocks of the delta. Each statement
# repeats it: given only a long list of addresses, the planner would read the whole delta in each step.

# The base before the delta, in the order in which a captured TRUNCATE locks them.
LOCK = "LOCK TABLE {base} IN ROW EXCLUSIVE MODE"
# Locks the rows of the step that no writer holds; a group for each state and pattern of NULLs ({nulls}).
# Addresses stay text and are sent back as text: to parse them here took a quarter of a step.
TAKE = """
SELECT state, nulls, array_agg(tid)::text AS tids
  FROM (SELECT d.ctid AS tid, d.state, {nulls} AS nulls
          FROM {delta} d
         WHERE {where} AND d.state <> '{ghost}'
           FOR UPDATE SKIP LOCKED) AS taken
 GROUP BY state, nulls
"""
# In a unique index: the rows whose key has no entry in the base, or an entry that this step has locked. {same_key}: of
# `b` and `m`. Entries that another session has locked are skipped: to wait for one, with rows of the delta locked,
# could deadlock with a writer or another step that still needs these rows.
WITH_FREE_KEYS = """
WITH mine AS MATERIALIZED (
       SELECT d.ctid AS tid, {d_columns} FROM {delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])),
     present AS MATERIALIZED (
       SELECT m.tid FROM mine m JOIN {base} b ON {same_key}),
     free AS MATERIALIZED (
       SELECT m.tid FROM mine m JOIN {base} b ON {same_key} FOR UPDATE OF b SKIP LOCKED)
SELECT coalesce(array_agg(m.tid), '{{}}')::text
  FROM mine m
 WHERE m.tid NOT IN (SELECT tid FROM present) OR m.tid IN (SELECT tid FROM free)
"""
# Regular rows of hidden partitions go, and their base entries first: another row may have their key. {same}: of `b` and
# `d`. {shown}: from `visibility.shown`. A writer that inserts such a row now waits at its row in the delta.
DROP_HIDDEN_ENTRIES = """
DELETE FROM {base} b
 USING (SELECT * FROM {delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) AND NOT {shown}) d
 WHERE {same}
"""
DROP_HIDDEN = "DELETE FROM {delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) AND NOT {shown}"
# Regular rows replace their entries in the base. {identity}: in the base's order neighbours share pages of its index;
# the delta's own order would scatter them. {on_conflict}: in a unique index the entry that has the key already is stale
# (docs/architecture.md#uniqueness).
UPSERT = """
WITH gone AS (DELETE FROM {delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) RETURNING {d_columns})
INSERT INTO {base} ({columns})
SELECT {columns} FROM gone ORDER BY {identity} {on_conflict}
"""
# Removes each antimatter entry whose entry is in the base, together with it. {same}: a condition per pattern of NULLs,
# since only such a condition can use the base's index.
ANNIHILATE = """
WITH matched AS (DELETE FROM {base} b
                  USING (SELECT *, d.ctid AS tid FROM {delta} d
                          WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])
                          ORDER BY {identity}) d
                  WHERE {same}
                  RETURNING d.tid)
DELETE FROM {delta} d USING matched m WHERE {where} AND d.ctid = m.tid
"""
# Marks the rest of the antimatter as ghosts. A separate statement needs no join with the annihilated rows.
LEAVE_GHOSTS = "UPDATE {delta} d SET state = '{ghost}' WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])"

LEFT = "SELECT count(*) FROM {delta} WHERE state <> '{ghost}'"


@dataclass(frozen=True)
class Folded:
    """Counts delta rows that fold steps upserted into the base, annihilated with a base entry, or marked as ghosts."""

    upserted: int = 0
    annihilated: int = 0
    ghosts: int = 0

    def __add__(self, other: Folded) -> Folded:
        return Folded(self.upserted + other.upserted, self.annihilated + other.annihilated, self.ghosts + other.ghosts)

    @property
    def rows(self) -> int:
        """All delta rows that the steps handled."""
        return self.upserted + self.annihilated + self.ghosts


class Folding:
    """Applies delta rows of a generation to its base."""

    def __init__(self, connection: Connection, generation_id: int, entry: Entry) -> None:
        self.connection = connection
        self.generation_id = generation_id
        self.entry = entry
        self.base = physical.base(generation_id)
        self.delta = physical.delta(generation_id)
        # The parts that all statements have.
        self._parts = {
            "base": self.base,
            "delta": self.delta,
            "ghost": EntryState.GHOST.value,
            "columns": ", ".join(entry.physical()),
            "d_columns": ", ".join(entry.physical(prefix="d.")),
            "identity": ", ".join(entry.physical(entry.identity_positions)),
        }

    def blocks(self, first: int, end: int) -> Folded:
        """Fold the delta's blocks [first, end), in the caller's transaction. It skips rows that a writer holds."""
        return self.fold("d.ctid >= %(first)s::tid AND d.ctid < %(end)s::tid", {"first": first, "end": end})

    def fold(self, where: str = "true", blocks: dict[str, int] | None = None) -> Folded:
        """As `blocks`, over all rows by default."""
        shown = self._shown() if self.entry.enforced else None
        self._send(LOCK, {})
        values = {name: f"({block},0)" for name, block in (blocks or {}).items()}
        pattern = self.entry.null_pattern(self.entry.identity_positions, "d.")
        folded = Folded()
        for row in self._send(TAKE, values, where=where, nulls=pattern).all():
            addresses = {**values, "tids": row.tids}
            if self.entry.enforced and not self._is_apart(row.nulls):
                addresses["tids"] = self._with_free_keys(row.nulls, where, addresses)
            if row.state == EntryState.REGULAR:
                if shown is not None:
                    folded += self._drop_hidden(row.nulls, where, addresses, shown)
                folded += Folded(upserted=self._upsert(row.nulls, where, addresses))
            else:
                folded += Folded(annihilated=self._annihilate(row.nulls, where, addresses))
                folded += Folded(ghosts=self._send(LEAVE_GHOSTS, addresses, where=where).rowcount)
        return folded

    def _send(self, statement: str, values: dict[str, str], **parts: str) -> CursorResult[Any]:
        return execute(self.connection, statement.strip().format(**{**self._parts, **parts}), values)

    def _same(self, nulls: str) -> str:
        """SQL, true if rows `b` and `d` are the same entry, for one pattern of NULLs."""
        return self.entry.equal("b.", "d.", {i: nulls[i] == "1" for i in self.entry.identity_positions})

    def _is_apart(self, nulls: str) -> bool:
        return any(nulls[i] == "1" for i in self.entry.apart_positions)

    def _with_free_keys(self, nulls: str, where: str, values: dict[str, str]) -> str:
        entry = self.entry
        same_key = " AND ".join(
            entry.same_column(i, f"b.c{i + 1}", f"m.c{i + 1}", nulls[i] == "1") for i in entry.key_positions
        )
        return str(self._send(WITH_FREE_KEYS, values, where=where, same_key=same_key).scalar_one())

    def _shown(self) -> str | None:
        """SQL, true if a delta row isn't of a partition that is leaving or joining; None if no partition is."""
        asked = {"generation": self.generation_id}
        if execute(self.connection, visibility.IS_SHOWN, {**asked, "alias": "d"}).scalar() is None:
            return None
        oid = execute(self.connection, SOURCE, asked).scalar_one()
        source = catalog.read_source_by_oid(self.connection, oid, check=False)
        return visibility.shown(self.connection, source, self.generation_id, "d")

    def _drop_hidden(self, nulls: str, where: str, values: dict[str, str], shown: str) -> Folded:
        self._send(DROP_HIDDEN_ENTRIES, values, where=where, shown=shown, same=self._same(nulls))
        return Folded(annihilated=self._send(DROP_HIDDEN, values, where=where, shown=shown).rowcount)

    def _upsert(self, nulls: str, where: str, values: dict[str, str]) -> int:
        into = {"on_conflict": self.entry.on_conflict(by_key=self.entry.enforced)}
        if self._is_apart(nulls):
            default = physical.segment(self.generation_id, physical.DEFAULT_SEGMENT)
            into = {"base": default, "on_conflict": self.entry.on_conflict()}
        return self._send(UPSERT, values, where=where, **into).rowcount

    def _annihilate(self, nulls: str, where: str, values: dict[str, str]) -> int:
        return self._send(ANNIHILATE, values, where=where, same=self._same(nulls)).rowcount


def left_in_delta(connection: Connection, generation_id: int) -> int:
    """The number of delta rows that are still to be folded, without ghosts."""
    left = LEFT.format(delta=physical.delta(generation_id), ghost=EntryState.GHOST.value)
    return int(execute(connection, left).scalar_one())


def wait_little(connection: Connection) -> None:
    """Waits only shortly for locks: an open TRUNCATE holds base and delta, and the worker must look for a pause."""
    execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
