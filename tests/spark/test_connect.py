"""A whole build through Spark Connect: a real server, whose executors have neither this package nor the DSN."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from tests.spark.cluster import Server, connect_server, ui_of
from tests.spark.driving import (
    Running,
    at_work,
    finish_and_check,
    lift_rate,
    prepared,
    rows_committed,
)

pytestmark = pytest.mark.usefixtures("source")


@pytest.fixture
def connect(python_without_us: str) -> Iterator[tuple[Server, str]]:
    settings = {"spark.ui.port": "0"}
    with connect_server(settings=settings, environment={"PYSPARK_PYTHON": python_without_us}) as server:
        yield server


@pytest.mark.by_hand("test-cluster")
def test_a_build_through_connect_and_a_server_that_dies(
    database: Database, dsn: str, connect: tuple[Server, str]
) -> None:
    """It builds with the package that the client ships; its death pauses the build, which goes on elsewhere."""
    secret = "s3cret-of-the-database"
    secretive = Database(dsn.replace("postgres:@", f"postgres:{secret}@"))
    operation = prepared(database, rate=4_000)
    spark, address = connect
    with Running(secretive, address) as driver:
        driver.wait_for(lambda: at_work(database) == {0, 1, 2, 3} and rows_committed(database) > 2_000)
        ui = ui_of(spark.pid)
        api = f"{ui}/api/v1/applications"
        pages = [fetch(api)]
        application = json.loads(pages[0])[0]["id"]
        pages += [fetch(f"{api}/{application}/{page}") for page in ("jobs", "stages", "sql", "environment")]
        pages += [fetch(f"{ui}/{page}/") for page in ("connect", "jobs", "SQL")]
        tags = [tag for job in json.loads(pages[1]) for tag in job["jobTags"]]
        for number in range(4):
            name = f"roir public.ix operation {operation.operation_id}.1 build worker {number}"
            assert any(tag.endswith(name) for tag in tags), tags
        spark.kill()
        assert driver.wait() == 1, driver.said
        assert not [text for text in [*pages, *driver.lines, *spark.log] if secret in text]
    paused = operation_status(database, operation.operation_id)
    assert paused.status == "paused"
    assert 2_000 < paused.rows < 40_000
    lift_rate(database)
    with Running(database, "local[4]") as driver:
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


@pytest.mark.slow
def test_a_build_through_connect_to_its_end(database: Database, connect: tuple[Server, str]) -> None:
    prepared(database)
    _, address = connect
    with Running(database, address) as driver:
        assert driver.wait() == 0, driver.said
    finish_and_check(database)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())
