"""The build beside its peers and its limit, all on one server, side by side and round by round.

`make bench`, or `python -m benchmarks.bench --rows 6000000 --rounds 5`; `--data uuid` and so on for other tables,
`--pg 15` for pg_repack. It starts a PostgreSQL of its own. Results: benchmarks/results/bench.json, where each data set
and server version keeps its own and its chart, and a table.

Each round times every side once, in an order of its own, after a CHECKPOINT and with nothing of another side's left.
Machines are noisy, and a round takes minutes: the limit is timed again after every few sides, and a ratio is that to
the mean of the limits right before and after. The limit's own is to its median in the round: that is the noise.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from airflow_roir.engine.lifecycle import verify
from benchmarks import peers, sides
from benchmarks.data import DATASETS, ROWS_PER_SCALE
from benchmarks.pictures import of_bench
from benchmarks.scene import INDEX, Result, Scene, Side
from benchmarks.server import bench_server, described, facts

RESULTS = Path(__file__).parent / "results" / "bench.json"
LIMIT = "limit"
# Beside the seconds of a result, that aren't seconds.
COUNTS = ("writes", "pauses")


def measure(scene: Scene, side: Side, check: bool) -> Result:
    """Time one side. check: whether an index of ours is compared with its table afterwards."""
    scene.clear()
    side.ready(scene)
    scene.run("CHECKPOINT")
    result = side.run(scene)
    if check and scene.value("SELECT to_regclass(%s) IS NOT NULL", INDEX):
        report = verify(scene.database, INDEX)
        if not report.is_exact:
            raise SystemExit(f"{side.name}: the index is not exact: {report}")
    return {name: round(value, 3) for name, value in result.items()}


def chosen_sides(scene: Scene, wanted: list[str]) -> tuple[list[Side], dict[str, str]]:
    """The limit and the sides of these names, or that begin so; by title, those that can't run here, and why."""
    every = [*peers.sides(scene), *sides.sides(scene)]
    names = {side.name for side in every}
    meant = {LIMIT} if wanted else names
    for name in wanted:
        fitting = {name} & names or {one for one in names if one.startswith(name)}
        if not fitting:
            raise SystemExit(f"no side is {name!r} or begins so; there are: {'; '.join(side.name for side in every)}")
        meant |= fitting
    found = [side for side in every if side.name in meant]
    lacking = {side.title: why for side in found if (why := side.lacking(scene)) is not None}
    return [side for side in found if side.title not in lacking], lacking


def play(scene: Scene, found: list[Side], chance: random.Random, every: int, check: bool) -> list[dict[str, Any]]:
    """Plays one round in a random order; returns the results in that order. every: the limit is measured after this
    many sides."""
    sides_of_round = chance.sample(found[1:], len(found) - 1)
    told: list[dict[str, Any]] = []

    def take(side: Side) -> None:
        result = measure(scene, side, check)
        print(f"{side.name}: {result}", file=sys.stderr, flush=True)
        told.append({"side": side.name, **result})

    for number, side in enumerate(sides_of_round):
        if number % every == 0:
            take(found[0])
        take(side)
    take(found[0])
    return against_the_limit(told)


