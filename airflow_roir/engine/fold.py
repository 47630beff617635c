"""Fold: from the switch on DML maintains the base itself; what the delta holds is applied to it.

The delta only shrinks (I5), so this ends, whatever the write rate. Its blocks are cut into parts, which workers claim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from airflow_roir.engine import catalog, operations, physical
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.installation import mode
from airflow_roir.engine.capture.target import CAPTURE, DIRECT
from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.job import Job, check_fingerprint, check_partitions, load_job
from airflow_roir.engine.limits import limits_of
from airflow_roir.engine.locks import Drain, telling_of_names
from airflow_roir.engine.operations import OperationRow
from airflow_roir.engine.partitions import changes, visibility
from airflow_roir.engine.phase_work import PhaseWork, Step
from airflow_roir.engine.retry.shortage import persist
from airflow_roir.engine.run import Run, read_control, read_running
from airflow_roir.engine.unique import duplicates
from airflow_roir.entry_state import EntryState
from airflow_roir.errors import IllegalTransition, InvariantViolated, LockNotAcquired
from airflow_roir.operation import Phase, Verb

T = TypeVar("T")

# Blocks of the delta per transaction, one to two thousand rows: a writer of one of them waits for that long (some
# 40 ms) at the most.
BLOCKS_PER_STEP = 16

COPY_AGAIN = """
INSERT INTO roir.emptied (generation_id, relation)
SELECT DISTINCT 0, p.relation FROM roir.source_partition p
 WHERE p.generation_id = %(generation)s AND p.status = 'joining' AND p.bounds IS NOT NULL
"""
# also: what else changes.
SET_MODE = """
UPDATE roir.generation SET capture_mode = %(new)s, mode_xid = pg_current_xact_id()::text{also}
 WHERE id = %(generation)s AND status = 'building' AND capture_mode = %(old)s
"""
SOURCE = """
SELECT i.source_oid FROM roir.generation g JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(generation)s
"""


@dataclass(frozen=True)
class Folded:
    """What fold steps did to delta rows: upserted into the base, annihilated with a base entry, or ghost-marked."""

    upserted: int = 0
    annihilated: int = 0
    ghosts: int = 0

    def __add__(self, other: Folded) -> Folded:
        return Folded(self.upserted + other.upserted, self.annihilated + other.annihilated, self.ghosts + other.ghosts)

    @property
    def rows(self) -> int:
        """Delta rows that were dealt with."""
        return self.upserted + self.annihilated + self.ghosts


def drain(
    database: Database,
    job: Job,
    body: Callable[[Connection, Callable[[], None]], T],
    report: Callable[[str], None],
    exclusive: Sequence[str] = (),
) -> T:
    """Run `body` under the drain lock of an operation's source, with the operation's own time limits (`Drain.run`).

    `report` says whom it waits for, and so does the operation's `notice` meanwhile.
    """
    run = job.run

    def note(line: str | None) -> None:
        with database.transaction() as connection:
            operations.note_wait(connection, run.operation_id, run.epoch, line)

    def tell(line: str) -> None:
        report(line)
        note(line)

    def noted(connection: Connection, lock: Callable[[], None]) -> T:
        result = body(connection, lock)
        operations.note_wait(connection, run.operation_id, run.epoch, None)
        return result

    timeout_ms, patience_s = int(job.options["lock_timeout_ms"]), float(job.options["lock_patience_s"])
    try:
        with telling_of_names():
            source = job.source
            return Drain(database, source.sql, source.relations, timeout_ms, patience_s).run(noted, tell, exclusive)
    except LockNotAcquired:
        note(None)  # the pause that follows says it
        raise


def switch(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Switch the capture from capture to direct mode, under the drain lock. A no-op if that was done.

    Raises LockNotAcquired (try again), Fenced, SourceChanged, OperationPaused, DuplicatesFound (in a unique index).
    """
    with database.transaction() as connection:
        job = load_job(connection, run)
        done = mode(connection, job.generation_id) != CAPTURE
    if done:
        return
    # All that was written until now is looked at before the lock, so that little is left under it.
    duplicates.look_and_refuse(database, job)

    def body(connection: Connection, lock: Callable[[], None]) -> bool:
        row = read_running(connection, run)
        known: set[changes.Change] = set()
        # A leaf that is new is read through here already, the fingerprint is planned: not while writers wait.
        check_partitions(connection, job, known)
        check_fingerprint(connection, job)
        lock()
        check_fingerprint(connection, job)
        check_partitions(connection, job, known, adopt=True)
        if duplicates.look(connection, job):
            return False
        if job.entry.enforced:
            # What was copied into the delta of a table that is being attached holds no key from now on.
            execute(connection, COPY_AGAIN, {"generation": job.generation_id})
        set_mode(connection, job.generation_id, CAPTURE, DIRECT)
        installation.refresh(connection, job.source)
        operations.record_event(connection, row.index_id, row.id, run.owner, "switch", "capture to direct mode")
        return True

    if not drain(database, job, body, report):
        duplicates.refuse(database, job)


