"""Tasks that are marked, cleared, timed out or killed, or whose XCom goes: what operation, page, status and asset say.

One table on one real Airflow, half a minute a row. Each row ends with what its user does next; then the index is exact.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import psutil
import psycopg2
import pytest
from psycopg2.extensions import parse_dsn

from airflow_roir.engine.database import Database
from servers.airflow import AirflowError, StandaloneAirflow, processes_of, wait_until
from servers.postgres import embedded_postgres
from tests.conftest import run_sql
from tests.crash import gate as gates
from tests.engine import steps

pytestmark = pytest.mark.by_hand("sweeps")

# The DAG as it is shipped, and a user's own copy, which has both of Airflow's timeouts and tries once.
DAG, ONCE, CLEAN_UP, CONTROL = "rebuild_index", "rebuild_once", "clean_up_indexes", "control_index"
LIMITS = '"execution_timeout": timedelta(hours=1),\n        "retries": 0,'
# Long beside what is waited for: nothing here is a measurement.
PATIENCE_S = 300
SETTLED_S = 60
CONNECTION = "warehouse"
CONF = {"table": "t", "keys": "k", "include": "v", "ranges": 4, "batch_rows": 1000, "parallelism": 1}
CONF |= {"spark": "local[1]", "postgres_conn_id": CONNECTION}
VERIFY = {"verify": "before"}
# Where a task is held while something happens to it.
GATES = {"verify_before": "compare", "prepare": "prepare", "build": "build", "finalize": "publish"}
# An error that no retry helps, until a user drops its function.
REFUSE = (
    "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE insufficient_privilege USING MESSAGE = 'refused'; END $$",
    "CREATE TRIGGER refuse BEFORE INSERT ON roir.operation FOR EACH ROW EXECUTE FUNCTION refuse()",
)
# On a busy machine a driver may not have paused its operation in time; then its task does. Or the task has not had the
# time to write the cause (test_causes.py).
KILLED = re.compile(
    r"Spark's driver was killed by signal \d+"
    r"|its task \w+ (was (marked as \w+|cleared)|has reached its execution_timeout)"
    r"|its run (was deleted|has reached its dagrun_timeout, or was marked)"
)
_numbers = itertools.count(1)


@dataclass(frozen=True)
class End:
    """How a run ends by itself: its state, the operation's status and phase, what the page says, and `roir status`."""

    run: str
    operation: str
    page: str
    status: str
    # The number of builds that its runs have completed without an asset event.
    untold: int = 0


def left(
    status: str,
    phase: str,
    *,
    run: str = "failed",
    task: str | None = "build",
    index: str = "building",
    why: str = "None",
) -> End:
    """The end of a run that leaves its operation without a driver: the page says so, and what to do.

    status: of its row; `running` is shown as abandoned.
    """
    held = f"paused by airflow RUN: {why}. " if status == "paused" else ""
    held += "This run has ended, and no run drives the operation. Continue it: that triggers a run for it"
    held += "" if task is None else f", or clear its task {task} with those that follow it (Downstream)"
    shown = "abandoned" if status == "running" else status
    return End(run, f"{status} {phase}", f"{shown} {phase}: {held}", f"{index}; {shown} {phase}: {why}")


DONE = End("success", "completed done", "completed done: ", "published; completed done: None")
FAILED_DONE, UNTOLD = replace(DONE, run="failed"), replace(DONE, untold=1)
NOTHING = End("failed", "", "", "")
COMPARED = left("paused", "sum", task="verify_before", index="published", why="interrupted")
# Which task of a user's own DAG verifies isn't known.
OF_A_COPY = left("paused", "sum", task=None, index="published", why="interrupted")
BUILT = left("paused", "build", why="interrupted")
FOLDED = left("paused", "publish", why="interrupted")


@dataclass(frozen=True)
class Row:
    """moment: `before` the task ran; `while` it ran; `published`, but its event not yet sent; `after` the run; once it
    has `failed`. end: before the user does anything. then: the task that the user clears, with those that follow it, or
    `trigger`, a new run. rebuild: the index is there before.
    """

    task: str
    moment: str
    deed: str
    end: End = DONE
    then: str = ""
    dag: str = DAG
    rebuild: bool = False
    conf: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task} {self.moment} {self.deed}{'' if self.dag == DAG else ' once'}".replace(" ", "-")


