"""The Spark driver as a process of its own, in its own session, with its own log pipe: for the CLI and for Airflow.

Not inside the caller's process: a JVM and its Python workers would share its process group and its standard output,
and Airflow's supervisor would wait for them. The DSN travels in the environment, which other users of the machine
can't read; the command line holds names and numbers only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from airflow_roir.spark.options import SparkOptions

# What configures Airflow, secrets included, is none of the driver's business.
_AIRFLOW_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW")
# What a driver logs once its Spark session is open. Until then it holds nothing that is worth a wait.
SPARK_IS_UP = "Spark is up"
# Airflow sends SIGKILL five seconds after SIGTERM; the task needs the rest to leave.
TERMINATE_S = 2.0


def driver_command(
    index: str,
    owner: str,
    options: SparkOptions,
    *,
    take_over: bool = False,
    keep_pause: bool = False,
    log: Path | None = None,
) -> list[str]:
    """The driver's command line. It never holds a secret.

    owner: how the run is named to others. take_over: fence a run that still seems alive, at once. keep_pause: whoever
    starts the driver has lifted an older pause already, so that one found by the driver is a newer wish. log: the file
    that Spark's own log goes to, see `log_file.diverted`; by default it comes up among the driver's lines.
    """
    command = [sys.executable, "-m", "airflow_roir.spark", "--index", index, "--owner", owner]
    if options.master:
        command += ["--master", options.master]
    if take_over:
        command.append("--take-over")
    if keep_pause:
        command.append("--keep-pause")
    if log is not None:
        command += ["--spark-log", str(log)]
    for name, value in sorted(options.conf.items()):
        command += ["--conf", f"{name}={value}"]
    return command


def driver_environment(dsn: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without Airflow's own settings, and with the DSN."""
    inherited = os.environ if environment is None else environment
    kept = {name: value for name, value in inherited.items() if not name.startswith(_AIRFLOW_PREFIXES)}
    return kept | {"ROIR_DSN": dsn, "PYTHONUNBUFFERED": "1"}


class Driver:
    """A running driver process.

    command, environment: what to start; forward: called with every line that it logs, from a thread.
    is_starting: Spark isn't up yet, so that it can be ended at any moment at no loss.

    Not guaranteed: when this process dies by SIGKILL the driver continues until it ends or a newer run fences it
    (docs/architecture.md#lifecycle); a wrong row can't come of that.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], forward: Callable[[str], None]) -> None:
        self._forward = forward
        self.last_line = ""
        self.is_starting = True
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            # An Airflow task's own standard input is its line to the supervisor.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        # A daemon: a grandchild that survives may hold the pipe open.
        self._reader = threading.Thread(target=self._read, name="roir-driver-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The driver's process id, which is also its process group's and its session's."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if text := line.rstrip():
                self.last_line = text
                if text == f"roir: {SPARK_IS_UP}":
                    self.is_starting = False
                self._forward(text)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the driver's end, at most `seconds` or as long as it takes; its exit code, see
        `airflow_roir.spark.__main__.main`, negative for a signal, None while it runs."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        # The last lines say why it ended.
        self._reader.join(1.0)
        return code

    def terminate(self) -> None:
        """Ask the driver's process group to end. Safe in a signal handler: takes no lock, waits for nothing."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the driver's process group: SIGTERM, then SIGKILL once the driver has ended, or after `TERMINATE_S`."""
        if self._process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_S
        # WNOWAIT leaves the driver to be reaped below: until then the number of its group stays its own.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while os.waitid(os.P_PID, self._process.pid, ended) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # Once reaped, its number may belong to somebody else.
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return
