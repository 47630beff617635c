"""The operators on a real PostgreSQL. Only Airflow's own side of a running task is replaced."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowRuntimeError,
    AirflowSkipException,
    ErrorType,
)
from airflow.sdk.execution_time.comms import ErrorResponse

from airflow_roir.assets import index_asset, published_alias
from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.engine.verify import record
from airflow_roir.errors import OperationRunning
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.clean_up import CleanUpIndexesOperator
from airflow_roir.operators.control import AbortIndexBuildOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.operators.verify import VerifyIndexOperator
from airflow_roir.options import BuildOptions, VerifyOptions, options_of
from airflow_roir.task.dag_switch import actor_of_switch
from airflow_roir.task.given import names_of
from tests.engine import steps

pytestmark = pytest.mark.sample(2)

INDEX = "public.item_by_kind"
SWITCH = actor_of_switch("rebuild_index")
WHAT = {"index": INDEX, "postgres_conn_id": "warehouse"}


class MemoryStore:
    """Stands in for the Task State Store."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self.values[key] = value

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


class Task:
    """Stands in for the task instance: remembers what is pushed, has a DAG with a switch."""

    dag_id, task_id, run_id = "rebuild_index", "build", "run_1"
    map_index = -1
    try_number = 1

    def __init__(self) -> None:
        self.paused = False
        # The states of runs by their ids, this one's and others'; a run that isn't named is gone.
        self.runs = {"run_1": "running"}
        self.states: dict[str, str] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.xcoms: dict[str, Any] = {}

    def get_dag(self, dag_id: str) -> Any:
        self.meanwhile()
        return SimpleNamespace(is_paused=self.paused)

    def get_dagrun_state(self, dag_id: str, run_id: str) -> str:
        if run_id not in self.runs:
            raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 404}))
        return self.runs[run_id]

    def get_task_states(self, dag_id: str, run_ids: list[str], **_of: Any) -> dict[str, dict[str, str]]:
        return {one: self.states for one in run_ids if one in self.runs}

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value


class Events(dict[Any, Any]):
    """Stands in for the outlet events: the events added to each alias."""

    def __missing__(self, alias: Any) -> Any:
        added: list[Any] = []
        self[alias] = SimpleNamespace(added=added, add=lambda asset, extra: added.append((asset, extra)))
        return self[alias]


