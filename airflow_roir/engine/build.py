"""Build: workers claim ranges and copy them batch by batch; entries and watermark commit together.

A worker never looks at the delta and takes no row lock: *touched wins*. One call of
`BuildWorker.claim` or `BuildWorker.step` is one transaction, so that tests can step it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, quote
from airflow_roir.engine.apart import CopierApart, apart
from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job, SourceCheck, check_fingerprint, check_partitions, load_job
from airflow_roir.engine.control.run import Run, check_epoch, read_control
from airflow_roir.engine.database import Database, execute, has_vanished, is_transient, to_json
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.feeds import NOT_NOW, TOO_MANY
from airflow_roir.engine.scan.batch_size import BatchSize
from airflow_roir.engine.scan.copier import BATCH_DONE, BATCH_STOOD, Away, Claim, Copier, SourceCopier
from airflow_roir.engine.scan.sharing import COPIED_BY_OTHERS, TOGETHER
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.work.phase_work import PhaseWork, Step, Worker, begin_work
from airflow_roir.engine.work.turn import share_of
from airflow_roir.errors import Fenced, InvariantViolated, LockNotAcquired, OperationAborted, RoirError, SourceChanged
from airflow_roir.operation import Phase
from airflow_roir.options import BuildOptions
from airflow_roir.scan_range import ScanRange

# Under a grant below one worker, a batch takes this part of its usual time. A shorter one would be mostly a commit.
PACED = 0.1
# Under a rate limit a batch is at most what a worker may copy in this time, so that a pause takes effect soon.
RATE_WINDOW_S = 0.5

RANGES = Pieces(
    "range",
    "roir.scan_range",
    "operation_id = %(operation)s",
    "NOT done",
    "lower, upper, watermark, filenode, shard_id, mark",
    elsewhere=f"{COPIED_BY_OTHERS} OR {NOT_NOW}",
    # A worker that claims its own range again has made no progress: `moved_at` stays, so that it counts as stuck.
    also=""", moved_at = CASE WHEN claim_epoch = %(epoch)s AND claim_worker = %(worker)s THEN moved_at
                              ELSE clock_timestamp() END""",
)
BATCH_FOUND = "roir.stamp(%(source)s) AS stamp, p.relation::oid::regclass::text AS name"

# The first statement of a batch reads the operation and the claim. standing: `held`, `out` (its leaf left the source)
# or `lost` (another worker has the range). name: the relation's present name, qualified by the pinned search_path.
CLAIM_STATE = f"""
SELECT o.epoch, o.status, o.phase, o.parallelism, o.batch_rows, o.max_rows_per_second, o.granted,
       o.throttle <> '{{}}' OR o.granted_at IS NOT NULL AS is_governed,
       CASE WHEN r.claim_token <> %(token)s OR o.epoch <> %(epoch)s THEN 'lost'
            WHEN r.done THEN 'out'
            WHEN r.claim_epoch = %(epoch)s THEN 'held'
            ELSE 'lost' END AS standing, r.relation, r.relation::oid::regclass::text AS name,
       EXISTS (SELECT FROM roir.operation x WHERE {TOGETHER}) AS accompanied, {TOO_MANY} AS too_many
  FROM roir.scan_range r JOIN roir.operation o ON o.id = r.operation_id
 WHERE r.id = %(range)s
"""

# Width and density of rows as ANALYZE saw them: a look at the files would wait behind an ALTER. A table with more
# blocks than rows is bloated: its rows aren't wider than a block, hence the 1.
DENSITY = """
SELECT (least(c.relpages / nullif(greatest(c.reltuples, 0), 0), 1)
        + coalesce(t.relpages / nullif(greatest(c.reltuples, 0), 0), 0)) * current_setting('block_size')::int
       AS row_bytes,
       c.reltuples / nullif(c.relpages, 0) AS rows_per_block
  FROM roir.scan_range r
  JOIN pg_class c ON c.oid = r.relation::oid
  LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
 WHERE r.id = %(range)s
