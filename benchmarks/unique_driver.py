"""A driver of an operation and its workers, each a process of its own, so that each can be killed by itself.

`python -m benchmarks.unique_driver INDEX PARALLELISM`, with the DSN in ROIR_DSN, continues the operation to its end.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple
from functools import partial
from typing import Any

from airflow_roir.engine import build, lifecycle, seal
from airflow_roir.engine.control.run import Run, driving, heartbeat, read_control, start_run
from airflow_roir.engine.database import Database
from airflow_roir.errors import Fenced, RoirError
from airflow_roir.operation import Phase, Status

PHASES = {Phase.BUILD: build, Phase.SEAL: seal}
LOOK_EVERY_S = 0.02
WORK = "work"


def early(database: Database, run: Run) -> AbstractContextManager[Any]:
    """The detection of duplicates during the build, where there is one."""
    try:
        detecting = importlib.import_module("airflow_roir.engine.early.detecting").detecting
    except ModuleNotFoundError:
        return nullcontext()
    context: AbstractContextManager[Any] = detecting(database, run)
    return context


def drive(database: Database, index: str, parallelism: int) -> None:
    """Carry the operation to its end, or to a pause. Raises what stops it."""
    run = start_run(database, index, f"driver {os.getpid()}", take_over=True)
    with driving(database, run), heartbeat(database, run):
        for phase, engine in PHASES.items():
            if _control(database, run).phase != phase:
                continue
            with early(database, run) if phase is Phase.BUILD else nullcontext():
                _supervise(database, run, phase, parallelism)
            if _control(database, run).status != Status.RUNNING:
                return
            database.retry(partial(engine.finish, database, run))
        lifecycle.run_phases(database, run)


def _supervise(database: Database, run: Run, phase: Phase, parallelism: int) -> None:
    """Waits until nothing is left to do, or the operation is paused. A worker that dies is started again."""
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while True:
            workers = {number: process for number, process in workers.items() if process.poll() is None}
            row = _control(database, run)
            running = row.status == Status.RUNNING and row.phase == phase

            def left() -> Any:
                with database.transaction() as connection:
                    return PHASES[phase].PHASE.left(connection, run, list(workers))  # noqa: B023

            undone = database.retry(left).undone if running else 0
            if not undone and not workers:
                return
            for number in range(parallelism if undone else 0):
                if number not in workers:
                    order = json.dumps([phase.value, number, astuple(run)])
                    workers[number] = subprocess.Popen([sys.executable, "-m", "benchmarks.unique_driver", WORK, order])
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in workers.values():
            process.kill()


def _control(database: Database, run: Run) -> Any:
    def read() -> Any:
        with database.transaction() as connection:
            return read_control(connection, run)

    return database.retry(read)


def work(database: Database, order: str) -> None:
    """A worker, until nothing is free for it."""
    phase, number, run = json.loads(order)
    for _ in PHASES[Phase(phase)].PHASE.work(database, Run(*run), number):
        pass


def main() -> int:
    """0: done, paused, or another run drives it; 3: paused, for a reason of its own; 1: another error."""
    database = Database(os.environ["ROIR_DSN"], "roir bench")
    first, second = sys.argv[1:3]
    task: Callable[[], None] = (
        (lambda: work(database, second)) if first == WORK else (lambda: drive(database, first, int(second)))
    )
    try:
        task()
    except Fenced:
        return 0
    except RoirError as error:
        if first != WORK:
            print(f"driver: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
