"""How the build's time, WAL, memory and transactions depend on rows, batches and partitions: each curve as a chart.

`make bench-curves`, or `python -m benchmarks.curves --curves batch size horizon waits control plan`. Each starts a
PostgreSQL of its own. Results: benchmarks/results/curves.json, a chart `curve-….svg` each, and tables.

batch: seconds and WAL against the rows per batch, up to one transaction for each range, beside the limit.
size: seconds against rows, the seal beside a parallel CREATE UNIQUE INDEX, and the memory of the workers.
horizon: the longest transaction and the oldest transaction id over the time of a build, beside the limit.
waits: what the sessions of a build and a fold wait for, by phase, and what they read and write.
control: what a batch costs beyond a plain transaction that copies the same rows.
plan: planning of 10,000 ranges over more and more partitions.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import control_cost, plan_cost
from benchmarks.bench import option
from benchmarks.data import DATASETS
from benchmarks.engine import build_index
from benchmarks.peers import index_of_entries, limit
from benchmarks.pictures import of_curves
from benchmarks.scene import INDEX, Scene
from benchmarks.server import bench_server, described, facts
from benchmarks.steady_writer import Writer
from benchmarks.watching import ages, blocks_read, memory
from benchmarks.watching import waits as samples_of_waits

RESULTS = Path(__file__).parent / "results"
BATCHES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
# A batch is as big as it says, however long it takes.
UNTUNED_MS = 600_000
# More than any range has: the whole range is one batch.
ONE_BATCH = 10_000_000
# Few enough that a range holds the greatest batch.
RANGES = 4
Table = list[dict[str, Any]]


@contextmanager
def scene_of(chosen: argparse.Namespace, rows: int) -> Iterator[Scene]:
    """A fresh server whose table has `rows` rows."""
    with bench_server(chosen.pg, chosen.shared_buffers) as server:
        data = DATASETS[chosen.data]
        yield Scene(server, data, rows, chosen.parallelism, chosen.writes, dict(chosen.option))


def known(scene: Scene) -> dict[str, Any]:
    """Facts, for the results."""
    with scene.session.cursor() as cursor:
        return {**facts(cursor), "data": scene.data.title, "parallelism": scene.parallelism, "options": scene.options}


def ours(scene: Scene, **options: Any) -> dict[str, float]:
    """An index from nothing; seconds per phase, and bytes of WAL per row."""
    scene.clear()
    before = scene.value("SELECT pg_current_wal_lsn()")
    seconds = build_index(
        scene.database,
        scene.data.definition(INDEX),
        **{"parallelism": scene.parallelism, "verify": "none", "covering": "all", **scene.options, **options},
    )
    return seconds | {"wal": _wal(scene, before)}


def the_limit(scene: Scene) -> dict[str, float]:
    """As `ours`."""
    scene.clear()
    before = scene.value("SELECT pg_current_wal_lsn()")
    return limit(scene) | {"wal": _wal(scene, before)}


def _wal(scene: Scene, before: str) -> float:
    return float(scene.value("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), %s)", before)) / scene.rows


def batch(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds and WAL per row, by the rows of a batch."""
    with scene_of(chosen, chosen.rows) as scene:
        head = known(scene)
        sizes = [size for size in BATCHES if size <= scene.rows // RANGES] + [ONE_BATCH]
        found: dict[Any, list[dict[str, float]]] = defaultdict(list)
        for _ in range(chosen.rounds):
            found["limit"].append(the_limit(scene))
            for size in sizes:
                found[size].append(ours(scene, batch_rows=size, batch_ms=UNTUNED_MS, ranges=RANGES))
                print(f"batch {size}: {found[size][-1]}", file=sys.stderr, flush=True)
        whole = scene.rows // RANGES
    rows: Table = [
        {
            "batch": f"one per range: {whole:,}" if size == ONE_BATCH else size if size == "limit" else f"{size:,}",
            "rows": whole if size == ONE_BATCH else size,
            "build, s": _median(ones, "build") if size != "limit" else "",
            "all, s": _median(ones, "all"),
            "to the limit": round(
                statistics.median(one["all"] / edge["all"] for one, edge in zip(ones, found["limit"], strict=True)), 2
            ),
            "WAL bytes per row": round(_median(ones, "wal")),
        }
        for size, ones in found.items()
    ]
    return head | {"rows": chosen.rows, "table": [{k: v for k, v in one.items() if k != "rows"} for one in rows]}


def size(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds, and the peak of memory, by the rows of the table."""
    rows: Table = []
    peaks: Table = []
    for count in chosen.sizes:
        with scene_of(chosen, count) as scene:
            head = known(scene)
            built, edge, index = [], [], []
            for _ in range(chosen.rounds):
                edge.append(the_limit(scene))
                built.append(ours(scene))
                scene.clear()
                index.append(index_of_entries(scene, scene.parallelism - 1))
            million = scene.rows / 1e6
            rows.append(
                {
                    "rows": scene.rows,
                    "ours, s": _median(built, "all"),
                    "s per million": round(_median(built, "all") / million, 3),
                    "limit, s": _median(edge, "all"),
                    "limit, s per million": round(_median(edge, "all") / million, 3),
                    "to the limit": round(
                        statistics.median(one["all"] / other["all"] for one, other in zip(built, edge, strict=True)), 2
                    ),
                    "seal, s": _median(built, "seal"),
                    "native index, s": _median(index, "index"),
                    "and vacuum, s": _median(index, "all"),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
            scene.clear()
            peaks.append({"rows": scene.rows, **memory(scene)})
            print(peaks[-1], file=sys.stderr, flush=True)
    return head | {"table": rows, "memory_mb": peaks}


def horizon(chosen: argparse.Namespace) -> dict[str, Any]:
    """Transactions' age over the time of a build under a writer, verified; and over that of the limit."""
    with scene_of(chosen, chosen.rows) as scene:
        head = known(scene)
        samples = {}
        for name, work in (("ours", lambda: ours(scene, verify="after")), ("the limit", lambda: the_limit(scene))):
            with Writer(scene.dsn, scene.data.write(scene.rows), scene.writes), ages(scene.dsn) as sampler:
                work()
            samples[name] = sampler.samples
    rows: Table = []
    for name, found in samples.items():
        for phase in dict.fromkeys(phase for _, (_, _, phase) in found) if name == "ours" else [None]:
            of_phase = [sample for _, sample in found if name != "ours" or sample[2] == phase]
            rows.append(
                {
                    "side": f"{name}, {phase or 'prepare and clean-up'}" if name == "ours" else name,
                    "longest transaction, s": round(max(sample[0] for sample in of_phase), 2),
                    "oldest transaction id's age": max(sample[1] for sample in of_phase),
                }
            )
    return head | {"rows": chosen.rows, "table": rows, "samples": samples}


def waits(chosen: argparse.Namespace) -> dict[str, Any]:
    """Shares of the time of our sessions, by phase, under a writer; and their blocks, in all."""
    with scene_of(chosen, chosen.rows) as scene:
        head = known(scene)
        scene.clear()
        with scene.session.cursor() as cursor:
            cursor.execute("SELECT pg_stat_reset_shared('io')")
            with Writer(scene.dsn, scene.data.write(scene.rows), scene.writes), samples_of_waits(scene.dsn) as sampler:
                ours(scene)
            blocks = blocks_read(cursor)
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for _, sessions in sampler.samples:
        for does, phase in sessions:
            counted[phase][does] += 1
    rows: Table = [
        {"phase": phase, "the sessions": does, "share": f"{count / found.total():.0%}"}
        for phase, found in counted.items()
        for does, count in found.most_common(6)
        if count >= found.total() / 50
    ]
    return head | {"rows": chosen.rows, "table": rows, "blocks": [blocks]}


def control(chosen: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a batch, and of a plain transaction that copies as much."""
    with scene_of(chosen, min(chosen.rows, 1_000_000)) as scene:
        head = known(scene)
        rows = control_cost.measure(scene)
    return head | {"table": rows}


def plan(chosen: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a dry run, by partitions."""
    head, rows = plan_cost.measure(chosen.pg, chosen.shared_buffers, chosen.partitions, chosen.rounds)
    return head | {"table": rows}


CURVES = {one.__name__: one for one in (batch, size, horizon, waits, control, plan)}


def _median(ones: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(one[name] for one in ones), 2)


def markdown(rows: Table) -> str:
    """A table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "| --- " * len(rows[0]) + "|"]
    cells = (
        " | ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()) for row in rows
    )
    return "\n".join([*lines, *(f"| {line} |" for line in cells)])


def keep(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Writes a curve beside the others; a row in a line."""
    folder.mkdir(exist_ok=True)
    path = folder / "curves.json"
    everything = json.loads(path.read_text()) if path.exists() else {}
    text = json.dumps(everything | {name: results}, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\n {4,}|\n {3}(?=[\]}])", " ", text) + "\n")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=list(CURVES), metavar="NAME",
                        help=f"{', '.join(CURVES)} (all)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=6_000_000, help="of batch, horizon and waits (6,000,000)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[n * 1_000_000 for n in (1, 2, 5, 10, 20)],
                        metavar="ROWS", help="of size (1 to 20 million)")  # fmt: skip
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 10, 100, 1000], metavar="N", help="of plan")
    parser.add_argument("--data", default="item", choices=sorted(DATASETS), metavar="NAME",
                        help=f"{', '.join(sorted(DATASETS))} (item)")  # fmt: skip
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writes", type=int, default=500, metavar="N", help="updates per second in horizon (500)")
    parser.add_argument("--pg", type=int, default=18, choices=(15, 16, 17, 18), help="major version of PostgreSQL (18)")
    parser.add_argument("--shared-buffers", default="1GB")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="elsewhere, for a quick look")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE")
    chosen = parser.parse_args()
    for name in chosen.curves:
        results = CURVES[name](chosen)
        keep(chosen.results, name, results)
        of_curves(chosen.results / "curves.json")
        print(f"\n{name}: {results['data']}; {described(results)}\n\n{markdown(results['table'])}\n", flush=True)
        for more in ("memory_mb", "blocks"):
            if more in results:
                print(f"{markdown(results[more])}\n", flush=True)


if __name__ == "__main__":
    main()