"""


class BuildWorker(Worker):
    """One of a build's parallel workers. worker: its number, from 0; it leaves if that is not below the parallelism."""

    def __init__(self, connection: Connection, job: Job, worker: int, shards: CopierApart | None = None) -> None:
        self.connection = connection
        self.job = job
        self.source = SourceCopier(connection, job)
        self.shards = shards
        self.worker = worker
        self.is_limited = False
        self._check = SourceCheck(connection, job)
        self._size = BatchSize(job.options.get("batch_ms", BuildOptions.batch_ms) / 1000)

    def claim(self) -> Claim | Stop:
        """Claim a range; one that this worker's earlier try held comes first. Raises Fenced."""
        run = self.job.run
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker, Phase.BUILD):
                return stop
            if self.shards is not None:
                self.shards.count_claims(self.connection)
            found = RANGES.claim(self.connection, run, self.worker)
            if found is None:
                return Stop("done")
            scan = ScanRange(found.lower, found.upper, found.watermark, found.filenode)
            if found.shard_id is not None:
                return Claim(found.id, found.ordinal, found.claim_token, scan, shard_id=found.shard_id, mark=found.mark)
            density = execute(self.connection, DENSITY, {"range": found.id}).first() or (None, None)
        return Claim(found.id, found.ordinal, found.claim_token, scan, *density)

    def close(self) -> None:
        """Close the sessions in shards."""
        if self.shards is not None:
            self.shards.close()

    def _copier(self, claim: Claim) -> Copier:
        return self.source if claim.shard_id is None or self.shards is None else self.shards

    def step(self, hold: Claim) -> Step | Stop:
        """Copy a batch, the next rows of a claimed range: entries and watermark in one transaction (I4).

        If the operation is paused or this worker is one too many, stops and gives the range back. If the range's shard
        is out of reach, writes that down and gives the range back.
        Raises Fenced (nothing was changed), SourceChanged, PartitionsChanged.
        """
        copier = self._copier(hold)
        may_try_again = True
        while True:
            try:
                return self._batch(hold, copier)
            except Away as away:
                with self.connection.begin():
                    away.write_down(self.connection)
                    RANGES.release(self.connection, self.job.run, hold)
                return self._given_back()
            except (DBAPIError, RoirError) as error:
                if copier.is_to_try_alone(error):
                    continue
                # The table's schema was renamed between lock and read: the next try finds its present name. Or the
                # table was altered: the next try fails, too.
                if may_try_again and (isinstance(error, LockNotAcquired) or _has_vanished(error)):
                    may_try_again = False
                    continue
                self._explain(hold, copier, error)
                return self._given_back()

    def _explain(self, claim: Claim, copier: Copier, error: DBAPIError | RoirError) -> None:
        """Raise the cause of a batch's error; return if the leaf was taken out of the source meanwhile."""
        is_of_state = isinstance(error, Fenced | LockNotAcquired | SourceChanged)
        if isinstance(error, OperationAborted):
            raise error
        if not is_of_state and not (isinstance(error, DBAPIError) and not is_transient(error)):
            raise error
        with self.connection.begin():
            row = self.standing(claim)
            standing = row.standing
            if standing == "held" and not isinstance(error, SourceChanged):
                # The cause may be that the table was altered, or that the leaf was dropped.
                check_fingerprint(self.connection, self.job)
                check_partitions(self.connection, self.job)
                if isinstance(error, DBAPIError) and (refusal := copier.refusal(row, error)) is not None:
                    raise refusal from error
        # A worker that was cut off for long may find the base sealed, or gone: that is no failure of the operation.
        if standing == "lost":
            raise RANGES.fenced(self.job.run, self.worker, claim) from error
        if standing != "out":
            raise error

    def _batch(self, claim: Claim, copier: Copier) -> Step | Stop:
        """One try, one transaction."""
        begun = time.monotonic()
        run = self.job.run
        copier.begin(claim)
        with self.connection.begin():
            row = self.standing(claim)
            check_epoch(self.connection, row, run)
            stop = why_stop(row, self.worker, Phase.BUILD)
            copied = None if stop or row.too_many else copier.copy(row, claim, partial(self._limit, row, copier))
            if copied is None:
                RANGES.release(self.connection, run, claim)
                return stop or self._given_back()
            self.is_limited = row.max_rows_per_second is not None or row.is_governed
            watermark, done = copied.stretch.watermark, copied.stretch.done
            values = {
                "watermark": None if watermark is None else to_json(watermark),
                "old_watermark": None if claim.scan.watermark is None else to_json(claim.scan.watermark),
                "done": done,
                "rows": copied.rows,
                "seconds": round(time.monotonic() - begun, 3),
                "source": self.job.source.oid,
                "mark": copied.mark,
            }
            committed = RANGES.commit(
                self.connection, run, self.worker, claim, BATCH_DONE, values, BATCH_STOOD, "%(done)s", BATCH_FOUND
            )
            copier.moved(row, committed, values)
            # Most changes of the stamp are harmless, which this look finds out.
            self._check.look(committed.stamp)
        took = time.monotonic() - begun
        copier.done(claim, copied)
        self._size.took(copied.rows, took)
        rest = None if done else replace(claim, scan=replace(claim.scan, watermark=watermark), mark=copied.mark)
        # Operations that share the scan copy as much for this one as this batch for them: that counts for the limit.
        return Step(copied.rows, took, rest, paced=copied.rows * copier.share, rests=self.is_limited)

    def _given_back(self) -> Step:
        return Step(0, 0.0, done=False, rests=self.is_limited)

    def _limit(self, row: Row[Any], copier: Copier, row_bytes: float | None) -> int:
        """How many rows the next batch copies, about."""
        # Under a grant of less than one worker, work and rest take turns: long turns of work hurt the application.
        limit = self._size.rows(row.batch_rows, PACED if share_of(row.granted) < 1 else 1.0)
        if row_bytes:
            limit = min(limit, max(1, int(limits_of(self.connection).batch_bytes / row_bytes)))
        if row.max_rows_per_second:
            share = row.max_rows_per_second / row.parallelism / copier.share
            limit = min(limit, max(1, int(share * RATE_WINDOW_S)))
        return limit

    def standing(self, claim: Claim) -> Row[Any]:
        """Sets the batch's settings, and reads the operation and the claim (`CLAIM_STATE`)."""
        path = ", ".join(["pg_catalog", *map(quote, self.job.source.operator_schemas), "pg_temp"])
        return execute(
            self.connection,
            f"SET LOCAL lock_timeout = {limits_of(self.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            # A range is read through the key's index, or by its blocks, whatever the statistics suggest.
            f"SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off; {CLAIM_STATE}",
            {"range": claim.id, "token": claim.token, "epoch": self.job.run.epoch},
        ).one()


