"""Protection against a server that lost its last commits, without a second server (`test_failover.py` has one)."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, lifecycle, seal
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.sessions import server_timeline
from airflow_roir.engine.sessions.server_timeline import MOST_FAILOVERS, in_one_history, one_history
from airflow_roir.errors import Fenced, HistoryChanged
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(4)


@pytest.fixture
def database(dsn: str) -> Database:
    steps.make_table(dsn)
    return Database(dsn)


@pytest.mark.sample(0)
def test_no_two_runs_have_one_epoch_even_if_the_first_was_forgotten(database: Database) -> None:
    _, run = steps.begin(database)
    lost = start_run(database, "ix", "lost", take_over=True)
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.operation SET epoch = %(epoch)s", {"epoch": run.epoch})
    now = start_run(database, "ix", "now", take_over=True)
    assert lost.epoch != now.epoch > run.epoch
    with pytest.raises(Fenced):
        steps.build_all(database, lost)
    steps.finish_all(database, now)


def test_no_segment_is_sealed_before_all_is_copied(database: Database) -> None:
    _, run = steps.begin(database)
    assert list(seal.PHASE.work(database, run, 0)) == []
    steps.finish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_nothing_is_taken_from_an_operation_that_is_not_being_aborted(database: Database) -> None:
    prepared, run = steps.begin(database)
    abort.finish_abort(database, prepared.operation_id, "clean-up")
    assert operations.find_operation(database, "ix").status == "running"
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_in_another_history_a_function_begins_anew_and_gives_up_in_the_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session sees another timeline."""
    begun = 0

    @in_one_history
    def two_sessions(database: Database, changes: int) -> int:
        nonlocal begun
        begun += 1
        for session in range(2):
            number = begun if session and begun <= changes else 0
            monkeypatch.setattr("airflow_roir.engine.sessions.server_timeline.HISTORY", f"SELECT 'timeline {number}'")
            with database.transaction():
                pass
        return begun

    assert two_sessions(database, 2) == 3
    with database.transaction():
        pass
    begun = 0
    with pytest.raises(HistoryChanged, match="Run it again"):
        two_sessions(database, MOST_FAILOVERS)


def test_nothing_is_switched_on_a_server_that_has_lost_the_end_of_the_build(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: the switch came in the middle of the build, which then failed: "table t was altered"."""
    run = steps.sealed(database)

    def fail_over() -> None:
        run_sql(dsn, "SET session_replication_role = replica; UPDATE roir.operation SET phase = 'build'")
        monkeypatch.setattr(server_timeline, "HISTORY", "SELECT 'another timeline'")

    with before(database, "SELECT EXISTS (SELECT FROM roir.feed", fail_over):
        lifecycle.run_phases(database, run)
    events = [action for (action,) in sql(steps.session(dsn), "SELECT action FROM roir.event ORDER BY id")]
    # It ends the build and the seal again, and only then switches.
    assert events[:7] == ["prepare", "start", "phase", "phase", "phase", "phase", "switch"]
    assert operations.find_operation(database, "ix").status == "completed"
    steps.assert_exact(database)


def test_the_history_of_a_server_can_be_read_by_anybody(database: Database, dsn: str) -> None:
    """Otherwise a role without more rights would have no protection."""
    user = steps.session(dsn)
    role = f"nobody_{abs(hash(dsn))}"
    sql(user, f"CREATE ROLE {role} LOGIN")
    user.commit()
    try:
        other = Database(dsn.replace("postgres@", f"{role}@"))
        with one_history(other), other.transaction():
            assert other.look is not None
            assert other.look.__self__.history is not None  # type: ignore[attr-defined]
    finally:
        sql(user, f"DROP ROLE {role}")
        user.commit()


def test_what_was_told_is_not_gone_after_a_crash(dsn: str) -> None:
    """If a database commits asynchronously, only the sessions of its users do so."""
    user = steps.session(dsn)
    name = user.info.dbname
    sql(user, f"ALTER DATABASE {name} SET synchronous_commit = off")
    user.commit()
    with Database(dsn).transaction() as connection:
        assert execute(connection, "SHOW synchronous_commit").scalar_one() == "local"
    sql(user, f"ALTER DATABASE {name} SET synchronous_commit = remote_apply")
    user.commit()
    with Database(dsn).transaction() as connection:
        assert execute(connection, "SHOW synchronous_commit").scalar_one() == "remote_apply"
