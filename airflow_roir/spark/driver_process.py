"""Runs the Spark driver as a process of its own, in its own session, with its own log pipe: for the CLI and Airflow.

Not inside the caller's process: a JVM and its Python workers would share its process group and its standard output,
and Airflow's supervisor would wait for them. The DSN travels in the environment, which other users of the machine
can't read; the command line holds names and numbers only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

from airflow_roir.engine.governor.surroundings import QUERY, REPLICAS, Surroundings
from airflow_roir.errors import SparkFailed
from airflow_roir.spark import guard
from airflow_roir.spark.options import SparkOptions

# Airflow's configuration, with its secrets, isn't passed to the driver.
_AIRFLOW_PREFIXES = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW")
# A driver's line begins so once its Spark session is open. Until then it has no work that is worth waiting for.
SPARK_IS_UP = "Spark is up"
# The line that a driver that waits for orders logs after each; the exit code of a driver for one order follows.
ENDED = "ended with exit code "
# The exit code of a driver whose error every other try would meet, for Airflow; a command's is that of the error.
PERMANENT = 6
# The beginning of a driver's last line if it was interrupted; the advice of a command follows.
INTERRUPTED = "interrupted"
_PROGRAM = (sys.executable, "-m", "airflow_roir.spark")
# Airflow sends SIGKILL five seconds after SIGTERM; the task needs the rest to leave.
TERMINATE_S = 2.0
# The most time to record that a driver was killed.
SETTLE_S = 1.5
# The time between two looks for its end.
LOOK_S = 0.05
# The same for a driver that has written nothing about its order.
ORDER_LOOK_S = 0.2


def driver_command(options: SparkOptions, order: Sequence[str]) -> list[str]:
    """The command line of a driver. It never holds a secret.

    order: a `driver_order`, or `later`: then it starts Spark and waits for `Driver.order`.
    """
    return [*_PROGRAM, *order, *_where(options)]


def later(log: Path) -> list[str]:
    """The arguments by which a driver starts Spark and waits for orders. log: the file of Spark's log until then."""
    return ["--later", "--spark-log", str(log)]


def driver_order(
    index: str,
    owner: str,
    *,
    take_over: bool = False,
    lift_pause: bool = True,
    log: Path | None = None,
    operation: int | None = None,
) -> list[str]:
    """The arguments by which a driver drives one operation.

    owner: the name of the run that others see. take_over: fence a run that still seems alive, at once. lift_pause:
    False if an older pause was lifted before the driver started, so that a pause that the driver finds is a newer wish.
    log: the file that Spark's own log goes to, see `log_file.diverted`; by default it is mixed with the driver's lines.
    operation: the id of the only operation that it may drive, as of `start_run`.
    """
    order = ["--index", index, "--owner", owner]
    if operation is not None:
        order += ["--operation", str(operation)]
    if take_over:
        order.append("--take-over")
    if not lift_pause:
        order.append("--no-lift-pause")
    if log is not None:
        order += ["--spark-log", str(log)]
    return order


def _where(options: SparkOptions) -> list[str]:
    master = ["--master", options.master] if options.master else []
    return [*master, *(part for name, value in sorted(options.conf.items()) for part in ("--conf", f"{name}={value}"))]


def driver_environment(
    dsn: str, environment: Mapping[str, str] | None = None, surroundings: Surroundings | None = None
) -> dict[str, str]:
    """The caller's environment without Airflow's own settings, and with the DSN.

    surroundings: of the throttle, by default those of that environment.
    """
    inherited = os.environ if environment is None else environment
    kept = {name: value for name, value in inherited.items() if not name.startswith(_AIRFLOW_PREFIXES)}
    if surroundings is not None:
        kept = {name: value for name, value in kept.items() if name not in (REPLICAS, QUERY)}
        kept |= surroundings.as_environment()
    return kept | {"ROIR_DSN": dsn, "PYTHONUNBUFFERED": "1"}


