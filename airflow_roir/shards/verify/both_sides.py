"""Both sides of a verification of an index over shards, as one of its workers reads them."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.verify import differences
from airflow_roir.engine.verify.job import UnitClaim, VerifyJob
from airflow_roir.engine.verify.reading import UnitReading
from airflow_roir.shards.shard import feeds_of
from airflow_roir.shards.verify import sums
from airflow_roir.shards.verify.recheck import Sides
from airflow_roir.shards.verify.sessions import InShard, Sessions
from airflow_roir.shards.verify.units import live_feeds

CONSTRAINT = "SELECT pg_get_partition_constraintdef(%(relation)s::oid)"


class BothSides:
    """The index's entries and the shards' rows: the feeds, a session in each shard, SQL for the entries.

    feeds: by id, which is the place of their buckets; live: the ids of the feeds in use. position: of the column with
    the shard's name; plain: the entry as a shard has it, but with the index server's physical names.
    """

    def __init__(self, connection: Connection, verify_job: VerifyJob, reading: UnitReading, database: Database) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self.reading = reading
        self.utf8 = sums.is_utf8(connection)
        with connection.begin():
            feeds = feeds_of(connection, self.job.generation_id)
            self.live = {feed.id for feed in live_feeds(connection, self.job.generation_id)}
        self.feeds = sorted(feeds, key=lambda feed: feed.id)
        self.by_id = {feed.id: feed for feed in feeds}
        self.position = next(
            i for i, column in enumerate(self.job.entry.columns) if column.source == verify_job.shard_column
        )
        self.plain = sums.without(self.job.entry, self.position)
        self.sessions = Sessions(connection, database, self.job)

    def read(self) -> list[str]:
        """The entry's columns but the shard's, of alias `r`."""
        return [name for i, name in enumerate(self.job.entry.physical(prefix="r.")) if i != self.position]

    def of_entries(self, claim: UnitClaim) -> tuple[str, str, str]:
        """SQL for: a unit's entries; the place of their feed; its id.

        An entry in a segment where no look-up finds it is of no feed.
        """
        terms = []
        for sign, block in ((">=", claim.lower), ("<", claim.upper)):
            if block is not None and block != [0]:
                terms.append(f"r.ctid {sign} '({int(block[0])},0)'::tid")
        belongs = execute(self.connection, CONSTRAINT, {"relation": claim.relation}).scalar() or "true"
        shard = f"r.c{self.position + 1}"
        names = {place: differences.literal(feed.shard.name) for place, feed in enumerate(self.feeds)}
        places = " ".join(f"WHEN {name} THEN {place}" for place, name in names.items())
        ids = " ".join(f"WHEN {name} THEN {self.feeds[place].id}" for place, name in names.items())
        misplaced = f"CASE WHEN ({belongs}) IS FALSE THEN"
        return (
            " AND ".join(terms) or "true",
            # A bound may have braces: an array's.
            f"{misplaced} {len(names)} ELSE CASE {shard} {places} ELSE {len(names)} END END",
            f"{misplaced} NULL ELSE CASE {shard} {ids} END END",
        )

    def of_feed(self, one: InShard) -> Sides:
        """Both sides of the entries of a feed."""
        return Sides(self.job.generation_id, self.job.entry, self.position, one.feed, one.entry)
