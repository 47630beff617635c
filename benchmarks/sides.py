"""Our own sides: the engine at several widths, under a writer, with pauses, as a rebuild, and by the Spark driver."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

from airflow_roir.engine import lifecycle, prepare
from airflow_roir.engine.database import execute
from airflow_roir.options import BuildOptions
from airflow_roir.spark.driver_process import Driver, driver_command, driver_environment, driver_order
from airflow_roir.spark.options import SparkOptions
from benchmarks.engine import build_index
from benchmarks.peers import lacks_java
from benchmarks.scene import INDEX, Result, Scene, Side
from benchmarks.steady_writer import Writer

# The peers verify nothing.
UNVERIFIED: dict[str, Any] = {"verify": "none", "covering": "all"}


def sides(scene: Scene) -> list[Side]:
    """All of them for a data set."""
    width = scene.parallelism
    ours: list[Side] = []
    for writers in (False, True):
        for workers in sorted({1, width, 2 * width}):
            name = f"ours, {_count(workers, 'worker')}" + (", writer" if writers else "")
            title = name.replace(", writer", f", beside {scene.writes:,} updates/s") if writers else name
            ours.append(Side(name, title, partial(_build, workers=workers, writers=writers)))
    ours += [
        Side(
            f"ours, {_count(width, 'worker')}, {_count(pauses, 'pause')}",
            f"ours, {_count(width, 'worker')}, paused and resumed {pauses} times".replace(" 1 times", " once"),
            partial(_build, workers=width, pauses=pauses),
        )
        for pauses in (1, 3)
    ]
    ours.append(
        Side("ours, verified", f"ours, {_count(width, 'worker')}, verified before it is published",
             partial(_build, workers=width, verify="after"))
    )  # fmt: skip
    ours += [
        Side("ours, rebuild", f"ours, {_count(width, 'worker')}, rebuild from the index itself",
             partial(_build, workers=width, scan="index"), partial(_build, workers=width), _lacks_index_scan),
        Side("ours, rebuild by key", f"ours, {_count(width, 'worker')}, rebuild from the table, by key",
             partial(_build, workers=width, scan="key"), partial(_build, workers=width)),
    ]  # fmt: skip
    if scene.data.name == "uuid":
        ours += [
            Side(f"ours, {scan} scan", f"ours, {_count(width, 'worker')}, scan by {scan}",
                 partial(_build, workers=width, scan=scan))
            for scan in ("key", "block")
        ]  # fmt: skip
    ours.append(
        Side("ours spark", f"ours by Spark, local[{width}], without Spark's start and end", by_spark,
             lacking=lambda scene: lacks_java())
    )  # fmt: skip
    return ours


def _lacks_index_scan(scene: Scene) -> str | None:
    return "a partitioned table's index isn't read" if scene.data.name == "partitions" else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _build(scene: Scene, workers: int, writers: bool = False, pauses: int = 0, **options: Any) -> Result:
    """A create where there is no index, else a rebuild."""
    writer = Writer(scene.dsn, scene.data.write(scene.rows), scene.writes) if writers else None
    with writer or nullcontext():
        seconds = build_index(
            scene.database,
            scene.data.definition(INDEX),
            pauses,
            parallelism=workers,
            **{**UNVERIFIED, **scene.options, **options},
        )
    if writer is not None:
        seconds["writes"] = writer.written
    return seconds


def by_spark(scene: Scene) -> Result:
    """The real driver. `startup`: from its start to its first worker's; `shutdown`: from the last one's end to its own.

    Both are left out of `all`.
    """
    options = BuildOptions(parallelism=scene.parallelism, revert_window_s=0, **{**UNVERIFIED, **scene.options})
    begun = time.perf_counter()
    prepared = prepare.prepare(scene.database, scene.data.definition(INDEX), options)
    prepared_s = time.perf_counter() - begun
    lines: list[tuple[float, str]] = []
    driver = Driver(
        driver_command(
            SparkOptions(f"local[{scene.parallelism}]", {"spark.ui.enabled": "false"}),
            driver_order(prepared.index, "bench", take_over=True),
        ),
        driver_environment(scene.dsn),
        lambda line: lines.append((time.perf_counter(), line)),
    )  # fmt: skip
    started = time.perf_counter()
    try:
        at_work = None
        with scene.database.autocommit() as connection:
            # The operation's clock begins to count with its first worker.
            while at_work is None and driver.wait(0.02) is None:
                query = "SELECT ticked_at IS NOT NULL FROM roir.operation WHERE id = %(id)s"
                if execute(connection, query, {"id": prepared.operation_id}).scalar_one():
                    at_work = time.perf_counter()
        code = driver.wait()
        ended = time.perf_counter()
    finally:
        driver.kill()
    sealed = next((at for at, line in lines if "seal: done" in line), None)
    if code or at_work is None or sealed is None:
        raise RuntimeError(f"the driver ended with {code}:\n" + "\n".join(line for _, line in lines))
    lifecycle.finalize(scene.database, INDEX, "bench", take_over=True)
    finalized_s = time.perf_counter() - ended
    return {
        "prepare": prepared_s,
        "build and seal": sealed - at_work,
        "finalize": finalized_s,
        "startup": at_work - started,
        "shutdown": ended - sealed,
        "all": prepared_s + (sealed - at_work) + finalized_s,
    }