def verify_before(moment: str, deed: str, end: End = DONE, then: str = "", dag: str = DAG) -> Row:
    return Row("verify_before", moment, deed, end, then, dag, rebuild=True, conf=VERIFY)


TABLE = [
    verify_before("while", "marked success"),
    verify_before("while", "marked failed", COMPARED, "trigger"),
    verify_before("while", "cleared"),
    verify_before("while", "timed out", OF_A_COPY, "verify_before", dag=ONCE),
    verify_before("while", "run timed out", OF_A_COPY, "verify_before", dag=ONCE),
    verify_before("while", "killed"),
    verify_before("after", "cleared"),
    Row("prepare", "while", "marked success", NOTHING, "prepare"),
    Row("prepare", "while", "marked failed", NOTHING, "prepare"),
    Row("prepare", "while", "cleared"),
    Row("prepare", "while", "timed out", NOTHING, "prepare", ONCE),
    Row("prepare", "while", "run timed out", NOTHING, "prepare", ONCE),
    Row("prepare", "while", "killed"),
    Row("prepare", "failed", "marked success", NOTHING, "prepare"),
    Row("prepare", "after", "cleared"),
    Row("prepare", "after", "cleared alone", left("running", "build", run="success", index="published"), "build"),
    Row("build", "before", "marked success", left("running", "build"), "build"),
    Row("build", "before", "marked failed", left("running", "build"), "build"),
    Row("build", "while", "marked success", BUILT, "build"),
    Row("build", "while", "marked failed", BUILT, "build"),
    Row("build", "while", "run marked success", replace(BUILT, run="success"), "build"),
    Row("build", "while", "run marked failed", BUILT, "trigger"),
    Row("build", "while", "everything killed, run marked failed", left("running", "build"), "trigger"),
    Row("build", "while", "everything killed, run marked success", left("running", "build", run="success"), "build"),
    Row("build", "failed", "marked success", BUILT, "build", ONCE),
    Row("build", "while", "XCom gone"),
    Row("build", "while", "XCom gone, killed"),
    Row("build", "while", "cleared"),
    Row("build", "while", "timed out", BUILT, "build", ONCE),
    Row("build", "while", "run timed out", BUILT, "build", ONCE),
    Row("build", "while", "killed"),
    Row("build", "while", "killed", BUILT, "trigger", ONCE),
    Row("build", "after", "cleared"),
    Row("build", "after", "cleared alone"),
    Row("finalize", "before", "marked success", left("running", "fold", run="success"), "finalize"),
    Row("finalize", "before", "marked failed", left("running", "fold"), "finalize"),
    Row("finalize", "while", "marked success", replace(FOLDED, run="success"), "finalize"),
    Row("finalize", "while", "marked failed", FOLDED, "trigger"),
    Row("finalize", "while", "XCom gone, killed"),
    Row("finalize", "while", "cleared"),
    Row("finalize", "while", "timed out", FOLDED, "finalize", ONCE),
    Row("finalize", "while", "run timed out", FOLDED, "finalize", ONCE),
    Row("finalize", "while", "killed"),
    Row("finalize", "published", "marked success", UNTOLD, "finalize"),
    Row("finalize", "published", "marked failed", replace(UNTOLD, run="failed"), "finalize"),
    Row("finalize", "published", "cleared"),
    Row("finalize", "published", "timed out", replace(UNTOLD, run="failed"), "finalize", ONCE),
    Row("finalize", "published", "killed"),
    Row("finalize", "after", "cleared"),
    Row("finalize", "after", "XCom gone, cleared", FAILED_DONE, "prepare"),
]


