"""Fills the rows that a child had before its reference: workers claim ranges, and give each row its parent's place.

A worker waits for no row lock: rows that others hold, and those of parents that others hold, are left for the end of
the phase. Rows without a parent stay as they are; the operation pauses until the user has repaired them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import argument, quote
from airflow_roir.engine.build import RANGES as BUILD_RANGES
from airflow_roir.engine.claims import Stop, why_stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import Database, execute, to_json
from airflow_roir.engine.generation.entry import is_null
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.reference import functions, record
from airflow_roir.engine.reference.prepare import make_functions
from airflow_roir.engine.reference.reference import Reference, ReferenceStatus
from airflow_roir.engine.scan.batch_size import BatchSize
from airflow_roir.engine.scan.copier import BATCH_DONE, BATCH_STOOD
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source.source import Source
from airflow_roir.engine.work.phase_work import PhaseWork, Step, Worker, begin_work
from airflow_roir.errors import InvariantViolated, LockNotAcquired, OrphansFound
from airflow_roir.operation import Phase
from airflow_roir.scan_range import ScanRange

RANGES = replace(BUILD_RANGES, columns="lower, upper, watermark, relation", elsewhere="false")
BATCH_S = 0.1
# How many of the rows that others held are tried again at once.
HELD_ROWS = 1_000
SHOWN_ORPHANS = 5
RELATION = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.oid = %(oid)s"


@dataclass(frozen=True)
class FillJob:
    """The facts that a worker needs of its operation."""

    run: Run
    reference: Reference
    parent: Source
    child: Source
    batch_rows: int


@dataclass(frozen=True)
class FillClaim:
    """A worker's hold on a range of the child. relation: the leaf's oid."""

    id: int
    ordinal: int
    token: int
    relation: int
    scan: ScanRange


def load(connection: Connection, run: Run) -> FillJob:
    """Read the reference of a run, for its workers. Raises Fenced, NotFound, SourceChanged."""
    row = read_control(connection, run)
    reference, parent, child = record.load(connection, record.of_operation(connection, row.id))
    return FillJob(run, reference, parent, child, row.batch_rows)


class FillWorker(Worker):
    """One of an operation's parallel workers. Each call of `step` is one transaction."""

    def __init__(self, connection: Connection, job: FillJob, worker: int) -> None:
        self.connection = connection
        self.job = job
        self.worker = worker
        self._size = BatchSize(BATCH_S)

    def claim(self) -> FillClaim | Stop:
        """Claim a range; one that this worker's earlier try held comes first. Raises Fenced."""
        run = self.job.run
        with self.connection.begin():
            if stop := why_stop(read_control(self.connection, run), self.worker, Phase.FILL):
                return stop
            found = RANGES.claim(self.connection, run, self.worker)
        if found is None:
            return Stop("done")
        scan = ScanRange(found.lower, found.upper, found.watermark)
        return FillClaim(found.id, found.ordinal, found.claim_token, found.relation, scan)

    def step(self, hold: FillClaim) -> Step | Stop:
        """Fill the next rows of a range; rows and watermark in one transaction (I4). Raises Fenced."""
        begun = time.monotonic()
        run = self.job.run
        with RANGES.telling_fenced(self.connection, run, self.worker, hold), self.connection.begin():
            row = read_control(self.connection, run)
            if stop := why_stop(row, self.worker, Phase.FILL):
                RANGES.release(self.connection, run, hold)
                return stop
            rows, last = self._fill(hold, self._size.rows(self.job.batch_rows, 1.0))
            values = {
                "watermark": None if last is None else to_json(last),
                "old_watermark": None if hold.scan.watermark is None else to_json(hold.scan.watermark),
                "done": last is None,
                "rows": rows,
                "seconds": round(time.monotonic() - begun, 3),
                "mark": None,
            }
            RANGES.commit(self.connection, run, self.worker, hold, BATCH_DONE, values, BATCH_STOOD, "%(done)s")
        took = time.monotonic() - begun
        self._size.took(rows, took)
        rest = None if last is None else replace(hold, scan=replace(hold.scan, watermark=last))
        return Step(rows, took, rest, paced=rows)

    def _fill(self, claim: FillClaim, limit: int) -> tuple[int, list[str] | None]:
        """Fill at most `limit` rows of a range; returns their number, and the last one's key, None at the end."""
        connection, child = self.connection, self.job.child
        prepare_session(connection, child)
        name = execute(connection, RELATION, {"oid": claim.relation}).scalar()
        if name is None:
            # The partition was dropped, with its rows.
            return 0, None
        key = ", ".join(map(quote, child.primary_key))
        texts = ", ".join(f"{child.columns[c].text('s')} AS k{n}" for n, c in enumerate(child.primary_key))
        values: dict[str, Any] = {}
        where = claim.scan.condition(child.primary_key, child.comparands, None, values)
        found = execute(
            connection,
            f"SELECT * FROM (SELECT row_number() OVER (ORDER BY {key}) AS n, {texts} FROM ONLY {name} s WHERE {where} "
            f"ORDER BY {key} LIMIT {limit}) x ORDER BY n DESC LIMIT 1",
            values,
        ).first()
        if found is None:
            return 0, None
        last: list[str] = list(found[1:])
        values = {}
        where = claim.scan.condition(child.primary_key, child.comparands, last, values)
        execute(connection, fill_statement(self.job.reference, f"ONLY {name}", where), values)
        return found.n, last if found.n == limit else None


