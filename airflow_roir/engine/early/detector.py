"""Finds duplicates of a unique index while it is built (docs/architecture.md#early).

It reads the hashes of the entries that workers have committed to each segment, finds hashes that it has met before, and
looks up their entries. It records two entries only if one snapshot shows both as live entries of one key. The seal
finds the duplicates that it misses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from sqlalchemy import Connection

from airflow_roir.engine.control.job import Job
from airflow_roir.engine.control.run import settle
from airflow_roir.engine.database import Database
from airflow_roir.engine.early.hashing import key_hash
from airflow_roir.engine.early.key_sets import HASH, PLACE_BLOCKS, Hashes, Kept, blocks_of, hashes_of, join, read
from airflow_roir.engine.early.store import Growth, Look, ReadSoFar, Store, mark_looked
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.unique import duplicates
from airflow_roir.errors import DuplicatesFound

# A segment is read when it has grown by an eighth: so each of its hashes is merged nine times at most, and at most a
# ninth of its rows is still unread.
GROWTH = 8
# Fewer blocks aren't worth a transaction.
FEWEST_BLOCKS = 64
# Seconds that may be spent however short the build has lasted: otherwise a small build would be over first.
FIRST_S = 0.2
# Seconds for each block in a scan of all segments.
HEAL_BLOCK_S = 20e-6
NONE: Hashes = np.empty(0, dtype=np.uint64)


class Detector:
    """Detects duplicates in one run's build. Each step is a few transactions of its own session."""

    def __init__(
        self,
        database: Database,
        connection: Connection,
        job: Job,
        clock: Callable[[], float] = time.monotonic,
        halted: Callable[[], bool] = lambda: False,
    ) -> None:
        """halted: true if it must stop between two transactions. Raises NoHash if a type of the key has no hash."""
        self._database = database
        self._connection = connection
        self._job = job
        self._halted = halted
        self._clock = clock
        self._begun = clock()
        self._limits = limits = limits_of(connection)
        with connection.begin():
            row_hash = key_hash(connection, job.generation_id, job.entry, "s.")
            found = key_hash(connection, job.generation_id, job.entry, "x.")
        if row_hash is None or found is None:
            raise NoHash("the key's type has no hash")
        self._found_hash = f"({found}) & {HASH}"
        self._store = Store(connection, job, row_hash)
        self._reading = Budget(limits.early_reading_share, FIRST_S, clock)
        self._looking = Budget(limits.early_looking_share, FIRST_S, clock)
        self._growth = Growth()
        self._kept = Kept(limits.early_bytes)
        self._batches = -1
        # By segment: how far it is read, and the number of batches when it was last read to its end.
        self._read: dict[int, ReadSoFar] = {}
        self._read_at: dict[int, int] = {}
        # Hashes that were met twice, with their places, whose entries are still to be looked up.
        self._waiting: dict[int, Hashes] = {}
        self._heals = False
        self._resume()

    def step(self, everything: bool = False) -> int:
        """Read the segments that are due, look up as many hashes as the time allows. Returns how many rows are found.

        everything: read and look up all that is committed, however long it takes. Raises Fenced, and DuplicatesFound if
        the operation must stop at the first duplicate.
        """
        look = self._store.look()
        if look is None or (look.stands and not everything):
            return 0
        return self._go_on(look, everything)

    def last(self) -> int:
        """As `step` of everything, once all is copied, for at most a small share of the time that the build took."""
        look = self._store.look()
        if look is None or look.stands:
            return 0
        now = self._clock()
        until = now + FIRST_S + self._limits.early_last_share * (now - self._begun)
        self._halted = lambda: self._clock() > until
        return self._go_on(look, True)

    def _go_on(self, look: Look, everything: bool) -> int:
        self._growth.look(look.snapshot, look.ends)
        idle, self._batches = look.batches == self._batches, look.batches
        found = self._look_up(everything)
        # Not out of the time for look-ups: they would have none for long.
        cost_s = sum(look.ends.values()) * HEAL_BLOCK_S
        if cost_s <= self._limits.early_healing_share * (self._clock() - self._begun) and not self._halted():
            self._heal()

        def unread(segment: int) -> int:
            return look.ends.get(segment, 0) - self._read.get(segment, ReadSoFar()).end

        # The segments with most unread blocks first, since the time may not suffice for all.
        for segment in sorted(self._store.segments, key=unread, reverse=True):
            while not self._halted() and self._is_due(segment, look, everything or idle):
                if not (everything or self._reading.allows()):
                    break
                with self._reading.spending():
                    self._read_more(segment, look)
        return found + self._look_up(everything)

    def _is_due(self, segment: int, look: Look, all_of_it: bool) -> bool:
        if self._read_at.get(segment) == look.batches:
            return False
        so_far, end = self._read.get(segment, ReadSoFar()), look.ends.get(segment, 0)
        return all_of_it or end - so_far.end >= max(FEWEST_BLOCKS, so_far.end // GROWTH)

    def _read_more(self, segment: int, look: Look) -> None:
        so_far = self._read.get(segment, ReadSoFar())
        # Before the new hashes are stored among them.
        known = self._known(segment)
        self._kept.forget(segment)
        settled = self._growth.settled(segment, look.snapshot)
        now, data, is_all = self._store.read(segment, so_far, settled)
        if now.number <= so_far.number:
            # The segment was emptied, and is read from its beginning.
            known = NONE
            self._waiting.pop(segment, None)
        self._read[segment] = now
        if is_all:
            self._read_at[segment] = look.batches
        known, again = join(known, read(data))
        self._kept.put(segment, known)
        self._wait(segment, again)

    def _known(self, segment: int) -> Hashes:
        found = self._kept.get(segment)
        if found is not None:
            return found
        return np.sort(read(self._store.kept(segment))) if segment in self._read else NONE

    def _wait(self, segment: int, hashes: Hashes) -> None:
        self._waiting[segment] = np.union1d(self._waiting.get(segment, NONE), hashes)

    def _resume(self) -> None:
        """Continue after the blocks that earlier runs have read; their hashes are read when they are needed."""
        self._read, waiting = self._store.found()
        for segment in waiting:
            known = np.sort(read(self._store.kept(segment, [True])))
            known, again = join(known, read(self._store.kept(segment, [False])))
            self._kept.put(segment, known)
            self._wait(segment, again)
        with self._connection.begin():
            self._heals = duplicates.groups(self._connection, self._job.run.operation_id)[0] > 0
        if self._job.options.get("on_duplicate") == "stop":
            self._heal()
            self._stop_if_found()

    def _heal(self) -> None:
        """Check once which groups that earlier runs have found are healed. That scans all segments."""
        if self._heals:
            with self._connection.begin():
                duplicates.heal_known(self._connection, self._job)
        self._heals = False

    def _look_up(self, everything: bool) -> int:
        """Look up waiting hashes, in the segment with most of them first. Returns how many rows are found.

        Then marks the segments without waiting hashes, in one transaction.
        """
        found = 0
        for segment in sorted(self._waiting, key=lambda one: -len(self._waiting[one])):
            while len(self._waiting.get(segment, NONE)) and not self._halted():
                # The time counts afterwards: after a look-up that took too long, the next one waits.
                if not (everything or self._looking.allows()):
                    break
                with self._looking.spending():
                    found += self._look_up_in(segment)
        if nothing := [segment for segment, hashes in self._waiting.items() if not len(hashes)]:
            with self._connection.begin():
                mark_looked(self._connection, self._job, {one: self._read[one] for one in nothing})
            for segment in nothing:
                del self._waiting[segment]
        if found:
            # The rows' partitions are looked up at the pause: with many partitions that takes longer than all of this.
            self._stop_if_found()
        return found

    def _look_up_in(self, segment: int) -> int:
        """Look up some of a segment's waiting hashes, in one snapshot."""
        hashes, rest = np.split(self._waiting[segment], [self._limits.early_hashes])
        with self._connection.begin():
            found = duplicates.record_hashes(
                self._connection,
                self._job,
                segment,
                self._found_hash,
                hashes_of(hashes),
                blocks_of(hashes),
                PLACE_BLOCKS,
            )
            if not len(rest):
                mark_looked(self._connection, self._job, {segment: self._read[segment]})
        if len(rest):
            self._waiting[segment] = rest
        else:
            del self._waiting[segment]
        return found

    def _stop_if_found(self) -> None:
        """Pause the operation at the first group, if its options say so."""
        if self._job.options.get("on_duplicate") != "stop":
            return
        try:
            duplicates.refuse(self._database, self._job)
        except DuplicatesFound as found:
            settle(self._database, self._job.run, found, fatal=False)
            raise


class NoHash(Exception):
    """A type of the key has no hash: only the seal finds duplicates."""


class Budget:
    """A budget of time. share: the part of the time since its start that may be spent. first_s: seconds on top."""

    def __init__(self, share: float, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._first_s = first_s
        self._clock = clock
        self._begun = clock()
        self.spent_s = 0.0

    def allows(self) -> bool:
        """True if work may begin now. Its time is counted when it has ended."""
        return self.spent_s <= self._first_s + self._share * (self._clock() - self._begun)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the block."""
        begun = self._clock()
        try:
            yield
        finally:
            self.spent_s += self._clock() - begun
