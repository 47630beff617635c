"""The effect of a build on an application and a replica, with and without the governor.

`make bench-governor`, or `make bench-governor ARGS="--rows 2000000 --calm 15"` for a quick look. It starts both
servers: a primary, and a hot standby behind a slow link. Results: benchmarks/results/governor.json, governor-….svg, and
a table.

pgbench runs at 60 % of its capacity all the time, by itself and beside builds in turns: calm, a build without limits,
calm, a build with `--throttle`. The goals are relative to the calm. Latencies are pgbench's own, by the second, from
the moment at which a transaction was due. The lag is computed from both servers' own positions. A build counts from its
first row to its end. Its Spark runs at the lowest priority of the system: it would have a machine of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import abort, drop, install
from airflow_roir.engine.database import Database
from benchmarks.governor_watch import Sample, Watch, lags
from benchmarks.paced_load import PacedLoad, Seconds, over
from benchmarks.pictures import of_governor
from benchmarks.replicated import Primary, caught_up
from benchmarks.server import described, facts
from benchmarks.writers import pgbench
from servers.postgres import programs

RESULTS = Path(__file__).parent / "results" / "governor.json"
ROIR = Path(sys.executable).parent / "roir"
INDEX = "event_by_customer"
PARTITIONS = 8
# A JVM that starts with half the work.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CALM, FREE, GOVERNED = "calm", "build", "build, governed"


@dataclass(frozen=True)
class Stretch:
    """Some time of the run, in seconds of the epoch."""

    side: str
    begin: float
    end: float


class Bench:
    """Both servers with their load running, and what is done beside it."""

    def __init__(self, dsn: str, standby: str, chosen: argparse.Namespace) -> None:
        self.dsn, self.standby, self.chosen = dsn, standby, chosen
        self.database = Database(dsn, "roir bench")
        self._session = psycopg2.connect(dsn)
        self._session.autocommit = True
        self.stretches: list[Stretch] = []
        self.builds: list[dict[str, Any]] = []
        self.calms: list[dict[str, float]] = []

    @property
    def p99(self) -> float:
        """The goal for the p99, in milliseconds."""
        return float(self.chosen.slower * statistics.median(calm["p99_ms"] for calm in self.calms))

    def throttle(self) -> str:
        """The limits, as `roir build --throttle` takes them."""
        commit = self.chosen.slower * statistics.median(calm["commit_ms"] for calm in self.calms)
        return self.chosen.throttle or f"replica_lag={self.chosen.lag}MB commit_latency={commit:.1f}ms"

    def calm(self, watch: Watch, seconds_of: Callable[[], Seconds]) -> None:
        """Lets the standby and the load catch up with what a build has left; then measures the load alone."""
        caught_up(self.dsn, self.standby, 600)
        time.sleep(2)
        while (
            self.calms and over(seconds_of(), time.time() - 4, time.time() - 1)["p50_ms"] > 2 * self.calms[0]["p50_ms"]
        ):
            time.sleep(2)
        begin = time.time()
        time.sleep(self.chosen.calm)
        end = time.time()
        self.stretches.append(Stretch(CALM, begin, end))
        commits = [sample["commit_ms"] for sample in watch.samples if begin <= sample["at"] <= end]
        self.calms.append({**over(seconds_of(), begin, end - 1), "commit_ms": statistics.median(commits)})
        print(CALM, self.calms[-1], flush=True)

    def build(self, watch: Watch, side: str, throttle: str | None) -> None:
        """One build, from its command to its end."""
        chosen = self.chosen
        command = [ROIR, "build", INDEX, "--table", "event", "--keys", "customer", "--include", "amount"]
        command += ["--parallelism", str(chosen.parallelism), "--verify", "none", "--revert-window", "0"]
        if throttle:
            command += ["--throttle", throttle]
        if chosen.segments:
            command += ["--segments", str(chosen.segments)]
        before = len(watch.samples)
        with tempfile.TemporaryFile("w+") as said:
            begun = time.time()
            process = subprocess.Popen(
                [*command, "--master", f"local[{chosen.parallelism}]", "--conf", "spark.ui.enabled=false"],
                env={**os.environ, "ROIR_DSN": self.dsn, "JAVA_TOOL_OPTIONS": QUICK_JVM},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.nice(19),
            )
            try:
                process.wait(chosen.patience)
            except subprocess.TimeoutExpired:
                # The build is judged by the rows that it has copied.
                pass
            finally:
                # It takes its driver with it.
                process.terminate()
                process.wait()
            end = time.time()
            said.seek(0)
            lines = said.read().splitlines()
        in_time = time.time() < begun + chosen.patience
        if process.returncode and in_time:
            raise SystemExit("\n".join([*lines[-30:], f"roir build has ended with {process.returncode}"]))
        mine = watch.samples[before:]
        first = next(sample["at"] for sample in mine if sample.get("rows"))
        watch.last_operation = max(sample.get("id", 0) for sample in mine)
        self.stretches.append(Stretch(side, first, end))
        self.builds.append(
            {"side": side, "throttle": throttle, "command_s": round(end - begun, 1), "build_s": round(end - first, 1)}
            | {"is_finished": process.returncode == 0}
            | self.told(watch.last_operation)
        )
        print(self.builds[-1], flush=True)
        if process.returncode:
            abort.abort(self.database, INDEX, "bench")
        else:
            drop.drop_index(self.database, INDEX, "bench")

    def told(self, operation: int) -> dict[str, Any]:
        """The operation's own record: the seconds that each limit cost, and the samples of the signals."""
        lost = self.sql("SELECT cause, seconds::float FROM roir.throttle_time WHERE operation_id = %s", operation)
        signals = self.sql(
            "SELECT extract(epoch FROM at)::float, granted, readings FROM roir.signal_sample "
            "WHERE operation_id = %s ORDER BY at",
            operation,
        )
        return {
            "lost": {cause: round(seconds, 1) for cause, seconds in lost},
            "signals": [{"at": round(at, 1), "granted": granted, "readings": read} for at, granted, read in signals],
        }

    def facts(self) -> dict[str, Any]:
        """The machine and the primary."""
        with self._session.cursor() as cursor:
            return facts(cursor)

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """A statement in the session of the bench."""
        with self._session.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchall()


