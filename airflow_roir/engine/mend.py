"""Mending what a verification found, so that it can't undo a concurrent write.

A row that lacks its entry, or has another one, is locked first and looked at again: whoever writes to it next comes
after the right entry. An entry without a row is locked first, then its row is looked for again with a later snapshot: a
writer that brought such a row has either committed, and is seen, or waits for the lock and writes the entry anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import comparison
from airflow_roir.engine import generation as physical
from airflow_roir.engine.database import LOCK_TIMEOUT_MS, execute, is_transient
from airflow_roir.engine.run import Job

# A range with more than that is rebuilt: so many at once, each transaction some ten milliseconds.
MANY = 100
CHUNK = 1_000
# How often one that a writer holds is tried again, and how long to leave that writer alone.
TRIES = 20
REST_S = 0.1

CHECK_TREE = """
SELECT bt_index_check(i.indexrelid::regclass, true) FROM pg_index i
 WHERE i.indrelid = %(relation)s::oid AND i.indisunique
"""
"""Check one segment's B-tree, and that each entry is in it."""

UNMENDED = """
SELECT id, kind FROM roir.discrepancy
 WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND outcome IS NULL AND kind <> 'corrupt'
 ORDER BY id
"""
OUTCOME = """
UPDATE roir.discrepancy SET outcome = %(outcome)s, mended_at = clock_timestamp()
 WHERE id = ANY (%(ids)s) AND outcome IS NULL
"""


class Mender:
    """Mends discrepancies of one generation, in one session."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.base = physical.base(job.generation_id)
        self.entry = entry = job.entry
        self.source = job.source.sql
        identity = ", ".join(f"{value} AS c{i + 1}" for i, value in enumerate(comparison.recorded_identity(entry, "d")))
        # The recorded identities, with the names of the entry's first columns.
        self.recorded = f"(SELECT d.id, {identity} FROM roir.discrepancy d WHERE d.id = ANY (%(ids)s)) s"
        self.row = comparison.row_of(entry, "r", "s.")

    def put(self, ids: list[int]) -> list[int]:
        """Give rows their entries, in one transaction; returns those whose rows aren't there any more."""
        columns, read = ", ".join(self.entry.physical()), ", ".join(comparison.of_source(self.entry, "r"))
        image = f"ROW({', '.join(self.entry.physical(prefix='e.'))})::record"
        entry = comparison.lookup(self.entry, self.base, "true AS present")
        joined = f"FROM {self.recorded} JOIN {self.source} r ON {self.row}"
        with self.connection.begin():
            self._wait_little()
            rows = (
                f"SELECT s.id FROM {self.recorded} CROSS JOIN LATERAL (SELECT FROM {self.source} r WHERE {self.row} "
                "FOR NO KEY UPDATE) l"
            )
            locked = list(execute(self.connection, rows, {"ids": ids}).scalars())
            right = f"SELECT s.id {joined} CROSS JOIN LATERAL ({entry}) e WHERE ROW({read})::record *= {image}"
            gone = list(execute(self.connection, right, {"ids": locked}).scalars())
            wrong = list(set(locked) - set(gone))
            write = f"INSERT INTO {self.base} ({columns}) SELECT {read} {joined} {self.entry.on_conflict()}"
            execute(self.connection, write, {"ids": wrong})
            self._settle("gone", gone)
            self._settle("mended", wrong)
        return list(set(ids) - set(locked))

    def take_out(self, ids: list[int]) -> list[int]:
        """Remove entries that no row projects to, in one transaction; returns those that could not be settled."""
        found = comparison.lookup(self.entry, self.base, "b.tableoid, b.ctid")
        entries = (
            f"SELECT s.id, e.tableoid::regclass::text AS segment, e.ctid::text AS tid FROM {self.recorded} "
            f"CROSS JOIN LATERAL ({found}) e"
        )
        with self.connection.begin():
            self._wait_little()
            by_segment: dict[str, dict[str, int]] = {}
            for entry in execute(self.connection, entries, {"ids": ids}).all():
                by_segment.setdefault(entry.segment, {})[entry.tid] = entry.id
            removed: list[int] = []
            for segment, tids in sorted(by_segment.items()):
                removed += self._remove(segment, tids)
            # What has a row, or no entry, is right by now.
            rows = f"SELECT s.id FROM {self.recorded} WHERE EXISTS (SELECT FROM {self.source} r WHERE {self.row})"
            gone = set(execute(self.connection, rows, {"ids": ids}).scalars())
            gone |= set(ids) - {one for tids in by_segment.values() for one in tids.values()}
            self._settle("mended", removed)
            self._settle("gone", list(gone - set(removed)))
        return list(set(ids) - gone - set(removed))

    def _remove(self, segment: str, tids: dict[str, int]) -> list[int]:
        values = {"tids": list(tids)}
        execute(self.connection, f"SELECT FROM {segment} WHERE ctid = ANY (%(tids)s::tid[]) FOR UPDATE", values)
        # A statement of its own, so a later snapshot. An entry that was written meanwhile is another version.
        removed = execute(
            self.connection,
            f"DELETE FROM {segment} s WHERE s.ctid = ANY (%(tids)s::tid[]) "
            f"AND NOT EXISTS (SELECT FROM {self.source} r WHERE {self.row}) RETURNING s.ctid::text AS tid",
            values,
        ).all()
        return [tids[row.tid] for row in removed]

    def _wait_little(self) -> None:
        execute(self.connection, f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}")

    def _settle(self, outcome: str, ids: list[int]) -> None:
        if ids:
            execute(self.connection, OUTCOME, {"outcome": outcome, "ids": ids})


def mend_unit(connection: Connection, job: Job, verification_id: int, unit_id: int) -> None:
    """Mend all that was found in a unit. What writers hold is tried again for some seconds, then left as it was."""
    mender = Mender(connection, job)
    values = {"verification": verification_id, "unit": unit_id}
    for attempt in range(TRIES):
        with connection.begin():
            rows = execute(connection, UNMENDED, values).all()
        if not rows:
            return
        if attempt:
            time.sleep(REST_S)
        # At once where there are many, unless somebody held one of them the last time.
        size = CHUNK if len(rows) > MANY and attempt % 2 == 0 else 1
        absent = [row.id for row in rows if row.kind != "extra"]
        for ids in _chunks(absent, size):
            # Without its row an entry that was different is one too many, and one that was missing is not missed.
            if left := _tried(mender.put, ids):
                _tried(mender.take_out, left)
        for ids in _chunks([row.id for row in rows if row.kind == "extra"], size):
            _tried(mender.take_out, ids)


def _chunks(ids: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(ids), size):
        yield ids[first : first + size]


def _tried(work: Callable[[list[int]], list[int]], ids: list[int]) -> list[int]:
    """What `work` left; nothing where a writer held what it needed."""
    try:
        return work(ids)
    except DBAPIError as error:
        if not is_transient(error) or error.connection_invalidated:
            raise
        return []
