"""Verifies an index apart from its source: sums in the shards and on the index server, then a look at what differs.

The sides share no snapshot. Sums that differ make buckets suspicious; of these, and of no others, identities and hashes
come over the network, and what they don't agree about is looked at on both sides at once (`look.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, insert
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine import generation as physical
from airflow_roir.engine import operations, tables
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.database import Database, bound, execute
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.limits import limits_of
from airflow_roir.engine.run import read_control
from airflow_roir.engine.shards import home, outbox, repair, sources, sums
from airflow_roir.engine.shards.look import Identity, Seen, Sides, Verdict, identities, look, look_locked
from airflow_roir.engine.shards.shard import SHARD_SCHEMA, Lane, lanes_of, set_away, set_reached
from airflow_roir.engine.shards.units import live_lanes
from airflow_roir.engine.source import Source
from airflow_roir.engine.trouble import reason_of, trouble_of
from airflow_roir.engine.verify import comparison, damage
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, VerifyJob
from airflow_roir.engine.verify.sums import NO_SUMS
from airflow_roir.engine.verify.worker import UNITS, VerifyWorker
from airflow_roir.errors import NotFound, SourceChanged
from airflow_roir.operation import Status
from airflow_roir.scan_range import ScanRange

# Looked at in one statement on each side; under the lane's lock fewer.
AT_ONCE, AT_ONCE_LOCKED = 200, 20
# What is on its way is looked at again after so long, so often. Then it is left: whatever ships it writes it anew.
REST_S, MOST_LOOKS = 0.5, 20
# How long a worker waits where all that is left is of shards that can't be reached.
AWAY_REST_S = 1.0
# Rows that a session takes from a shard at once.
FETCHED = 2_000

SUSPECT = """
INSERT INTO roir.suspect (verification_id, unit_id, lane_id, of_source, identity, hash)
SELECT %(verification)s, %(unit)s, %(lane)s, true, x.identity::jsonb, x.hash
  FROM unnest(%(identities)s::text[], %(hashes)s::bigint[]) AS x (identity, hash)
"""
# What both sides have alike is no suspect.
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
       bool_or(lane_id IS NULL) AS unplaced
  FROM roir.suspect WHERE {of} AND identity IN (SELECT f.identity FROM first f)
 GROUP BY identity ORDER BY min(looks), min(id)
"""
SETTLED = "DELETE FROM roir.suspect WHERE {of} AND identity = ANY (%(identities)s::jsonb[])"
LOOKED = "UPDATE roir.suspect SET looks = looks + 1 WHERE {of} AND identity = ANY (%(identities)s::jsonb[])"
SAME_FOUND = """
SELECT EXISTS (SELECT FROM roir.discrepancy WHERE verification_id = %(verification_id)s AND kind = %(kind)s
                  AND key = %(key)s::jsonb AND primary_key = %(primary_key)s::jsonb)
"""
COUNT_FOUND = "SELECT count(*) FROM roir.discrepancy WHERE verification_id = %(verification)s AND unit_id = %(unit)s"
AWAY = """
SELECT s.name, s.problem FROM roir.verification_unit u JOIN roir.lane l ON l.id = u.lane_id
  JOIN roir.shard s ON s.id = l.shard_id
 WHERE u.verification_id = %(verification)s AND (NOT u.done OR u.claim_epoch IS NOT NULL)
   AND s.away_until > clock_timestamp() ORDER BY s.name
"""
# Under the lock: to read what somebody else owns is to run his code.
OWNERS = f"SELECT {SHARD_SCHEMA}.check_owners(%(outbox)s)"
CONSTRAINT = "SELECT pg_get_partition_constraintdef(%(relation)s::oid)"


OF_LANE = "verification_id = %(verification)s AND lane_id = %(lane)s"
OF_NO_LANE = "verification_id = %(verification)s AND lane_id IS NULL"


class ShardAway(Exception):
    """A shard can't be reached now."""


def batched(listed: Sequence[Identity], most: int) -> Iterator[Sequence[Identity]]:
    """In parts of this many at the most."""
    for first in range(0, len(listed), most):
        yield listed[first : first + most]


@dataclass
class InShard:
    """A session in a shard, and what its lane is there. entry, source: None if the table was dropped."""

    connection: Connection
    lane: Lane
    source: Source | None
    entry: Entry | None
    utf8: bool