def _has_vanished(error: DBAPIError | RoirError) -> bool:
    return isinstance(error, DBAPIError) and has_vanished(error)


def make_worker(database: Database, connection: Connection, run: Run, number: int) -> BuildWorker:
    """A worker of a build. Raises Fenced, SourceChanged."""
    job = begin_work(connection, run, load_job)
    return BuildWorker(connection, job, number, apart().copier(database, connection, job))


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Advance to seal, once every range is done. Raises InvariantViolated if one isn't, Fenced.

    For an index over shards also SourceChanged if a shard has lost commits that were copied, and DBAPIError if a shard
    is out of reach.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
    if row.phase == Phase.BUILD:
        apart().check_copies(database, run, row.generation_id)
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.BUILD:
            return
        left = execute(
            connection,
            "SELECT count(*) FROM roir.scan_range WHERE operation_id = %(operation)s AND NOT done",
            {"operation": run.operation_id},
        ).scalar_one()
        if left:
            raise InvariantViolated(
                f"index {run.index}: {left} ranges are not done yet; run: roir resume {argument(run.index)}"
            )
        physical.forget_hashes(connection, row.generation_id)
        operations.advance(connection, row, run.epoch, run.owner)


PHASE = PhaseWork(
    Phase.BUILD,
    RANGES,
    make_worker,
    finish,
    "SELECT ordinal, rows, seconds, done FROM roir.scan_range WHERE operation_id = %(operation)s",
    "copies the table's rows into the base, range by range; writers meanwhile fill the delta",
)
