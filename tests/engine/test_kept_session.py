"""A driver looks by one session, which is replaced without notice whenever it isn't as good as a new one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import build, lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.sessions import kept_session, server_timeline
from airflow_roir.engine.sessions.kept_session import KeptSession, kept_sessions
from airflow_roir.engine.sessions.server_timeline import one_history
from airflow_roir.engine.work.phase_work import PhaseWork
from airflow_roir.errors import HistoryChanged
from airflow_roir.operation import Phase
from tests.conftest import database_dsn, run_sql
from tests.engine import compacting, steps, verifying
from tests.engine.looking import Looked, Sessions
from tests.engine.steps import sql
from tests.engine.test_replication import wait_until

OF_A_BUILD = ("build", "seal", "fold", "publish")
IDLE = "SELECT state, backend_xid IS NULL AND backend_xmin IS NULL FROM pg_stat_activity WHERE pid = %s"
ENDED = "SELECT FROM roir.event WHERE action IN ('pause', 'fail', 'abort')"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread looks for duplicates beside the driver, so that each session is known; none ends by its age."""
    monkeypatch.setattr(kept_session, "MOST_AGE_S", 3600.0)
    monkeypatch.setitem(lifecycle.PHASES, Phase.BUILD, build.PHASE)


@pytest.fixture
def database(dsn: str) -> Database:
    steps.make_table(dsn, 300)
    return Database(dsn)


@pytest.fixture
def kept(database: Database) -> Iterator[KeptSession]:
    kept = KeptSession(database)
    yield kept
    kept.close()


def pid_of(kept: KeptSession) -> int:
    """The pid of the session, seen by it."""
    with kept.transaction() as connection:
        assert execute(connection, "SHOW search_path").scalar_one() == "pg_catalog, pg_temp"
        return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())


def indexed(database: Database, phase: str) -> None:
    """Makes the index that an operation other than a build needs."""
    if phase not in OF_A_BUILD:
        steps.make_index(database, segments=3)


def begun(database: Database, phase: str, index: str = "ix") -> Run:
    """A run of an operation that has the phase. index: of a build."""
    if phase in OF_A_BUILD:
        return steps.begin(database, index, ranges=2, segments=2, parallelism=1)[1]
    if phase == "sum":
        return verifying.begin(database, parallelism=1)
    return compacting.begin(database, compacting.act("rewrite", 0))


def is_over(database: Database, run: Run) -> None:
    """Checks the end of a run."""
    assert operations.find_operation(database, run.index).status == "completed"
    steps.assert_exact(database, run.index)


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", ["publish", "sum", "compact"])
def test_the_number_of_sessions_does_not_depend_on_the_number_of_looks(database: Database, phase: str) -> None:
    indexed(database, phase)
    sessions = Sessions(database)
    counts = []
    for looks in (2, 12):
        run = begun(database, phase, f"ix{looks}")
        before = sessions.opened
        lifecycle.run_phases(database, run, pools=Looked(looks))
        counts.append(sessions.opened - before)
        assert sessions.open == []
        is_over(database, run)
    print(phase, counts)
    assert counts[0] == counts[1]


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", [*OF_A_BUILD, "sum", "compact"])
def test_a_session_that_ends_between_looks_is_replaced_in_every_phase(database: Database, dsn: str, phase: str) -> None:
    """Between looks it holds no transaction and no snapshot."""
    indexed(database, phase)
    run = begun(database, phase)
    sessions = Sessions(database)
    user = steps.session(dsn)
    user.autocommit = True
    killed = []

    def kill(work: PhaseWork) -> None:
        if work.name == phase:
            [pid] = sessions.open
            assert sql(user, IDLE, pid) == [("idle", True)]
            assert sql(user, "SELECT pg_terminate_backend(%s, 10000)", pid) == [(True,)]
            killed.append(pid)

    said: list[str] = []
    lifecycle.run_phases(database, run, said.append, Looked(3, kill))
    assert len(set(killed)) == len(killed) >= 3
    assert sessions.open == []
    assert not [line for line in said if "waiting" in line]
    assert sql(user, ENDED) == []
    is_over(database, run)


@pytest.mark.parametrize("how", ["terminated", "idle for too long"])
def test_a_session_that_has_ended_is_replaced_before_it_is_used(kept: KeptSession, dsn: str, how: str) -> None:
    """The caller doesn't notice, and the new session has the settings of new sessions."""
    user = steps.session(dsn)
    user.autocommit = True
    first = pid_of(kept)
    assert pid_of(kept) == first
    if how == "terminated":
        sql(user, "SELECT pg_terminate_backend(%s, 10000)", first)
    else:
        with kept.transaction() as connection:
            execute(connection, "SET idle_session_timeout = '1ms'")
        wait_until(lambda: not sql(user, "SELECT FROM pg_stat_activity WHERE pid = %s", first), "the session's end")
    assert pid_of(kept) != first


