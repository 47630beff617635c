"""The Spark application as a process of its own, in local mode."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.spark.driver_process import PERMANENT, driver_command, driver_environment, driver_order
from airflow_roir.spark.options import SparkOptions, with_task_failures
from tests.conftest import run_sql
from tests.crash import gate
from tests.crash.gate import Gate
from tests.spark.cluster import ui_of
from tests.spark.driving import GIVE_UP_S, ROWS, Running, finish_and_check, lift_rate, one, prepared, rows_committed

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.sample(1)]


def test_builds_and_seals_and_pauses_and_resumes_with_another_parallelism(database: Database, tmp_path: Path) -> None:
    operation = prepared(database, rate=10_000)
    log = tmp_path / "spark.log"
    driver = Running(database, conf={"spark.ui.enabled": "true", "spark.ui.port": "0"}, log=log)
    # The range is reported when it is done, and not when its worker leaves.
    driver.wait_for(lambda: " of 8" in driver.said)
    assert f"roir: Spark's pages: {one(database, 'SELECT spark_ui FROM roir.operation')}" in driver.lines
    requests.pause(database, "ix", "me", "a look")
    assert driver.wait() == 3, driver.said
    assert one(database, "SELECT spark_ui FROM roir.operation") is None
    # Spark's own messages that all is well aren't shown to the user.
    assert f"roir: Spark's own log: {log}" in driver.lines
    assert {line.split(":")[0] for line in driver.lines} == {"roir"}, driver.said
    assert "log4j" in log.read_text()
    # Found: the last that a reader saw was a stack trace of a worker, of a run that went well.
    assert log.read_text().splitlines()[-1] == "roir: the run has paused. Errors above are of workers that ended"
    order = [
        "starting Spark",
        "Spark is up",
        "build: 4 workers",
        " of 8",
        "build: paused by me",
        "paused by me at",
    ]
    assert [driver.said.index(f"{text}") for text in order] == sorted(driver.said.index(text) for text in order)
    # Found: users didn't see where Spark starts, nor how long that takes.
    assert re.search(r"starting Spark \(local.*\)$", driver.said, re.MULTILINE), driver.said
    assert re.search(r"Spark is up, .+ after its start$", driver.said, re.MULTILINE), driver.said
    assert "paused by me" in driver.last_told
    paused = operation_status(database, operation.operation_id)
    assert 0 < paused.rows < ROWS
    lift_rate(database)
    requests.change_options(database, "ix", actor="me", parallelism=3)
    log.unlink()
    driver = Running(database, log=log)
    assert driver.wait() == 0, driver.said
    assert log.read_text().splitlines()[-1].startswith("roir: the run has ended well.")
    assert any("build: 3 workers" in line for line in driver.lines)
    finish_and_check(database)


@pytest.mark.by_hand("sweeps")
def test_a_python_worker_that_is_killed_only_loses_its_open_batch(database: Database) -> None:
    prepared(database, rate=10_000)
    driver = Running(database)
    driver.wait_for(lambda: rows_committed(database) > 4_000)
    # The daemon's children are the workers; the daemon itself goes on.
    tree = psutil.Process(driver.pid).children(recursive=True)
    alive = [child for child in tree if child.status() != psutil.STATUS_ZOMBIE]
    daemons = {child.pid for child in alive if "airflow_roir.spark.worker_daemon" in child.cmdline()}
    victims = [child for child in alive if child.ppid() in daemons]
    assert victims
    before = rows_committed(database)
    os.kill(victims[0].pid, signal.SIGKILL)
    assert driver.wait() == 0, driver.said
    assert rows_committed(database) == ROWS > before
    finish_and_check(database)


@pytest.mark.by_hand("sweeps")
def test_a_killed_driver_leaves_the_operation_to_the_next(database: Database) -> None:
    prepared(database, rate=10_000)
    driver = Running(database)
    driver.wait_for(lambda: rows_committed(database) > 4_000)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    before = rows_committed(database)
    lift_rate(database)
    driver = Running(database, take_over=True)
    assert driver.wait() == 0, driver.said
    assert rows_committed(database) == ROWS > before
    finish_and_check(database)


@pytest.mark.slow
def test_a_driver_whose_parent_died_pauses_with_the_reason(database: Database) -> None:
    operation = prepared(database, rate=20_000)
    heard, said = os.pipe()
    command = driver_command(SparkOptions("local[2]"), driver_order("ix", "an orphan"))
    orphan = subprocess.Popen(
        command, env=driver_environment(database.dsn), stdin=subprocess.DEVNULL, stdout=said, stderr=said
    )
    os.close(said)
    deadline = time.monotonic() + GIVE_UP_S
    while not rows_committed(database):
        assert orphan.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.close(heard)
    assert orphan.wait(GIVE_UP_S) == 1
    assert "the process that started this run has died" in str(
        operation_status(database, operation.operation_id).pause_reason
    )
    driver = Running(database)
    lift_rate(database)
    assert driver.wait() == 0, driver.said
    finish_and_check(database)


def test_an_altered_source_fails_the_operation_with_the_reason(database: Database, dsn: str) -> None:
    operation = prepared(database)
    run_sql(dsn, "ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    driver = Running(database)
    assert driver.wait() == PERMANENT
    assert "altered" in driver.last_told
    failed = operation_status(database, operation.operation_id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "altered" in failed.error


@pytest.mark.by_hand("sweeps")
def test_the_same_job_runs_by_spark_submit(database: Database) -> None:
    import pyspark

    import airflow_roir.spark

    prepared(database)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    application = Path(airflow_roir.spark.__file__).parent / "__main__.py"
    done = subprocess.run(
        [submit, "--master", "local[2]", application, "--index", "ix", "--owner", "spark-submit"],
        env={**os.environ, "ROIR_DSN": database.dsn, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    finish_and_check(database)


def test_the_dsn_is_in_no_command_line_log_or_page_of_spark(database: Database, dsn: str, tmp_path: Path) -> None:
    secret = "s3cret-of-the-database"
    prepared(database)
    gate.install(dsn)
    # It builds for as long as its pages are read.
    shut = Gate(dsn, "build")
    secretive = Database(dsn.replace("postgres:@", f"postgres:{secret}@"))
    log = tmp_path / "spark.log"
    driver = Running(secretive, "local[2]", {"spark.ui.enabled": "true", "spark.ui.port": "0"}, log=log)
    driver.wait_for(shut.waiting)
    tree = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    shown = [" ".join(child.cmdline()) for child in tree if child.status() != psutil.STATUS_ZOMBIE]
    api = f"{ui_of(driver.pid)}/api/v1/applications"
    application = json.loads(fetch(api))[0]["id"]
    for page in ("environment", "jobs", "stages", "sql", "executors"):
        shown.append(fetch(f"{api}/{application}/{page}"))
    shut.open()
    assert driver.wait() == 0, driver.said
    shown += [*driver.lines, log.read_text()]
    assert len(shown) > 8
    assert not [text for text in shown if secret in text]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("conf", [{}, {"spark.ui.enabled": "true", "spark.ui.port": "0"}], ids=["", "with pages"])
def test_no_other_machine_reaches_a_spark_in_local_mode(database: Database, dsn: str, conf: dict[str, str]) -> None:
    """Spark's pages were on every interface, without a password, and could end jobs."""
    prepared(database)
    gate.install(dsn)
    shut = Gate(dsn, "build")
    driver = Running(database, "local[2]", conf)
    driver.wait_for(shut.waiting)
    tree = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for process in tree
        if process.status() != psutil.STATUS_ZOMBIE
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {address for address, _ in listening} == {"127.0.0.1"}
    pages = one(database, "SELECT spark_ui FROM roir.operation")
    if conf:
        assert urllib.parse.urlsplit(pages).hostname in ("127.0.0.1", "localhost")
        application = json.loads(fetch(f"{pages}/api/v1/applications"))[0]["id"]
        environment = fetch(f"{pages}/api/v1/applications/{application}/environment")
        assert ["spark.ui.killEnabled", "false"] in json.loads(environment)["sparkProperties"]
    else:
        assert pages is None
    shut.open()
    assert driver.wait() == 0, driver.said


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_nothing_to_drive_is_bad_input(database: Database) -> None:
    driver = Running(database)
    assert driver.wait() == 2
    assert "no index ix" in driver.last_told


@pytest.mark.parametrize(
    ("given", "used"),
    [("local", "local[1,4]"), ("local[3]", "local[3,4]"), ("local[*]", "local[*,4]"), ("local[2,7]", "local[2,7]")],
)
def test_local_mode_tries_a_task_as_often_as_a_cluster(given: str, used: str) -> None:
    assert with_task_failures(given) == used
    assert with_task_failures("spark://host:7077") == "spark://host:7077"