def load(dsn: str, rows: int, scale: int, program: Path) -> None:
    """pgbench's tables, and the one that is indexed."""
    subprocess.run([program, "-i", "-q", "-s", str(scale), dsn], check=True, stderr=subprocess.DEVNULL)
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE event (id bigint PRIMARY KEY, customer text, amount int, note text) PARTITION BY RANGE (id)"
        )
        for part in range(PARTITIONS):
            low, high = part * rows // PARTITIONS, (part + 1) * rows // PARTITIONS
            cursor.execute(f"CREATE TABLE event_{part} PARTITION OF event FOR VALUES FROM ({low}) TO ({high})")
        cursor.execute(
            "INSERT INTO event SELECT i, 'customer ' || (i * 7919) %% 1000003, i %% 97, md5(i::text) "
            "FROM generate_series(0::bigint, %s - 1) i",
            (rows,),
        )
        cursor.execute("VACUUM (FREEZE, ANALYZE)")
        cursor.execute("CHECKPOINT")
    connection.close()


def summary(bench: Bench, samples: list[Sample], seconds: Seconds) -> list[dict[str, Any]]:
    """A row for each stretch."""
    rows = []
    builds = iter(bench.builds)
    for stretch in bench.stretches:
        within = [sample for sample in samples if stretch.begin <= sample["at"] <= stretch.end]
        by_second = [
            over({second: taken}, second, second + 1)["p99_ms"]
            for second, taken in seconds.items()
            if stretch.begin <= second and second + 1 <= stretch.end
        ]
        row = {
            "side": stretch.side,
            "seconds": round(stretch.end - stretch.begin, 1),
            **over(seconds, stretch.begin, stretch.end),
            "p99 of a second, median": round(statistics.median(by_second), 2),
            "p99 of a second, worst": max(by_second),
            "commit, ms, median": statistics.median(one["commit_ms"] or 0 for one in within),
            "lag, MB, median": round(statistics.median(one["lag_bytes"] for one in within) / 1e6, 1),
            "lag, MB, most": round(max(one["lag_bytes"] for one in within) / 1e6, 1),
            "lag, s, most": max(one["lag_s"] for one in within),
            "WAL, MB": round((within[-1]["written"] - within[0]["written"]) / 1e6),
        }
        if stretch.side != CALM:
            build = next(builds)
            row |= {"lost, s": build["lost"], "finished": build["is_finished"]}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    return "\n".join(
        [*lines, *("| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows)]
    )


def keep(results: dict[str, Any], path: Path) -> None:
    """Writes the results, each second in a line of its own."""
    text = json.dumps(results, indent=1)
    path.write_text(re.sub(r"\n {3,}|\n {2}(?=[\]}])", " ", text) + "\n")


def timeline(samples: list[Sample], seconds: Seconds, begun: float) -> list[dict[str, Any]]:
    """Each second since the begin: the load, the lag, the operation."""
    found = []
    for sample in samples:
        second = int(sample["at"])
        taken = over({second: seconds.get(second, [])}, second, second + 1)
        kept = {
            name: sample.get(name)
            for name in ("lag_bytes", "lag_s", "commit_ms", "phase", "rows", "granted", "working")
        }
        wal = {"wal_bytes": sample["written"]}
        found.append(
            {"at": round(sample["at"] - begun, 1), **taken, **kept, **wal, "throttled": sample.get("throttled")}
        )
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4_000_000, help="of the table that is indexed")
    parser.add_argument("--scale", type=int, default=10, help="of pgbench: 100,000 accounts each")
    parser.add_argument("--clients", type=int, default=8, help="of pgbench")
    parser.add_argument("--share", type=float, default=0.6, help="of its capacity, at which pgbench runs")
    parser.add_argument("--link", type=float, default=5.0, help="MB/s from the primary to the standby")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--segments", type=int, help="of the index; the plan chooses by default")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calm", type=int, default=20, help="seconds of each stretch without a build")
    parser.add_argument("--sides", nargs="+", choices=("free", "governed"), default=["free", "governed"])
    parser.add_argument("--lag", type=int, default=32, help="MB that the replica may be behind under the governor")
    parser.add_argument(
        "--slower", type=float, default=3.0, help="what p99 may be under the governor, to that of the calm"
    )
    parser.add_argument("--throttle", help="what to ask for instead")
    parser.add_argument("--patience", type=int, default=300, help="the longest that a build may take, in seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pg", type=int, default=18, help="the servers' major version")
    chosen = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A signal to the bench ends its servers, too; a shell lets its background processes ignore SIGINT.
        signal.signal(number, signal.default_int_handler)
    program = pgbench(chosen.pg)
    programs(chosen.pg)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="roir-bench-") as folder:
        primary = Primary(Path(folder), chosen.pg, "1GB")
        primary.start()
        try:
            primary.execute("CREATE DATABASE bench")
            dsn = primary.dsn("bench")
            load(dsn, chosen.rows, chosen.scale, program)
            install.init(Database(dsn, "roir bench"))
            with primary.standby(int(chosen.link * 1e6)) as standby:
                results = measure(dsn, standby, chosen, program)
        finally:
            primary.close()
    RESULTS.parent.mkdir(exist_ok=True)
    asked = {name: value for name, value in vars(chosen).items() if name != "results"}
    keep({**asked, **results, "seconds_in_all": round(time.monotonic() - begun)}, chosen.results)
    of_governor(chosen.results)
    print(results["facts"]["described"])
    print(table(results["table"]))


