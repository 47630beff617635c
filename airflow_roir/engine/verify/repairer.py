"""Repairs discrepancies of a verification in such a way that no repair can undo a concurrent write.

If a row lacks its entry, or has a different one, the repair locks the row and looks at it again: the row's next writer
comes after the right entry. If an entry has no row, the repair locks the entry and looks for the row again with a later
snapshot: a writer that brought such a row has committed and is seen, or waits for the lock and writes the entry again.

In a unique index the key of a row that lacks its entry can be taken: by an entry without a row, which is removed in the
same way, or by the entry of another row. Then both rows stay as they are: a repair never deletes a user's row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import entry as entries
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import is_null
from airflow_roir.engine.locks.table_lock import check_name
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.verify import damage, differences, hashes

OUTCOME = """
UPDATE roir.discrepancy SET outcome = %(outcome)s, repaired_at = clock_timestamp()
 WHERE id = ANY (%(ids)s) AND outcome IS NULL
"""
# A discrepancy that lookups called missing or extra is damage.
MISTAKEN = """
UPDATE roir.discrepancy d SET kind = 'damaged', detail = %(said)s FROM {found}
 WHERE d.id = r.id AND d.kind = %(kind)s AND d.outcome IS NULL
"""
# A row whose key another row has.
DUPLICATE = """
UPDATE roir.discrepancy d SET kind = 'duplicate', detail = r.detail, entry_values = coalesce(r.other, d.entry_values)
  FROM {found} WHERE d.id = r.id AND d.kind IN ('missing', 'different', 'duplicate') AND d.outcome IS NULL
"""
MISSING = "SELECT id FROM roir.discrepancy WHERE id = ANY (%(ids)s) AND kind = 'missing' AND outcome IS NULL"
RECORDED = "SELECT id, key, primary_key FROM roir.discrepancy WHERE id = ANY (%(ids)s)"

# The recorded identities, with the names of the entry's first columns: {recorded} of the statements below. An untrusted
# owner, as whom the source is then read, sees no table of ours, and gets them as JSON. {identity}: of `d`.
IDENTITIES = "(SELECT d.id, {identity} FROM roir.discrepancy d WHERE d.id = ANY (%(ids)s)) s"
IDENTITIES_IN_JSON = """
(SELECT d.id, {identity} FROM jsonb_to_recordset(%(recorded)s::jsonb) AS d (id bigint, key jsonb, primary_key jsonb)) s
"""

# The next statements read the {source}, as its owner if the owner isn't trusted. The statements of `_asked`, which roir
# sends itself, have them as {found}. {row}: true if `r` is the row of `s`. {lookup}: from `differences.lookup`.
WITH_ROW = "SELECT s.id FROM {recorded} WHERE EXISTS (SELECT FROM {source} r WHERE {row})"
# {held}: the clause that keeps the rows locked.
LOCK_ROWS = """
SELECT s.id FROM {recorded} CROSS JOIN LATERAL (SELECT FROM {source} r WHERE {row} {held}) l
"""
# {table}: the source or the base; {same}: true if its `x` is the other side of `s`.
WITH_OTHER_SIDE = "SELECT s.id FROM {recorded} JOIN {table} x ON {same}"
# Rows that have their right entry. {of_row}, {of_entry}: all columns, of the row and of `e`.
RIGHT = """
SELECT s.id FROM {recorded} JOIN {source} r ON {row} CROSS JOIN LATERAL ({lookup}) e
 WHERE ROW({of_row})::record *= ROW({of_entry})::record
"""
WITH_ENTRY = "SELECT s.id FROM {recorded} CROSS JOIN LATERAL ({lookup}) e"
PLACES = """
SELECT s.id, e.tableoid AS segment, e.ctid AS tid FROM {recorded} CROSS JOIN LATERAL ({lookup}) e
"""
# Rows that share a key and all lack their entry, without the first one of each key. {columns}: of `o`; {firsts}: the
# first one's identity; {apart}: true if no NULL makes the key differ from all others. By a window: a join over NULLs
# that may be equal would compare each row with each.
SHARING = """
SELECT {columns}
  FROM (SELECT s.id, row_number() OVER w AS nth, {firsts} FROM {recorded} WHERE {apart}
        WINDOW w AS (PARTITION BY {key} ORDER BY s.id)) o
 WHERE o.nth > 1
