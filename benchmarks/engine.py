"""The engine without Spark: the same workers, as threads of this process. What Spark adds is measured elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import build, cleanup, finalize, prepare, seal
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import start_run


def build_index(database: Database, definition: IndexDefinition, **options: Any) -> dict[str, float]:
    """Build or rebuild an index to its publish; returns the seconds of each phase and of `all`.

    options: of `BuildOptions`. What it replaced is cleaned up afterwards, which isn't counted.
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
    with ThreadPoolExecutor(max_workers=wanted.parallelism) as pool:
        for name, phase in (("build", build), ("seal", seal)):
            for done in [
                pool.submit(lambda n=n, phase=phase: list(phase.work(database, run, n)))
                for n in range(wanted.parallelism)
            ]:
                done.result()
            phase.finish(database, run)
            took(name)
    finalize.finalize_run(database, run)
    took("finalize")
    seconds["all"] = time.perf_counter() - begun
    cleanup.clean_up(database)
    return seconds
