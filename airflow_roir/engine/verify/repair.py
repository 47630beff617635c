"""Repairs the discrepancies of a verification in such a way that no repair can undo a concurrent write.

If a row lacks its entry, or has a different one, the repair locks the row and looks at it again: the row's next writer
comes after the right entry. If an entry has no row, the repair locks the entry and looks for the row again with a later
snapshot: a writer that brought such a row has committed and is seen, or waits for the lock and writes the entry again.

In a unique index the key of a row that lacks its entry can be taken: by an entry without a row, which is removed in the
same way, or by the entry of another row. Then both rows stay as they are: a repair never deletes a user's row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import entry as entries
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import is_null
from airflow_roir.engine.locks.table_lock import check_name
from airflow_roir.engine.retry.trouble import Trouble, trouble_of
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog, owner
from airflow_roir.engine.verify import damage, differences, hashes

# With more discrepancies in a unit one transaction repairs a chunk of them: a transaction takes some ten milliseconds.
MANY = 100
CHUNK = 1_000
# How often a discrepancy whose row or entry a writer holds is tried.
TRIES = 20

UNMENDED = """
SELECT id, kind FROM roir.discrepancy
 WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND outcome IS NULL
   AND kind NOT IN ('corrupt', 'damaged') AND (kind <> 'duplicate' OR %(first)s)
 ORDER BY id
"""
OUTCOME = """
UPDATE roir.discrepancy SET outcome = %(outcome)s, mended_at = clock_timestamp()
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


