"""The sums of a unit, in the snapshot that the workers share."""

from __future__ import annotations

from typing import Any

from psycopg2 import errors as pg_errors
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute
from airflow_roir.engine.verify import damage, differences, hashes
from airflow_roir.engine.verify.hashes import of_source
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.reading import UnitReading
from airflow_roir.engine.verify.snapshot import SharedSnapshot

NO_SUMS: dict[str, Any] = {"rows": 0, "snapshot": None, "buckets": None, "counts": None, "sums": None}

# How many shared snapshots are tried before a unit is read in one of its own.
SHARES = 3
# The snapshot is gone, or its session is about to end; or it is older than a rewrite, and sees no rows.
NO_SNAPSHOT = (
    pg_errors.SerializationFailure,
    pg_errors.InvalidParameterValue,
    pg_errors.UndefinedObject,
    pg_errors.ObjectNotInPrerequisiteState,
)
REWRITTEN = "SELECT roir.refuse_rewritten(%(relation)s::oid)"


class UnitSums:
    """Sums units on a worker's session."""

    def __init__(self, reading: UnitReading, newer: bool) -> None:
        self.connection = reading.connection
        self.verify_job = reading.verify_job
        self.job = reading.job
        self.reading = reading
        self.snapshot = SharedSnapshot(reading.connection)
        self.newer = newer

    def of(self, claim: UnitClaim) -> dict[str, Any]:
        """The unit's sums, in the shared snapshot if one of `SHARES` could be imported, else in one of its own."""
        shared: str | None = None
        for _ in range(SHARES):
            shared = self.snapshot.share(self.verify_job.verification_id, gone=shared)
            try:
                return self._in(claim, shared)
            except DBAPIError as error:
                # The snapshot's holder has left; the next one may leave, too.
                if not isinstance(error.orig, NO_SNAPSHOT):
                    raise
        return self._in(claim, None)

    def _in(self, claim: UnitClaim, shared: str | None) -> dict[str, Any]:
        job = self.job
        values: dict[str, Any] = {}
        with self.connection.begin():
            execute(self.connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            if shared is not None:
                execute(self.connection, f"SET TRANSACTION SNAPSHOT '{shared}'")
            name = self.reading.hold(claim)
            if name is None:
                return NO_SUMS
            execute(self.connection, REWRITTEN, {"relation": claim.relation})
            entry = job.entry
            read = of_source(entry, "r") if claim.of_source else entry.physical(prefix="r.")
            where = self.reading.where(claim, values, "r") + (entry.and_satisfied("r") if claim.of_source else "")
            if claim.side != "source":
                # An index must not hide the rows that it has lost.
                execute(self.connection, damage.WITHOUT_INDEX)
            elif values:
                # As in a batch of a build: a unit must not scan the whole table.
                execute(self.connection, "SET LOCAL enable_seqscan = off")
            if claim.stage == "total":
                sql = hashes.total(entry, read, f"{name} r", where, self.newer)
            else:
                sql = hashes.sums(entry, read, f"{name} r", where, self.newer, self.verify_job.buckets)
            reads = [name] if claim.of_source else None
            row = self.reading.execute(claim, sql, values, differences.SUMMED, "SELECT * FROM {compared}", reads)
            self.reading.check_names(claim, name)
            # Not the snapshot's name: a restarted server uses names again.
            seen = execute(self.connection, "SELECT md5(pg_current_snapshot()::text)").scalar_one()
            return {**row._mapping, "snapshot": seen}
