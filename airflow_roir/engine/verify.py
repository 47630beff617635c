"""Verify: workers claim units of a verification and compare source and index in them, inside PostgreSQL.

Stage `total`: both sides are summed. Where they differ, stage `sum`: the same by buckets of the primary key. Stage
`check`: the rows of the buckets whose sums differ are compared one by one; where only a part is verified, all rows of
that part. One unit is one transaction, claimed like a range of a build.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection, Row, func, update
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import VerifyOptions, quote
from airflow_roir.engine import build, catalog, comparison, control, mend, tables, verification
from airflow_roir.engine.build import Stop
from airflow_roir.engine.comparison import of_source
from airflow_roir.engine.database import Database, execute, retry
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.run import Job, Run, WorkLeft, check_fingerprint, driving, heartbeat, read_control, start_run
from airflow_roir.engine.verification import VerifyReport
from airflow_roir.errors import Fenced, InvariantViolated, OperationFailed, OperationPaused
from airflow_roir.operation import Phase, Status, Verb
from airflow_roir.scan_range import ScanRange

CLAIM_UNIT = """
UPDATE roir.verification_unit
   SET claim_epoch = %(epoch)s, claim_worker = %(worker)s, claim_token = claim_token + 1
 WHERE id = (SELECT id FROM roir.verification_unit
              WHERE verification_id = %(verification)s AND NOT done
                AND (claim_epoch IS NULL OR claim_epoch < %(epoch)s
                     OR claim_epoch = %(epoch)s AND claim_worker = %(worker)s)
              ORDER BY ordinal FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING id, ordinal, stage, side, relation, lower, upper, claim_token
"""

# Compare-and-set, as a build's batch (I4).
COMMIT_UNIT = """
UPDATE roir.verification_unit u
   SET done = true, claim_epoch = NULL, claim_worker = NULL, seconds = %(seconds)s, rows = s.rows, buckets = s.buckets,
       counts = s.counts, sums = s.sums
  FROM roir.operation o, ({result}) s
 WHERE u.id = %(unit)s AND u.claim_token = %(token)s AND u.claim_epoch = %(epoch)s AND NOT u.done
   AND o.id = %(operation)s AND o.epoch = %(epoch)s
RETURNING u.rows
"""
ONLY_ROWS = "SELECT %(rows)s::bigint AS rows, NULL::int[] AS buckets, NULL::bigint[] AS counts, NULL::numeric[] AS sums"

# How far the work of a verification may go on: by its quota of units, and by its time.
SPENT = """
SELECT coalesce((SELECT count(*) FILTER (WHERE done OR claim_epoch = %(epoch)s) FROM roir.verification_unit u
                  WHERE u.verification_id = v.id) >= v.quota, false)
       OR coalesce((SELECT sum(value::numeric) FROM jsonb_each_text(o.phase_seconds))
                   >= (v.options ->> 'max_seconds')::numeric, false) AS spent
  FROM roir.verification v JOIN roir.operation o ON o.id = v.operation_id
 WHERE v.id = %(verification)s
"""
# NULL where the relation is gone, or no part of the source any more; of our own segments only whether they are there.
STILL_THERE = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.oid = %(relation)s::oid
   AND (%(ours)s OR c.oid = %(source)s OR EXISTS (
        SELECT FROM pg_partition_ancestors(c.oid::regclass) a WHERE a.relid = %(source)s::oid))
"""


@dataclass(frozen=True)
class VerifyJob:
    """What a worker must know of a verification; none of it changes in a stage."""

    job: Job
    verification_id: int
    buckets: int
    suspicious: tuple[int, ...] | None
    with_delta: bool
    options: VerifyOptions


@dataclass(frozen=True)
class UnitClaim:
    """A worker's hold on a unit."""

    unit_id: int
    ordinal: int
    token: int
    stage: str
    side: str
    relation: int
    lower: list[Any] | None
    upper: list[Any] | None


@dataclass(frozen=True)
class UnitMetrics:
    """What a worker did on one unit: how many rows it read."""

    worker: int
    ordinal: int
    rows: int
    seconds: float


def load(connection: Connection, run: Run) -> VerifyJob:
    """Read what the workers of a run need. Raises Fenced, NotFound, SourceChanged."""
    row = read_control(connection, run)
    found = verification.unfinished(connection, row.id)
    generation = execute(
        connection,
        "SELECT g.entry, g.status, i.source_oid FROM roir.generation g JOIN roir.index i ON i.id = g.index_id "
        "WHERE g.id = %(id)s",
        {"id": found.generation_id},
    ).one()
    source = catalog.read_source(connection, catalog.name_of(connection, generation.source_oid))
    job = Job(
        run,
        row.index_id,
        found.generation_id,
        source,
        Entry.from_json(generation.entry),
        dict(row.options),
        row.fingerprint,
    )
    check_fingerprint(connection, job)
    suspicious = None if found.suspicious is None else tuple(found.suspicious)
    return VerifyJob(
        job, found.id, found.buckets, suspicious, generation.status == "building", VerifyOptions(**found.options)
    )


class VerifyWorker:
    """One of a verification's parallel workers. Each method is one transaction, so that tests can step it."""

    def __init__(self, connection: Connection, verify_job: VerifyJob, worker: int) -> None:
        self.connection = connection
        self.verify_job = verify_job
        self.job = verify_job.job
        self.worker = worker

    def claim(self) -> UnitClaim | Stop:
        """Claim a unit. Raises Fenced."""
        run = self.job.run
        values = {"epoch": run.epoch, "worker": self.worker, "verification": self.verify_job.verification_id}
        with self.connection.begin():
            row = read_control(self.connection, run)
            if row.status != Status.RUNNING:
                return Stop("paused")
            if self.worker >= row.parallelism:
                return Stop("leave")
            if execute(self.connection, SPENT, values).scalar_one():
                return Stop("done")
            found = execute(self.connection, CLAIM_UNIT, values).first()
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
        )

    def unit(self, claim: UnitClaim) -> UnitMetrics:
        """Compare a claimed unit; what was found and that it is done commit together.

        Raises Fenced (nothing was changed), SourceChanged.
        """
        begun = time.monotonic()
        with self.connection.begin():
            name = self._hold(claim)
            if name is None:
                rows = self._commit(claim, ONLY_ROWS, {"rows": 0}, begun)
            elif claim.side == "tree":
                rows = self._commit(claim, ONLY_ROWS, {"rows": self._check_tree(claim, name)}, begun)
            elif claim.stage != "check":
                values: dict[str, Any] = {}
                rows = self._commit(claim, self._sums(claim, name, values), values, begun)
            else:
                rows = self._commit(claim, ONLY_ROWS, {"rows": self._check(claim, name)}, begun)
        return UnitMetrics(self.worker, claim.ordinal, rows, time.monotonic() - begun)

    def _hold(self, claim: UnitClaim) -> str | None:
        """Keep partitions from being taken out while the unit is read; the relation's name, None where it is gone."""
        job = self.job
        path = ", ".join(["pg_catalog", *map(quote, job.source.operator_schemas), "pg_temp"])
        execute(
            self.connection,
            f"SET LOCAL lock_timeout = '{build.TABLE_LOCK_WAIT}'; SET LOCAL search_path = {path}; "
            # Workers are the parallelism that was asked for.
            "SET LOCAL max_parallel_workers_per_gather = 0",
        )
        for level in execute(
            self.connection,
            "SELECT c.oid::regclass::text FROM unnest(%(relations)s::oid[]) r (oid) JOIN pg_class c USING (oid) "
            "WHERE c.relkind = 'p' ORDER BY c.oid",
            {"relations": list(job.source.relations)},
        ).scalars():
            execute(self.connection, f"LOCK TABLE ONLY {level} IN ACCESS SHARE MODE")
        check_fingerprint(self.connection, job)
        values = {"relation": claim.relation, "ours": claim.side != "source", "source": job.source.oid}
        name = execute(self.connection, STILL_THERE, values).scalar()
        if name is None:
            return None
        try:
            with self.connection.begin_nested():
                execute(self.connection, f"LOCK TABLE {name} IN ACCESS SHARE MODE")
        except DBAPIError as error:
            if isinstance(error.orig, pg_errors.UndefinedTable):
                return None
            raise
        found = execute(self.connection, STILL_THERE, values).scalar()
        return None if found is None else str(found)

    def _where(self, claim: UnitClaim, values: dict[str, Any], alias: str) -> str:
        job = self.job
        if claim.side == "source":
            casts = [job.source.columns[name].comparand for name in job.source.primary_key]
            return ScanRange(claim.lower, claim.upper).condition(job.source.primary_key, casts, None, values)
        terms = []
        for sign, bound in ((">=", claim.lower), ("<", claim.upper)):
            if bound is not None:
                terms.append(f"{alias}.ctid {sign} '({int(bound[0])},0)'::tid")
        if claim.side == "delta":
            terms.append(f"{alias}.state = 'regular'")
        # What readers see: without the entries of partitions that are leaving or joining.
        terms.append(
            execute(
                self.connection,
                "SELECT coalesce(roir.is_shown(%(id)s, %(alias)s), 'true')",
                {"id": job.generation_id, "alias": alias},
            ).scalar_one()
        )
        return " AND ".join(terms)

    def _sums(self, claim: UnitClaim, name: str, values: dict[str, Any]) -> str:
        entry = self.job.entry
        read = of_source(entry, "r") if claim.side == "source" else entry.physical(prefix="r.")
        where = self._where(claim, values, "r")
        if claim.stage == "total":
            return comparison.total(entry, read, f"{name} r", where)
        return comparison.sums(entry, read, f"{name} r", where, self.verify_job.buckets)

    def _check(self, claim: UnitClaim, name: str) -> int:
        job, with_delta = self.job, self.verify_job.with_delta
        values: dict[str, Any] = {"verification": self.verify_job.verification_id, "unit": claim.unit_id}
        alias = "r" if claim.side == "source" else "s"
        where = self._where(claim, values, alias)
        if self.verify_job.suspicious is not None:
            read = of_source(job.entry, "r") if claim.side == "source" else job.entry.physical(prefix="s.")
            bucket = comparison.bucket(job.entry, read, self.verify_job.buckets)
            # A constant, so that the server looks them up by hash.
            where += f" AND {bucket} = ANY ('{{{','.join(map(str, self.verify_job.suspicious))}}}'::int[])"
        if claim.side == "source":
            sql = comparison.missing_or_different(job.source, job.entry, job.generation_id, name, where, with_delta)
        else:
            # A regular row of the delta overrides the base itself.
            of_base = with_delta and claim.side == "entry"
            sql = comparison.extra(job.source, job.entry, job.generation_id, name, where, of_base)
        return int(execute(self.connection, sql, values).scalar_one())

    def _check_tree(self, claim: UnitClaim, name: str) -> int:
        try:
            with self.connection.begin_nested():
                execute(self.connection, mend.CHECK_TREE, {"relation": claim.relation})
        except DBAPIError as error:
            if not isinstance(error.orig, pg_errors.DataCorrupted | pg_errors.IndexCorrupted):
                raise
            said = str(error.orig).split("\n", 1)[0]
            execute(
                self.connection,
                "INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key, entry_values) "
                "VALUES (%(verification)s, %(unit)s, 'corrupt', '[]', '[]', jsonb_build_array(%(name)s::text, "
                "%(said)s::text))",
                {
                    "verification": self.verify_job.verification_id,
                    "unit": claim.unit_id,
                    "name": name,
                    "said": said,
                },
            )
        return 0

    def _commit(self, claim: UnitClaim, result: str, values: dict[str, Any], begun: float) -> int:
        run = self.job.run
        committed = execute(
            self.connection,
            COMMIT_UNIT.format(result=result),
            {
                **values,
                "unit": claim.unit_id,
                "token": claim.token,
                "epoch": run.epoch,
                "operation": run.operation_id,
                # Of the statements before this one: the sums are made by this very statement.
                "seconds": round(time.monotonic() - begun, 3),
            },
        ).first()
        if committed is None:
            raise Fenced(
                f"index {run.index}: unit {claim.ordinal} of the verification is held by another worker now; "
                f"worker {self.worker} of {run.owner} stops and changed nothing"
            )
        return int(committed.rows)


