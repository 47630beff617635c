"""Verify: compare an index with its source, to the row, under writers; by Spark's workers or by threads.

`work`, `work_left` and `finish` are to a verification what those of `build` and `seal` are to a build.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine import by_threads as threads
from airflow_roir.engine import catalog, marks, operations
from airflow_roir.engine.claims import WorkLeft
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.governor.governing import governing
from airflow_roir.engine.governor.turn import Turn
from airflow_roir.engine.readers import view_check
from airflow_roir.engine.retry.shortage import persist
from airflow_roir.engine.run import Run, driving, heartbeat, read_control, start_run
from airflow_roir.engine.shards import repair
from airflow_roir.engine.shards import units as apart
from airflow_roir.engine.shards.compare import worker_of
from airflow_roir.engine.shards.shard import lanes_of
from airflow_roir.engine.verify import comparison, report, units, verification
from airflow_roir.engine.verify.job import UnitClaim, UnitMetrics, load
from airflow_roir.engine.verify.report import VerifyReport
from airflow_roir.engine.verify.worker import LIMITS, UNITS
from airflow_roir.errors import InvariantViolated, OperationPaused
from airflow_roir.operation import Phase, Status, Verb
from airflow_roir.options import VerifyOptions


def work(database: Database, run: Run, worker: int) -> Iterator[UnitMetrics]:
    """Compare units until none is free, the operation is paused, or this worker is one too many.

    Raises Fenced, SourceChanged, and whatever the database raises: the caller decides what is transient.
    """
    with database.connect() as connection:
        with connection.begin():
            verify_job = load(connection, run)
            operations.start_clock(connection, run.operation_id, run.epoch)
        verifier = worker_of(database, connection, verify_job, worker)
        # Nobody waits with a snapshot open.
        turn = Turn(connection, run, worker, letting_go=verifier.close)
        turn.come()
        try:
            while isinstance(claim := verifier.claim(), UnitClaim):
                done = None if claim.compared else verifier.unit(claim)
                to_mend = done is None or (done.found > 0 and verify_job.options.repair)
                if to_mend and not verifier.mend(claim):
                    return
                if done is not None:
                    yield done
                    turn.rest(done.seconds)
        finally:
            verifier.close()


def work_left(connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
    """How many units are left. busy: the run's workers that are alive; what others held is free again."""
    values = {"verification": verification.unfinished(connection, run.operation_id).id}
    limits = execute(connection, LIMITS, values).one()
    return UNITS.left(connection, run, busy, {**values, **limits._mapping})


def finish(database: Database, run: Run) -> None:
    """End a stage: begin the next one, or close the verification. Raises InvariantViolated, Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.kind == "verify" and row.phase not in (Phase.SUM, Phase.CHECK):
            return
        last = verification.last(connection, run.operation_id)
        if last is not None and last.finished_at is not None:
            # The answer to the commit that closed it was lost.
            return
        found = verification.unfinished(connection, run.operation_id)
        left = work_left(connection, run, ())
        if left.undone:
            raise InvariantViolated(
                f"index {run.index}: {left.undone} units are not compared yet; resume the operation"
            )
        operations.tick(connection, run.operation_id, run.epoch)
        stage = verification.stage(connection, found.id)
        is_apart = bool(lanes_of(connection, found.generation_id))
        if stage in ("check", "whole"):
            partial = VerifyOptions(**found.options).is_partial
            if stage == "check" and not partial and _plan_last(connection, row, found, is_apart):
                return
            if row.kind == "verify":
                view_check.verify(connection, found.id, found.generation_id, VerifyOptions(**found.options).repair)
            verification.close(connection, found)
            if row.kind == "verify":
                _complete(connection, row, run)
            return
        values = {"verification": found.id, "stage": stage}
        differ = list(execute(connection, comparison.SUSPICIOUS, values).scalars())
        if is_apart and stage == "sum":
            differ = apart.of_summed(connection, found.id, found.generation_id, differ)
        mixed = execute(connection, MIXED, values).scalar_one()
        execute(connection, FORGET_SUMS, values)

        def again(new: str) -> None:
            if is_apart:
                apart.next_units(connection, found.id, found.generation_id, stage, new, differ)
            else:
                units.next_units(connection, found.id, catalog.source_of_index(connection, row.index_id), stage, new)

        if stage == "total" and (differ or mixed):
            # Wrong, or written to between two readings.
            again("sum")
            return
        execute(connection, SET_SUSPICIOUS, {"verification": found.id, "buckets": differ})
        if differ:
            again("check")
        if row.kind == "verify":
            operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)


def _plan_last(connection: Connection, row: Row[Any], found: Row[Any], is_apart: bool) -> bool:
    """After the check: what explains what it found; True if there is anything."""
    if is_apart:
        return apart.plan_looks(connection, found.id)
    return units.plan_whole(connection, found.id, catalog.source_of_index(connection, row.index_id))


# By blocks nothing is known but in one snapshot: a row may move from where it wasn't read yet to where it was.
MIXED = """
SELECT bool_or(side = 'heap') AND count(DISTINCT snapshot) > 1 FROM roir.verification_unit
 WHERE verification_id = %(verification)s AND stage = %(stage)s AND snapshot IS NOT NULL
