"""The log of a phase for its user: workers that begin, pieces that are done, workers that leave, with reasons."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, quote
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import AWAY
from airflow_roir.engine.unique import duplicate_report
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.errors import RoirError
from airflow_roir.operation import Phase, Status
from airflow_roir.quantity import counted, duration, shared

# The most lines that a phase logs about its pieces: one for each, or, with more pieces, a count from time to time.
LINES = 10
# Pieces that are done within this time of the last such line share the next one.
REST_S = 2.0

IS_UNIQUE = """
SELECT FROM roir.operation o JOIN roir.index i ON i.id = o.index_id WHERE o.id = %(operation)s AND i.is_unique
"""
# The last duplicate of all operations when the run begins, and the newest of this operation since.
LAST_DUPLICATE = """
SELECT coalesce(max(id), 0) AS id,
       count(DISTINCT key_hash) FILTER (WHERE operation_id = %(operation)s AND healed_at IS NULL) AS groups
  FROM roir.duplicate
"""
NEW_DUPLICATES = "SELECT max(id) AS id FROM roir.duplicate WHERE operation_id = %(operation)s AND id > %(after)s"
COUNTS = "SELECT count(*) AS pieces, count(*) FILTER (WHERE done) AS done, sum(rows) AS rows FROM ({pieces}) p"
COMPARING = """
SELECT sum(extract(epoch FROM finished_at - started_at))::float8 AS seconds FROM roir.verification
 WHERE operation_id = %(operation)s
"""
STATE = "SELECT status, epoch FROM roir.operation WHERE id = %(operation)s"
DONE = "SELECT ordinal, rows, seconds FROM ({pieces}) p WHERE done ORDER BY ordinal"


# As `pieces` below writes them.
OF_PIECES = re.compile(r"[\w ]+: (\w+ \d+ done, |[\d,]+ of [\d,]+ \w+ done($|, ))")


def tells_of_pieces(line: str) -> bool:
    """True for a line about pieces that are done, which a user of a live view doesn't need."""
    return OF_PIECES.match(line) is not None


