"""A year of writes to three tables, and how their indexes age: with no care, with what is done at night, side by side.

make bench-young
make bench-young ARGS="--days 90 --arms none rebuild compact"
make bench-young ARGS="--arms none rebuild rebuild/7 reindex/7 vacuum+compact"

Each side is a database of its own on one server, which gets the same writes, day by day in turns with the others:
events that are appended by the time and deleted in waves (`event`), updates by Zipf's law that move entries to the end
(`task`), inserts and deletes all over the key with mass deletes of one stretch of it (`stock`). A day ends with what
autovacuum would do, by its own thresholds; then comes the night. An index is measured right after that, on days that
fall on each day of the week. In the end each one is compared with its table. Writes benchmarks/results/young.json and
draws its pictures.

A rebuild each night is done on the nights that are measured alone, since nothing is left of an index then, and counts
for those that came before; with --all-rebuilds it is done each night.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from benchmarks.engine import build_index
from benchmarks.pictures import of_young
from benchmarks.quantile import quantile
from benchmarks.server import BenchServer, bench_server, described, facts
from benchmarks.young_care import Arm, Cost, autovacuum, base_of, cost_of
from benchmarks.young_tables import CHURNS, Churn

Rows = list[dict[str, Any]]
RESULTS = Path(__file__).parent / "results" / "young.json"
ARMS = ("none", "vacuum", "vacuum+reindex/7", "rebuild", "compact/7", "vacuum+compact/7")
SIZE = "SELECT sum(pg_total_relation_size(inhrelid))::bigint FROM pg_inherits WHERE inhparent = %s::regclass"
# Each lookup counts with the best of this many tries: on a shared machine, the rest is due to others.
TIMES = 3
SETTINGS = (
    # The bench does what autovacuum would. Commits are synchronous: of a row whose commit isn't flushed yet VACUUM
    # doesn't say that all see it.
    "autovacuum = off\n"
    # A session that keeps its statements has one plan for them, on each side.
    "plan_cache_mode = force_generic_plan\n"
)


@dataclass
class Side:
    """One arm's database, what was spent there, and what was measured."""

    arm: Arm
    dsn: str
    churns: list[Churn]
    care: Cost = field(default_factory=Cost)
    vacuum: Cost = field(default_factory=Cost)
    sizes: list[int] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.database = Database(self.dsn, "roir bench")
        self.session = psycopg2.connect(self.dsn)
        self.session.autocommit = True
        self.cursor = self.session.cursor()

    def day(self, day: int, leave_out: bool) -> None:
        """Writes the day's changes, and does autovacuum's work. leave_out: not for the indexes."""
        for churn in self.churns:
            churn.write(self.cursor, day)
        self.vacuum += cost_of(self.cursor, lambda: autovacuum(self.cursor, "roir_data" if leave_out else None))

    def night(self, day: int, stands_for: int = 1) -> None:
        """Does this side's work of a night. stands_for: the number of nights for which it counts; it is the last of
        them."""
        for churn in self.churns:
            for step in self.arm.care(day):
                work = partial(step, self.database, self.cursor, churn)
                self.care += cost_of(self.cursor, work) * stands_for
        self.sizes += [sum(self.size(churn) for churn in self.churns)] * stands_for

    def size(self, churn: Churn) -> int:
        """The bytes of an index's entries and their B-trees."""
        self.cursor.execute(SIZE, (base_of(self.cursor, churn.index),))
        [(size,)] = self.cursor.fetchall()
        return int(size)

    def look(self, day: int, count: int) -> None:
        """Measures sizes and lookups: in a session of its own, as an application has one."""
        row: dict[str, Any] = {"arm": self.arm.name, "day": day + 1, "bytes": self.sizes[-1], "entries": 0}
        taken: list[float] = []
        pages: list[int] = []
        session = psycopg2.connect(self.dsn)
        session.autocommit = True
        with session.cursor() as cursor:
            for churn in self.churns:
                cursor.execute(f"SELECT count(*) FROM {churn.table}")
                [(entries,)] = cursor.fetchall()
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
        """Milliseconds of each lookup, the best of TIMES, and of a part of them the pages that they touch."""
        ms: list[float] = []
        pages: list[int] = []
        for lookup in churn.lookups(cursor, day, count):
            cursor.execute(f"PREPARE {lookup.name} ({lookup.types}) AS {lookup.statement}")
            marks = ", ".join(["%s"] * len(lookup.values[0]))
            statement = f"EXECUTE {lookup.name} ({marks})"
            best = [math.inf] * len(lookup.values)
            for _ in range(TIMES):
                for n, values in enumerate(lookup.values):
                    begun = time.perf_counter()
                    cursor.execute(statement, values)
                    cursor.fetchall()
                    best[n] = min(best[n], (time.perf_counter() - begun) * 1000)
            ms += best
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
        """The figures of the year: the mean size after the nights, and the medians of what the looks found."""
        looks = self.looks
        found: dict[str, Any] = {"arm": self.arm.name, "mean_bytes": round(sum(self.sizes) / len(self.sizes))}
        found |= {"most_bytes": max(self.sizes), "last_bytes": self.sizes[-1]}
        for name in ("p50_ms", "p99_ms", "pages", "pages_p99"):
            found[name] = quantile([look[name] for look in looks], 0.5)
        last = looks[-1]
        return found | {name: last[name] for name in last if name.startswith(("care", "vacuum"))}


