"""Verifies an index over shards: sums in the shards and on the index server, then a look at the differences.

The sides share no snapshot. Sums that differ make buckets suspicious. Only of these, identities and hashes come over
the network (`suspects.py`), and entries that differ are looked at on both sides at once (`judge.py`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.feeds import IS_AWAY
from airflow_roir.engine.verify import damage, hashes
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, VerifyJob
from airflow_roir.engine.verify.sums import NO_SUMS
from airflow_roir.engine.verify.worker import UNITS, VerifyWorker
from airflow_roir.shards.unique.held_keys import HeldKeys
from airflow_roir.shards.verify import repair, sums
from airflow_roir.shards.verify.both_sides import BothSides
from airflow_roir.shards.verify.judge import Judge
from airflow_roir.shards.verify.sessions import InShard, ShardAway
from airflow_roir.shards.verify.suspects import Suspects

# The time that a worker waits if only units of unreachable shards are left.
AWAY_REST_S = 1.0

AWAY = f"""
SELECT s.name, s.problem FROM roir.verification_unit u JOIN roir.feed l ON l.id = u.feed_id
  JOIN roir.shard s ON s.id = l.shard_id
 WHERE u.verification_id = %(verification)s AND (NOT u.done OR u.claim_epoch IS NOT NULL)
   AND {IS_AWAY} ORDER BY s.name
"""
OF_FEED = "verification_id = %(verification)s AND feed_id IS NOT DISTINCT FROM %(feed)s"


class ApartWorker(VerifyWorker):
    """A worker of a verification of an index over shards."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int, database: Database) -> None:
        super().__init__(connection, verify_job, worker)
        self.both = BothSides(connection, verify_job, self.reading, database)
        self.suspects = Suspects(self.both)
        self.judge = Judge(self.both, worker)
        self.held = HeldKeys(self.both, self.judge)

    def close(self) -> None:
        """Ends all sessions in shards."""
        super().close()
        self.both.sessions.close()

    def claim(self) -> UnitClaim | Stop:
        """As other workers; if only units of unreachable shards are left, reports that and waits a little."""
        found = super().claim()
        if isinstance(found, Stop) and found.reason == "done":
            with self.connection.begin():
                away = execute(self.connection, AWAY, {"verification": self.verify_job.verification_id}).all()
                run = self.job.run
                line = (
                    f"waiting for shard {', '.join(quote(one.name) for one in away)}: {away[0].problem}"
                    if away
                    else None
                )
                sign_of_life.note_wait(self.connection, run.operation_id, run.epoch, line)
            if away:
                time.sleep(AWAY_REST_S)
        return found

    def repair(self, claim: UnitClaim) -> bool:
        """Repairs a compared unit, by the shards; False if a pause came. Raises Fenced."""
        try:
            if not repair.Repairer(self.both, self.judge, claim).repair():
                return False
        except ShardAway:
            # It stays claimed: the next worker that claims it continues.
            return True
        with self.connection.begin():
            if not UNITS.release(self.connection, self.job.run, claim):
                raise UNITS.fenced(self.job.run, self.worker, claim)
        return True

    def _unit(self, claim: UnitClaim) -> UnitMetrics:
        begun = time.monotonic()
        try:
            if claim.stage == "whole":
                return self._judged(claim, begun, OF_FEED)
            if claim.side in ("tree", "reach"):
                return super()._unit(claim)
            is_part = claim.stage == "check" and self.verify_job.options.is_partial
            if claim.side == "entry" and (claim.stage == "total" or is_part):
                self.held.look(claim)
            if is_part:
                self.suspects.of_part(claim)
                return self._judged(claim, begun, "unit_id = %(unit)s")
            if claim.stage == "check":
                rows = self.suspects.of_buckets(claim, partial(self._end, claim, begun))
            else:
                summed = self._sums(claim)
                with self.connection.begin():
                    rows = self._commit(claim, summed, begun)
            return UnitMetrics(self.worker, claim.ordinal, rows, time.monotonic() - begun)
        except ShardAway:
            with self.connection.begin():
                UNITS.release(self.connection, self.job.run, claim)
            return UnitMetrics(self.worker, claim.ordinal, 0, time.monotonic() - begun)

    def _end(self, claim: UnitClaim, begun: float, rows: int, to_repair: bool = False) -> int:
        return self._commit(claim, {**NO_SUMS, "rows": rows}, begun, to_repair)

    def _judged(self, claim: UnitClaim, begun: float, of: str) -> UnitMetrics:
        looked_at, found = self.judge.decide(claim, of, partial(self._end, claim, begun))
        return UnitMetrics(self.worker, claim.ordinal, looked_at, time.monotonic() - begun, found)

    def _sums(self, claim: UnitClaim) -> dict[str, Any]:
        buckets = None if claim.stage == "total" else self.verify_job.buckets
        if claim.side == "source":
            found = self.both.sessions.read(self.both.by_id[claim.feed_id or 0], claim, partial(self._summed, buckets))
            return NO_SUMS if found is None else found
        with self.connection.begin():
            name = self.reading.hold(claim)
            if name is None:
                return NO_SUMS
            where, place, _ = self.both.of_entries(claim)
            execute(self.connection, damage.WITHOUT_INDEX)
            read = self.both.read()
            grouped = place if buckets is None else sums.bucket(self.both.plain, read, self.both.utf8, buckets, place)
            sql = hashes.summed(f"{name} r", where, sums.row_hash(self.both.plain, read, self.both.utf8), grouped)
            row = execute(self.connection, sql).one()
            return {**row._mapping, "snapshot": None}

    def _summed(
        self, buckets: int | None, one: InShard, name: str, where: str, values: dict[str, Any]
    ) -> dict[str, Any]:
        assert one.entry is not None
        read = hashes.of_source(one.entry, "r")
        place = str(self.both.feeds.index(self.both.by_id[one.feed.id]))
        grouped = f"({place})" if buckets is None else sums.bucket(one.entry, read, one.utf8, buckets, place)
        sql = hashes.summed(f"{name} r", where, sums.row_hash(one.entry, read, one.utf8), grouped)
        return {**execute(one.connection, sql, values).one()._mapping, "snapshot": None}