def work(database: Database, run: Run, worker: int) -> Iterator[UnitMetrics]:
    """Compare units until none is free, the operation is paused, or this worker is one too many.

    Raises Fenced, SourceChanged, and whatever the database raises: the caller decides what is transient.
    """
    with database.connect() as connection:
        with connection.begin():
            verify_job = load(connection, run)
            control.start_clock(connection, run.operation_id, run.epoch)
        verifier = VerifyWorker(connection, verify_job, worker)
        while isinstance(claim := verifier.claim(), UnitClaim):
            done = verifier.unit(claim)
            if verify_job.options.repair and claim.stage == "check":
                mend.mend_unit(connection, verify_job.job, verify_job.verification_id, claim.unit_id)
            yield done


WORK_LEFT = """
SELECT count(*) FILTER (WHERE claim_epoch IS NULL OR claim_epoch < %(epoch)s) AS free, count(*) AS undone
  FROM roir.verification_unit WHERE verification_id = %(verification)s AND NOT done
"""
GIVE_BACK = """
UPDATE roir.verification_unit SET claim_epoch = NULL, claim_worker = NULL
 WHERE verification_id = %(verification)s AND NOT done AND claim_epoch = %(epoch)s AND claim_worker <> ALL (%(busy)s)
"""


def work_left(connection: Connection, run: Run, busy: Collection[int]) -> WorkLeft:
    """How many units are left. busy: the run's workers that are alive; what others held is free again."""
    found = verification.unfinished(connection, run.operation_id)
    values = {"verification": found.id, "epoch": run.epoch, "busy": list(busy)}
    execute(connection, GIVE_BACK, values)
    row = execute(connection, WORK_LEFT, values).one()
    if execute(connection, SPENT, values).scalar_one():
        return WorkLeft(0, row.undone - row.free)
    return WorkLeft(row.free, row.undone)


