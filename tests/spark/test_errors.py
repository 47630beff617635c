"""Errors of workers, through the real driver: they stop the others, are kept with the operation, and never dropped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.install import init
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.work.worker import session_name
from airflow_roir.spark import task
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.spark.driving import (
    Running,
    at_work,
    events,
    finish_and_check,
    lift_rate,
    make_table,
    one,
    prepared,
    rows_committed,
)

GATE = 4711
FULL = "worker 3: could not extend file: Input/output error"


def fail_in_batches(dsn: str, code: str, message: str, workers: str = "3", gate: bool = False) -> None:
    """From now on batches of these workers end with an error. gate: they first wait until GATE is free."""
    run_sql(
        dsn,
        f"""CREATE FUNCTION public.break() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF current_setting('application_name') ~ 'worker [{workers}] ' THEN
                {f"PERFORM pg_advisory_xact_lock_shared({GATE});" if gate else ""}
                RAISE EXCEPTION USING ERRCODE = '{code}', MESSAGE = '{message}';
            END IF;
            RETURN NULL; END $$""",
        # An error of a trigger on the entries' table would be reported as such.
        "CREATE TRIGGER break AFTER UPDATE OF watermark ON roir.scan_range EXECUTE FUNCTION public.break()",
    )


def repair(dsn: str) -> None:
    run_sql(dsn, "DROP FUNCTION public.break() CASCADE")


pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(1)]


@pytest.mark.slow
def test_a_failing_disk_stops_every_worker_and_the_reason_stays(database: Database, dsn: str) -> None:
    operation = prepared(database, rate=4_000)
    fail_in_batches(dsn, "58030", FULL.partition(": ")[2])
    with Running(database) as driver:
        assert driver.wait() == 1, driver.said
    assert driver.last_told == f"roir: {FULL}"
    paused = operation_status(database, operation.operation_id)
    assert (paused.status, paused.paused_by, paused.pause_reason) == ("paused", "test driver", FULL)
    # The others have left at their batch boundary: at this rate most of the table isn't copied yet.
    assert paused.rows < 40_000
    assert one(database, "SELECT count(*) FROM roir.scan_range WHERE claim_worker <> 3 AND NOT done") == 0
    assert one(database, "SELECT heartbeat_at FROM roir.operation") is None
    repair(dsn)
    lift_rate(database)
    with Running(database) as driver:
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


@pytest.mark.by_hand("sweeps")
def test_the_error_of_a_worker_that_was_to_leave_is_not_dropped(database: Database, dsn: str) -> None:
    """The parallelism is lowered while its last batch is failing, and the operation is paused as well."""
    operation = prepared(database, rate=2_000)
    fail_in_batches(dsn, "58030", FULL.partition(": ")[2], gate=True)
    gate = psycopg2.connect(dsn)
    with gate.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [GATE])
    gate.commit()
    with Running(database) as driver:
        driver.wait_for(
            lambda: one(database, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        )
        requests.change_options(database, "ix", actor="me", parallelism=1)
        requests.pause(database, "ix", "me", "tea")
        driver.wait_for(lambda: at_work(database) == {3})
        gate.close()
        assert driver.wait() == 1, driver.said
    assert driver.last_told == f"roir: {FULL}"
    assert ("error", FULL) in events(database)
    assert [detail for _, detail in events(database)].count(FULL) == 1
    paused = operation_status(database, operation.operation_id)
    assert (paused.status, paused.paused_by, paused.pause_reason) == ("paused", "me", "tea")


@pytest.fixture
def unsteady(tmp_path: Path) -> Iterator[Server]:
    """A server that can be killed."""
    server = Server(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.close()


@pytest.mark.by_hand("sweeps")
def test_lost_sessions_and_a_server_that_restarts_are_waited_for(unsteady: Server) -> None:
    unsteady.execute("CREATE DATABASE shop")
    dsn = unsteady.dsn("shop")
    database = Database(dsn)
    init(database)
    make_table(dsn)
    prepared(database, rate=8_000)
    with Running(database) as driver:
        driver.wait_for(lambda: rows_committed(database) > 2_000)
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name ~ ' worker [02] '"
        # The others may have begun before them.
        driver.wait_for(lambda: one(database, ended) > 0)
        unsteady.kill()
        unsteady.start()
        before = rows_committed(database)
        driver.wait_for(lambda: rows_committed(database) > before)
        lift_rate(database)
        assert driver.wait() == 0, driver.said
    finish_and_check(database)
    assert not [what for what, _ in events(database) if what in ("pause", "error", "fail")]


@pytest.mark.by_hand("sweeps")
def test_what_executors_lack_is_said_in_one_line(database: Database, tmp_path: Path) -> None:
    """An interpreter without the dependencies: trying again would not help."""
    run_python = tmp_path / "python"
    run_python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    run_python.chmod(0o755)
    operation = prepared(database)
    with Running(database, conf={"spark.pyspark.python": str(run_python)}) as driver:
        assert driver.wait() == 1, driver.said
    paused = operation_status(database, operation.operation_id)
    assert paused.status == "paused"
    assert paused.pause_reason is not None
    assert "No module named" in paused.pause_reason
    assert driver.last_told == f"roir: {paused.pause_reason}"


@pytest.mark.sample(1)
def test_a_machine_without_java_is_told_what_to_install_and_nothing_has_begun(database: Database) -> None:
    operation = prepared(database)
    with Running(database, environment={"PATH": "/no/such/folder", "JAVA_HOME": "/nor/this"}) as driver:
        assert driver.wait() == 2, driver.said
    (line,) = driver.lines
    assert line.startswith("roir: Spark needs Java 17 or newer")
    assert "JAVA_HOME=/nor/this is no Java that runs" in line
    assert "apt-get install openjdk-17-jre-headless" in line
    assert operation_status(database, operation.operation_id).owner is None


def test_an_unknown_master_pauses_with_the_reason(database: Database) -> None:
    operation = prepared(database)
    with Running(database, "yarn") as driver:
        assert driver.wait() == 1, driver.said
    paused = operation_status(database, operation.operation_id)
    assert paused.status == "paused"
    assert paused.pause_reason is not None
    assert paused.pause_reason.startswith("Spark can't be started at yarn: ")


@pytest.mark.parametrize(
    ("code", "message"), [("42501", "permission denied for table g1"), ("58030", "could not extend file")]
)
def test_a_worker_writes_down_what_trying_again_would_not_help(
    database: Database, dsn: str, code: str, message: str
) -> None:
    _, run = steps.begin(database)
    fail_in_batches(dsn, code, message, workers="0-9")
    named = Database(dsn, session_name(run, 0))
    (row,) = task.work(named, run, "build", 0, wait=lambda _: pytest.fail("waited"))
    # So that Airflow knows whether another try can help.
    mark = task.PERMANENT if code == "42501" else ""
    assert row.error == f"{mark}worker 0: {message}"
    assert operation_status(database, run.operation_id).pause_reason == f"worker 0: {message}"


def test_a_worker_without_memory_writes_that_down(database: Database) -> None:
    """If the error were dropped, the operation would continue without the worker's part."""
    _, run = steps.begin(database)

    def exhaust() -> None:
        raise MemoryError

    with before(database, "INSERT INTO roir_data.g1", exhaust):
        (row,) = task.work(database, run, "build", 0, wait=lambda _: pytest.fail("waited"))
    assert "out of memory" in (row.error or "")
    paused = operation_status(database, run.operation_id)
    assert (paused.status, paused.pause_reason) == ("paused", row.error)
    steps.finish_all(database, start_run(database, "ix", "test"))
    steps.assert_exact(database)


@pytest.mark.slow
def test_a_lock_that_is_never_given_back_pauses_after_a_minute(dsn: str) -> None:
    database = Database(dsn, limits=Limits(table_lock_ms=20))
    _, run = steps.begin(database)
    with psycopg2.connect(dsn) as holder, holder.cursor() as cursor:
        cursor.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        waited: list[float] = []
        (row,) = task.work(database, run, "build", 0, wait=waited.append)
    assert "lock timeout" in row.error
    assert 50 <= sum(waited) < 70
    assert "lock timeout" in (operation_status(database, run.operation_id).pause_reason or "")
    start_run(database, "ix", "test")