def prepare_session(connection: Connection, child: Source) -> None:
    """Set what the transaction of a batch needs: it reads the child in the order of its primary key."""
    path = ", ".join(["pg_catalog", *map(quote, child.operator_schemas), "pg_temp"])
    execute(
        connection,
        f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}; SET LOCAL search_path = {path}; "
        "SET LOCAL enable_sort = off; SET LOCAL enable_seqscan = off",
    )


def due(reference: Reference) -> str:
    """SQL, true of a row `c` of the child that has a key and no place."""
    known = [f"NOT {is_null(f'c.{quote(name)}')}" for name in reference.keys]
    return " AND ".join([*known, f"({' OR '.join(is_null(f'c.{quote(name)}') for name in reference.added)})"])


def fill_statement(reference: Reference, relation: str, where: str, limit: str = "") -> str:
    """The statement that fills those of the rows whose locks are free. limit: a LIMIT of the rows to try."""
    keys = ", ".join(f"c.{quote(name)} AS k{n}" for n, name in enumerate(reference.keys, start=1))
    asked = ", ".join(f"d.k{n}" for n in range(1, len(reference.keys) + 1))
    sets = ", ".join(f"{quote(name)} = f.f{n}" for n, name in enumerate(reference.added, start=1))
    columns = ", ".join(f"f{n}" for n in range(1, len(reference.added) + 1))
    return f"""
WITH due AS MATERIALIZED (
    SELECT c.tableoid AS leaf, c.ctid AS spot, {keys} FROM {relation} c WHERE {where} AND {due(reference)} {limit}
       FOR NO KEY UPDATE SKIP LOCKED),
found AS MATERIALIZED (
    SELECT d.leaf, d.spot, f.* FROM due d
     CROSS JOIN LATERAL {reference.object("find")}({asked}, '{functions.SKIP}') f ({columns}))
UPDATE {relation} c SET {sets} FROM found f
 WHERE c.tableoid = f.leaf AND c.ctid = f.spot AND NOT {is_null("f.f1")}
"""


def make_worker(_database: Database, connection: Connection, run: Run, number: int) -> FillWorker:
    """Make a worker of a reference. Raises Fenced, NotFound."""
    return FillWorker(connection, begin_work(connection, run, load), number)


