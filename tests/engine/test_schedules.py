"""Schedules are harmless: operations are paused, resumed, changed, killed or aborted, and the index is the same.

Workers are stepped in random order by a printed seed. Workers that were killed or fenced come back as zombies.
"""

from __future__ import annotations

import os
import random

import pytest

from airflow_roir.engine import abort, build, fold, publish, seal, switch
from airflow_roir.engine.build import BuildWorker, Claim
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.seal import SealWorker, SegmentClaim
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, OperationPaused
from airflow_roir.operation import Phase, Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.writers import Writer, at_work

ROWS = 600
MOST_WORKERS = 8


class Schedule:
    """One operation of index `ix`, driven through a random schedule."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        # One session for all looks: to connect takes longer than to look.
        self.look = database.engine.connect()
        self.chance = random.Random(seed)
        _, self.run = steps.begin(
            database, include="v", batch_rows=25, ranges=9, segments=4, scan=("key", "block")[seed % 2]
        )
        self.workers: dict[int, tuple[BuildWorker, Claim | None]] = {}
        self.zombies: list[tuple[BuildWorker, Claim]] = []
        self.fenced = self.batches = 0
        self.neighbour = False

    def row(self) -> operations.OperationRow:
        with self.look.begin():
            return operations.read_operation(self.look, self.run.operation_id)

    def build(self) -> None:
        """Takes random steps until every range is done."""
        while not self._built():
            getattr(
                self,
                self.chance.choices(
                    ["step", "pause", "change", "kill", "zombie", "aside"], weights=[60, 4, 6, 6, 6, 3]
                )[0],
            )()
        self._close()
        self._running()
        build.finish(self.database, self.run)

    def step(self) -> None:
        """Lets a worker claim a range or copy a batch."""
        self._running()
        number = self.chance.randrange(MOST_WORKERS)
        if number not in self.workers:
            if number >= self.row().parallelism:
                return
            self.workers[number] = (steps.worker(self.database, self.run, number), None)
        worker, claim = self.workers[number]
        if claim is None:
            got = worker.claim()
            if isinstance(got, Claim):
                self.workers[number] = (worker, got)
                return
        else:
            outcome = worker.step(claim)
            if isinstance(outcome, Step):
                self.batches += 1
                self.workers[number] = (worker, outcome.rest)
                return
        self._forget(number)

    def pause(self) -> None:
        """Pauses; some workers see it before the next run fences the others."""
        requests.pause(self.database, "ix", "schedule", "by chance")
        for number in list(self.workers):
            worker, claim = self.workers[number]
            if self.chance.random() < 0.5 and claim is not None:
                assert not isinstance(worker.step(claim), Step), "nothing is copied while paused"
                self._forget(number)

    def change(self) -> None:
        """Changes the parallelism of the running operation."""
        if self.row().status == Status.RUNNING:
            requests.change_options(
                self.database, "ix", actor="schedule", parallelism=self.chance.randint(1, MOST_WORKERS)
            )

    def kill(self) -> None:
        """Kills a worker in the middle of a batch: its transaction is rolled back, its claim stays."""
        held = [number for number, (_, claim) in self.workers.items() if claim is not None]
        if not held:
            return
        worker, claim = self.workers.pop(self.chance.choice(held))
        assert claim is not None
        with worker.connection.begin() as transaction:
            steps.half_a_batch(worker, claim)
            transaction.rollback()
        if self.chance.random() < 0.5:
            self.zombies.append((worker, claim))
        else:
            worker.connection.close()

    def zombie(self) -> None:
        """Lets a worker that was taken for dead continue from its place."""
        if not self.zombies:
            return
        worker, claim = self.zombies.pop(self.chance.randrange(len(self.zombies)))
        try:
            worker.step(claim)
        except Fenced:
            self.fenced += 1
        worker.connection.close()

    def aside(self) -> None:
        """Begins another operation on the same source, or aborts it."""
        if self.neighbour:
            abort.abort(self.database, "aside", "schedule")
        else:
            steps.begin(self.database, "aside", "t", "v", batch_rows=50)
        self.neighbour = not self.neighbour

    def seal(self) -> None:
        """Seals by workers, some of which die between the index and the vacuum."""
        while True:
            if self.chance.random() < 0.2:
                requests.pause(self.database, "ix", "schedule", "by chance")
            self._running()
            with self.database.connect() as connection:
                with connection.begin():
                    job = load_job(connection, self.run)
                worker = SealWorker(self.database, connection, job, 0)
                claim = worker.claim()
                if not isinstance(claim, SegmentClaim):
                    break
                if claim.status == "loading":
                    claim = worker.index(claim)
                if self.chance.random() < 0.3:
                    continue  # died here: the next try of worker 0 vacuums it
                worker.vacuum(claim)
        seal.finish(self.database, self.run)

    def finalize(self) -> None:
        """Folds and publishes, with a pause in between."""
        switch.switch(self.database, self.run)
        if self.chance.random() < 0.5:
            requests.pause(self.database, "ix", "schedule", "by chance")
            with pytest.raises(OperationPaused):
                fold.fold_here(self.database, self.run)
            self._running()
        switch.switch(self.database, self.run)
        steps.fold_delta(self.database, self.run)
        publish.publish(self.database, self.run)

    def _running(self) -> Run:
        """Resumes a paused operation in a new run with another parallelism."""
        if self.row().status == Status.PAUSED:
            self.run = steps.start_with(self.database, self.chance.randint(1, MOST_WORKERS), owner="schedule")
            # A worker that didn't see the pause is fenced at its next commit.
            self.zombies += [(worker, claim) for worker, claim in self.workers.values() if claim is not None]
            self.workers.clear()
        return self.run

    def _built(self) -> bool:
        with self.look.begin():
            left = execute(
                self.look, "SELECT count(*) FROM roir.scan_range WHERE operation_id = %(id)s AND NOT done",
                {"id": self.run.operation_id},
            ).scalar_one()  # fmt: skip
            if left and not any(claim for _, claim in self.workers.values()):
                build.PHASE.left(self.look, self.run, busy=[])
        return not left

    def _forget(self, number: int) -> None:
        self.workers.pop(number)[0].connection.close()

    def _close(self) -> None:
        for worker, _ in [*self.workers.values(), *self.zombies]:
            worker.connection.close()


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(int(os.environ.get("ROIR_SCHEDULES", "8"))))
def test_the_index_is_identical_to_an_undisturbed_builds(database: Database, dsn: str, seed: int) -> None:
    print(f"seed {seed}")
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, nullif(i % 20, 7)::text, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    writers = [Writer(dsn, seed, number, ROWS * 2) for number in range(3)]
    with at_work(writers):
        schedule = Schedule(database, seed)
        schedule.build()
        assert schedule.row().phase == Phase.SEAL
        schedule.seal()
        schedule.finalize()
        steps.assert_exact(database)
    steps.assert_exact(database)
    steps.make_index(database, "calm", "t", "k", "v")
    user = steps.session(dsn)
    for one, other in (("ix", "calm"), ("calm", "ix")):
        assert steps.sql(user, f"SELECT * FROM {one} EXCEPT ALL SELECT * FROM {other}") == []