def finish(database: Database, run: Run) -> None:
    """End a stage: begin the next one, or close the verification. Raises InvariantViolated, Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.kind == "verify" and row.phase not in (Phase.SUM, Phase.CHECK):
            return
        found = verification.unfinished(connection, run.operation_id)
        left = work_left(connection, run, ())
        if left.undone:
            raise InvariantViolated(
                f"index {run.index}: {left.undone} units are not compared yet; resume the operation"
            )
        control.tick(connection, run.operation_id, run.epoch)
        stage = verification.stage(connection, found.id)
        if stage == "check":
            verification.close(connection, found)
            if row.kind == "verify":
                _complete(connection, row, run)
            return
        values = {"verification": found.id, "stage": stage}
        differ = list(execute(connection, comparison.SUSPICIOUS, values).scalars())
        execute(connection, FORGET_SUMS, values)
        if stage == "total" and differ:
            # Wrong, or written to between the two readings.
            execute(connection, NEXT_UNITS, {**values, "next": "sum"})
            return
        connection.execute(
            update(tables.verification).where(tables.verification.c.id == found.id).values(suspicious=differ)
        )
        if differ:
            execute(connection, NEXT_UNITS, {**values, "next": "check"})
        if row.kind == "verify":
            control.move(connection, row, Verb.ADVANCE, epoch=run.epoch)


# The same units once more, but for those that are about themselves alone.
NEXT_UNITS = """
INSERT INTO roir.verification_unit (verification_id, stage, ordinal, side, relation, lower, upper)
SELECT verification_id, %(next)s, ordinal, side, relation, lower, upper FROM roir.verification_unit
 WHERE verification_id = %(verification)s AND stage = %(stage)s AND side <> 'tree'