def against_the_limit(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A round's results with the seconds of the limit that each is to be held against, as `limit`."""
    limits = [(place, one["all"]) for place, one in enumerate(told) if one["side"] == LIMIT]
    median = statistics.median(seconds for _, seconds in limits)
    for place, one in enumerate(told):
        before = [seconds for at, seconds in limits if at < place][-1:]
        after = [seconds for at, seconds in limits if at > place][:1]
        one["limit"] = median if one["side"] == LIMIT else round(statistics.mean([*before, *after]), 3)
    return told


def summarize(side: Side, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians, and the ratio to the limit."""
    ours = [one for told in rounds for one in told if one["side"] == side.name]
    ratios = [one["all"] / one["limit"] for one in ours]
    return {
        "side": side.name,
        "title": side.title,
        "times": len(ours),
        "median_s": round(statistics.median(one["all"] for one in ours), 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "parts": {
            name: round(statistics.median(one[name] for one in ours), 2)
            for name in ours[0]
            if name not in ("side", "all", "limit")
        },
    }


def table(summaries: list[dict[str, Any]], lacking: dict[str, str]) -> str:
    """Markdown."""
    lines = ["| side | seconds | to the limit | of these seconds, or beside them |", "| --- | --- | --- | --- |"]
    for one in summaries:
        parts = ", ".join(
            f"{value:,.0f} {name}" if name in COUNTS else f"{name} {value:.1f}" for name, value in one["parts"].items()
        )
        spread = f"{one['ratio']:.2f} ({one['ratio_min']:.2f} – {one['ratio_max']:.2f})"
        lines.append(f"| {one['title']} | {one['median_s']:.1f} | {spread} | {parts} |")
    lines += [f"| {title} | – | – | left out: {why} |" for title, why in lacking.items()]
    return "\n".join(lines)


def keep(path: Path, name: str, results: dict[str, Any]) -> None:
    """Writes the results of a data set on a server version beside those of others; a round in a few lines."""
    everything = json.loads(path.read_text()) if path.exists() else {}
    everything[name] = results
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(everything, indent=1, ensure_ascii=False)
    path.write_text(re.sub(r"\n {5,}|\n {4}(?=\})", " ", text) + "\n")


def bench(chosen: argparse.Namespace, name: str) -> None:
    """One data set on a fresh server."""
    rows = chosen.rows or int(chosen.scale * ROWS_PER_SCALE)
    with bench_server(chosen.pg, chosen.shared_buffers) as server:
        data = DATASETS[name]
        scene = Scene(server, data, rows, chosen.parallelism, chosen.writes, dict(chosen.option))
        with scene.session.cursor() as cursor:
            known = facts(cursor)
        heading = f"{data.title}, {scene.rows:,} rows, {chosen.rounds} rounds, seed {chosen.seed}; {described(known)}"
        print(f"\n{heading}\nloaded in {scene.load_s:.0f} s", flush=True)
        found, lacking = chosen_sides(scene, chosen.sides)
        chance = random.Random(chosen.seed)
        rounds: list[list[dict[str, Any]]] = []
        for number in range(chosen.rounds):
            print(f"round {number + 1}", file=sys.stderr, flush=True)
            check = number == 0 and not chosen.no_check
            rounds.append(play(scene, found, chance, chosen.limit_every, check))
            summaries = [summarize(side, rounds) for side in found]
            keep(
                chosen.results,
                f"{name}, PostgreSQL {chosen.pg}",
                {**known, "data": data.title, "rows": scene.rows, "columns": data.columns, "seed": chosen.seed,
                 "parallelism": scene.parallelism, "writes_per_second": scene.writes, "options": scene.options,
                 "session_of_peers": scene.memory(scene.parallelism), "left_out": lacking, "summaries": summaries,
                 "rounds": rounds},
            )  # fmt: skip
        of_bench(chosen.results)
        print(f"\n{table(summaries, lacking)}\n", flush=True)


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value in JSON or as it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="of the table, about; instead of --scale")
    parser.add_argument("--scale", type=float, default=1.0, help="as TPC-H's: 6 million rows each (1)")
    parser.add_argument("--parallelism", type=int, default=2, help="of ours and of the peers (2)")
    parser.add_argument("--sides", "--peers", nargs="+", default=[], metavar="NAME",
                        help='of this name, or that begin so: ours "ours, verified"; the limit always')  # fmt: skip
    parser.add_argument("--data", nargs="+", default=["lineitem"], choices=sorted(DATASETS), metavar="NAME",
                        help=f"{', '.join(sorted(DATASETS))} (lineitem)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-every", type=int, default=4, metavar="N", help="sides between two limits (4)")
    parser.add_argument("--writes", type=int, default=500, metavar="N", help="a writer's updates per second (500)")
    parser.add_argument("--pg", type=int, default=18, choices=(15, 16, 17, 18), help="major version of PostgreSQL (18)")
    parser.add_argument("--shared-buffers", default="1GB")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="NAME=VALUE",
                        help="an option of ours, as `roir build` has it, e.g. batch_rows=50000")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="elsewhere, for a quick look")
    parser.add_argument("--no-check", action="store_true", help="don't verify ours after each side of the first round")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of the sides' order")
    chosen = parser.parse_args()
    for name in chosen.data:
        bench(chosen, name)


if __name__ == "__main__":
    main()