def finish(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """End the operation: fill the rows that others held, let PostgreSQL check all rows, drop what is needed no more.

    Raises OrphansFound (rows without a parent), LockNotAcquired (others hold rows), InvariantViolated, Fenced.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.FILL:
            return
        if left := RANGES.left(connection, run, ()).undone:
            raise InvariantViolated(
                f"index {run.index}: {left} ranges are not done yet; run: roir resume {argument(run.index)}"
            )
        job = load(connection, run)
    _fill_rest(database, job, report)
    _validate(database, job, report)
    with database.transaction() as connection:
        row = read_control(connection, run)
        # No row is left to be filled when its parent is deleted.
        make_functions(connection, job.reference, job.parent, job.child, filling=False)
        record.move(connection, job.reference.id, ReferenceStatus.FILLING, ReferenceStatus.ACTIVE)
        operations.complete(connection, row, run.epoch)
        said = f"{quote(job.reference.name)} of {job.child.sql}: {row_count(row)}"
        operations.record_event(connection, row.index_id, row.id, run.owner, "referenced", said)


def row_count(row: Any) -> str:
    """The rows of the child, as the operation knew them, in words."""
    return f"about {row.rows_estimate} rows"


def _fill_rest(database: Database, job: FillJob, report: Callable[[str], None]) -> None:
    """Fill the rows that others held. Raises OrphansFound, LockNotAcquired."""
    patience = database.limits.clean_up_s
    deadline = time.monotonic() + patience
    while True:
        with database.transaction() as connection:
            prepare_session(connection, job.child)
            execute(connection, "SET LOCAL enable_seqscan = on; SET LOCAL enable_sort = on")
            some = fill_statement(job.reference, job.child.sql, "true", f"LIMIT {HELD_ROWS}")
            filled = execute(connection, some).rowcount
            orphans, others = _left(connection, job)
        if not orphans and not others:
            return
        if filled:
            continue
        if orphans:
            raise OrphansFound(_says(job, orphans))
        report(f"index {job.run.index}: waiting for transactions that hold rows of {job.child.name}, or their parents")
        if time.monotonic() > deadline:
            raise LockNotAcquired(
                f"index {job.run.index}: transactions hold rows of {job.child.name}, or their parents, for longer than "
                f"{patience:g} s. End them, then run: roir resume {argument(job.run.index)}"
            )
        time.sleep(0.2)


def _left(connection: Connection, job: FillJob) -> tuple[list[str], bool]:
    """Some keys of rows without a parent, and whether other rows are left."""
    reference = job.reference
    same = " AND ".join(
        f"p.k{n} {reference.equals[n - 1]} c.{quote(name)}" for n, name in enumerate(reference.keys, start=1)
    )
    parent = f"EXISTS (SELECT FROM {reference.object('parent')} p WHERE {same})"
    values = ", ".join(f"c.{quote(name)}::text" for name in reference.keys)
    rows = f"FROM {job.child.sql} c WHERE {due(reference)}"
    query = f"SELECT DISTINCT concat_ws(', ', {values}) {rows} AND NOT {parent} LIMIT {SHOWN_ORPHANS}"
    orphans = list(execute(connection, query).scalars())
    return orphans, bool(execute(connection, f"SELECT EXISTS (SELECT {rows})").scalar_one())


def orphans_query(reference: Reference, child: Source) -> str:
    """SQL that lists a child's rows without a parent, once every range is filled."""
    columns = ", ".join(map(quote, dict.fromkeys((*child.primary_key, *reference.keys))))
    known = [f"{quote(name)} IS NOT NULL" for name in reference.keys]
    return f"SELECT {columns} FROM {child.sql} WHERE {' AND '.join([*known, f'{quote(reference.added[0])} IS NULL'])}"


def _says(job: FillJob, orphans: list[str]) -> str:
    keys = ", ".join(f"({one})" for one in orphans)
    return (
        f"index {job.run.index}: rows of {job.child.name} have keys that {job.parent.name} hasn't: {keys}. List them: "
        f"{orphans_query(job.reference, job.child)}. Change or delete them, then run: roir resume "
        f"{argument(job.run.index)}"
    )


def _validate(database: Database, job: FillJob, report: Callable[[str], None]) -> None:
    """Let PostgreSQL check all rows. Writers go on meanwhile."""
    attempts = Attempts(
        database,
        job.child.sql,
        job.child.relations,
        database.limits.attempt_ms,
        database.limits.clean_up_s,
        waiter=Waiter("reference", job.run.index),
    )

    def body(connection: Connection) -> None:
        execute(connection, "SET LOCAL roir.own_ddl = 'on'")
        execute(connection, f"ALTER TABLE {job.child.sql} VALIDATE CONSTRAINT {quote(job.reference.name)}")

    attempts.run(body, report)


PHASE = PhaseWork(
    Phase.FILL,
    RANGES,
    make_worker,
    finish,
    "SELECT ordinal, rows, seconds, done FROM roir.scan_range WHERE operation_id = %(operation)s",
    "gives the child's rows the places of their parents, for the foreign key",
)