def table(found: Rows) -> str:
    """The docs' table, as Markdown; ratios are to the nightly rebuild, if it is there."""
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


def by_index(found: Rows, looks: Rows) -> str:
    """Of each index the mean of what the looks found: MB, and the p99 of a lookup's pages."""
    names = [churn.table for churn in CHURNS]
    lines = [f"| at night | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for one in found:
        of_arm = [look for look in looks if look["arm"] == one["arm"]]
        cells = [
            f"{sum(look[name]['bytes'] for look in of_arm) / len(of_arm) / 1e6:.2f}, "
            f"{sum(look[name]['pages_p99'] for look in of_arm) / len(of_arm):.1f}"
            for name in names
        ]
        lines.append(f"| {one['arm']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sides_of(server: BenchServer, chosen: Any) -> list[Side]:
    """The arms' databases: copies, block by block, of one that is filled."""
    churns = [churn(chosen.rows, chosen.seed, chosen.segments) for churn in CHURNS]
    fill(server.dsn("bench"), churns)
    made = []
    for number, arm in enumerate(chosen.arms):
        server.execute(f"CREATE DATABASE young_{number} TEMPLATE bench")
        made.append(Side(arm, server.dsn(f"young_{number}"), churns))
    return made


def fill(dsn: str, churns: list[Churn]) -> None:
    """The tables with their rows, and the indexes, just built."""
    database = Database(dsn, "roir bench")
    install.init(database)
    session = psycopg2.connect(dsn)
    session.autocommit = True
    with session.cursor() as cursor:
        for churn in churns:
            cursor.execute(churn.create)
            churn.load(cursor)
            cursor.execute(f"VACUUM (ANALYZE) {churn.table}")
            build_index(database, churn.definition, parallelism=1, segments=churn.segments)
    session.close()


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--rows", type=int, default=20_000, help="of each table, about")
    parser.add_argument("--segments", type=int, default=4, help="of each index, when it is built first")
    parser.add_argument("--arms", type=Arm.parse, nargs="+", help=f"default: {' '.join(ARMS)}")
    parser.add_argument("--all-rebuilds", action="store_true", help="do what is done each night each night")
    parser.add_argument("--look-every", type=int, default=30, help="days between two measurements of lookups")
    parser.add_argument("--lookups", type=int, default=200, help="of each kind, in one measurement")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared-buffers", default="256MB")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    chosen.arms = chosen.arms or [Arm.parse(name) for name in ARMS]
    with bench_server(18, chosen.shared_buffers, SETTINGS) as server:
        sides = sides_of(server, chosen)
        known = facts(sides[0].cursor)
        begun = time.perf_counter()
        for day in range(chosen.days):
            # In turns, and another one first each day.
            for side in sides[day % len(sides) :] + sides[: day % len(sides)]:
                is_measured = (day + 1) % chosen.look_every == 0 or day + 1 == chosen.days
                is_short = side.arm.forgets and not chosen.all_rebuilds
                side.day(day, is_short)
                if is_measured or not is_short:
                    side.night(day, day + 1 - len(side.sizes))
                if is_measured:
                    side.look(day, chosen.lookups)
            if (day + 1) % 30 == 0 and all(side.looks for side in sides):
                sizes = ", ".join(f"{one.arm.name} {one.sizes[-1] / 1e6:.0f} MB" for one in sides)
                print(f"day {day + 1}, {time.perf_counter() - begun:.0f} s: {sizes}", flush=True)
                keep(chosen, known, sides)
        exact = {side.arm.name: side.is_exact() for side in sides}
        summaries = keep(chosen, known, sides, exact)
    print(f"\n{described(known)}\n{chosen.days} days, {chosen.rows:,} rows a table, seed {chosen.seed}\n")
    print(table(summaries))
    print(
        f"\nEach index: size in MB, p99 of the pages\n\n{by_index(summaries, [x for one in sides for x in one.looks])}"
    )
    of_young(chosen.results)
    if wrong := [arm for arm, is_right in exact.items() if not is_right]:
        raise SystemExit(f"not exact: {', '.join(wrong)}")


def keep(chosen: Any, known: dict[str, Any], sides: list[Side], exact: dict[str, bool] | None = None) -> Rows:
    """Writes the results so far; returns the arms' summaries. exact: in the end."""
    summaries = [side.summary() | {"exact": exact and exact[side.arm.name]} for side in sides]
    named = ("days", "rows", "segments", "look_every", "lookups", "all_rebuilds", "seed")
    asked = {name: getattr(chosen, name) for name in named}
    looks = [look for side in sides for look in side.looks]
    sizes = {side.arm.name: side.sizes for side in sides}
    result = {"facts": known, **asked, "arms": summaries, "sizes": sizes, "looks": looks}
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    chosen.results.write_text(json.dumps(result, indent=1) + "\n")
    return summaries


if __name__ == "__main__":
    main()
