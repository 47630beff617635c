"""A replica that never got the last commits takes over: sessions that remember those commits do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, build, clean_up, finalize, lifecycle, seal
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.sessions import kept_session
from airflow_roir.engine.sessions.kept_session import KeptSession
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.errors import Fenced, HistoryChanged
from airflow_roir.operation import Phase
from airflow_roir.options import CompactOptions
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.interposed import before
from tests.engine.looking import Looked, Sessions
from tests.engine.pair import Pair, between, pair
from tests.engine.steps import sql
from tests.engine.test_replication import BOUNDS, PARTITIONED, replayed, wait_until
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary

pytestmark = pytest.mark.sample(0)


@pytest.fixture
def both(primary: Server, dsn: str) -> Iterator[Pair]:
    with pair(primary, dsn) as found:
        yield found


def read(both: Pair, query: str) -> list[tuple[object, ...]]:
    session = steps.session(both.there)
    try:
        return sql(session, query)
    finally:
        session.close()


def go_on(database: Database) -> None:
    """Carries on as the next run does, and checks that the index is exact."""
    run = start_run(database, "ix", "next", take_over=True)
    steps.through(database, run)
    steps.assert_exact(database)


def test_a_run_that_the_new_server_never_heard_of_is_fenced(both: Pair) -> None:
    """Its workers find their operation there. The next run must not get their epoch."""
    database = Database(both.dsn)
    steps.begin(database, ranges=3, batch_rows=7)
    both.lose()
    lost = start_run(database, "ix", "lost", take_over=True)
    both.fail_over()
    now = start_run(database, "ix", "now", take_over=True)
    assert lost.epoch != now.epoch
    with pytest.raises(Fenced, match="now drives operation 1 now; lost stops"):
        list(build.PHASE.work(database, lost, 0))
    steps.build_all(database, now)
    steps.seal_all(database, now)
    lifecycle.run_phases(database, now)
    steps.assert_exact(database)


def test_a_run_whose_start_was_lost_says_so(both: Pair) -> None:
    database = Database(both.dsn)
    steps.begin(database)
    both.lose()
    lost = start_run(database, "ix", "lost", take_over=True)
    both.fail_over()
    with pytest.raises(Fenced, match="the server has lost the start of this run of operation 1 by lost"):
        list(build.PHASE.work(database, lost, 0))
    go_on(database)


@pytest.mark.by_hand("sweeps")
def test_workers_of_a_phase_that_has_not_come_yet_do_nothing(both: Pair) -> None:
    """The driver knows that all is copied, and the new server doesn't."""
    database = Database(both.dsn)
    _, run = steps.begin(database, ranges=3, segments=2, batch_rows=7)
    worker = steps.worker(database, run)
    claim = worker.claim()
    assert not isinstance(claim, Stop)
    worker.step(claim)
    worker.connection.close()
    both.lose()
    steps.build_all(database, run)
    both.fail_over()
    assert list(seal.PHASE.work(database, run, 0)) == []
    assert read(both, "SELECT DISTINCT status FROM roir.segment") == [("loading",)]
    go_on(database)


def test_an_abort_that_is_lost_takes_nothing_from_a_running_operation(both: Pair) -> None:
    database = Database(both.dsn)
    steps.begin(database)
    both.lose()
    with between(database, "SELECT roir.abort(", both.fail_over):
        assert abort.abort(database, "ix", "test").status == "aborted"
    assert read(both, "SELECT relname FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace") == []


@pytest.mark.by_hand("sweeps")
def test_an_abort_that_was_lost_is_not_finished_by_somebody_elses_number(both: Pair) -> None:
    """A clean-up that remembers the operation as aborting finds it running."""
    database = Database(both.dsn)
    prepared, _ = steps.begin(database)
    both.lose()
    requests.request_abort(database, "ix", "test")
    both.fail_over()
    abort.finish_abort(database, prepared.operation_id, "clean-up")
    go_on(database)