"""
# Rows whose key an entry of another row has. {lookup}: from `differences.holders`; {has_row}: true if `o` is its row.
TAKEN = """
SELECT s.id, {other} AS other, {detail} AS detail FROM {recorded} CROSS JOIN LATERAL ({lookup}) h
 WHERE EXISTS (SELECT FROM {source} o WHERE {has_row})
"""
PROJECTED = "SELECT {projected} FROM {recorded} JOIN {source} r ON {row}"

IDS = "SELECT id FROM {found}"
NAMED_PLACES = "SELECT id, segment::regclass::text AS segment, tid::text AS tid FROM {found}"
PUT = "INSERT INTO {table} ({columns}) SELECT {columns} FROM {found} WHERE {where} {on_conflict}"
# A read as the owner can't keep rows locked, so the transaction locks the table against writers.
LOCK_SOURCE = "LOCK TABLE {source} IN SHARE ROW EXCLUSIVE MODE"

# Statements on the entries of a {segment} at the addresses {tids}, `{"(0,1)","(0,2)"}`. No values are bound here: the
# conditions may have literals with a per cent sign. {has_row}: true if `r` is the row of `x`; {shown}: by `SHOWN`.
SHOWN = "SELECT coalesce(roir.is_shown({generation}, 'x'), 'true')"
LOCK_ENTRIES = "SELECT x.ctid::text FROM {segment} x WHERE x.ctid = ANY ('{tids}'::tid[]) FOR UPDATE SKIP LOCKED"
REMOVE = """
DELETE FROM {segment} x
 WHERE x.ctid = ANY ('{tids}'::tid[]) AND NOT EXISTS (SELECT FROM {source} r WHERE {has_row}) AND {shown}
RETURNING x.ctid::text
"""
# The same in two statements, for an untrusted owner.
WITHOUT_ROW = """
SELECT x.ctid FROM {segment} x
 WHERE x.ctid = ANY ('{tids}'::tid[]) AND NOT EXISTS (SELECT FROM {source} r WHERE {has_row}) AND {shown}