"""
SET_SUSPICIOUS = "UPDATE roir.verification SET suspicious = %(buckets)s::int[] WHERE id = %(verification)s"
FORGET_SUMS = """
UPDATE roir.verification_unit SET buckets = NULL, counts = NULL, sums = NULL
 WHERE verification_id = %(verification)s AND stage = %(stage)s
"""


def _complete(connection: Connection, row: Row[Any], run: Run) -> None:
    operations.complete(connection, row, run.epoch)
    last = verification.last(connection, row.id)
    assert last is not None
    if last.complete and last.found == last.mended:
        marks.forgive(connection, last.generation_id)
        repair.trust(connection, last)
    said = f"{last.rows} rows: missing {last.missing}, extra {last.extra}, different {last.different}"
    said += f", damaged {last.damaged}" if last.damaged else ""
    said += f", duplicate {last.duplicate}" if last.duplicate else ""
    operations.record_event(connection, row.index_id, row.id, run.owner, "verified", said)


# --- without Spark


def verify(
    database: Database,
    index: str,
    options: VerifyOptions | None = None,
    actor: str | None = None,
    mode: str = "only",
) -> VerifyReport:
    """Compare an index with its source, from begin to end, by threads of this process, while users write.

    The comparing is done by PostgreSQL, so this is as fast as Spark as long as one machine has the connections.
    Raises what `verification.begin` and `start_run` raise, OperationPaused where somebody paused it.
    """
    options = options or VerifyOptions()
    owner = actor or operations.default_actor()
    return verify_begun(database, verification.begin(database, index, options, owner, mode), owner)


def verify_begun(database: Database, begun: verification.BegunVerification, owner: str) -> VerifyReport:
    """As `verify`, of a verification that has begun: its options may have changed since."""
    run = start_run(database, begun.index, owner)
    with driving(database, run), heartbeat(database, run), governing(database, run):
        by_threads(database, run, begun.verification_id)
    # `driving` ends quietly where it is paused.
    with database.transaction() as connection:
        row = operations.read_operation(connection, run.operation_id)
    if row.status == Status.PAUSED:
        raise OperationPaused(f"index {run.index}: paused by {row.paused_by}: {row.pause_reason}")
    return report.report(database, begun.verification_id)


def verify_build(database: Database, run: Run) -> VerifyReport:
    """Compare the generation of a build that is about to be published, in the build's own run.

    One that was found right already isn't compared again. Raises Fenced, OperationPaused, SourceChanged.
    """

    def begin() -> int:
        with database.transaction() as connection:
            row = read_control(connection, run)
        options = VerifyOptions(parallelism=row.parallelism)
        surveyed = apart.survey(database, row.generation_id, options)
        with database.transaction() as connection:
            row = read_control(connection, run)
            last = verification.last(connection, row.id)
            if last is not None and (last.finished_at is None or last.found == 0):
                return int(last.id)
            source = catalog.source_of_index(connection, row.index_id)
            if row.phase != Phase.PUBLISH:
                raise InvariantViolated(f"index {run.index} is in {row.phase}; it is compared once it is folded")
            if surveyed is not None:
                return apart.plan(connection, row.index_id, row.id, surveyed, options, "after")[0]
            verification_id, _ = units.plan(
                connection, row.index_id, row.id, row.generation_id, source, options, "after", with_delta=True
            )
            return verification_id

    verification_id = persist(database, run, begin)
    by_threads(database, run, verification_id)
    return database.retry(lambda: report.report(database, verification_id))


def by_threads(database: Database, run: Run, verification_id: int) -> None:
    """Go through all stages by threads, as many as the operation has at the time. Raises OperationPaused."""
    threads.by_threads(
        database,
        run,
        work=lambda worker: work(database, run, worker),
        left=lambda connection, busy: work_left(connection, run, busy),
        finish=lambda: finish(database, run),
        is_open=lambda connection: verification.is_open(connection, verification_id),
    )
