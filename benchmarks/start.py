"""Where the seconds go from the command to the first row, and after the last one.

`make bench-start`, or `python -m benchmarks.start --cases cli threads resume airflow --rounds 3 --rows 3000000`. It
starts a PostgreSQL of its own, and for `airflow` an Airflow. Results, of each side those of its last run:
benchmarks/results/start.json, and two tables. `--rounds 0` prints them again.

The sides of a round come in an order of its own, Airflow's in another loop after it. A side times the real command, or
the real DAG, on a table without an index, or with a build that was paused at a tenth of its rows by engine threads.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import lacks_java
from benchmarks.scene import Scene
from benchmarks.server import bench_server, described, facts
from benchmarks.start_airflow import in_airflow
from benchmarks.start_bench import DATA, WORKERS, Bench, Result
from benchmarks.start_parts import BESIDE, PARTS, SUMS

RESULTS = Path(__file__).parent / "results" / "start.json"
# In the order of the table's columns.
SIDES = ("build", "build by threads", "resume", "Airflow", "switch")


def summarize(rounds: list[Result]) -> Result:
    """The median of each figure."""
    return {
        kind: {
            name: round(statistics.median(one[kind][name] for one in rounds if name in one[kind]), 2)
            for name in dict.fromkeys(name for one in rounds for name in one[kind])
        }
        for kind in rounds[0]
    }


def table(found: Mapping[str, Result], left: str) -> list[str]:
    """The head of a Markdown table with a column for each side."""
    return [f"| {left} | {' | '.join(found)} |", f"| --- |{' ---: |' * len(found)}"]


def lines(found: Mapping[str, Result], kind: str, titles: Mapping[str, str]) -> list[str]:
    """Its lines, of what some side has."""
    told: list[str] = []
    for name, title in titles.items():
        values = [side[kind].get(name) for side in found.values()]
        if any(value is not None for value in values):
            told.append(f"| {title} | {' | '.join('-' if value is None else f'{value:.1f}' for value in values)} |")
    return told


def report(results: Mapping[str, Any]) -> str:
    """Two tables: the parts and their sums, and the points."""
    found = {side: results[side]["medians"] for side in SIDES if side in results}
    titles = {part.name: part.title + (", the engine's" if part.is_engine else "") for part in PARTS}
    reached = {part.name: part.point for part in PARTS} | BESIDE
    return "\n".join(
        [
            *table(found, "seconds"),
            *lines(found, "parts", titles),
            *lines(found, "sums", {name: f"**{title}**" for name, title in SUMS.items()}),
            "",
            *table(found, "at second"),
            *lines(found, "at", reached),
        ]
    )


def keep(path: Path, side: str, results: dict[str, Any]) -> dict[str, Any]:
    """Writes a side's results beside those of others, a round in a few lines; returns all of them."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[side] = results
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(everything, indent=1)
    path.write_text(re.sub(r"\n {4,}|\n {3}(?=\})", " ", text) + "\n")
    return dict(everything)


def measure(bench: Bench, chosen: argparse.Namespace, known: dict[str, Any]) -> None:
    """All rounds of the chosen cases."""
    chance = random.Random(chosen.seed)
    told: dict[str, list[Result]] = {}

    def take(side: str, result: Result) -> None:
        print(f"{side}: {result['sums']} {result['parts']}", file=sys.stderr, flush=True)
        told.setdefault(side, []).append(result)
        found = {**known, "rows": bench.scene.rows, "medians": summarize(told[side]), "rounds": told[side]}
        keep(chosen.results, side, found)

    commands: dict[str, tuple[str, Callable[[], Result]]] = {
        "cli": ("build", bench.build),
        "threads": ("build by threads", partial(bench.build, "--without-spark")),
        "resume": ("resume", bench.resume),
    }
    sides = [commands[case] for case in commands if case in chosen.cases]
    for _ in range(chosen.rounds):
        for side, run in chance.sample(sides, len(sides)):
            take(side, run())
    if "airflow" in chosen.cases:
        for side, result in in_airflow(bench, chosen.rounds):
            take(side, result)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("cli", "threads", "resume", "airflow")
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=cases)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="elsewhere, for a quick look")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the sides' order")
    chosen = parser.parse_args()
    if chosen.rounds:
        if lacking := lacks_java():
            raise SystemExit(lacking)
        with tempfile.TemporaryDirectory(prefix="roir-bench-") as folder, bench_server(18, "1GB") as server:
            scene = Scene(server, DATA, chosen.rows, WORKERS, 0)
            with scene.session.cursor() as cursor:
                known = facts(cursor)
            print(f"{DATA.title}, {scene.rows:,} rows, seed {chosen.seed}; {described(known)}", flush=True)
            measure(Bench(scene, Path(folder)), chosen, known)
    print(report(json.loads(chosen.results.read_text())))


if __name__ == "__main__":
    main()
