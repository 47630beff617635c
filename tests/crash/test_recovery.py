"""Automatic recovery: what is tried again, for how long, and what a run leaves behind when it gives up."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from airflow_roir.engine import build
from airflow_roir.engine import database as databases
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import driving
from airflow_roir.engine.database import Database, retry
from airflow_roir.engine.retry import patience
from airflow_roir.engine.retry.patience import Patience
from airflow_roir.engine.seal import SealWorker, SegmentClaim
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.errors import Fenced
from servers.killable import Server
from tests.crash.runner import Runner
from tests.crash.scene import Scene, wait_until
from tests.engine import steps

pytestmark = pytest.mark.sample(2)


@pytest.fixture
def table(dsn: str) -> None:
    steps.make_table(dsn, 100, keys=20)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the clock by one that advances only in sleeps; returns the sleeps' durations."""
    naps: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    monkeypatch.setattr(patience.time, "monotonic", lambda: sum(naps))
    return naps


def test_an_outage_of_nearly_a_minute_is_waited_for_with_back_off(slept: list[float]) -> None:
    gone = Database("host=127.0.0.1 port=1 dbname=none")

    def work() -> str:
        if sum(slept) < DEFAULT.outage_s - 2 * patience.LONGEST_WAIT_S:
            with gone.transaction():
                raise AssertionError("nobody listens there")
        return "done"

    assert retry(work, Patience(DEFAULT)) == "done"
    assert slept[0] < 0.5
    assert max(slept) <= patience.LONGEST_WAIT_S
    assert slept[:3] == sorted(slept[:3])


def test_a_longer_outage_ends_with_the_last_error(slept: list[float]) -> None:
    gone = Database("host=127.0.0.1 port=1 dbname=none")

    def work() -> None:
        with gone.transaction():
            raise AssertionError("nobody listens there")

    with pytest.raises(OperationalError):
        retry(work, Patience(DEFAULT))
    assert 0 < DEFAULT.outage_s - sum(slept) <= 2 * patience.LONGEST_WAIT_S


def test_what_will_fail_again_is_not_tried_again(database: Database, slept: list[float]) -> None:
    tries: list[int] = []

    def work() -> None:
        tries.append(1)
        with database.transaction() as connection:
            databases.execute(connection, "SELECT 1 / 0")

    with pytest.raises(DBAPIError):
        retry(work, Patience(DEFAULT))
    assert (len(tries), slept) == (1, [])


@pytest.mark.usefixtures("table")
def test_an_error_of_any_kind_leaves_the_operation_paused_with_its_reason(database: Database) -> None:
    _, run = steps.begin(database)

    def drive() -> None:
        with driving(database, run):
            raise RuntimeError("Job aborted: Lost executor 7")

    with pytest.raises(RuntimeError):
        drive()
    row = operations.find_operation(database, "ix")
    assert (row.status, row.pause_reason) == ("paused", "Job aborted: Lost executor 7")


@pytest.mark.sample(0)
@pytest.mark.usefixtures("table")
def test_a_try_that_was_taken_for_dead_is_fenced_and_not_an_error_of_the_operation(database: Database) -> None:
    """Two tries of the same run: Spark starts a task again on another executor, while the first is only cut off."""
    _, run = steps.begin(database, ranges=1, segments=1)
    zombie, claim = steps.claimed(database, run)
    for _ in build.PHASE.work(database, run, 0):
        pass
    build.finish(database, run)
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
        sealer = SealWorker(database, connection, job, 0)
        segment = sealer.claim()
        assert isinstance(segment, SegmentClaim)
        steps.seal_all(database, run)
        # The base has its unique index by now, and the segment its own.
        # The phase isn't its own any more.
        assert zombie.step(claim) == Stop("leave")
        with pytest.raises(Fenced, match="segment"):
            sealer.index(segment)
    zombie.connection.close()
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_dead_route_is_noticed_within_a_minute_whoever_owes_an_answer(crash_server: Server) -> None:
    with Database(crash_server.dsn()).connect() as connection:
        settings = connection.connection.dbapi_connection.info.dsn_parameters
        assert int(settings["tcp_user_timeout"]) <= 60_000
        assert int(settings["keepalives_idle"]) + 4 * int(settings["keepalives_interval"]) <= 60


@pytest.mark.by_hand("sweeps")
def test_what_a_killed_worker_has_begun_is_given_up_by_the_server(scene: Scene) -> None:
    gate = scene.gate("seal")
    victim = Runner(scene.dsn, "")
    (pid,) = gate.reached()
    scene.killed("engine process", "seal")
    victim.kill()
    # The gate stays shut: as in a long index build, nothing but the server itself can end that statement.
    wait_until(
        lambda: not scene.read(f"SELECT FROM pg_stat_activity WHERE pid = {pid}"), "the dead worker's session to end"
    )
    gate.open()
    assert Runner(scene.dsn, "", "resume").ended() == "ended: completed"
    scene.finished()
