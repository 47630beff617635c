"""Verify: compares an index with its source under writers, down to single rows, in stages of units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument
from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.control.job import Job, check_fingerprint
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.generation.feeds import is_apart
from airflow_roir.engine.readers import view_check
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import hashes, record, units
from airflow_roir.engine.verify.apart import apart
from airflow_roir.engine.verify.job import VerifyJob
from airflow_roir.engine.verify.units import Units
from airflow_roir.engine.verify.worker import LIMITS, UNITS, VerifyWorker
from airflow_roir.engine.work.phase_work import PhaseWork, begin_work
from airflow_roir.errors import InvariantViolated
from airflow_roir.generation_state import GenerationStatus
from airflow_roir.operation import Phase, Verb
from airflow_roir.options import VerifyOptions


def load(connection: Connection, run: Run) -> VerifyJob:
    """Reads the verification of a run, for its workers. Raises Fenced, NotFound, SourceChanged."""
    row = read_control(connection, run)
    found = record.unfinished(connection, row.id)
    generation = execute(
        connection,
        "SELECT g.entry, g.status, i.source_oid, i.shard_column FROM roir.generation g "
        "JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(id)s",
        {"id": found.generation_id},
    ).one()
    source = catalog.read_source_by_oid(connection, generation.source_oid)
    job = Job(
        run,
        row.index_id,
        found.generation_id,
        source,
        Entry.from_json(generation.entry),
        dict(row.options),
        row.fingerprint,
        stamp=catalog.stamp(connection, source.oid),
    )
    check_fingerprint(connection, job)
    suspicious = None if found.suspicious is None else tuple(found.suspicious)
    return VerifyJob(
        job,
        found.id,
        found.buckets,
        suspicious,
        generation.status == GenerationStatus.BUILDING,
        VerifyOptions(**found.options),
        generation.shard_column,
    )


def make_worker(database: Database, connection: Connection, run: Run, number: int) -> VerifyWorker:
    """Makes a worker of a verification. Raises Fenced, SourceChanged."""
    job = begin_work(connection, run, load)
    if job.shard_column is not None:
        return apart().verify_worker(database, connection, job, number)
    return VerifyWorker(connection, job, number)


NOTHING = {"verification": 0, "spent": True, "until": 0}


def named_in_units(connection: Connection, run: Run) -> Mapping[str, Any]:
    """The values that the SQL of the units uses: those of the run's unfinished verification, else of none."""
    last = record.last(connection, run.operation_id)
    if last is None or last.finished_at is not None:
        return NOTHING
    found = {"verification": last.id}
    return {**found, **execute(connection, LIMITS, found).one()._mapping}


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Ends a stage: begins the next one, or closes the verification. Raises InvariantViolated, Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.kind == "verify" and row.phase not in (Phase.SUM, Phase.CHECK):
            return
        last = record.last(connection, run.operation_id)
        if last is not None and last.finished_at is not None:
            # It is closed already: the answer to that commit was lost.
            return
        found = record.unfinished(connection, run.operation_id)
        left = UNITS.left(connection, run, (), named_in_units(connection, run))
        if left.undone:
            raise InvariantViolated(
                f"index {run.index}: {left.undone} units are not compared yet; run: roir resume {argument(run.index)}"
            )
        sign_of_life.tick(connection, run.operation_id, run.epoch)
        stage = record.stage(connection, found.id)
        units_of = apart().units if is_apart(connection, found.generation_id) else Units
        pieces = units_of(connection, row.index_id, found)
        if stage in ("check", "whole"):
            partial = VerifyOptions(**found.options).is_partial
            if stage == "check" and not partial and pieces.plan_last():
                return
            if row.kind == "verify":
                view_check.verify(connection, found.id, found.generation_id, VerifyOptions(**found.options).repair)
            record.close(connection, found)
            if row.kind == "verify":
                _complete(connection, row, run)
            return
        values = {"verification": found.id, "stage": stage}
        differ = list(execute(connection, hashes.SUSPICIOUS, values).scalars())
        if stage == "sum":
            differ = pieces.summed(differ)
        mixed = execute(connection, MIXED, values).scalar_one()
        execute(connection, FORGET_SUMS, values)
        if stage == "total" and (differ or mixed):
            # The sides differ, or a write came between two readings.
            pieces.again(stage, "sum", differ)
            return
        execute(connection, SET_SUSPICIOUS, {"verification": found.id, "buckets": differ})
        if differ:
            pieces.again(stage, "check", differ)
        if row.kind == "verify":
            operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)


# Sums by blocks hold in one snapshot only: between two, a row may move from an unread block to one that was read.
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
    last = record.last(connection, row.id)
    assert last is not None
    if last.complete and last.found == last.repaired:
        tamper.forgive(connection, last.generation_id)
        apart().trust(connection, last)
    said = f"{last.rows} rows: missing {last.missing}, extra {last.extra}, different {last.different}"
    said += f", damaged {last.damaged}" if last.damaged else ""
    said += f", duplicate {last.duplicate}" if last.duplicate else ""
    operations.record_event(connection, row.index_id, row.id, run.owner, "verified", said)


def begin_of_build(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Begins to compare the generation of a build that is about to be published, in the build's own run.

    If a comparison has found no errors already, none begins. Raises Fenced, OperationPaused, SourceChanged.
    """

    def begin() -> int:
        with database.transaction() as connection:
            row = read_control(connection, run)
        options = VerifyOptions(parallelism=row.parallelism)
        tables = apart().tables(database, row.generation_id, options)
        with database.transaction() as connection:
            row = read_control(connection, run)
            last = record.last(connection, row.id)
            if last is not None and (last.finished_at is None or last.found == 0):
                return int(last.id)
            source = catalog.source_of_index(connection, row.index_id)
            if row.phase != Phase.PUBLISH:
                raise InvariantViolated(f"index {run.index} is in {row.phase}; it is compared once it is folded")
            if tables is not None:
                return tables.plan(connection, row.index_id, row.id, options, "after")[0]
            verification_id, _ = units.plan(
                connection, row.index_id, row.id, row.generation_id, source, options, "after", with_delta=True
            )
            return verification_id

    persist(database, run, begin, report)


def phase(name: Phase, why: str) -> PhaseWork:
    """The work of a phase that compares units."""
    return PhaseWork(name, UNITS, make_worker, finish, LISTED, why, values=named_in_units, has_stages=True)


# Each row of the table counts once: neither the entries, nor a closer look at what differs.
LISTED = """
SELECT u.ordinal, u.seconds, u.done,
       CASE WHEN u.side IN ('source', 'heap') AND (u.stage = 'total' OR v.suspicious IS NULL AND u.stage = 'check')
            THEN u.rows END AS rows
  FROM roir.verification_unit u
  JOIN roir.verification v ON v.id = u.verification_id WHERE v.operation_id = %(operation)s
"""
SUM = phase(Phase.SUM, "sums index and table, by buckets of keys where they differ")
CHECK = phase(Phase.CHECK, "compares the rows of the buckets that differ one by one, and repairs what it finds")
