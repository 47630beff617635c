"""Build: workers claim ranges and copy them batch by batch; rows and watermark commit together.

The worker never looks at the delta and takes no row lock: *touched wins*. One call of
`BuildWorker.claim` or `BuildWorker.batch` is one transaction, so that tests can step it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import Scan, quote
from airflow_roir.engine import generation as physical
from airflow_roir.engine import operations, owner
from airflow_roir.engine.claims import Pieces, Stop, WorkLeft, why_stop
from airflow_roir.engine.database import Database, execute, has_vanished, is_transient, to_json
from airflow_roir.engine.governor.turn import Turn, share_of
from airflow_roir.engine.job import Job, SourceCheck, check_fingerprint, check_partitions, load_job
from airflow_roir.engine.limits import limits_of
from airflow_roir.engine.locks import lock_table
from airflow_roir.engine.run import Run, check_epoch, read_control
from airflow_roir.engine.scan.batch_size import BatchSize
from airflow_roir.engine.scan.carrying import Carrier
from airflow_roir.engine.scan.reader import Stretch, reader_of, selected
from airflow_roir.engine.scan.sharing import COPIED_BY_OTHERS, TOGETHER
from airflow_roir.engine.shards.batch_marks import check_marks
from airflow_roir.engine.shards.copy_ranges import NOT_NOW, TOO_MANY, ShardAway, ShardPiece, ShardReaders
from airflow_roir.engine.shards.shard import set_away
from airflow_roir.errors import Fenced, InvariantViolated, LockNotAcquired, RoirError, SourceChanged
from airflow_roir.operation import Phase, Verb
from airflow_roir.options import BuildOptions
from airflow_roir.scan_range import ScanRange

# Of its usual time what a batch takes under a pace. Less would be mostly commit.
PACED = 0.1
# Under a rate limit a batch is at most this much of a worker's share, so that a pause still comes soon.
RATE_WINDOW_S = 0.5

RANGES = Pieces(
    "range",
    "roir.scan_range",
    "operation_id = %(operation)s",
    "NOT done",
    "lower, upper, watermark, filenode, shard_id, mark",
    elsewhere=f"{COPIED_BY_OTHERS} OR {NOT_NOW}",
    # Who comes back to what it held has done nothing meanwhile: one that fails and fails doesn't seem to work.
    also=""", moved_at = CASE WHEN claim_epoch = %(epoch)s AND claim_worker = %(worker)s THEN moved_at
                              ELSE clock_timestamp() END""",
)
# The watermark must stand where the batch began.
BATCH_STOOD = "NOT p.done AND p.watermark IS NOT DISTINCT FROM %(old_watermark)s::jsonb"
BATCH_DONE = """watermark = %(watermark)s::jsonb, done = %(done)s, rows = rows + %(rows)s, batches = batches + 1,
       seconds = seconds + %(seconds)s, mark = %(mark)s, moved_at = clock_timestamp()"""
BATCH_FOUND = "roir.stamp(%(source)s) AS stamp, p.relation::oid::regclass::text AS name"

# What a batch begins with: the operation as workers look at it, and how the claim stands: held; out, where the leaf was
# taken out of the source meanwhile; or lost to another worker. And the name of what the range is a piece of as it is
# now, fully qualified under the pinned search_path.
STANDING = f"""
SELECT o.epoch, o.owner, o.status, o.phase, o.parallelism, o.batch_rows, o.max_rows_per_second, o.granted,
       o.throttle <> '{{}}' OR o.granted_at IS NOT NULL AS is_governed,
       CASE WHEN r.claim_token <> %(token)s OR o.epoch <> %(epoch)s THEN 'lost'
            WHEN r.done THEN 'out'
            WHEN r.claim_epoch = %(epoch)s THEN 'held'
            ELSE 'lost' END AS standing, r.relation, r.relation::oid::regclass::text AS name,
       EXISTS (SELECT FROM roir.operation x WHERE {TOGETHER}) AS accompanied, {TOO_MANY} AS too_many
  FROM roir.scan_range r JOIN roir.operation o ON o.id = r.operation_id
 WHERE r.id = %(range)s
