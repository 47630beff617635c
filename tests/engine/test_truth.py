"""The figures of an operation never fall: over pauses, kills, resumes, phases, partitions, repeated comparisons."""

from __future__ import annotations

import pytest
from sqlalchemy.pool import QueuePool

from airflow_roir.engine import abort, build, publish, switch
from airflow_roir.engine.control import operations, requests, sign_of_life
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.partitions import attach, detach
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import comparing, record, units
from airflow_roir.engine.verify.comparing import load
from airflow_roir.engine.verify.job import UnitClaim
from airflow_roir.engine.verify.worker import VerifyWorker
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.test_attach import BOUNDS, LOADED
from tests.engine.test_partitions import make
from tests.engine.test_schedules import Schedule

pytestmark = pytest.mark.sample(1)

GROWING = ("percent_complete", "rows", "total_execution_time")


class Watch:
    """Looks at the newest operation of `ix`, and fails if any figure is less than at the last look."""

    def __init__(self, database: Database) -> None:
        # One session for all looks, like the page's.
        self.database = Database(database.dsn, "roir page", poolclass=QueuePool, pool_size=1)
        self.looks: list[OperationStatus] = []

    def __call__(self) -> OperationStatus:
        now = progress(self.database, "ix")
        if self.looks:
            was = self.looks[-1]
            fallen = [name for name in GROWING if getattr(now, name) < getattr(was, name)]
            assert not fallen, f"{fallen} fell: {was} was before {now}"
        assert 0 <= now.percent_complete <= 100
        assert (now.percent_complete == 100) == (now.status == "completed")
        for one, after in zip(now.samples, now.samples[1:], strict=False):
            assert one <= after, "neither do the samples"
            assert (one[1], one[2]) <= (after[1], after[2])
        self.looks.append(now)
        return now

    def check_clock(self) -> None:
        """The seconds of work in the samples don't fall either, nor run ahead."""
        query = "SELECT array_agg(worked ORDER BY at) FROM roir.progress_sample GROUP BY operation_id"
        with self.database.transaction() as connection:
            operations = execute(connection, query).scalars().all()
        for seconds in operations:
            assert seconds == sorted(seconds)
            assert seconds[-1] < 30

    def compare(self, run_on: Database, run: Run) -> None:
        """Compares every unit before the publish by one worker, with looks in between."""
        with run_on.connect() as connection:
            with connection.begin():
                job = load(connection, run)
            worker = VerifyWorker(connection, job, 0)
            while isinstance(claim := worker.claim(), UnitClaim):
                self()
                worker.unit(claim)
                self()
            worker.close()
        comparing.finish(run_on, run)
        self()


class Watched(Schedule):
    """A random schedule, with looks between its steps."""

    def __init__(self, database: Database, seed: int) -> None:
        super().__init__(database, seed)
        self.watch = Watch(database)

    def row(self) -> operations.OperationRow:
        self.watch()
        return super().row()

    def step(self) -> None:
        super().step()
        self.watch()

    def kill(self) -> None:
        super().kill()
        self.watch()

    def zombie(self) -> None:
        super().zombie()
        self.watch()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.sample(0)) for n in range(2, 12))])
def test_nothing_falls_through_a_whole_build(database: Database, dsn: str, seed: int) -> None:
    """By key and by block. A comparison that finds a difference is repeated from its beginning."""
    print(f"seed {seed}")
    steps.make_table(dsn, 120)
    schedule = Watched(database, seed)
    watch = schedule.watch
    schedule.build()
    schedule.seal()
    generation = schedule.row().generation_id
    run_sql(dsn, f"DELETE FROM {physical.base(generation)} WHERE c2 = 7")
    switch.switch(database, schedule.run)
    steps.fold_delta(database, schedule.run)
    watch()
    for attempt in range(2):
        if attempt:
            # The missing entry is repaired; the next run compares all of it again.
            run_sql(dsn, f"INSERT INTO {physical.base(generation)} (c1, c2, c3) SELECT k, id, v FROM t WHERE id = 7")
            requests.pause(database, "ix", "schedule", "by chance")
            schedule._running()
        found = _begin_comparison(database, schedule.run)
        while not _is_compared(database, found):
            watch.compare(database, schedule.run)
    publish.publish(database, schedule.run)
    assert watch().percent_complete == 100
    watch.check_clock()
    assert len({one.phase for one in watch.looks}) == 5
    schedule.look.close()


