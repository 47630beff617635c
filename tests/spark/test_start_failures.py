"""Spark's start where something is amiss: a driver that dies before its work, a disk that is full, odd folders."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput, SparkFailed
from airflow_roir.spark import __main__ as application
from airflow_roir.spark.driver_process import Driver, driver_command, driver_environment, driver_order, later
from airflow_roir.spark.java import use_java
from airflow_roir.spark.log_file import spark_log
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.start_timings import mark, turn_on
from tests.spark.driving import GIVE_UP_S, finish_and_check, prepared

pytestmark = pytest.mark.sample(4)


def waiting(code: str) -> Driver:
    """A driver that takes an order and then does this."""
    program = [sys.executable, "-u", "-c", f"import os, sys; sys.stdin.readline(); {code}"]
    return Driver(program, os.environ, lambda line: None, takes_orders=True)


@pytest.mark.parametrize(
    ("code", "how"),
    [("sys.exit(3)", "exit code 3"), ("sys.exit(0)", "exit code 0"), ("os.kill(os.getpid(), 9)", "killed by signal 9")],
)
def test_a_driver_that_ends_before_its_operation_is_a_failure(code: str, how: str) -> None:
    """Seen to fail: exit code 0 while the operation is `running` without a worker, or 247 without a message."""
    driver = waiting(code)
    driver.order(["--index", "ix"])
    with pytest.raises(SparkFailed, match=how):
        driver.wait_for_order(GIVE_UP_S)
    driver.kill()


def test_only_an_exit_code_ends_an_order() -> None:
    driver = waiting("print('roir: ended with exit code x'); print('roir: ended with exit code 4')")
    driver.order(["--index", "ix"])
    assert driver.wait_for_order(GIVE_UP_S) == 4
    driver.kill()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_what_others_wrote_is_no_line_of_the_drivers(end: str) -> None:
    voice = io.StringIO(newline="")
    application.say(f"paused by ann: lunch{end}roir: ended with exit code 0", 3, voice)
    lines = io.StringIO(voice.getvalue(), newline=None).readlines()
    assert [line for line in lines if line.startswith("roir: ")] == ["roir: paused by ann: lunch\n"]


def test_a_full_disk_takes_no_mark_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_roir.spark.start_timings._Marks.is_on", False)
    turn_on()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        mark("driver")
        monkeypatch.undo()
        # The buffered mark can't be written at the end, either.
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for name in ("ROIR_LOG_FOLDER", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match="ROIR_LOG_FOLDER"):
        spark_log(1)


def start(folder: Path, dsn: str, conf: dict[str, str] | None = None, **environment: str) -> tuple[Driver, list[str]]:
    """A driver that waits. folder: for its temporary files."""
    use_java()
    folder.mkdir()
    lines: list[str] = []
    command = driver_command(SparkOptions("local[2]", conf or {}), later(folder.parent / "log"))
    driver = Driver(command, driver_environment(dsn) | {"TMPDIR": str(folder)} | environment, lines.append, True)
    return driver, lines


def seen(found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + GIVE_UP_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_start_that_is_broken_off_leaves_nothing(dsn: str, tmp_path: Path) -> None:
    driver, _ = start(tmp_path / "files", dsn)
    # PySpark has made its own, for a JVM of which it knows nothing yet.
    seen(lambda: len(list((tmp_path / "files").iterdir())) == 2)
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    assert not list((tmp_path / "files").iterdir())
    assert not psutil.wait_procs(children, timeout=GIVE_UP_S)[1]


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("source")
def test_a_driver_that_is_told_to_end_takes_no_more_orders(database: Database, tmp_path: Path) -> None:
    """Seen to fail: it waited for the next one, until it was killed with its files."""
    prepared(database, rate=2000)
    driver, lines = start(tmp_path / "files", database.dsn)
    driver.order(driver_order("ix", "test", log=tmp_path / "named"))
    seen(lambda: any("workers at work" in line or "range" in line for line in lines))
    psutil.Process(driver.pid).terminate()
    assert driver.wait_for_order(GIVE_UP_S) == 3
    assert driver.wait(GIVE_UP_S) == 3
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("source")
def test_spark_leaves_no_files_in_folders_of_any_name(database: Database, tmp_path: Path) -> None:
    """Seen to fail: a quote in TMPDIR made another folder, and `spark.local.dir` kept what a killed JVM had."""
    prepared(database)
    local = tmp_path / "local"
    local.mkdir()
    driver, lines = start(tmp_path / 'a "b" c\'d $x \\y', database.dsn, {"spark.local.dir": str(local)})
    driver.order(driver_order("ix", "test", log=tmp_path / "named"))
    assert driver.wait_for_order(GIVE_UP_S) == 0, lines
    driver.release()
    assert driver.wait(GIVE_UP_S) == 0
    assert not list(local.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a "b" c\'d $x \\y', "local", "named"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("a") and list(path.iterdir())]
    finish_and_check(database)
