"""Seal: each segment gets its unique index, attached to the base's, and is vacuumed (docs/architecture.md#phases).

One segment is one transaction, claimed like a range.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument
from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.generation import physical, visibility
from airflow_roir.engine.locks.giving_way import GaveWay, giving_way
from airflow_roir.engine.unique import duplicates
from airflow_roir.engine.work.phase_work import PhaseWork, Step, Worker, begin_work
from airflow_roir.errors import DuplicatesFound, InvariantViolated
from airflow_roir.generation_state import SegmentStatus
from airflow_roir.operation import Phase

# A sort in memory makes a bulk B-tree build fast; half a million entries fit into this.
SORT_MEMORY_KB = 262_144

SEGMENTS = Pieces(
    "segment",
    "roir.segment",
    "generation_id = (SELECT generation_id FROM roir.operation WHERE id = %(operation)s)",
    "status <> 'sealed'",
    "status",
    "status <> 'sealed' AND refused_epoch IS DISTINCT FROM %(epoch)s",
)


REFUSED = """
SELECT count(*) FROM roir.segment
 WHERE generation_id = %(generation)s AND status <> 'sealed' AND refused_epoch = %(epoch)s
"""


@dataclass(frozen=True)
class SegmentClaim:
    """A worker's hold on a segment."""

    id: int
    ordinal: int
    status: str
    token: int


class SealWorker(Worker):
    """One of the seal's parallel workers. `index` and `vacuum` are one transaction each."""

    def __init__(self, database: Database, connection: Connection, job: Job, worker: int) -> None:
        self.database = database
        self.connection = connection
        self.job = job
        self.worker = worker
        # How often this worker gave way, by segment.
        self._retreats: Counter[int] = Counter()

    def claim(self) -> SegmentClaim | Stop:
        """Claim a segment that isn't sealed. Raises Fenced."""
        run = self.job.run
        with self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker, Phase.SEAL):
                return stop
            found = SEGMENTS.claim(self.connection, run, self.worker)
        if found is None:
            return Stop("done")
        return SegmentClaim(found.id, found.ordinal, found.status, found.claim_token)

    def step(self, hold: SegmentClaim) -> Step:
        """Index a segment, or vacuum one that is indexed. Raises DuplicatesFound if the operation stops at them."""
        begun = time.monotonic()
        gives_way = self._retreats[hold.ordinal] < self.database.limits.seal_retreats
        try:
            if hold.status == SegmentStatus.LOADING:
                indexed = self.index(hold, gives_way)
                if indexed is None and self.job.options.get("on_duplicate") == "stop":
                    duplicates.refuse(self.database, self.job)
                return Step(0, time.monotonic() - begun, indexed, done=False)
            self.vacuum(hold, gives_way)
        except GaveWay:
            # The next claim looks for a pause; then the worker queues behind the session that it gave way to.
            self._retreats[hold.ordinal] += 1
            return Step(0, time.monotonic() - begun, done=False)
        return Step(0, time.monotonic() - begun)

    def index(self, claim: SegmentClaim, gives_way: bool = True) -> SegmentClaim | None:
        """Build and attach the segment's unique index. Raises Fenced and GaveWay, with nothing changed.

        Returns None if rows share a key of a unique index: they are written down, and this run leaves the segment.

        gives_way: give up if another session waits for the segment, above all a TRUNCATE of the source.
        """
        with self._telling_fenced(claim):
            if self.job.entry.enforced:
                self._take_out_hidden(claim)
            with self._giving_way(self.connection, claim, gives_way), self.connection.begin():
                self._set_up()
                physical.hold_segment(self.connection, self.job.generation_id, claim.ordinal)
                # In a unique index, each entry that is left then has the present key of its row.
                if self.job.scan.by_blocks or self.job.entry.enforced:
                    name = physical.segment(self.job.generation_id, claim.ordinal)
                    physical.remove_touched(
                        self.connection, name, physical.delta(self.job.generation_id), self.job.entry
                    )
                if not self._build_index(claim.ordinal):
                    self._refuse(claim)
                    return None
                self._commit(claim, SegmentStatus.LOADING, SegmentStatus.INDEXED)
        return SegmentClaim(claim.id, claim.ordinal, SegmentStatus.INDEXED.value, claim.token)

    def _take_out_hidden(self, claim: SegmentClaim) -> None:
        """Deletes entries of hidden partitions, which would collide with live ones. No writer uses a segment yet."""
        with self.connection.begin():
            self._set_up()
            shown = visibility.shown(self.connection, self.job.source, self.job.generation_id)
            if shown is not None:
                name = physical.segment(self.job.generation_id, claim.ordinal)
                execute(self.connection, f"DELETE FROM {name} x WHERE NOT {shown} AND %(all)s", {"all": True})

    def _build_index(self, ordinal: int) -> bool:
        """Builds the segment's index; False if entries share a key."""
        job = self.job
        if not job.entry.enforced:
            physical.seal_segment(self.connection, job.generation_id, ordinal, job.entry)
            return True
        try:
            with self.connection.begin_nested():
                physical.seal_segment(self.connection, job.generation_id, ordinal, job.entry)
        except DBAPIError as error:
            if sqlstate(error) != "23505":
                raise
            return False
        return True

    def _refuse(self, claim: SegmentClaim) -> None:
        """Write down which rows share a key; the segment stays as it is until a later run."""
        duplicates.record_segment(self.connection, self.job, claim.ordinal)
        values = {"refused": self.job.run.epoch}
        SEGMENTS.commit(
            self.connection,
            self.job.run,
            self.worker,
            claim,
            "refused_epoch = %(refused)s",
            values,
            f"p.status = '{SegmentStatus.LOADING.value}'",
        )

    def vacuum(self, claim: SegmentClaim, gives_way: bool = True) -> None:
        """Vacuum and analyze the segment: index-only scans work at once, the planner has statistics.

        Raises Fenced, GaveWay.
        """
        with self._telling_fenced(claim), self.database.autocommit() as connection:
            name = physical.segment(self.job.generation_id, claim.ordinal)
            execute(connection, f"SET lock_timeout = {self.database.limits.table_lock_ms}")
            with self._giving_way(connection, claim, gives_way):
                execute(connection, f"VACUUM (ANALYZE) {name}")
        with self.connection.begin():
            self._commit(claim, SegmentStatus.INDEXED, SegmentStatus.SEALED)

    def _giving_way(self, connection: Connection, claim: SegmentClaim, gives_way: bool) -> AbstractContextManager[None]:
        if not gives_way:
            return nullcontext()
        generation_id = self.job.generation_id
        locked = [*physical.names(generation_id), physical.segment(generation_id, claim.ordinal)]
        return giving_way(self.database, connection, locked)

    def _set_up(self) -> None:
        # The operation's workers are the parallelism that the user asked for; the server must add none of its own.
        execute(
            self.connection,
            "SELECT set_config('max_parallel_maintenance_workers', '0', true), "
            # An open TRUNCATE holds the segment: give up soon, to look for a pause.
            "set_config('lock_timeout', %(wait)s, true), "
            "set_config('maintenance_work_mem', greatest(setting::int, %(kb)s)::text || 'kB', true) "
            "FROM pg_settings WHERE name = 'maintenance_work_mem'",
            {"kb": SORT_MEMORY_KB, "wait": str(self.database.limits.table_lock_ms)},
        )

    def _commit(self, claim: SegmentClaim, was: SegmentStatus, becomes: SegmentStatus) -> None:
        values = {"from": was.value, "to": becomes.value}
        stands, ends = "p.status = %(from)s", "%(to)s = 'sealed'"
        changes = "status = %(to)s, sealed_at = CASE WHEN %(to)s = 'sealed' THEN clock_timestamp() END"
        SEGMENTS.commit(self.connection, self.job.run, self.worker, claim, changes, values, stands, ends)

    def _telling_fenced(self, claim: SegmentClaim) -> AbstractContextManager[None]:
        return SEGMENTS.telling_fenced(self.connection, self.job.run, self.worker, claim)


