"""The Spark application: runs an operation's workers, phase by phase, and keeps as many as the operation asks for."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from airflow_roir.definition import MAX_PARALLELISM
from airflow_roir.engine import build, seal
from airflow_roir.engine.database import Database, retry
from airflow_roir.engine.run import Run, driving, heartbeat, read_control, start_run
from airflow_roir.engine.status import OperationStatus, operation_status
from airflow_roir.errors import OperationFailed, OperationPaused, RoirError
from airflow_roir.operation import Phase, Status
from airflow_roir.spark.worker import METRICS_SCHEMA, worker_function

# How soon a raised parallelism is followed while running.
WATCH_EVERY_S = 1.0
# Tasks wait for PostgreSQL nearly all of their time: local mode gives them more slots than there are cores, so
# that the parallelism can be raised while running.
LOCAL_MASTER = "local[16]"
TASK_FAILURES = 4


@dataclass(frozen=True)
class SparkOptions:
    """Where and how Spark runs. master: a master URL, `local[n]` or a Spark Connect `sc://…`; conf: settings."""

    master: str | None = None
    conf: Mapping[str, str] | None = None


def open_session(options: SparkOptions, name: str) -> Any:
    """Start or join a Spark session under a name. Inside `spark-submit` the master is the one given there."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    for key, value in {
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
        **(options.conf or {}),
    }.items():
        builder = builder.config(key, value)
    master = options.master
    if master is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = LOCAL_MASTER
    if master is None:
        return builder.getOrCreate()
    if master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    return builder.master(with_task_failures(master)).getOrCreate()


def with_task_failures(master: str) -> str:
    """`local[n]` fails a job with its first lost task; `local[n,4]` tries a task as often as a cluster does."""
    if master == "local":
        return f"local[1,{TASK_FAILURES}]"
    if master.startswith("local[") and "," not in master:
        return f"{master[:-1]},{TASK_FAILURES}]"
    return master


def drive(
    database: Database,
    index: str,
    owner: str,
    options: SparkOptions,
    parallelism: int | None = None,
    batch_rows: int | None = None,
    take_over: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> OperationStatus:
    """Build and seal the index's live operation on Spark, in a run of its own, from wherever it stands.

    Returns its status: phase `fold` when sealed, or `paused`. Raises what `start_run` raises, and RoirError for
    what workers reported; the operation then holds the reason.
    """
    run = start_run(database, index, owner, parallelism, batch_rows, take_over)
    with driving(database, run), heartbeat(database, run):
        report(f"operation {run.operation_id}: starting Spark")
        spark = open_session(options, f"roir {run.index} operation {run.operation_id}")
        try:
            for phase, finish in ((Phase.BUILD, build.finish), (Phase.SEAL, seal.finish)):
                _run_phase(spark, database, run, phase, report)
                retry(lambda finish=finish: finish(database, run))
        finally:
            spark.stop()
    return retry(lambda: operation_status(database, run.operation_id))


def _run_phase(spark: Any, database: Database, run: Run, phase: Phase, report: Callable[[str], None]) -> None:
    """Keep the phase's workers running until nothing is left; follows a changed parallelism. Returns when done."""
    row = _control(database, run)
    if row.phase != phase:
        return
    begun = time.monotonic()
    report(f"{phase.value}: {row.parallelism} workers")
    jobs: dict[Future[list[Any]], set[int]] = {}
    wake = threading.Event()
    with ThreadPoolExecutor(max_workers=MAX_PARALLELISM, thread_name_prefix="roir-job") as pool:
        while True:
            row = _control(database, run)
            for job in [job for job in jobs if job.done()]:
                jobs.pop(job)
                _collect(job.result(), phase, report)
            if row.status != Status.RUNNING or row.phase != phase:
                break
            busy: set[int] = set().union(*jobs.values()) if jobs else set()
            missing = set(range(row.parallelism)) - busy
            if _work_left(database, run, phase, idle=not jobs):
                if missing:
                    job = pool.submit(_run_workers, spark, database.dsn, run, phase, sorted(missing))
                    job.add_done_callback(lambda _: wake.set())
                    jobs[job] = missing
            elif not jobs:
                break
            wake.wait(WATCH_EVERY_S)
            wake.clear()
        for job in jobs:
            _collect(job.result(), phase, report)
    row = _control(database, run)
    if row.status == Status.PAUSED:
        raise OperationPaused(f"index {run.index}: paused by {row.paused_by}: {row.pause_reason}")
    if row.status == Status.FAILED:
        raise OperationFailed(f"index {run.index}: {row.error}")
    report(f"{phase.value}: done in {time.monotonic() - begun:.1f} s")


def _run_workers(spark: Any, dsn: str, run: Run, phase: Phase, numbers: list[int]) -> list[Any]:
    """One Spark job: a task per worker number."""
    tasks = spark.range(0, len(numbers), 1, len(numbers))
    return list(tasks.mapInArrow(worker_function(dsn, run, phase.value, numbers), METRICS_SCHEMA).collect())


def _collect(rows: list[Any], phase: Phase, report: Callable[[str], None]) -> None:
    for row in rows:
        if row.error:
            if row.error.startswith("fenced: "):
                report(f"{phase.value}: worker {row.worker} was fenced by a newer run")
                continue
            raise RoirError(f"worker {row.worker}: {row.error}")
        what = f"range {row.ordinal}: {row.rows} rows" if phase == Phase.BUILD else f"segment {row.ordinal}"
        report(f"{phase.value}: worker {row.worker}, {what} in {row.seconds:.2f} s")


def _control(database: Database, run: Run) -> Any:
    def read() -> Any:
        with database.transaction() as connection:
            return read_control(connection, run)

    return retry(read)


def _work_left(database: Database, run: Run, phase: Phase, idle: bool) -> bool:
    def read() -> bool:
        with database.transaction() as connection:
            return (build if phase == Phase.BUILD else seal).work_left(connection, run, idle)

    return retry(read)
