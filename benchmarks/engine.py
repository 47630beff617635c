"""The engine without Spark: the same workers, as threads of this process. Other benchmarks measure Spark's share."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, clean_up, lifecycle, prepare, seal
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import RoirError
from airflow_roir.options import BuildOptions

# How often a pauser looks at how far the build is.
LOOK_EVERY_S = 0.01


def build_index(database: Database, definition: IndexDefinition, pauses: int = 0, **options: Any) -> dict[str, float]:
    """Builds or rebuilds an index to its publish; returns the seconds of each phase and of `all`.

    pauses: how often the build is paused, evenly over its rows, and continued at once in a new run; the real number is
    returned as `pauses`. options: of `BuildOptions`. The replaced generation is cleaned up afterwards, which isn't
    counted.
    """
    wanted = BuildOptions(revert_window_s=0, **options)
    seconds: dict[str, float] = {}
    begun = last = time.perf_counter()

    def took(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[phase], last = now - last, now

    prepared = prepare.prepare(database, definition, wanted)
    run = start_run(database, prepared.index, "bench", take_over=True)
    took("prepare")
    run, paused = _build(database, run, wanted.parallelism, pauses)
    took("build")
    in_parallel(seal, database, run, wanted.parallelism)
    seal.finish(database, run)
    took("seal")
    lifecycle.run_phases(database, run)
    took("finalize")
    seconds["all"] = time.perf_counter() - begun
    if pauses:
        seconds["pauses"] = paused
    clean_up.clean_up(database)
    return seconds


def in_parallel(phase: Any, database: Database, run: Run, parallelism: int) -> None:
    """A phase's workers, until all of them have left."""

    def work(number: int) -> None:
        for _ in phase.PHASE.work(database, run, number):
            pass

    with ThreadPoolExecutor(max_workers=parallelism) as pool:
        for done in [pool.submit(work, n) for n in range(parallelism)]:
            done.result()


def _build(database: Database, run: Run, parallelism: int, pauses: int) -> tuple[Run, int]:
    """Builds with pauses; returns the run that ended it, and how many pauses came before the last row."""
    for paused in range(pauses):
        if not build_until(database, run, parallelism, (paused + 1) / (pauses + 1)):
            build.finish(database, run)
            return run, paused
        run = start_run(database, run.index, "bench", take_over=True)
    in_parallel(build, database, run, parallelism)
    build.finish(database, run)
    return run, pauses


def build_until(database: Database, run: Run, parallelism: int, share: float) -> bool:
    """Builds until a pause that comes with a share of the rows; False if all were copied before it came."""
    pauser = Pauser(database, run, share)
    pauser.start()
    in_parallel(build, database, run, parallelism)
    pauser.halt.set()
    pauser.join()
    return pauser.has_paused


class Pauser(threading.Thread):
    """Pauses an operation as soon as a share of its rows is committed."""

    def __init__(self, database: Database, run: Run, share: float) -> None:
        super().__init__(daemon=True)
        self.database, self.index, self.share = database, run.index, share
        self.values = {"operation": run.operation_id}
        self.halt = threading.Event()
        self.has_paused = False

    def run(self) -> None:
        with self.database.autocommit() as connection:
            while not self.halt.wait(LOOK_EVERY_S):
                done = execute(
                    connection,
                    "SELECT sum(r.rows) / greatest(max(o.rows_estimate), 1) "
                    "FROM roir.scan_range r JOIN roir.operation o ON o.id = r.operation_id WHERE o.id = %(operation)s",
                    self.values,
                ).scalar_one()
                if float(done) >= self.share:
                    # Meanwhile the workers may have finished, so that the operation refuses the pause.
                    with suppress(RoirError):
                        requests.pause(self.database, self.index, "bench", "to measure")
                        self.has_paused = True
                    return
