"""Clocks that jump, hearts that beat through long work, and the heartbeat of the dead: all by the server's clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from airflow_roir.engine import seal
from airflow_roir.engine.control import run, sign_of_life
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.seal import SealWorker, SegmentClaim
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced, OperationRunning
from tests.crash.scene import wait_until
from tests.engine import steps

pytestmark = pytest.mark.sample(2)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 1000, keys=20)


def jump(database: Database, seconds: int) -> None:
    """The server's clock jumps forward by `seconds`: all that it wrote is older by that much."""
    with database.transaction() as connection:
        execute(
            connection,
            "UPDATE roir.operation SET heartbeat_at = heartbeat_at - %(s)s * interval '1 s', "
            "ticked_at = ticked_at - %(s)s * interval '1 s'",
            {"s": seconds},
        )


def age(database: Database) -> float:
    """Seconds since the last heartbeat, by the server's clock."""
    with database.transaction() as connection:
        query = "SELECT extract(epoch FROM clock_timestamp() - heartbeat_at) FROM roir.operation"
        return float(execute(connection, query).scalar_one())


@pytest.mark.parametrize("seconds", [-86_400, -20, 20, 29, 31, 3_600, 86_400])
def test_time_never_goes_backwards_and_a_jump_counts_as_one_heartbeat_at_most(database: Database, seconds: int) -> None:
    prepared, one = steps.begin(database)
    run.start_clock(database, one)
    seen = [operation_status(database, prepared.operation_id).total_execution_time]
    for _ in range(3):
        jump(database, seconds)
        with database.transaction() as connection:
            assert sign_of_life.tick(connection, one.operation_id, one.epoch)
        seen.append(operation_status(database, prepared.operation_id).total_execution_time)
    assert seen == sorted(seen)
    steps_made = [after - before for before, after in pairwise(seen)]
    # The work in between took next to nothing: all of it is the jump, and no jump is longer than a heartbeat's life.
    assert all(0 <= step <= sign_of_life.HEARTBEAT_FRESH_S + 0.001 for step in steps_made), steps_made


@pytest.mark.sample(0)
@pytest.mark.parametrize("seconds", [-86_400, 86_400])
def test_after_a_jump_who_lives_beats_again_and_who_died_is_replaced(database: Database, seconds: int) -> None:
    _, first = steps.begin(database)
    jump(database, seconds)
    # Its next heartbeat is by the new clock.
    with database.transaction() as connection:
        assert sign_of_life.tick(connection, first.operation_id, first.epoch)
    with pytest.raises(OperationRunning, match="test"):
        start_run(database, "ix", "another")
    # Without a next heartbeat, another run takes over at once, also after a jump back by a day.
    jump(database, seconds)
    second = start_run(database, "ix", "another")
    # The run that was taken for dead does no harm, and no more than the other wants.
    with database.transaction() as connection:
        assert not sign_of_life.tick(connection, first.operation_id, first.epoch)
    with pytest.raises(Fenced, match="another"):
        steps.build_all(database, first)
    steps.finish_all(database, second)
    steps.assert_exact(database)


def test_a_heartbeat_goes_on_through_a_long_batch_and_a_long_index_build(dsn: str) -> None:
    database = Database(dsn, limits=Limits(heartbeat_every_s=0.02))
    _, one = steps.begin(database, ranges=1, segments=1, batch_rows=2000)

    def beats_now() -> None:
        # As old as one that is about to be taken for dead; the next beat makes it young.
        jump(database, sign_of_life.HEARTBEAT_FRESH_S - 1)
        wait_until(lambda: age(database) < sign_of_life.HEARTBEAT_FRESH_S - 2, "the next heartbeat")
        with pytest.raises(OperationRunning):
            start_run(database, "ix", "another")

    with run.heartbeat(database, one):
        worker, claim = steps.claimed(database, one)
        # In the middle of a batch's transaction, which stays open for as long as it likes.
        with worker.connection.begin() as open_batch:
            steps.half_a_batch(worker, claim)
            beats_now()
            open_batch.rollback()
        assert isinstance(worker.step(claim), Step)
        worker.connection.close()
        steps.build_all(database, one)
        with database.connect() as connection:
            with connection.begin():
                job = load_job(connection, one)
            sealer = SealWorker(database, connection, job, 0)
            segment = sealer.claim()
            assert isinstance(segment, SegmentClaim)
            with connection.begin() as open_index:
                execute(connection, f"CREATE INDEX ON roir_data.g1_s00{segment.ordinal} (c1)")
                beats_now()
                open_index.rollback()
        for _ in seal.PHASE.work(database, one, 0):
            pass
        seal.finish(database, one)
    steps.finish_all(database, one)
    steps.assert_exact(database)


def test_a_dead_runs_heartbeat_expires(database: Database) -> None:
    steps.begin(database)
    with pytest.raises(OperationRunning, match="is being driven by test"):
        start_run(database, "ix", "the next")
    jump(database, sign_of_life.HEARTBEAT_FRESH_S + 1)
    steps.finish_all(database, start_run(database, "ix", "the next"))
    steps.assert_exact(database)
