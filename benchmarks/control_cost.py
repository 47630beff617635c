"""What a batch costs beyond its copy: the claim's checks, its last key, the watermark, the operation's row."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

from airflow_roir.definition import BuildOptions
from airflow_roir.engine import abort, control, prepare
from airflow_roir.engine.build import Batch, BuildWorker, Claim
from airflow_roir.engine.run import load_job, start_run
from benchmarks.scene import INDEX, Scene

# Rows per batch, and how many batches of them.
POINTS = {1: 200, 10: 200, 100: 200, 1_000: 100, 10_000: 30, 100_000: 5}


def measure(scene: Scene) -> list[dict[str, Any]]:
    """A row for each size of batch, in milliseconds: medians. Quiet, one worker."""
    rows = []
    for size, count in POINTS.items():
        scene.clear()
        batches = _batches(scene, size, count)
        copies = _copies(scene, size, count)
        rows.append(
            {
                "rows": size,
                "batch, ms": round(batches, 2),
                "copy, ms": round(copies, 2),
                "control, ms": round(batches - copies, 2),
                "control, share": f"{(batches - copies) / batches:.0%}",
            }
        )
    return rows


def _batches(scene: Scene, size: int, count: int) -> float:
    """The first batches of a build, which is then given up."""
    options = BuildOptions(parallelism=1, batch_rows=size, ranges=1, segments=1, **{"covering": "all", **scene.options})
    prepared = prepare.prepare(scene.database, scene.data.definition(INDEX), options)
    run = start_run(scene.database, prepared.index, "bench", take_over=True)
    taken = []
    with scene.database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
            control.start_clock(connection, run.operation_id, run.epoch)
        worker = BuildWorker(connection, job, 0)
        claim: Any = worker.claim()
        while isinstance(claim, Claim) and len(taken) < count:
            begun = time.perf_counter()
            done = worker.batch(claim)
            taken.append((time.perf_counter() - begun) * 1000)
            assert isinstance(done, Batch), done
            claim = done.claim
    abort.abort(scene.database, INDEX, "bench")
    return statistics.median(taken)


def _copies(scene: Scene, size: int, count: int) -> float:
    """The same rows into a table of the same columns, a transaction each, by the key's bounds alone."""
    data = scene.data
    key = ", ".join(data.pk)
    bounds = [None, *_bounds(scene, size, count)]
    scene.run(f"CREATE TABLE peer.entries AS SELECT {data.columns} FROM {data.table} WITH NO DATA")
    taken = []
    with scene.session.cursor() as cursor:
        for low, high in pairwise(bounds):
            where, values = f"({key}) <= %s", [high]
            if low is not None:
                where, values = f"({key}) > %s AND {where}", [low, high]
            begun = time.perf_counter()
            cursor.execute(f"INSERT INTO peer.entries SELECT {data.columns} FROM {data.table} WHERE {where}", values)
            taken.append((time.perf_counter() - begun) * 1000)
    return statistics.median(taken)


def _bounds(scene: Scene, size: int, count: int) -> list[tuple[Any, ...]]:
    """The key of every size-th row."""
    texts = ", ".join(f"{column}::text AS t{n}" for n, column in enumerate(scene.data.pk))
    found = ", ".join(f"t{n}" for n in range(len(scene.data.pk)))
    with scene.session.cursor() as cursor:
        cursor.execute(
            f"SELECT {found} FROM (SELECT {texts}, row_number() OVER (ORDER BY {', '.join(scene.data.pk)}) AS n "
            f"FROM {scene.data.table} ORDER BY {', '.join(scene.data.pk)} LIMIT {size * count}) s WHERE n % {size} = 0"
        )
        return [tuple(row) for row in cursor.fetchall()]
