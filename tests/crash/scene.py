"""A scene for a crash: a database with an application that writes all the while, and the account of what happened."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest

from airflow_roir.engine.database import Database
from servers.killable import Server
from tests.comparison import compare
from tests.conftest import deadlocks
from tests.crash import gate
from tests.crash.gate import PATIENCE_S, Gate
from tests.engine.steps import session
from tests.engine.writers import Writer

# In the environment of all that was started for a scene, with the scene's name.
MARK = "ROIR_TEST_SCENE"
ROWS = 20_000
BATCH_ROWS = 1_000
ROIR = Path(sys.executable).parent / "roir"
# A JVM that starts with half the work.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
DEFINITION = ("--table", "t", "--keys", "k", "--include", "v")
BUILD = ("build", "ix", *DEFINITION, "--batch-rows", str(BATCH_ROWS), "--ranges", "8", "--segments", "3")
_numbers = itertools.count(1)

# Each commit of a run changes one of these.
PROGRESS = """
SELECT o.status, o.phase, (SELECT sum(batches) FROM roir.scan_range WHERE operation_id = o.id),
       (SELECT string_agg(status, ',' ORDER BY ordinal) FROM roir.segment WHERE generation_id = o.generation_id),
       (SELECT capture_mode FROM roir.generation WHERE id = o.generation_id)
  FROM roir.operation o ORDER BY o.id DESC LIMIT 1
"""
# Inserted and rolled back rows are counted too.
INSERTED = """
SELECT coalesce(sum(pg_stat_get_tuples_inserted(s.inhrelid)), 0),
       (SELECT coalesce(sum(rows), 0) FROM roir.scan_range)
  FROM pg_inherits s WHERE s.inhparent = (SELECT format('roir_data.g%s', max(id))::regclass FROM roir.generation)
