"""One worker of a verification: claims units, and compares source and index in them, inside PostgreSQL.

Stage `total` sums both sides. If they differ, stage `sum` sums them by buckets of the primary key. Stage `check`
compares the rows of the buckets that differ one by one; if only a part is verified, all rows of that part. A unit is
claimed like a range of a build.
"""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.control.run import read_control
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.feeds import IS_AWAY
from airflow_roir.engine.locks.table_lock import check_name, telling_of_names
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.verify import damage, repair
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, VerifyJob
from airflow_roir.engine.verify.reading import UnitReading
from airflow_roir.engine.verify.rows import UnitRows
from airflow_roir.engine.verify.sums import NO_SUMS, UnitSums
from airflow_roir.engine.work.phase_work import Step, Worker
from airflow_roir.operation import Phase, Status

# A unit is due if it isn't compared yet, or if it is compared and still claimed, so that discrepancies need a repair.
DUE = "(done AND claim_epoch IS NOT NULL OR NOT done AND NOT %(spent)s AND ordinal < %(until)s)"
# A unit of a shard that can't be reached now.
AWAY = f"""
EXISTS (SELECT FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id
         WHERE l.id = feed_id AND {IS_AWAY})
"""
UNITS = Pieces(
    "unit",
    "roir.verification_unit",
    "verification_id = %(verification)s",
    "NOT done",
    "stage, side, relation, lower, upper, done, feed_id",
    DUE,
    AWAY,
)
UNIT_DONE = """done = true, seconds = %(seconds)s, rows = %(rows)s, snapshot = %(snapshot)s,
       buckets = %(buckets)s::int[], counts = %(counts)s::bigint[], sums = %(sums)s::numeric[]"""

# The limits of a verification: whether its time is spent, and, in a slice, the ordinal of the first unit beyond it.
LIMITS = """
SELECT coalesce((SELECT sum(value::numeric) FROM jsonb_each_text(o.phase_seconds))
                >= (v.options ->> 'max_seconds')::numeric, false) AS spent,
       coalesce((SELECT u.ordinal FROM roir.verification_unit u
                  WHERE u.verification_id = v.id AND v.quota IS NOT NULL ORDER BY u.ordinal OFFSET v.quota LIMIT 1),
                2147483647) AS until
  FROM roir.verification v JOIN roir.operation o ON o.id = v.operation_id
 WHERE v.id = %(verification)s
"""
# True if the totals differed and came from one snapshot.
ONE_SNAPSHOT = """
SELECT count(DISTINCT snapshot) = 1 AND bool_or(stage = 'sum') FROM (
    SELECT stage, CASE WHEN stage = 'total' THEN snapshot END AS snapshot FROM roir.verification_unit
     WHERE verification_id = %(verification)s) u
"""
# A primary key whose rows and entries differ, unless an unsettled discrepancy explains it.
UNEXPLAINED = """
INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, detail)
SELECT %(verification)s, %(unit)s, 'damaged', %(key)s, %(primary_key)s, %(detail)s
 WHERE NOT EXISTS (SELECT FROM roir.discrepancy d WHERE d.verification_id = %(verification)s
                      AND d.primary_key = %(primary_key)s::jsonb AND d.outcome IS NULL)
"""