"""
REMOVE_FOUND = "DELETE FROM {segment} x WHERE x.ctid = ANY ('{tids}'::tid[]) RETURNING x.ctid::text"
UNSEEN = "SELECT x.ctid FROM {segment} x WHERE x.ctid = ANY ('{tids}'::tid[]) AND NOT {shown}"


class Repairer:
    """Repairs discrepancies of one generation, in one session.

    It never waits for a row: it already holds locks on others, and could deadlock with a writer that locks them in
    another order.
    """

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self.generation_id = job.generation_id
        self.base = physical.base(job.generation_id)
        self.entry = entry = job.entry
        self.source = job.source.sql
        self.read = job.source
        # In the caller's transaction, if there is one.
        with connection.begin_nested() if connection.in_transaction() else connection.begin():
            types = list(execute(connection, entries.COLUMN_TYPES, {"base": self.base}).scalars())
        recorded = entries.recorded_identity(entry, "d", types)
        self.identity = ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(recorded))
        # The parts that statements share; `_lock_source` adds the recorded identities.
        self._parts = {"source": self.source, "row": entry.has_row("r", "s.")}

    def _lock_source(self) -> None:
        """Locks the source at the beginning of each transaction: before the entries, in the order of a TRUNCATE.

        Under the lock no partition begins to join, and the source's owner stays the same. Raises LockNotAcquired if
        another table has its name by now.
        """
        catalog.hold(self.connection, self.read)
        self.trusted = owner.is_trusted(self.connection, self.read)
        identities = IDENTITIES if self.trusted else IDENTITIES_IN_JSON
        self._parts["recorded"] = identities.strip().format(identity=self.identity)

    def _whole(self, statement: str, **parts: str) -> str:
        return statement.strip().format(**self._parts, **parts)

    def look_again(self, ids: list[int]) -> None:
        """Looks for these rows and entries again without indexes, before a repair trusts lookups: `damage.mistaken`."""
        if not ids:
            return
        self._lock_source()
        execute(self.connection, damage.WITHOUT_INDEX)
        for kind, table, same, said in damage.mistaken(self.read, self.base, self.entry, self.job.run.index):
            query = self._whole(WITH_OTHER_SIDE, table=table, same=same)
            item, values = self._asked(query, "id bigint", ids)
            execute(self.connection, MISTAKEN.format(found=item), {**values, "kind": kind, "said": said})
        if self.entry.enforced:
            self._find_pairs(ids)
        check_name(self.connection, self.source, self.read.oid)

    def _find_pairs(self, ids: list[int]) -> None:
        """Finds rows that share a key of a unique index and all lack their entry: all but one are duplicates."""
        missing = list(execute(self.connection, MISSING, {"ids": ids}).scalars())
        entry = self.entry
        parts = {
            "firsts": ", ".join(f"first_value(s.c{i + 1}) OVER w AS c{i + 1}" for i in entry.identity_positions),
            "apart": " AND ".join(f"NOT {is_null(f's.c{i + 1}')}" for i in entry.apart_positions) or "true",
            "key": ", ".join(entry.physical(entry.key_positions, prefix="s.")),
        }
        if not self._ids(missing, SHARING, columns="o.id", **parts):
            return
        detail = differences.duplicate_of(entry, "o.", self.job.run.index)
        query = self._whole(SHARING, columns=f"o.id, NULL::jsonb AS other, {detail} AS detail", **parts)
        self._are_duplicates(query, self._with_row(missing))

    def _are_duplicates(self, query: str, ids: Iterable[int]) -> None:
        item, values = self._asked(query, "id bigint, other jsonb, detail text", ids)
        execute(self.connection, DUPLICATE.format(found=item), values)

    def put(self, ids: list[int]) -> list[int]:
        """Gives rows their entries, in one transaction; returns the discrepancies whose rows are gone.

        A row that a writer holds stays as it is, and so does a row whose key another row has.
        """
        with self.connection.begin():
            self._wait_little()
            self._lock_source()
            held = "FOR NO KEY UPDATE SKIP LOCKED"
            if not self.trusted:
                execute(self.connection, self._whole(LOCK_SOURCE))
                held = ""
            locked = self._ids(ids, LOCK_ROWS, held=held)
            gone = self._right(locked)
            wrong = locked - gone
            if self.entry.enforced:
                wrong -= self._make_room(wrong)
                self._write_unique(wrong)
                # A writer may have taken a key in between.
                wrong = self._right(wrong)
            else:
                self._write(wrong, self.base, self.entry.on_conflict())
            self._settle("gone", gone)
            self._settle("repaired", wrong)
            left = set(ids) - locked - self._with_row(ids)
            check_name(self.connection, self.source, self.read.oid)
            return list(left)

    def _right(self, ids: set[int]) -> set[int]:
        """The discrepancies whose rows have their right entry."""
        return self._ids(
            ids,
            RIGHT,
            lookup=differences.lookup(self.entry, self.base, "true AS present"),
            of_row=", ".join(hashes.of_source(self.entry, "r")),
            of_entry=", ".join(self.entry.physical(prefix="e.")),
        )

    def _write(self, ids: set[int], table: str, conflict: str, where: str = "true") -> None:
        """Writes the entries of rows. where: over the new entries, `r.c1` and so on."""
        projected = ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(hashes.of_source(self.entry, "r")))
        query = self._whole(PROJECTED, projected=projected)
        item, values = self._asked(query, owner.row_type(self.connection, self.base), ids)
        columns = ", ".join(self.entry.physical())
        put = PUT.format(table=table, columns=columns, found=item, where=where, on_conflict=conflict)
        execute(self.connection, put, values)

    def _write_unique(self, ids: set[int]) -> None:
        """Writes entries into a unique index, if the key is free or has the row's own entry; never over another's."""
        entry = self.entry
        lookup = differences.lookup(entry, self.base, "true AS present")
        present = self._ids(ids, WITH_ENTRY, lookup=lookup)
        # If two rows have one key, the first one gets the entry.
        self._write(ids - present, self.base, "ON CONFLICT DO NOTHING")
        apart = " OR ".join(is_null(f"r.c{i + 1}") for i in entry.apart_positions) or "false"
        ours = " AND ".join(
            entry.same_column(i, f"b.c{i + 1}", f"EXCLUDED.c{i + 1}", False) for i in entry.rest_positions
        )
        upsert = f"{entry.on_conflict(by_key=True)} WHERE {ours}"
        self._write(present, f"{self.base} AS b", upsert, f"({apart}) IS NOT TRUE")
        if entry.apart_positions:
            rest = physical.segment(self.generation_id, physical.DEFAULT_SEGMENT)
            self._write(present, rest, entry.on_conflict(), apart)

    def _make_room(self, ids: set[int]) -> set[int]:
        """Removes entries without a row that have the key of these rows; returns the rows whose key stays taken.

        These are duplicates, or a writer holds the entry.
        """
        holders = differences.holders(self.entry, self.base, "b.tableoid, b.ctid")
        by_segment = self._places(holders, ids)
        taken: set[int] = set()
        for segment, tids in sorted(by_segment.items()):
            removed: set[int] = set()
            self._remove(segment, tids, removed, set())
            taken |= {one for found in tids.values() for one in found} - removed
        if taken:
            query = self._whole(
                TAKEN,
                lookup=differences.holders(self.entry, self.base, "true AS present"),
                other=differences.texts(self.entry, "h."),
                detail=differences.duplicate_of(self.entry, "h.", self.job.run.index),
                has_row=self.entry.has_row("o", "h."),
            )
            self._are_duplicates(query, taken)
        return taken

    def take_out(self, ids: list[int]) -> list[int]:
        """Removes entries that no row projects to, in one transaction; returns the discrepancies it can't settle."""
        with self.connection.begin():
            self._wait_little()
            self._lock_source()
            by_segment = self._places(differences.lookup(self.entry, self.base, "b.tableoid, b.ctid"), ids)
            removed: set[int] = set()
            hidden: set[int] = set()
            for segment, tids in sorted(by_segment.items()):
                self._remove(segment, tids, removed, hidden)
            # A discrepancy is over if its entry has a row, is gone, or isn't shown to readers.
            gone = self._with_row(ids) | hidden
            gone |= set(ids) - {one for tids in by_segment.values() for found in tids.values() for one in found}
            gone -= removed
            self._settle("repaired", removed)
            self._settle("gone", gone)
            check_name(self.connection, self.source, self.read.oid)
            return list(set(ids) - gone - removed)

    def _places(self, lookup: str, ids: Iterable[int]) -> dict[str, dict[str, set[int]]]:
        """The places of the discrepancies' entries: by segment, then by address."""
        item, values = self._asked(self._whole(PLACES, lookup=lookup), "id bigint, segment oid, tid tid", ids)
        by_segment: dict[str, dict[str, set[int]]] = {}
        for entry in execute(self.connection, NAMED_PLACES.format(found=item), values).all():
            by_segment.setdefault(entry.segment, {}).setdefault(entry.tid, set()).add(entry.id)
        return by_segment

    def _remove(self, segment: str, tids: dict[str, set[int]], removed: set[int], hidden: set[int]) -> None:
        parts = {"segment": segment, "source": self.source, "has_row": self.entry.has_row("r", "x.")}

        def whole(statement: str, at: Iterable[str]) -> str:
            return statement.strip().format(**parts, tids=_array(at))

        locked = list(execute(self.connection, whole(LOCK_ENTRIES, tids)).scalars())
        # The next statements have later snapshots. An entry that was written meanwhile is a version at another address.
        parts["shown"] = execute(self.connection, SHOWN.format(generation=self.generation_id)).scalar_one()
        remove = whole(REMOVE, locked)
        if not self.trusted:
            found = owner.rows(self.connection, self.read, whole(WITHOUT_ROW, locked), "tid tid").scalars()
            remove = whole(REMOVE_FOUND, found)
        removed.update(*(tids[tid] for tid in execute(self.connection, remove).scalars()))
        unseen = owner.rows(self.connection, self.read, whole(UNSEEN, locked), "tid tid").scalars()
        hidden.update(*(tids[tid] for tid in unseen))

    def _with_row(self, ids: list[int]) -> set[int]:
        return self._ids(ids, WITH_ROW)

    def _ids(self, ids: Iterable[int], statement: str, **parts: str) -> set[int]:
        """Those of the discrepancies that the statement returns."""
        item, values = self._asked(self._whole(statement, **parts), "id bigint", ids)
        return set(execute(self.connection, IDS.format(found=item), values).scalars())

    def _asked(self, query: str, columns: str, ids: Iterable[int]) -> tuple[str, dict[str, Any]]:
        """A query over the recorded discrepancies with these ids, to be used in FROM."""
        values: dict[str, Any] = {"ids": list(ids)}
        if not self.trusted:
            values = {
                "recorded": json.dumps([dict(row) for row in execute(self.connection, RECORDED, values).mappings()])
            }
        return owner.relation(self.connection, self.read, query, columns, values)

    def _wait_little(self) -> None:
        execute(self.connection, f"SET LOCAL lock_timeout = {limits_of(self.connection).attempt_ms}")

    def _settle(self, outcome: str, ids: set[int]) -> None:
        if ids:
            execute(self.connection, OUTCOME, {"outcome": outcome, "ids": list(ids)})


def _array(tids: Iterable[str]) -> str:
    return "{" + ",".join(f'"{tid}"' for tid in tids) + "}"