def measure(dsn: str, standby: str, chosen: argparse.Namespace, program: Path) -> dict[str, Any]:
    """All rounds."""
    bench = Bench(dsn, standby, chosen)
    known = bench.facts()
    application = PacedLoad(program, dsn, chosen.clients)
    # The first run writes every page for the first time since the checkpoint.
    capacity = [application.capacity(seconds) for seconds in (10, 10)][-1]
    rate = chosen.share * capacity
    print(f"loaded; capacity {capacity:.0f} tps, so {rate:.0f}", flush=True)
    with application.running(rate) as log:
        time.sleep(10)
        with Watch(dsn, standby) as watch:
            start = time.time()
            for _ in range(chosen.rounds):
                for side in chosen.sides:
                    bench.calm(watch, log.by_second)
                    if side == "free":
                        bench.build(watch, FREE, None)
                    else:
                        bench.build(watch, GOVERNED, bench.throttle())
            bench.calm(watch, log.by_second)
            time.sleep(3)
        seconds = log.by_second()
    lags(watch.samples)
    return {
        "facts": {**known, "described": described(known)},
        "capacity_tps": round(capacity),
        "rate_tps": round(rate),
        "stretches": [
            {"side": one.side, "begin": round(one.begin - start, 1), "end": round(one.end - start, 1)}
            for one in bench.stretches
        ],
        "builds": bench.builds,
        "asked": {"p99_ms": round(bench.p99, 2), "lag_mb": chosen.lag},
        "table": summary(bench, watch.samples, seconds),
        "seconds": timeline(watch.samples, seconds, start),
    }


if __name__ == "__main__":
    main()
