"""Tells duplicates of a unique index while it is built (docs/architecture.md#early).

It reads the hashes of what workers have committed to each segment, finds those that it has met before, and looks their
entries up where they are: only what one snapshot shows as two live entries of one key is written down. What it misses
the seal finds.
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

# A segment is read when it has grown by an eighth: so all of a segment's hashes are merged nine times at the most, and
# of two rows with one key that are there at most one in nine is still to be read.
GROWTH = 8
# Less isn't worth a transaction.
FEWEST_BLOCKS = 64
# Spent without asking how long the build has lasted: a small one would be over.
FIRST_S = 0.2
# What a block costs where all of them are scanned.
HEAL_BLOCK_S = 20e-6
NONE: Hashes = np.empty(0, dtype=np.uint64)


class Detector:
    """Of one run's build. Each step is a few transactions of its own session."""

    def __init__(
        self,
        database: Database,
        connection: Connection,
        job: Job,
        clock: Callable[[], float] = time.monotonic,
        halted: Callable[[], bool] = lambda: False,
    ) -> None:
        """halted: whether to leave between two transactions. Raises NoHash if the keys' types have none."""
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
        # By segment: how far it is read; the number of batches when it was read to its end.
        self._read: dict[int, ReadSoFar] = {}
        self._read_at: dict[int, int] = {}
        # Hashes that were met twice, and are to be looked up, with their places.
        self._waiting: dict[int, Hashes] = {}
        self._heals = False
        self._resume()

    def step(self, everything: bool = False) -> int:
        """Read what is due, look up what the time allows; how many rows were found to share a key.

        everything: all that is committed, whatever it takes. Raises Fenced, and DuplicatesFound where the operation is
        to stop at the first one.
        """
        look = self._store.look()
        if look is None or (look.stands and not everything):
            return 0
        return self._go_on(look, everything)

    def last(self) -> int:
        """As `step` of everything, when all is copied, for a small share of the time that this took."""
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
        # Not from the look-ups' time, or there would be none for long.
        cost_s = sum(look.ends.values()) * HEAL_BLOCK_S
        if cost_s <= self._limits.early_healing_share * (self._clock() - self._begun) and not self._halted():
            self._heal()

        def unread(segment: int) -> int:
            return look.ends.get(segment, 0) - self._read.get(segment, ReadSoFar()).end

        # What tells most comes first, should the time not last.
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
        # Before the new ones are among them.
        known = self._known(segment)
        self._kept.forget(segment)
        settled = self._growth.settled(segment, look.snapshot)
        now, data, is_all = self._store.read(segment, so_far, settled)
        if now.number <= so_far.number:
            # It was emptied, and is read from its beginning.
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
        """Go on after what earlier runs have read; the hashes themselves are read when they are needed."""
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
        """Once, see which of the groups that earlier runs have found are healed: a scan of all segments."""
        if self._heals:
            with self._connection.begin():
                duplicates.heal_known(self._connection, self._job)
        self._heals = False

    def _look_up(self, everything: bool) -> int:
        """First where most are waiting; then where there is nothing to look up, in one transaction."""
        found = 0
        for segment in sorted(self._waiting, key=lambda one: -len(self._waiting[one])):
            while len(self._waiting.get(segment, NONE)) and not self._halted():
                # Paid for afterwards: what one takes too much is waited for before the next one.
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
            # Their partitions are found out at the pause: over many partitions that takes longer than all of this.
            self._stop_if_found()
        return found

    def _look_up_in(self, segment: int) -> int:
        """In one snapshot."""
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
        """Pause the operation at the first group, if that was asked for."""
        if self._job.options.get("on_duplicate") != "stop":
            return
        try:
            duplicates.refuse(self._database, self._job)
        except DuplicatesFound as found:
            settle(self._database, self._job.run, found, fatal=False)
            raise


class NoHash(Exception):
    """Keys of a type without a hash: their duplicates are found by the seal alone."""


class Budget:
    """share: of the time since this was made, in which it grows. first_s: what may be spent at once."""

    def __init__(self, share: float, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._first_s = first_s
        self._clock = clock
        self._begun = clock()
        self.spent_s = 0.0

    def allows(self) -> bool:
        """Whether something may begin now. What it takes is counted when it has ended."""
        return self.spent_s <= self._first_s + self._share * (self._clock() - self._begun)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around what it is spent on."""
        begun = self._clock()
        try:
            yield
        finally:
            self.spent_s += self._clock() - begun