@pytest.mark.by_hand("sweeps")
def test_a_clean_up_takes_no_delta_of_a_generation_whose_publish_was_lost(both: Pair) -> None:
    database = Database(both.dsn)
    run = steps.folded(database)
    both.lose()
    steps.publish_all(database, run)
    with between(database, "SELECT g.id, g.index_id, g.entry", both.fail_over):
        clean_up.clean_up(database)
    run_sql(both.there, "UPDATE t SET k = 'then' WHERE id % 4 = 0", "DELETE FROM t WHERE id % 9 = 0")
    go_on(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


def test_copies_of_an_attach_that_were_lost_are_made_again(both: Pair) -> None:
    database = Database(both.dsn)
    run_sql(both.here, *PARTITIONED)
    steps.make_index(database)
    with (
        between(database, "SELECT roir.validate_attach", both.lose),
        between(database, "SELECT pg_current_xact_id", both.fail_over),
    ):
        attach.attach_partition(database, "t", "t1", BOUNDS, "test")
    assert read(both, "SELECT count(*) FROM t") == [(50,)]
    assert read(both, "SELECT count(*) FROM ix") == [(50,)]
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(
    ("lost", "over"),
    [
        ("0 waiting", "0 indexing"),
        ("0 copying", "0 folding"),
        ("0 indexing", "1 copying"),
        ("0 folding", "1 waiting"),
        ("0 folding", "done"),
        ("1 copying", "1 folding"),
    ],
)
def test_steps_of_a_compaction_that_are_lost_are_taken_again(both: Pair, lost: str, over: str) -> None:
    """Swaps too: the new server has the old segments with their triggers and lists, and the next run swaps again."""
    run_sql(both.here, "DROP TABLE t")
    steps.make_table(both.here, 200)
    database = compacting.small(both.dsn)
    steps.make_index(database, keys="k,v", segments=3)
    is_lost = False
    going = compacting.stages(
        database, compacting.begin(database, compacting.act("merge", 1, 2), compacting.act("rewrite", 0))
    )
    for stage in going:
        if stage == lost and not is_lost:
            is_lost = True
            both.lose()
        if stage == over:
            both.fail_over()
            break
        run_sql(
            both.here, "UPDATE t SET k = nullif(k, '2') WHERE id % 7 = 3", "UPDATE t SET v = v + 1 WHERE id % 9 = 1"
        )
    with suppress(Fenced, DBAPIError, StopIteration):
        # The worker has lost its session, and loses its claim if it opens another one.
        next(going)
    steps.assert_exact(database)
    for _ in compacting.stages(database, start_run(database, "ix", "next", take_over=True)):
        run_sql(both.there, "DELETE FROM t WHERE id % 11 = 4", "UPDATE t SET v = v + 1 WHERE id % 9 = 1")
        steps.assert_exact(database)
    assert compacting.left_over(both.there) == []
    assert compacting.segments(both.there) == [0, 4, 3]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(
    ("lost", "over"),
    [
        ("INSERT INTO roir_data.g1_u1", "CREATE UNIQUE INDEX"),
        ("CREATE UNIQUE INDEX", "VACUUM (ANALYZE)"),
        ("SELECT count(*), coalesce(sum(", "INSERT INTO roir_data.g1_u2"),
    ],
)
def test_a_compaction_goes_on_from_what_the_new_server_has(both: Pair, lost: str, over: str) -> None:
    """It continues automatically. In the last case a swap is lost."""
    run_sql(both.here, "DROP TABLE t")
    steps.make_table(both.here, 200)
    database = Database(both.dsn)
    steps.make_index(database, keys="k,v", segments=3)
    actions = [compacting.act("merge", 1, 2), compacting.act("rewrite", 0)]
    begun = compaction.begin(database, "ix", actions, CompactOptions(parallelism=1), "test")

    def lose() -> None:
        both.lose()
        run_sql(both.here, "UPDATE t SET k = NULL WHERE id % 9 = 0")

    with before(database, lost, lose), before(database, over, both.fail_over):
        lifecycle.drive(database, begun.index, "test")
    report = compaction.report_of(database, begun.operation_id)
    assert [unit["status"] for unit in report.units] == ["done"] * 2
    run_sql(both.there, "UPDATE t SET k = NULL WHERE id % 10 = 0", "DELETE FROM t WHERE id % 11 = 4")
    steps.assert_exact(database)
    assert compacting.left_over(both.there) == []


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("lost", ["UPDATE roir.generation SET capture_mode", "SELECT count(*) FROM roir_data.g"])
def test_a_finalize_goes_on_from_what_the_new_server_has(both: Pair, lost: str) -> None:
    """It continues automatically. In the first case the switch is lost, in the second the fold."""
    database = Database(both.dsn)
    run = steps.built(database, segments=2)
    run_sql(both.here, "UPDATE t SET k = 'touched' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")
    steps.seal_all(database, run)
    if lost.startswith("UPDATE"):
        both.lose()
    with between(database, lost, both.fail_over):
        lifecycle.run_phases(database, run)
    assert operations.find_operation(database, "ix").status == "completed"
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", ["build", "seal", "fold", "publish"])
def test_a_server_that_restarts_between_looks_is_looked_at_again(
    primary: Server, dsn: str, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    # Without the thread that looks for duplicates, which has a session of its own.
    monkeypatch.setitem(lifecycle.PHASES, Phase.BUILD, build.PHASE)
    database = Database(dsn)
    _, run = steps.begin(database, ranges=2, segments=2, parallelism=1)
    sessions = Sessions(database)
    restarts = []

    def restart(work: PhaseWork) -> None:
        if work.name == phase and len(restarts) < 2:
            restarts.append(sessions.open)
            primary.close()
            primary.start()

    lifecycle.run_phases(database, run, pools=Looked(4, restart))
    assert [len(pids) for pids in restarts] == [1, 1]
    user = steps.session(dsn)
    assert sql(user, "SELECT FROM roir.event WHERE action IN ('pause', 'fail', 'abort')") == []
    user.close()
    assert operations.find_operation(database, "ix").status == "completed"
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", ["fold", "publish"])
def test_a_failover_between_looks_that_loses_commits_is_noticed(
    both: Pair, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The phase begins again on the new server, which lacks what its workers have done."""
    database = Database(both.dsn)
    run = steps.sealed(database, segments=2, parallelism=1)
    if phase == "publish":
        steps.fold_all(database, run)
    both.lose()
    run_sql(both.here, "UPDATE t SET k = 'touched' WHERE id % 3 = 0")
    noticed: list[HistoryChanged] = []
    made = HistoryChanged.__init__

    def notice(self: HistoryChanged, *of: Any) -> None:
        noticed.append(self)
        made(self, *of)

    monkeypatch.setattr(HistoryChanged, "__init__", notice)
    over = []

    def fail_over(work: PhaseWork) -> None:
        if work.name == phase and not over:
            over.append(work.name)
            both.fail_over()

    lifecycle.run_phases(database, run, pools=Looked(1, fail_over))
    assert over == [phase]
    assert noticed
    assert operations.find_operation(database, "ix").status == "completed"
    steps.assert_exact(database)


def test_no_session_on_a_standby_is_kept(both: Pair) -> None:
    """While the primary is away, a DSN of both servers leads to the standby."""
    kept = KeptSession(Database(both.any_dsn))

    def is_standby() -> bool:
        with kept.transaction() as connection:
            return bool(execute(connection, "SELECT pg_is_in_recovery()").scalar_one())

    assert not is_standby()
    both.kill()
    assert is_standby()
    both.primary.start()
    both.is_over = False
    assert not is_standby()
    kept.close()


@pytest.mark.parametrize("moves", ["between build and seal", "in publish"])
def test_a_run_follows_the_address_though_the_demoted_server_still_answers(
    both: Pair, monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    """Found: the driver's session stayed on the demoted server. It waited for ever, or reported its publish there."""
    database = Database(both.here)
    monkeypatch.setattr(kept_session, "MOST_AGE_S", 0.2)

    def move() -> None:
        if database.dsn == both.here:
            replayed(both.here, both.there)
            both.promote()
            wait_until(lambda: read(both, "SELECT NOT pg_is_in_recovery()") == [(True,)], "the promotion")
            database.dsn = both.there

    if moves == "in publish":
        steps.folded(database, verify="before")
        publish = finalize.publishing.publish

        def moved(*of: Any) -> None:
            move()
            publish(*of)

        monkeypatch.setattr(finalize.publishing, "publish", moved)
    else:
        steps.begin(database, ranges=2, segments=2, parallelism=1)

        def finish(*of: Any) -> None:
            build.PHASE.finish(*of)
            move()

        monkeypatch.setitem(lifecycle.PHASES, Phase.BUILD, replace(build.PHASE, finish=finish))
    ended = lifecycle.drive(database, "ix", "again", take_over=True)
    assert ended.status == "completed"
    assert read(both, "SELECT status, phase FROM roir.operation") == [("completed", "done")]
    steps.assert_exact(Database(both.there))