def _begin_comparison(database: Database, run: Run) -> int:
    with database.transaction() as connection:
        row = operations.read_operation(connection, run.operation_id)
        source = catalog.source_of_index(connection, row.index_id)
        found, _ = units.plan(
            connection, row.index_id, row.id, row.generation_id, source, VerifyOptions(), "after", with_delta=True
        )
    return found


def _is_compared(database: Database, verification_id: int) -> bool:
    with database.transaction() as connection:
        return not record.is_open(connection, verification_id)


def test_nothing_falls_where_partitions_come_and_go(database: Database, dsn: str) -> None:
    make(dsn)
    run_sql(dsn, *LOADED)
    _, run = steps.begin(database, include="v", ranges=6, segments=2, batch_rows=30)
    watch = Watch(database)
    worker = steps.worker(database, run)
    moments = iter(
        (
            lambda: attach.attach_partition(database, "t", "t3", BOUNDS, "test"),
            lambda: run_sql(dsn, "CREATE TABLE t4 PARTITION OF t FOR VALUES FROM (40) TO (50)"),
            lambda: detach.detach_partition(database, "t1", "test"),
        )
    )
    claim = worker.claim()
    while isinstance(claim, build.Claim):
        outcome = worker.step(claim)
        assert isinstance(outcome, Step)
        watch()
        next(moments, lambda: None)()
        watch()
        claim = outcome.rest or worker.claim()
    worker.connection.close()
    build.finish(database, run)
    steps.seal_all(database, run)
    watch()
    steps.fold_all(database, run)
    watch()
    steps.publish_all(database, run)
    watch()


def test_an_aborted_verification_stays_as_far_as_it_was(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    steps.make_index(database)
    run = verifying.begin(database)
    watch = Watch(database)
    worker = verifying.worker(database, run)
    for _ in range(2):
        worker.unit(verifying.claim(worker))
        watch()
    worker.close()
    was = watch()
    assert 0 < was.percent_complete < 100
    requests.request_abort(database, "ix", "test")
    watch()
    abort.abort(database, "ix", "test")
    assert (watch().percent_complete, watch().status) == (was.percent_complete, "aborted")


def test_nothing_falls_when_the_servers_clock_is_set_back(database: Database, dsn: str) -> None:
    """The clock is set back by an hour."""
    steps.make_table(dsn, 120)
    _, run = steps.begin(database, ranges=4, batch_rows=10)
    watch = Watch(database)
    for _ in range(2):
        for _ in range(2):
            worker = steps.worker(database, run)
            worker.step(worker.claim())  # type: ignore[arg-type]
            worker.connection.close()
            run_sql(dsn, "UPDATE roir.progress_sample SET at = at - interval '2 seconds'")
            with database.transaction() as connection:
                sign_of_life.tick(connection, run.operation_id, run.epoch)
            watch()
        run_sql(dsn, "UPDATE roir.progress_sample SET at = at + interval '1 hour'")
        watch()
    requests.pause(database, "ix", "test")
    assert len({one[0] for one in watch().samples}) > 3


REPLACE = """
CREATE OR REPLACE FUNCTION roir.percent_of(kind text, status text, phase text, copied double precision,
                                           sealed double precision, compared double precision)
RETURNS numeric LANGUAGE sql VOLATILE AS $$ SELECT trunc(({})::numeric, 1) $$
"""
BROKEN = {
    "each phase from 0 on": "99 * CASE phase WHEN 'build' THEN copied ELSE sealed END",
    "not by what is done": "99 * random()",
}


@pytest.mark.parametrize("variant", sorted(BROKEN))
def test_the_watch_sees_a_percentage_that_falls(database: Database, dsn: str, variant: str) -> None:
    """Without the samples' trigger, which would also hold the percentage."""
    steps.make_table(dsn)
    run_sql(dsn, REPLACE.format(BROKEN[variant]), "ALTER TABLE roir.operation DISABLE TRIGGER sample")
    _, run = steps.begin(database, ranges=4, segments=2)
    watch = Watch(database)

    def whole() -> None:
        for _ in build.PHASE.work(database, run, 0):
            watch()
        build.finish(database, run)
        for _ in range(5):
            watch()

    with pytest.raises(AssertionError, match="percent"):
        whole()
