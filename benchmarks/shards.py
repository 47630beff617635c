"""An index over shards: how fast it is built, how far it lags, what strict costs a commit, what a lookup saves.

`make bench-shards`, or `make bench-shards ARGS="--rows 200000 --rounds 1 --seconds 10 --lookups 100"` for a quick look.
Results: benchmarks/results/shards.json, and tables. `--parts lookups` measures some of it, and keeps the other results.

All servers are on this machine, with fsync. Sides take turns, in an order of its own in each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import apart_build, apart_commits, apart_lag, apart_lookups, apart_peers
from benchmarks.apart import apart, connect
from benchmarks.apart_index import add_shards, make_index
from benchmarks.peers import JDBC
from benchmarks.server import described, facts
from servers import contrib

RESULTS = Path(__file__).parent / "results" / "shards.json"
PARTS = ("build", "lag", "commits", "lookups")


def build(chosen: argparse.Namespace) -> dict[str, Any]:
    """From one server to another: rows per second of the copy, and seconds to the finished index."""
    with apart(1, chosen.pg, chosen.shared_buffers) as scene:
        scene.load(chosen.rows)
        add_shards(scene)
        sides = [*apart_build.our_sides(chosen.workers), *apart_peers.sides(chosen.workers, chosen.jar)]
        left_out = {side.name: why for side in sides if (why := side.lacking())}
        told: dict[str, list[apart_peers.Result]] = {side.name: [] for side in sides if side.name not in left_out}
        for number in range(chosen.rounds):
            for side in random.Random(number).sample(sides, len(sides)):
                if side.name in left_out:
                    continue
                apart_peers.clear(scene)
                apart_build.clear(scene)
                taken = side.run(scene)
                say(f"round {number + 1}: {side.name}: {_rounded(taken)}")
                told[side.name].append(taken)
        return {
            "rows": scene.rows,
            "left_out": left_out,
            "sides": [
                {"side": side.name, "title": side.title}
                | {part: round(_median(told[side.name], part), 2) for part in told[side.name][0]}
                | {"rows_per_second": round(scene.rows / _median(told[side.name], "copy"))}
                | {"ratio": round(_ratio(told, side.name), 2)}
                for side in sides
                if side.name in told
            ],
        }


def lag(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """From a shard's commit to a lookup on the index server, at each rate of writes."""
    with apart(chosen.lag_shards, chosen.pg, chosen.shared_buffers, of_one_server=True) as scene:
        scene.load(chosen.rows)
        add_shards(scene)
        make_index(scene)
        found = []
        for every in chosen.every:
            for rate in chosen.rates:
                one = apart_lag.measure(scene, chosen.pg, rate, every, chosen.seconds)
                found.append({"shards": chosen.lag_shards, **one})
                say(str(one))
        return found