@pytest.fixture
def context(shop: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres"} | shop.fields))
    return {"ti": Task(), "task_state_store": MemoryStore(), "outlet_events": Events()}


def prepare(context: dict[str, Any], **more: Any) -> int:
    what: dict[str, Any] = {"table": "item", "keys": "kind", "include": "price", "parallelism": "2"} | WHAT
    what["batch_rows"] = "1000"
    return PrepareIndexBuildOperator(task_id="prepare", **what | more).execute(context)  # type: ignore[arg-type]


@pytest.fixture
def driver_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Replaces the Spark driver by a few lines of Python; returns the command lines that were asked for."""

    def replace(code: str) -> list[list[str]]:
        import sys

        from airflow_roir.spark import driver_process
        from airflow_roir.task import spark_task

        asked: list[list[str]] = []

        def command(*arguments: Any, **options: Any) -> list[str]:
            asked.append(driver_process.driver_command(*arguments, **options))
            return [sys.executable, "-u", "-c", code]

        monkeypatch.setattr(spark_task, "driver_command", command)
        return asked

    return replace


def when_driven(context: dict[str, Any], shop: Any, act: Callable[[], None]) -> None:
    """`act` once, when the task looks at its DAG's switch and a driver has taken the operation up."""
    due = [act]

    def look() -> None:
        if due and operations.find_operation(shop.database, INDEX).heartbeat_at is not None:
            due.pop()()

    context["ti"].meanwhile = look


# A driver that finds the operation paused in its first batch, and one that seals.
TAKE_UP = """
import os, sys
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.control.run import start_run, end_run
database = Database(os.environ["ROIR_DSN"])
run = start_run(database, "public.item_by_kind", "airflow rebuild_index run_1")
"""
# It says that all is copied and sealed.
SEALS = (
    TAKE_UP
    + """
from airflow_roir.engine.database import execute
with database.transaction() as connection:
    execute(connection, "UPDATE roir.operation SET phase = 'seal'; UPDATE roir.operation SET phase = 'fold'")
end_run(database, run)
"""
)
UNTIL_PAUSED = (
    TAKE_UP
    + """
import time
print("driving")
while operations.find_operation(database, "public.item_by_kind").status == "running":
    time.sleep(0.05)
end_run(database, run)
sys.exit(3)
"""
)


def build(context: dict[str, Any], operation: int | None = None, **more: Any) -> int:
    operator = BuildIndexOperator(task_id="build", operation_id=operation, **WHAT, **more)
    return operator.execute(context)  # type: ignore[arg-type]


def test_prepare_returns_the_operations_id_and_adopts_its_own(context: dict[str, Any], shop: Any) -> None:
    first = prepare(context)
    assert prepare(context) == first
    found = status(shop.database, INDEX)[0]
    assert (found.operation_id, found.phase, found.options["parallelism"]) == (first, "build", 2)


@pytest.mark.parametrize(
    "more",
    [
        {"table": "nowhere"},
        {"keys": "nothing"},
        {"keys": ""},
        {"parallelism": "0"},
        {"parallelism": "many"},
        {"index": "a.b.c"},
        {"include": "kind"},
    ],
)
def test_bad_input_fails_at_once_and_changes_nothing(context: dict[str, Any], shop: Any, more: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException):
        prepare(context, **more)
    assert status(shop.database) == []


@pytest.mark.sample(0)
def test_a_build_whose_end_the_server_has_lost_is_not_taken_for_done(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    operation = prepare(context)
    driver_code(TAKE_UP + "end_run(database, run)")
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)


@pytest.mark.parametrize("other", [False, True], ids=["no operation", "another index's"])
def test_an_operation_that_the_server_has_lost_is_not_taken_for_another(
    context: dict[str, Any], shop: Any, other: bool
) -> None:
    """After a failover that lost the operation, its id is given to another one."""
    lost = prepare(context)
    if other:
        shop.run("UPDATE roir.index SET name = 'item_by_price'")
    with pytest.raises(AirflowFailException, match=r"has lost its last commits.* Clear this run"):
        build(context, lost if other else lost + 1)


def test_nothing_is_prepared_while_the_dag_is_paused(context: dict[str, Any], shop: Any) -> None:
    context["ti"].paused = True
    with pytest.raises(AirflowRescheduleException):
        prepare(context)
    assert status(shop.database) == []


def test_a_build_that_starts_paused_leaves_before_spark(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    asked = driver_code("raise SystemExit(9)")
    operation = prepare(context)
    context["ti"].paused = True
    before = datetime.now(timezone.utc)
    with pytest.raises(AirflowRescheduleException) as leaving:
        build(context, operation)
    assert (leaving.value.reschedule_date - before).total_seconds() > 15
    assert asked == []
    found = operations.find_operation(shop.database, INDEX)
    assert (found.status, found.paused_by) == ("paused", SWITCH)


def test_the_switch_pauses_a_running_build_and_resumes_it(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    driver_code(UNTIL_PAUSED)
    operation = prepare(context)

    def switch_off() -> None:
        context["ti"].paused = True

    when_driven(context, shop, switch_off)
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    found = operations.find_operation(shop.database, INDEX)
    assert (found.status, found.paused_by, found.heartbeat_at) == ("paused", SWITCH, None)

    # The switch is on again, and meanwhile the user has asked for more.
    context["ti"].paused = False
    context["task_state_store"].values |= {"parallelism": "6", "batch_rows": "none"}
    driver_code(SEALS)
    assert build(context, operation) == operation
    now = operations.find_operation(shop.database, INDEX)
    assert (now.status, now.parallelism, now.batch_rows) == ("running", 6, 1000)
    assert shop.run("SELECT action FROM roir.event WHERE action IN ('pause', 'resume') ORDER BY id") == [
        ("pause",),
        ("resume",),
    ]


# It has begun its run, and then Spark doesn't come up.
HANGS = TAKE_UP + "import time\nprint('starting Spark')\ntime.sleep(600)"


@pytest.mark.parametrize("way", ["switch", "elsewhere", "elsewhere and back"])
def test_a_pause_while_spark_starts_ends_it_at_once_and_costs_no_try(
    context: dict[str, Any], shop: Any, driver_code: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Found: a pause while Spark starts was obeyed only once Spark was up. It holds: the starting driver is ended at
    once, no try is used up. Found: a build was paused while its Spark started, and resumed within a second or two: the
    task had ended its driver for the pause, and noted that as an error, which paused the operation again. It holds: it
    notes nothing.
    """
    from airflow_roir.spark import driver_process

    driver_code(HANGS)
    operation = prepare(context)
    kill = driver_process.Driver.kill

    def pause() -> None:
        if way == "switch":
            context["ti"].paused = True
        else:
            requests.pause(shop.database, INDEX, "ann@desk", "backup")

    def resumed_meanwhile(self: Any) -> None:
        kill(self)
        if way.endswith("back") and operations.find_operation(shop.database, INDEX).status == "paused":
            requests.resume(shop.database, INDEX, "ann@desk")

    monkeypatch.setattr(driver_process.Driver, "kill", resumed_meanwhile)
    when_driven(context, shop, pause)
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    found = operations.find_operation(shop.database, INDEX)
    assert found.status == ("running" if way.endswith("back") else "paused")
    if found.status == "paused":
        assert found.heartbeat_at is None
        assert found.paused_by == (SWITCH if way == "switch" else "ann@desk")


@pytest.mark.sample(0)
@pytest.mark.parametrize("killed", [True, False])
def test_a_task_that_airflow_ends_leaves_with_its_driver_and_without_a_try(
    context: dict[str, Any], shop: Any, driver_code: Any, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """SIGTERM, as at a shutdown: the task is rescheduled. If its supervisor has died, it can't report that, and
    fails."""
    from airflow_roir.spark import driver_process

    ended: list[int | None] = []
    kill = driver_process.Driver.kill

    def noted(self: Any) -> None:
        kill(self)
        ended.append(self.wait(0))

    monkeypatch.setattr(driver_process.Driver, "kill", noted)
    asked = driver_code(HANGS)
    operation = prepare(context)
    operator = BuildIndexOperator(task_id="build", operation_id=operation, **WHAT)
    when_driven(context, shop, operator.on_kill if killed else lambda: (_ for _ in ()).throw(EOFError()))
    before = datetime.now(timezone.utc)
    with pytest.raises(AirflowException) as leaving:
        operator.execute(context)  # type: ignore[arg-type]
    assert isinstance(leaving.value, AirflowRescheduleException) == killed
    if isinstance(leaving.value, AirflowRescheduleException):
        assert (leaving.value.reschedule_date - before).total_seconds() > 15
    assert ended == [-15]
    # Spark's own log is where the task's is.
    log = Path(asked[0][asked[0].index("--spark-log") + 1])
    assert log.parts[-4:] == ("dag_id=rebuild_index", "run_id=run_1", "task_id=build", f"spark-{operation}.log")
    assert log.is_relative_to(Path(os.environ["AIRFLOW_HOME"]) / "logs")


def test_the_store_is_seeded_and_what_it_holds_is_started_with(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    """The driver reads the operation's row alone, and only the row holds the values."""
    operation = prepare(context)
    driver_code(SEALS)
    build(context, operation)
    store = context["task_state_store"].values
    seeded = {"parallelism": 2, "batch_rows": 1000, "max_rows_per_second": 0}
    seeded |= {"throttle": "off", "windows": "off", "max_duration_s": 0, "priority": 0}
    assert store == seeded | {"in_effect": seeded}
    store |= {"parallelism": "6", "batch_rows": "lots", "max_rows_per_second": 500}
    build(context, operation)
    read = "SELECT parallelism, batch_rows, max_rows_per_second FROM roir.operation"
    assert shop.run(read) == [(6, 1000, 500)]
    keys = "{parallelism,batch_rows,max_rows_per_second}"
    assert shop.run(f"SELECT options ?| '{keys}' FROM roir.operation") == [(False,)]
    # The store doesn't undo a later change by somebody else, and shows it.
    requests.pause(shop.database, INDEX, "ann@desk")
    requests.resume(shop.database, INDEX, "ann@desk", parallelism=3, max_rows_per_second=0)
    build(context, operation)
    assert shop.run(read) == [(3, 1000, None)]
    assert (store["parallelism"], store["batch_rows"], store["max_rows_per_second"]) == (3, 1000, 0)


@pytest.mark.by_hand("sweeps")
def test_a_change_from_elsewhere_shows_in_the_store_while_it_runs(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    driver_code(UNTIL_PAUSED)
    operation = prepare(context)
    store = context["task_state_store"]

    def look() -> None:
        now = operations.find_operation(shop.database, INDEX)
        if now.heartbeat_at is not None and now.parallelism == 2:
            requests.change_options(shop.database, INDEX, actor="ann@desk", parallelism=7)
        elif store.values["parallelism"] == 7 and "edited" not in store.values:
            store.values |= {"parallelism": 4, "edited": True}
        elif now.parallelism == 4:
            context["ti"].paused = True

    context["ti"].meanwhile = look
    with pytest.raises(AirflowRescheduleException):
        build(context, operation)
    changes = [event.detail for event in operations.events(shop.database, INDEX) if "parallelism" in event.action]
    assert changes == ["2 -> 7", "7 -> 4"]


def test_the_button_is_there_while_it_runs(context: dict[str, Any], driver_code: Any) -> None:
    operation = prepare(context)
    driver_code("raise SystemExit(1)")
    with pytest.raises(AirflowException):
        build(context, operation)
    assert context["ti"].xcoms == {
        "_link_LiveOptionsLink": "/dags/rebuild_index/runs/run_1/tasks/build/task-state-store"
    }


def test_a_pause_from_elsewhere_is_waited_out(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    operation = prepare(context)
    requests.pause(shop.database, INDEX, "ann@desk", "backup")
    asked = driver_code("raise SystemExit(9)")
    for paused in (False, True):
        context["ti"].paused = paused
        with pytest.raises(AirflowRescheduleException):
            build(context, operation)
    assert asked == []
    assert operations.find_operation(shop.database, INDEX).paused_by == "ann@desk"


def test_a_run_that_somebody_else_drives_is_waited_for(context: dict[str, Any], shop: Any, driver_code: Any) -> None:
    operation = prepare(context)
    start_run(shop.database, INDEX, "roir of ann@desk")
    asked = driver_code("raise SystemExit(9)")
    for paused in (False, True):
        context["ti"].paused = paused
        with pytest.raises(AirflowRescheduleException):
            build(context, operation)
    assert asked == []
    assert operations.find_operation(shop.database, INDEX).status == "running"


def test_a_driver_that_fails_costs_a_try_and_says_why(context: dict[str, Any], driver_code: Any) -> None:
    operation = prepare(context)
    driver_code("import sys; print('disk full', file=sys.stderr); sys.exit(1)")
    with pytest.raises(AirflowException, match="disk full") as failure:
        build(context, operation)
    assert not isinstance(failure.value, AirflowFailException)


def test_bad_input_found_by_the_driver_costs_no_further_try(context: dict[str, Any], driver_code: Any) -> None:
    operation = prepare(context)
    driver_code("import sys; print('no such master', file=sys.stderr); sys.exit(2)")
    with pytest.raises(AirflowFailException, match="no such master"):
        build(context, operation)


def test_an_operation_that_has_taken_the_place_of_ours_is_left_alone(context: dict[str, Any], driver_code: Any) -> None:
    operation = prepare(context)
    abort = AbortIndexBuildOperator(task_id="abort", reason="typo", **WHAT)
    assert abort.execute(context) == operation  # type: ignore[arg-type]
    asked = driver_code("raise SystemExit(9)")
    with pytest.raises(AirflowFailException, match="aborted by airflow rebuild_index run_1: typo;"):
        build(context, operation)
    other = prepare(context)
    assert other != operation
    with pytest.raises(AirflowFailException, match=f"operation {other} has begun since"):
        build(context, operation)
    assert asked == []


def test_abort_without_an_operation_fails_clearly(context: dict[str, Any]) -> None:
    with pytest.raises(AirflowFailException, match="item_by_kind"):
        AbortIndexBuildOperator(task_id="abort", **WHAT).execute(context)  # type: ignore[arg-type]


def test_clean_up_returns_counters(context: dict[str, Any]) -> None:
    operator = CleanUpIndexesOperator(task_id="clean_up", postgres_conn_id="warehouse")
    counters = operator.execute(context)  # type: ignore[arg-type]
    assert counters["generations_dropped"] == 0
    assert set(counters.values()) == {0}


def test_a_database_without_the_control_schema_fails_clearly(context: dict[str, Any], shop: Any) -> None:
    shop.run("DROP SCHEMA roir CASCADE")
    with pytest.raises(AirflowFailException, match="roir init"):
        prepare(context)
    # Every hour, and nothing is wrong yet.
    with pytest.raises(AirflowSkipException, match="nothing to clean up"):
        CleanUpIndexesOperator(task_id="clean_up", postgres_conn_id="warehouse").execute(context)  # type: ignore[arg-type]


def look(context: dict[str, Any], operation: int, **more: Any) -> None:
    """One stretch, whose driver does nothing: the task then takes what was done for lost, and leaves."""
    with pytest.raises(AirflowRescheduleException):
        build(context, operation, **more)


@pytest.mark.sample(1)
def test_limits_are_edited_whole_in_the_store_and_the_servers_refusal_is_told(
    context: dict[str, Any], shop: Any, driver_code: Any
) -> None:
    operation = prepare(context, throttle="replica_lag=100MB commit_latency=20ms")
    driver_code("")
    look(context, operation)
    store = context["task_state_store"].values
    assert store["throttle"] == "commit_latency=20ms replica_lag=100MB"
    # A limit that was deleted from the text is off, and the store shows the text as the server writes it.
    store |= {"throttle": " replica_lag=51200kB", "max_duration_s": "3600", "windows": "0 * * * * for 1h in UTC"}
    look(context, operation)
    row = operations.find_operation(shop.database, INDEX)
    assert (row.throttle, row.max_duration_s, row.windows) == (
        {"replica_lag": 50 << 20},
        3600,
        "0 * * * * for 1h in UTC",
    )
    assert store["throttle"] == store["in_effect"]["throttle"] == "replica_lag=50MB"
    for bad in ("replica_lag=much", {"replica_lag": 1}, "nothing=1"):
        store["throttle"] = bad
        look(context, operation)
        assert store["throttle"] == "replica_lag=50MB"
        notice = operations.find_operation(shop.database, INDEX).notice or ""
        assert notice.startswith("Refused a value of the Task State Store: throttle"), notice
        assert "throttle stays at replica_lag=50MB" in notice
    # An empty field changes nothing; the store shows a change that another user makes.
    store["throttle"] = ""
    look(context, operation)
    requests.change_options(shop.database, INDEX, actor="ann", throttle="query=4")
    look(context, operation)
    assert store["throttle"] == "query=4 replica_lag=50MB"
    store |= {"throttle": "off", "windows": "off", "max_duration_s": 0}
    look(context, operation)
    row = operations.find_operation(shop.database, INDEX)
    assert (row.throttle, row.max_duration_s, row.windows) == ({}, None, None)
    assert store["throttle"] == "off"


# Not in its log, where Airflow would mask it.
SAYS = """
import json, os
names = ("ROIR_REPLICAS", "ROIR_THROTTLE_QUERY")
open(os.environ["TOLD"], "w").write(json.dumps([os.environ.get(name) for name in names]))
"""


@pytest.mark.sample(0)
def test_a_query_and_replicas_reach_the_driver_by_its_environment_and_finalize_too(
    context: dict[str, Any], shop: Any, driver_code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    told = tmp_path / "told"
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("AIRFLOW_CONN_R2", json.dumps({"conn_type": "postgres", "host": "r2", "password": "hunter22"}))
    asked = driver_code(SAYS)
    operation = prepare(context)
    more: dict[str, Any] = {"replica_conn_ids": ["r2"], "throttle_query": "SELECT {{ params.x }}"}
    look(context, operation, **more)
    replicas, query = json.loads(told.read_text())
    # As it is: it is no template.
    assert query == "SELECT {{ params.x }}"
    assert "password=hunter22" in json.loads(replicas)["r2"]
    assert "hunter22" not in str(asked)
    look(context, operation)
    assert json.loads(told.read_text()) == [None, None]
    operator = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT, **more)
    assert not {*more} & {*operator.template_fields}
    given: list[Any] = []

    def finalized(*_: Any, surroundings: Any, **__: Any) -> None:
        given.append(surroundings)
        raise OperationRunning("elsewhere")

    monkeypatch.setattr(lifecycle, "finalize", finalized)
    monkeypatch.setattr(FinalizeIndexBuildOperator, "take_turn", lambda self, database, _ti: self.read(database))
    shop.run("SET session_replication_role = replica; UPDATE roir.operation SET phase = 'fold'")
    with pytest.raises(AirflowException):
        operator.execute(context)  # type: ignore[arg-type]
    assert given[0].query == "SELECT {{ params.x }}"
    assert "hunter22" in given[0].replicas["r2"]
    shop.run("SET session_replication_role = replica; UPDATE roir.operation SET phase = 'build'")
    with pytest.raises(AirflowFailException, match="airflow connections add r9"):
        build(context, operation, replica_conn_ids=["r9"])


def test_a_connection_that_cannot_serve_fails_at_once_and_says_what_to_do(
    context: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WEB", json.dumps({"conn_type": "http", "host": "h"}))
    cases = {"nowhere": "airflow connections add nowhere --conn-type postgres", "web": "type 'http'"}
    for name, said in cases.items():
        with pytest.raises(AirflowFailException, match=said):
            prepare(context, postgres_conn_id=name)
        with pytest.raises(AirflowFailException, match=said):
            CleanUpIndexesOperator(task_id="clean_up", postgres_conn_id=name).execute(context)  # type: ignore[arg-type]


def test_the_first_line_of_a_log_says_what_the_task_works_on(context: dict[str, Any], capsys: Any) -> None:
    operation = prepare(context)
    assert f"Index {INDEX}, connection warehouse" in capsys.readouterr().out
    with pytest.raises(AirflowFailException):
        FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT).execute(context)  # type: ignore[arg-type]
    assert f"Index {INDEX}, operation {operation}, connection warehouse" in capsys.readouterr().out


def test_finalize_waits_its_turn_and_refuses_an_unsealed_index(context: dict[str, Any], shop: Any) -> None:
    operation = prepare(context)
    operator = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
    context["ti"].paused = True
    with pytest.raises(AirflowRescheduleException):
        operator.execute(context)  # type: ignore[arg-type]
    context["ti"].paused = False
    with pytest.raises(AirflowFailException, match=r"still in phase build.*Clear the build task"):
        operator.execute(context)  # type: ignore[arg-type]
    assert context["outlet_events"].get(published_alias()) is None
    row = operations.find_operation(shop.database, INDEX)
    assert (row.status, row.pause_reason, row.epoch) == ("paused", "the DAG is paused in Airflow", 0), "untouched"


@pytest.mark.parametrize("next_try", [False, True])
def test_a_finalize_that_airflow_ends_is_paused_at_once(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch, next_try: bool
) -> None:
    """The thread ends with the task's process, and logs nothing more. If the next try has begun, its run isn't
    paused."""
    operation, halt = prepare(context), threading.Event()
    run = start_run(shop.database, INDEX, "test", take_over=True)
    steps.build_all(shop.database, run)
    steps.seal_all(shop.database, run)
    end_run(shop.database, run)
    operator = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)

    def hang(*_: Any) -> None:
        if next_try:
            start_run(shop.database, INDEX, "airflow rebuild_index run_1", take_over=True)
        operator.on_kill()
        halt.wait()
        raise OperationRunning("the test is over")

    monkeypatch.setattr("airflow_roir.engine.lifecycle.run_phases", hang)
    try:
        with pytest.raises(AirflowRescheduleException):
            operator.execute(context)  # type: ignore[arg-type]
        row = operations.find_operation(shop.database, INDEX)
        if next_try:
            assert (row.status, row.heartbeat_at is None) == ("running", False)
        else:
            assert (row.status, row.pause_reason, row.heartbeat_at) == ("paused", "interrupted", None)
            assert row.paused_by == row.owner, "so the next try continues"
    finally:
        halt.set()


@pytest.mark.by_hand("sweeps")
def test_a_verification_that_the_run_has_left_does_not_hold_up_its_build(context: dict[str, Any], shop: Any) -> None:
    """The verification's task was marked as success. A build waits for another run's verification."""
    steps.make_index(shop.database, INDEX, "item", "kind", "price")
    mine, other = "airflow rebuild_index run_1", "airflow rebuild_index run_0"
    for owner in (mine, other):
        begun = record.begin(shop.database, INDEX, VerifyOptions(), owner, "before").operation_id
        start_run(shop.database, INDEX, owner)
        with pytest.raises(AirflowRescheduleException):
            prepare(context)
        assert operations.find_operation(shop.database, INDEX).status == "running", "its heart still beats"
        shop.run("UPDATE roir.operation SET heartbeat_at = NULL WHERE status = 'running'")
        if owner == other:
            with pytest.raises(AirflowRescheduleException):
                prepare(context)
            assert operations.find_operation(shop.database, INDEX).id == begun
        else:
            assert prepare(context) == begun + 1
            assert shop.run(f"SELECT status FROM roir.operation WHERE id = {begun}") == [("aborted",)]
            steps.finish_all(shop.database, start_run(shop.database, INDEX, "test", take_over=True))


@pytest.mark.by_hand("sweeps")
def test_of_runs_that_share_an_operation_one_announces_it(
    context: dict[str, Any], shop: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again if it is repeated and its event got lost; never once readers see a newer generation."""
    was_sent: list[Any] = []
    monkeypatch.setattr("airflow_roir.operators.finalize.has_event", lambda asset, facts: asset in was_sent)
    runs = ("run_1", "run_2", "run_3")
    for context["ti"].run_id in runs:
        operation = prepare(context)
    steps.finish_all(shop.database, start_run(shop.database, INDEX, "test", take_over=True))
    finalize = FinalizeIndexBuildOperator(task_id="finalize", operation_id=operation, **WHAT)
    sent = context["outlet_events"][published_alias()].added
    for context["ti"].run_id, events in zip((*runs, "run_1"), (1, 1, 1, 2), strict=True):
        assert finalize.execute(context) == operation  # type: ignore[arg-type]
        assert len(sent) == events
    first = capsys.readouterr().out
    assert "No asset event is sent: airflow rebuild_index run_1 has announced it" in first
    assert "query it: SELECT" in first
    assert "query it: whole rows: SELECT * FROM roir.rows(" in first
    was_sent.append(index_asset(INDEX, "warehouse"))
    assert finalize.execute(context) == operation  # type: ignore[arg-type]
    assert len(sent) == 2
    assert "No asset event is sent: an earlier try of this run has sent it" in capsys.readouterr().out
    steps.make_index(shop.database, INDEX, None, None)
    assert finalize.execute(context) == operation  # type: ignore[arg-type]
    assert len(sent) == 2
    said = capsys.readouterr().out
    assert "No asset event is sent: readers see another generation by now" in said
    assert "Published" not in said


@pytest.mark.sample(1)
def test_a_spark_that_is_nowhere_fails_at_once_and_says_what_to_give(context: dict[str, Any], shop: Any) -> None:
    operation = prepare(context)
    requests.pause(shop.database, INDEX, SWITCH, "the DAG is paused in Airflow")
    build = BuildIndexOperator(task_id="build", operation_id=operation, spark="no_such_spark", **WHAT)
    with pytest.raises(
        AirflowFailException, match=r"'no_such_spark', and there is no Airflow connection of that id. Give local"
    ):
        build.execute(context)  # type: ignore[arg-type]
    assert operations.find_operation(shop.database, INDEX).status == "paused", "nobody drives it"


@pytest.mark.by_hand("sweeps")
def test_no_verification_begins_that_has_no_spark(
    context: dict[str, Any], shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps.make_index(shop.database, INDEX, "public.item", "kind")
    before = operations.find_operation(shop.database, INDEX).id
    cluster = {"conn_type": "spark", "host": "h", "extra": {"deploy-mode": "cluster"}}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(cluster))
    for spark in ("no_such_spark", "cluster"):
        verify = VerifyIndexOperator(task_id="verify", spark=spark, **WHAT)
        with pytest.raises(AirflowFailException, match=r"no_such_spark|deploy mode"):
            verify.execute(context)  # type: ignore[arg-type]
    assert operations.find_operation(shop.database, INDEX).id == before


def test_the_log_names_also_what_can_t_be_used(context: dict[str, Any], capsys: Any) -> None:
    """Found: beside windows that can't be read it said that the rest was by default."""
    with pytest.raises(AirflowFailException, match="windows"):
        prepare(context, windows="at night", batch_rows="2000", parallelism="0")
    [said] = [one for one in "".join(capsys.readouterr()).splitlines() if "Options given" in one]
    for given in ("batch_rows=2000", "parallelism=0", "windows=at night"):
        assert given in said


def test_the_log_names_what_was_given_and_no_default(context: dict[str, Any], capsys: Any) -> None:
    """Found: the line had every default that the form sends, but neither the table nor the keys."""
    form = {one.name: "" if one.default is None else str(one.default) for one in options_of(BuildOptions)}
    form = {name: form[name] for name in names_of(BuildOptions)}
    given = {"batch_rows": "2000", "warn_after_s": "never", "max_rows_per_second": "0", "priority": "0"}
    prepare(context, **form | given)
    [line] = [one for one in "".join(capsys.readouterr()).splitlines() if "Options given" in one]
    said = "table=item keys=kind include=price batch_rows=2000 warn_after_s=0; the rest by default"
    assert f"Options given: {said}" in line


def test_a_build_s_log_ends_with_what_comes_next(context: dict[str, Any], shop: Any, capsys: Any) -> None:
    """Found: its last line was of the seal, and a reader looked for the index."""
    steps.sealed(shop.database, INDEX, "public.item", "kind")
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    operation = operations.find_operation(shop.database, INDEX).id
    BuildIndexOperator(task_id="build", operation_id=operation, **WHAT).execute(context)  # type: ignore[arg-type]
    assert f"Operation {operation} is built. The task that finalizes applies" in "".join(capsys.readouterr())