class Case:
    """A row at work: a database of its own, and its run."""

    def __init__(self, row: Row, airflow: StandaloneAirflow, dsn: str) -> None:
        self.row, self.airflow, self.dsn, self.dag = row, airflow, dsn, row.dag
        # Asset events go by it.
        self.index = f"public.ix_{next(_numbers)}"
        self.run = ""
        run_sql(
            dsn,
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
            "INSERT INTO t SELECT i, (i % 97)::text, i FROM generate_series(1, 4000) i",
            "ANALYZE t",
        )
        if row.rebuild:
            steps.make_index(Database(dsn), self.index, include="v")
        gates.install(dsn)
        known = parse_dsn(dsn)
        fields = {"host": known["host"], "login": known["user"], "schema": known["dbname"]}
        port = {"port": int(known["port"])} if "port" in known else {}
        airflow.add_connection(CONNECTION, "postgres", **fields, **port)

    # --- what its user does

    def trigger(self) -> None:
        self.run = self.airflow.trigger(self.dag, CONF | self.row.conf | {"index": self.index})

    def clear(self, task: str, downstream: bool = True) -> None:
        body = {"dag_run_id": self.run, "task_ids": [task], "include_downstream": downstream, "dry_run": False}
        body |= {"only_failed": False, "reset_dag_runs": True}
        self.airflow.call("POST", f"/api/v2/dags/{self.dag}/clearTaskInstances", body)

    def delete_xcom(self) -> None:
        path = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.run, safe='')}/taskInstances/prepare"
        self.airflow.call("DELETE", f"{path}/xcomEntries/return_value")

    # --- what happens to it

    def to_the_moment(self) -> Callable[[], object]:
        """Triggers the run and waits for the row's moment; returns a function that lets the run continue."""
        task, moment = self.row.task, self.row.moment
        if moment == "before":
            self.airflow.pause(self.dag)
            self.trigger()
            wait_until(lambda: self.airflow.tasks(self.dag, self.run), PATIENCE_S, "the run's tasks")
            return lambda: self.airflow.unpause(self.dag)
        gate = None
        if moment in ("while", "published") or (moment, task) == ("failed", "build"):
            gate = gates.Gate(self.dsn, "announce" if moment == "published" else GATES[task])
        if (moment, task) == ("failed", "prepare"):
            # After all that the first task checks.
            run_sql(self.dsn, *REFUSE)
        self.trigger()
        if gate is not None:
            gate.reached()
        if moment == "failed" and gate is not None:
            for one in self.drivers():
                one.kill()
            gate.open()
        if moment in ("after", "failed"):
            self.ended()
        return lambda: None if gate is None else gate.open()

    def do(self) -> None:
        task, deed = self.row.task, self.row.deed
        if deed.startswith("XCom gone"):
            self.delete_xcom()
        match deed.removeprefix("XCom gone, ").split():
            case ["marked", state]:
                self.airflow.set_task_state(self.dag, self.run, task, state)
            case ["run", "marked", state]:
                self.mark_run(state)
            case ["everything", "killed,", "run", "marked", state]:
                self.kill_everything()
                self.mark_run(state)
            case ["cleared", *how]:
                self.clear(task, downstream=not how)
            case ["timed", "out"]:
                # The signal that execution_timeout sends.
                self.process().send_signal(signal.SIGALRM)
            case ["run", "timed", "out"]:
                # As if dagrun_timeout were over.
                earlier = "UPDATE dag_run SET start_date = start_date - interval '1 day'"
                run_sql(self.airflow.environment["METADATA"], f"{earlier} WHERE run_id = '{self.run}'")
            case ["killed"]:
                supervisor = self.process().parent()
                assert supervisor is not None
                supervisor.kill()

    def mark_run(self, state: str) -> None:
        run = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.run, safe='')}"
        self.airflow.call("PATCH", run, {"state": state})

    def kill_everything(self) -> None:
        """As if the machine had lost its power: whatever could write something is gone."""
        process = self.process()
        supervisor = process.parent()
        assert supervisor is not None
        # The drivers' guards are of their sessions.
        sessions = {os.getsid(one.pid) for one in self.drivers()}
        drivers = [one for one in psutil.process_iter() if _session(one) in sessions]
        for one in (supervisor, process, *drivers):
            with suppress(psutil.Error):
                one.suspend()
        for one in (supervisor, process, *drivers):
            with suppress(psutil.Error):
                one.kill()

    def process(self) -> psutil.Process:
        """The process that runs the task."""
        return psutil.Process(self.airflow.task(self.dag, self.run, self.row.task)["pid"])

    def drivers(self) -> list[psutil.Process]:
        """The drivers of tasks, and Spark's JVMs."""
        found = []
        for one in processes_of(self.airflow.home):
            with suppress(psutil.Error):
                if is_alive(one) and ("airflow_roir.spark" in one.cmdline() or one.name() == "java"):
                    found.append(one)
        return found

    # --- what there is to see

    def ended(self) -> None:
        """Waits for the run's end, and for all that its tasks have started."""
        over = ("success", "failed")
        wait_until(lambda: self.airflow.run_state(self.dag, self.run) in over, PATIENCE_S, "the run's end")
        wait_until(lambda: self.drivers() == [], PATIENCE_S, "the end of its drivers")

    def seen(self) -> End:
        done = "status = 'completed' AND kind IN ('create', 'rebuild') AND created_by LIKE 'airflow %'"
        builds = [one for (one,) in self.read(f"SELECT id FROM roir.operation WHERE {done}")]
        told = [one["extra"]["operation_id"] for one in self.airflow.asset_events() if self.is_own(one)]
        assert len(told) == len(set(told)), "an event was sent twice"
        assert set(told) <= set(builds)
        untold = len(builds) - len(told)
        return End(
            self.airflow.run_state(self.dag, self.run), self.operation(), self.page(), self.status(), untold=untold
        )

    def is_own(self, event: dict[str, Any]) -> bool:
        return bool(event["extra"].get("index") == self.index)

    def operation(self) -> str:
        """The newest operation's status and phase, and `driven` if its last heartbeat is less than 30 seconds old."""
        found = self.read(
            "SELECT concat_ws(' ', status, phase, CASE WHEN heartbeat_at > clock_timestamp() - interval '30 s' "
            "THEN 'driven' END) FROM roir.operation ORDER BY id DESC LIMIT 1"
        )
        return str(found[0][0]) if found else ""

    def page(self) -> str:
        query = urlencode({"dag_id": self.dag, "run_id": self.run})
        seen = self.airflow.call("GET", f"/roir/api/run?{query}")["progress"]
        said = "" if seen is None else f"{seen['status']} {seen['phase']}: {seen['held_up']['text']}"
        return KILLED.sub("interrupted", said.replace(f"{self.dag} {self.run}", "RUN"))

    def status(self) -> str:
        command = [str(Path(sys.executable).parent / "roir"), "status", "--json"]
        done = subprocess.run(command, env=os.environ | {"ROIR_DSN": self.dsn}, capture_output=True, check=True)
        seen = json.loads(done.stdout)
        states = [one["state"] for one in seen["indexes"]]
        for one in seen["operations"]:
            driven = " driven" if one["driven"] else ""
            states.append(f"{one['status']} {one['phase']}{driven}: {one['pause_reason']}")
        return KILLED.sub("interrupted", "; ".join(states))

    def read(self, query: str) -> list[Any]:
        with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    def shows(self, end: End) -> None:
        """Waits until all four say that: a look lasts a second, and a driver's end takes some."""
        self.ended()
        with suppress(AirflowError):
            wait_until(lambda: self.seen() == end, SETTLED_S, "what the run leaves")
        tasks = {one["task_id"]: one["state"] for one in self.airflow.tasks(self.dag, self.run)}
        assert asdict(self.seen()) == asdict(end), tasks


