"""Where a password goes from an Airflow connection: each DAG in a real Airflow, well, badly and killed, then all is
searched for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
from psycopg2 import sql
from psycopg2.extensions import parse_dsn
from sqlalchemy.engine import make_url

from servers.airflow import StandaloneAirflow, processes_of, wait_until
from servers.postgres import embedded_postgres
from tests.shards.test_secrets import COLUMNS, MARKS, Place, place, without_own

__all__ = ["place"]
# Minutes, of an Airflow of its own.
pytestmark = pytest.mark.by_hand("sweeps")
PATIENCE_S = 300
TASKS = {
    "rebuild_index": ("verify_before", "prepare", "build", "finalize"),
    "verify_index": ("verify",),
    "keep_indexes_young": ("choose",),
    "clean_up_indexes": ("clean_up",),
    "ship_changes": ("ship",),
    "control_index": ("pause", "resume", "change", "abort", "revert"),
}
TABLE = {"index": "public.iu", "table": "public.u", "keys": "k", "batch_rows": 1000, "ranges": 4}
SHARDS = {"index": "public.i", "table": "public.t", "keys": "k", "shards": ["s0"]}
# Each DAG with what its form gets.
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("rebuild_index", TABLE),
    ("rebuild_index", SHARDS),
    ("verify_index", {"index": "public.iu"}),
    ("keep_indexes_young", {"exact": True}),
    ("control_index", {"index": "public.iu", "action": "pause", "reason": "lunch"}),
    ("clean_up_indexes", {}),
    ("ship_changes", {"ship_for": "2s"}),
]
# The second one fails as the first one does.
FAILING = [run for n, run in enumerate(RUNS) if n != 1]


class Deployment:
    """An Airflow whose connections have the marked passwords, and all that could be seen of it meanwhile."""

    def __init__(self, place: Place, airflow: StandaloneAirflow) -> None:
        self.place, self.airflow = place, airflow
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        for name, more in (("good", {}), ("wrong", {"password": f"another{MARKS['index']}"})):
            fields = parse_dsn(place.dsn("index", **more))
            airflow.add_connection(name, "postgres", extra={"roir_shards": ["s0"]}, **as_fields(fields))
        airflow.add_connection("s0", "postgres", **as_fields(parse_dsn(place.dsn("shard"))))

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            for process in processes_of(self.airflow.home):
                with suppress(psutil.Error):
                    line = " ".join(process.cmdline())
                    self.place.seen.append(("the list of processes", line))
                    if "java" in line or "worker_daemon" in line:
                        self.place.seen.append(("the environment of Spark's processes", str(without_own(process))))

    def trigger(self, dag: str, conf: dict[str, Any], connection: str) -> str:
        self.airflow.unpause(dag)
        return self.airflow.trigger(dag, {**conf, "postgres_conn_id": connection})

    def wait(self, dag: str, run: str, *states: str) -> None:
        """Waits until a task of the run is in one of these states, or the run has ended."""

        def reached() -> bool:
            ended = self.airflow.run_state(dag, run) in ("success", "failed")
            return ended or any(task["state"] in states for task in self.airflow.tasks(dag, run))

        wait_until(reached, PATIENCE_S, f"{dag} {run}: {states}")

    def stop(self) -> None:
        self._ended.set()
        self._watcher.join()

    def search(self) -> set[str]:
        """The places that have a mark, Airflow's database included, which keeps connections encrypted."""
        found = self.place.search()
        url = make_url(self.airflow.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"])
        given = {"dbname": url.database, "user": url.username, **url.query}
        with closing(psycopg2.connect(**given)) as connection, connection.cursor() as cursor:
            cursor.execute(COLUMNS)
            for schema, table, column in cursor.fetchall():
                if schema == "pg_catalog":
                    continue
                names = [sql.Identifier(one) for one in (column, schema, table)]
                cursor.execute(sql.SQL("SELECT {}::text FROM {}.{}").format(*names))
                # Values that Airflow pickles or packs are bytes, shown as hexadecimal digits.
                text = str(cursor.fetchall())
                if any(mark in text or mark.encode().hex() in text for mark in MARKS.values()):
                    found.add(f"{table}.{column} of Airflow's database")
        return found


def as_fields(dsn: dict[str, str]) -> dict[str, Any]:
    names = {"dbname": "schema", "user": "login"}
    return {names.get(name, name): int(value) if name == "port" else value for name, value in dsn.items()}


@pytest.fixture(scope="module")
def deployment(place: Place, dags_folder: Path) -> Iterator[Deployment]:
    home, events = place.home / "airflow", place.home / "events"
    dags = place.home / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__", "examples"))
    events.mkdir()
    conf = place.home / "spark"
    conf.mkdir()
    (conf / "spark-defaults.conf").write_text(f"spark.eventLog.enabled true\nspark.eventLog.dir file://{events}\n")
    place.roir("init")
    index = place.made.servers["index"]
    index.execute("SET ROLE app; CREATE TABLE u (id int PRIMARY KEY, k text)", "app")
    index.execute("SET ROLE app; INSERT INTO u SELECT n, n FROM generate_series(1, 20000) n", "app")
    with (
        embedded_postgres() as metadata,
        StandaloneAirflow(home, dags, metadata, environment={"SPARK_CONF_DIR": str(conf)}) as airflow,
    ):
        airflow.wait_until_ready(TASKS)
        found = Deployment(place, airflow)
        try:
            yield found
        finally:
            found.stop()


def test_no_dag_shows_a_secret(deployment: Deployment) -> None:
    for dag, conf in RUNS:
        run = deployment.trigger(dag, conf, "good")
        # On a busy machine a task may need another try.
        deployment.wait(dag, run, *(["up_for_retry"] if dag == "control_index" else []))
        if dag != "control_index":
            # There is nothing to pause.
            assert deployment.airflow.run_state(dag, run) == "success", (dag, conf, deployment.airflow.tasks(dag, run))
    assert list((deployment.place.home / "events").rglob("*")), "Spark wrote its event log"
    assert deployment.search() == set()


@pytest.mark.parametrize(("dag", "conf"), FAILING, ids=[dag for dag, _ in FAILING])
def test_no_failure_of_a_dag_shows_a_secret(deployment: Deployment, dag: str, conf: dict[str, Any]) -> None:
    run = deployment.trigger(dag, conf, "wrong")
    deployment.wait(dag, run, "up_for_retry", "failed")
    [task] = [one for one in deployment.airflow.tasks(dag, run) if one["state"] in ("up_for_retry", "failed")][:1]
    said = deployment.airflow.task_log(dag, run, task["task_id"], task["try_number"])
    assert "password authentication failed" in said, said
    if task["state"] != "failed":
        deployment.airflow.set_task_state(dag, run, task["task_id"], "failed")
    assert deployment.search() == set()


def test_no_task_that_is_killed_shows_a_secret(deployment: Deployment) -> None:
    slow = {**TABLE, "max_rows_per_second": 1000, "index": "public.killed"}
    run = deployment.trigger("rebuild_index", slow, "good")

    def drivers() -> list[psutil.Process]:
        return [one for one in processes_of(deployment.airflow.home) if "airflow_roir.spark" in one.cmdline()]

    (driver, *_) = wait_until(drivers, PATIENCE_S, "a driver")
    driver.parent().kill()
    deployment.wait("rebuild_index", run, "up_for_retry")
    deployment.airflow.set_task_state("rebuild_index", run, "build", "failed")
    assert deployment.search() == set()