class PhaseLog:
    """The log of one phase of a run. say: takes a line. clock: seconds that never go back."""

    def __init__(
        self,
        database: Database,
        run: Run,
        phase: PhaseWork,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._run = run
        self._work = phase
        self._phase = phase.name
        # The comparison before a publish has the name that the status gives it.
        self._shown = "verify" if phase.name == Phase.PUBLISH else phase.name.shown
        self._say = say
        self._clock = clock
        self._said_at = float("-inf")
        self._wanted = 0
        self._at_work = 0
        self._done = 0
        self._told: set[int] = set()
        self._is_named = True
        self._is_unique = False
        self._last_group = self._last_duplicate = 0
        self._known = self._groups_told = 0
        self._away: dict[str, str] = {}

    def say(self, line: str) -> None:
        """Log a line of this phase."""
        self._say(f"{self._shown}: {line}")

    def over(self, seconds: float) -> None:
        """Log the end of the phase. seconds: of work; a publish tells apart the comparison before it, as the status."""
        self._shown = self._phase.shown
        parts = ""
        if self._phase == Phase.PUBLISH and (found := self._read(COMPARING)) and found[0].seconds is not None:
            compared = min(found[0].seconds, seconds)
            parts = f": verify {duration(compared)}, publish {duration(seconds - compared)}"
        self.say(f"done, worked {duration(seconds)}{parts}")

    def begin(self, workers: int) -> None:
        """Log how many workers are wanted, and how many pieces earlier runs have done."""
        self._wanted = workers
        self.say(counted(workers, "worker"))
        self._is_unique = self._phase in (Phase.BUILD, Phase.SEAL) and bool(self._read(IS_UNIQUE))
        if self._is_unique and (last := self._read(LAST_DUPLICATE)):
            self._last_duplicate = self._last_group = last[0].id
            self._known = self._groups_told = last[0].groups
        if (counts := self._count()) is None:
            return
        # Units of a verification come in stages, each with its own numbers.
        self._is_named = counts.pieces <= LINES and not self._work.has_stages
        self._done = counts.done
        if counts.done:
            self._told = {row.ordinal for row in self._finished()} if self._is_named else set()
            # Said before anything differs: a later stage adds units for rows that were written between two sums.
            more = (
                "; a second pass over what may have changed meanwhile can add to them" if self._work.has_stages else ""
            )
            self.say(f"{counts.done:,} of {counted(counts.pieces, self._work.noun)} done before{more}")

    def workers(self, wanted: int) -> None:
        """Log how many workers are wanted, if that has changed."""
        if wanted != self._wanted:
            self.say(f"{counted(wanted, 'worker')} from now on, {self._wanted} before")
        self._wanted = wanted

    def at_work(self, count: int) -> None:
        """Note how many workers are at work; logged once all of them are."""
        if not self.all_began and count >= self._wanted:
            self.say(f"{counted(count, 'worker')} at work")
        self._at_work = max(self._at_work, count)

    @property
    def all_began(self) -> bool:
        """True once as many workers were at work as are wanted now."""
        return self._at_work >= self._wanted

    def why_fenced(self) -> str:
        """Why a worker of this run may do no more, by the operation's row."""
        found = self._read(STATE)
        if found and found[0].status in (Status.ABORTING, Status.ABORTED):
            return "the operation was aborted"
        if found and found[0].epoch != self._run.epoch:
            return "another run drives the operation now"
        return "it has lost its piece of the work"

    def pieces(self, last: bool = False) -> None:
        """Log the pieces that were done since the last time. last: the phase is over, so nothing may be left out.

        Says nothing if the database is out of reach: workers and driver report that.
        """
        self.duplicates()
        self.shards()
        if (counts := self._count()) is None or counts.done == self._done:
            return
        # The share of all pieces: a verification gets more units with each stage.
        is_due = counts.done - self._done >= counts.pieces / LINES and self._clock() - self._said_at >= REST_S
        if not (last or is_due):
            return
        self._done, self._said_at = counts.done, self._clock()
        noun = self._work.noun
        new = [row for row in self._finished() if row.ordinal not in self._told] if self._is_named else []
        self._told.update(row.ordinal for row in new)
        if len(new) == 1:
            [row] = new
            what = "" if row.rows is None else f": {counted(row.rows, 'row')} in {row.seconds:.1f} s"
            self.say(f"{noun} {row.ordinal} done, {len(self._told)} of {counts.pieces}{what}")
            return
        rows = "" if counts.rows is None else f", {counted(counts.rows, 'row')}"
        self.say(f"{counts.done:,} of {counted(counts.pieces, noun)} done{rows}")

    def shards(self) -> None:
        """Log shards that can't be read, and those that can be read again. Ranges of other shards continue."""
        if self._phase != Phase.BUILD:
            return
        now = {row.name: row.problem for row in self._read(AWAY)}
        for name in sorted(now.keys() - self._away.keys()):
            self.say(f"shard {quote(name)} can't be read: {now[name]}; its ranges wait")
        for name in sorted(self._away.keys() - now.keys()):
            self.say(f"shard {quote(name)} can be read again")
        self._away = now

    def duplicates(self) -> None:
        """Log some of the rows that share a key of a unique index, as they are found, then only how many there are.

        Says nothing of those that an earlier phase or run has found.
        """
        if not self._is_unique:
            return
        new = self._read(NEW_DUPLICATES, after=self._last_duplicate)
        if not new or new[0].id is None:
            return
        self._last_duplicate = new[0].id
        try:
            with self._database.transaction() as connection:
                found = duplicate_report.read(connection, self._run.operation_id)
                room = max(duplicate_report.EXAMPLES - self._known, 0)
                listed = duplicate_report.groups(
                    connection, found, self._last_group, room, rows_each=duplicate_report.EXAMPLES
                )
                groups = list(listed)
        except (DBAPIError, RoirError):
            return
        for group in groups:
            self._known += 1
            self._last_group = group.id
            self.say(found.line(group))
        if found.groups > self._known and found.groups > 2 * self._groups_told:
            self._groups_told = found.groups
            self.say(f"{shared(found.groups, found.rows)} until now: roir duplicates {argument(self._run.index)}")

    def _count(self) -> Row[Any] | None:
        found = self._read(COUNTS)
        return found[0] if found else None

    def _finished(self) -> Sequence[Row[Any]]:
        return self._read(DONE)

    def _read(self, query: str, **values: int) -> Sequence[Row[Any]]:
        try:
            with self._database.transaction() as connection:
                sql = query.format(pieces=self._work.listed)
                return execute(connection, sql, {"operation": self._run.operation_id, **values}).all()
        except DBAPIError:
            return []
