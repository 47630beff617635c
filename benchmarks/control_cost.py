"""The cost of a batch beyond its copy: the claim's checks, its last key, the watermark, the operation's row."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

from airflow_roir.engine import abort, prepare
from airflow_roir.engine.build import BuildWorker, Claim
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.options import BuildOptions
from benchmarks.scene import INDEX, Scene

Key = tuple[str, ...]
# Rows per batch, and how many batches of them.
POINTS = {1: 200, 10: 200, 100: 200, 1_000: 100, 10_000: 30, 100_000: 9}


def measure(scene: Scene) -> list[dict[str, Any]]:
    """A row for each size of batch, in milliseconds: medians. Quiet, one worker."""
    rows = []
    for size, count in POINTS.items():
        scene.clear()
        batch, copy, difference = _alternate(scene, size, count)
        rows.append(
            {
                "rows": size,
                "batch, ms": round(batch, 2),
                "copy, ms": round(copy, 2),
                "control, ms": round(difference, 2),
                "control, share": f"{difference / batch:.0%}",
            }
        )
    return rows


def _alternate(scene: Scene, size: int, count: int) -> tuple[float, float, float]:
    """The first batches of a build, which is then given up, and after each one a plain copy of the same rows.

    Returns the medians in milliseconds of a batch, of a copy, and of what a batch took longer than its copy.
    """
    data = scene.data
    # As many rows as are said, however long they take, and those that the copy has.
    exact = {"covering": "all", "batch_ms": 600_000, "scan": "key"}
    options = BuildOptions(parallelism=1, batch_rows=size, ranges=1, segments=1, **{**scene.options, **exact})
    prepared = prepare.prepare(scene.database, data.definition(INDEX), options)
    run = start_run(scene.database, prepared.index, "bench", take_over=True)
    scene.run(f"CREATE TABLE peer.entries AS SELECT {data.columns} FROM {data.table} WITH NO DATA")
    batches, copies = [], []
    with scene.database.connect() as connection, scene.session.cursor() as cursor:
        with connection.begin():
            job = load_job(connection, run)
            sign_of_life.start_clock(connection, run.operation_id, run.epoch)
        worker = BuildWorker(connection, job, 0)
        claim = worker.claim()
        for low, high in pairwise([None, *_bounds(scene, size, count)]):
            assert isinstance(claim, Claim), claim
            begun = time.perf_counter()
            done = worker.step(claim)
            batches.append((time.perf_counter() - begun) * 1000)
            assert isinstance(done, Step), done
            begun = time.perf_counter()
            cursor.execute(*_copy(scene, low, high))
            copies.append((time.perf_counter() - begun) * 1000)
            claim = done.rest
    abort.abort(scene.database, INDEX, "bench")
    differences = [batch - copy for batch, copy in zip(batches, copies, strict=True)]
    return statistics.median(batches), statistics.median(copies), statistics.median(differences)


def _copy(scene: Scene, low: Key | None, high: Key | None) -> tuple[str, list[Any]]:
    """A transaction of its own that copies the rows after `low` up to `high`, and nothing else."""
    data = scene.data
    key = ", ".join(data.pk)
    where, values = f"({key}) <= %s", [high]
    if low is not None:
        where, values = f"({key}) > %s AND {where}", [low, high]
    return f"INSERT INTO peer.entries SELECT {data.columns} FROM {data.table} WHERE {where}", values


def _bounds(scene: Scene, size: int, count: int) -> list[Key]:
    """The key of every size-th row."""
    texts = ", ".join(f"{column}::text AS t{n}" for n, column in enumerate(scene.data.pk))
    found = ", ".join(f"t{n}" for n in range(len(scene.data.pk)))
    with scene.session.cursor() as cursor:
        cursor.execute(
            f"SELECT {found} FROM (SELECT {texts}, row_number() OVER (ORDER BY {', '.join(scene.data.pk)}) AS n "
            f"FROM {scene.data.table} ORDER BY {', '.join(scene.data.pk)} LIMIT {size * count}) s WHERE n % {size} = 0"
        )
        return [tuple(row) for row in cursor.fetchall()]
