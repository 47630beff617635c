"""Writes suspects on the index server: identities and hashes of entries that may differ
(docs/architecture-shards.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from airflow_roir.engine.database import bound, execute
from airflow_roir.engine.verify import damage, hashes
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.shards.verify import sums
from airflow_roir.shards.verify.both_sides import BothSides
from airflow_roir.shards.verify.sessions import InShard

# The rows that a session fetches from a shard at a time.
FETCHED = 2_000

SUSPECT = """
INSERT INTO roir.suspect (verification_id, unit_id, feed_id, of_source, identity, hash)
SELECT %(verification)s, %(unit)s, %(feed)s, true, x.identity::jsonb, x.hash
  FROM unnest(%(identities)s::text[], %(hashes)s::bigint[]) AS x (identity, hash)
"""


class Suspects:
    """Writes down the suspects that one worker finds."""

    def __init__(self, both: BothSides) -> None:
        self.both = both
        self.connection = both.connection
        self.verify_job = both.verify_job
        self.job = both.job

    def of_buckets(self, claim: UnitClaim, commit: Callable[[int], int]) -> int:
        """Writes down the rows of the suspicious buckets; returns their number. commit: ends the unit in the same
        transaction; gets the number of rows. Raises ShardAway."""
        suspicious = self.verify_job.suspicious or ()
        buckets = self.verify_job.buckets
        if claim.side == "source":
            feed = self.both.by_id[claim.feed_id or 0]
            place = self.both.feeds.index(feed)
            mine = [one for one in suspicious if one // sums.MOST_BUCKETS == place]

            def read(one: InShard, name: str, where: str, values: dict[str, Any]) -> dict[str, Any]:
                assert one.entry is not None
                bucket = sums.bucket(one.entry, hashes.of_source(one.entry, "r"), one.utf8, buckets, str(place))
                chosen = f"{where} AND {bucket} = ANY ('{{{','.join(map(str, mine))}}}'::int[])"
                with self.connection.begin():
                    rows = self._spool(claim, one, name, chosen, values)
                    return {"rows": commit(rows)}

            found = self.both.sessions.read(feed, claim, read)
            if found is not None:
                return int(found["rows"])
            with self.connection.begin():
                return commit(0)
        with self.connection.begin():
            name = self.both.reading.hold(claim)
            rows = 0
            if name is not None:
                where, place_of, of_feed = self.both.of_entries(claim)
                bucket = sums.bucket(self.both.plain, self.both.read(), self.both.utf8, buckets, place_of)
                chosen = f"{where} AND {bucket} = ANY ('{{{','.join(map(str, suspicious))}}}'::int[])"
                execute(self.connection, damage.WITHOUT_INDEX)
                rows = self._spool_entries(claim, name, chosen, of_feed)
            return commit(rows)

    def of_part(self, claim: UnitClaim) -> None:
        """Writes down all identities of a part of one side. Raises ShardAway."""
        values = {"unit": claim.id}
        with self.connection.begin():
            execute(self.connection, "DELETE FROM roir.suspect WHERE unit_id = %(unit)s", values)
        if claim.side == "source":

            def read(one: InShard, name: str, where: str, values: dict[str, Any]) -> dict[str, Any]:
                with self.connection.begin():
                    return {"rows": self._spool(claim, one, name, where, values)}

            self.both.sessions.read(self.both.by_id[claim.feed_id or 0], claim, read)
            return
        with self.connection.begin():
            name = self.both.reading.hold(claim)
            if name is not None:
                where, _, feed = self.both.of_entries(claim)
                self._spool_entries(claim, name, where, feed)

    def _spool(self, claim: UnitClaim, one: InShard, name: str, where: str, values: dict[str, Any]) -> int:
        assert one.entry is not None
        read = hashes.of_source(one.entry, "r")
        texts = [hashes.text(one.entry.columns[i], read[i]) for i in one.entry.identity_positions]
        hashed = sums.row_hash(one.entry, read, one.utf8)
        sql = f"SELECT ARRAY[{', '.join(texts)}]::text[] AS identity, {hashed} AS hash FROM {name} r WHERE {where}"
        rows = 0
        sides = self.both.of_feed(one)
        streaming = {"no_parameters": True, "stream_results": True, "max_row_buffer": FETCHED}
        read_on = one.connection.exec_driver_sql(bound(one.connection, sql, values), execution_options=streaming)
        for part in read_on.partitions(FETCHED):
            found = {
                "verification": self.verify_job.verification_id,
                "unit": claim.id,
                "feed": one.feed.id,
                "identities": [json.dumps(sides.there(row.identity)) for row in part],
                "hashes": [row.hash for row in part],
            }
            execute(self.connection, SUSPECT, found)
            rows += len(part)
        return rows

    def _spool_entries(self, claim: UnitClaim, name: str, where: str, feed: str) -> int:
        entry = self.job.entry
        texts = [hashes.text(entry.columns[i], f"r.c{i + 1}") for i in entry.identity_positions]
        hashed = sums.row_hash(self.both.plain, self.both.read(), self.both.utf8)
        sql = (
            "INSERT INTO roir.suspect (verification_id, unit_id, feed_id, of_source, identity, hash) "
            f"SELECT {self.verify_job.verification_id}, {claim.id}, {feed}, false, "
            f"to_jsonb(ARRAY[{', '.join(texts)}]::text[]), {hashed} FROM {name} r WHERE {where}"
        )
        return execute(self.connection, sql).rowcount