"""


class Application(Writer):
    """A writer that opens a new session when the server has dropped its own.

    It leaves a core to processes that start again, such as a whole Airflow.
    """

    rest_s = 0.01

    def run(self) -> None:
        while not self.halt.is_set():
            try:
                super().run()
                if self.error is not None:
                    raise self.error
            except (psycopg2.OperationalError, psycopg2.InterfaceError):
                self.error = None
                self.halt.wait(0.1)
            except BaseException:
                return


class Scene:
    """One database, its application, one kill and the recovery from it. See `killed` and `finished`."""

    def __init__(self, server: Server, rows: int = ROWS, seed: int = 0) -> None:
        self.server = server
        # Its processes are found by it, so no other test process may have the same.
        self.name = f"crash_{os.getpid()}_{next(_numbers)}"
        server.execute(f"CREATE DATABASE {self.name} TEMPLATE roir_template")
        self.dsn = server.dsn(self.name)
        self.database = Database(self.dsn, "crash scene")
        server.execute("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", self.name)
        server.execute(
            f"INSERT INTO t SELECT i, nullif(i % 40, 7)::text, i FROM generate_series(1, {rows}) i", self.name
        )
        server.execute("ANALYZE t", self.name)
        gate.install(self.dsn)
        self.account: dict[str, Any] = {"rows_redone": 0}
        self._sealed: Gate | None = Gate(self.dsn, "sealed")
        self._at_kill: tuple[float, Any] | None = None
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        print(f"seed {seed}")
        self.application = Application(self.dsn, seed, seed % 3, rows + 500)
        self.application.start()

    # --- what the test does

    def gate(self, name: str) -> Gate:
        """A gate, shut from now on."""
        return Gate(self.dsn, name)

    def roir(self, *arguments: str, master: str = "local[4]", dsn: str | None = None) -> subprocess.Popen[str]:
        """The command, as a user starts it; the last line that it prints is the reason where it fails."""
        spark = ("--master", master, "--conf", "spark.ui.enabled=false")
        return subprocess.Popen(
            [ROIR, *arguments, *(spark if arguments[0] in ("build", "resume") else ())],
            env={**os.environ, **self.marked(dsn), "COLUMNS": "200", "JAVA_TOOL_OPTIONS": QUICK_JVM},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A terminal signals a whole group; here only the command shall be hit.
            start_new_session=True,
        )

    def marked(self, dsn: str | None = None) -> dict[str, str]:
        """The environment of what is started for this scene: Spark's processes know no DSN, and inherit the mark."""
        return {"ROIR_DSN": dsn or self.dsn, MARK: self.name}

    def killed(self, what: str, phase: str) -> None:
        """Say what is being killed, right before it is."""
        self.account |= {"killed": what, "phase": phase}
        self._at_kill = (time.monotonic(), self.read(PROGRESS))

    def resume(self, *arguments: str) -> str:
        """Carry on as a user does, to the end; what the command said."""
        carrier = self.roir("resume", "ix", *arguments)
        said, _ = carrier.communicate(timeout=PATIENCE_S)
        assert carrier.returncode == 0, said
        return said

    def finished(self) -> None:
        """The operation is complete, the index exact, under the application and after it; keeps the account."""
        status = self.read("SELECT status FROM roir.operation ORDER BY id DESC LIMIT 1")
        assert status == [("completed",)], self.read("SELECT status, phase, pause_reason, error FROM roir.operation")
        written = self.application.commits
        wait_until(
            lambda: self.application.commits > written + 5 or self.application.error, "writes to the published index"
        )
        compared = [compare(self.database, "ix")]
        self.application.finish()
        compared.append(compare(self.database, "ix"))
        self._over.set()
        self._watcher.join()
        wrong = sum(report.missing + report.extra + report.different for report in compared)
        self.account |= {"rows": compared[-1].rows, "wrong_rows": wrong}
        print(self.account)
        if path := os.environ.get("ROIR_CRASH_RESULTS"):
            with Path(path).open("a") as results:
                results.write(json.dumps(self.account) + "\n")
        assert wrong == 0, compared
        assert "seconds" in self.account, "nothing was committed after the kill"

    def read(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query, in a session of its own."""
        connection = session(self.dsn)
        try:
            with connection.cursor() as cursor:
                cursor.execute(query)
                return cursor.fetchall()
        finally:
            connection.close()

    def processes(self, *names: str) -> list[psutil.Process]:
        """The living processes that were started for this database and have one of `names` in their command line."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (
                    self._started(process)
                    and process.status() != psutil.STATUS_ZOMBIE
                    and set(names) & set(process.cmdline())
                ):
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends everything that was started for this scene."""
        self.application.halt.set()
        self._over.set()
        if self._sealed is not None:
            self._sealed.open()
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if self._started(process) and process.pid != os.getpid():
                    process.kill()
        self._watcher.join()
        self.application.join()
        found = 0
        with suppress(psycopg2.Error):
            found = deadlocks(self.server.dsn(), self.name)
            self.server.execute(f"DROP DATABASE {self.name} WITH (FORCE)")
        assert found == 0, f"{found} deadlocks since the server last recovered (I6)"

    def _started(self, process: psutil.Process) -> bool:
        return process.environ().get(MARK) == self.name

    # --- the account

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            # The server may be the one that was killed.
            with suppress(psycopg2.Error):
                self._count_redone()
                if self._at_kill is not None and "seconds" not in self.account:
                    at, before = self._at_kill
                    if self.read(PROGRESS) != before:
                        self.account["seconds"] = round(time.monotonic() - at, 2)

    def _count_redone(self) -> None:
        if self._sealed is None:
            return
        try:
            waiting = self._sealed.waiting()
        except psycopg2.Error:
            # The server died, and the gate with it; and its statistics, so there is nothing to count.
            self._sealed = None
            return
        if waiting:
            inserted, rows = self.read(INSERTED)[0]
            self.account["rows_redone"] = int(inserted - rows)
            self._sealed.open()
            self._sealed = None


def some(phases: Iterable[str], *always: str) -> list[Any]:
    """Phases as test parameters: those that aren't named belong to the long run."""
    return [phase if phase in always else pytest.param(phase, marks=pytest.mark.by_hand("soak")) for phase in phases]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Polls committed state until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@contextmanager
def a_scene(server: Server, seed: int = 0) -> Iterator[Scene]:
    """A scene that leaves nothing behind."""
    scene = Scene(server, seed=seed)
    try:
        yield scene
    finally:
        scene.close()
