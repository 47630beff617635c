"""Fold: applies the delta to the base, which writers maintain directly from the switch on.

The delta only shrinks (I5), so this ends, whatever the write rate. Its blocks are cut into parts, which workers claim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine.apply_delta import Folded, Folding, left_in_delta, wait_little
from airflow_roir.engine.capture.installation import mode
from airflow_roir.engine.capture.target import DIRECT
from airflow_roir.engine.claims import Pieces, Stop, why_stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.control.run import Run, read_control, read_running
from airflow_roir.engine.control.shortage import persist
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.work.phase_work import PhaseWork, Step, Worker, begin_work
from airflow_roir.errors import InvariantViolated
from airflow_roir.operation import Phase
from airflow_roir.quantity import counted

# Blocks of the delta per transaction, one to two thousand rows: a writer of one of these rows waits at most for the
# transaction, some 40 ms.
BLOCKS_PER_STEP = 16

PARTS = Pieces("part", "roir.delta_part", "operation_id = %(operation)s", "NOT done", "next_block, end_block")
PART_FOLDED = """next_block = %(next)s, done = %(done)s, upserted = upserted + %(upserted)s,
       annihilated = annihilated + %(annihilated)s, ghosts = ghosts + %(ghosts)s, seconds = seconds + %(seconds)s"""
DELTA_BLOCKS = "SELECT pg_relation_size(%(delta)s) / current_setting('block_size')::int"
# A pass over the blocks that the delta has now, in parts; several for each worker, so that no worker waits long for the
# last part.
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
    """A worker's hold on a part of the delta. next_block: the first block that isn't folded yet."""

    id: int
    ordinal: int
    token: int
    next_block: int
    end_block: int


class FoldWorker(Worker):
    """One of the fold's parallel workers. Each method is one transaction."""

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
        """Fold the next blocks of a part; its new next_block commits together with the folded rows. Raises Fenced."""
        begun = time.monotonic()
        run, end = self.job.run, min(hold.next_block + BLOCKS_PER_STEP, hold.end_block)
        done = end == hold.end_block
        with PARTS.telling_fenced(self.connection, run, self.worker, hold), self.connection.begin():
            if stop := why_stop(read_control(self.connection, run), self.worker, Phase.FOLD):
                PARTS.release(self.connection, run, hold)
                return stop
            wait_little(self.connection)
            folded = self.folding.blocks(hold.next_block, end)
            seconds = time.monotonic() - begun
            values = {**asdict(folded), "next": end, "done": done, "seconds": round(seconds, 3)}
            PARTS.commit(
                self.connection, run, self.worker, hold, PART_FOLDED, {**values, "was": hold.next_block},
                "NOT p.done AND p.next_block = %(was)s", "%(done)s",
            )  # fmt: skip
        rest = None if done else replace(hold, next_block=end)
        return Step(folded.rows, time.monotonic() - begun, rest)


def make_worker(_database: Database, connection: Connection, run: Run, number: int) -> FoldWorker:
    """A worker of a fold. Raises Fenced, SourceChanged, InvariantViolated."""
    job = begin_work(connection, run, _job_of)
    return FoldWorker(connection, job, number)


def _job_of(connection: Connection, run: Run) -> Job:
    job = load_job(connection, run)
    if mode(connection, job.generation_id) != DIRECT:
        raise InvariantViolated(f"index {run.index}: its capture is not in direct mode; its delta was not folded")
    return job


def begin(database: Database, run: Run) -> None:
    """Cut the first pass, unless it is cut already."""
    with database.transaction() as connection:
        row = read_running(connection, run)
        if not execute(connection, IS_CUT, {"operation": run.operation_id}).scalar_one():
            _cut(connection, row)


def _blocks(connection: Connection, generation_id: int) -> int:
    """How many blocks the delta has."""
    wait_little(connection)
    return int(execute(connection, DELTA_BLOCKS, {"delta": physical.delta(generation_id)}).scalar_one())


def _cut(connection: Connection, row: OperationRow) -> None:
    blocks = _blocks(connection, row.generation_id)
    per_part = math.ceil((blocks + 1) / (row.parallelism * PARTS_PER_WORKER))
    step = math.ceil(per_part / BLOCKS_PER_STEP) * BLOCKS_PER_STEP
    execute(connection, CUT, {"operation": row.id, "step": step, "blocks": blocks})


def finish(database: Database, run: Run, _report: Callable[[str], None] = lambda line: None) -> None:
    """Begin the next pass; or advance to publish, if no row is left or writers hold all that are left.

    The publish folds these rows under the drain lock. Raises InvariantViolated if a part isn't folded yet, Fenced.
    """
    with database.transaction() as connection:
        row = read_control(connection, run)
        if row.phase != Phase.FOLD:
            return
        undone = PARTS.left(connection, run, ()).undone
        if undone:
            raise InvariantViolated(
                f"index {run.index}: {undone} parts of the delta aren't folded yet; run: roir resume "
                f"{argument(run.index)}"
            )
        folded = execute(connection, FOLDED, {"operation": run.operation_id}).one()
        wait_little(connection)
        if folded.in_last_pass and left_in_delta(connection, row.generation_id):
            _cut(connection, row)
            return
        said = (
            f"; folded {counted(folded.upserted, 'entry', 'entries')} and {counted(folded.annihilated, 'deletion')} "
            f"from the delta; {counted(folded.ghosts, 'ghost')}"
        )
        operations.advance(connection, row, run.epoch, run.owner, said)


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

    For the few rows that came between the fold and the publish. Raises OperationPaused between two steps, Fenced,
    SourceChanged.
    """

    def read() -> tuple[Job, int]:
        with database.transaction() as connection:
            read_running(connection, run)
            job = _job_of(connection, run)
            return job, _blocks(connection, job.generation_id)

    def step(job: Job, first: int) -> Folded:
        with database.transaction() as connection:
            read_running(connection, run)
            wait_little(connection)
            return Folding(connection, job.generation_id, job.entry).blocks(first, first + BLOCKS_PER_STEP)

    def left(job: Job) -> int:
        with database.transaction() as connection:
            wait_little(connection)
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
