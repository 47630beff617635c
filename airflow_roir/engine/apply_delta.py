"""Applies the delta of a generation to its base: some blocks in a step of a fold, all that is left at the publish."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical, visibility
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.entry_state import EntryState

SOURCE = """
SELECT i.source_oid FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(generation)s
"""


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
        self.default_segment = physical.segment(generation_id, physical.DEFAULT_SEGMENT)
        # In the base's order neighbours share pages of its index; the delta's own order would scatter them.
        self._in_order = f"ORDER BY {', '.join(f'c{i + 1}' for i in entry.identity_positions)}"

    def blocks(self, first: int, end: int) -> Folded:
        """Fold the delta's blocks [first, end), in the caller's transaction. It skips rows that a writer holds."""
        return self.fold("d.ctid >= %(first)s::tid AND d.ctid < %(end)s::tid", {"first": first, "end": end})

    def fold(self, where: str = "true", blocks: dict[str, int] | None = None) -> Folded:
        """As `blocks`, over all rows by default."""
        shown = self._shown() if self.entry.enforced else None
        # The base before the delta, in the order in which a captured TRUNCATE locks them.
        execute(self.connection, f"LOCK TABLE {self.base} IN ROW EXCLUSIVE MODE")
        values = {name: f"({block},0)" for name, block in (blocks or {}).items()}
        # A row per state and pattern of NULLs. Addresses stay text and are sent back so: to parse them here took a
        # quarter of a step.
        taken = execute(
            self.connection,
            "SELECT state, nulls, array_agg(tid)::text AS tids "
            f"FROM (SELECT d.ctid AS tid, d.state, {self._null_pattern()} AS nulls FROM {self.delta} d "
            f"WHERE {where} AND d.state <> '{EntryState.GHOST.value}' FOR UPDATE SKIP LOCKED) AS taken "
            "GROUP BY state, nulls",
            values,
        ).all()
        # The statements repeat the bounds of the blocks: given only a long list of addresses, the planner would read
        # the whole delta in each step.
        folded = Folded()
        for row in taken:
            addresses = {**values, "tids": row.tids}
            if self.entry.enforced and not self._is_apart(row.nulls):
                addresses["tids"] = self._with_free_keys(row.nulls, where, addresses)
            if row.state == EntryState.REGULAR:
                if shown is not None:
                    folded += self._drop_hidden(row.nulls, where, addresses, shown)
                folded += Folded(upserted=self._upsert(row.nulls, where, addresses))
            else:
                folded += Folded(annihilated=self._annihilate(row.nulls, where, addresses))
                folded += Folded(ghosts=self._leave_ghosts(where, addresses))
        return folded

    def _is_apart(self, nulls: str) -> bool:
        return any(nulls[i] == "1" for i in self.entry.apart_positions)

    def _with_free_keys(self, nulls: str, where: str, values: dict[str, str]) -> str:
        """The delta rows of a unique generation whose key has no entry in the base, or one that this step has locked.

        Entries that another session has locked are skipped: to wait for one, with rows of the delta locked, could
        deadlock with a writer or another step that still needs these rows.
        """
        key = " AND ".join(
            self.entry.same_column(i, f"b.c{i + 1}", f"m.c{i + 1}", nulls[i] == "1") for i in self.entry.key_positions
        )
        return str(
            execute(
                self.connection,
                f"WITH mine AS MATERIALIZED (SELECT d.ctid AS tid, {', '.join(self.entry.physical(prefix='d.'))} "
                f"FROM {self.delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])), "
                f"present AS MATERIALIZED (SELECT m.tid FROM mine m JOIN {self.base} b ON {key}), "
                f"free AS MATERIALIZED (SELECT m.tid FROM mine m JOIN {self.base} b ON {key} "
                "FOR UPDATE OF b SKIP LOCKED) "
                "SELECT coalesce(array_agg(m.tid), '{}')::text FROM mine m "
                "WHERE m.tid NOT IN (SELECT tid FROM present) OR m.tid IN (SELECT tid FROM free)",
                values,
            ).scalar_one()
        )

    def _shown(self) -> str | None:
        """SQL, true if a delta row isn't of a partition that is leaving or joining; None if no partition is."""
        asked = {"generation": self.generation_id}
        if execute(self.connection, visibility.IS_SHOWN, {**asked, "alias": "d"}).scalar() is None:
            return None
        oid = execute(self.connection, SOURCE, asked).scalar_one()
        source = catalog.read_source_by_oid(self.connection, oid, check=False)
        return visibility.shown(self.connection, source, self.generation_id, "d")

    def _drop_hidden(self, nulls: str, where: str, values: dict[str, str], shown: str) -> Folded:
        """Deletes regular delta rows of hidden partitions, and their base entries: another row may have their key."""
        held = f"{where} AND d.ctid = ANY (%(tids)s::tid[]) AND NOT {shown}"
        same = self.entry.equal("b.", "d.", {i: nulls[i] == "1" for i in self.entry.identity_positions})
        execute(
            self.connection,
            f"DELETE FROM {self.base} b USING (SELECT * FROM {self.delta} d WHERE {held}) d WHERE {same}",
            values,
        )
        # A writer that inserts such a row now waits at its row in the delta.
        gone = execute(self.connection, f"DELETE FROM {self.delta} d WHERE {held}", values).rowcount
        return Folded(annihilated=gone)

    def _null_pattern(self) -> str:
        """SQL for which identity columns are NULL, as a string of 0s and 1s."""
        return self.entry.null_pattern(self.entry.identity_positions, "d.")

    def _upsert(self, nulls: str, where: str, values: dict[str, str]) -> int:
        columns = ", ".join(self.entry.physical())
        base, upsert = self.base, self.entry.on_conflict(by_key=self.entry.enforced)
        if self._is_apart(nulls):
            base, upsert = self.default_segment, self.entry.on_conflict()
        in_order = f"SELECT {columns} FROM gone {self._in_order}"
        return execute(
            self.connection,
            f"WITH gone AS (DELETE FROM {self.delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) "
            f"RETURNING {', '.join(self.entry.physical(prefix='d.'))}) "
            # In a unique index the entry that has the key already is stale (docs/architecture.md#uniqueness).
            f"INSERT INTO {base} ({columns}) {in_order} {upsert}",
            values,
        ).rowcount

    def _annihilate(self, nulls: str, where: str, values: dict[str, str]) -> int:
        """Removes each antimatter entry whose entry is in the base, together with it; returns how many."""
        # A condition per pattern of NULLs: only such a condition can use the base's index.
        same = self.entry.equal("b.", "d.", {i: nulls[i] == "1" for i in self.entry.identity_positions})
        return execute(
            self.connection,
            f"WITH matched AS (DELETE FROM {self.base} b USING (SELECT *, d.ctid AS tid FROM {self.delta} d "
            f"WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) {self._in_order}) d WHERE {same} RETURNING d.tid) "
            f"DELETE FROM {self.delta} d USING matched m WHERE {where} AND d.ctid = m.tid",
            values,
        ).rowcount

    def _leave_ghosts(self, where: str, values: dict[str, str]) -> int:
        """Marks the rest of the antimatter as ghosts. A separate statement needs no join with the annihilated rows."""
        return execute(
            self.connection,
            f"UPDATE {self.delta} d SET state = '{EntryState.GHOST.value}' "
            f"WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])",
            values,
        ).rowcount


def left_in_delta(connection: Connection, generation_id: int) -> int:
    """The number of delta rows that are still to be folded, without ghosts."""
    return int(
        execute(
            connection,
            f"SELECT count(*) FROM {physical.delta(generation_id)} WHERE state <> '{EntryState.GHOST.value}'",
        ).scalar_one()
    )


def wait_little(connection: Connection) -> None:
    """Waits only shortly for locks: an open TRUNCATE holds base and delta, and the worker must look for a pause."""
    execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
