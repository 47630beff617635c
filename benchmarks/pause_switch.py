"""Pauses by the switch of the DAG in a real Airflow: the second part of `benchmarks.pause`."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.airflow import CONNECTION, DAG, bench_airflow
from benchmarks.pause_bench import LONGEST_STRETCH_S, PATIENCE_S, WORKERS, Bench
from servers.airflow import StandaloneAirflow, wait_until


def pauses_by_switch(bench: Bench, pauses: int) -> list[dict[str, Any]]:
    """Pauses and unpauses the DAG until `pauses` pauses were measured; each is a dict as of `Bench.stopped`."""
    with bench_airflow(bench.server) as airflow:
        measured: list[dict[str, Any]] = []
        while len(measured) < pauses:
            bench.begin()
            run = airflow.trigger(DAG, {"index": "ix", "postgres_conn_id": CONNECTION, "parallelism": 2})
            measured += _pauses_of_a_run(bench, airflow, run, pauses - len(measured))
            # The rest of the run is thrown away with its operation.
            airflow.call("PATCH", f"/api/v2/dags/{DAG}/dagRuns/{run}", {"state": "failed"})
            airflow.unpause(DAG)
            wait_until(lambda: bench.run("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'roir%%"
                                         " worker %%'")[0][0] == 0, PATIENCE_S, "the workers' end")  # fmt: skip
        return measured


def _pauses_of_a_run(bench: Bench, airflow: StandaloneAirflow, run: str, wanted: int) -> list[dict[str, Any]]:
    measured: list[dict[str, Any]] = []
    while len(measured) < wanted:
        airflow.unpause(DAG)
        wait_until(lambda: bench.run(WORKERS)[0][0] >= 2 or not bench.building(), PATIENCE_S, "workers", every=0.02)
        time.sleep(bench.random.uniform(0, LONGEST_STRETCH_S))
        if not bench.building():
            break
        begun = time.monotonic()
        airflow.pause(DAG)
        one = bench.stopped(begun)
        if not bench.building():
            break
        measured.append(one | {"driver_gone_s": None})
        print("switch", len(measured), one, flush=True)
        wait_until(
            lambda: airflow.task_state(DAG, run, "build") == "up_for_reschedule", PATIENCE_S, "the task to leave"
        )
    return measured
