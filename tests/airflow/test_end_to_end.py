"""A real Airflow, a real Spark and a real PostgreSQL: `rebuild_index` from the form to the published index."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg2
import pytest

from airflow_roir.engine import generation as physical
from airflow_roir.engine import operations, status
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.comparison import compare
from tests.engine import steps

DAG = "rebuild_index"
SWITCH = f"airflow switch of DAG {DAG}"
ROWS = 20_000
RATE = 1_500
# Long beside what is waited for, short beside a build host's patience: nothing here is a measurement.
PATIENCE_S = 180
FOLLOWED = "warehouse_followed"
FOLLOWER = f"""
from airflow.sdk import DAG, task
from airflow_roir.assets import index_asset

with DAG("follow_index", schedule=[index_asset("public.item_by_price", "{FOLLOWED}")], is_paused_upon_creation=False):

    @task
    def heard(triggering_asset_events):
        # The same events twice: by the index's own asset and by the alias of all.
        return sorted({{e.extra["operation_id"] for events in triggering_asset_events.values() for e in events}})

    heard()
"""
# What the Task State Store shows of options that have no value.
WORK_SEEDED = {"throttle": "off", "windows": "off", "max_duration_s": 0, "priority": 0}


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """Airflow with the DAG files as they are shipped, copied as a user does, and a DAG that follows an index."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__"))
    (dags / "follow_index.py").write_text(FOLLOWER)
    home = tmp_path_factory.mktemp("airflow")
    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata) as running:
        running.wait_until_ready([DAG, "verify_index", "clean_up_indexes", "follow_index"])
        yield running


@pytest.fixture(autouse=True)
def switch_is_on(airflow: StandaloneAirflow) -> None:
    """Also after a test that failed in a pause."""
    airflow.unpause(DAG)


@pytest.fixture
def warehouse(airflow: StandaloneAirflow, shop: Any) -> str:
    """An Airflow connection to the shop, made as a user makes it."""
    name = f"warehouse_{shop.fields['schema']}"
    fields = {key: value for key, value in shop.fields.items() if value}
    airflow.add_connection(name, "postgres", **fields)
    return name


