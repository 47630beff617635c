"""An order to `roir spark-server`, in the place of a driver of one's own: see `driver_process.Driver`."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import IO, Any

from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.errors import SparkFailed
from airflow_roir.spark.classic import is_local
from airflow_roir.spark.driver_process import ORDER_LOOK_S, SPARK_IS_UP, TERMINATE_S, code_of
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.server_socket import fingerprint, is_trusted, socket_path
from airflow_roir.spark.whole_dsn import whole_dsn

# A server answers at once. One that hangs is done without.
ANSWER_S = 3.0
# So long without even an empty line: it hangs, or its machine did.
SILENCE_S = 60.0
LOST = "roir spark-server has ended, or hangs, which ran this operation's Spark"


def kept_driver(
    options: SparkOptions, dsn: str, forward: Callable[[str], None], surroundings: Surroundings | None = None
) -> KeptDriver | None:
    """One that takes orders, if `roir spark-server` runs here with this code and the Spark that is asked for.

    forward: called with each line, from a thread; also with the reason why a server that runs can't be used.
    surroundings: of the throttle, by default what the environment says. Raises InvalidInput if that can't be read.
    """
    known = Surroundings.of_environment() if surroundings is None else surroundings
    path = socket_path()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        if path.stat().st_uid not in (0, os.getuid()):
            raise OSError
        connection.connect(str(path))
        if not is_trusted(connection):
            raise OSError
        lines = connection.makefile("r", errors="replace")
        offer = json.loads(lines.readline())
    except TimeoutError:
        forward(f"roir: roir spark-server doesn't answer at {path}: Spark starts without it")
        connection.close()
        return None
    except (OSError, ValueError):
        # There is none, or it is about to end.
        connection.close()
        return None
    whole = whole_dsn(dsn)
    replicas = {name: whole_dsn(one) for name, one in known.replicas.items()}
    by_service = whole is None or None in replicas.values()
    why = _why_not(options, offer) or ("a database's DSN needs libpq's services" if by_service else None)
    if why is not None or whole is None:
        forward(f"roir: not by roir spark-server, process {offer['pid']}: {why}")
        connection.close()
        return None
    connection.settimeout(SILENCE_S)
    known = Surroundings({name: one for name, one in replicas.items() if one is not None}, known.query)
    return KeptDriver(connection, lines, whole, forward, known)


def ordered(
    options: SparkOptions,
    dsn: str,
    order: Sequence[str],
    forward: Callable[[str], None],
    surroundings: Surroundings | None = None,
) -> KeptDriver | None:
    """As `kept_driver`, with one order, its last; see `driver_process.driver_order`."""
    driver = kept_driver(options, dsn, forward, surroundings)
    if driver is not None:
        try:
            driver.order(order)
        except SparkFailed:
            return None
        driver.release()
    return driver


def _why_not(options: SparkOptions, offer: dict[str, Any]) -> str | None:
    """Why this server's Spark isn't the one that is asked for, nor as good."""
    if offer["code"] != fingerprint():
        return "it runs other code than this, from before an upgrade or in another environment; start it again"
    same = options.master == offer["master"] or (options.master is None and is_local(offer["master"]))
    if not same or not options.conf.items() <= offer["conf"].items():
        return "it keeps a Spark of another master or other settings"
    return None


class KeptDriver:
    """A connection to a server, with the methods and attributes of a `Driver` that takes orders."""

    def __init__(
        self,
        connection: socket.socket,
        lines: IO[str],
        dsn: str,
        forward: Callable[[str], None],
        surroundings: Surroundings,
    ) -> None:
        self._connection = connection
        self._lines = lines
        self._dsn = dsn
        self._surroundings = surroundings
        self._forward = forward
        self._codes: Queue[int] = Queue()
        self._order: list[str] | None = None
        self._code: int | None = None
        self._is_last = False
        self._interrupted = False
        self.last_line = ""
        self.is_starting = True
        self._reader = threading.Thread(target=self._read, name="roir-driver-log", daemon=True)
        self._reader.start()

    def order(self, order: Sequence[str]) -> None:
        """See `Driver.order`."""
        self._order = list(order)
        try:
            given = {"dsn": self._dsn, "surroundings": self._surroundings.as_environment(), "order": self._order}
            self._connection.sendall(json.dumps(given).encode() + b"\n")
        except OSError:
            self._order = None
            raise SparkFailed("roir spark-server ended before it had the order; try again") from None

    def release(self) -> None:
        """See `Driver.release`."""
        self._is_last = True
        if self._order is None:
            self._hang_up()

    def wait_for_order(self, seconds: float | None = None) -> int | None:
        """See `Driver.wait_for_order`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while deadline is None or time.monotonic() < deadline:
            with suppress(Empty):
                return self._codes.get(timeout=ORDER_LOOK_S if seconds is None else min(seconds, ORDER_LOOK_S))
            if not self._reader.is_alive():
                with suppress(Empty):
                    return self._codes.get_nowait()
                return self.wait(0)
        return None

    def wait(self, seconds: float | None = None) -> int | None:
        """See `Driver.wait`: the code of the last order, once no other follows."""
        self._reader.join(seconds)
        if self._reader.is_alive():
            return None
        if self._order is not None:
            # What becomes of it, no line has said.
            return -signal.SIGTERM if self._interrupted else SparkFailed.exit_code
        return self._code or 0

    def terminate(self) -> None:
        """See `Driver.terminate`."""
        self._interrupted = True
        self._hang_up()

    def kill(self) -> None:
        """Interrupt what is ordered, and leave after at most `TERMINATE_S`; the server does the rest."""
        if self._reader.is_alive():
            self.terminate()
            self._reader.join(TERMINATE_S)
        self._connection.close()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        # A silence is an OSError, too.
        with suppress(OSError, ValueError):
            for line in self._lines:
                if text := line.rstrip():
                    if (code := code_of(text)) is not None:
                        self._end_order(code)
                        continue
                    self.last_line = text
                    if text == f"roir: {SPARK_IS_UP}":
                        self.is_starting = False
                    self._tell(text)
        if self._order is not None and not self._interrupted:
            self._say_lost()
            self._end_order(SparkFailed.exit_code)

    def _tell(self, line: str) -> None:
        # Whoever reads the command's lines may have gone; the order's end is still to be heard.
        with suppress(OSError):
            self._forward(line)

    def _end_order(self, code: int) -> None:
        self._order = None
        self._code = code
        self._codes.put(code)
        if self._is_last:
            self._hang_up()

    def _say_lost(self) -> None:
        """Say it in the operation, too: no process drives that now."""
        from airflow_roir.engine.database import Database
        from airflow_roir.engine.run import settle_lost
        from airflow_roir.spark.__main__ import order_parser

        self.last_line = f"roir: {LOST}; what is committed stays, and a resume continues"
        self._tell(self.last_line)
        options = order_parser().parse_args(self._order)
        with suppress(Exception):
            settle_lost(Database(self._dsn, "roir"), options.index, options.owner, SparkFailed(LOST))
