"""A year of writes to three tables, and how their indexes age: with no care, with what is done at night, side by side.

make bench-young
make bench-young ARGS="--days 90 --rows 20000"
make bench-young ARGS="--arms none rebuild rebuild/7 reindex/7"

Each side is a database of its own on one server, which gets the same writes, day by day in turns with the others:
events that are appended by the time and deleted in waves (`event`), updates by Zipf's law that move entries to the end
(`task`), inserts and deletes all over the key with mass deletes of one stretch of it (`stock`). A day ends with what
autovacuum would do, by its own thresholds; then comes the night. An index is measured right after that. In the end each
one is compared with its table. Writes benchmarks/results/young.json and draws its pictures.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import schema
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify.compare import verify
from benchmarks.engine import build_index
from benchmarks.pictures import of_young
from benchmarks.quantile import quantile
from benchmarks.server import BenchServer, bench_server, described, facts
from benchmarks.young_care import Arm, Cost, autovacuum, base_of, can_compact, cost_of
from benchmarks.young_tables import CHURNS, Churn

RESULTS = Path(__file__).parent / "results" / "young.json"
ARMS = ("none", "reindex/7", "vacuum+reindex", "rebuild/7", "rebuild", "compact")
SIZE = "SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits WHERE inhparent = %s::regclass"
# The first ones in a session fill its caches.
WARM_UP = 10
SETTINGS = (
    # The one that does what autovacuum would is the bench; and the writers' commits aren't what is measured.
    "autovacuum = off\nsynchronous_commit = off\n"
    # A session that keeps its statements has one plan for them, on each side.
    "plan_cache_mode = force_generic_plan\n"
)


@dataclass
class Side:
    """One arm's database, what was spent there, and what was measured."""

    arm: Arm
    dsn: str
    churns: list[Churn]
    segments: int
    care: Cost = field(default_factory=Cost)
    vacuum: Cost = field(default_factory=Cost)
    sizes: list[int] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.database = Database(self.dsn, "roir bench")
        schema.init(self.database)
        self.session = psycopg2.connect(self.dsn)
        self.session.autocommit = True
        self.cursor = self.session.cursor()

    def begin(self) -> None:
        """The tables with their rows, and the indexes, just built."""
        for churn in self.churns:
            self.cursor.execute(churn.create)
            churn.load(self.cursor)
            self.cursor.execute(f"VACUUM (ANALYZE) {churn.table}")
            build_index(self.database, churn.definition, parallelism=1, segments=self.segments)

    def day(self, day: int) -> None:
        """What is written, and what autovacuum does then."""
        for churn in self.churns:
            churn.write(self.cursor, day)
        self.vacuum += cost_of(self.cursor, lambda: autovacuum(self.cursor))

    def night(self, day: int) -> None:
        """What this side does at night."""
        if (day + 1) % self.arm.nights == 0:
            for churn in self.churns:
                self.care += cost_of(self.cursor, lambda churn=churn: self.arm.care(self.database, self.cursor, churn))
        self.sizes.append(sum(self.size(churn) for churn in self.churns))

    def size(self, churn: Churn) -> int:
        """Of an index: bytes of its entries and their B-trees."""
        self.cursor.execute(SIZE, (base_of(self.cursor, churn.index),))
        [size] = self.cursor.fetchone()
        return int(size)

    def look(self, day: int, count: int) -> None:
        """Measure sizes and lookups: in a session of its own, as an application has one."""
        row: dict[str, Any] = {"arm": self.arm.name, "day": day + 1, "bytes": self.sizes[-1], "entries": 0}
        taken: list[float] = []
        pages: list[int] = []
        session = psycopg2.connect(self.dsn)
        session.autocommit = True
        with session.cursor() as cursor:
            for churn in self.churns:
                cursor.execute(f"SELECT count(*) FROM {churn.table}")
                [entries] = cursor.fetchone()
                ms, touched = self._lookups(cursor, churn, day, count)
                row["entries"] += entries
                row[churn.table] = {
                    "bytes": self.size(churn), "entries": entries,
                    "p50_ms": round(quantile(ms, 0.5), 4), "p99_ms": round(quantile(ms, 0.99), 4),
                    "pages": round(sum(touched) / len(touched), 2), "pages_p99": quantile(touched, 0.99),
                }  # fmt: skip
                taken += ms
                pages += touched
        session.close()
        row |= {
            "p50_ms": round(quantile(taken, 0.5), 4), "p99_ms": round(quantile(taken, 0.99), 4),
            "pages": round(sum(pages) / len(pages), 2), "pages_p99": quantile(pages, 0.99),
            "care_wal": self.care.wal, "care_files": self.care.files, "care_s": round(self.care.seconds, 2),
            "vacuum_wal": self.vacuum.wal, "vacuum_s": round(self.vacuum.seconds, 2),
        }  # fmt: skip
        self.looks.append(row)

    def _lookups(self, cursor: Any, churn: Churn, day: int, count: int) -> tuple[list[float], list[int]]:
        """Milliseconds of each lookup, and of a part of them the pages that they touch."""
        ms: list[float] = []
        pages: list[int] = []
        for lookup in churn.lookups(cursor, day, count):
            cursor.execute(f"PREPARE {lookup.name} ({lookup.types}) AS {lookup.statement}")
            marks = ", ".join(["%s"] * len(lookup.values[0]))
            statement = f"EXECUTE {lookup.name} ({marks})"
            for n, values in enumerate([*lookup.values[:WARM_UP], *lookup.values]):
                begun = time.perf_counter()
                cursor.execute(statement, values)
                cursor.fetchall()
                if n >= WARM_UP:
                    ms.append((time.perf_counter() - begun) * 1000)
            for values in lookup.values[:: max(1, len(lookup.values) // 100)]:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", values)
                [[found]] = cursor.fetchone()
                pages.append(found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"])
            cursor.execute(f"DEALLOCATE {lookup.name}")
        return ms, pages

    def is_exact(self) -> bool:
        """True if each index has exactly its table's rows."""
        return all(verify(self.database, churn.index).is_exact for churn in self.churns)

    def summary(self) -> dict[str, Any]:
        """Of the year: the mean size after the nights, and the medians of what the looks found."""
        looks = self.looks
        found: dict[str, Any] = {"arm": self.arm.name, "mean_bytes": round(sum(self.sizes) / len(self.sizes))}
        found |= {"most_bytes": max(self.sizes), "last_bytes": self.sizes[-1]}
        for name in ("p50_ms", "p99_ms", "pages", "pages_p99"):
            found[name] = quantile([look[name] for look in looks], 0.5)
        last = looks[-1]
        return found | {name: last[name] for name in last if name.startswith(("care", "vacuum"))}


def table(found: list[dict[str, Any]]) -> str:
    """What the docs show, as Markdown; ratios are to the nightly rebuild, if it is there."""
    mega = 1e6
    base = next((one for one in found if one["arm"] == "rebuild"), None)

    def cell(value: float, name: str, shown: str) -> str:
        return shown if base is None or not base[name] else f"{shown} ({value / base[name]:.2f})"

    lines = [
        "| at night | size, mean, MB | most | p50, ms | p99, ms | pages | p99 | WAL of it, MB | files, MB | minutes "
        "| WAL of vacuums, MB | minutes |",
        "| --- |" + " ---: |" * 11,
    ]
    for one in found:
        cells = [
            one["arm"],
            cell(one["mean_bytes"], "mean_bytes", f"{one['mean_bytes'] / mega:.1f}"),
            f"{one['most_bytes'] / mega:.1f}",
            cell(one["p50_ms"], "p50_ms", f"{one['p50_ms']:.3f}"),
            cell(one["p99_ms"], "p99_ms", f"{one['p99_ms']:.3f}"),
            cell(one["pages"], "pages", f"{one['pages']:.1f}"),
            cell(one["pages_p99"], "pages_p99", f"{one['pages_p99']:.0f}"),
            cell(one["care_wal"], "care_wal", f"{one['care_wal'] / mega:,.0f}"),
            cell(one["care_files"], "care_files", f"{one['care_files'] / mega:,.0f}"),
            f"{one['care_s'] / 60:.1f}",
            f"{one['vacuum_wal'] / mega:,.0f}",
            f"{one['vacuum_s'] / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sides_of(server: BenchServer, chosen: Any) -> list[Side]:
    """The arms' databases, filled."""
    made = []
    for number, arm in enumerate(chosen.arms):
        server.execute(f"CREATE DATABASE young_{number}")
        churns = [churn(chosen.rows, chosen.seed) for churn in CHURNS]
        made.append(Side(arm, server.dsn(f"young_{number}"), churns, chosen.segments))
        made[-1].begin()
    return made


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--rows", type=int, default=50_000, help="of each table, about")
    parser.add_argument("--segments", type=int, default=8, help="of each index, when it is built first")
    parser.add_argument("--arms", type=Arm.parse, nargs="+", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--look-every", type=int, default=7, help="days between two measurements of lookups")
    parser.add_argument("--lookups", type=int, default=300, help="of each kind, in one measurement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared-buffers", default="256MB")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.arms is None:
        chosen.arms = [Arm(name) for name in ARMS if name != "compact" or can_compact()]
    with bench_server(18, chosen.shared_buffers, SETTINGS) as server:
        sides = sides_of(server, chosen)
        known = facts(sides[0].cursor)
        begun = time.perf_counter()
        for day in range(chosen.days):
            # In turns, and another one first each day.
            for side in sides[day % len(sides) :] + sides[: day % len(sides)]:
                side.day(day)
                side.night(day)
                if (day + 1) % chosen.look_every == 0 or day + 1 == chosen.days:
                    side.look(day, chosen.lookups)
            if (day + 1) % 30 == 0:
                sizes = ", ".join(f"{side.arm.name} {side.sizes[-1] / 1e6:.0f} MB" for side in sides)
                print(f"day {day + 1}, {time.perf_counter() - begun:.0f} s: {sizes}", flush=True)
        summaries = [side.summary() for side in sides]
        for side, summary in zip(sides, summaries, strict=True):
            summary["exact"] = side.is_exact()
    print(f"\n{described(known)}\n{chosen.days} days, {chosen.rows:,} rows a table, seed {chosen.seed}\n")
    print(table(summaries))
    asked = {name: getattr(chosen, name) for name in ("days", "rows", "segments", "lookups", "seed")}
    looks = [look for side in sides for look in side.looks]
    sizes = {side.arm.name: side.sizes for side in sides}
    result = {"facts": known, **asked, "arms": summaries, "sizes": sizes, "looks": looks}
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    chosen.results.write_text(json.dumps(result, indent=1) + "\n")
    of_young(chosen.results)
    if wrong := [one["arm"] for one in summaries if not one["exact"]]:
        raise SystemExit(f"not exact: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
