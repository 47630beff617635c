"""Airflow's task, its scheduler and all of it die, or a user ends them; the same DAG run carries on by its retries."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.database import Database
from airflow_roir.operation import OF_A_BUILD
from servers.airflow import StandaloneAirflow, processes_of
from servers.postgres import embedded_postgres
from tests.crash.scene import BATCH_ROWS, Scene, some, wait_until

DAG = "rebuild_index"
PHASES = ["prepare", *(phase.value for phase in OF_A_BUILD)]
# By SIGQUIT Airflow shows where a task is, and the task goes on.
SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"]
DAGS = Path(__file__).parents[2] / "dags"


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """An Airflow with the DAG as it is shipped, but for its patience between two tries."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(DAGS, dags, ignore=shutil.ignore_patterns("__pycache__"))
    text = (dags / "rebuild_index.py").read_text()
    assert "timedelta(seconds=30)" in text
    (dags / "rebuild_index.py").write_text(text.replace("timedelta(seconds=30)", "timedelta(seconds=2)"))
    # A task whose process has vanished is declared dead soon, as a user may want who kills often.
    sooner = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20"}
    sooner |= {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3"}
    # So are the tasks of a scheduler that was killed. By default the next one looks for them when it starts, where the
    # dead one counts as alive for 30 s more, and then only after five minutes.
    sooner |= {"AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10"}
    sooner |= {"AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "5"}
    home = tmp_path_factory.mktemp("airflow")
    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata, environment=sooner) as running:
        running.wait_until_ready([DAG])
        yield running


def trigger(airflow: StandaloneAirflow, scene: Scene) -> str:
    """A run that builds the scene's index."""
    server = scene.server
    airflow.add_connection(
        scene.name, "postgres", host=server.address, port=server.port, login="postgres", schema=scene.name
    )
    conf = {"index": "ix", "table": "t", "keys": "k", "include": "v", "ranges": 8, "batch_rows": BATCH_ROWS}
    return airflow.trigger(DAG, conf | {"postgres_conn_id": scene.name})


def task_process(scene: Scene, airflow: StandaloneAirflow) -> psutil.Process:
    """The process that runs the task now: the parent of the driver, or the process that has a session with the
    database."""
    # Looked for first: the driver and its workers have sessions, too, and are of the same home.
    drivers = [one for one in processes_of(airflow.home) if is_driver(one)]
    if drivers:
        return drivers[0].parent()
    ports = {
        row[0] for row in scene.read("SELECT client_port FROM pg_stat_activity WHERE datname = current_database()")
    }
    for process in processes_of(airflow.home):
        with suppress(psutil.NoSuchProcess):
            if any(link.laddr and link.laddr.port in ports for link in process.net_connections("tcp")):
                return process
    raise AssertionError("no task has a session")


def is_driver(process: psutil.Process) -> bool:
    """Whether it is a driver that its task has started."""
    with suppress(psutil.NoSuchProcess):
        return "airflow_roir.spark" in process.cmdline()
    return False


def finished(airflow: StandaloneAirflow, scene: Scene, run: str) -> None:
    try:
        wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), "the run's end")
    except AssertionError:
        print(scene.read("SELECT status, phase, heartbeat_at, pause_reason, error FROM roir.operation"))
        for task in airflow.tasks(DAG, run):
            print({name: task[name] for name in ("task_id", "state", "try_number", "pid", "start_date", "end_date")})
        print(*[" ".join(process.cmdline()) for process in processes_of(airflow.home)], sep="\n")
        print(airflow.log_tail(200))
        raise
    assert airflow.run_state(DAG, run) == "success", airflow.log_tail()
    scene.finished()


@pytest.mark.slow
@pytest.mark.parametrize("phase", some(PHASES, "build"))
def test_the_task_is_killed(airflow: StandaloneAirflow, scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    run = trigger(airflow, scene)
    gate.reached()
    victim = task_process(scene, airflow)
    scene.killed("Airflow task", phase)
    victim.kill()
    gate.open()
    finished(airflow, scene, run)
    if phase == "build":
        # At least: so impatient, Airflow sometimes ends the second try too, before its first heartbeat.
        assert airflow.task(DAG, run, "build")["try_number"] >= 2


ENDS = [
    *(f"{who} {number}" for who in ("runner", "supervisor") for number in SIGNALS),
    *("marked failed", "marked success", "cleared"),
]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("stopped", ["none", "driver", "java"])
@pytest.mark.parametrize("end", ENDS)
def test_a_task_that_ends_leaves_nobody_behind(
    airflow: StandaloneAirflow, scene: Scene, end: str, stopped: str
) -> None:
    """Its process or the supervisor's by each signal, or by its user, while its driver is healthy or hangs."""
    gate = scene.gate("build")
    run = trigger(airflow, scene)
    gate.reached()
    runner = task_process(scene, airflow)
    (driver,) = [one for one in runner.children() if is_driver(one)]
    family = [driver, *driver.children(recursive=True)]
    for one in family:
        if (stopped == "driver" and one == driver) or (stopped == "java" and one.name() == "java"):
            one.suspend()
    scene.killed(f"Airflow task, by {end}", "build")
    match end.split():
        case ["marked", state]:
            airflow.set_task_state(DAG, run, "build", state)
        case ["cleared"]:
            clear(airflow, run)
        case [who, number]:
            (runner if who == "runner" else runner.parent()).send_signal(getattr(signal, number))
    wait_until(lambda: not any(map(is_alive, family)), f"the end of {family}")
    wait_until(lambda: not is_alive(runner), "the end of the task's process")
    wait_until(lambda: names_nobody_dead(airflow, scene), "a status that names nobody who is dead")
    gate.open()
    if end.startswith("marked"):
        wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), "the run's end")
        clear(airflow, run)
    finished(airflow, scene, run)


