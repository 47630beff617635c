"""A Spark that is kept between operations: takes orders at a socket in a folder of the user's, and tells of each.

Who connects hears in one line what Spark this is (`Offer`). Then each line is an order in JSON, a DSN, what the
throttle needs of an environment and arguments as a driver has them, and each is answered as by a driver: line by line,
at last with its exit code. Who leaves before that has interrupted the operation.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.surroundings import QUERY, REPLICAS, Surroundings
from airflow_roir.engine.meanwhile import meanwhile
from airflow_roir.errors import InvalidInput, SparkFailed
from airflow_roir.spark import supervise  # noqa: F401  # imported before the first order
from airflow_roir.spark.__main__ import Job, order_parser, report, say
from airflow_roir.spark.driver_process import ENDED
from airflow_roir.spark.log_file import diverted
from airflow_roir.spark.marks import turn_on
from airflow_roir.spark.options import SparkOptions, is_connect
from airflow_roir.spark.server_socket import LONGEST_PATH, SOCKET, fingerprint, is_trusted, socket_path
from airflow_roir.spark.session import Session, WorkerJob
from airflow_roir.spark.start import SparkStart
from airflow_roir.spark.whole_dsn import SERVICES, VARIABLES
from airflow_roir.spark.worker_metrics import WorkerMetrics

NAME = "roir spark-server"
# How soon a Spark that is gone is noticed.
LOOK_EVERY_S = 1.0
# So long have the open batches of an order that was interrupted; then Spark ends its workers.
BATCHES_S = 3.0
# So long does an end wait for the operations, which are paused; whoever stops a service waits ten seconds.
STOP_S = 8.0
# An order under way is told to be alive this often, by an empty line.
BEAT_EVERY_S = 15.0
STOPPED = "roir spark-server was stopped, which ran this operation's Spark"


@dataclass(frozen=True)
class Offer:
    """What Spark is kept. code: see `fingerprint`; log: the file of Spark's own log."""

    pid: int
    code: str
    master: str | None
    conf: dict[str, str]
    log: str


def serve(options: SparkOptions, log: Path) -> int:
    """Keep a Spark until SIGTERM or Ctrl-C; the exit code, which isn't 0 if Spark ended by itself.

    Says on standard error when it takes orders. Raises InvalidInput if one is kept already, JavaMissing, SparkFailed.
    """
    if is_connect(options.master):
        raise InvalidInput(f"{options.master} is a server already: give it to the commands, by --master")
    for name in (*VARIABLES, *SERVICES, REPLICAS, QUERY):
        # Each order says all of its own database.
        os.environ.pop(name, None)
    signal.signal(signal.SIGTERM, _interrupt)
    with ExitStack() as stack:
        path = stack.enter_context(place())
        voice, spark_log = stack.enter_context(diverted(log))
        turn_on()
        try:
            with SparkStart(options, NAME) as start:
                session = start.session(NAME)
                server = SparkServer(session, options, spark_log.path)
                with server.listening(path):
                    report(f"Spark is kept, for orders at {path}; Spark's own log: {spark_log.path}", voice)
                    while session.is_alive:
                        time.sleep(LOOK_EVERY_S)
                server.hear_out()
                report("Spark has ended by itself: see its log", voice)
                return 1
        except KeyboardInterrupt:
            return 0


