"""Starts the Spark application as a process of its own, the same way for the CLI and for Airflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from airflow_roir.spark.driver import SparkOptions

# Between SIGTERM and SIGKILL; Airflow itself kills a task 5 s after it asked.
GRACE_S = 3.0


class DriverProcess:
    """The driver in its own session, so that a signal meant for its parent doesn't split it from its JVM.

    The DSN goes by the environment, which only its own user can read; arguments can be seen by all.
    """

    def __init__(self, dsn: str, index: str, owner: str, options: SparkOptions, extra: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "airflow_roir.spark", "--index", index, "--owner", owner, *extra]
        if options.master:
            command += ["--master", options.master]
        for key, value in (options.conf or {}).items():
            command += ["--conf", f"{key}={value}"]
        environment: Mapping[str, str] = {**os.environ, "ROIR_DSN": dsn, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def lines(self) -> Iterator[str]:
        """What the driver prints, line by line, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.rstrip("\n")

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code: see `airflow_roir.spark.__main__.main`. Raises subprocess.TimeoutExpired."""
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """End the driver, its JVM and its workers; nothing committed is lost. Within GRACE_S."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        # Also what the driver left behind in its session.
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return
