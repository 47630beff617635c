"""How Spark starts: beside what else is to do, once for a command, with what this machine has for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.spark import worker_daemon
from airflow_roir.spark.start_timings import MARKS, read_marks
from tests.engine import steps

pytestmark = pytest.mark.sample(6)

ROIR = (sys.executable, "-m", "airflow_roir.cli")


def roir(dsn: str, logs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ROIR_DSN": dsn, "ROIR_LOG_FOLDER": str(logs)}
    return subprocess.run((*ROIR, *arguments), env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_command_starts_spark_once_for_all_its_operations(database: Database, dsn: str, tmp_path: Path) -> None:
    install.init(database)
    steps.make_table(dsn)
    first = roir(dsn, tmp_path, "build", "ix", "--table", "t", "--keys", "k")
    assert first.returncode == 0, first.stderr
    (log,) = tmp_path.iterdir()
    assert log.name == "spark-1.log"
    marks = read_marks(log.read_text())
    assert list(marks) == sorted(marks, key=lambda name: marks[name])
    assert set(marks) == set(MARKS)
    rebuilt = roir(dsn, tmp_path, "build", "ix", "--verify", "before")
    assert rebuilt.returncode == 0, rebuilt.stderr
    # The verification and the build, of which the first has given the log its name.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spark-1.log", "spark-2.log"]
    said = (tmp_path / "spark-2.log").read_text()
    assert said.count("roir-start java ") == 1
    assert said.count("roir-start begun ") == 2
    assert rebuilt.stderr.count(f"Spark's own log: {tmp_path / 'spark-2.log'}") == 2


def test_a_build_that_is_refused_leaves_no_driver_and_no_log(database: Database, dsn: str, tmp_path: Path) -> None:
    install.init(database)
    refused = roir(dsn, tmp_path / "logs", "build", "ix", "--table", "no_such_table", "--keys", "k")
    assert refused.returncode == 2
    assert "no_such_table" in refused.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    ours = [one for one in psutil.process_iter() if str(tmp_path / "logs") in " ".join(_command(one))]
    _, alive = psutil.wait_procs(ours, timeout=30)
    assert not alive


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_without_java_a_build_begins_nothing(database: Database, dsn: str, tmp_path: Path) -> None:
    install.init(database)
    steps.make_table(dsn)
    environment = {**os.environ, "ROIR_DSN": dsn, "JAVA_HOME": "/nor/this", "PATH": "/usr/no/such/folder"}
    command = (*ROIR, "build", "ix", "--table", "t", "--keys", "k")
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "Spark needs Java 17" in ran.stderr
    with database.transaction() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM roir.operation").scalar() == 0


def test_a_driver_that_waits_ends_with_its_parent(dsn: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path; from airflow_roir.cli.spark import CommandSpark\n"
            f"spark = CommandSpark({dsn!r}, None, None); spark.start(); print(spark._driver.pid, flush=True)\n"
            "time.sleep(600)",
        ],
        env={**os.environ, "ROIR_LOG_FOLDER": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    driver = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([driver], timeout=120)
    assert not driver.is_running()
    assert not list(tmp_path.iterdir())


def test_nothing_that_the_daemon_imports_starts_a_thread() -> None:
    """A fork would lose it, with the locks that it holds."""
    code = (
        "import importlib, os, threading\n"
        f"for name in {worker_daemon.PRELOADED!r}: importlib.import_module(name)\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/task')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["1", "1"]
