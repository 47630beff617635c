"""Starts Spark in a thread of its own, while the engine is imported and the operation is prepared."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_roir.errors import SparkFailed
from airflow_roir.spark.classic import ClassicSession, Java, is_local, is_submitted
from airflow_roir.spark.java import use_java
from airflow_roir.spark.options import SparkOptions, is_connect
from airflow_roir.spark.session import Session, why
from airflow_roir.spark.start_timings import mark

# A process that ends a driver waits two seconds for it.
BREAK_OFF_S = 1.5


class SparkStart:
    """A Spark that is starting. A context manager: at the end it is closed, whether it is up or not.

    name: the application's. begun: the moment of the start, as `time.monotonic` counts. Raises JavaMissing.
    """

    def __init__(self, options: SparkOptions, name: str) -> None:
        self._options = options
        self._name = name
        self.begun = time.monotonic()
        self._named = threading.Event()
        self._ended = threading.Event()
        self._java: Java | None = None
        if not is_connect(options.master) and not is_submitted():
            use_java()
        # One folder for all files that a killed JVM leaves behind.
        self._folder = Path(tempfile.mkdtemp(prefix="roir-spark-"))
        self._future: Future[Session] = Future()
        threading.Thread(target=self._run, name="roir-spark-start", daemon=True).start()

    def session(self, name: str) -> Session:
        """Waits until Spark is up; returns the session. A cluster shows the application under this name. Raises
        SparkFailed."""
        if not self._is_early:
            self._name = name
        self._named.set()
        try:
            return self._future.result()
        except Exception as error:
            # The type of the error depends on the cause: Java, the master, the name of a setting.
            raise SparkFailed(f"Spark can't be started at {self._options.master or 'local'}: {why(error)}") from error

    @property
    def where(self) -> str:
        """The master, without the parameters of a Connect server's address, which may be secrets."""
        return (self._options.master or ("spark-submit" if is_submitted() else "local")).partition(";")[0]

    @property
    def _is_early(self) -> bool:
        # On a cluster it takes no slots before there is work.
        return is_local(self._options.master) and not is_submitted()

    def _run(self) -> None:
        try:
            self._future.set_result(self._open())
        except BaseException as error:  # handed on whole: session() raises it
            self._future.set_exception(error)

    def _open(self) -> Session:
        if is_connect(self._options.master):
            from airflow_roir.spark.connect import ConnectSession

            return ConnectSession(self._options)
        self._java = Java(self._options, self._folder, self._ended)
        if self._ended.is_set():
            raise SparkFailed("ended before it was up")
        if not self._is_early:
            self._named.wait()
        session: ClassicSession = self._java.session(self._name)
        if self._is_early:
            session.warm_up()
        return session

    def close(self) -> None:
        """Ends Spark; breaks off a start that is under way. Safe to call twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._named.set()
        if self._future.done() and self._future.exception() is None:
            self._future.result().close()
        elif self._java is not None:
            self._java.end()
        elif not self._future.done():
            self._break_off()
        shutil.rmtree(self._folder, ignore_errors=True)
        mark("stopped")

    def _break_off(self) -> None:
        """Ends the JVM that PySpark still waits for, so that PySpark removes its temporary files for it.

        PySpark doesn't return its process id. The process group of a driver with its own session is the driver and its
        JVM.
        """
        if os.getsid(0) == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)
            with suppress(Exception):
                self._future.result(BREAK_OFF_S)

    def __enter__(self) -> SparkStart:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
