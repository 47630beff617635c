"""A real Airflow, a real Spark and a real PostgreSQL: `rebuild_index` from the form to the published index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import psycopg2
import pytest
from psycopg2.extensions import parse_dsn
from sqlalchemy import Engine, create_engine
from sqlalchemy import column as new_column
from sqlalchemy import table as new_table

from airflow_roir.announcing import announce
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.generation import physical
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import NotStrict
from airflow_roir.reading import ShardedIndex
from airflow_roir.task.dag_switch import LOOK_AGAIN_S, MOST_S
from servers.airflow import AirflowError, StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.airflow.orders import ORDERS
from tests.comparison import compare
from tests.conftest import run_sql
from tests.engine import steps

DAG, SHIP, YOUNG = "rebuild_index", "ship_changes", "keep_indexes_young"
# So that one run follows the other within the test.
SHIP_FOR = "8s"
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
# The values that the Task State Store shows for options without a value.
WORK_SEEDED = {"throttle": "off", "windows": "off", "max_duration_s": 0, "priority": 0}


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """Airflow with the DAG files as they are shipped, copied as a user does, and a DAG that follows an index."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__"))
    (dags / "follow_index.py").write_text(FOLLOWER)
    ships = dags / "ship_changes.py"
    ships.write_text(ships.read_text().replace('"10min", type', f'"{SHIP_FOR}", type'))
    home = tmp_path_factory.mktemp("airflow")
    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata) as running:
        running.wait_until_ready([DAG, "verify_index", "clean_up_indexes", "follow_index", SHIP, YOUNG])
        yield running


@pytest.fixture(autouse=True)
def switch_is_on(airflow: StandaloneAirflow) -> None:
    """Unpauses the DAG, also after a test that failed in a pause."""
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
    """Everything that Airflow keeps or shows of a run, with the place where it was found."""
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


@pytest.mark.by_hand("sweeps")
def test_a_build_that_is_paused_for_hours_looks_seldom_and_says_so_once_an_hour(
    airflow: StandaloneAirflow, shop: Any, warehouse: str
) -> None:
    """Found: a process and two lines each half minute. The hours pass by its Task State Store."""
    conf = {"index": "public.by_price", "table": "item", "keys": "price", "postgres_conn_id": warehouse}
    run = airflow.trigger(DAG, conf | {"parallelism": 1, "batch_rows": 1000, "max_rows_per_second": RATE})

    def standing() -> Any:
        return status(shop.database, "public.by_price")[0]

    def lines() -> list[str]:
        log = airflow.task_log(DAG, run, "build")
        return [line for line in log.splitlines() if "Operation on index public.by_price at " in line]

    under_way = lambda: airflow.task_state(DAG, run, "build") == "running" and standing().rows > 0  # noqa: E731
    wait_until(under_way, PATIENCE_S, "a build that is under way")
    requests.pause(shop.database, "public.by_price", "airflow user ann", "lunch")
    wait_until(in_state(airflow, run, "build", "up_for_reschedule"), PATIENCE_S, "the task to leave")
    assert (standing().expected_at - standing().now).total_seconds() < LOOK_AGAIN_S + 5
    [first] = lines()
    assert "paused by airflow user ann (lunch)" in first
    assert "resume with the button of its page Index build" in first
    waits = airflow.get_stored(DAG, run, "build")["waits"]
    airflow.put_stored(DAG, run, "build", "waits", waits | {"since": waits["since"] - 2 * 3600})
    wait_until(lambda: len(lines()) > 1, PATIENCE_S, "the next look")
    wait_until(in_state(airflow, run, "build", "up_for_reschedule"), PATIENCE_S, "the task to leave")
    assert "(waiting for 2 h" in lines()[1]
    assert LOOK_AGAIN_S < (standing().expected_at - standing().now).total_seconds() <= MOST_S
    assert airflow.task(DAG, run, "build")["try_number"] == 1
    requests.request_abort(shop.database, "public.by_price", "airflow user ann", "the test is over")


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
            return status(shop.database, index)[0]

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
        stored = airflow.get_stored(DAG, run, "build")
        assert stored.pop("waits")["hours"] == 0
        assert stored == seeded | {"in_effect": seeded}
        airflow.put_stored(DAG, run, "build", "parallelism", "4")
        airflow.put_stored(DAG, run, "build", "batch_rows", "plenty")
        assert standing().rows == paused.rows

        airflow.unpause(DAG)
        wait_until(lambda: standing().rows > paused.rows, PATIENCE_S, "the build to go on")
        assert (standing().options["parallelism"], standing().options["batch_rows"]) == (4, 1000)
        # And once more while it runs.
        airflow.put_stored(DAG, run, "build", "parallelism", 3)
        wait_until(lambda: standing().options["parallelism"] == 3, PATIENCE_S, "the change to be followed")
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