class Mender:
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
        self.row = entry.has_row("r", "s.")

    def _lock_source(self) -> None:
        """Locks the source at the beginning of each transaction: before the entries, in the order of a TRUNCATE.

        Under the lock no partition begins to join, and the source's owner stays the same. Raises LockNotAcquired if
        another table has its name by now.
        """
        catalog.hold(self.connection, self.read)
        self.trusted = owner.is_trusted(self.connection, self.read)
        # The recorded identities, with the names of the entry's first columns. An untrusted owner, as whom the source
        # is then read, sees no table of ours, and gets them as JSON.
        listed = "jsonb_to_recordset(%(recorded)s::jsonb) AS d (id bigint, key jsonb, primary_key jsonb)"
        found = "roir.discrepancy d WHERE d.id = ANY (%(ids)s)" if self.trusted else listed
        self.recorded = f"(SELECT d.id, {self.identity} FROM {found}) s"

    def look_again(self, ids: list[int]) -> None:
        """Looks for these rows and entries again without indexes, before a repair trusts lookups: `damage.mistaken`."""
        if not ids:
            return
        self._lock_source()
        execute(self.connection, damage.WITHOUT_INDEX)
        for kind, query, said in damage.mistaken(self.recorded, self.read, self.base, self.entry, self.job.run.index):
            item, values = self._asked(query, "id bigint", ids)
            execute(self.connection, MISTAKEN.format(found=item), {**values, "kind": kind, "said": said})
        if self.entry.enforced:
            self._find_pairs(ids)
        check_name(self.connection, self.source, self.read.oid)

    def _find_pairs(self, ids: list[int]) -> None:
        """Finds rows that share a key of a unique index and all lack their entry: all but one are duplicates."""
        missing = list(execute(self.connection, MISSING, {"ids": ids}).scalars())
        entry = self.entry
        firsts = ", ".join(f"first_value(s.c{i + 1}) OVER w AS c{i + 1}" for i in entry.identity_positions)
        apart = " AND ".join(f"NOT {is_null(f's.c{i + 1}')}" for i in entry.apart_positions) or "true"
        key = ", ".join(entry.physical(entry.key_positions, prefix="s."))
        # By a window: a join over NULLs that may be equal would compare each row with each.
        pairs = (
            f"FROM (SELECT s.id, row_number() OVER w AS nth, {firsts} FROM {self.recorded} WHERE {apart} "
            f"WINDOW w AS (PARTITION BY {key} ORDER BY s.id)) o "
            "WHERE o.nth > 1"
        )
        if not self._ids(f"SELECT o.id {pairs}", missing):
            return
        detail = differences.duplicate_of(entry, "o.", self.job.run.index)
        self._are_duplicates(f"SELECT o.id, NULL::jsonb AS other, {detail} AS detail {pairs}", self._with_row(missing))

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
                # A read as the owner can't keep rows locked, so this transaction locks the table against writers.
                execute(self.connection, f"LOCK TABLE {self.source} IN SHARE ROW EXCLUSIVE MODE")
                held = ""
            rows = (
                f"SELECT s.id FROM {self.recorded} CROSS JOIN LATERAL (SELECT FROM {self.source} r WHERE {self.row} "
                f"{held}) l"
            )
            locked = self._ids(rows, ids)
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
            self._settle("mended", wrong)
            left = set(ids) - locked - self._with_row(ids)
            check_name(self.connection, self.source, self.read.oid)
            return list(left)

    def _right(self, ids: set[int]) -> set[int]:
        """The discrepancies whose rows have their right entry."""
        entry = differences.lookup(self.entry, self.base, "true AS present")
        read = ", ".join(hashes.of_source(self.entry, "r"))
        image = f"ROW({', '.join(self.entry.physical(prefix='e.'))})::record"
        joined = f"FROM {self.recorded} JOIN {self.source} r ON {self.row}"
        return self._ids(
            f"SELECT s.id {joined} CROSS JOIN LATERAL ({entry}) e WHERE ROW({read})::record *= {image}", ids
        )

    def _write(self, ids: set[int], table: str, conflict: str, where: str = "true") -> None:
        """Writes the entries of rows. where: over the new entries, `r.c1` and so on."""
        columns = ", ".join(self.entry.physical())
        read = ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(hashes.of_source(self.entry, "r")))
        query = f"SELECT {read} FROM {self.recorded} JOIN {self.source} r ON {self.row}"
        item, values = self._asked(query, owner.row_type(self.connection, self.base), ids)
        chosen = f"SELECT {columns} FROM {item} WHERE {where}"
        execute(self.connection, f"INSERT INTO {table} ({columns}) {chosen} {conflict}", values)

    def _write_unique(self, ids: set[int]) -> None:
        """Writes entries into a unique index, if the key is free or has the row's own entry; never over another's."""
        entry = self.entry
        lookup = differences.lookup(entry, self.base, "true AS present")
        present = self._ids(f"SELECT s.id FROM {self.recorded} CROSS JOIN LATERAL ({lookup}) e", ids)
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
        there = f"EXISTS (SELECT FROM {self.source} o WHERE {self.entry.has_row('o', 'h.')})"
        columns = differences.texts(self.entry, "h.")
        detail = differences.duplicate_of(self.entry, "h.", self.job.run.index)
        query = (
            f"SELECT s.id, {columns} AS other, {detail} AS detail FROM {self.recorded} "
            f"CROSS JOIN LATERAL ({differences.holders(self.entry, self.base, 'true AS present')}) h WHERE {there}"
        )
        if taken:
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
            self._settle("mended", removed)
            self._settle("gone", gone)
            check_name(self.connection, self.source, self.read.oid)
            return list(set(ids) - gone - removed)

    def _places(self, entries: str, ids: Iterable[int]) -> dict[str, dict[str, set[int]]]:
        """The places of the discrepancies' entries: by segment, then by address."""
        place = "e.tableoid AS segment, e.ctid AS tid"
        query = f"SELECT s.id, {place} FROM {self.recorded} CROSS JOIN LATERAL ({entries}) e"
        item, values = self._asked(query, "id bigint, segment oid, tid tid", ids)
        places = f"SELECT id, segment::regclass::text AS segment, tid::text AS tid FROM {item}"
        by_segment: dict[str, dict[str, set[int]]] = {}
        for entry in execute(self.connection, places, values).all():
            by_segment.setdefault(entry.segment, {}).setdefault(entry.tid, set()).add(entry.id)
        return by_segment

    def _remove(self, segment: str, tids: dict[str, set[int]], removed: set[int], hidden: set[int]) -> None:
        # No values are bound here: the conditions may have literals with a per cent sign.
        def these(chosen: Iterable[str]) -> str:
            return f"x.ctid = ANY ('{{{','.join(map(_quoted, chosen))}}}'::tid[])"

        lock = f"SELECT x.ctid::text FROM {segment} x WHERE {these(tids)} FOR UPDATE SKIP LOCKED"
        locked = list(execute(self.connection, lock).scalars())
        # The next statements have later snapshots. An entry that was written meanwhile is a version at another address.
        visible = f"SELECT coalesce(roir.is_shown({self.generation_id}, 'x'), 'true')"
        shown = execute(self.connection, visible).scalar_one()
        row = f"SELECT FROM {self.source} r WHERE {self.entry.has_row('r', 'x.')}"
        without = f"{these(locked)} AND NOT EXISTS ({row}) AND {shown}"
        if not self.trusted:
            query = f"SELECT x.ctid FROM {segment} x WHERE {without}"
            without = these(owner.rows(self.connection, self.read, query, "tid tid").scalars().all())
        delete = f"DELETE FROM {segment} x WHERE {without} RETURNING x.ctid::text"
        removed.update(*(tids[tid] for tid in execute(self.connection, delete).scalars()))
        unseen = f"SELECT x.ctid FROM {segment} x WHERE {these(locked)} AND NOT {shown}"
        hidden.update(*(tids[tid] for tid in owner.rows(self.connection, self.read, unseen, "tid tid").scalars()))

    def _with_row(self, ids: list[int]) -> set[int]:
        rows = f"SELECT s.id FROM {self.recorded} WHERE EXISTS (SELECT FROM {self.source} r WHERE {self.row})"
        return self._ids(rows, ids)

    def _ids(self, query: str, ids: Iterable[int]) -> set[int]:
        item, values = self._asked(query, "id bigint", ids)
        return set(execute(self.connection, f"SELECT id FROM {item}", values).scalars())

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