def drivers(airflow: StandaloneAirflow) -> list[psutil.Process]:
    """The Spark drivers of this Airflow's tasks, with all that belongs to them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            of_ours = process.environ().get("AIRFLOW_HOME") == str(airflow.home)
            parts = {os.path.basename(part) for part in process.cmdline()}
            if of_ours and parts & {"airflow_roir.spark", "java", "airflow_roir.spark.worker_daemon"}:
                found.append(process)
    return found


@contextmanager
def writing(shop: Any) -> Iterator[list[int]]:
    """A writer that inserts, updates and deletes items all the while; yields the count of its commits."""
    commits = [0]
    stop = threading.Event()

    def write() -> None:
        with psycopg2.connect(shop.dsn) as connection, connection.cursor() as cursor:
            n = 0
            while not stop.wait(0.01):
                n += 1
                cursor.execute("INSERT INTO item VALUES (%s, 'new', %s)", (1_000_000 + n, n))
                cursor.execute("UPDATE item SET kind = 'moved', price = price + 1 WHERE id = %s", (n * 31 % ROWS,))
                cursor.execute("DELETE FROM item WHERE id = %s", (n * 17 % ROWS,))
                connection.commit()
                commits[0] = n
        connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield commits
    finally:
        stop.set()
        thread.join()


def everything_said(airflow: StandaloneAirflow, run: str) -> Iterator[tuple[str, str]]:
    """Whatever Airflow keeps or shows of a run, by where it was found."""
    for path in airflow.home.rglob("*"):
        if path.is_file() and path.suffix in (".log", ".txt", ".json", ".db"):
            yield str(path), path.read_text(errors="replace")
    for task in ("verify_before", "prepare", "build", "finalize"):
        yield f"{task} instance", repr(airflow.task(DAG, run, task))
        yield f"{task} xcoms", repr(airflow.xcoms(DAG, run, task))
        yield f"{task} log", airflow.task_log(DAG, run, task)


def in_state(airflow: StandaloneAirflow, run: str, task: str, *states: str) -> Callable[[], bool]:
    def reached() -> bool:
        state = airflow.task_state(DAG, run, task)
        assert state in states or state not in ("failed", "up_for_retry"), airflow.task_log(DAG, run, task)
        return state in states

    return reached


@pytest.mark.slow
def test_a_build_is_paused_changed_resumed_and_published(airflow: StandaloneAirflow, shop: Any, warehouse: str) -> None:
    index = 'public."Item by kind"'
    command_lines: set[str] = set()
    with writing(shop) as commits:
        run = airflow.trigger(
            DAG,
            {
                "index": index,
                "table": "item",
                "keys": "kind, id",
                "include": "price",
                "parallelism": 2,
                "batch_rows": 1000,
                "ranges": 8,
                "max_rows_per_second": RATE,
                "postgres_conn_id": warehouse,
            },
        )

        def standing() -> Any:
            return status.status(shop.database, index)[0]

        wait_until(
            lambda: airflow.task_state(DAG, run, "build") == "running" and standing().percent_complete > 15,
            PATIENCE_S,
            "a build that is under way",
        )
        command_lines |= {part for process in drivers(airflow) for part in process.cmdline()}
        assert any("airflow_roir.spark" in part for part in command_lines)

        airflow.pause(DAG)
        wait_until(in_state(airflow, run, "build", "up_for_reschedule"), PATIENCE_S, "the task to leave")
        # The driver is reaped; its JVM ends when it hears of that.
        wait_until(lambda: drivers(airflow) == [], PATIENCE_S, "the driver's JVM to end")
        assert shop.run("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'roir%'") == [(0,)]
        paused = standing()
        assert (paused.status, paused.paused_by, paused.phase) == ("paused", SWITCH, "build")
        assert 0 < paused.percent_complete < 100
        log = airflow.task_log(DAG, run, "build")
        assert f"at {paused.percent_complete:.0f} %, paused by {SWITCH}: unpause to resume" in log

        # While nothing runs: more workers, and a value that can't be used.
        seeded = {"parallelism": 2, "batch_rows": 1000, "max_rows_per_second": RATE} | WORK_SEEDED
        assert airflow.get_stored(DAG, run, "build") == seeded | {"in_effect": seeded}
        airflow.put_stored(DAG, run, "build", "parallelism", "4")
        airflow.put_stored(DAG, run, "build", "batch_rows", "plenty")
        assert standing().rows == paused.rows

        airflow.unpause(DAG)
        wait_until(lambda: standing().rows > paused.rows, PATIENCE_S, "the build to go on")
        assert (standing().parallelism, standing().batch_rows) == (4, 1000)
        # And once more while it runs.
        airflow.put_stored(DAG, run, "build", "parallelism", 3)
        wait_until(lambda: standing().parallelism == 3, PATIENCE_S, "the change to be followed")
        wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
        written = commits[0]
        wait_until(lambda: commits[0] > written + 10, PATIENCE_S, "writes to the published index")

    assert airflow.run_state(DAG, run) == "success"
    assert airflow.task_state(DAG, run, "verify_before") == "skipped"
    assert standing().status == "completed"
    report = compare(shop.database, index)
    assert (report.missing, report.extra, report.different) == (0, 0, 0)
    assert shop.run(f"(TABLE {index}) EXCEPT ALL SELECT kind, id, price FROM item") == []
    assert shop.run(f"SELECT kind, id, price FROM item EXCEPT ALL (TABLE {index})") == []

    # A pause costs no try.
    for task in ("prepare", "build", "finalize"):
        assert airflow.task(DAG, run, task)["try_number"] == 1
    log = airflow.task_log(DAG, run, "build")
    assert "batch_rows stays at 1000" in log
    assert "parallelism changes from 4 to 3: changed in the Task State Store" in log
    actions = [(event.action, event.actor) for event in operations.events(shop.database, index)]
    assert actions.count(("pause", SWITCH)) == 1
    assert ("change parallelism", f"task state store of DAG {DAG}") in actions

    operation = standing().operation_id
    for task in ("prepare", "build", "finalize"):
        assert airflow.xcoms(DAG, run, task)["return_value"] == operation
    link = airflow.links(DAG, run, "build")["Change parallelism"]
    assert link == f"{airflow.url}/dags/{DAG}/runs/{quote(run, safe='')}/tasks/build/task-state-store"
    event = airflow.asset_events()[-1]
    assert event["uri"] == f"roir://{warehouse}/public/Item%20by%20kind"
    assert event["extra"]["operation_id"] == operation

    secret = shop.fields["password"]
    for needle in (secret, secret.replace("'", "\\'"), secret.split("'")[1]):
        assert not any(needle in part for part in command_lines)
        for where, text in everything_said(airflow, run):
            assert needle not in text, where


@pytest.mark.slow
def test_a_task_marked_failed_takes_its_driver_along_and_goes_on_when_it_is_cleared(
    airflow: StandaloneAirflow, shop: Any
) -> None:
    airflow.add_connection(FOLLOWED, "postgres", **{key: value for key, value in shop.fields.items() if value})
    conf = {"index": "item_by_price", "table": "item", "keys": "price", "batch_rows": 1000, "ranges": 8}
    conf |= {"max_rows_per_second": RATE, "postgres_conn_id": FOLLOWED}
    run = airflow.trigger(DAG, conf)

    def rows() -> int:
        return status.status(shop.database, "item_by_price")[0].rows

    def running() -> bool:
        return airflow.task_state(DAG, run, "build") == "running" and rows() > 0

    wait_until(running, PATIENCE_S, "a build that is under way")
    airflow.set_task_state(DAG, run, "build", "failed")
    wait_until(lambda: drivers(airflow) == [], PATIENCE_S, "the driver to end")
    before = rows()
    airflow.call(
        "POST",
        f"/api/v2/dags/{DAG}/clearTaskInstances",
        {"dag_run_id": run, "task_ids": ["build"], "include_downstream": True, "dry_run": False}
        | {"only_failed": False, "reset_dag_runs": True},
    )
    wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
    assert airflow.run_state(DAG, run) == "success", airflow.task_log(DAG, run, "build", 2)
    assert 0 < before < ROWS
    report = compare(shop.database, "item_by_price")
    assert (report.missing, report.extra, report.different) == (0, 0, 0)

    # Whoever follows that index was told.
    def heard() -> list[dict[str, Any]]:
        runs = airflow.call("GET", "/api/v2/dags/follow_index/dagRuns")["dag_runs"]
        return [one for one in runs if one["state"] == "success"]

    follower = wait_until(heard, PATIENCE_S, "the DAG that follows the index")[0]["dag_run_id"]
    operation = status.status(shop.database, "item_by_price")[0].operation_id
    assert airflow.xcoms("follow_index", follower, "heard")["return_value"] == [operation]


@pytest.mark.slow
def test_a_corrupted_entry_is_found_mended_and_counted(airflow: StandaloneAirflow, shop: Any, warehouse: str) -> None:
    prepared, engine_run = steps.begin(shop.database, "item_by_kind", "item", "kind", "price", segments=2)
    steps.finish_all(shop.database, engine_run)
    shop.run(f"UPDATE {physical.base(prepared.generation_id)} SET c3 = -1 WHERE c2 = 77")
    conf = {"index": "public.item_by_kind", "repair": True, "postgres_conn_id": warehouse}
    run = airflow.trigger("verify_index", conf)
    wait_until(lambda: airflow.run_state("verify_index", run) in ("success", "failed"), PATIENCE_S, "the run's end")
    log = airflow.task_log("verify_index", run, "verify")
    assert airflow.run_state("verify_index", run) == "success", log
    counts = airflow.xcoms("verify_index", run, "verify")["return_value"]
    named = ("rows", "entries", "missing", "extra", "different", "mended", "complete")
    assert [counts[name] for name in named] == [ROWS, ROWS, 0, 0, 1, 1, True]
    assert "different: kind k77, id 77 (mended)" in log
    assert "sum: 2 workers" in log
    # The verification's own id is not left there.
    seeded = {"parallelism": 2} | WORK_SEEDED
    assert airflow.get_stored("verify_index", run, "verify") == seeded | {"in_effect": seeded}
    assert airflow.task("verify_index", run, "verify")["try_number"] == 1
    steps.assert_exact(shop.database, "item_by_kind")


@pytest.mark.slow
def test_clean_up_runs(airflow: StandaloneAirflow, warehouse: str) -> None:
    run = airflow.trigger("clean_up_indexes", {"postgres_conn_id": warehouse})
    wait_until(lambda: airflow.run_state("clean_up_indexes", run) in ("success", "failed"), PATIENCE_S, "the clean-up")
    assert set(airflow.xcoms("clean_up_indexes", run, "clean_up")["return_value"].values()) == {0}