@pytest.mark.by_hand("sweeps")
def test_a_task_marked_failed_takes_its_driver_along_and_goes_on_when_it_is_cleared(
    airflow: StandaloneAirflow, shop: Any
) -> None:
    airflow.add_connection(FOLLOWED, "postgres", **{key: value for key, value in shop.fields.items() if value})
    conf = {"index": "item_by_price", "table": "item", "keys": "price", "batch_rows": 1000, "ranges": 8}
    conf |= {"max_rows_per_second": RATE, "postgres_conn_id": FOLLOWED}
    run = airflow.trigger(DAG, conf)

    def rows() -> int:
        return status(shop.database, "item_by_price")[0].rows

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

    # The DAG that follows this index was triggered.
    def heard() -> list[dict[str, Any]]:
        runs = airflow.call("GET", "/api/v2/dags/follow_index/dagRuns")["dag_runs"]
        return [one for one in runs if one["state"] == "success"]

    follower = wait_until(heard, PATIENCE_S, "the DAG that follows the index")[0]["dag_run_id"]
    operation = status(shop.database, "item_by_price")[0].operation_id
    assert airflow.xcoms("follow_index", follower, "heard")["return_value"] == [operation]


@pytest.mark.by_hand("sweeps")
def test_an_index_over_shards_is_built_changed_in_a_pause_shipped_and_read(
    airflow: StandaloneAirflow, shop: Any, orders: dict[str, str]
) -> None:
    index = "public.orders_by_email"
    conf = {"index": index, "table": "public.orders", "keys": "email", "include": "total", "shards": list(ORDERS)}
    conf |= {"parallelism": 2, "shard_parallelism": 1, "batch_rows": 1000, "ranges": 8, "max_rows_per_second": RATE}
    run = airflow.trigger(DAG, conf)

    def standing() -> Any:
        return status(shop.database, index)[0]

    def page() -> Any:
        return airflow.call("GET", f"/roir/api/run?{urlencode({'dag_id': DAG, 'run_id': run})}")["progress"]

    def under_way() -> bool:
        return airflow.task_state(DAG, run, "build") == "running" and standing().percent_complete > 15

    wait_until(under_way, PATIENCE_S, "a build that is under way")
    shown = page()
    assert shown["source"] == "public.orders in orders_0, orders_1"
    assert [one["shard"] for one in shown["shards"]] == list(ORDERS)
    assert all(one["readers"] <= 1 and one["captured"] and one["problem"] is None for one in shown["shards"])

    airflow.pause(DAG)
    wait_until(in_state(airflow, run, "build", "up_for_reschedule"), PATIENCE_S, "the task to leave")
    paused = standing()
    assert (paused.status, paused.paused_by, paused.options["shard_parallelism"]) == ("paused", SWITCH, 1)
    of_work = {"parallelism": 2, "batch_rows": 1000, "max_rows_per_second": RATE, "shard_parallelism": 1}
    stored = airflow.get_stored(DAG, run, "build")
    assert stored == of_work | WORK_SEEDED | {"in_effect": of_work | WORK_SEEDED, "waits": stored["waits"]}
    airflow.put_stored(DAG, run, "build", "parallelism", 4)
    airflow.put_stored(DAG, run, "build", "shard_parallelism", 2)
    # Writes during the pause, to rows that were read and to rows that weren't.
    for dsn in orders.values():
        run_sql(dsn, "UPDATE orders SET email = 'moved' WHERE id % 1000 = 1", "DELETE FROM orders WHERE id % 1000 = 2")
    airflow.unpause(DAG)
    try:
        wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
    except AirflowError as late:
        said = [airflow.task_log(DAG, run, task) for task in ("build", "finalize")]
        raise AirflowError("\n".join([str(late), str(standing()), *said])) from None
    assert airflow.run_state(DAG, run) == "success", airflow.task_log(DAG, run, "build")
    done = standing()
    assert (done.status, done.options["parallelism"], done.options["shard_parallelism"]) == ("completed", 4, 2)
    assert "shard_parallelism changes from 1 to 2" in airflow.task_log(DAG, run, "build")
    for task in ("prepare", "build", "finalize"):
        assert airflow.task(DAG, run, task)["try_number"] == 1
    assert sorted(shop.run(f"SELECT shard, email, total FROM {index}")) == in_shards(orders)
    assert [(one["ranges"] == one["ranges_done"] > 0, one["doubt"]) for one in page()["shards"]] == [(True, None)] * 2

    # Nothing is shipped before that DAG is on; then all the time, by one run after the other.
    run_sql(orders["orders_1"], "INSERT INTO orders (email, total) VALUES ('first@new', 7)")
    first = f"SELECT shard, total FROM {index} WHERE email = 'first@new'"
    assert shop.run(first) == []
    airflow.unpause(SHIP)
    wait_until(lambda: shop.run(first) == [("orders_1", 7)], PATIENCE_S, "what was written in a shard")
    fresh = f"SELECT count(*) FROM {index} WHERE email = 'moved' AND (SELECT roir.fresh('{index}', '5 s'))"
    wait_until(lambda: answered(shop, fresh) == [(ROWS // 1000,)], PATIENCE_S, "a bounded answer")
    told = subprocess.run(
        [sys.executable, "-m", "airflow_roir.cli", "announce", index, "--by", "client"],
        env=os.environ | {"ROIR_DSN": shop.dsn},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    with ExitStack() as stack:
        engines = {name: stack.enter_context(disposed(dsn)) for name, dsn in orders.items()}
        here = stack.enter_context(disposed(shop.dsn))
        reader = ShardedIndex(here, index, engines)
        table = new_table("orders", new_column("id"), new_column("email"), schema="public")

        def strictly() -> Any:
            with suppress(NotStrict):
                return reader.rows(table, table.c.email == "second@new", "strict")

        wait_until(lambda: strictly() is not None, PATIENCE_S, "strict reads")
        with engines["orders_0"].begin() as there, here.connect() as connection:
            there.exec_driver_sql("INSERT INTO orders (email, total) VALUES ('second@new', 8)")
            announce(there, connection)
        assert [one.shard for one in strictly()] == ["orders_0"]
    try:
        wait_until(lambda: len(ship_runs(airflow, "success")) >= 2, PATIENCE_S, "a second run that ships")
    except AirflowError as late:
        runs = airflow.call("GET", f"/api/v2/dags/{SHIP}/dagRuns")["dag_runs"]
        said = [airflow.task_log(SHIP, one["dag_run_id"], "ship") for one in runs]
        raise AirflowError("\n".join([str(late), str(runs), *said])) from None
    assert ship_runs(airflow, "failed") == []
    second = f"SELECT shard, email FROM {index} WHERE email LIKE '%@new' ORDER BY 2"
    wait_until(lambda: shop.run(second) == [("orders_1", "first@new"), ("orders_0", "second@new")], PATIENCE_S, "both")
    databases = airflow.call("GET", "/roir/api/indexes")["databases"]
    [listed] = [one for one in databases if one["connection"] == "postgres_default"]
    [card] = [one for one in listed["indexes"] if one["index"] == index]
    assert (card["announced_by"], card["strict_problem"]) == ("client", None)
    assert [(one["shard"], one["doubt"], one["problem"]) for one in card["shards"]] == [(n, None, None) for n in ORDERS]

    secret = parse_dsn(orders["orders_0"])["password"]
    for where, text in everything_said(airflow, run):
        assert secret not in text, where
        assert secret.replace("'", "\\'") not in text, where


def in_shards(orders: dict[str, str]) -> list[tuple[Any, ...]]:
    """The rows that the index over both shards must have."""
    found = []
    for name, dsn in orders.items():
        with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT %s, email, total FROM orders", (name,))
            found += cursor.fetchall()
    return sorted(found)


def answered(shop: Any, query: str) -> Any:
    """The rows; None if the index server refuses to answer."""
    try:
        return shop.run(query)
    except psycopg2.Error as error:
        if error.pgcode != "40R01":
            raise
        return None


def ship_runs(airflow: StandaloneAirflow, state: str) -> list[dict[str, Any]]:
    return [run for run in airflow.call("GET", f"/api/v2/dags/{SHIP}/dagRuns")["dag_runs"] if run["state"] == state]


@contextmanager
def disposed(dsn: str) -> Iterator[Engine]:
    engine = create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn))
    yield engine
    engine.dispose()


@pytest.mark.by_hand("sweeps")
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
    named = ("rows", "entries", "missing", "extra", "different", "repaired", "complete")
    assert [counts[name] for name in named] == [ROWS, ROWS, 0, 0, 1, 1, True]
    assert "different: kind k77, id 77 (repaired)" in log
    assert "compare sums: 2 workers" in log
    # The verification's own id is not left there.
    seeded = {"parallelism": 2} | WORK_SEEDED
    assert airflow.get_stored("verify_index", run, "verify") == seeded | {"in_effect": seeded}
    assert airflow.task("verify_index", run, "verify")["try_number"] == 1
    steps.assert_exact(shop.database, "item_by_kind")


@pytest.mark.by_hand("sweeps")
def test_a_night_compacts_what_has_aged(airflow: StandaloneAirflow, shop: Any, warehouse: str) -> None:
    prepared, engine_run = steps.begin(shop.database, "item_by_kind", "item", "kind", "price", segments=2)
    steps.finish_all(shop.database, engine_run)
    shop.run("DELETE FROM public.item WHERE id % 10 <> 0")
    for ordinal in (0, 1, 2):
        run_sql(shop.dsn, f"VACUUM ANALYZE {physical.segment(prepared.generation_id, ordinal)}")
    airflow.unpause(YOUNG)
    run = airflow.trigger(YOUNG, {"postgres_conn_id": warehouse, "even_if_rebuild_is_cheaper": True})
    wait_until(lambda: airflow.run_state(YOUNG, run) in ("success", "failed"), PATIENCE_S, "the night's end")
    log = airflow.task_log(YOUNG, run, "choose")
    assert airflow.run_state(YOUNG, run) == "success", log
    assert "Index public.item_by_kind, budget 20 GB: 2 of 3 segments" in log
    chosen = airflow.xcoms(YOUNG, run, "choose")
    assert chosen["return_value"] == [{"index": "public.item_by_kind", "budget": f"{20 << 30}B"}]
    assert chosen["suggestions"] == {}
    [done] = shop.run("SELECT status, owner FROM roir.operation WHERE kind = 'compact'")
    assert done == ("completed", f"airflow {YOUNG} {run} [0]")
    states = {one["task_id"]: one["state"] for one in airflow.tasks(YOUNG, run)}
    assert states == {"choose": "success", "compact": "success"}
    steps.assert_exact(shop.database, "item_by_kind")
    airflow.pause(YOUNG)


@pytest.mark.slow
def test_clean_up_runs(airflow: StandaloneAirflow, warehouse: str) -> None:
    run = airflow.trigger("clean_up_indexes", {"postgres_conn_id": warehouse})
    wait_until(lambda: airflow.run_state("clean_up_indexes", run) in ("success", "failed"), PATIENCE_S, "the clean-up")
    assert set(airflow.xcoms("clean_up_indexes", run, "clean_up")["return_value"].values()) == {0}


@pytest.mark.by_hand("sweeps")
def test_a_run_whose_operation_is_unknown_fails_and_announces_nothing(
    airflow: StandaloneAirflow, shop: Any, warehouse: str
) -> None:
    """The XCom of `prepare` is deleted after the build; of another run `prepare` is marked as success."""
    conf = {"index": "item_by_price", "table": "item", "keys": "price", "postgres_conn_id": warehouse}

    def ended(run: str) -> str:
        wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
        return airflow.run_state(DAG, run)

    built = airflow.trigger(DAG, conf)
    assert ended(built) == "success"
    operation, told = status(shop.database, "item_by_price")[0].operation_id, len(airflow.asset_events())

    prepare = f"/api/v2/dags/{DAG}/dagRuns/{quote(built, safe='')}/taskInstances/prepare"
    airflow.call("DELETE", f"{prepare}/xcomEntries/return_value")
    again = {"dag_run_id": built, "task_ids": ["finalize"], "dry_run": False, "only_failed": False}
    airflow.call("POST", f"/api/v2/dags/{DAG}/clearTaskInstances", again | {"reset_dag_runs": True})
    assert ended(built) == "failed"
    assert "the operation's id is missing" in airflow.task_log(DAG, built, "finalize", 2)

    airflow.pause(DAG)
    marked = airflow.trigger(DAG, conf)
    wait_until(lambda: airflow.tasks(DAG, marked), PATIENCE_S, "the run's tasks")
    for task in ("verify_before", "prepare"):
        airflow.set_task_state(DAG, marked, task, "success")
    airflow.unpause(DAG)
    assert ended(marked) == "failed"
    assert "the operation's id is missing" in airflow.task_log(DAG, marked, "build")
    assert status(shop.database, "item_by_price")[0].operation_id == operation
    assert len(airflow.asset_events()) == told


@pytest.mark.by_hand("sweeps")
def test_a_run_with_a_misspelt_key_does_nothing(airflow: StandaloneAirflow, shop: Any, warehouse: str) -> None:
    """Found: a run whose conf had a misspelt key (`Parallelism`, `throtle`) ran without it, at full speed. It holds:
    its first task fails before it changes anything, and names the nearest parameter.
    """
    conf = {"index": "item_by_price", "table": "item", "keys": "price", "postgres_conn_id": warehouse}
    run = airflow.trigger(DAG, {**conf, "Parallelism": 4})
    wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
    assert airflow.run_state(DAG, run) == "failed"
    assert "Parallelism: did you mean parallelism?" in airflow.task_log(DAG, run, "verify_before")
    assert shop.run("SELECT count(*) FROM roir.operation") == [(0,)]


@pytest.mark.by_hand("sweeps")
def test_db_clean_while_a_build_is_paused_loses_nothing(airflow: StandaloneAirflow, shop: Any, warehouse: str) -> None:
    """`airflow db clean` deletes the XCom that names the operation: the run finds its own unfinished one."""
    conf = {"index": "item_by_kind", "table": "item", "keys": "kind", "batch_rows": 1000, "ranges": 4}
    run = airflow.trigger(DAG, {**conf, "postgres_conn_id": warehouse, "max_rows_per_second": RATE})

    def under_way() -> bool:
        copied = shop.run("SELECT sum(rows) > 0 FROM roir.scan_range")
        return airflow.task_state(DAG, run, "build") == "running" and copied == [(True,)]

    wait_until(under_way, PATIENCE_S, "a build that is under way")
    airflow.pause(DAG)
    wait_until(in_state(airflow, run, "build", "up_for_reschedule"), PATIENCE_S, "the task to leave")
    before = datetime.now(timezone.utc).isoformat()
    clean = ["db", "clean", "--tables", "xcom", "--clean-before-timestamp", before, "--skip-archive", "--yes"]
    command = [sys.executable, "-m", "airflow", *clean]
    subprocess.run(command, env=airflow.environment, check=True, capture_output=True)
    assert airflow.xcoms(DAG, run, "prepare") == {}
    airflow.unpause(DAG)
    wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end")
    assert airflow.run_state(DAG, run) == "success", airflow.task_log(DAG, run, "build", 2)
    assert shop.run("SELECT status FROM roir.operation ORDER BY id DESC LIMIT 1") == [("completed",)]