class VerifyWorker(Worker):
    """One of a verification's parallel workers. Tests call its methods one by one."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self.worker = worker
        self.newer = (connection.dialect.server_version_info or (0,)) >= (18,)
        self.reading = UnitReading(connection, verify_job)
        self.sums = UnitSums(self.reading, self.newer)
        self.rows = UnitRows(self.reading)

    def claim(self) -> UnitClaim | Stop:
        """Claims a unit. Raises Fenced."""
        run = self.job.run
        values = {"verification": self.verify_job.verification_id}
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker, Phase.SUM, Phase.CHECK, Phase.PUBLISH):
                return stop
            limits = execute(self.connection, LIMITS, values).one()
            found = UNITS.claim(self.connection, run, self.worker, {**values, **limits._mapping})
        if found is None:
            return Stop("done")
        return UnitClaim(
            found.id,
            found.ordinal,
            found.claim_token,
            found.stage,
            found.side,
            found.relation,
            found.lower,
            found.upper,
            found.done,
            found.feed_id,
        )

    def step(self, hold: UnitClaim) -> Step | Stop:
        """Compares a unit that isn't compared yet, and repairs its discrepancies, if the verification repairs."""
        done = None if hold.compared else self.unit(hold)
        to_repair = done is None or (done.found > 0 and self.verify_job.options.repair)
        if to_repair and not self.repair(hold):
            return Stop("paused")
        return Step(0, 0.0) if done is None else Step(done.rows, done.seconds)

    def let_go(self) -> None:
        """Ends the snapshot: a worker that waits must not hold one."""
        self.close()

    def unit(self, claim: UnitClaim) -> UnitMetrics:
        """Compares a claimed unit. Its discrepancies or sums commit together with the unit's end.

        Raises Fenced (nothing was changed), SourceChanged, LockNotAcquired (a name was changed meanwhile).
        """
        with telling_of_names(), UNITS.telling_fenced(self.connection, self.job.run, self.worker, claim):
            return self._unit(claim)

    def _unit(self, claim: UnitClaim) -> UnitMetrics:
        begun = time.monotonic()
        checked, found = 0, 0
        if claim.side == "both":
            self._whole(claim, begun)
        elif claim.stage != "check" and claim.side not in ("tree", "reach"):
            summed = self.sums.of(claim)
            with self.connection.begin():
                checked = self._commit(claim, summed, begun)
        else:
            with self.connection.begin():
                name = self.reading.hold(claim)
                if name is not None and claim.side == "tree":
                    self.rows.noting_corruption(claim, name, self.rows.check_tree)
                elif name is not None and claim.side == "reach":
                    self.rows.noting_corruption(claim, name, self.rows.count)
                elif name is not None:
                    checked, found = self.rows.noting_corruption(claim, name, self.rows.check) or (0, 0)
                    if found and self.verify_job.options.is_partial:
                        self.rows.look_again("unit_id = %(unit)s", {"unit": claim.id})
                if name is not None:
                    self.reading.check_names(claim, name)
                to_repair = found > 0 and self.verify_job.options.repair
                self._commit(claim, {**NO_SUMS, "rows": checked}, begun, to_repair)
        return UnitMetrics(self.worker, claim.ordinal, checked, time.monotonic() - begun, found)

    def repair(self, claim: UnitClaim) -> bool:
        """Repairs the discrepancies of a compared unit, then ends its claim; False if a pause came in between.

        Raises Fenced.
        """
        run = self.job.run
        with telling_of_names():
            for _ in repair.mend_unit(self.connection, self.job, self.verify_job.verification_id, claim.id):
                with self.connection.begin():
                    if read_control(self.connection, run).status != Status.RUNNING:
                        return False
        with self.connection.begin():
            if not UNITS.release(self.connection, run, claim):
                raise UNITS.fenced(run, self.worker, claim)
        return True

    def close(self) -> None:
        """Ends the snapshot."""
        self.sums.snapshot.close()

    def _whole(self, claim: UnitClaim, begun: float) -> None:
        """Explains without any index lookups that found nothing, and sums of one snapshot that differed."""
        rows: list[Row[Any]] = []
        values = {"verification": self.verify_job.verification_id, "unit": claim.id}
        with self.connection.begin():
            execute(self.connection, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            # Before the snapshot (LOCK takes none). If the lock waits for a COPY with FREEZE, a snapshot from before
            # would see its rows, but not their entries.
            execute(self.connection, f"SET LOCAL lock_timeout = {limits_of(self.connection).table_lock_ms}")
            self.reading.lock(self.job.source.sql, self.job.source.oid)
            if self.reading.hold(claim) is not None and execute(self.connection, ONE_SNAPSHOT, values).scalar_one():
                rows = self._differing()
                check_name(self.connection, self.job.source.sql, self.job.source.oid)
        with self.connection.begin():
            self.reading.hold(claim)
            self.rows.look_again("true", {})
            for row in rows:
                seen = f"{row.rows} rows and {row.entries} entries of this primary key, read without an index, differ"
                of_source = damage.remedy_of_source(self.job.source)
                remedy = of_source if row.rows > 1 else damage.remedy_of_entries(self.job.run.index)
                found = {
                    "key": json.dumps(row.key),
                    "primary_key": json.dumps(row.primary_key),
                    "detail": f"{seen}. {remedy}",
                }
                execute(self.connection, UNEXPLAINED, {**values, **found})
            self._commit(claim, NO_SUMS, begun)

    def _differing(self) -> list[Row[Any]]:
        job, buckets = self.job, self.verify_job.buckets
        workers = read_control(self.connection, job.run).parallelism
        parallel = f"SET LOCAL max_parallel_workers_per_gather = {workers}"
        execute(self.connection, f"{damage.WITHOUT_INDEX}; {parallel}")
        shown = "SELECT coalesce(roir.is_shown(%(id)s, 'x'), 'true')"
        visible = execute(self.connection, shown, {"id": job.generation_id}).scalar_one()
        both = damage.both_sides(
            job.source, job.entry, job.generation_id, visible, self.verify_job.with_delta, self.newer
        )
        query = damage.differing_buckets(both, job.entry, buckets)
        differ = list(owner.rows(self.connection, job.source, query, damage.DIFFERING_BUCKETS).scalars())
        if not differ:
            return []
        query = damage.differing_rows(both, job.entry, buckets, differ)
        return list(owner.rows(self.connection, job.source, query, damage.DIFFERING_ROWS).all())

    def _commit(self, claim: UnitClaim, found: dict[str, Any], begun: float, to_repair: bool = False) -> int:
        # If there is something to repair, the worker keeps the claim until that is done.
        values = {**found, "to_repair": to_repair, "seconds": round(time.monotonic() - begun, 3)}
        UNITS.commit(
            self.connection, self.job.run, self.worker, claim, UNIT_DONE, values, "NOT p.done", "NOT %(to_repair)s"
        )
        return int(found["rows"])
