"""Fold: from the switch on DML maintains the base itself; what the delta holds is applied to it.

The delta only shrinks (I5), so this ends, whatever the write rate. One call of `FoldWorker.step` is one transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import catalog, operations
from airflow_roir.engine import generation as physical
from airflow_roir.engine.capture import installation
from airflow_roir.engine.capture.installation import mode
from airflow_roir.engine.capture.target import CAPTURE, DIRECT
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.entry import Entry
from airflow_roir.engine.governor.turn import Turn
from airflow_roir.engine.job import Job, check_fingerprint, check_partitions, load_job
from airflow_roir.engine.limits import limits_of
from airflow_roir.engine.locks import Drain, telling_of_names
from airflow_roir.engine.partitions import changes, visibility
from airflow_roir.engine.retry.shortage import patience_of, persist
from airflow_roir.engine.run import Run, read_control
from airflow_roir.engine.running import read_running
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


class FoldWorker:
    """Applies delta rows to the base."""

    def __init__(self, connection: Connection, generation_id: int, entry: Entry) -> None:
        self.connection = connection
        self.generation_id = generation_id
        self.entry = entry
        self.base = physical.base(generation_id)
        self.delta = physical.delta(generation_id)
        self.default_segment = physical.segment(generation_id, physical.DEFAULT_SEGMENT)
        # Neighbours in the base's index, which the delta's own order scatters, share its pages.
        self._in_order = f"ORDER BY {', '.join(f'c{i + 1}' for i in entry.identity_positions)}"

    def step(self, first: int, end: int) -> Folded:
        """Fold the delta's blocks [first, end), in one transaction. It skips rows that a writer holds."""
        with self.connection.begin():
            _wait_little(self.connection)
            return self.fold("d.ctid >= %(first)s::tid AND d.ctid < %(end)s::tid", {"first": first, "end": end})

    def fold(self, where: str = "true", blocks: dict[str, int] | None = None) -> Folded:
        """As `step`, in the caller's transaction and over all rows by default."""
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


def work(database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> Folded:
    """Fold the whole delta with the operation's parallelism, pass by pass, until only held rows remain.

    Raises OperationPaused at a step's boundary, Fenced, SourceChanged.
    """

    def read() -> Job:
        with database.transaction() as connection:
            read_running(connection, run)
            job = load_job(connection, run)
            if mode(connection, job.generation_id) != DIRECT:
                raise InvariantViolated(f"index {run.index}: the capture is not in direct mode; not folded")
            return job

    job = persist(database, run, read, report)

    def begin_pass() -> tuple[int, int]:
        with database.transaction() as connection:
            # All of them, however little is granted now: they share it, and a pass may see it grow.
            workers = int(read_running(connection, run).parallelism)
            _wait_little(connection)
            blocks = execute(
                connection,
                "SELECT pg_relation_size(%(delta)s) / current_setting('block_size')::int",
                {"delta": physical.delta(job.generation_id)},
            ).scalar_one()
            return workers, int(blocks)

    def left() -> int:
        with database.transaction() as connection:
            _wait_little(connection)
            return left_in_delta(connection, job.generation_id)

    total = Folded()
    while True:
        workers, blocks = persist(database, run, begin_pass, report)
        starts = iter(range(0, blocks + 1, BLOCKS_PER_STEP))
        next_start = threading.Lock()

        def fold_share(
            starts: Iterator[int] = starts, lock: threading.Lock = next_start, workers: int = workers
        ) -> Folded:
            folded = Folded()
            patience = patience_of(database, run, report=report)
            first: int | None = None
            while True:
                try:
                    with database.connect() as connection:
                        worker = FoldWorker(connection, job.generation_id, job.entry)
                        turn = Turn(connection, run, among=workers)
                        turn.come()
                        while True:
                            if first is None:
                                with lock:
                                    first = next(starts, None)
                            if first is None:
                                return folded
                            with connection.begin():
                                read_running(connection, run)
                            begun = time.monotonic()
                            folded += worker.step(first, first + BLOCKS_PER_STEP)
                            first = None
                            patience.renew()
                            turn.rest(time.monotonic() - begun)
                except DBAPIError as error:
                    # Its step is taken again, whether it was committed or not: what it folded is gone from the delta.
                    if not patience.waits(error):
                        raise

        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="roir-fold") as pool:
            passed = sum((share.result() for share in [pool.submit(fold_share) for _ in range(workers)]), Folded())
        total += passed
        if persist(database, run, left, report) == 0 or passed.rows == 0:
            return total


def finish(database: Database, run: Run, folded: Folded) -> None:
    """Advance to publish, which folds what writers still hold in the delta, under the drain lock. Raises Fenced."""
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.FOLD:
            return
        operations.tick(connection, run.operation_id, run.epoch)
        operations.move(connection, row, Verb.ADVANCE, epoch=run.epoch)
        detail = f"publish; folded {folded.upserted} regular, {folded.annihilated} antimatter, {folded.ghosts} ghosts"
        operations.record_event(connection, row.index_id, row.id, run.owner, "phase", detail)


def _wait_little(connection: Connection) -> None:
    """An open TRUNCATE holds base and delta: give up soon, to look for a pause."""
    execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