"""

# As ANALYZE saw it: no look at the files, which would wait behind an ALTER. A row in bloat isn't wider by that.
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


@dataclass(frozen=True)
class Claim:
    """A worker's hold on a range. token: proves that it still has it.

    row_bytes, rows_per_block: of the relation that it is a piece of, when that was analyzed; None if it never was.
    shard_id: the server that it is read from; None: this one. mark: of its last batch there.
    """

    id: int
    ordinal: int
    token: int
    scan: ScanRange
    row_bytes: float | None = None
    rows_per_block: float | None = None
    shard_id: int | None = None
    mark: int | None = None


@dataclass(frozen=True)
class Batch:
    """A committed batch. claim: the range as it stands now, None if it is done."""

    rows: int
    seconds: float
    claim: Claim | None


@dataclass(frozen=True)
class RangeMetrics:
    """What a worker did on one claim of a range."""

    worker: int
    ordinal: int
    rows: int
    batches: int
    seconds: float
    done: bool


class BuildWorker:
    """One of an operation's parallel workers. worker: its number, from 0; those at or above the parallelism leave."""

    def __init__(self, connection: Connection, job: Job, worker: int, shards: ShardReaders | None = None) -> None:
        self.connection = connection
        self.job = job
        self.shards = shards
        self.worker = worker
        self.is_limited = False
        self._source = SourceCheck(connection, job)
        self.reader = reader_of(connection, job)
        self.carrier = Carrier(connection, job)
        self._columns = selected(job)
        self._size = BatchSize(job.options.get("batch_ms", BuildOptions.batch_ms) / 1000)

    def claim(self) -> Claim | Stop:
        """Claim a range, one that this worker's earlier try held first. Raises Fenced."""
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

    def batch(self, claim: Claim) -> Batch | Stop:
        """Copy the next rows of a claimed range: entries and watermark in one transaction (I4).

        Stops, and gives the range back, if the operation is paused or this worker is one too many.
        Raises Fenced (nothing was changed), SourceChanged, PartitionsChanged. A shard that is out of reach is written
        down, and its range given back.
        """
        try:
            return self._whole_batch(claim)
        except ShardAway as away:
            with self.connection.begin():
                set_away(self.connection, away.shard.id, away.problem)
                RANGES.release(self.connection, self.job.run, claim)
            return Batch(0, 0.0, None)

    def _whole_batch(self, claim: Claim) -> Batch | Stop:
        try:
            try:
                return self._batch(claim)
            except LockNotAcquired:
                # The next look finds the name that it has now.
                return self._batch(claim)
            except DBAPIError as error:
                # Its schema got another name between lock and read; or it was altered, which the next try meets too.
                if not has_vanished(error):
                    raise
                return self._batch(claim)
        except (DBAPIError, Fenced, LockNotAcquired, SourceChanged) as error:
            if isinstance(error, DBAPIError) and is_transient(error):
                raise
            with self.connection.begin():
                standing = self.standing(claim).standing
                if standing == "held" and not isinstance(error, SourceChanged):
                    # A table that was altered may not be read as before, a leaf that was dropped not at all.
                    check_fingerprint(self.connection, self.job)
                    check_partitions(self.connection, self.job)
            if standing == "out":
                return Batch(0, 0.0, None)
            # Whoever was cut off for long may find the base sealed, or gone: that is no failure of the operation.
            if standing == "lost":
                raise RANGES.fenced(self.job.run, self.worker, claim) from error
            raise

    def _batch(self, claim: Claim) -> Batch | Stop:
        try:
            outcome = self._try_batch(claim, carry=True)
            self.carrier.committed()
            return outcome
        except Fenced:
            raise
        except (DBAPIError, RoirError) as error:
            # Whatever went wrong with an operation that it copied for, too, is none of its own.
            if (isinstance(error, DBAPIError) and error.connection_invalidated) or not self.carrier.blame():
                raise
            return self._try_batch(claim, carry=False)

    def _try_batch(self, claim: Claim, carry: bool) -> Batch | Stop:
        begun = time.monotonic()
        self.carrier.none()
        run = self.job.run
        if claim.shard_id is not None and self.shards is not None:
            self.shards.open(claim.shard_id)
        with self.connection.begin():
            row = self.standing(claim)
            check_epoch(row, run)
            if stop := why_stop(row, self.worker, Phase.BUILD):
                RANGES.release(self.connection, run, claim)
                return stop
            if row.too_many:
                RANGES.release(self.connection, run, claim)
                return Batch(0, 0.0, None)
            self.is_limited = row.max_rows_per_second is not None or row.is_governed
            if claim.shard_id is not None and self.shards is not None:
                piece = ShardPiece(claim.id, row.relation, claim.scan, claim.mark)
                stretch, rows, mark = self.shards.copy(self.connection, piece, partial(self._limit, row))
            elif (found := self._copy_here(claim, row, carry)) is not None:
                (stretch, rows), mark = found, None
            else:
                RANGES.release(self.connection, run, claim)
                return Batch(0, 0.0, None)
            seconds = time.monotonic() - begun
            watermark, done = stretch.watermark, stretch.done
            values = {
                "watermark": None if watermark is None else to_json(watermark),
                "old_watermark": None if claim.scan.watermark is None else to_json(claim.scan.watermark),
                "done": done,
                "rows": rows,
                "seconds": round(seconds, 3),
                "source": self.job.source.oid,
                "mark": mark,
            }
            committed = RANGES.commit(
                self.connection, run, self.worker, claim, BATCH_DONE, values, BATCH_STOOD, "%(done)s", BATCH_FOUND
            )
            if committed.name != row.name and claim.shard_id is None:
                # Its schema got another name meanwhile: who knows what was read.
                raise LockNotAcquired(
                    f"index {run.index}: {row.name} was renamed while a batch read it; the batch changed nothing"
                )
            # Most of what is written there matters to nobody.
            self._source.look(committed.stamp)
            self.carrier.advance(BATCH_DONE, BATCH_STOOD, values, committed.stamp)
        took = time.monotonic() - begun
        self.reader.copied(claim.scan, stretch, rows)
        self._size.took(rows, took)
        rest = None if done else replace(claim, scan=replace(claim.scan, watermark=watermark), mark=mark)
        return Batch(rows, took, rest)

    def _copy_here(self, claim: Claim, row: Row[Any], carry: bool) -> tuple[Stretch, int] | None:
        """Cut and copy a batch of this database; None if a worker of an older operation reads the range."""
        # Against ALTER, to the end of the transaction. Where its owner isn't trusted no read leaves a lock behind.
        lock_table(self.connection, row.name, row.relation, "ACCESS SHARE", only=True)
        if carry and row.accompanied:
            if self.carrier.is_read_by_older(claim.id):
                return None
            self.carrier.take(claim.id)
        stretch = self.reader.next(row.name, claim.scan, self._limit(row, claim.row_bytes), claim.rows_per_block)
        return stretch, self.copy(row.name, stretch)

    def _limit(self, row: Row[Any], row_bytes: float | None) -> int:
        """How many rows the next batch copies, about."""
        # Under a grant that is less than a worker, short pieces of work and of rest: long ones hurt whoever meets them.
        limit = self._size.rows(row.batch_rows, PACED if share_of(row.granted) < 1 else 1.0)
        if row_bytes:
            limit = min(limit, max(1, int(limits_of(self.connection).batch_bytes / row_bytes)))
        if row.max_rows_per_second:
            share = row.max_rows_per_second / row.parallelism / self.carrier.share
            limit = min(limit, max(1, int(share * RATE_WINDOW_S)))
        return limit

    def standing(self, claim: Claim) -> Row[Any]:
        """How the batch begins, and the settings that it is read with."""
        path = ", ".join(["pg_catalog", *map(quote, self.job.source.operator_schemas), "pg_temp"])
        return execute(
            self.connection,
            f"SET LOCAL lock_timeout = {limits_of(self.connection).table_lock_ms}; SET LOCAL search_path = {path}; "
            # A scan must come out of the key's index, or of its blocks alone, whatever the statistics say.
            f"SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off; {STANDING}",
            {"range": claim.id, "token": claim.token, "epoch": self.job.run.epoch},
        ).one()

    def copy(self, relation: str, stretch: Stretch) -> int:
        """Copy a stretch of a relation, by name, in the open transaction; returns its rows."""
        job = self.job
        base = physical.base(job.generation_id)
        if stretch.settings:
            execute(self.connection, stretch.settings)
        if self.carrier.companions:
            return self.carrier.insert(relation, stretch)
        rows = f"SELECT {', '.join(self._columns)} FROM ONLY {relation} WHERE {stretch.where}"
        values: dict[str, Any] = stretch.values
        # An index that is rebuilt from itself is a table of ours.
        if job.scan is not Scan.INDEX and not owner.is_trusted(self.connection, job.source, [relation]):
            columns = owner.row_type(self.connection, base)
            item, values = owner.relation(self.connection, job.source, rows, columns, values, [relation])
            rows = f"SELECT * FROM {item}"
        copy = f"INSERT INTO {base} ({', '.join(job.entry.physical())}) {rows}"
        return execute(self.connection, copy, values).rowcount