def mend_unit(connection: Connection, job: Job, verification_id: int, unit_id: int) -> Iterator[None]:
    """Repairs all discrepancies of a unit, in steps of one or two short transactions.

    A discrepancy that a writer holds is tried again for some seconds, then stays as it is.
    """
    mender = Mender(connection, job)
    values = {"verification": verification_id, "unit": unit_id}
    with connection.begin():
        mender.look_again([row.id for row in execute(connection, UNMENDED, {**values, "first": True})])
    for attempt in range(TRIES):
        with connection.begin():
            # Duplicates are tried once: only a user can resolve them.
            rows = execute(connection, UNMENDED, {**values, "first": attempt == 0}).all()
        if not rows:
            return
        if attempt:
            time.sleep(limits_of(connection).repair_rest_s)
        # Many are repaired in chunks, but one by one in every second attempt, in case a table's lock was in the way.
        size = CHUNK if len(rows) > MANY and attempt % 2 == 0 else 1
        absent = [row.id for row in rows if row.kind != "extra"]
        for ids in _chunks(absent, size):
            # If the row is gone, a different entry is an extra one, and a missing entry isn't missing any more.
            if left := tried(mender.put, ids):
                tried(mender.take_out, left)
            yield
        for ids in _chunks([row.id for row in rows if row.kind == "extra"], size):
            tried(mender.take_out, ids)
            yield


def _quoted(tid: str) -> str:
    return f'"{tid}"'


def _chunks(ids: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(ids), size):
        yield ids[first : first + size]


def tried(work: Callable[[list[int]], list[int]], ids: list[int]) -> list[int]:
    """The discrepancies that `work` left for the next step; none if a writer held something that it needed."""
    try:
        return work(ids)
    except DBAPIError as error:
        if trouble_of(error) is not Trouble.LOST or error.connection_invalidated:
            raise
        return []
