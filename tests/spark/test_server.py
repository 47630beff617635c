"""A server for orders, in this process, whose workers are threads: no Spark is needed to see who gets what."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import parse_dsn

from airflow_roir.engine import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.engine.run import start_run
from airflow_roir.engine.status import operation_status
from airflow_roir.errors import InvalidInput
from airflow_roir.spark import kept_driver as kept
from airflow_roir.spark import server
from airflow_roir.spark.driver_process import driver_order
from airflow_roir.spark.kept_driver import KeptDriver, kept_driver, ordered
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.server import SparkServer
from airflow_roir.spark.server_socket import socket_path
from airflow_roir.spark.whole_dsn import SERVICES, VARIABLES, whole_dsn
from airflow_roir.spark.worker_metrics import WorkerMetrics
from tests.spark.driving import GIVE_UP_S, events, finish_and_check, lift_rate, prepared, rows_committed
from tests.spark.listening import Listening, Threads

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(5)]


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("ROIR_SPARK_SOCKET", str(tmp_path / "spark.sock"))
    return tmp_path / "spark.sock"


@pytest.fixture
def listen(path: Path) -> Iterator[Callable[..., Listening]]:
    servers: list[Listening] = []

    def go(options: SparkOptions | None = None) -> Listening:
        servers.append(Listening(options))
        return servers[-1]

    yield go
    for one in servers:
        one.stop()


class Command:
    """One order of one owner, and what is said of it."""

    def __init__(self, database: Database, owner: str = "a command", **given: Any) -> None:
        self.lines: list[str] = []
        driver = ordered(SparkOptions(), database.dsn, driver_order("ix", owner, **given), self.lines.append)
        assert driver is not None, self.lines
        self.driver = driver

    def wait(self) -> int:
        code = self.driver.wait(GIVE_UP_S)
        assert code is not None, self.lines
        return code


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.sample(1)
def test_an_order_builds_and_is_told_as_a_driver_tells(database: Database, listen: Callable[..., Listening]) -> None:
    listen()
    prepared(database)
    command = Command(database)
    assert command.wait() == 0, command.lines
    assert "roir: Spark is up" in command.lines
    assert "roir: Spark's own log: spark-server.log" in command.lines
    assert not command.driver.is_starting
    assert any("seal: done" in line for line in command.lines)
    finish_and_check(database)


@pytest.mark.slow
@pytest.mark.parametrize("end", [KeptDriver.kill, KeptDriver.terminate])
def test_whoever_leaves_pauses_the_operation_and_no_other(
    database: Database, listen: Callable[..., Listening], end: Callable[[KeptDriver], None]
) -> None:
    listen()
    operation = prepared(database, rate=5_000)
    one = Command(database, "one")
    wait_for(lambda: rows_committed(database) > 1_000)
    # Another command meets a run that is alive, and its own end is not that run's.
    other = Command(database, "other")
    assert other.wait() == 4
    assert "is being driven by one" in other.lines[-1]
    end(other.driver)
    assert one.driver.wait(0) is None
    end(one.driver)
    assert one.wait() in (3, -15)
    wait_for(lambda: operation_status(database, operation.operation_id).status == "paused")
    assert events(database)[-1] == ("pause", "interrupted")
    lift_rate(database)
    again = Command(database)
    assert again.wait() == 0, again.lines
    finish_and_check(database)


@pytest.mark.slow
def test_an_orders_query_is_its_own_and_none_of_the_next(database: Database, listen: Callable[..., Listening]) -> None:
    listen()
    operation = prepared(database, rate=5_000)
    secret = "SELECT 'hunter2' IS NOT NULL"
    lines: list[str] = []
    order = driver_order("ix", "one")
    one = ordered(SparkOptions(), database.dsn, order, lines.append, Surroundings(query=secret))
    assert one is not None, lines
    wait_for(lambda: operation_status(database, operation.operation_id).granted == 0)
    one.kill()
    one.wait(GIVE_UP_S)
    wait_for(lambda: operation_status(database, operation.operation_id).status == "paused")
    assert "hunter2" not in str([order, lines])
    # Nothing holds the next one.
    lift_rate(database)
    again = Command(database, "other")
    assert again.wait() == 0, again.lines
    finish_and_check(database)


def test_a_caller_that_dies_with_lines_unread_is_gone_too(
    database: Database, path: Path, listen: Callable[..., Listening]
) -> None:
    listen()
    operation = prepared(database, rate=5_000)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        assert caller.recv(100_000)
        order = {"dsn": database.dsn, "surroundings": {}, "order": driver_order("ix", "who dies")}
        caller.sendall(json.dumps(order).encode() + b"\n")
        wait_for(lambda: rows_committed(database))
    wait_for(lambda: operation_status(database, operation.operation_id).status == "paused")
    assert events(database)[-1] == ("pause", "interrupted")


def test_nobody_who_reads_is_no_end_of_an_order(database: Database, listen: Callable[..., Listening]) -> None:
    """The command's own standard error may be a pipe that was closed."""
    listen()
    prepared(database)

    def closed(_line: str) -> None:
        raise BrokenPipeError

    driver = ordered(SparkOptions(), database.dsn, driver_order("ix", "a command"), closed)
    assert driver is not None
    assert driver.wait(GIVE_UP_S) == 0
    assert driver.last_line
    finish_and_check(database)