def work(
    database: Database, run: Run, worker: int, wait: Callable[[float], None] = time.sleep
) -> Iterator[RangeMetrics]:
    """Claim and copy ranges until none is free, the operation is paused, or this worker is one too many.

    Yields what was done on each range, as it is left. wait: how to sleep under a rate limit.
    Raises Fenced, SourceChanged, and whatever the database raises: the caller decides what is transient.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(database.connect())
        with connection.begin():
            # One that comes up after a pause leaves before it reads anything else.
            if why_stop(read_control(connection, run), worker, Phase.BUILD):
                return
            job = load_job(connection, run)
            operations.start_clock(connection, run.operation_id, run.epoch)
        shards = ShardReaders.of(database, connection, job)
        if shards is not None:
            stack.callback(shards.close)
        builder = BuildWorker(connection, job, worker, shards)
        turn = Turn(connection, run, worker, wait)
        turn.come()
        while isinstance(claim := builder.claim(), Claim):
            rows = batches = 0
            seconds = 0.0
            held: Claim | None = claim
            while held is not None:
                outcome = builder.batch(held)
                if isinstance(outcome, Stop):
                    yield RangeMetrics(worker, claim.ordinal, rows, batches, seconds, done=False)
                    return
                rows, batches, seconds = rows + outcome.rows, batches + 1, seconds + outcome.seconds
                held = outcome.claim
                if builder.is_limited:
                    # Whoever was copied for copies for this operation as well.
                    turn.rest(outcome.seconds, outcome.rows * builder.carrier.share)
            yield RangeMetrics(worker, claim.ordinal, rows, batches, seconds, done=True)


def work_left(connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
    """How many ranges are left. busy: the run's workers that are alive; what others held is free again."""
    return RANGES.left(connection, run, busy)


def finish(database: Database, run: Run) -> None:
    """Advance to seal, once every range is done. Raises InvariantViolated if one isn't, Fenced.

    Of an index over shards: SourceChanged if one has lost commits that were copied, DBAPIError if one is out of reach.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
    if row.phase == Phase.BUILD:
        check_marks(database, run.index, row.generation_id, row.id)
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
            raise InvariantViolated(f"index {run.index}: {left} ranges are not done yet; resume the operation")
        physical.forget_hashes(connection, row.generation_id)
        operations.tick(connection, run.operation_id, run.epoch)
        operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)
        operations.record_event(connection, row.index_id, row.id, run.owner, "phase", "seal")
