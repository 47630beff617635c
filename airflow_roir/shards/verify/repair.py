"""Repairs an index over shards: touches entries in their shards, and lets shipping repair them.

So a repair is as right as shipping. Only entries of shards that the index doesn't have any more, and of tables that
were dropped, are deleted here: no shipper looks at those.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import quote
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.control.run import read_control
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.operation import Status
from airflow_roir.options import VerifyOptions
from airflow_roir.shards.announce import announce
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import Feed
from airflow_roir.shards.unique import holders
from airflow_roir.shards.verify.both_sides import BothSides
from airflow_roir.shards.verify.judge import Judge
from airflow_roir.shards.verify.recheck import Identity, Verdict, identities

# Touched, looked at and settled together.
AT_ONCE = 200
# The time between two looks at shipping's progress, and the longest wait since the last progress.
EVERY_S, PATIENCE_S = 0.2, 60.0
# The most looks at an entry that is on its way again.
LOOKS = 50

OPEN = """
SELECT id, key, primary_key FROM roir.discrepancy
 WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND outcome IS NULL
   AND kind IN ('missing', 'extra', 'different') AND id > %(after)s ORDER BY id LIMIT %(limit)s
"""
OUTCOME = """
UPDATE roir.discrepancy SET outcome = 'repaired', repaired_at = clock_timestamp()
 WHERE id = ANY (%(ids)s) AND outcome IS NULL
"""
# A pass that began after this has seen all earlier touches.
NOW = "SELECT clock_timestamp()"
FRESH = "SELECT fresh_at, fresh_at > %(touched)s AS passed FROM roir.feed WHERE id = %(feed)s"
# Ends the doubt about feeds whose entries were all compared and repaired since. Compare-and-set: a later doubt stays.
TRUST = """
UPDATE roir.feed l SET doubtful_at = NULL, doubt = NULL
  FROM roir.shard s
 WHERE s.id = l.shard_id AND l.generation_id = %(generation)s AND l.doubtful_at < %(since)s AND l.removed_at IS NULL
