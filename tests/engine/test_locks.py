"""The drain locks: a drain names the sessions that hold it up and lets go those that queue behind it. None waits long
(I6).

No test looks at a clock: the session that still blocks the drain at that moment shows that a writer was let go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg2.errors
import psycopg2.extensions
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run, lifecycle, prepare, publish, switch
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import LockNotAcquired
from airflow_roir.options import BuildOptions
from tests.conftest import deadlocks, run_sql
from tests.engine import steps
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(1)

# For things that take less than a second.
PATIENCE_S = 60.0

STEPS = ["prepare", "switch", "publish"]


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


class Locking:
    """An operation that is about to begin one of its three drains."""

    def __init__(self, database: Database, step: str, patience_s: int) -> None:
        self.database, self.step = database, step
        # The longest possible limit below the server's deadlock_timeout of a second.
        self.options = BuildOptions(lock_timeout_ms=900, lock_patience_s=patience_s)
        self.reports: list[str] = []
        self.run: Run | None = None
        if step != "prepare":
            _, self.run = steps.begin(database, lock_timeout_ms=900, lock_patience_s=patience_s)
            steps.build_all(database, self.run)
            steps.seal_all(database, self.run)
        if step == "publish":
            assert self.run is not None
            steps.fold_all(database, self.run)

    def reported(self, line: str) -> None:
        """Notes reports of locks."""
        if not line.startswith("expected"):
            self.reports.append(line)

    def attempt(self) -> None:
        if self.run is None:
            prepare.prepare(self.database, IndexDefinition.parse("ix", "t", "k"), self.options, "test", self.reported)
        else:
            {"switch": switch.switch, "publish": publish.publish}[self.step](
                self.database, self.run, self.reports.append
            )

    def finish(self) -> None:
        """Carries the operation to its end, and compares."""
        if self.run is None:
            _, self.run = steps.begin(self.database)
            steps.build_all(self.database, self.run)
            steps.seal_all(self.database, self.run)
        if self.step != "publish":
            lifecycle.run_phases(self.database, self.run)
        steps.assert_exact(self.database)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    """Starts the work in a thread, and keeps its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def wait_until(watch: psycopg2.extensions.connection, query: str, *values: Any) -> Any:
    """Asks the server until the answer is true, and returns it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := sql(watch, query, *values)[0][0]):
        assert time.monotonic() < deadline, f"not in {PATIENCE_S:g} s: {query}"
        time.sleep(0.005)
    return answer


def watching(dsn: str) -> psycopg2.extensions.connection:
    watch = steps.session(dsn)
    watch.autocommit = True
    return watch


def pid_of(connection: psycopg2.extensions.connection) -> int:
    return connection.info.backend_pid


@pytest.mark.parametrize("step", STEPS)
def test_who_holds_up_a_drain_is_named_also_a_prepared_transaction(database: Database, dsn: str, step: str) -> None:
    locking = Locking(database, step, patience_s=0)
    idle, second = steps.session(dsn), steps.session(dsn)
    sql(idle, "UPDATE t SET v = 0 WHERE id = 1")
    sql(second, "UPDATE t SET v = 0 WHERE id = 2")
    sql(second, "PREPARE TRANSACTION 'left behind'")
    second.close()
    with pytest.raises(LockNotAcquired) as refused:
        locking.attempt()
    for said in (str(refused.value), locking.reports[0]):
        assert f"pid {pid_of(idle)} " in said
        assert "idle in transaction" in said
        assert "prepared transaction (left behind" in said
    idle.rollback()
    run_sql(dsn, "ROLLBACK PREPARED 'left behind'")
    locking.attempt()
    locking.finish()


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_queues_behind_an_attempt_is_let_go_while_the_blocker_still_blocks(
    database: Database, dsn: str, step: str
) -> None:
    locking = Locking(database, step, patience_s=60)
    idle, writer, watch = steps.session(dsn), steps.session(dsn), watching(dsn)
    sql(idle, "UPDATE t SET v = 0 WHERE id = 1")
    # With this limit the writer fails instead of waiting for ever.
    sql(writer, "SET lock_timeout = '20s'")
    drain, failed = in_thread(locking.attempt)
    ours = wait_until(watch, "SELECT max(pid) FROM pg_locks WHERE NOT granted AND mode = 'ShareRowExclusiveLock'")
    write, refused = in_thread(lambda: sql(writer, "UPDATE t SET v = 0 WHERE id = 2"))
    while write.is_alive():
        blockers = sql(watch, "SELECT pg_blocking_pids(%s)", pid_of(writer))[0][0]
        assert pid_of(idle) not in blockers, "the writers themselves don't contend"
        assert idle.info.transaction_status == psycopg2.extensions.TRANSACTION_STATUS_INTRANS
    assert not refused, "it got its turn, no error"
    assert drain.is_alive(), f"session {ours} gave way and tries again"
    while not locking.reports:
        sql(watch, "SELECT 1")
    assert f"pid {pid_of(idle)} " in locking.reports[0]
    writer.commit()
    idle.commit()
    drain.join()
    assert not failed
    locking.finish()


@pytest.mark.sample(0)
def test_the_status_names_the_blocker_for_as_long_as_it_blocks(database: Database, dsn: str) -> None:
    locking = Locking(database, "switch", patience_s=60)
    assert locking.run is not None
    idle, watch = steps.session(dsn), watching(dsn)
    sql(idle, "UPDATE t SET v = 0 WHERE id = 1")
    drain, failed = in_thread(locking.attempt)
    wait_until(watch, "SELECT coalesce(max(notice), '') LIKE %s FROM roir.operation", f"%pid {pid_of(idle)} %")
    notice = operation_status(database, locking.run.operation_id).notice
    assert notice is not None
    assert notice.startswith("waiting for a lock on ")
    idle.rollback()
    drain.join()
    assert not failed
    assert operation_status(database, locking.run.operation_id).notice is None
    locking.finish()


@pytest.mark.sample(0)
def test_a_run_that_gives_up_pauses_with_the_blockers_names(database: Database, dsn: str) -> None:
    locking = Locking(database, "switch", patience_s=0)
    assert locking.run is not None
    idle = steps.session(dsn)
    sql(idle, "UPDATE t SET v = 0 WHERE id = 1")
    with pytest.raises(LockNotAcquired):
        lifecycle.finalize(database, "ix", "test", take_over=True)
    found = operation_status(database, locking.run.operation_id)
    assert (found.status, found.notice) == ("paused", None)
    assert f"pid {pid_of(idle)} " in str(found.pause_reason)
    idle.rollback()
    lifecycle.finalize(database, "ix", "test", take_over=True)
    steps.assert_exact(database)


def test_all_leaves_together_have_one_limit(database: Database, dsn: str) -> None:
    """lock_timeout alone begins again at each leaf, while writers queue behind the parent's lock."""
    run_sql(
        dsn,
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)",
    )
    first, second, watch = steps.session(dsn), steps.session(dsn), watching(dsn)
    sql(first, "INSERT INTO p1 VALUES (1)")
    sql(second, "INSERT INTO p2 VALUES (11)")
    drain = Drain(database, "public.p", [], 900, 0)
    waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = %s::regclass)"

    def attempt() -> None:
        with database.transaction() as connection:
            drain.lock(connection)

    thread, errors = in_thread(attempt)
    wait_until(watch, waits, "p1")
    first.rollback()
    thread.join()
    assert isinstance(errors[0], DBAPIError)
    # 57014: the whole statement's limit began before the second leaf's lock_timeout (55P03).
    assert sqlstate(errors[0]) == "57014"
    with pytest.raises(LockNotAcquired):
        drain.run(lambda connection, lock: lock(), lambda line: None)
    second.rollback()
    drain.run(lambda connection, lock: lock(), lambda line: None)