@pytest.mark.slow
def test_a_server_that_is_stopped_pauses_with_the_reason(
    database: Database, path: Path, listen: Callable[..., Listening]
) -> None:
    spark = listen()
    operation = prepared(database, rate=5_000)
    command = Command(database)
    wait_for(lambda: rows_committed(database) > 1_000)
    spark.stop()
    assert not path.exists()
    assert command.wait() == 1
    assert command.lines[-1] == f"roir: {server.STOPPED}"
    assert operation_status(database, operation.operation_id).pause_reason == server.STOPPED
    lift_rate(database)
    listen()
    # Whoever asks for this run has lifted no pause, since nobody wished for one.
    again = Command(database, "another", keep_pause=False)
    assert again.wait() == 0, again.lines
    finish_and_check(database)


def test_a_pause_of_somebody_ends_the_order(database: Database, listen: Callable[..., Listening]) -> None:
    listen()
    prepared(database, rate=5_000)
    command = Command(database)
    wait_for(lambda: rows_committed(database) > 1_000)
    operations.pause(database, "ix", "me", "a look")
    assert command.wait() == 3, command.lines
    assert "paused by me" in command.lines[-1]


def test_a_process_that_dies_with_the_order_leaves_the_operation_to_the_next(
    database: Database, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller sees the end at once, and nobody need wait for the heartbeat to age."""
    operation = prepared(database)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(path))
        listener.listen()
        offer = server.Offer(1, server.fingerprint(), None, {}, "")

        def die() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("r") as orders:
                connection.sendall(json.dumps(vars(offer)).encode() + b"\n")
                assert orders.readline()
                start_run(database, "ix", "a command")

        threading.Thread(target=die, daemon=True).start()
        command = Command(database)
        assert command.wait() == 1
    assert kept.LOST in command.lines[-1]
    status = operation_status(database, operation.operation_id)
    assert (status.status, status.pause_reason) == ("paused", kept.LOST)


def test_a_server_that_hangs_is_done_without(database: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "ANSWER_S", 0.1)
    lines: list[str] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert kept_driver(SparkOptions(), database.dsn, lines.append) is None
    assert "doesn't answer" in lines[-1]
    # What a killed one leaves behind is no server.
    assert kept_driver(SparkOptions(), database.dsn, lines.append) is None
    assert len(lines) == 1


def test_a_silence_in_an_order_ends_it(database: Database, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SILENCE_S", 0.2)
    monkeypatch.setattr(server, "BEAT_EVERY_S", 600.0)
    held = threading.Event()

    class Held(Threads):
        def run(self, *_: Any) -> list[WorkerMetrics]:
            held.wait()
            return []

    operation = prepared(database)
    with server.place() as place, SparkServer(Held(), SparkOptions(), None).listening(place):
        command = Command(database)
        assert command.wait() == 1
        assert kept.LOST in command.lines[-1]
        wait_for(lambda: operation_status(database, operation.operation_id).status == "paused")
        held.set()


def test_only_the_same_code_and_the_same_spark_are_used(
    database: Database, listen: Callable[..., Listening], monkeypatch: pytest.MonkeyPatch
) -> None:
    listen(SparkOptions(None, {"spark.driver.memory": "2g"}))
    lines: list[str] = []

    def fits(*options: Any) -> bool:
        driver = kept_driver(SparkOptions(*options), database.dsn, lines.append)
        if driver is not None:
            driver.kill()
        return driver is not None

    assert fits()
    assert fits(None, {"spark.driver.memory": "2g"})
    assert not lines
    assert not fits(None, {"spark.driver.memory": "4g"})
    assert not fits("local[2]")
    assert not fits("spark://h:7077")
    assert all("another master or other settings" in line for line in lines)
    monkeypatch.setenv("PGSERVICE", "mine")
    assert not fits()
    assert "libpq's services" in lines[-1]
    monkeypatch.delenv("PGSERVICE")
    monkeypatch.setattr(kept, "fingerprint", lambda: "newer")
    assert not fits()
    assert "other code" in lines[-1]


def test_one_server_per_socket_and_a_folder_that_is_nobody_elses(
    listen: Callable[..., Listening], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidInput, match=f"runs already, as process {os.getpid()}"):
        listen()
    assert path.exists()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("ROIR_SPARK_SOCKET", str(shared / "s"))
    with pytest.raises(InvalidInput, match="others can write"):
        listen()
    monkeypatch.setenv("ROIR_SPARK_SOCKET", "/" + "x" * 107)
    with pytest.raises(InvalidInput, match="at most 107 bytes"):
        listen()


def test_the_socket_has_a_name_of_its_own_per_machine() -> None:
    assert socket_path({"XDG_STATE_HOME": "/s"}) == Path(f"/s/roir/spark-{socket.gethostname()}.sock")


def test_a_dsn_is_whole_without_the_environment_that_it_came_from() -> None:
    environment = {"PGPASSWORD": "a b'", "PGHOST": "elsewhere", "PGSSLROOTCERT": "system", "PGMAXPROTOCOLVERSION": ""}
    whole = whole_dsn("postgresql://u@h/db", environment)
    assert whole is not None
    assert parse_dsn(whole) == {
        "user": "u",
        "host": "h",
        "dbname": "db",
        "password": "a b'",
        "sslrootcert": "system",
    }
    assert whole_dsn("service=s", {}) is None
    assert whole_dsn("dbname=d", {"PGSERVICEFILE": "/f"}) is None
    assert whole_dsn("no dsn", {}) == "no dsn"


def test_what_libpq_reads_in_the_environment_is_known() -> None:
    """Each part of a DSN that has a variable, as this libpq tells them, is one that is carried along."""
    # What `Database` gives each session, whatever the environment says.
    given = {"PGCONNECT_TIMEOUT", "PGCLIENTENCODING", "PGAPPNAME"}
    assert set(variables_of_libpq()) - given - set(SERVICES) <= set(VARIABLES)


def variables_of_libpq() -> Iterator[str]:
    """By PQconndefaults, of the library that psycopg2 brings."""
    import ctypes

    class Option(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_char_p) for name in ("keyword", "envvar", "compiled", "val", "label", "dispchar")
        ] + [("dispsize", ctypes.c_int)]

    # It is loaded already; its symbols are its own.
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "libpq" in line}
    libpq = ctypes.CDLL(libraries.pop())
    libpq.PQconndefaults.restype = ctypes.POINTER(Option)
    for option in libpq.PQconndefaults():
        if option.keyword is None:
            return
        if option.envvar is not None:
            yield option.envvar.decode()


def test_a_dsn_of_no_order_is_in_a_log_or_a_process_list(
    database: Database, dsn: str, listen: Callable[..., Listening], capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "s3cret-of-the-database"
    listen()
    prepared(database)
    command = Command(Database(dsn.replace("postgres:@", f"postgres:{secret}@")))
    assert command.wait() == 0
    assert secret not in "".join([*command.lines, *capfd.readouterr()])


def test_a_server_is_no_server_of_servers() -> None:
    roir = Path(sys.executable).parent / "roir"
    done = subprocess.run([roir, "spark-server", "--master", "sc://h"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give it to the commands, by --master" in done.stderr
