"""Verifies an index apart from its source: sums in the shards and on the index server, then a look at what differs.

The sides share no snapshot. Sums that differ make buckets suspicious; of these, and of no others, identities and hashes
come over the network (`suspects.py`), and what they don't agree about is looked at on both sides at once (`judge.py`).
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine import operations
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.shards import repair, sums
from airflow_roir.engine.shards.held_keys import HeldKeys
from airflow_roir.engine.shards.judge import Judge
from airflow_roir.engine.shards.look import Sides
from airflow_roir.engine.shards.sessions import InShard, Sessions, ShardAway
from airflow_roir.engine.shards.shard import IS_AWAY, lanes_of
from airflow_roir.engine.shards.suspects import Suspects
from airflow_roir.engine.shards.units import live_lanes
from airflow_roir.engine.verify import comparison, damage
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, VerifyJob
from airflow_roir.engine.verify.sums import NO_SUMS
from airflow_roir.engine.verify.worker import UNITS, VerifyWorker

# How long a worker waits where all that is left is of shards that can't be reached.
AWAY_REST_S = 1.0

AWAY = f"""
SELECT s.name, s.problem FROM roir.verification_unit u JOIN roir.lane l ON l.id = u.lane_id
  JOIN roir.shard s ON s.id = l.shard_id
 WHERE u.verification_id = %(verification)s AND (NOT u.done OR u.claim_epoch IS NOT NULL)
   AND {IS_AWAY} ORDER BY s.name
"""
OF_LANE = "verification_id = %(verification)s AND lane_id IS NOT DISTINCT FROM %(lane)s"
CONSTRAINT = "SELECT pg_get_partition_constraintdef(%(relation)s::oid)"


class ApartWorker(VerifyWorker):
    """A worker of a verification of an index apart from its source."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int, database: Database) -> None:
        super().__init__(connection, verify_job, worker)
        self.utf8 = sums.is_utf8(connection)
        with connection.begin():
            lanes = lanes_of(connection, self.job.generation_id)
            self.live = {lane.id for lane in live_lanes(connection, self.job.generation_id)}
        # By id: the places of buckets.
        self.lanes = sorted(lanes, key=lambda lane: lane.id)
        self.by_id = {lane.id: lane for lane in lanes}
        self.position = next(
            i for i, column in enumerate(self.job.entry.columns) if column.source == verify_job.shard_column
        )
        # As a shard has them, but for their physical names.
        self.plain = sums.without(self.job.entry, self.position)
        self.sessions = Sessions(connection, database, self.job)
        self.suspects = Suspects(self)
        self.judge = Judge(self)
        self.held = HeldKeys(self)

    def close(self) -> None:
        """Let go of all sessions in shards."""
        super().close()
        self.sessions.close()

    def claim(self) -> UnitClaim | Stop:
        """As ever; where only units of shards that can't be reached are left, that is said, and waited a little."""
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
                operations.note_wait(self.connection, run.operation_id, run.epoch, line)
            if away:
                time.sleep(AWAY_REST_S)
        return found

    def mend(self, claim: UnitClaim) -> bool:
        """Repair what was found in a compared unit, by the shards; False if a pause came between. Raises Fenced."""
        try:
            if not repair.Mender(self, claim).mend():
                return False
        except ShardAway:
            # Still claimed: whoever claims it next goes on.
            return True
        with self.connection.begin():
            if not UNITS.release(self.connection, self.job.run, claim):
                raise UNITS.fenced(self.job.run, self.worker, claim)
        return True

    def _unit(self, claim: UnitClaim) -> UnitMetrics:
        begun = time.monotonic()
        try:
            if claim.stage == "whole":
                return self._judged(claim, begun, OF_LANE)
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
            found = self.sessions.read(self.by_id[claim.lane_id or 0], claim, partial(self._summed, buckets))
            return NO_SUMS if found is None else found
        with self.connection.begin():
            name = self.reading.hold(claim)
            if name is None:
                return NO_SUMS
            where, place, _ = self.of_entries(claim)
            execute(self.connection, damage.WITHOUT_INDEX)
            read = self.read()
            grouped = place if buckets is None else sums.bucket(self.plain, read, self.utf8, buckets, place)
            sql = sums.summed(f"{name} r", where, sums.row_hash(self.plain, read, self.utf8), grouped)
            row = execute(self.connection, sql).one()
            return {**row._mapping, "snapshot": None}

    def _summed(
        self, buckets: int | None, one: InShard, name: str, where: str, values: dict[str, Any]
    ) -> dict[str, Any]:
        assert one.entry is not None
        read = comparison.of_source(one.entry, "r")
        place = str(self.lanes.index(self.by_id[one.lane.id]))
        grouped = f"({place})" if buckets is None else sums.bucket(one.entry, read, one.utf8, buckets, place)
        sql = sums.summed(f"{name} r", where, sums.row_hash(one.entry, read, one.utf8), grouped)
        return {**execute(one.connection, sql, values).one()._mapping, "snapshot": None}

    def read(self) -> list[str]:
        """The entry's columns but the shard's, of alias `r`."""
        return [name for i, name in enumerate(self.job.entry.physical(prefix="r.")) if i != self.position]

    def of_entries(self, claim: UnitClaim) -> tuple[str, str, str]:
        """SQL: which entries are the unit's; the place of their lane; its id.

        An entry in a segment where no lookup finds it is of no lane.
        """
        terms = []
        for sign, block in ((">=", claim.lower), ("<", claim.upper)):
            if block is not None and block != [0]:
                terms.append(f"r.ctid {sign} '({int(block[0])},0)'::tid")
        belongs = execute(self.connection, CONSTRAINT, {"relation": claim.relation}).scalar() or "true"
        shard = f"r.c{self.position + 1}"
        names = {place: comparison.literal(lane.shard.name) for place, lane in enumerate(self.lanes)}
        places = " ".join(f"WHEN {name} THEN {place}" for place, name in names.items())
        ids = " ".join(f"WHEN {name} THEN {self.lanes[place].id}" for place, name in names.items())
        misplaced = f"CASE WHEN ({belongs}) IS FALSE THEN"
        return (
            " AND ".join(terms) or "true",
            # A bound may have braces: an array's.
            f"{misplaced} {len(names)} ELSE CASE {shard} {places} ELSE {len(names)} END END",
            f"{misplaced} NULL ELSE CASE {shard} {ids} END END",
        )

    def sides(self, one: InShard) -> Sides:
        """Both sides of the entries of a lane."""
        return Sides(self.job.generation_id, self.job.entry, self.position, one.lane, one.entry)


def worker_of(database: Database, connection: Connection, verify_job: VerifyJob, worker: int) -> VerifyWorker:
    """The worker that a verification needs."""
    if verify_job.shard_column is None:
        return VerifyWorker(connection, verify_job, worker)
    return ApartWorker(connection, verify_job, worker, database)
