"""Real Spark servers for the tests, on loopback and free ports: a standalone cluster, and a Spark Connect server.

Every process is a child of this one and is stopped by its id. It knows nothing of pytest, so that others can use it.
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
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

import psutil
import pyspark

BIN = Path(pyspark.__file__).parent / "bin"
# A JVM is up in a few seconds; the rest is for a machine that is busy.
GIVE_UP_S = 300.0
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
# Small: all of it runs on one machine, and tasks do nothing but wait for PostgreSQL.
DAEMON_MEMORY = "256m"
EXECUTOR_SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
}


class Server:
    """A Spark server that runs until `stop`. log: what it has said, line by line."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self.log: list[str] = []
        self._said = threading.Condition()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": DAEMON_MEMORY, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id: the launch script has become the JVM."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._said:
                self.log.append(line.rstrip())
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of a pattern in a line of its log. Raises RuntimeError if the process ends without one."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.log if (match := re.search(pattern, line))), None)

        with self._said:
            self._said.wait_for(lambda: found() or not self._reader.is_alive(), GIVE_UP_S)
            if match := found():
                return match
        raise RuntimeError(f"{pattern!r} is not in the log: " + "\n".join(self.log[-40:]))

    def kill(self) -> None:
        """Ends it as a machine that fails does: at once, without a message."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(GIVE_UP_S)

    def stop(self) -> None:
        """Ends it, and what it has started."""
        children = [] if self._process.poll() is not None else psutil.Process(self.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        for left in psutil.wait_procs(children, timeout=10)[1]:
            left.kill()


@dataclass
class Cluster:
    """A standalone cluster: one master and its workers, with one executor per worker and application."""

    folder: Path
    cores: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: list[Server] = field(default_factory=list)

    def __post_init__(self) -> None:
        command = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        self.master = Server([BIN / "spark-class", *command], self.environment)
        self.url = self.master.wait_for(r"Starting Spark master at (spark://\S+)")[1]

    def add_worker(self) -> Server:
        """Starts one more worker, and returns it once the master knows it."""
        port = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        room = ["--cores", str(self.cores), "--memory", "1g", "--work-dir", str(self.folder / "work")]
        command = ["org.apache.spark.deploy.worker.Worker", *port, *room, self.url]
        worker = Server([BIN / "spark-class", *command], self.environment)
        self.workers.append(worker)
        worker.wait_for("Successfully registered with master")
        return worker

    def executors(self) -> list[psutil.Process]:
        """The executors that run now, of any worker and any application."""
        return [child for worker in self.workers for child in executors_of(worker.pid)]

    def stop(self) -> None:
        """Ends all of it."""
        for server in [*self.workers, self.master]:
            server.stop()


def executors_of(worker_pid: int) -> list[psutil.Process]:
    """The executors (JVMs) that a standalone worker has started, by its process id."""
    try:
        children = psutil.Process(worker_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_executor(child)]


def _is_executor(process: psutil.Process) -> bool:
    try:
        return EXECUTOR in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def ui_of(pid: int) -> str:
    """The address of the UI of the Spark application in this process, or in a child of it, once it answers.

    The first answer takes long on a busy machine. Raises RuntimeError if there is none for GIVE_UP_S.
    """
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        process = psutil.Process(pid)
        for jvm in [process, *process.children(recursive=True)]:
            if jvm.name() != "java":
                continue
            for connection in jvm.net_connections(kind="tcp"):
                address = f"http://127.0.0.1:{connection.laddr.port}"
                if connection.status == psutil.CONN_LISTEN and _is_ui(address):
                    return address
    raise RuntimeError(f"process {pid} has no Spark UI")


def _is_ui(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/v1/applications", timeout=5) as answer:
            return bool(json.load(answer))
    except (OSError, ValueError, HTTPException):
        return False


@contextmanager
def standalone_cluster(
    folder: Path, workers: int = 2, cores: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A master and its workers. environment: what executors get on top, such as PYTHONPATH."""
    cluster = Cluster(folder, cores, environment or {})
    try:
        for _ in range(workers):
            cluster.add_worker()
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def connect_server(
    master: str = "local[4]", settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, str]]:
    """A Spark Connect server and its `sc://` address; it runs its applications on `master`."""
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        **EXECUTOR_SETTINGS,
        **(settings or {}),
    }
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    server_class = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = [BIN / "spark-submit", "--class", server_class, "--master", master, *options, "spark-internal"]
    server = Server(command, {"PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "640m", **(environment or {})})
    try:
        port = server.wait_for(r"Spark Connect server started at: \S*:(\d+)")[1]
        yield server, f"sc://127.0.0.1:{port}"
    finally:
        server.stop()