RETURNING s.name
"""


class Repairer:
    """Repairs the discrepancies of one unit."""

    def __init__(self, both: BothSides, judge: Judge, claim: UnitClaim) -> None:
        self.both = both
        self.judge = judge
        self.claim = claim
        self.connection = both.connection
        self.job = both.job

    def repair(self) -> bool:
        """Repairs the unit; False if a pause came. An entry that can't be repaired now gets no outcome. Raises
        ShardAway."""
        touched: dict[int, Any] = {}
        for batch in self._batches():
            if not self._is_running():
                return False
            for feed, part in self._by_feed(batch).items():
                if self._touch(feed, part):
                    with self.connection.begin():
                        touched[feed.id] = execute(self.connection, NOW).scalar_one()
        for feed_id, moment in touched.items():
            if not self._await_pass(self.both.by_id[feed_id], moment):
                return False
        for batch in self._batches():
            if not self._is_running():
                return False
            self._settle(batch)
        return True

    def _batches(self) -> Iterator[list[Row[Any]]]:
        values = {
            "verification": self.both.verify_job.verification_id,
            "unit": self.claim.id,
            "after": 0,
            "limit": AT_ONCE,
        }
        while True:
            with self.connection.begin():
                batch = list(execute(self.connection, OPEN, values).all())
            if not batch:
                return
            yield batch
            values["after"] = batch[-1].id

    def _is_running(self) -> bool:
        with self.connection.begin():
            return bool(read_control(self.connection, self.job.run).status == Status.RUNNING)

    def _identity(self, row: Row[Any]) -> Identity:
        entry = self.job.entry
        keys = [i for i in entry.identity_positions if entry.columns[i].primary_key]
        rest = dict(zip(keys, row.primary_key, strict=True))
        return tuple(row.key[i] if i < entry.key else rest[i] for i in entry.identity_positions)

    def _by_feed(self, batch: list[Row[Any]]) -> dict[Feed, list[Identity]]:
        found: dict[Feed, list[Identity]] = {}
        names = {feed.shard.name: feed for feed in self.both.feeds}
        strangers = []
        for row in batch:
            identity = self._identity(row)
            feed = names.get(identity[self.both.position] or "")
            if feed is None or feed.id not in self.both.live:
                strangers.append(identity)
            else:
                found.setdefault(feed, []).append(identity)
        if strangers:
            self._delete(strangers, None)
        return found

    def _touch(self, feed: Feed, wanted: list[Identity]) -> bool:
        """Touches entries in their shard; if their table was dropped, deletes them and returns False."""
        one = self.both.sessions.of(feed)
        if one.entry is None:
            self._delete(wanted, feed)
            return False
        sides = self.both.of_feed(one)
        values: dict[str, Any] = {}
        listed = identities(one.entry, [tuple(sides.here(identity)) for identity in wanted], values)
        columns = ", ".join(one.entry.physical(one.entry.identity_positions, prefix="s."))
        # One that is there twice would be touched twice by one statement.
        rows = f"SELECT DISTINCT ON ({columns}) {columns} FROM ({listed}) s ORDER BY {columns}"
        with self.both.sessions.reaching(feed), one.connection.begin():
            announce.nothing_to_announce(one.connection, feed.outbox)
            execute(one.connection, outbox.touch(feed.outbox, one.entry, rows), values)
        return True

    def _delete(self, wanted: list[Identity], feed: Feed | None) -> None:
        entry = self.job.entry
        base = physical.base(self.job.generation_id)
        values: dict[str, Any] = {}
        listed = identities(entry, wanted, values)
        with self.connection.begin():
            if feed is not None:
                # Waits for a poll that is being applied.
                execute(self.connection, "SELECT FROM roir.feed WHERE id = %(feed)s FOR UPDATE", {"feed": feed.id})
            gone = f"DELETE FROM {base} b USING ({listed}) s WHERE {entry.equal('b.', 's.')} RETURNING b::text"
            texts = list(execute(self.connection, gone, values).scalars())
            holders.follow(self.connection, self.job.generation_id, self.job.run.owner, gone=texts)

    def _await_pass(self, feed: Feed, touched: Any) -> bool:
        """Waits for a pass that began after a touch, for as long as shipping is seen at work; False if a pause came."""
        run = self.job.run
        last, patient_until = None, time.monotonic() + PATIENCE_S
        line: str | None = f"waiting for shard {quote(feed.shard.name)} to be shipped: roir ship"
        while time.monotonic() < patient_until:
            with self.connection.begin():
                if read_control(self.connection, run).status != Status.RUNNING:
                    return False
                found = execute(self.connection, FRESH, {"feed": feed.id, "touched": touched}).one()
                sign_of_life.note_wait(self.connection, run.operation_id, run.epoch, None if found.passed else line)
            if found.passed:
                return True
            if found.fresh_at != last:
                last, patient_until = found.fresh_at, time.monotonic() + PATIENCE_S
            time.sleep(EVERY_S)
        return True

    def _settle(self, batch: list[Row[Any]]) -> None:
        """Looks again. An entry that is written all the time was shipped since, and so will be each later write."""
        by_identity = {self._identity(row): row.id for row in batch}
        for _ in range(LOOKS):
            seen = self.judge.look(list(by_identity))
            right = [one.identity for one in seen if one.verdict == Verdict.EQUAL]
            ids = [by_identity.pop(identity) for identity in right]
            with self.connection.begin():
                execute(self.connection, OUTCOME, {"ids": ids})
            if not any(one.verdict == Verdict.UNDECIDED for one in seen):
                return
            time.sleep(EVERY_S)


def trust(connection: Connection, verification: Row[Any]) -> list[str]:
    """Ends doubts that are older than a whole verification, if that has repaired all that it found.

    verification: as it ended.
    """
    options = VerifyOptions(**verification.options)
    if not options.repair or options.is_partial or verification.mode == "after":
        return []
    values = {"generation": verification.generation_id, "since": verification.started_at}
    return list(execute(connection, TRUST, values).scalars())