def make_worker(database: Database, connection: Connection, run: Run, number: int) -> SealWorker:
    """A worker of a seal. Raises Fenced, SourceChanged."""
    job = begin_work(connection, run, load_job)
    return SealWorker(database, connection, job, number)


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Advance to fold, once every segment is sealed; in a census, segments with duplicates may stay unsealed.

    Raises DuplicatesFound if rows share a key of a unique index (all are listed then, those of the delta too),
    InvariantViolated if a segment isn't sealed for another reason, Fenced.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.SEAL:
            return
        refused = execute(connection, REFUSED, {"generation": row.generation_id, "epoch": run.epoch}).scalar_one()
        census = bool(row.options.get("census"))
        job = load_job(connection, run) if refused and not census else None
    if job is not None:
        duplicates.look_and_refuse(database, job)
        raise DuplicatesFound(
            f"index {run.index}: rows shared a key while it was sealed; run: roir resume {argument(run.index)}"
        )
    if not census:
        with database.transaction() as connection:
            # Groups that no longer share a key are recorded as healed now; the switch refuses the others.
            if duplicates.groups(connection, run.operation_id)[0]:
                duplicates.look(connection, load_job(connection, run))
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.SEAL:
            return
        left = execute(
            connection,
            "SELECT count(*) FROM roir.segment WHERE generation_id = %(generation)s AND status <> 'sealed'",
            {"generation": row.generation_id},
        ).scalar_one()
        if left != (refused if census else 0) or not (left or physical.is_sealed(connection, row.generation_id)):
            raise InvariantViolated(
                f"index {run.index}: {left} segments are not sealed yet; run: roir resume {argument(run.index)}"
            )
        operations.advance(connection, row, run.epoch, run.owner)


PHASE = PhaseWork(
    Phase.SEAL,
    SEGMENTS,
    make_worker,
    finish,
    """
SELECT s.ordinal, NULL::bigint AS rows, NULL::numeric AS seconds, s.status = 'sealed' AS done FROM roir.segment s
  JOIN roir.operation o ON o.generation_id = s.generation_id WHERE o.id = %(operation)s
""",
    "builds each segment's index at once, by a sort, which is where rows that share a unique key are found",
)