def test_a_session_that_hangs_is_replaced(kept: KeptSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_session, "CONNECT_TIMEOUT_S", 0.2)
    first = pid_of(kept)
    os.kill(first, signal.SIGSTOP)
    try:
        assert pid_of(kept) != first
    finally:
        os.kill(first, signal.SIGCONT)


@pytest.mark.parametrize("error", [ZeroDivisionError, DBAPIError, KeyboardInterrupt])
def test_an_error_leaves_no_session_behind(kept: KeptSession, error: type[BaseException]) -> None:
    sessions = Sessions(kept.database)
    pid_of(kept)
    assert len(sessions.open) == 1

    def fail() -> None:
        with kept.transaction() as connection:
            execute(connection, "CREATE TABLE public.left_behind ()")
            if error is not DBAPIError:
                raise error
            execute(connection, "SELECT 1 / 0")

    with pytest.raises(error):
        fail()
    assert sessions.open == []
    with kept.transaction() as connection:
        assert execute(connection, "SELECT to_regclass('public.left_behind')").scalar_one() is None


def test_a_second_transaction_at_the_same_time_is_refused(kept: KeptSession) -> None:
    """Found: the second one ended the session of the first one, whose writes were lost without an error."""
    with kept.transaction() as connection:
        execute(connection, "CREATE TABLE public.written ()")
        with pytest.raises(RuntimeError, match="one transaction at a time"), kept.transaction():
            pass
    with kept.transaction() as connection:
        assert execute(connection, "SELECT to_regclass('public.written')").scalar_one() is not None


def test_a_kept_session_passes_the_check_of_one_history_each_time(
    kept: KeptSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have begun before the history was fixed."""
    sessions = Sessions(kept.database)
    pid_of(kept)
    with one_history(kept.database):
        pid_of(kept)
        monkeypatch.setattr(server_timeline, "HISTORY", "SELECT 'another timeline'")
        with pytest.raises(HistoryChanged):
            pid_of(kept)
        assert sessions.open == []
        with pytest.raises(HistoryChanged):
            pid_of(kept)
    assert sessions.open == []
    pid_of(kept)


def pid_in(database: Database) -> int:
    """The pid of the session of one transaction, seen by it."""
    with database.transaction() as connection:
        return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())


def test_the_transactions_of_a_block_share_a_session_and_none_is_left(database: Database) -> None:
    sessions = Sessions(database)
    with kept_sessions(database):
        with kept_sessions(database):
            first = pid_in(database)
        assert pid_in(database) == first
        assert sessions.open == [first]
    assert sessions.open == []
    assert pid_in(database) != first
    assert sessions.open == []


def test_a_transaction_within_another_has_a_session_of_its_own(database: Database) -> None:
    sessions = Sessions(database)
    with kept_sessions(database):
        with database.transaction() as outer:
            execute(outer, "CREATE TABLE public.written ()")
            assert pid_in(database) != execute(outer, "SELECT pg_backend_pid()").scalar_one()
            assert pid_in(database) != execute(outer, "SELECT pg_backend_pid()").scalar_one()
        assert len(sessions.open) == 1
        with database.transaction() as connection:
            assert execute(connection, "SELECT to_regclass('public.written')").scalar_one() is not None
    assert sessions.open == []


def test_a_session_in_use_as_the_block_ends_is_closed_after_its_transaction(database: Database) -> None:
    sessions = Sessions(database)
    with ExitStack() as block:
        block.enter_context(kept_sessions(database))
        with database.transaction() as connection:
            execute(connection, "CREATE TABLE public.written ()")
            block.close()
            assert len(sessions.open) == 1
    assert sessions.open == []
    with database.transaction() as connection:
        assert execute(connection, "SELECT to_regclass('public.written')").scalar_one() is not None


def test_an_error_in_a_transaction_of_a_block_ends_its_session_alone(database: Database) -> None:
    sessions = Sessions(database)
    with kept_sessions(database):
        first = pid_in(database)
        with pytest.raises(DBAPIError), database.transaction() as connection:
            execute(connection, "SELECT 1 / 0")
        assert sessions.open == []
        assert pid_in(database) != first


def test_a_new_history_is_not_that_of_a_session_left_from_before(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demoted server that still answers would decide it."""
    with kept_sessions(database):
        first = pid_in(database)
        with one_history(database):
            assert pid_in(database) != first
            monkeypatch.setattr(server_timeline, "HISTORY", "SELECT 'another timeline'")
            with pytest.raises(HistoryChanged):
                pid_in(database)


def test_threads_at_once_have_sessions_of_their_own(database: Database) -> None:
    sessions = Sessions(database)
    gate = threading.Barrier(4)

    def work(_: int) -> int:
        with database.transaction() as connection:
            gate.wait()
            return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())

    with kept_sessions(database), ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert len(set(threads.map(work, range(4)))) == 4
        assert len(sessions.open) == 1
    assert sessions.open == []


