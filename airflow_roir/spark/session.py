"""The Spark session: opened under a name, with this package on its executors, classic or through Spark Connect."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import airflow_roir
from airflow_roir.errors import SparkFailed
from airflow_roir.spark.options import LOCAL_MASTER, SparkOptions, is_connect, with_task_failures
from airflow_roir.spark.package import write_package

SETTINGS = {
    # For Spark's own log; the lines for the user come from us.
    "spark.log.level": "WARN",
    "spark.ui.showConsoleProgress": "false",
    # A second copy of a worker would only fence the first one, over and over: a worker's task is long by design.
    "spark.speculation": "false",
}
# Spark Connect's client tries for ten minutes by itself; the server's absence should be known within half a minute.
CONNECT_RETRIES = 8
CONNECT_MAX_BACKOFF_MS = 5_000


@contextmanager
def spark_session(options: SparkOptions, name: str) -> Iterator[Any]:
    """A Spark session under a name, stopped at the end of the block.

    Inside `spark-submit`, options.master None means the master that was given there. Raises SparkFailed.
    """
    with tempfile.TemporaryDirectory(prefix="roir-spark-") as folder:
        try:
            spark = _open(options, name)
        except Exception as error:
            # What it raises depends on what is missing: Java, the master, the name of a setting.
            raise SparkFailed(f"Spark can't be started at {options.master or 'local'}: {why(error)}") from error
        try:
            if _is_remote(spark):
                # Session-wide, for classic and Connect alike. It comes before what executors have installed.
                archive = write_package(Path(folder) / f"{airflow_roir.__name__}-{airflow_roir.__version__}.zip")
                spark.addArtifacts(str(archive), pyfile=True)
            yield spark
        finally:
            _close(spark)


def _open(options: SparkOptions, name: str) -> Any:
    from pyspark.sql import SparkSession

    # PySpark reads this setting only in spark-submit. The executors' interpreter is the driver's own by default.
    python = options.conf.get("spark.pyspark.python")
    if python:
        os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    master = options.master
    if is_connect(master):
        # The settings of a server that is there already aren't ours to make.
        for key, value in options.conf.items():
            builder = builder.config(key, value)
        return _less_patient(builder.remote(master).getOrCreate())
    for key, value in {**SETTINGS, **options.conf}.items():
        builder = builder.config(key, value)
    if master is None and is_submitted():
        return builder.getOrCreate()
    return builder.master(with_task_failures(master or LOCAL_MASTER)).getOrCreate()


def _less_patient(spark: Any) -> Any:
    from pyspark.sql.connect.client.retries import DefaultPolicy

    spark.client.set_retry_policies([DefaultPolicy(max_retries=CONNECT_RETRIES, max_backoff=CONNECT_MAX_BACKOFF_MS)])
    return spark


def _close(spark: Any) -> None:
    # Whatever it raises: its JVM or server is gone, which is what this was to achieve.
    with suppress(Exception):
        spark.stop()


def is_submitted() -> bool:
    """True inside `spark-submit`, which has started the JVM already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def pages_of(spark: Any) -> str | None:
    """The address of Spark's own pages; None without any, or if a Spark Connect server has them."""
    url = spark.sparkContext.uiWebUrl if is_classic(spark) else None
    return url if url and re.fullmatch(r"https?://[^\s\"'<>]{1,500}", url) else None


def tasks_without_slot(spark: Any) -> int | None:
    """How many workers wait for a slot; None through Spark Connect, which doesn't say."""
    if not is_classic(spark):
        return None
    try:
        tracker = spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    except Exception:
        # Its JVM is gone, which the workers are about to tell.
        return 0
    # Each worker is a job with one task.
    return sum(1 for stage in stages if stage is not None and not stage.numActiveTasks and not stage.numCompletedTasks)


def is_classic(spark: Any) -> bool:
    """False if the session is a Spark Connect client's: there is no SparkContext then."""
    return not type(spark).__module__.startswith("pyspark.sql.connect")


def shared_cores(spark: Any) -> int | None:
    """The cores of the one machine that all workers share; None on a cluster, which may grow."""
    if not is_classic(spark) or not re.match(r"local(\[|$)", spark.sparkContext.master):
        return None
    return os.cpu_count()


def _is_remote(spark: Any) -> bool:
    return not is_classic(spark) or not re.fullmatch(r"local(\[.*\])?", spark.sparkContext.master)


def is_alive(spark: Any) -> bool:
    """False once the session can run no more jobs: its JVM, its application or its server is gone."""
    try:
        if is_classic(spark):
            return not spark.sparkContext._jsc.sc().isStopped()
        # A Connect client knows only what it asks for; a server that was started anew has lost the session.
        spark.conf.get("spark.app.name", "")
        return True
    except Exception:
        # There is nobody to ask.
        return False


def name_job(spark: Any, tag: str, description: str) -> None:
    """Name what this thread submits next. Spark Connect shows tags alone; a tag has no comma."""
    spark.addTag(tag.replace(",", ";"))
    if is_classic(spark):
        spark.sparkContext.setJobDescription(description)


def interrupt(spark: Any, tag: str) -> None:
    """End the jobs of a tag; what they have open is rolled back. Silent if Spark is gone."""
    try:
        spark.interruptTag(tag.replace(",", ";"))
    except Exception:
        # It ended with Spark itself.
        return


def why(error: BaseException) -> str:
    """One line of what Spark said in many: a Python worker's own error, a lost executor's reason, or the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    raised = [line for line in str(error).splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit)\b", line)]
    if is_python_error(error) and raised:
        return raised[-1].strip()
    reasons = [line for line in lines if "most recent failure:" in line or "Reason:" in line]
    told = [line for line in lines if not line.startswith("An error occurred while calling")]
    return ([*reasons, *told] or [type(error).__name__])[0].removeprefix(": ")


def is_python_error(error: BaseException) -> bool:
    """True if a worker's own Python code raised it: a missing module, a wrong version. It would do so again."""
    return "Traceback (most recent call last)" in str(error)
