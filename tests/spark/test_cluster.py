"""The same operation on a real standalone cluster, by the driver and by spark-submit, and with processes killed."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import airflow_roir.spark
from airflow_roir.engine import build, seal
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.spark.driver_process import Driver, driver_environment
from tests.spark.cluster import BIN, EXECUTOR_SETTINGS, Cluster, standalone_cluster, ui_of
from tests.spark.driving import (
    ROWS,
    Running,
    at_work,
    finish_and_check,
    lift_rate,
    one,
    prepared,
    rows_committed,
)

pytestmark = pytest.mark.usefixtures("source")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def settings(python: str, **more: str) -> dict[str, str]:
    return {**EXECUTOR_SETTINGS, "spark.pyspark.python": python, **more}


def ask(api: str, path: str = "") -> Any:
    with urllib.request.urlopen(f"{api}{path}", timeout=30) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
def test_executors_need_no_install_and_the_ui_shows_who_does_what(
    database: Database, cluster: Cluster, python_without_us: str
) -> None:
    operation = prepared(database, rate=8_000, parallelism=3)
    conf = settings(python_without_us, **{"spark.ui.port": "0"})
    with Running(database, cluster.url, conf) as driver:
        driver.wait_for(lambda: at_work(database) == {0, 1, 2})
        api = f"{ui_of(driver.pid)}/api/v1/applications"
        (application,) = ask(api)
        assert application["name"] == f"roir public.ix operation {operation.operation_id}"
        jobs = ask(api, f"/{application['id']}/jobs")
        assert {job["description"].rpartition(", ")[0] for job in jobs} == {
            f"public.ix: build, worker {number} of 3" for number in range(3)
        }
        assert all(job["description"].endswith("ranges unclaimed") for job in jobs)
        hosts = {executor["hostPort"] for executor in ask(api, f"/{application['id']}/executors")}
        assert len(hosts) == 3, "the driver and two executors"
        lift_rate(database)
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


@pytest.mark.by_hand("test-cluster")
def test_a_killed_executor_only_loses_its_open_batches(
    database: Database, cluster: Cluster, python_without_us: str
) -> None:
    """By spark-submit in client mode; the package ships itself."""
    operation = prepared(database, rate=2_000)
    # Else the driver would run on the executors' interpreter, which hasn't got the package.
    interpreters = settings(python_without_us, **{"spark.pyspark.driver.python": sys.executable})
    conf = [part for name, value in interpreters.items() for part in ("--conf", f"{name}={value}")]
    application = Path(airflow_roir.spark.__file__).parent / "__main__.py"
    submit = [str(BIN / "spark-submit"), "--master", cluster.url, "--deploy-mode", "client", *conf]
    command = [*submit, str(application), "--index", "ix", "--owner", "me"]
    lines: list[str] = []
    driver = Driver(command, driver_environment(database.dsn), forward=lines.append)
    running = Running.__new__(Running)
    running.driver, running.lines = driver, lines
    with running:
        running.wait_for(lambda: at_work(database) == {0, 1, 2, 3} and rows_committed(database) > 2_000)
        before = rows_committed(database)
        victim = cluster.executors()[0]
        victim.kill()
        running.wait_for(lambda: rows_committed(database) >= before + 2_000 and len(at_work(database)) == 4)
        assert victim.pid not in {executor.pid for executor in cluster.executors()}
        lift_rate(database)
        assert running.wait() == 0, running.said
    done = operation_status(database, operation.operation_id)
    assert (done.phase, done.rows) == ("fold", ROWS)
    finish_and_check(database)


@pytest.mark.by_hand("test-cluster")
def test_a_pause_does_not_wait_for_executors_that_never_come(database: Database, cluster: Cluster) -> None:
    """More memory than any worker of the cluster has: Spark goes on asking for it."""
    operation = prepared(database)
    with Running(database, cluster.url, EXECUTOR_SETTINGS | {"spark.executor.memory": "8g"}) as driver:
        driver.wait_for(lambda: "no free slot of Spark's yet for 4 of 4 workers" in driver.said)
        requests.pause(database, "ix", "me", "the cluster is full")
        assert driver.wait() == 3, driver.said
    assert operation_status(database, operation.operation_id).pause_reason == "the cluster is full"


@pytest.mark.by_hand("test-cluster")
def test_nobody_is_waited_for_once_nothing_is_left(database: Database, cluster: Cluster) -> None:
    """Other workers did all of it; the driver's own never had a slot, as if every executor were lost."""
    operation = prepared(database)
    with Running(database, cluster.url, EXECUTOR_SETTINGS | {"spark.executor.memory": "8g"}) as driver:
        for phase, work in (("build", build.PHASE.work), ("seal", seal.PHASE.work)):
            driver.wait_to_say(f"{phase}: no free slot of Spark's yet for ")
            run = Run(operation.operation_id, one(database, "SELECT epoch FROM roir.operation"), "ix", "test")
            assert list(work(database, run, 0))
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


@pytest.mark.by_hand("test-cluster")
def test_a_killed_worker_daemon_and_master_do_not_end_the_build(
    database: Database, python_without_us: str, tmp_path: Path
) -> None:
    """The daemon takes its executor with it; without a master, those that are left go on."""
    prepared(database, rate=2_000)
    with standalone_cluster(tmp_path) as cluster, Running(database, cluster.url, settings(python_without_us)) as driver:
        driver.wait_for(lambda: at_work(database) == {0, 1, 2, 3} and len(cluster.executors()) == 2)
        before = rows_committed(database)
        cluster.workers[0].kill()
        driver.wait_for(lambda: len(at_work(database)) == 2)
        driver.wait_for(lambda: rows_committed(database) > before + 1_000)
        cluster.master.kill()
        before = rows_committed(database)
        driver.wait_for(lambda: rows_committed(database) > before + 1_000)
        assert one(database, "SELECT status FROM roir.operation") == "running"
        lift_rate(database)
        assert driver.wait() == 0, driver.said
    finish_and_check(database)