def follow_partitions(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
    """Register partitions that came since the switch: what they were truncated of before isn't compared, or shown.

    Raises LockNotAcquired, Fenced, SourceChanged.
    """
    with database.transaction() as connection:
        job = load_job(connection, run)
        came = changes.changes(connection, job.source, job.generation_id)

    def body(connection: Connection, lock: Callable[[], None]) -> None:
        read_control(connection, run)
        known: set[changes.Change] = set()
        check_partitions(connection, job, known)
        lock()
        check_partitions(connection, job, known, adopt=True)

    if came:
        drain(database, job, body, report)


def set_mode(connection: Connection, generation_id: int, old: str, new: str, also: str = "", **values: object) -> None:
    """Record the capture mode of a generation that is being built, which `capture.refresh` then renders.

    also: SQL, `column = value, …`, for what else changes with it; values: bound there.
    Raises IllegalTransition if it isn't `old`.
    """
    mode = {"generation": generation_id, "old": old, "new": new}
    if execute(connection, SET_MODE.format(also=also and f", {also}"), {**mode, **values}).rowcount != 1:
        raise IllegalTransition(
            f"generation {generation_id} is not being built in {old} mode; it can't go to {new} mode"
        )


class Folding:
    """Applies delta rows of a generation to its base."""

    def __init__(self, connection: Connection, generation_id: int, entry: Entry) -> None:
        self.connection = connection
        self.generation_id = generation_id
        self.entry = entry
        self.base = physical.base(generation_id)
        self.delta = physical.delta(generation_id)
        self.default_segment = physical.segment(generation_id, physical.DEFAULT_SEGMENT)
        # Neighbours in the base's index, which the delta's own order scatters, share its pages.
        self._in_order = f"ORDER BY {', '.join(f'c{i + 1}' for i in entry.identity_positions)}"

    def blocks(self, first: int, end: int) -> Folded:
        """Fold the delta's blocks [first, end), in the caller's transaction. It skips rows that a writer holds."""
        return self.fold("d.ctid >= %(first)s::tid AND d.ctid < %(end)s::tid", {"first": first, "end": end})

    def fold(self, where: str = "true", blocks: dict[str, int] | None = None) -> Folded:
        """As `blocks`, over all rows by default."""
        shown = self._shown() if self.entry.enforced else None
        # The base first, as the capture function's TRUNCATE locks them.
        execute(self.connection, f"LOCK TABLE {self.base} IN ROW EXCLUSIVE MODE")
        values = {name: f"({block},0)" for name, block in (blocks or {}).items()}
        # A row per state and pattern; addresses stay text, which goes back as it came: parsed here, they took a
        # quarter of a step.
        taken = execute(
            self.connection,
            "SELECT state, nulls, array_agg(tid)::text AS tids "
            f"FROM (SELECT d.ctid AS tid, d.state, {self._null_pattern()} AS nulls FROM {self.delta} d "
            f"WHERE {where} AND d.state <> '{EntryState.GHOST.value}' FOR UPDATE SKIP LOCKED) AS taken "
            "GROUP BY state, nulls",
            values,
        ).all()
        # The blocks are said again with the addresses: by a long list of these alone the planner prefers to read the
        # whole delta, in each step.
        folded = Folded()
        for row in taken:
            addresses = {**values, "tids": row.tids}
            if self.entry.enforced and not self._is_apart(row.nulls):
                addresses["tids"] = self._with_free_keys(row.nulls, where, addresses)
            if row.state == EntryState.REGULAR:
                if shown is not None:
                    folded += self._drop_hidden(row.nulls, where, addresses, shown)
                folded += Folded(upserted=self._upsert(row.nulls, where, addresses))
            else:
                folded += Folded(annihilated=self._annihilate(row.nulls, where, addresses))
                folded += Folded(ghosts=self._leave_ghosts(where, addresses))
        return folded

    def _is_apart(self, nulls: str) -> bool:
        return any(nulls[i] == "1" for i in self.entry.apart_positions)

    def _with_free_keys(self, nulls: str, where: str, values: dict[str, str]) -> str:
        """Of the delta rows of a unique generation: those whose key's entry in the base, if there is one, is ours now.

        It may be of another row, whom a writer or another step has not passed in the delta: who waited there, with rows
        of the delta locked, could deadlock with it.
        """
        key = " AND ".join(
            self.entry.same_column(i, f"b.c{i + 1}", f"m.c{i + 1}", nulls[i] == "1") for i in self.entry.key_positions
        )
        return str(
            execute(
                self.connection,
                f"WITH mine AS MATERIALIZED (SELECT d.ctid AS tid, {', '.join(self.entry.physical(prefix='d.'))} "
                f"FROM {self.delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])), "
                f"present AS MATERIALIZED (SELECT m.tid FROM mine m JOIN {self.base} b ON {key}), "
                f"free AS MATERIALIZED (SELECT m.tid FROM mine m JOIN {self.base} b ON {key} "
                "FOR UPDATE OF b SKIP LOCKED) "
                "SELECT coalesce(array_agg(m.tid), '{}')::text FROM mine m "
                "WHERE m.tid NOT IN (SELECT tid FROM present) OR m.tid IN (SELECT tid FROM free)",
                values,
            ).scalar_one()
        )

    def _shown(self) -> str | None:
        """SQL that a delta row isn't of a partition that is leaving or joining; None if there are none."""
        asked = {"generation": self.generation_id}
        if execute(self.connection, visibility.IS_SHOWN, {**asked, "alias": "d"}).scalar() is None:
            return None
        oid = execute(self.connection, SOURCE, asked).scalar_one()
        source = catalog.read_source_by_oid(self.connection, oid, check=False)
        return visibility.shown(self.connection, source, self.generation_id, "d")

    def _drop_hidden(self, nulls: str, where: str, values: dict[str, str], shown: str) -> Folded:
        """Take regular rows away that no row of the source has: the key of a unique index may be another row's."""
        held = f"{where} AND d.ctid = ANY (%(tids)s::tid[]) AND NOT {shown}"
        same = self.entry.equal("b.", "d.", {i: nulls[i] == "1" for i in self.entry.identity_positions})
        execute(
            self.connection,
            f"DELETE FROM {self.base} b USING (SELECT * FROM {self.delta} d WHERE {held}) d WHERE {same}",
            values,
        )
        # Whoever brings such a row now waits for us at its row in the delta.
        gone = execute(self.connection, f"DELETE FROM {self.delta} d WHERE {held}", values).rowcount
        return Folded(annihilated=gone)

    def _null_pattern(self) -> str:
        """SQL for which identity columns are NULL, as a string of 0s and 1s."""
        return self.entry.null_pattern(self.entry.identity_positions, "d.")

    def _upsert(self, nulls: str, where: str, values: dict[str, str]) -> int:
        columns = ", ".join(self.entry.physical())
        base, upsert = self.base, self.entry.on_conflict(by_key=self.entry.enforced)
        if self._is_apart(nulls):
            base, upsert = self.default_segment, self.entry.on_conflict()
        in_order = f"SELECT {columns} FROM gone {self._in_order}"
        return execute(
            self.connection,
            f"WITH gone AS (DELETE FROM {self.delta} d WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) "
            f"RETURNING {', '.join(self.entry.physical(prefix='d.'))}) "
            # In a unique index whoever has the key is stale (docs/architecture.md#uniqueness).
            f"INSERT INTO {base} ({columns}) {in_order} {upsert}",
            values,
        ).rowcount

    def _annihilate(self, nulls: str, where: str, values: dict[str, str]) -> int:
        """Remove antimatter together with the base's entry, if it has one; returns how often."""
        # A condition per pattern of NULLs, since only that can use the base's index.
        same = self.entry.equal("b.", "d.", {i: nulls[i] == "1" for i in self.entry.identity_positions})
        return execute(
            self.connection,
            f"WITH matched AS (DELETE FROM {self.base} b USING (SELECT *, d.ctid AS tid FROM {self.delta} d "
            f"WHERE {where} AND d.ctid = ANY (%(tids)s::tid[]) {self._in_order}) d WHERE {same} RETURNING d.tid) "
            f"DELETE FROM {self.delta} d USING matched m WHERE {where} AND d.ctid = m.tid",
            values,
        ).rowcount

    def _leave_ghosts(self, where: str, values: dict[str, str]) -> int:
        """The rest of the antimatter. A statement of its own: it needs no join with what was annihilated."""
        return execute(
            self.connection,
            f"UPDATE {self.delta} d SET state = '{EntryState.GHOST.value}' "
            f"WHERE {where} AND d.ctid = ANY (%(tids)s::tid[])",
            values,
        ).rowcount


def left_in_delta(connection: Connection, generation_id: int) -> int:
    """Delta rows that are still to be folded, ghosts not counted."""
    return int(
        execute(
            connection,
            f"SELECT count(*) FROM {physical.delta(generation_id)} WHERE state <> '{EntryState.GHOST.value}'",
        ).scalar_one()
    )


PARTS = Pieces("part", "roir.delta_part", "operation_id = %(operation)s", "NOT done", "next_block, end_block")
PART_FOLDED = """next_block = %(next)s, done = %(done)s, upserted = upserted + %(upserted)s,
       annihilated = annihilated + %(annihilated)s, ghosts = ghosts + %(ghosts)s, seconds = seconds + %(seconds)s"""
DELTA_BLOCKS = "SELECT pg_relation_size(%(delta)s) / current_setting('block_size')::int"
# A pass over the delta's blocks of now, in parts; a little more of them than there are workers, so that none waits long
# for the last.
CUT = """
INSERT INTO roir.delta_part (operation_id, pass, ordinal, next_block, end_block)
SELECT %(operation)s, last.pass + 1, last.ordinal + row_number() OVER (ORDER BY first), first,
       least(first + %(step)s, %(blocks)s + 1)
  FROM generate_series(0, %(blocks)s::bigint, %(step)s) AS first,
       (SELECT coalesce(max(pass), 0) AS pass, coalesce(max(ordinal), -1) AS ordinal
          FROM roir.delta_part WHERE operation_id = %(operation)s) AS last
"""
PARTS_PER_WORKER = 4
IS_CUT = "SELECT EXISTS (SELECT FROM roir.delta_part WHERE operation_id = %(operation)s)"
FOLDED = """
SELECT coalesce(sum(upserted), 0) AS upserted, coalesce(sum(annihilated), 0) AS annihilated,
       coalesce(sum(ghosts), 0) AS ghosts,
       coalesce(sum(upserted + annihilated + ghosts)
                FILTER (WHERE pass = (SELECT max(pass) FROM roir.delta_part WHERE operation_id = %(operation)s)), 0)
       AS in_last_pass
  FROM roir.delta_part WHERE operation_id = %(operation)s
"""


@dataclass(frozen=True)
class PartClaim:
    """A worker's hold on a part of the delta. next_block: where it is."""

    id: int
    ordinal: int
    token: int
    next_block: int
    end_block: int


class FoldWorker:
    """One of an operation's parallel workers, in the fold phase. Each method is one transaction."""

    def __init__(self, connection: Connection, job: Job, worker: int) -> None:
        self.connection = connection
        self.job = job
        self.worker = worker
        self.folding = Folding(connection, job.generation_id, job.entry)

    def claim(self) -> PartClaim | Stop:
        """Claim a part of the delta. Raises Fenced."""
        run = self.job.run
        with self.connection.begin():
            if stop := why_stop(read_control(self.connection, run), self.worker, Phase.FOLD):
                return stop
            found = PARTS.claim(self.connection, run, self.worker)
        if found is None:
            return Stop("done")
        return PartClaim(found.id, found.ordinal, found.claim_token, found.next_block, found.end_block)

    def step(self, hold: PartClaim) -> Step | Stop:
        """Fold the next blocks of a part; where it is then commits together with what was folded. Raises Fenced."""
        begun = time.monotonic()
        run, end = self.job.run, min(hold.next_block + BLOCKS_PER_STEP, hold.end_block)
        done = end == hold.end_block
        with PARTS.telling_fenced(self.connection, run, self.worker, hold), self.connection.begin():
            if stop := why_stop(read_control(self.connection, run), self.worker, Phase.FOLD):
                PARTS.release(self.connection, run, hold)
                return stop
            _wait_little(self.connection)
            folded = self.folding.blocks(hold.next_block, end)
            seconds = time.monotonic() - begun
            values = {**asdict(folded), "next": end, "done": done, "seconds": round(seconds, 3)}
            PARTS.commit(
                self.connection, run, self.worker, hold, PART_FOLDED, {**values, "was": hold.next_block},
                "NOT p.done AND p.next_block = %(was)s", "%(done)s",
            )  # fmt: skip
        rest = None if done else replace(hold, next_block=end)
        return Step(folded.rows, time.monotonic() - begun, rest)

    def let_go(self) -> None:
        """Between two steps nothing is held."""

    def close(self) -> None:
        """Nothing was opened."""


def make_worker(_database: Database, connection: Connection, run: Run, number: int) -> FoldWorker:
    """A worker of a fold. Raises Fenced, SourceChanged, InvariantViolated."""
    with connection.begin():
        job = _job_of(connection, run)
        operations.start_clock(connection, run.operation_id, run.epoch)
    return FoldWorker(connection, job, number)


def _job_of(connection: Connection, run: Run) -> Job:
    job = load_job(connection, run)
    if mode(connection, job.generation_id) != DIRECT:
        raise InvariantViolated(f"index {run.index}: the capture is not in direct mode; not folded")
    return job


def begin(database: Database, run: Run) -> None:
    """Cut the first pass, unless that was done."""
    with database.transaction() as connection:
        row = read_running(connection, run)
        if not execute(connection, IS_CUT, {"operation": run.operation_id}).scalar_one():
            _cut(connection, row)


def _cut(connection: Connection, row: OperationRow) -> None:
    _wait_little(connection)
    delta = {"delta": physical.delta(row.generation_id)}
    blocks = int(execute(connection, DELTA_BLOCKS, delta).scalar_one())
    per_part = math.ceil((blocks + 1) / (row.parallelism * PARTS_PER_WORKER))
    step = math.ceil(per_part / BLOCKS_PER_STEP) * BLOCKS_PER_STEP
    execute(connection, CUT, {"operation": row.id, "step": step, "blocks": blocks})


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Begin the next pass; or advance to publish, if nothing is left or writers hold all that is left.

    Publish folds that under the drain lock. Raises InvariantViolated if a part isn't folded yet, Fenced.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.FOLD:
            return
        undone = PARTS.left(connection, run, ()).undone
        if undone:
            raise InvariantViolated(f"index {run.index}: {undone} parts of the delta aren't folded yet; resume it")
        folded = execute(connection, FOLDED, {"operation": run.operation_id}).one()
        _wait_little(connection)
        if folded.in_last_pass and left_in_delta(connection, row.generation_id):
            _cut(connection, row)
            return
        operations.tick(connection, run.operation_id, run.epoch)
        operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)
        detail = f"publish; folded {folded.upserted} regular, {folded.annihilated} antimatter, {folded.ghosts} ghosts"
        operations.record_event(connection, row.index_id, row.id, run.owner, "phase", detail)


