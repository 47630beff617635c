"""Both sides of a verification of an index over shards, as one of its workers reads them."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.verify import differences
from airflow_roir.engine.verify.job import UnitClaim, VerifyJob
from airflow_roir.engine.verify.reading import UnitReading
from airflow_roir.shards.shard import lanes_of
from airflow_roir.shards.verify import sums
from airflow_roir.shards.verify.recheck import Sides
from airflow_roir.shards.verify.sessions import InShard, Sessions
from airflow_roir.shards.verify.units import live_lanes

CONSTRAINT = "SELECT pg_get_partition_constraintdef(%(relation)s::oid)"


class BothSides:
    """The index's entries and the shards' rows: the lanes, a session in each shard, SQL for the entries.

    lanes: by id, which is the place of their buckets; live: the ids of the lanes in use. position: of the column with
    the shard's name; plain: the entry as a shard has it, but with the index server's physical names.
    """

    def __init__(self, connection: Connection, verify_job: VerifyJob, reading: UnitReading, database: Database) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self.reading = reading
        self.utf8 = sums.is_utf8(connection)
        with connection.begin():
            lanes = lanes_of(connection, self.job.generation_id)
            self.live = {lane.id for lane in live_lanes(connection, self.job.generation_id)}
        self.lanes = sorted(lanes, key=lambda lane: lane.id)
        self.by_id = {lane.id: lane for lane in lanes}
        self.position = next(
            i for i, column in enumerate(self.job.entry.columns) if column.source == verify_job.shard_column
        )
        self.plain = sums.without(self.job.entry, self.position)
        self.sessions = Sessions(connection, database, self.job)

    def read(self) -> list[str]:
        """The entry's columns but the shard's, of alias `r`."""
        return [name for i, name in enumerate(self.job.entry.physical(prefix="r.")) if i != self.position]

    def of_entries(self, claim: UnitClaim) -> tuple[str, str, str]:
        """SQL for: a unit's entries; the place of their lane; its id.

        An entry in a segment where no look-up finds it is of no lane.
        """
        terms = []
        for sign, block in ((">=", claim.lower), ("<", claim.upper)):
            if block is not None and block != [0]:
                terms.append(f"r.ctid {sign} '({int(block[0])},0)'::tid")
        belongs = execute(self.connection, CONSTRAINT, {"relation": claim.relation}).scalar() or "true"
        shard = f"r.c{self.position + 1}"
        names = {place: differences.literal(lane.shard.name) for place, lane in enumerate(self.lanes)}
        places = " ".join(f"WHEN {name} THEN {place}" for place, name in names.items())
        ids = " ".join(f"WHEN {name} THEN {self.lanes[place].id}" for place, name in names.items())
        misplaced = f"CASE WHEN ({belongs}) IS FALSE THEN"
        return (
            " AND ".join(terms) or "true",
            # A bound may have braces: an array's.
            f"{misplaced} {len(names)} ELSE CASE {shard} {places} ELSE {len(names)} END END",
            f"{misplaced} NULL ELSE CASE {shard} {ids} END END",
        )

    def of_lane(self, one: InShard) -> Sides:
        """Both sides of the entries of a lane."""
        return Sides(self.job.generation_id, self.job.entry, self.position, one.lane, one.entry)
