"""Looks at suspects on both sides until each is decided, and writes down the differences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from airflow_roir.engine.control.run import read_control
from airflow_roir.engine.database import execute, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.verify import damage
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.worker import UNITS
from airflow_roir.operation import Status
from airflow_roir.shards.shard import Feed
from airflow_roir.shards.verify.both_sides import BothSides
from airflow_roir.shards.verify.recheck import Identity, Seen, Sides, Verdict, identities, look, look_locked

# The entries in one statement on each side; fewer under the feed's lock.
AT_ONCE, AT_ONCE_LOCKED = 200, 20
# An entry on its way is looked at again after REST_S, MOST_LOOKS times. Then it is left: shipping writes it again.
REST_S, MOST_LOOKS = 0.5, 20

# An entry that is the same on both sides is no suspect.
AGREED = """
DELETE FROM roir.suspect s USING (
    SELECT identity FROM (
        SELECT identity, hash, sum(CASE WHEN of_source THEN 1 ELSE -1 END) AS more FROM roir.suspect
         WHERE {of} GROUP BY identity, hash) h
     GROUP BY identity HAVING bool_and(more = 0)) a
 WHERE {of} AND s.identity = a.identity
"""
NEXT = """
WITH first AS MATERIALIZED (SELECT identity FROM roir.suspect WHERE {of} ORDER BY looks, id LIMIT %(limit)s)
SELECT identity, min(looks) AS looks, count(*) FILTER (WHERE NOT of_source) AS entries,
       bool_or(feed_id IS NULL) AS unplaced
  FROM roir.suspect WHERE {of} AND identity IN (SELECT f.identity FROM first f)
 GROUP BY identity ORDER BY min(looks), min(id)
"""
SETTLED = "DELETE FROM roir.suspect WHERE {of} AND identity = ANY (%(identities)s::jsonb[])"
LOOKED = "UPDATE roir.suspect SET looks = looks + 1 WHERE {of} AND identity = ANY (%(identities)s::jsonb[])"
SAME_FOUND = """
SELECT EXISTS (SELECT FROM roir.discrepancy WHERE verification_id = %(verification_id)s AND kind = %(kind)s
                  AND key = %(key)s::jsonb AND primary_key = %(primary_key)s::jsonb)
"""
NOTE = """
INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, source_values, entry_values, detail)
VALUES (%(verification_id)s, %(unit_id)s, %(kind)s, %(key)s, %(primary_key)s, %(source_values)s, %(entry_values)s,
        %(detail)s)