class SparkServer:
    """Orders, each in threads of its own, on one session."""

    def __init__(self, spark: Session, options: SparkOptions, log: Path | None) -> None:
        self._spark = spark
        self._offer = Offer(os.getpid(), fingerprint(), options.master, dict(options.conf), str(log or ""))
        self._log = log
        self._stopping = threading.Event()
        self._orders: set[_Order] = set()
        self._lock = threading.Lock()

    @contextmanager
    def listening(self, path: Path) -> Iterator[None]:
        """Take orders at this path while the block runs. An interrupt of the block pauses the operations."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), name="roir-orders", daemon=True).start()
            try:
                yield
            except KeyboardInterrupt:
                path.unlink(missing_ok=True)
                self.leave()
                raise
            finally:
                path.unlink(missing_ok=True)
                # A close alone wakes no one who waits in it.
                listener.shutdown(socket.SHUT_RDWR)

    def hear_out(self) -> None:
        """Spark is gone, as the orders notice and say by themselves."""
        self._wait_until(time.monotonic() + STOP_S)
        self.leave()

    def leave(self) -> None:
        """Let the orders end, their operations paused, at most `STOP_S`."""
        self._stopping.set()
        begun = time.monotonic()
        self._wait_until(begun + BATCHES_S)
        for order in self._open():
            order.interrupt_workers()
        self._wait_until(begun + STOP_S)

    def _wait_until(self, deadline: float) -> None:
        for order in self._open():
            order.wait(max(0.0, deadline - time.monotonic()))

    def _open(self) -> list[_Order]:
        with self._lock:
            return list(self._orders)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(LOOK_EVERY_S)
                    continue
                # It is closed.
                return
            threading.Thread(target=self._attend, args=(connection,), name="roir-caller", daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """Hear a caller out."""
        order: _Order | None = None
        # A caller that dies with lines unread is a broken connection, not an end of lines.
        with connection, suppress(OSError):
            try:
                if not is_trusted(connection):
                    return
                connection.sendall(json.dumps(asdict(self._offer)).encode() + b"\n")
                with connection.makefile("r") as orders:
                    while line := orders.readline():
                        # A caller waits for the end of one before the next.
                        given = json.loads(line)
                        known = Surroundings.of_environment(given["surroundings"])
                        order = _Order(self._spark, connection, given["dsn"], known, given["order"], self._stopping)
                        with self._lock:
                            self._orders.add(order)
                        order.start(self._log, self._forget)
            finally:
                if order is not None:
                    order.abandon()

    def _forget(self, order: _Order) -> None:
        with self._lock:
            self._orders.discard(order)


class _Order:
    """One operation, driven for a caller. Its DSN and its surroundings are in memory alone, and only its own."""

    def __init__(
        self,
        spark: Session,
        connection: socket.socket,
        dsn: str,
        surroundings: Surroundings,
        arguments: list[str],
        stopping: threading.Event,
    ) -> None:
        self._share = _Share(spark)
        self._connection = connection
        self._dsn = dsn
        self._surroundings = surroundings
        self._arguments = arguments
        self._stopping = stopping
        self._abandoned = threading.Event()
        self._ended = threading.Event()

    def start(self, log: Path | None, ended: Callable[[_Order], None]) -> None:
        """Drive it in a thread."""

        def run() -> None:
            try:
                self._run(log)
            except BaseException:
                # Nobody is above.
                traceback.print_exc()
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
            finally:
                self._ended.set()
                ended(self)

        threading.Thread(target=run, name="roir-order", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after at most this long."""
        return self._ended.wait(seconds)

    def abandon(self) -> None:
        """Its caller is gone. Returns when it has ended."""
        self._abandoned.set()
        if not self.wait(BATCHES_S):
            self.interrupt_workers()
            self._ended.wait()

    def interrupt_workers(self) -> None:
        """Let Spark end its workers, without waiting for their batches."""
        self._share.interrupt_all()

    def _run(self, log: Path | None) -> None:
        options = order_parser().parse_args(self._arguments)
        database = Database(self._dsn, f"roir {options.index} driver")
        job = Job(database, options, options.owner, _Up(self._share), self._check, self._surroundings)
        voice: TextIO
        with suppress(OSError), self._connection.makefile("w", buffering=1, errors="backslashreplace") as voice:
            with meanwhile(self._beat, BEAT_EVERY_S, "roir-beat"):
                code = job.run(voice, log)
            say(f"{ENDED}{code}", code, voice)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise KeyboardInterrupt
        if self._stopping.is_set():
            raise SparkFailed(STOPPED)

    def _beat(self) -> None:
        # A caller that doesn't read now hears of it later, or has gone.
        with suppress(OSError):
            self._connection.send(b"\n", socket.MSG_DONTWAIT)


class _Up:
    """See `session.Start`: it is up."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def session(self, name: str) -> Session:
        """The one that there is, whatever its name."""
        return self._session


class _Share(Session):
    """What one order has of the session: it ends no jobs but its own, and never the session."""

    def __init__(self, spark: Session) -> None:
        self._spark = spark
        self._tags: set[str] = set()

    def run(self, number: int, tag: str, description: str, work: WorkerJob) -> list[WorkerMetrics]:
        """See `Session.run`."""
        self._tags.add(tag)
        try:
            return self._spark.run(number, tag, description, work)
        finally:
            self._tags.discard(tag)

    def interrupt(self, tag: str) -> None:
        """See `Session.interrupt`."""
        self._spark.interrupt(tag)

    def interrupt_all(self) -> None:
        """As `interrupt`, for all that run."""
        for tag in list(self._tags):
            self._spark.interrupt(tag)

    @property
    def is_alive(self) -> bool:
        """See `Session.is_alive`."""
        return self._spark.is_alive

    @property
    def pages(self) -> str | None:
        """See `Session.pages`."""
        return self._spark.pages

    @property
    def shared_cores(self) -> int | None:
        """See `Session.shared_cores`."""
        return self._spark.shared_cores

    @property
    def tasks_without_slot(self) -> int | None:
        """See `Session.tasks_without_slot`; of all orders."""
        return self._spark.tasks_without_slot

    def close(self) -> None:
        """The others need it."""


@contextmanager
def place() -> Iterator[Path]:
    """The path of the socket, for this process alone. Raises InvalidInput."""
    path = socket_path()
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise InvalidInput(
            f"a socket's path has at most {LONGEST_PATH} bytes: set {SOCKET} to a shorter one than {path}"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.parent.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InvalidInput(f"others can write to {path.parent}: take a folder that is yours alone, see {SOCKET}")
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 32, 0).decode(errors="replace").strip()
            raise InvalidInput(f"roir spark-server runs already, as process {who}, for {path}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield path
    finally:
        os.close(lock)


def _interrupt(_signal: int, _frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise KeyboardInterrupt