PHASE = PhaseWork(
    Phase.FOLD,
    PARTS,
    make_worker,
    finish,
    """
SELECT ordinal, upserted + annihilated + ghosts AS rows, seconds, done FROM roir.delta_part
 WHERE operation_id = %(operation)s
""",
    "applies the delta to the base, in passes over its blocks, while writers write to the base itself",
)


def fold_here(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> Folded:
    """Fold the whole delta in this thread, pass by pass, until only rows that writers hold remain.

    For the little that came between the fold and the publish. Raises OperationPaused at a step's boundary, Fenced,
    SourceChanged.
    """

    def read() -> tuple[Job, int]:
        with database.transaction() as connection:
            read_running(connection, run)
            job = _job_of(connection, run)
            _wait_little(connection)
            delta = {"delta": physical.delta(job.generation_id)}
            return job, int(execute(connection, DELTA_BLOCKS, delta).scalar_one())

    def step(job: Job, first: int) -> Folded:
        with database.transaction() as connection:
            read_running(connection, run)
            _wait_little(connection)
            return Folding(connection, job.generation_id, job.entry).blocks(first, first + BLOCKS_PER_STEP)

    def left(job: Job) -> int:
        with database.transaction() as connection:
            _wait_little(connection)
            return left_in_delta(connection, job.generation_id)

    total = Folded()
    while True:
        job, blocks = persist(database, run, read, report)
        passed = Folded()
        for first in range(0, blocks + 1, BLOCKS_PER_STEP):
            passed += persist(database, run, partial(step, job, first), report)
        total += passed
        if passed.rows == 0 or persist(database, run, partial(left, job), report) == 0:
            return total


def _wait_little(connection: Connection) -> None:
    """An open TRUNCATE holds base and delta: give up soon, to look for a pause."""
    execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
