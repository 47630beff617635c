"""Our own sides of `benchmarks.shards`: the build of an index apart, by threads and by Spark."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from airflow_roir.engine import drop
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import NotFound
from benchmarks import peers, sides
from benchmarks.apart import Apart
from benchmarks.apart_index import definition
from benchmarks.apart_peers import Result, Side
from benchmarks.engine import build_index
from benchmarks.scene import INDEX

BY_THREADS, BY_SPARK = "ours, threads", "ours, Spark"


def our_sides(width: int) -> list[Side]:
    """Both of them; neither verifies, since the peers don't."""
    return [
        Side(BY_SPARK, f"ours by Spark, local[{width}], without Spark's start and end", partial(_by_spark, width=width),
             peers.lacks_java),
        Side(BY_THREADS, f"ours, {width} workers without Spark", partial(_by_threads, width=width)),
    ]  # fmt: skip


def clear(scene: Apart) -> None:
    """No index is left."""
    with suppress(NotFound):
        drop.drop_index(scene.database, INDEX, "bench")


def _by_threads(scene: Apart, width: int) -> Result:
    taken = build_index(scene.database, definition(scene, INDEX), parallelism=width, **sides.UNVERIFIED)
    return {"copy": taken.pop("build"), **taken}


def _by_spark(scene: Apart, width: int) -> Result:
    seen: Any = SimpleNamespace(
        dsn=scene.index,
        database=scene.database,
        parallelism=width,
        options={},
        data=SimpleNamespace(definition=lambda name: definition(scene, name)),
    )
    taken = sides.by_spark(seen)
    return {"copy": status(scene.database, INDEX)[0].phase_seconds["build"], **taken}