@pytest.mark.sample(0)
def test_a_run_opens_few_sessions(database: Database) -> None:
    """Found: three small builds opened 168 sessions, each of which read catalogs and planned statements; now 60."""
    run = begun(database, "build")
    sessions = Sessions(database)
    lifecycle.run_phases(database, run)
    assert sessions.opened <= 24
    assert sessions.open == []


LEFT = {
    "a setting": "SET search_path = public; SET DateStyle = 'German'",
    "a setting that isn't pinned": "PERFORM set_config('restrict_nonsystem_relation_kind', 'view', false)",
    "a lock": "PERFORM pg_advisory_lock(7)",
    "a table": "CREATE TEMP TABLE IF NOT EXISTS left_behind ()",
    "a role": "SET ROLE pg_monitor",
}
SEEN = """
SELECT current_setting('search_path'), current_setting('DateStyle'),
       current_setting('restrict_nonsystem_relation_kind', true), current_user::text,
       (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()),
       to_regclass('pg_temp.left_behind') IS NULL
"""


@pytest.mark.parametrize("left", LEFT)
def test_what_code_of_others_leaves_in_a_session_is_gone_in_the_next_transaction(
    database: Database, dsn: str, left: str
) -> None:
    """Found: an event trigger's SET lasted for the rest of the run, which failed by it."""
    with database.transaction() as connection:
        wanted = execute(connection, SEEN).one()
    run = begun(database, "build")
    body = f"BEGIN {LEFT[left]}; END"
    run_sql(
        dsn,
        f"CREATE FUNCTION public.audit() RETURNS event_trigger LANGUAGE plpgsql AS $$ {body} $$",
        "CREATE EVENT TRIGGER audit ON ddl_command_end WHEN TAG IN ('CREATE FUNCTION', 'CREATE VIEW', 'ALTER FUNCTION')"
        " EXECUTE FUNCTION public.audit()",
    )
    with kept_sessions(database):
        with database.transaction() as connection:
            execute(connection, "CREATE VIEW public.any AS SELECT 1 AS x")
            pid = execute(connection, "SELECT pg_backend_pid()").scalar_one()
        with database.transaction() as connection:
            assert execute(connection, "SELECT pg_backend_pid()").scalar_one() == pid
            assert execute(connection, SEEN).one() == wanted
    if left != "a role":  # which lacks the rights for the rest of that transaction
        lifecycle.run_phases(database, run)
        is_over(database, run)


def test_a_session_lives_for_a_second_at_most(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: a run stayed on a demoted server that still answered, and its workers went to the new one."""
    monkeypatch.setattr(kept_session, "MOST_AGE_S", 0.0)
    with kept_sessions(database):
        assert pid_in(database) != pid_in(database)


def test_the_session_of_heartbeats_lives_as_long_as_they_do(kept: KeptSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one for each would fail while no connection is left, and a run that works would be taken for dead."""
    monkeypatch.setattr(kept_session, "MOST_AGE_S", 0.0)
    assert pid_of(kept) == pid_of(kept)


def test_a_kept_session_of_a_database_without_an_encoding_stays_as_it_is(dsn: str, server: str) -> None:
    run_sql(server, "CREATE DATABASE bytes ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    kept = KeptSession(Database(database_dsn(server, "bytes")))
    try:
        seen = []
        for _ in range(2):
            with kept.transaction() as connection:
                seen.append(
                    execute(
                        connection,
                        "SELECT pg_backend_pid(), current_setting('client_encoding'),"
                        " convert_from('\\xe9'::bytea, 'SQL_ASCII')",
                    ).one()
                )
        assert seen[0] == seen[1]
        assert seen[0][1:] == ("LATIN1", "\u00e9")
    finally:
        kept.close()
        run_sql(server, "DROP DATABASE bytes WITH (FORCE)")