"""
FORGET_SUMS = """
UPDATE roir.verification_unit SET buckets = NULL, counts = NULL, sums = NULL
 WHERE verification_id = %(verification)s AND stage = %(stage)s
"""


def _complete(connection: Connection, row: Row[Any], run: Run) -> None:
    control.move(
        connection,
        row,
        Verb.COMPLETE,
        epoch=run.epoch,
        finished_at=func.clock_timestamp(),
        heartbeat_at=None,
        ticked_at=None,
    )
    last = verification.last(connection, row.id)
    assert last is not None
    said = f"{last.rows} rows: missing {last.missing}, extra {last.extra}, different {last.different}"
    control.record_event(connection, row.index_id, row.id, run.owner, "verified", said)


# --- without Spark


def verify(
    database: Database,
    index: str,
    options: VerifyOptions | None = None,
    actor: str | None = None,
    mode: str = "only",
) -> VerifyReport:
    """Compare an index with its source, from begin to end, by threads of this process, under writers too.

    The comparing is done by PostgreSQL, so this is as fast as Spark as long as one machine has the connections.
    Raises what `verification.begin` and `start_run` raise, OperationPaused where somebody paused it.
    """
    options = options or VerifyOptions()
    owner = actor or control.default_actor()
    begun = verification.begin(database, index, options, owner, mode)
    run = start_run(database, index, owner)
    with driving(database, run), heartbeat(database, run):
        _by_threads(database, run, begun.verification_id)
    return verification.report(database, begun.verification_id)


def verify_build(database: Database, run: Run) -> VerifyReport:
    """Compare the generation of a build that is about to be published, in the build's own run.

    One that was found right already isn't compared again. Raises Fenced, OperationPaused, SourceChanged.
    """

    def begin() -> int:
        with database.transaction() as connection:
            row = read_control(connection, run)
            last = verification.last(connection, row.id)
            if last is not None and (last.finished_at is None or last.found == 0):
                return int(last.id)
            generation = execute(
                connection, "SELECT entry FROM roir.generation WHERE id = %(id)s", {"id": row.generation_id}
            ).one()
            oid = execute(connection, "SELECT source_oid FROM roir.index WHERE id = %(id)s", {"id": row.index_id})
            source = catalog.read_source(connection, catalog.name_of(connection, oid.scalar_one()))
            options = VerifyOptions(parallelism=row.parallelism)
            entry = Entry.from_json(generation.entry)
            verification_id, _ = verification.plan(
                connection, row.index_id, row.id, row.generation_id, source, entry, options, "after", with_delta=True
            )
            return verification_id

    verification_id = retry(begin)
    _by_threads(database, run, verification_id)
    return verification.report(database, verification_id)


def _by_threads(database: Database, run: Run, verification_id: int) -> None:
    """Go through all stages by threads, as many as the operation's parallelism. Raises OperationPaused."""

    def is_open() -> bool:
        with database.transaction() as connection:
            _read_running(connection, run)
            return verification.is_open(connection, verification_id)

    def workers() -> int:
        with database.transaction() as connection:
            return int(_read_running(connection, run).parallelism)

    def left() -> WorkLeft:
        with database.transaction() as connection:
            return work_left(connection, run, ())

    def share(worker: int) -> None:
        retry(lambda: list(work(database, run, worker)))

    while retry(is_open):
        number = retry(workers)
        with ThreadPoolExecutor(max_workers=number, thread_name_prefix="roir-verify") as pool:
            for done in [pool.submit(share, worker) for worker in range(number)]:
                done.result()
        # Paused: what is left stays. A parallelism that was lowered leaves units, too.
        if retry(is_open) and not retry(left).undone:
            retry(lambda: finish(database, run))


def _read_running(connection: Connection, run: Run) -> Row[Any]:
    row = read_control(connection, run)
    if row.status == Status.FAILED:
        raise OperationFailed(f"index {run.index}: {row.error}")
    if row.status != Status.RUNNING:
        raise OperationPaused(f"index {run.index}: operation {row.id} was paused: {row.pause_reason}")
    return row