def names_nobody_dead(airflow: StandaloneAirflow, scene: Scene) -> bool:
    """No heart beats, or that of a driver which the next try has started."""
    database = Database(scene.dsn, "roir tests")
    row = operations.find_operation(database, "ix")
    with database.transaction() as connection:
        beats = sign_of_life.heart_beats(row, connection)
    return not beats or any(map(is_driver, processes_of(airflow.home)))


def clear(airflow: StandaloneAirflow, run: str) -> None:
    """The build and what comes after it, as the UI does."""
    body = {"dag_run_id": run, "task_ids": ["build"], "include_downstream": True, "dry_run": False}
    body |= {"only_failed": False, "reset_dag_runs": True}
    airflow.call("POST", f"/api/v2/dags/{DAG}/clearTaskInstances", body)


@pytest.mark.parametrize("phase", some(PHASES))
def test_the_scheduler_is_killed(airflow: StandaloneAirflow, scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    run = trigger(airflow, scene)
    gate.reached()
    schedulers = [process for process in processes_of(airflow.home) if is_scheduler(process)]
    assert schedulers
    scene.killed("Airflow scheduler", phase)
    for process in schedulers:
        process.kill()
    gate.open()
    with scheduler_again(airflow):
        finished(airflow, scene, run)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", some(["build", "fold"], "build"))
def test_a_scheduler_that_is_asked_to_end_leaves_the_work_and_goes_on_later(
    airflow: StandaloneAirflow, scene: Scene, phase: str
) -> None:
    """SIGTERM to its process group, as a container's or systemd's stop sends it. It costs the task no try."""
    gate = scene.gate(phase)
    run = trigger(airflow, scene)
    gate.reached()
    victims = executor_processes(airflow)
    task = "build" if phase == "build" else "finalize"
    tries = airflow.task(DAG, run, task)["try_number"]
    scene.killed("Airflow scheduler, by SIGTERM", phase)
    for process in victims:
        process.terminate()
    # The gate is shut: a scheduler that waited for the work would never end.
    wait_until(lambda: not any(is_alive(process) for process in victims), "the scheduler's end")
    assert scene.processes("airflow_roir.spark") == []
    left = airflow.task(DAG, run, task)
    assert (left["state"], left["try_number"]) == ("up_for_reschedule", tries), airflow.task_log(DAG, run, task, tries)
    gate.open()
    with scheduler_again(airflow):
        finished(airflow, scene, run)


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie, too: `airflow standalone` doesn't always ask how its children ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def executor_processes(airflow: StandaloneAirflow) -> list[psutil.Process]:
    """The scheduler's process group as it is without `airflow standalone`: the tasks have groups of their own."""
    schedulers = [process for process in processes_of(airflow.home) if is_scheduler(process)]
    assert schedulers
    group = os.getpgid(schedulers[0].pid)
    family = {*schedulers, *(child for process in schedulers for child in process.children(recursive=True))}
    return [process for process in family if os.getpgid(process.pid) == group]


@contextmanager
def scheduler_again(airflow: StandaloneAirflow) -> Iterator[None]:
    """Starts the scheduler again, as Airflow's supervisor would; it appends to the log of the first."""
    with airflow.log_file.open("ab") as log:
        again = subprocess.Popen(
            [sys.executable, "-m", "airflow", "scheduler"],
            env=airflow.environment,
            cwd=airflow.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        again.terminate()
        again.wait()
        # As it was, for the next test.
        airflow.stop()
        airflow.start()
        airflow.wait_until_ready([DAG])


def is_scheduler(process: psutil.Process) -> bool:
    """By its command line, or by the title that it writes over that."""
    with suppress(psutil.NoSuchProcess):
        return "scheduler" in " ".join(process.cmdline()) and process.pid != os.getpid()
    return False


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", some(PHASES, "seal"))
def test_the_whole_of_airflow_is_killed(airflow: StandaloneAirflow, scene: Scene, phase: str) -> None:
    gate = scene.gate(phase)
    run = trigger(airflow, scene)
    gate.reached()
    scene.killed("whole Airflow", phase)
    airflow.kill()
    gate.open()
    airflow.start()
    airflow.wait_until_ready([DAG])
    finished(airflow, scene, run)