def _session(process: psutil.Process) -> int:
    with suppress(OSError, psutil.Error):
        return os.getsid(process.pid)
    return -1


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """An Airflow with both DAGs, which soon declares dead whose process has vanished."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    dags.mkdir()
    text = (dags_folder / f"{DAG}.py").read_text().replace("timedelta(seconds=30)", "timedelta(seconds=2)")
    once = text.replace(f'dag_id="{DAG}"', f'dag_id="{ONCE}",\n    dagrun_timeout=timedelta(hours=6)')
    assert '"retries": 6,' in once
    (dags / f"{DAG}.py").write_text(text)
    (dags / f"{ONCE}.py").write_text(once.replace('"retries": 6,', LIMITS))
    for name in (CLEAN_UP, CONTROL):
        (dags / f"{name}.py").write_text((dags_folder / f"{name}.py").read_text())
    more = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20", "AIRFLOW__ROIR__CONNECTIONS": CONNECTION}
    more |= {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3"}
    # The DAGs stay as they are.
    more |= {"AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600"}
    home = tmp_path_factory.mktemp("airflow")
    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata, environment=more) as running:
        address = running.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
        running.environment["METADATA"] = address.replace("+psycopg2", "")
        running.wait_until_ready([DAG, ONCE, CLEAN_UP, CONTROL])
        yield running


@pytest.fixture
def case(row: Row, airflow: StandaloneAirflow, dsn: str) -> Iterator[Case]:
    """Its table, its connection, and both switches on."""
    for dag in (DAG, ONCE):
        airflow.unpause(dag)
    yield Case(row, airflow, dsn)
    airflow.call("DELETE", f"/api/v2/connections/{CONNECTION}")


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_what_its_user_sees_and_does_next(row: Row, case: Case) -> None:
    """Found: *verify_before* was marked as success, or skipped, before it had ended: *prepare* waited for its
    verification for ever. It holds: a verification that the run itself has left is aborted. Found: *build* was marked
    as success before it had ended: *finalize* named `roir resume` for a remedy, and left its error as the pause's
    reason. It holds: it names the task to clear, and changes nothing.
    """
    go_on = case.to_the_moment()
    process = case.process() if row.moment in ("while", "published") else None
    case.do()
    # The database's driver hears no signal while it waits for the server, as long as the gate lets it.
    is_deaf = (row.task == "prepare" or row.moment == "published") and row.deed in ("timed out", "killed")
    if process is not None and row.deed != "XCom gone" and not is_deaf:
        # Shut out: else the work might be done before it is over.
        wait_until(lambda: not is_alive(process), PATIENCE_S, "the end of the task's process")
    go_on()
    case.shows(row.end)
    if (row.moment, row.task) == ("failed", "prepare"):
        run_sql(case.dsn, "DROP FUNCTION refuse() CASCADE")
    if row.then == "trigger":
        case.trigger()
    elif row.then:
        case.clear(row.then)
    case.shows(DONE)
    steps.assert_exact(Database(case.dsn), case.index)


GONE = Row("build", "while", "everything killed", conf={"warn_after_s": 20, "abort_after_s": 60})


@pytest.mark.parametrize("row", [GONE], ids=str)
@pytest.mark.parametrize("fate", ["marked failed", "marked success", "deleted"])
def test_the_clean_up_warns_of_what_no_run_drives_and_ends_it(row: Row, case: Case, fate: str) -> None:
    """Found: with `warn_after_s` 20 and `abort_after_s` 60 such builds were running, undriven and unwarned after eight
    minutes, whether their task had been killed or their run marked. No page looks here, only the DAG that cleans up.
    """
    go_on = case.to_the_moment()
    case.kill_everything()
    case.mark_run(fate.removeprefix("marked ") if fate != "deleted" else "failed")
    if fate == "deleted":
        case.airflow.call("DELETE", f"/api/v2/dags/{case.dag}/dagRuns/{quote(case.run, safe='')}")
    go_on()
    wait_until(lambda: not case.drivers(), PATIENCE_S, "the end of its drivers")
    # As if the last sign of life were half a minute ago, and no more: its grace isn't over.
    earlier = "clock_timestamp() - interval '40 s'"
    run_sql(case.dsn, f"UPDATE roir.operation SET heartbeat_at = {earlier}, awaited_until = {earlier}")
    assert case.status() == "building; running build: None"
    clean_up(case)
    assert case.status() == "building; abandoned build: None"
    assert case.read("SELECT count(*) FROM roir.event WHERE action = 'abandoned'") == [(1,)]
    for table, columns in (("operation", ("heartbeat_at", "awaited_until", "run_ended_at")), ("event", ("at",))):
        moved = ", ".join(f"{one} = {one} - interval '5 min'" for one in columns)
        run_sql(case.dsn, f"UPDATE roir.{table} SET {moved}")
    clean_up(case)
    assert case.operation() == "aborted build"


def clean_up(case: Case) -> None:
    """A run of the DAG that cleans up, to its end."""
    run = case.airflow.trigger(CLEAN_UP, {"postgres_conn_id": CONNECTION})
    wait_until(lambda: case.airflow.run_state(CLEAN_UP, run) == "success", PATIENCE_S, "the clean-up")
