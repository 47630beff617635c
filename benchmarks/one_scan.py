"""Several indexes of one table: in one scan, side by side in a scan each, and one after the other. All phases count.

make bench-scan
make bench-scan ARGS="--rows 300000 --rounds 1"    # a quick look

Each round builds the same indexes in all three ways, in an order of its own, with as many workers in all. Figures for
each way: seconds to the last publish, seconds to the last batch, and how many times the table's blocks were read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, drop, lifecycle, prepare, seal
from airflow_roir.engine.control.run import Run, heartbeat, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.scan import sharing
from airflow_roir.options import BuildOptions
from benchmarks.data import DATASETS, Dataset
from benchmarks.engine import in_parallel
from benchmarks.scene import Scene
from benchmarks.server import bench_server, described, facts

RESULTS = Path(__file__).parent / "results" / "one_scan.json"
SCAN = "source"
WAYS = ("one scan", "side by side", "one after the other")
READ = "SELECT heap_blks_read + heap_blks_hit FROM pg_statio_user_tables WHERE relid = %s::regclass"


def definitions(data: Dataset, count: int) -> list[IndexDefinition]:
    """Indexes of different columns and widths."""
    columns = [*data.key, *data.include]
    return [
        IndexDefinition.parse(f"public.bench_{n}", data.table, [columns[n % len(columns)]], columns[: n % len(columns)])
        for n in range(count)
    ]


def begin(database: Database, definition: IndexDefinition, **options: Any) -> Run:
    """An operation with a run."""
    wanted = BuildOptions(verify="none", scan=SCAN, **options)
    return start_run(database, prepare.prepare(database, definition, wanted).index, "bench", take_over=True)


def drive(database: Database, run: Run, workers: int, built: list[float]) -> None:
    """Drives an operation to its publish, as a command of its own would."""
    with heartbeat(database, run):
        left = 1
        while left:
            in_parallel(build, database, run, workers)
            with database.transaction() as connection:
                left = build.PHASE.left(connection, run, busy=[]).undone
            # The others' workers have the last ranges.
            time.sleep(0.01 if left else 0)
        build.finish(database, run)
        built.append(time.perf_counter())
        in_parallel(seal, database, run, workers)
        seal.finish(database, run)
        lifecycle.run_phases(database, run)


def measure(scene: Scene, way: str, count: int, workers: int) -> dict[str, float]:
    """Seconds, and how often the table was read."""
    database, found = scene.database, definitions(scene.data, count)
    blocks = scene.value(f"SELECT pg_relation_size('{scene.data.table}') / 8192")
    before, begun, built = scene.value(READ, scene.data.table), time.perf_counter(), list[float]()
    if way == "one after the other":
        for one in found:
            drive(database, begin(database, one, parallelism=workers * count, ranges=16), workers * count, built)
    else:
        own: dict[str, Any] = {} if way == "one scan" else {"ranges": 16}
        runs = [begin(database, one, parallelism=workers, **own) for one in found]
        if way == "one scan":
            with database.transaction() as connection:
                assert len(sharing.others(connection, [run.operation_id for run in runs])) == count
        threads = [threading.Thread(target=drive, args=(database, run, workers, built)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ended = time.perf_counter()
    # A session reports its reads when it ends.
    time.sleep(1.5)
    reads = (scene.value(READ, scene.data.table) - before) / blocks
    for one in found:
        if not verify(database, str(one.name)).is_exact:
            raise SystemExit(f"{way}: {one.name} isn't exact")
    return {"all": ended - begun, "copied": max(built) - begun, "reads": reads}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--indexes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--workers", type=int, default=1, help="of each index")
    parser.add_argument("--data", default="item", choices=sorted(DATASETS))
    parser.add_argument("--scan", default="source", choices=["source", "key", "block"])
    parser.add_argument("--pg", type=int, default=18)
    parser.add_argument("--shared-buffers", default="128MB")
    chosen = parser.parse_args()
    globals()["SCAN"] = chosen.scan
    told: list[dict[str, Any]] = []
    with bench_server(chosen.pg, chosen.shared_buffers) as server:
        scene = Scene(server, DATASETS[chosen.data], chosen.rows, chosen.workers, 0)
        for number in range(chosen.rounds):
            for count in chosen.indexes:
                for way in random.Random(number).sample(WAYS, len(WAYS)):
                    clear(scene, max(chosen.indexes))
                    taken = measure(scene, way, count, chosen.workers)
                    result = {name: round(value, 2) for name, value in taken.items()}
                    print(f"{count} indexes, {way}: {result}", file=sys.stderr, flush=True)
                    told.append({"round": number, "indexes": count, "way": way, **result})
        with scene.session.cursor() as cursor:
            head = {**facts(cursor), "data": scene.data.title, "rows": scene.rows, "scan": chosen.scan}
    print(f"{described(head)}, {scene.rows:,} rows of {scene.data.title}, scan by {chosen.scan}")
    print("| indexes | | seconds | to the last batch | of one scan's time | the table was read |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in chosen.indexes:
        for way in WAYS:
            rows = [row for row in told if (row["indexes"], row["way"]) == (count, way)]
            ratios = [
                row["all"]
                / next(o["all"] for o in told if (o["round"], o["indexes"], o["way"]) == (row["round"], count, WAYS[0]))
                for row in rows
            ]
            seconds, copied, reads = (statistics.median(row[n] for row in rows) for n in ("all", "copied", "reads"))
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {count} | {way} | {seconds:.1f} | {copied:.1f} | {ratio} | {reads:.1f} times |")
    RESULTS.write_text(json.dumps({"facts": head, "rounds": told}, indent=1) + "\n")


def clear(scene: Scene, count: int) -> None:
    """Nothing of another way is left."""
    for one in definitions(scene.data, count):
        if scene.value("SELECT to_regclass(%s) IS NOT NULL", str(one.name)):
            drop.drop_index(scene.database, str(one.name), "bench")
    scene.run(f"VACUUM (ANALYZE) {scene.data.table}", "CHECKPOINT")


if __name__ == "__main__":
    main()