class ApartWorker(VerifyWorker):
    """A worker of a verification of an index apart from its source."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int, database: Database) -> None:
        super().__init__(connection, verify_job, worker)
        self.database = database
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
        self._shards: dict[int, InShard] = {}

    # -- sessions

    def shard(self, lane: Lane) -> InShard:
        """A session in a lane's shard, which is kept. Raises ShardAway, which is written down, and SourceChanged."""
        if lane.id in self._shards:
            return self._shards[lane.id]
        with self.reaching(lane):
            database = lane.shard.database(self.database.application_name, self.database.limits)
            connection = database.engine.connect()
            try:
                with connection.begin():
                    home.check(connection, lane.shard)
                    entry = outbox.read_entry(connection, lane.outbox)
                    try:
                        source = sources.read_by_oid(connection, lane)
                    except NotFound:
                        source = None
                if source is None:
                    entry = None
                elif entry is None:
                    raise SourceChanged(
                        f"index {self.job.run.index}: the capture of shard {quote(lane.shard.name)} is gone; rebuild "
                        "the index"
                    )
                else:
                    entry = sums.followed(entry, source)
            except BaseException:
                connection.close()
                raise
            found = InShard(connection, lane, source, entry, sums.is_utf8(connection))
        with self.connection.begin():
            set_reached(self.connection, lane.shard.id)
        self._shards[lane.id] = found
        return found

    @contextmanager
    def reaching(self, lane: Lane) -> Iterator[None]:
        """Around what asks a shard: if it can't be reached that is written down. Raises ShardAway."""
        try:
            yield
        except DBAPIError as error:
            held = self._shards.get(lane.id)
            # An error of the index server, or a lock that somebody holds, is another matter.
            if trouble_of(error) is None or not (held is None or held.connection.invalidated):
                raise
            self._forget(lane)
            with self.connection.begin():
                set_away(self.connection, lane.shard.id, reason_of(error))
            raise ShardAway(lane.shard.name) from error

    def _forget(self, lane: Lane) -> None:
        found = self._shards.pop(lane.id, None)
        if found is not None:
            found.connection.invalidate()
            found.connection.close()

    def close(self) -> None:
        """Let go of all sessions in shards."""
        super().close()
        for found in self._shards.values():
            found.connection.close()
        self._shards.clear()

    # -- units

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
                return self._judged(
                    claim, begun, "verification_id = %(verification)s AND lane_id IS NOT DISTINCT FROM %(lane)s"
                )
            if claim.side in ("tree", "reach"):
                return super()._unit(claim)
            if claim.stage == "check" and self.verify_job.options.is_partial:
                self._suspects_of_part(claim)
                return self._judged(claim, begun, "unit_id = %(unit)s")
            if claim.stage == "check":
                rows = self._suspects(claim, begun)
            else:
                summed = self._sums(claim)
                with self.connection.begin():
                    rows = self._commit(claim, summed, begun)
            return UnitMetrics(self.worker, claim.ordinal, rows, time.monotonic() - begun)
        except ShardAway:
            with self.connection.begin():
                UNITS.release(self.connection, self.job.run, claim)
            return UnitMetrics(self.worker, claim.ordinal, 0, time.monotonic() - begun)

    def _sums(self, claim: UnitClaim) -> dict[str, Any]:
        buckets = None if claim.stage == "total" else self.verify_job.buckets
        if claim.side == "source":
            found = self._in_shard(claim, partial(self._summed, buckets))
            return NO_SUMS if found is None else found
        with self.connection.begin():
            name = self.reading.hold(claim)
            if name is None:
                return NO_SUMS
            where, place, _ = self._of_entries(claim)
            execute(self.connection, damage.WITHOUT_INDEX)
            read = self._read()
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

    def _read(self) -> list[str]:
        """The entry's columns but the shard's, of alias `r`."""
        return [name for i, name in enumerate(self.job.entry.physical(prefix="r.")) if i != self.position]

    def _of_entries(self, claim: UnitClaim) -> tuple[str, str, str]:
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

    def _in_shard(
        self, claim: UnitClaim, read: Callable[[InShard, str, str, dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Read a piece of a shard's table there; None if it is gone."""
        assert claim.lane_id is not None
        lane = self.by_id[claim.lane_id]
        one = self.shard(lane)
        with self.reaching(lane), one.connection.begin():
            name = self._hold(one, claim)
            if name is None or one.source is None:
                return None
            values: dict[str, Any] = {}
            where = ScanRange(claim.lower, claim.upper).condition(
                one.source.primary_key, one.source.comparands, None, values
            )
            if values:
                execute(one.connection, "SET LOCAL enable_seqscan = off")
            return read(one, name, where, values)

    def _hold(self, one: InShard, claim: UnitClaim) -> str | None:
        if one.source is None:
            return None
        path = ", ".join(["pg_catalog", *map(quote, one.source.operator_schemas), "pg_temp"])
        execute(
            one.connection,
            f"SET LOCAL lock_timeout = {limits_of(one.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        there = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid = %(relation)s"
        name: str | None = execute(one.connection, there, {"relation": claim.relation}).scalar()
        if name is None or not self.locked(one.connection, name):
            return None
        execute(one.connection, OWNERS, {"outbox": one.lane.outbox})
        after = execute(one.connection, there, {"relation": claim.relation}).scalar()
        return name if name == after else None

    @staticmethod
    def locked(connection: Connection, name: str) -> bool:
        """Lock a leaf by its name; False if it doesn't have that name any more."""
        try:
            with connection.begin_nested():
                execute(connection, f"LOCK TABLE {name} IN ACCESS SHARE MODE")
            return True
        except DBAPIError as error:
            if trouble_of(error) is not None:
                raise
            return False

    # -- suspects

    def _suspects(self, claim: UnitClaim, begun: float) -> int:
        """Write down identities and hashes of the suspicious buckets."""
        suspicious = self.verify_job.suspicious or ()
        buckets = self.verify_job.buckets
        if claim.side == "source":
            place = self.lanes.index(self.by_id[claim.lane_id or 0])
            mine = [one for one in suspicious if one // sums.MOST_BUCKETS == place]

            def read(one: InShard, name: str, where: str, values: dict[str, Any]) -> dict[str, Any]:
                assert one.entry is not None
                bucket = sums.bucket(one.entry, comparison.of_source(one.entry, "r"), one.utf8, buckets, str(place))
                chosen = f"{where} AND {bucket} = ANY ('{{{','.join(map(str, mine))}}}'::int[])"
                with self.connection.begin():
                    rows = self._spool(claim, one, name, chosen, values)
                    return {"rows": self._commit(claim, {**NO_SUMS, "rows": rows}, begun)}

            found = self._in_shard(claim, read)
            if found is not None:
                return int(found["rows"])
            with self.connection.begin():
                return self._commit(claim, NO_SUMS, begun)
        with self.connection.begin():
            name = self.reading.hold(claim)
            rows = 0
            if name is not None:
                where, place_of, lane = self._of_entries(claim)
                bucket = sums.bucket(self.plain, self._read(), self.utf8, buckets, place_of)
                chosen = f"{where} AND {bucket} = ANY ('{{{','.join(map(str, suspicious))}}}'::int[])"
                execute(self.connection, damage.WITHOUT_INDEX)
                rows = self._spool_entries(claim, name, chosen, lane)
            return self._commit(claim, {**NO_SUMS, "rows": rows}, begun)

    def _suspects_of_part(self, claim: UnitClaim) -> None:
        """All of a part is looked at: identities of one side, none of the other."""
        values = {"unit": claim.id}
        with self.connection.begin():
            execute(self.connection, "DELETE FROM roir.suspect WHERE unit_id = %(unit)s", values)
        if claim.side == "source":

            def read(one: InShard, name: str, where: str, values: dict[str, Any]) -> dict[str, Any]:
                with self.connection.begin():
                    return {"rows": self._spool(claim, one, name, where, values)}

            self._in_shard(claim, read)
            return
        with self.connection.begin():
            name = self.reading.hold(claim)
            if name is not None:
                where, _, lane = self._of_entries(claim)
                self._spool_entries(claim, name, where, lane)

    def _spool(self, claim: UnitClaim, one: InShard, name: str, where: str, values: dict[str, Any]) -> int:
        assert one.entry is not None
        read = comparison.of_source(one.entry, "r")
        texts = [comparison.text(one.entry.columns[i], read[i]) for i in one.entry.identity_positions]
        hashed = sums.row_hash(one.entry, read, one.utf8)
        sql = f"SELECT ARRAY[{', '.join(texts)}]::text[] AS identity, {hashed} AS hash FROM {name} r WHERE {where}"
        rows = 0
        sides = self.sides(one)
        streaming = {"no_parameters": True, "stream_results": True, "max_row_buffer": FETCHED}
        read_on = one.connection.exec_driver_sql(bound(one.connection, sql, values), execution_options=streaming)
        for part in read_on.partitions(FETCHED):
            found = {
                "verification": self.verify_job.verification_id,
                "unit": claim.id,
                "lane": one.lane.id,
                "identities": [json.dumps(sides.there(row.identity)) for row in part],
                "hashes": [row.hash for row in part],
            }
            execute(self.connection, SUSPECT, found)
            rows += len(part)
        return rows

    def _spool_entries(self, claim: UnitClaim, name: str, where: str, lane: str) -> int:
        entry = self.job.entry
        texts = [comparison.text(entry.columns[i], f"r.c{i + 1}") for i in entry.identity_positions]
        hashed = sums.row_hash(self.plain, self._read(), self.utf8)
        sql = (
            "INSERT INTO roir.suspect (verification_id, unit_id, lane_id, of_source, identity, hash) "
            f"SELECT {self.verify_job.verification_id}, {claim.id}, {lane}, false, "
            f"to_jsonb(ARRAY[{', '.join(texts)}]::text[]), {hashed} FROM {name} r WHERE {where}"
        )
        return execute(self.connection, sql).rowcount

    # -- looks

    def sides(self, one: InShard) -> Sides:
        """Both sides of the entries of a lane."""
        return Sides(self.job.generation_id, self.job.entry, self.position, one.lane, one.entry)

    def _judged(self, claim: UnitClaim, begun: float, of: str) -> UnitMetrics:
        """Look at the suspects until nothing about them is open, then end the unit."""
        values = {"verification": self.verify_job.verification_id, "unit": claim.id, "lane": claim.lane_id}
        if claim.stage == "whole":
            with self.connection.begin():
                execute(self.connection, AGREED.format(of=of), values)
        looked_at, round_of_looks, twice = 0, 0, set[Identity]()
        while True:
            with self.connection.begin():
                if read_control(self.connection, self.job.run).status != Status.RUNNING:
                    # Where it stands is written down.
                    UNITS.release(self.connection, self.job.run, claim)
                    return UnitMetrics(self.worker, claim.ordinal, 0, time.monotonic() - begun)
                batch = execute(self.connection, NEXT.format(of=of), {**values, "limit": AT_ONCE}).all()
            if not batch:
                break
            if batch[0].looks > round_of_looks:
                round_of_looks = batch[0].looks
                time.sleep(REST_S)
            names = {lane.shard.name for lane in self.lanes}
            misplaced = {one for row in batch if row.unplaced and (one := tuple(row.identity))[self.position] in names}
            seen = self.look([one for row in batch if (one := tuple(row.identity)) not in misplaced])
            twice |= {tuple(row.identity) for row in batch if row.entries > 1} - misplaced
            with self.connection.begin():
                looked_at += self._write_down(claim, of, values, seen, misplaced, round_of_looks)
        with self.connection.begin():
            self._find_doubled(claim, twice)
            found = int(execute(self.connection, COUNT_FOUND, values).scalar_one())
            to_repair = found > 0 and self.verify_job.options.repair
            rows = looked_at if self.verify_job.options.is_partial else 0
            self._commit(claim, {**NO_SUMS, "rows": rows}, begun, to_repair)
        return UnitMetrics(self.worker, claim.ordinal, looked_at, time.monotonic() - begun, found)

    def look(self, wanted: Sequence[Identity]) -> list[Seen]:
        """Look at entries, of whichever lanes. Raises ShardAway."""
        by_lane: dict[Lane | None, list[Identity]] = {}
        names = {lane.shard.name: lane for lane in self.lanes}
        for identity in wanted:
            by_lane.setdefault(names.get(identity[self.position] or ""), []).append(identity)
        seen: list[Seen] = []
        for lane, part in by_lane.items():
            if lane is None or lane.id not in self.live:
                # Of no shard that the index has.
                sides = Sides(self.job.generation_id, self.job.entry, self.position, lane or self.lanes[0], None)
                seen += look(self.connection, None, sides, part)
                continue
            one = self.shard(lane)
            with self.reaching(lane):
                found = look(self.connection, one.connection, self.sides(one), part)
                seen += [this for this in found if this.verdict != Verdict.BUSY]
                busy = [this.identity for this in found if this.verdict == Verdict.BUSY]
                for some in batched(busy, AT_ONCE_LOCKED):
                    seen += look_locked(self.connection, one.connection, self.sides(one), some)
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
        """Keep what a look has decided; how many that are."""
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
        """Write a discrepancy down, once: a row and its entry may be of one identity, and look different."""
        entry = self.job.entry
        identity = list(seen.identity)
        ours = seen.ours
        twice = False
        if ours is not None:
            ours = [*ours[: self.position], identity[self.position], *ours[self.position :]]
            identity = ours[: entry.identity]
            twice = seen.theirs is not None and seen.theirs[: entry.identity] != identity
        positions = [i for i in entry.identity_positions if entry.columns[i].primary_key]
        found = {
            "verification_id": self.verify_job.verification_id,
            "unit_id": claim.id,
            "kind": kind,
            "key": identity[: entry.key],
            "primary_key": [identity[i] for i in positions],
        }
        if twice:
            same = {name: json.dumps(one) if isinstance(one, list) else one for name, one in found.items()}
            if execute(self.connection, SAME_FOUND, same).scalar_one():
                return
        values = {"source_values": ours, "entry_values": seen.theirs, "detail": detail}
        self.connection.execute(insert(tables.discrepancy).values(**found, **values))

    def _find_doubled(self, claim: UnitClaim, suspects: set[Identity]) -> None:
        """What the heaps have twice, or where no lookup finds it, is damage: a repair by lookups can't repair it."""
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


def worker_of(database: Database, connection: Connection, verify_job: VerifyJob, worker: int) -> VerifyWorker:
    """The worker that a verification needs."""
    if verify_job.shard_column is None:
        return VerifyWorker(connection, verify_job, worker)
    return ApartWorker(connection, verify_job, worker, database)
