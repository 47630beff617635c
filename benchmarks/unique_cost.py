"""The cost of a unique build over a plain one, and of a plain one over an earlier commit's, in turns on one server.

`make bench-unique ARGS="--cost 5"`; with `--before FOLDER`, a checkout of another commit (`git worktree add`), the
plain build of that commit is one more side, on a copy of the database. Each build is a process of its own, its workers
are threads. A ratio is that of one round. Results: benchmarks/results/unique-cost.json, and a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psycopg2

from benchmarks.server import BenchServer
from benchmarks.steady_writer import Write
from benchmarks.steady_writer import Writer as SteadyWriter
from benchmarks.unique_table import FACTOR, INDEX, NULL_EVERY, PRIME, Table

HERE = Path(__file__).parent.parent
RESULTS = HERE / "benchmarks" / "results" / "unique-cost.json"
PARTS = ("prepare", "build", "seal", "look", "finalize")
PLAIN, UNIQUE, WITHOUT_EARLY, BEFORE = "plain", "unique", "unique, told by the seal alone", "plain, before"
# The side that each is compared with.
AGAINST = {PLAIN: PLAIN, UNIQUE: PLAIN, WITHOUT_EARLY: PLAIN, BEFORE: PLAIN}


def has_early() -> bool:
    """Whether the build reports duplicates while it copies."""
    return importlib.util.find_spec("airflow_roir.engine.early") is not None


def write_of(table: Table) -> Write:
    """A steady writer's: a name changes, every second time the number as well. No number comes twice."""

    def write(n: int) -> tuple[str, Any]:
        row = n * 104_729 % table.rows + 1
        number = None if row % NULL_EVERY == 0 else row * FACTOR % PRIME + (PRIME * (n + 1) if n % 2 else 0)
        return (
            "UPDATE customer SET name = name || '.', number = CASE WHEN %(move)s THEN %(number)s ELSE number END "
            "WHERE day = %(day)s AND id = %(id)s",
            {"day": table.day(row), "id": row, "number": number, "move": n % 2 == 1},
        )

    return write


def measure(server: BenchServer, table: Table, chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds, and what they come to."""
    connection = psycopg2.connect(server.dsn("bench"))
    connection.autocommit = True
    with connection.cursor() as cursor:
        table.load(cursor)
        cursor.execute("VACUUM (ANALYZE) customer")
    connection.close()
    sides = [PLAIN, UNIQUE, *([WITHOUT_EARLY] if has_early() else [])]
    if chosen.before is not None:
        server.execute("CREATE DATABASE before TEMPLATE bench STRATEGY file_copy")
        sides.append(BEFORE)
    chance = random.Random(chosen.seed)
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(chosen.cost):
        rounds.append({side: build(server, table, side, chosen) for side in chance.sample(sides, len(sides))})
    return {
        "rows": table.rows,
        "partitions": table.partitions,
        "parallelism": chosen.parallelism,
        "writes_per_second": chosen.writes,
        "seed": chosen.seed,
        "sides": [summary(side, rounds) for side in sides],
        "rounds": rounds,
    }


def build(server: BenchServer, table: Table, side: str, chosen: argparse.Namespace) -> dict[str, float]:
    """One build; the seconds of its parts."""
    folder = chosen.before.resolve() if side == BEFORE else HERE
    dsn = server.dsn("before" if side == BEFORE else "bench")
    options = {"batch_rows": chosen.batch_rows, "ranges": chosen.ranges, "segments": chosen.segments}
    order = {"unique": side in (UNIQUE, WITHOUT_EARLY), "early": side == UNIQUE and has_early(), "index": INDEX,
             "parallelism": chosen.parallelism, "options": options}  # fmt: skip
    server.execute("CHECKPOINT")
    with SteadyWriter(dsn, write_of(table), chosen.writes) if chosen.writes else nullcontext():
        said = subprocess.run(
            [sys.executable, "-P", HERE / "benchmarks" / "unique_side.py", json.dumps(order)],
            env={**os.environ, "PYTHONPATH": str(folder), "ROIR_DSN": dsn},
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    seconds: dict[str, float] = {name: round(value, 3) for name, value in json.loads(said).items()}
    print(f"{side}: {seconds}", file=sys.stderr, flush=True)
    return seconds


def summary(side: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians of the parts, and the ratios to the plain build of the same round, with their spread."""

    def ratios(part: str) -> list[float]:
        # The noise of the plain one: to its own median.
        own = statistics.median(one[AGAINST[side]][part] for one in rounds)
        return sorted(
            round(one[side][part] / (own if side == AGAINST[side] else one[AGAINST[side]][part]), 3) for one in rounds
        )

    found = {part: [one[side].get(part, 0.0) for one in rounds] for part in ("all", *PARTS)}
    return {
        "side": side,
        **{part: round(statistics.median(values), 2) for part, values in found.items()},
        **{f"ratio {part}": ratios(part) for part in ("all", "build", "seal")},
    }


def table(sides: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        f"| build | seconds | to the plain one | {' | '.join(PARTS)} | build / plain | seal / plain |",
        "| --- | ---: | --- |" + " ---: |" * len(PARTS) + " --- | --- |",
    ]
    for one in sides:
        of = [
            f"{statistics.median(values):.2f} ({values[0]:.2f} – {values[-1]:.2f})"
            for values in (one[f"ratio {part}"] for part in ("all", "build", "seal"))
        ]
        parts = " | ".join(f"{one[part]:.2f}" if 0 < one[part] < 0.05 else f"{one[part]:.1f}" for part in PARTS)
        lines.append(f"| {one['side']} | {one['all']:.1f} | {of[0]} | {parts} | {of[1]} | {of[2]} |")
    return "\n".join(lines)