class Driver:
    """A running driver process.

    command, environment: of the process; forward: called with every line that it logs, from a thread. takes_orders: it
    was started with `later`. is_starting: Spark isn't up yet, so the driver can be ended at any moment without a loss.

    When this process dies, for any reason, the driver's `guard` lets the driver pause the operation, and kills the
    processes that are left within seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        forward: Callable[[str], None],
        takes_orders: bool = False,
    ) -> None:
        self._forward = forward
        # The exit codes of its orders.
        self._codes: Queue[int] = Queue()
        self.last_line = ""
        self.is_starting = True
        self._was_asked = False
        # Ends with this process: see `guard`.
        pipe, self._life = os.pipe()
        self._process = subprocess.Popen(
            command,
            env=dict(environment) | {guard.STARTER: str(pipe)},
            pass_fds=(pipe,),
            # An Airflow task's own standard input is its line to the supervisor.
            stdin=subprocess.PIPE if takes_orders else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        os.close(pipe)
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
                if (ended := re.fullmatch(rf"roir: {ENDED}(\d+)", text)) is not None:
                    self._codes.put(int(ended[1]))
                    continue
                self.last_line = text
                if text.startswith(f"roir: {SPARK_IS_UP}"):
                    self.is_starting = False
                self._tell(text)

    def _tell(self, line: str) -> None:
        # The reader of the command's lines may have gone. The driver must not be held up by that, and the line with the
        # order's end must still be read.
        with suppress(OSError):
            self._forward(line)

    def order(self, order: Sequence[str]) -> None:
        """Lets a driver that waits drive an operation, see `driver_order`. Raises SparkFailed if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(list(order)) + "\n")
            self._process.stdin.flush()
        except OSError:
            self.wait()
            raise SparkFailed(
                f"Spark's driver ended before it got any work: {self.last_line or 'it said nothing'}"
            ) from None

    def release(self) -> None:
        """Gives no more orders: the driver ends after those that it has."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def wait_for_order(self, seconds: float | None = None) -> int | None:
        """The exit code of an order; None while it is under way. Raises SparkFailed if the driver ended before."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            with suppress(Empty):
                return self._codes.get(timeout=ORDER_LOOK_S if seconds is None else min(seconds, ORDER_LOOK_S))
            if self.wait(0) is not None:
                with suppress(Empty):
                    return self._codes.get_nowait()
                raise SparkFailed(
                    f"Spark's driver has ended ({_ending(self._process.returncode)}) before the operation had; start "
                    "it again by roir resume"
                )
        return None

    def wait(self, seconds: float | None = None) -> int | None:
        """Waits for the driver's end, at most `seconds` or as long as it takes; returns its exit code, see
        `airflow_roir.spark.__main__.main`, negative for a signal, None while it runs."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._has_ended():
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_S)
        self._reap()
        # The last lines say why it ended.
        self._reader.join(1.0)
        return self._process.returncode

    def _has_ended(self) -> bool:
        """True if it has ended, reaped or not."""
        if self._process.returncode is not None:
            return True
        # WNOWAIT doesn't reap it: until it is reaped no other session gets its number.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, ended) is not None

    def _reap(self) -> None:
        """Kills the rest of the driver's session, then reaps the driver. So would its guard, unless that was killed."""
        if self._process.returncode is None:
            guard.kill(self._process.pid)
            self._process.wait()
            life, self._life = self._life, -1
            os.close(life)

    def terminate(self) -> None:
        """Asks the driver's process group to end. Safe in a signal handler: takes no lock, waits for nothing."""
        self._was_asked = True
        self._signal(signal.SIGTERM)

    def kill(self, patience_s: float = TERMINATE_S) -> None:
        """Ends the driver's process group: SIGTERM, unless it has got one, then SIGKILL to all of its session once the
        driver has ended, or after `patience_s`."""
        if self._process.returncode is not None:
            return
        if patience_s and not self._was_asked:
            # A second SIGTERM would end it before it has paused its operation.
            self._signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._reap()

    def settle(self, dsn: str, index: str, owner: str) -> None:
        """Records in the operation, after the driver's end, that it was killed: it would seem to drive it for a while.

        index, owner: those of its order. Waits `SETTLE_S` at most, since the server may not answer, either.
        """
        code = self._process.returncode
        if code is not None and code < 0:
            told = threading.Thread(target=_settle, args=(dsn, index, owner, _ending(code)), daemon=True)
            told.start()
            told.join(SETTLE_S)

    def _signal(self, number: signal.Signals) -> None:
        # Once it is reaped, another process may have its number.
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return


def _settle(dsn: str, index: str, owner: str, ending: str) -> None:
    from airflow_roir.engine.control.run import settle_lost
    from airflow_roir.engine.database import Database

    with suppress(Exception):
        settle_lost(Database(dsn, "roir"), index, owner, SparkFailed(f"Spark's driver was {ending}"))


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