"""
COUNT_FOUND = "SELECT count(*) FROM roir.discrepancy WHERE verification_id = %(verification)s AND unit_id = %(unit)s"


def batched(listed: Sequence[Identity], most: int) -> Iterator[Sequence[Identity]]:
    """The list in parts of at most this many."""
    for first in range(0, len(listed), most):
        yield listed[first : first + most]


class Judge:
    """Decides for one worker."""

    def __init__(self, both: BothSides, worker: int) -> None:
        self.both = both
        self.worker = worker
        self.connection = both.connection
        self.verify_job = both.verify_job
        self.job = both.job

    def decide(self, claim: UnitClaim, of: str, commit: Callable[[int, bool], int]) -> tuple[int, int]:
        """Looks at the suspects until each is decided; returns how many it looked at, and how many differ.

        of: a condition in SQL that chooses them. commit: ends the unit in the same transaction; gets the rows, and
        whether any is to be repaired. Raises ShardAway, Fenced.
        """
        values = {"verification": self.verify_job.verification_id, "unit": claim.id, "feed": claim.feed_id}
        if claim.stage == "whole":
            with self.connection.begin():
                execute(self.connection, AGREED.format(of=of), values)
        looked_at, round_of_looks, twice = 0, 0, set[Identity]()
        while True:
            with self.connection.begin():
                if read_control(self.connection, self.job.run).status != Status.RUNNING:
                    # The suspects' table keeps the unit's progress.
                    UNITS.release(self.connection, self.job.run, claim)
                    return 0, 0
                batch = execute(self.connection, NEXT.format(of=of), {**values, "limit": AT_ONCE}).all()
            if not batch:
                break
            if batch[0].looks > round_of_looks:
                round_of_looks = batch[0].looks
                time.sleep(REST_S)
            names = {feed.shard.name for feed in self.both.feeds}
            misplaced = {
                one for row in batch if row.unplaced and (one := tuple(row.identity))[self.both.position] in names
            }
            seen = self.look([one for row in batch if (one := tuple(row.identity)) not in misplaced])
            twice |= {tuple(row.identity) for row in batch if row.entries > 1} - misplaced
            with self.connection.begin():
                looked_at += self._write_down(claim, of, values, seen, misplaced, round_of_looks)
        with self.connection.begin():
            self._find_doubled(claim, twice)
            found = int(execute(self.connection, COUNT_FOUND, values).scalar_one())
            to_repair = found > 0 and self.verify_job.options.repair
            commit(looked_at if self.verify_job.options.is_partial else 0, to_repair)
        return looked_at, found

    def look(self, wanted: Sequence[Identity]) -> list[Seen]:
        """Looks at entries of any feeds. Raises ShardAway."""
        by_feed: dict[Feed | None, list[Identity]] = {}
        names = {feed.shard.name: feed for feed in self.both.feeds}
        for identity in wanted:
            by_feed.setdefault(names.get(identity[self.both.position] or ""), []).append(identity)
        seen: list[Seen] = []
        for feed, part in by_feed.items():
            if feed is None or feed.id not in self.both.live:
                # An entry of no shard that the index has.
                sides = Sides(
                    self.job.generation_id, self.job.entry, self.both.position, feed or self.both.feeds[0], None
                )
                seen += look(self.connection, None, sides, part)
                continue
            one = self.both.sessions.of(feed)
            with self.both.sessions.reaching(feed):
                found = look(self.connection, one.connection, self.both.of_feed(one), part)
                seen += [this for this in found if this.verdict != Verdict.BUSY]
                busy = [this.identity for this in found if this.verdict == Verdict.BUSY]
                for some in batched(busy, AT_ONCE_LOCKED):
                    seen += look_locked(self.connection, one.connection, self.both.of_feed(one), some)
        return seen

    def _write_down(
        self,
        claim: UnitClaim,
        of: str,
        values: dict[str, Any],
        seen: Sequence[Seen],
        misplaced: Collection[Identity],
        looks: int,
    ) -> int:
        """Records the suspects that a look has decided; returns their number."""
        if not UNITS.is_held(self.connection, self.job.run, claim):
            raise UNITS.fenced(self.job.run, self.worker, claim)
        open_still = [one.identity for one in seen if one.verdict == Verdict.UNDECIDED and looks < MOST_LOOKS]
        remedy = damage.remedy_of_entries(self.job.run.index)
        for one in seen:
            if one.verdict not in (Verdict.EQUAL, Verdict.UNDECIDED):
                self.note(claim, one.verdict.value, one)
        for identity in misplaced:
            said = f"an entry is in another segment than that of its key, where no lookup finds it. {remedy}"
            self.note(claim, "damaged", Seen(identity, Verdict.EXTRA, None, None), said)
        settled = {*(one.identity for one in seen), *misplaced} - set(open_still)
        for sql, listed in ((SETTLED, settled), (LOOKED, open_still)):
            if listed:
                chosen = [json.dumps(list(identity)) for identity in listed]
                execute(self.connection, sql.format(of=of), {**values, "identities": chosen})
        return len(settled)

    def note(self, claim: UnitClaim, kind: str, seen: Seen, detail: str | None = None) -> None:
        """Writes a discrepancy down, once: a row and its entry may have one identity but different texts."""
        entry = self.job.entry
        identity = list(seen.identity)
        ours = seen.ours
        twice = False
        if ours is not None:
            ours = [*ours[: self.both.position], identity[self.both.position], *ours[self.both.position :]]
            identity = ours[: entry.identity]
            twice = seen.theirs is not None and seen.theirs[: entry.identity] != identity
        positions = [i for i in entry.identity_positions if entry.columns[i].primary_key]
        found = {
            "verification_id": self.verify_job.verification_id,
            "unit_id": claim.id,
            "kind": kind,
            "key": to_json(identity[: entry.key]),
            "primary_key": to_json([identity[i] for i in positions]),
            "source_values": None if ours is None else to_json(ours),
            "entry_values": None if seen.theirs is None else to_json(seen.theirs),
            "detail": detail,
        }
        if twice and execute(self.connection, SAME_FOUND, found).scalar_one():
            return
        execute(self.connection, NOTE, found)

    def _find_doubled(self, claim: UnitClaim, suspects: set[Identity]) -> None:
        """Records entries that the heaps have twice, or where no look-up finds them. A repair uses look-ups, so it
        can't repair these."""
        entry = self.job.entry
        remedy = damage.remedy_of_entries(self.job.run.index)
        if not suspects:
            return
        values: dict[str, Any] = {}
        execute(self.connection, damage.WITHOUT_INDEX)
        listed = sorted(suspects, key=str)[: damage.MOST_NAMED]
        query = (
            f"SELECT s.n, count(*) AS entries FROM ({identities(entry, listed, values)}) s "
            f"JOIN {physical.base(self.job.generation_id)} b ON {entry.equal('b.', 's.')} "
            "GROUP BY s.n HAVING count(*) > 1"
        )
        for row in execute(self.connection, query, values).all():
            said = f"{row.entries} entries of this key and primary key, read without an index. {remedy}"
            self.note(claim, "damaged", Seen(listed[int(row.n) - 1], Verdict.EXTRA, None, None), said)
