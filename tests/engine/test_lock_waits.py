"""`roir status` shows our sessions that wait for a lock, and their blockers, even before an operation exists."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg2.extensions
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, drop, dry_run, prepare, revert, seal
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.locks import lock_waits
from airflow_roir.engine.locks.lock_waits import LockWait
from airflow_roir.engine.partitions.detach import detach_partition
from airflow_roir.engine.partitions.sync import sync_partitions
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.engine.verify import record
from airflow_roir.engine.work.worker import session_name
from airflow_roir.errors import LockNotAcquired, NotFound
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

Report = Callable[[str], None]
DEFINITION = IndexDefinition.parse("ix", "t", "k")
IMPATIENT = BuildOptions(lock_timeout_ms=20, lock_patience_s=30)


def waiting(database: Database, index: str | None = None) -> list[LockWait]:
    """The waits that the status shows. There are none if neither the index nor a wait for it exists."""
    try:
        return list(overview(database, index).waits)
    except NotFound:
        return []


def _unfinished(database: Database) -> None:
    steps.begin(database)


def _published(database: Database) -> None:
    steps.make_index(database)


def _rebuilt(database: Database) -> None:
    _published(database)
    steps.make_index(database, table=None, keys=None)


def _attached_without_us(database: Database) -> None:
    _published(database)
    run_sql(
        database.dsn,
        "CREATE TABLE t2 (LIKE t INCLUDING ALL)",
        "INSERT INTO t2 VALUES (201, 'new')",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (200) TO (300)",
    )


# The state before; the holder's statement; the command and its index, as the status shows them; the command itself.
COMMANDS: dict[
    str, tuple[Callable[[Database], None], str, tuple[str, str | None], Callable[[Database, Report], Any]]
] = {
    "a look at the table": (
        lambda database: None,
        "LOCK TABLE t IN ACCESS EXCLUSIVE MODE",
        ("prepare", "public.ix"),
        lambda database, report: prepare.prepare(database, DEFINITION, IMPATIENT, "test", report),
    ),
    "prepare": (
        lambda database: None,
        "UPDATE t SET k = 'held' WHERE id = 1",
        ("prepare", "public.ix"),
        lambda database, report: prepare.prepare(database, DEFINITION, IMPATIENT, "test", report),
    ),
    "prepare of a rebuild": (
        _published,
        "UPDATE t SET k = 'held' WHERE id = 1",
        ("prepare", "public.ix"),
        lambda database, report: prepare.prepare(database, IndexDefinition.parse("ix"), IMPATIENT, "test", report),
    ),
    "abort": (
        _unfinished,
        "UPDATE t SET k = 'held' WHERE id = 1",
        ("removal", "public.ix"),
        lambda database, report: abort.abort(database, "ix", "test", report=report),
    ),
    "drop": (
        _published,
        "SELECT count(*) FROM ix",
        ("removal", "public.ix"),
        lambda database, report: drop.drop_index(database, "ix", "test", report),
    ),
    "revert": (
        _rebuilt,
        "UPDATE t SET k = 'held' WHERE id = 1",
        ("revert", "public.ix"),
        lambda database, report: revert.revert(database, "ix", "test", report=report),
    ),
    "sync-partitions": (
        _attached_without_us,
        "SELECT count(*) FROM ix",
        ("sync-partitions", "public.ix"),
        lambda database, report: sync_partitions(database, "t", "test", report),
    ),
    "detach": (
        _published,
        "SELECT count(*) FROM t1",
        ("detach", None),
        lambda database, report: detach_partition(database, "t1", "test", report=report),
    ),
    "detach of a table that is locked": (
        _published,
        # A second lock, of a table that isn't asked for by its oid.
        "SELECT FROM pg_class; LOCK TABLE t1 IN ACCESS EXCLUSIVE MODE",
        ("detach", None),
        lambda database, report: detach_partition(database, "t1", "test", report=report),
    ),
    "verify": (
        _published,
        "SELECT roir.detach_partition('t1')",
        ("verify", "public.ix"),
        lambda database, report: record.begin(database, "ix", VerifyOptions(), "test", report=report),
    ),
    "verify of a table that is locked": (
        _published,
        "LOCK TABLE t IN ACCESS EXCLUSIVE MODE",
        ("verify", "public.ix"),
        lambda database, report: record.begin(database, "ix", VerifyOptions(), "test", report=report),
    ),
    "compact": (
        _published,
        "SELECT roir.detach_partition('t1')",
        ("compact", "public.ix"),
        lambda database, report: compaction.begin(
            database, "ix", [compacting.act("rewrite", 0)], CompactOptions(), "test", report
        ),
    ),
}


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (200)",
        "INSERT INTO t SELECT i, (i % 5)::text FROM generate_series(1, 100) i",
        "ANALYZE t",
    )


def pid_of(connection: psycopg2.extensions.connection) -> int:
    return connection.info.backend_pid


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", COMMANDS)
def test_who_waits_between_two_attempts_is_shown_with_who_holds_the_lock(
    database: Database, dsn: str, name: str
) -> None:
    """`report` is called in the rest after an attempt, when no session of ours waits."""
    before, holds, shown_as, command = COMMANDS[name]
    before(database)
    holder = steps.session(dsn)
    # If the command waited without a limit, the timeout would end this session, and the status would never have shown
    # it.
    sql(holder, "SET application_name = 'nightly load'; SET idle_in_transaction_session_timeout = '60s'")
    holder.commit()
    sql(holder, holds)
    seen: list[list[LockWait]] = []

    def look(line: str) -> None:
        if line.startswith("expected"):
            return
        seen.append(waiting(database))
        if len(seen) == 2:
            holder.rollback()

    command(database, look)
    for found in seen[:2]:
        [wait] = found
        assert (wait.command, wait.index) == shown_as
        assert wait.since is not None
        assert f"pid {pid_of(holder)} (nightly load of postgres, transaction open for " in wait.blocked_by
        assert "idle in transaction" in wait.blocked_by
    assert seen[0][0].since == seen[1][0].since
    assert waiting(database) == []


def test_a_wait_is_found_by_the_name_of_an_index_that_does_not_exist_yet(database: Database, dsn: str) -> None:
    holder = steps.session(dsn)
    sql(holder, "UPDATE t SET k = 'held' WHERE id = 1")
    seen: list[Any] = []

    def look(line: str) -> None:
        if line.startswith("expected"):
            return
        seen.append([len(waiting(database, name)) for name in ("ix", "public.ix", '"IX"', "other.ix")])
        holder.rollback()

    prepare.prepare(database, DEFINITION, IMPATIENT, "test", look)
    assert seen == [[1, 1, 0, 0]]


def test_who_gives_up_waits_no_more(database: Database, dsn: str) -> None:
    holder = steps.session(dsn)
    sql(holder, "UPDATE t SET k = 'held' WHERE id = 1")
    with pytest.raises(LockNotAcquired):
        prepare.prepare(database, DEFINITION, BuildOptions(lock_timeout_ms=20, lock_patience_s=0), "test")
    assert waiting(database) == []


def test_a_plan_writes_nothing_while_it_waits(database: Database, dsn: str) -> None:
    holder = steps.session(dsn)
    sql(holder, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
    seen: list[int] = []

    def look(_line: str) -> None:
        seen.append(sql(steps.session(dsn), "SELECT count(*) FROM roir.lock_wait")[0][0])
        holder.rollback()

    dry_run.run(database, DEFINITION, IMPATIENT, look)
    assert seen == [0]


def test_who_was_killed_while_it_waited_is_shown_no_more_and_forgotten_by_the_next(
    database: Database, dsn: str
) -> None:
    dead = lock_waits.ShownWait(database, lock_waits.Waiter("prepare", "public.ix"), "t")
    with database.transaction() as connection:
        dead.show(connection, "somebody")
    assert len(waiting(database)) == 1
    run_sql(dsn, "UPDATE roir.lock_wait SET seen_at = seen_at - interval '31 s'")
    assert waiting(database) == []
    test_a_wait_is_found_by_the_name_of_an_index_that_does_not_exist_yet(database, dsn)
    assert sql(steps.session(dsn), "SELECT count(*) FROM roir.lock_wait") == [(0,)]


def test_a_worker_that_waits_is_found_among_the_sessions(database: Database, dsn: str) -> None:
    """A worker seals, and a user holds one of the segments."""
    prepared, run = steps.begin(database, segments=1)
    steps.build_all(database, run)
    holder = steps.session(dsn)
    sql(holder, f"LOCK TABLE {physical.segment(prepared.generation_id, 1)} IN ACCESS EXCLUSIVE MODE")
    worker = Database(dsn, session_name(run, 3))
    thread = threading.Thread(target=lambda: list(seal.PHASE.work(worker, run, 0)), daemon=True)
    thread.start()
    found: list[LockWait] = []
    while thread.is_alive() and not found:
        found = waiting(database, "ix")
    assert [(one.command, one.index) for one in found] == [("seal", "public.ix")]
    assert f"pid {pid_of(holder)} (" in found[0].blocked_by
    holder.rollback()
    thread.join()
    assert waiting(database) == []
