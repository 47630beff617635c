"""A classic Spark session: this process is the driver, and workers are jobs of RDDs.

Not jobs of DataFrames: planning, compiling and Arrow would take a new JVM seconds before the first worker begins.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import airflow_roir
from airflow_roir.engine.work.phase_work import WorkerMetrics
from airflow_roir.errors import SparkFailed
from airflow_roir.spark.options import LOCAL_MASTER, SparkOptions, with_task_failures
from airflow_roir.spark.package import write_package
from airflow_roir.spark.session import Session, WorkerJob, tag_of
from airflow_roir.spark.start_timings import mark

SETTINGS = {
    # For Spark's own log; the lines for the user come from us.
    "spark.log.level": "WARN",
    "spark.ui.showConsoleProgress": "false",
    # A second copy of a worker would only fence the first one, over and over: a worker's task is long by design.
    "spark.speculation": "false",
}
# Spark's pages ask for no password.
PAGES = {"spark.ui.killEnabled": "false"}
LOCAL_PAGES = {"spark.ui.enabled": "false"}
DAEMON = {"spark.python.daemon.module": "airflow_roir.spark.worker_daemon"}
# The address on which Spark listens. In local mode no other machine has to reach it.
LISTEN = "SPARK_LOCAL_IP"
LOOPBACK = "127.0.0.1"
# If the user has set one of these, Spark must be stopped, not killed: it reports the application's end.
LISTENING = ("spark.eventLog.enabled", "spark.extraListeners", "spark.plugins", "spark.metrics.conf")
OPTIONS = "SPARK_SUBMIT_OPTS"
# The driver only hands out tasks: its JVM would spend most of its time on compiling code that runs once.
QUICK = "-XX:TieredStopAtLevel=1"
# A process that ends a driver may not wait longer.
REMOVING_S = 1.5


def is_submitted() -> bool:
    """True inside `spark-submit`, which has started the JVM already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def is_local(master: str | None) -> bool:
    """True for Spark in the driver's own process."""
    return master is None or re.fullmatch(r"local(\[.*\])?", master) is not None


class Java:
    """The JVM of a driver, started before its operation is known."""

    def __init__(self, options: SparkOptions, folder: Path, unwanted: Event | None = None) -> None:
        """Starts it, unless `spark-submit` has. folder: for its temporary files; unwanted: set when it is given up.

        Raises whatever PySpark raises.
        """
        from pyspark import SparkConf

        self.master = options.master
        self.folder = folder
        self._unwanted = unwanted or Event()
        self._gateway: Any = None
        # PySpark reads this setting only in spark-submit. The executors' interpreter is the driver's own by default.
        if python := options.conf.get("spark.pyspark.python"):
            os.environ["PYSPARK_PYTHON"] = python
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        self.conf = SparkConf()
        own = SETTINGS | ({} if is_submitted() else PAGES) | (LOCAL_PAGES if self.is_local else {})
        if self.is_local and os.environ["PYSPARK_PYTHON"] == sys.executable:
            # Another interpreter may not have this package.
            own |= DAEMON
        for key, value in {**own, **options.conf}.items():
            self.conf.set(key, value)
        if not is_submitted():
            self.conf.setMaster(with_task_failures(options.master or LOCAL_MASTER))
            self._gateway = self._start()
        mark("java")

    @property
    def is_local(self) -> bool:
        """True if this process runs the workers, too."""
        # Only spark-submit knows its own arguments.
        return not is_submitted() and is_local(self.master)

    def _start(self) -> Any:
        from pyspark.java_gateway import launch_gateway

        if self._unwanted.is_set():
            raise SparkFailed("ended before it was up")
        if self.is_local:
            os.environ.setdefault(LISTEN, LOOPBACK)
        given = os.environ.get(OPTIONS)
        # The user's options come last, and so take precedence.
        os.environ[OPTIONS] = " ".join([QUICK, f"-Djava.io.tmpdir={quoted(self.folder)}", given or ""])
        try:
            return launch_gateway(self.conf)
        finally:
            if given is None:
                del os.environ[OPTIONS]
            else:
                os.environ[OPTIONS] = given

    def session(self, name: str) -> ClassicSession:
        """A session in it, under this name. Raises whatever PySpark raises."""
        from pyspark import SparkContext

        self.conf.setAppName(name)
        context = (
            SparkContext.getOrCreate(self.conf)
            if self._gateway is None
            else SparkContext(conf=self.conf, gateway=self._gateway)
        )
        mark("session")
        return ClassicSession(context, self)

    def end_gently(self, seconds: float) -> None:
        """Lets a JVM that was started here end on its own, and waits for that. Raises subprocess.TimeoutExpired."""
        process = self._gateway.proc
        process.stdin.close()
        process.wait(seconds)

    def end(self) -> None:
        """Kills the JVM, if it was started here. Silent if it is gone."""
        process = getattr(self._gateway, "proc", None)
        if process is not None:
            process.kill()
            process.wait()


