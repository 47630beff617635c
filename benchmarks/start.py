"""Where the seconds go from the command to the first row, and after the last one.

`make bench-start`, or `python -m benchmarks.start --cases cli resume warm airflow --rounds 3 --rows 3000000`. It starts
a PostgreSQL of its own, for `warm` a Spark that is kept, and for `airflow` an Airflow. Results, of each side those of
its last run: benchmarks/results/start.json, and two tables. `--rounds 0` prints them again.

The sides of a round come in an order of its own, Airflow's in another loop after it. A side times the real command, or
the real DAG, on a table without an index, or with a build that was paused at a tenth of its rows by engine threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from airflow_roir.engine import prepare
from airflow_roir.engine.run import end_run, start_run
from airflow_roir.options import BuildOptions
from airflow_roir.spark import log_file
from airflow_roir.spark.marks import read_marks
from airflow_roir.spark.server_socket import SOCKET
from benchmarks.data import DATASETS
from benchmarks.engine import build_until
from benchmarks.peers import lacks_java
from benchmarks.scene import INDEX, Scene
from benchmarks.server import bench_server, described, facts
from benchmarks.start_parts import BESIDE, PARTS, PREFIX, SUMS, Event, parts, points, statements, sums

RESULTS = Path(__file__).parent / "results" / "start.json"
DATA = DATASETS["item"]
WORKERS = 2
# So much is built when a build is paused that is to be resumed.
PAUSED_AT = 0.1
# The session's name of every command.
COMMAND = "roir cli"
EVENTS = """
SELECT extract(epoch FROM at)::float8, action, coalesce(detail, '') FROM roir.event
 WHERE operation_id = %s ORDER BY at
"""

# In the order of the table's columns.
SIDES = ("build", "resume", "build, warm", "resume, warm", "Airflow", "switch")

Result = dict[str, dict[str, float]]


class Bench:
    """The scene, the settings of what runs on it, and what it leaves to be read. folder: for that."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.logs = folder / "logs"
        self.environment = {
            **os.environ,
            "ROIR_DSN": scene.dsn,
            log_file.FOLDER: str(self.logs),
            # None is kept, unless a side says so.
            SOCKET: str(folder / "none.sock"),
        }
        self._read_from: dict[tuple[Path, int], int] = {}
        for setting in ("log_statement = 'all'", f"log_line_prefix = '{PREFIX}'"):
            scene.server.execute(f"ALTER SYSTEM SET {setting}")
        scene.run("SELECT pg_reload_conf()")

    def begin(self) -> float:
        """What is logged from now on is read; the time."""
        logs = [self.scene.server.log_file, *self.logs.glob("*.log")]
        # By its number too: a log of the same name that is new is read whole.
        self._read_from = {(log, log.stat().st_ino): log.stat().st_size for log in logs}
        return time.time()

    def result(self, begin: float, asking: str | None, building: str | None = None, **known: float) -> Result:
        """Of the newest operation since `begin`. asking, building: see `points`; known: more points."""
        operation = self.operation()
        with self.scene.session.cursor() as cursor:
            cursor.execute(EVENTS, (operation,))
            events = [Event(*row) for row in cursor.fetchall()]
        # Of its own Spark, or of one that is kept.
        logs = (log_file.spark_log(name, self.logs) for name in (operation, "server"))
        marks = read_marks("".join(map(self._new, logs)))
        sent = statements(self._new(self.scene.server.log_file))
        reached = points(begin, sent, events, marks, asking, building)
        reached |= {name: at for name, at in known.items() if at >= begin}
        seconds = parts(begin, reached)
        return {
            "parts": rounded(seconds),
            "sums": rounded(sums(seconds)),
            "at": rounded({name: at - begin for name, at in reached.items()}),
        }

    def operation(self) -> int:
        """The newest build."""
        return int(self.scene.value("SELECT max(id) FROM roir.operation WHERE kind <> 'verify'"))

    def _new(self, log: Path) -> str:
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(self._read_from.get((log, os.fstat(file.fileno()).st_ino), 0))
            return file.read().decode(errors="replace")

    def build(self, environment: Mapping[str, str]) -> Result:
        """`roir build`, to its end."""
        self.scene.clear()
        definition = ("--table", DATA.table, "--keys", ",".join(DATA.key), "--include", ",".join(DATA.include))
        return self._command(environment, "build", INDEX, *definition, "--parallelism", str(WORKERS))

    def resume(self, environment: Mapping[str, str]) -> Result:
        """`roir resume` of a build that was paused, to its end."""
        self.scene.clear()
        database = self.scene.database
        prepared = prepare.prepare(database, DATA.definition(INDEX), BuildOptions(parallelism=WORKERS), "bench")
        run = start_run(database, prepared.index, "bench")
        if not build_until(database, run, WORKERS, PAUSED_AT):
            raise SystemExit("the build was over before its pause: take more --rows")
        end_run(database, run)
        self.scene.run("CHECKPOINT")
        return self._command(environment, "resume", INDEX)

    def _command(self, environment: Mapping[str, str], *arguments: str) -> Result:
        begin = self.begin()
        self._run(environment, *arguments)
        return self.result(begin, COMMAND, ended=time.time())

    def _run(self, environment: Mapping[str, str], *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "airflow_roir.cli", *arguments],
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"roir {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """To milliseconds."""
    return {name: round(value, 3) for name, value in seconds.items()}


@contextmanager
def kept_spark(bench: Bench, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """`roir spark-server`, for as long as the block lasts; the settings with which commands use it."""
    settings = {**environment, SOCKET: str(bench.logs.parent / "kept.sock")}
    server = subprocess.Popen(
        [sys.executable, "-m", "airflow_roir.cli", "spark-server"],
        env={**bench.environment, **settings},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        if "Spark is kept" not in (said := server.stderr.readline()):
            raise SystemExit(f"roir spark-server: {said}")
        yield settings
    finally:
        server.terminate()
        server.wait()


def commands(bench: Bench, chosen: argparse.Namespace, stack: ExitStack) -> dict[str, Callable[[], Result]]:
    """The sides that are commands, by their titles."""
    sides: dict[str, Callable[[], Result]] = {}
    if "cli" in chosen.cases:
        sides["build"] = partial(bench.build, {})
    if "resume" in chosen.cases:
        sides["resume"] = partial(bench.resume, {})
    if "warm" in chosen.cases:
        settings = stack.enter_context(kept_spark(bench, {}))
        # It is kept because it has been used before.
        bench.build(settings)
        sides["build, warm"] = partial(bench.build, settings)
        sides["resume, warm"] = partial(bench.resume, settings)
    return sides


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
    """Write a side's results down beside those of others, a round in a few lines; all of them."""
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

    with ExitStack() as stack:
        sides = commands(bench, chosen, stack)
        for _ in range(chosen.rounds):
            for side in chance.sample(list(sides), len(sides)):
                take(side, sides[side]())
    if "airflow" in chosen.cases:
        from benchmarks.start_airflow import in_airflow

        for side, result in in_airflow(bench, chosen.rounds):
            take(side, result)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = ("cli", "resume", "warm", "airflow")
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
