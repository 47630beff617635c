"""The parts of a build by the DAG in a real Airflow, from the trigger and from the switch: for `benchmarks.start`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from airflow_roir.engine.control import requests
from airflow_roir.spark import log_file
from benchmarks.airflow import CONNECTION, DAG, bench_airflow
from benchmarks.scene import INDEX
from benchmarks.start_bench import Bench, Result
from servers.airflow import StandaloneAirflow, wait_until

PATIENCE_S = 240
# At this rate a build lasts so long that it is paused after its first batches.
LASTS_S = 60
# A task that has left isn't started again for 16 seconds, and a user who pauses a build does that for longer.
PAUSED_S = 20
COPIED = "SELECT coalesce(sum(rows), 0) > 0 FROM roir.scan_range WHERE operation_id = %s"


def in_airflow(bench: Bench, rounds: int) -> Iterator[tuple[str, Result]]:
    """In each round a run of the DAG from its trigger, and one from the switch that resumes it, each to its end."""
    with bench_airflow(bench.scene.server, {log_file.FOLDER: bench.environment[log_file.FOLDER]}) as airflow:
        for _ in range(rounds):
            yield "Airflow", triggered(bench, airflow)
            yield "switch", unpaused(bench, airflow)


def triggered(bench: Bench, airflow: StandaloneAirflow) -> Result:
    """A run from its trigger to its end."""
    bench.scene.clear()
    begin = bench.begin()
    run = airflow.trigger(DAG, conf(bench))
    return bench.result(begin, "roir airflow prepare", "roir airflow build", **ends(airflow, run))


def unpaused(bench: Bench, airflow: StandaloneAirflow) -> Result:
    """A run from the switch that resumes it to its end."""
    scene = bench.scene
    scene.clear()
    before = bench.operation()
    run = airflow.trigger(DAG, conf(bench) | {"max_rows_per_second": scene.rows // LASTS_S})
    wait_until(
        lambda: bench.operation() > before and scene.value(COPIED, bench.operation()), PATIENCE_S, "rows", every=0.1
    )
    airflow.pause(DAG)
    wait_until(lambda: airflow.task_state(DAG, run, "build") == "up_for_reschedule", PATIENCE_S, "the task to leave")
    time.sleep(PAUSED_S)
    requests.change_options(scene.database, INDEX, actor="bench", max_rows_per_second=0)
    scene.run("CHECKPOINT")
    begin = bench.begin()
    airflow.unpause(DAG)
    return bench.result(begin, None, "roir airflow build", **ends(airflow, run))


def conf(bench: Bench) -> dict[str, Any]:
    """The values that the form would have."""
    data = bench.scene.data
    return {
        "index": INDEX,
        "table": data.table,
        "keys": ",".join(data.key),
        "include": ",".join(data.include),
        "parallelism": bench.scene.parallelism,
        "postgres_conn_id": CONNECTION,
    }


def ends(airflow: StandaloneAirflow, run: str) -> dict[str, float]:
    """Waits for the run's end; returns when the task `build` began and ended, and when the run ended."""
    wait_until(lambda: airflow.run_state(DAG, run) in ("success", "failed"), PATIENCE_S, "the run's end", every=2)
    if airflow.run_state(DAG, run) == "failed":
        raise SystemExit(f"the run has failed:\n{airflow.task_log(DAG, run, 'build')}")
    task = airflow.task(DAG, run, "build")
    whole = airflow.call("GET", f"/api/v2/dags/{DAG}/dagRuns/{run}")
    return {
        "started": seconds(task["start_date"]),
        "left": seconds(task["end_date"]),
        "ended": seconds(whole["end_date"]),
    }


def seconds(moment: str) -> float:
    """A moment as Airflow's API tells it."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