def commits(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The time that each way adds to a transaction of one UPDATE."""
    with apart(len(apart_commits.WAYS), chosen.pg, chosen.shared_buffers, of_one_server=True) as scene:
        scene.load(chosen.rows)
        add_shards(scene)
        for number, announced_by in enumerate((None, "server", "client"), start=1):
            make_index(scene, f"public.by_email_{number}", [f"s{number}"], announced_by)
        with apart_lag.shipping(scene):
            return apart_commits.measure(scene, chosen.rounds, chosen.commits)


def lookups(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The same lookup over more and more shards, of which each has its share of the rows and a native index."""
    found: list[dict[str, Any]] = []
    for count in chosen.shards:
        with apart(count, chosen.pg, chosen.shared_buffers, of_one_server=True) as scene:
            scene.load(chosen.rows, "CREATE INDEX ON orders (email)", "VACUUM (ANALYZE) orders")
            add_shards(scene)
            make_index(scene, announced_by="server")
            with apart_lag.shipping(scene):
                found += apart_lookups.measure(scene, chosen.lookups)
        say(str(found[-8:]))
    return found


def tables(results: dict[str, Any]) -> Iterable[str]:
    """The measurements as tables for the docs."""
    if built := results.get("build"):
        yield f"\nBuild, {built['rows']:,} rows from one server to another\n"
        yield "| side | rows/s of the copy | seconds | in ours, with Spark's workers |"
        yield "| --- | --- | --- | --- |"
        for side in built["sides"]:
            yield f"| {side['title']} | {side['rows_per_second']:,} | {side['all']:.1f} | {side['ratio']:.2f} |"
        yield from (f"| {name} | – | – | left out: {why} |" for name, why in built["left_out"].items())
    if lags := results.get("lag"):
        yield "\nLag, from the commit in a shard to the lookup that finds it\n"
        yield "| shards | `--every` | writes/s asked for | writes/s | p50, ms | p99, ms |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for one in lags:
            yield (
                f"| {one['shards']} | {one['every_s']:g} s | {one['wanted_per_second']:,} "
                f"| {one['written_per_second']:,} | {one['p50_ms']:g} | {one['p99_ms']:g} |"
            )
    if costs := results.get("commits"):
        yield "\nA transaction of one UPDATE\n"
        yield "| index | p50, ms | p99, ms | against none | added, ms |\n| --- | --- | --- | --- | --- |"
        for one in costs:
            yield (
                f"| {one['way']} | {one['p50_ms']:.2f} | {one['p99_ms']:.2f} | {one['ratio']:.2f} "
                f"| {one['added_ms']:.2f} |"
            )
    if found := results.get("lookups"):
        yield "\nA lookup, p50 / p99 in ms\n"
        ways = list(dict.fromkeys(one["way"] for one in found))
        yield "| shards | " + " | ".join(ways) + " |\n| --- |" + " --- |" * len(ways)
        for count in dict.fromkeys(one["shards"] for one in found):
            cells = [
                f"{one['p50_ms']:.2f} / {one['p99_ms']:.2f}"
                for way in ways
                for one in found
                if (one["shards"], one["way"]) == (count, way)
            ]
            yield f"| {count} | " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 1000], help="writes per second")
    parser.add_argument("--every", type=float, nargs="+", default=[1, 0.1], help="seconds; of roir ship")
    parser.add_argument("--seconds", type=float, default=60, help="of each rate")
    parser.add_argument("--lag-shards", type=int, default=1)
    parser.add_argument("--commits", type=int, default=1000, help="of each turn")
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--jar", type=Path, default=JDBC, help="PostgreSQL's JDBC driver")
    parser.add_argument("--pg", type=int, help="a version with postgres_fdw; by default one that is here")
    parser.add_argument("--shared-buffers", default="256MB")
    parser.add_argument("--print", action="store_true", dest="only_print", help="only the tables of the last results")
    chosen = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not chosen.only_print:
        chosen.pg = chosen.pg or contrib.ensure(contrib.CELERP)
        with apart(0, chosen.pg, chosen.shared_buffers) as scene, connect(scene.index).cursor() as cursor:
            known = facts(cursor)
        for part in chosen.parts:
            say(part)
            results[part] = globals()[part](chosen)
            results[f"{part}_facts"] = {**known, "described": described(known), "rows": chosen.rows}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for part in PARTS:
        if part in results:
            print(f"{part}: {results[f'{part}_facts']['described']}")
    print("\n".join(tables(results)))


def say(line: str) -> None:
    """How far it is."""
    print(line, file=sys.stderr, flush=True)


def _median(told: list[apart_peers.Result], part: str) -> float:
    return statistics.median(one[part] for one in told)


def _ratio(told: dict[str, list[apart_peers.Result]], side: str) -> float:
    ours = told[apart_build.BY_SPARK if apart_build.BY_SPARK in told else apart_build.BY_THREADS]
    return statistics.median(one["all"] / our["all"] for one, our in zip(told[side], ours, strict=True))


def _rounded(taken: apart_peers.Result) -> dict[str, float]:
    return {part: round(seconds, 2) for part, seconds in taken.items()}


if __name__ == "__main__":
    main()
