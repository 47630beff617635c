"""How Spark starts: beside what else is to do, once for a command, with what this machine has for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyspark
import pytest

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.spark import class_archive, worker_daemon
from airflow_roir.spark.class_archive import COLLECTOR, archive_path, java_options
from airflow_roir.spark.java import use_java
from airflow_roir.spark.marks import MARKS, read_marks
from tests.engine import steps
from tests.spark.driving import Running, finish_and_check, prepared

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


@pytest.mark.parametrize("home", [Path(pyspark.__file__).parent, Path("/opt/another-spark")])
def test_the_daemon_takes_pyspark_from_the_package_only_where_it_is_the_same(home: Path) -> None:
    zips = [path for path in (Path(pyspark.__file__).parent / "python" / "lib").iterdir() if path.suffix == ".zip"]
    code = "from airflow_roir.spark.worker_daemon import *; leave_zip_files(); import pyspark; print(pyspark.__file__)"
    environment = {**os.environ, "SPARK_HOME": str(home), "PYTHONPATH": os.pathsep.join(map(str, zips))}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (".zip" in ran.stdout) == (home != Path(pyspark.__file__).parent)


@pytest.mark.parametrize(
    ("conf", "environment", "ours"),
    [
        ({}, {}, True),
        ({"spark.driver.extraJavaOptions": "-XX:+UseG1GC"}, {}, False),
        ({"spark.driver.extraJavaOptions": "-Da=b"}, {}, True),
        ({}, {"SPARK_SUBMIT_OPTS": "-XX:+UseZGC"}, False),
        ({}, {"JAVA_TOOL_OPTIONS": "-XX:+UseParallelGC"}, False),
        ({}, {"SPARK_CONF_DIR": "."}, False),
    ],
)
def test_no_collector_is_asked_for_beside_one_that_somebody_has_chosen(
    tmp_path: Path, conf: dict[str, str], environment: dict[str, str], ours: bool
) -> None:
    if "SPARK_CONF_DIR" in environment:
        (tmp_path / "spark-defaults.conf").write_text("spark.driver.extraJavaOptions -XX:+UseG1GC\n")
        environment = {"SPARK_CONF_DIR": str(tmp_path)}
    assert (COLLECTOR in java_options(conf, environment)) == ours


def test_an_archive_that_others_could_have_written_is_not_used(tmp_path: Path) -> None:
    environment = {"JAVA_HOME": str(tmp_path), class_archive.FOLDER: str(tmp_path)}
    archive = archive_path(environment)

    def is_used() -> bool:
        return any(str(archive) in option for option in java_options({}, environment))

    assert not is_used()
    archive.write_bytes(b"")
    archive.chmod(0o644)
    assert is_used()
    archive.chmod(0o664)
    assert not is_used()
    archive.chmod(0o644)
    os.chown(archive, 12345, -1) if os.getuid() == 0 else archive.unlink()
    assert not is_used()


def test_each_java_and_each_pyspark_has_an_archive_of_its_own(tmp_path: Path) -> None:
    homes = [tmp_path / "17", tmp_path / "21", tmp_path / "other"]
    for home, version in zip(homes, ("17", "21", "17"), strict=True):
        home.mkdir()
        (home / "release").write_text(f'JAVA_VERSION="{version}"')
    assert len({archive_path({"JAVA_HOME": str(home)}).name for home in homes}) == 3


def test_an_archive_that_can_not_be_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {**os.environ, class_archive.FOLDER: str(tmp_path / "file" / "folder")}
    ran = subprocess.run((*ROIR, "spark-archive"), env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "name another folder by ROIR_CACHE_FOLDER" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_the_archive_is_made_and_used(tmp_path: Path) -> None:
    use_java()
    loaded = tmp_path / "loaded"
    environment = {**os.environ, class_archive.FOLDER: str(tmp_path / "cache")}
    made = subprocess.run((*ROIR, "spark-archive"), env=environment, capture_output=True, text=True, check=True)
    assert str(archive_path(environment)) in made.stdout
    log = {"SPARK_SUBMIT_OPTS": f"-Xlog:class+load:file={loaded}"}
    start = [sys.executable, "-m", "airflow_roir.spark.archived_start"]
    subprocess.run(start, env=environment | log, capture_output=True, check=True)
    (line,) = (line for line in loaded.read_text().splitlines() if " org.apache.spark.SparkContext source: " in line)
    assert "shared objects file (top)" in line


@pytest.mark.slow
@pytest.mark.usefixtures("source")
def test_a_java_that_knows_an_option_of_ours_no_more_starts_without_them(database: Database, tmp_path: Path) -> None:
    java = Path(use_java()) / "bin" / "java"
    wrapper = tmp_path / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *UseSerialGC*SparkSubmit*) exit 1;; esac\nexec {java} "$@"\n')
    wrapper.chmod(0o755)
    # Spark takes the java of JAVA_HOME; ours asks this one for its home, which would be the real one.
    (tmp_path / "release").write_text('JAVA_VERSION="17.0.1"\n')
    prepared(database)
    begun = time.monotonic()
    with Running(database, environment={"JAVA_HOME": str(tmp_path)}) as driver:
        assert driver.wait() == 0, driver.said
    assert "Spark is up" in driver.said, time.monotonic() - begun
    finish_and_check(database)