@pytest.mark.usefixtures("deadlocks_meant")
def test_a_deadlock_would_be_counted(dsn: str, server: str) -> None:
    """The fixture `dsn` asserts for every other test that there was no deadlock."""
    first, second, watch = steps.session(dsn), steps.session(dsn), watching(dsn)
    sql(first, "UPDATE t SET v = 0 WHERE id = 1")
    sql(second, "UPDATE t SET v = 0 WHERE id = 2")
    one, _ = in_thread(lambda: sql(first, "UPDATE t SET v = 0 WHERE id = 2"))
    wait_until(watch, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid_of(first))
    two, _ = in_thread(lambda: sql(second, "UPDATE t SET v = 0 WHERE id = 1"))
    while one.is_alive() and two.is_alive():
        sql(watch, "SELECT 1")
    assert deadlocks(server, watch.info.dbname) == 1


def test_a_body_that_takes_no_drain_lock_has_the_limit_too(database: Database, dsn: str) -> None:
    reader = steps.session(dsn)
    sql(reader, "SELECT FROM t")
    # Without the limit this would wait until the reader ends.
    with pytest.raises(LockNotAcquired, match=f"pid {pid_of(reader)} "):
        Drain(database, "public.t", [], 50, 0).run(
            lambda connection, lock: execute(connection, "LOCK TABLE public.t"), lambda line: None, ["public.t"]
        )
    reader.rollback()


def test_what_is_locked_after_the_drain_has_what_is_left_of_the_limit(database: Database, dsn: str) -> None:
    """A rebuild's publish waits for the view's readers while writers wait for it."""
    seen: list[Any] = []

    def body(connection: Any, lock: Callable[[], None]) -> None:
        lock()
        for setting in ("lock_timeout", "statement_timeout"):
            seen.append(execute(connection, f"SELECT setting::int FROM pg_settings WHERE name = '{setting}'").scalar())

    Drain(database, "public.t", [], 900, 0).run(body, lambda line: None)
    assert 0 < seen[0] < 900
    assert seen[1] == 0, "the work under the lock is not cut off"


def test_who_holds_the_whole_table_is_named_before_anything_is_planned(database: Database, dsn: str) -> None:
    """The plan reads the table: it gives up soon, and names the holder."""
    user = session(dsn)
    sql(user, "TRUNCATE t")
    definition = IndexDefinition.parse("ix", "t", "k")
    with pytest.raises(LockNotAcquired, match=rf"pid {user.info.backend_pid} "):
        dry_run.run(database, definition, BuildOptions(lock_timeout_ms=20), patience_s=0)
    user.rollback()
    user.close()
    assert dry_run.run(database, definition, BuildOptions()).kind == "create"