class ClassicSession(Session):
    """See `Session`."""

    def __init__(self, context: Any, java: Java) -> None:
        self._context = context
        self._java = java
        if not is_local(context.master):
            # Session-wide. It takes precedence over packages that executors have installed.
            name = f"{airflow_roir.__name__}-{airflow_roir.__version__}.zip"
            context.addPyFile(str(write_package(java.folder / name)))

    def warm_up(self) -> None:
        """Runs a first job, so that Python's daemon runs and the JVM has loaded its classes."""
        with _described(self._context, "starts Python"):
            self._context.parallelize([0], 1).mapPartitions(list).collect()
        mark("python")

    def run(self, number: int, tag: str, description: str, work: WorkerJob) -> list[WorkerMetrics]:
        """See `Session.run`."""
        self._context.addJobTag(tag_of(tag))
        self._context.setJobDescription(description)
        return list(self._context.parallelize([number], 1).mapPartitions(work).collect())

    def interrupt(self, tag: str) -> None:
        """See `Session.interrupt`."""
        with suppress(Exception):
            self._context.cancelJobsWithTag(tag_of(tag))

    @property
    def is_alive(self) -> bool:
        """See `Session.is_alive`."""
        try:
            return not self._context._jsc.sc().isStopped()
        except Exception:
            # No JVM answers.
            return False

    @property
    def pages(self) -> str | None:
        """See `Session.pages`."""
        try:
            url = self._context.uiWebUrl
        except Exception:
            # Its JVM is gone; the workers' errors will report that.
            return None
        return url if url and re.fullmatch(r"https?://[^\s\"'<>]{1,500}", url) else None

    @property
    def shared_cores(self) -> int | None:
        """See `Session.shared_cores`."""
        return os.cpu_count() if is_local(self._context.master) else None

    @property
    def tasks_without_slot(self) -> int | None:
        """See `Session.tasks_without_slot`."""
        try:
            tracker = self._context.statusTracker()
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        except Exception:
            # Its JVM is gone; the workers' errors will report that.
            return 0
        # Each worker is a job with one task.
        return sum(1 for one in stages if one is not None and not one.numActiveTasks and not one.numCompletedTasks)

    def close(self) -> None:
        """Ends it. In local mode at once: all work is committed, and a JVM takes a second to tidy up."""
        # An error means that its JVM is gone already.
        with suppress(Exception):
            has_own_files = self._has_own_files()
            if not self._java.is_local or has_own_files or self._is_listened_to():
                self._context.stop()
            else:
                # It would log the connection that breaks.
                self._context._accumulatorServer.handle_error = lambda *_: None
            if has_own_files:
                self._java.end_gently(REMOVING_S)
        self._java.end()

    def _has_own_files(self) -> bool:
        """True if there are temporary files outside of our folder, which only a JVM that isn't killed removes."""
        system = self._context._jvm.java.lang.System
        chosen = system.getenv("SPARK_LOCAL_DIRS") or self._context.getConf().get("spark.local.dir")
        return bool(chosen) or system.getProperty("java.io.tmpdir") != str(self._java.folder)

    def _is_listened_to(self) -> bool:
        conf = self._context.getConf()
        return any(name.startswith(LISTENING) and value not in ("", "false") for name, value in conf.getAll())


def quoted(path: Path) -> str:
    """The path in an option for the JVM: Spark reads these as a shell would."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _described(context: Any, description: str) -> Iterator[None]:
    context.setJobDescription(description)
    try:
        yield
    finally:
        context.setJobDescription(None)
