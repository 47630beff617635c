"""Verifies the holders of an enforced unique index over shards: each key of an entry has its shard's, and no other.

This holds in every snapshot: a holder comes with the first intent, and goes with the last entry or intent.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Row

from airflow_roir.definition import argument, quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.source.files import cut, files_of
from airflow_roir.engine.verify import damage, hashes
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.shards.announce import intents
from airflow_roir.shards.unique import holders
from airflow_roir.shards.unique.holders import same, whole
from airflow_roir.shards.verify.both_sides import BothSides
from airflow_roir.shards.verify.judge import Judge
from airflow_roir.shards.verify.recheck import Seen, Verdict

# The blocks of holders that one transaction looks at.
BLOCKS = 1024
# If enforcing has ended meanwhile, polls have deleted entries and left their holders.
SINCE = "SELECT unique_from FROM roir.generation WHERE id = %(generation)s AND unique_mode = 'refuse'"
AGAIN = """
DELETE FROM roir.discrepancy WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND detail LIKE %(own)s
"""
# The beginning of our findings: by it those of a unit are deleted before another look.
OWN = "unique over shards: "
ENTRIES = """
SELECT ARRAY[{identity}]::text[] AS identity, h.{shard} AS holder
  FROM {entries} r LEFT JOIN {holder} h ON {key_h_r}
 WHERE {where} AND {whole_r} AND h.{shard} IS DISTINCT FROM r.{shard}
 LIMIT {most}
"""
ALONE = """
SELECT ARRAY[{key}]::text[] AS key, h.{shard} AS holder, h.ctid::text AS spot
  FROM {holder} h WHERE h.ctid >= %(first)s::tid AND h.ctid < %(last)s::tid
   AND NOT EXISTS (SELECT FROM {base} b WHERE {both_b_h}) AND NOT EXISTS (SELECT FROM {intent} i WHERE {both_i_h})
 LIMIT {most}
"""
REPAIRED = """
UPDATE roir.discrepancy SET outcome = 'repaired', repaired_at = clock_timestamp()
 WHERE verification_id = %(verification)s AND unit_id = %(unit)s AND detail LIKE %(own)s AND kind = 'damaged'
"""


class HeldKeys:
    """Looks at the holders of the entries that one unit compares."""

    def __init__(self, both: BothSides, judge: Judge) -> None:
        self.both = both
        self.judge = judge
        self.connection = both.connection
        self.generation_id = both.job.generation_id
        entry, shard = both.job.entry, both.position
        key_and_shard = [*entry.key_positions, shard]
        identity = [hashes.text(entry.columns[i], f"r.c{i + 1}") for i in entry.identity_positions]
        key = [hashes.text(entry.columns[i], f"h.c{i + 1}") for i in entry.key_positions]
        self._names = {
            "identity": ", ".join(identity),
            "key": ", ".join(key),
            "shard": f"c{shard + 1}",
            "holder": holders.table(self.generation_id),
            "base": physical.base(self.generation_id),
            "intent": intents.table(self.generation_id),
            "key_h_r": same(entry, entry.key_positions, "h.", "r."),
            "whole_r": whole(entry, "r."),
            "both_b_h": same(entry, key_and_shard, "b.", "h."),
            "both_i_h": same(entry, key_and_shard, "i.", "h."),
            "most": str(damage.MOST_NAMED),
        }

    def look(self, claim: UnitClaim) -> int:
        """Looks at a unit of entries, and with the first unit at all holders, too. Returns the number of findings."""
        with self.connection.begin():
            since = self._since()
            if since is None:
                return 0
            values = {"verification": self.both.verify_job.verification_id, "unit": claim.id, "own": f"{OWN}%"}
            execute(self.connection, AGAIN, values)
            found = self._entries(claim, since)
        if claim.relation == self._first() and claim.lower in (None, [0]):
            found += self._alone(claim, values, since)
        return found

    def _since(self) -> datetime | None:
        """The time since which keys are enforced; None if they aren't. A look only counts if this is the same before
        and after it."""
        found: datetime | None = execute(self.connection, SINCE, {"generation": self.generation_id}).scalar()
        return found

    def _first(self) -> int:
        query = "SELECT to_regclass(%(name)s)::oid::bigint"
        name = physical.segment(self.generation_id, physical.DEFAULT_SEGMENT)
        with self.connection.begin():
            return int(execute(self.connection, query, {"name": name}).scalar_one())

    def _entries(self, claim: UnitClaim, since: datetime) -> int:
        entries = self.both.reading.hold(claim)
        if entries is None:
            return 0
        where, _, _ = self.both.of_entries(claim)
        rows = execute(self.connection, ENTRIES.format(entries=entries, where=where, **self._names)).all()
        if self._since() != since:
            return 0
        again = f"roir announce {argument(self.both.job.run.index)} --by server"
        for row in rows:
            kind, said = "damaged", "the key of this entry has no holder, so that another shard may take it"
            if row.holder is not None:
                kind, said = "duplicate", f"shard {quote(row.holder)} has the key, too"
            self._note(claim, kind, row.identity, f"{OWN}{said}. Put it right, then: {again}")
        if rows:
            why = "a verification found entries whose keys are not their shard's (roir.discrepancy)"
            holders.end(self.connection, self.generation_id, why, self.both.job.run.owner)
        return len(rows)

    def _alone(self, claim: UnitClaim, values: dict[str, object], since: datetime) -> int:
        found = 0
        with self.connection.begin():
            query = "SELECT to_regclass(%(name)s)::oid::bigint"
            relation = execute(self.connection, query, {"name": holders.table(self.generation_id)}).scalar_one()
            stretches = list(cut(files_of(self.connection, [relation]), BLOCKS))
        for _, first, last in stretches:
            with self.connection.begin():
                bounds = {"first": f"({first},0)", "last": f"({last},0)"}
                rows = execute(self.connection, ALONE.format(**self._names), bounds).all()
                if self._since() != since:
                    return found
                for row in rows:
                    self._note_alone(claim, row)
                if rows and self.both.verify_job.options.repair:
                    holders.release(self.connection, self.generation_id, [row.spot for row in rows])
                    execute(self.connection, REPAIRED, values)
                found += len(rows)
        return found

    def _note_alone(self, claim: UnitClaim, row: Row[tuple[list[str], str, str]]) -> None:
        entry = self.both.job.entry
        identity: list[str | None] = [*row.key, *([None] * (entry.identity - entry.key))]
        identity[self.both.position] = row.holder
        said = "a holder keeps the key from other shards, and has neither an entry nor an intent"
        self._note(claim, "damaged", identity, OWN + said)

    def _note(self, claim: UnitClaim, kind: str, identity: list[str | None], said: str) -> None:
        self.judge.note(claim, kind, Seen(tuple(identity), Verdict.EXTRA, None, None), said)
