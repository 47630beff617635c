"""A process that drives the engine and stops where it is told to, for good or until it is told to go on.

`python -m tests.crash.runner NAME STOP`: NAME is a program below; STOP a regular expression: the process stops
before the first statement, or `COMMIT`, that it matches, prints `stopped: …`, and waits for a line on its standard
input. An empty STOP never stops. A number instead stops before that many statements. The DSN is in ROIR_DSN.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial

from sqlalchemy import event

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, lifecycle, prepare, seal
from airflow_roir.engine.control.run import driving, heartbeat, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import RoirError
from airflow_roir.operation import Status
from airflow_roir.options import BuildOptions
from airflow_roir.spark import task

OPTIONS = BuildOptions(batch_rows=1_000, ranges=8, segments=3)


class Runner:
    """A runner process, as the test sees it."""

    def __init__(self, dsn: str, stop: str, program: str = "operation", prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.crash.runner", program, stop],
            env={**os.environ, "ROIR_DSN": dsn, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stopped(self) -> str:
        """Waits for the stop; returns the statement that it is about to send. Fails if it ended without a stop."""
        said = self._line()
        assert said.startswith("stopped: "), said
        return said.removeprefix("stopped: ")

    def go(self) -> None:
        """Lets it continue to its end."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def ended(self) -> str:
        """Waits for its end; returns `ended: …`, or `failed: …` with the error."""
        said = self._line()
        self.process.wait()
        return said

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class _Stop:
    """Stops the process once. The heartbeat continues, as in a run whose worker is stuck."""

    def __init__(self, stop: str) -> None:
        self._countdown = int(stop) if stop.isdigit() else None
        self._pattern = re.compile(stop, re.DOTALL) if stop and self._countdown is None else None
        self._lock = threading.Lock()

    def before(self, statement: str) -> None:
        if threading.current_thread().name == "roir-heartbeat":
            return
        with self._lock:
            if not self._is_due(statement):
                return
            self._countdown = self._pattern = None
            print("stopped: " + " ".join(statement.split())[:100])
            sys.stdin.readline()

    def _is_due(self, statement: str) -> bool:
        if self._pattern is not None:
            return self._pattern.search(statement) is not None
        if self._countdown is None:
            return False
        self._countdown -= 1
        return self._countdown < 0


def _operation(database: Database) -> str:
    """The whole operation, by one worker and without Spark."""
    prepare.prepare(database, IndexDefinition.parse("ix", "t", "k", "v"), OPTIONS, "runner")
    return _resume(database)


def _resume(database: Database) -> str:
    """Takes the operation over, in whatever phase it is, and carries it to its end."""
    run = start_run(database, "ix", f"runner {os.getpid()}", take_over=True)
    with driving(database, run), heartbeat(database, run):
        for phase, finish in (("build", build.finish), ("seal", seal.finish)):
            for metrics in task.work(database, run, phase, 0):
                if metrics.error:
                    raise RuntimeError(metrics.error)
            database.retry(partial(finish, database, run))
        lifecycle.run_phases(database, run)
    return operation_status(database, run.operation_id).status


PROGRAMS = {"operation": _operation, "resume": _resume}


def main(program: str, stop: str) -> None:
    """See the module."""
    database = Database(os.environ["ROIR_DSN"], "roir runner")
    stops = _Stop(stop)
    event.listen(database.engine, "before_cursor_execute", lambda _c, _cur, sql, *_: stops.before(sql))
    event.listen(database.engine, "commit", lambda _connection: stops.before("COMMIT"))
    try:
        ended = PROGRAMS[program](database)
        print(f"ended: {Status(ended).value}")
    except (RoirError, Exception) as error:
        print(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
