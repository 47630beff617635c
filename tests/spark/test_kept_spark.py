"""`roir spark-server` as a process, with a real Spark: what is warm, and what happens when something dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.status import operation_status
from airflow_roir.spark.driver_process import driver_order
from airflow_roir.spark.kept_driver import LOST, ordered
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.server import STOPPED
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.spark.cluster import Server
from tests.spark.driving import GIVE_UP_S, finish_and_check, lift_rate, make_table, prepared, rows_committed

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.slow]
ROIR = Path(sys.executable).parent / "roir"
BUILD = ("build", "ix", "--table", "t", "--keys", "k", "--include", "v", "--ranges", "8", "--segments", "3")
# What a machine's allocators keep for themselves.
GROWTH = 1.5


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ROIR_SPARK_SOCKET", str(tmp_path / "spark.sock"))
    return tmp_path / "spark.sock"


@pytest.fixture
def start(path: Path) -> Iterator[Callable[[], Server]]:
    servers: list[Server] = []

    def go() -> Server:
        servers.append(Server([ROIR, "spark-server"], {}))
        servers[-1].wait_for("Spark is kept")
        return servers[-1]

    yield go
    for one in servers:
        one.stop()


def roir(dsn: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [ROIR, *arguments],
        env={**os.environ, "ROIR_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(command: subprocess.Popen[str], code: int = 0) -> str:
    said = command.communicate(timeout=GIVE_UP_S)[0]
    assert command.returncode == code, said
    return said


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def family(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


def jvm_of(server: Server) -> psutil.Process:
    (jvm,) = [child for child in family(server) if child.name() == "java"]
    return jvm


def end(server: Server, number: signal.Signals) -> int:
    """Its exit code; nothing of it is left."""
    children = family(server)
    os.kill(server.pid, number)
    code = server.wait()
    assert not psutil.wait_procs(children, timeout=30)[1]
    return code


def test_operations_of_two_databases_at_once_and_one_after_another(
    server: str, dsn: str, database: Database, start: Callable[[], Server], path: Path
) -> None:
    spark = start()
    run_sql(server, "CREATE DATABASE beside TEMPLATE roir_template")
    try:
        other = database_dsn(server, "beside")
        make_table(other)
        commands = [roir(one, *BUILD) for one in (dsn, other)]
        said = [ended(command) for command in commands]
        assert all("spark-server.log" in text for text in said), said
        assert "missing 0, extra 0, different 0" in ended(roir(other, "verify", "ix"))
        steps.assert_exact(Database(other))
        # A rebuild, that is paused by Ctrl-C, and resumed.
        command = roir(dsn, "build", "ix", "--max-rows-per-second", "5000")
        wait_for(lambda: rows_committed(database) > 41_000)
        os.kill(command.pid, signal.SIGINT)
        assert "interrupted" in ended(command, 3)
        assert "spark-server.log" in ended(roir(dsn, "resume", "ix", "--max-rows-per-second", "0"))
        steps.assert_exact(database)
    finally:
        run_sql(server, "DROP DATABASE beside WITH (FORCE)")
    assert end(spark, signal.SIGINT) == 0
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_in_a_build_and_is_started_again(
    database: Database, dsn: str, start: Callable[[], Server], number: signal.Signals
) -> None:
    spark = start()
    operation = prepared(database, rate=4_000)
    command = roir(dsn, "resume", "ix")
    wait_for(lambda: rows_committed(database) > 2_000)
    assert end(spark, number) == (0 if number == signal.SIGTERM else -number)
    reason = STOPPED if number == signal.SIGTERM else LOST
    assert reason in ended(command, 1)
    status = operation_status(database, operation.operation_id)
    assert (status.status, status.pause_reason) == ("paused", reason)
    start()
    lift_rate(database)
    # At once: no heartbeat has to age.
    assert "spark-server.log" in ended(roir(dsn, "resume", "ix"))
    steps.assert_exact(database)


def test_a_jvm_that_dies_takes_the_server_with_it_and_a_command_starts_its_own(
    database: Database, dsn: str, start: Callable[[], Server], path: Path
) -> None:
    spark = start()
    operation = prepared(database, rate=4_000)
    command = roir(dsn, "resume", "ix")
    wait_for(lambda: rows_committed(database) > 2_000)
    jvm_of(spark).kill()
    assert spark.wait() == 1
    assert "Spark gave up" in ended(command, 1)
    assert operation_status(database, operation.operation_id).status == "paused"
    assert not path.exists()
    lift_rate(database)
    assert "spark-server.log" not in ended(roir(dsn, "resume", "ix"))
    steps.assert_exact(database)


def test_a_command_that_is_killed_pauses_its_operation_alone(
    database: Database, dsn: str, start: Callable[[], Server]
) -> None:
    spark = start()
    operation = prepared(database, rate=4_000)
    command = roir(dsn, "resume", "ix")
    wait_for(lambda: rows_committed(database) > 2_000)
    command.kill()
    ended(command, -signal.SIGKILL)
    wait_for(lambda: operation_status(database, operation.operation_id).status == "paused")
    assert operation_status(database, operation.operation_id).pause_reason == "interrupted"
    lift_rate(database)
    ended(roir(dsn, "resume", "ix"))
    steps.assert_exact(database)
    assert end(spark, signal.SIGTERM) == 0


@pytest.mark.long
def test_fifty_builds_leave_nothing_behind(database: Database, start: Callable[[], Server]) -> None:
    spark = start()

    def build() -> None:
        prepared(database)
        lines: list[str] = []
        driver = ordered(SparkOptions(), database.dsn, driver_order("ix", "test"), lines.append)
        assert driver is not None
        assert driver.wait(GIVE_UP_S) == 0, lines
        finish_and_check(database)
        operations.find_operation(database, "ix")

    def threads() -> tuple[int, int]:
        return psutil.Process(spark.pid).num_threads(), jvm_of(spark).num_threads()

    for _ in range(5):
        build()
    before, files = threads(), psutil.Process(spark.pid).num_fds()
    for _ in range(50):
        build()
    wait_for(lambda: len(family(spark)) <= 10)
    assert all(now <= GROWTH * was for was, now in zip(before, threads(), strict=True)), (before, threads())
    assert psutil.Process(spark.pid).num_fds() <= files + 5
