"""The cost of an index for writers: pgbench without it, with a native one of the same columns, with ours in each phase.

`make bench-writers`, or `make bench-writers ARGS="--scale 5 --seconds 3 --rounds 1"` for a quick look. It starts a
PostgreSQL of its own. Results: benchmarks/results/writers.json, and a table.

The yardstick is one more native covering index, of the same columns, in the same round: `ratio` is our transactions
per second over its. An index is measured twice: one whose included column changes with each update, and one whose
columns never change. Workloads: `-N` (simple-update) and TPC-B as fast as they go, and `-N` at a fixed rate, where
latencies mean something. `cpu_us` is what the server's sessions computed per transaction: on a busy machine it says
more than tps. In state `build` one worker copies at a pace that lasts for as long as the measurement, in `fold` the
delta's blocks are folded at such a pace.

`--indexes N` gives the table N other indexes beforehand, on columns that never change: the cost of a change of an
indexed column in all of them is part of the yardstick.

`--cases plain unique "unique, stays"` are of a unique column: the yardstick is a native unique index then, ours a plain
one or a unique one. Workload `rekey` gives an account another number.

With `--bulk ROWS` it measures statements that write that number of rows instead: without an index, with a native one,
and with the capture in each mode. With `--parts` it measures the cost of a removed row, by parts, at 1, 8 and 64
segments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import apply_delta, build, drop, fold, install, lifecycle, prepare, seal, switch
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.engine.lifecycle import verify
from airflow_roir.options import BuildOptions
from benchmarks import bulk, removal_parts
from benchmarks.quantile import quantile
from servers.postgres import PACKAGED, programs, start_postgres

RESULTS = Path(__file__).parent / "results" / "writers.json"
STATES = ("none", "native", "capture", "build", "fold", "active")
OURS = STATES[2:]


@dataclass(frozen=True)
class Case:
    """An index that is measured. is_unique: ours; native_is_unique: the yardstick of the same columns."""

    key: str
    include: str | None
    is_unique: bool = False
    native_is_unique: bool = False


# The key never changes but in workload `rekey`; abalance does at each update of an account. `number` is added for the
# latter cases only: unique, in no order.
CASES = {
    "changes": Case("bid", "abalance"),
    "stays": Case("bid", None),
    "plain": Case("number", "abalance", native_is_unique=True),
    "unique": Case("number", "abalance", True, True),
    "unique, stays": Case("number", None, True, True),
}
NUMBER = (
    "ALTER TABLE pgbench_accounts ADD number bigint; UPDATE pgbench_accounts SET number = aid * 7919::bigint % 99999989"
)
REKEY = (
    "\\set aid random(1, 100000 * :scale)\nUPDATE pgbench_accounts SET number = nextval('fresh') WHERE aid = :aid;\n"
)
WORKLOADS = {
    "simple": ["-b", "simple-update"],
    "tpcb": ["-b", "tpcb-like"],
    "paced": ["-b", "simple-update"],
    "rekey": [],
}
# The fixed rate, as a share of the rate without any index.
PACE = 0.4
SETTINGS = """
shared_buffers = 512MB
max_wal_size = 8GB
checkpoint_timeout = 1h
autovacuum_naptime = 10s
"""


def pgbench(version: int) -> Path:
    """The program: the server's own, or the newest of Debian's packages."""
    folders = [programs(version), *sorted(PACKAGED.glob("*/bin"), reverse=True)]
    for folder in folders:
        if (folder / "pgbench").exists():
            return folder / "pgbench"
    raise SystemExit("pgbench is missing; on Debian and Ubuntu: apt-get install postgresql")


class Bench:
    """A server with pgbench's tables, and what was measured on it."""

    def __init__(self, dsn: str, chosen: argparse.Namespace) -> None:
        self.dsn, self.chosen = dsn, chosen
        self.program = pgbench(chosen.pg)
        self.database = Database(dsn, "roir bench")
        install.init(self.database)
        subprocess.run([self.program, "-i", "-q", "-s", str(chosen.scale), dsn], check=True, stderr=subprocess.DEVNULL)
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        for number in range(chosen.indexes):
            self.sql(f"CREATE INDEX other_{number} ON pgbench_accounts (bid, aid)")
        if any(CASES[name].key == "number" for name in chosen.cases):
            self.sql(NUMBER)
            self.sql("CREATE SEQUENCE fresh START 1000000000 CACHE 1000")
            self.sql("VACUUM FULL ANALYZE pgbench_accounts")
        # The id of the postmaster, which knows how long its children have computed.
        self.process = int(self.sql("SELECT pg_read_file('postmaster.pid')")[0].split()[0])
        self.rate: int | None = None
        self.measured: list[dict[str, Any]] = []

    def sql(self, statement: str) -> Any:
        """One statement; its first row."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def run_pgbench(self, folder: str, workload: str, seconds: int) -> list[float]:
        """Milliseconds of each transaction."""
        what = [*WORKLOADS[workload]]
        if workload == "paced" and self.rate:
            what += ["-R", str(self.rate)]
        if workload == "rekey":
            script = Path(folder) / "rekey.sql"
            script.write_text(REKEY)
            what = ["-f", str(script), "-s", str(self.chosen.scale)]
        subprocess.run(
            [
                *(self.program, "-n", "-M", self.chosen.protocol, "-c", str(self.chosen.clients), "-j", "1"),
                *("-T", str(seconds), "-l", "--log-prefix", f"{folder}/log", *what, self.dsn),
            ],
            check=True,
            capture_output=True,
        )
        # Client, number, microseconds, …
        return [
            int(line.split()[2]) / 1000
            for log in Path(folder).glob("log*")
            for line in log.read_text().splitlines()
            if line.split()[2].isdigit()
        ]

    def measure(self, number: int, case: str, state: str) -> None:
        """All workloads in one state."""
        if state not in self.chosen.states:
            return
        self.sql("VACUUM pgbench_accounts")
        self.sql("CHECKPOINT")
        with tempfile.TemporaryDirectory() as folder:
            self.run_pgbench(folder, "simple", max(1, self.chosen.seconds // 5))
        self.wait_for_sessions_to_end()
        for workload in self.chosen.workloads:
            hot, wal = self.written()
            computed = self.computed()
            with tempfile.TemporaryDirectory() as folder:
                taken = self.run_pgbench(folder, workload, self.chosen.seconds)
            self.wait_for_sessions_to_end()
            computed = self.computed() - computed
            hot_after, wal_after = self.written()
            tps = len(taken) / self.chosen.seconds
            if workload == "simple" and state == "none" and self.rate is None:
                self.rate = max(1, int(tps * PACE))
            self.measured.append(
                {
                    "round": number,
                    "case": case,
                    "workload": workload,
                    "state": state,
                    "tps": round(tps, 1),
                    "p50_ms": round(quantile(taken, 0.5), 3),
                    "p99_ms": round(quantile(taken, 0.99), 3),
                    "cpu_us": round(computed * 1e6 / len(taken)),
                    "wal_bytes": round((wal_after - wal) / len(taken)),
                    "hot_share": round((hot_after - hot) / len(taken), 2),
                }
            )
            print(self.measured[-1], file=sys.stderr, flush=True)

    def computed(self) -> float:
        """Seconds of processor time of the sessions that have ended, so far. Linux only: 0 elsewhere."""
        path = Path(f"/proc/{self.process}/stat")
        if not path.exists():
            return 0.0
        user, system = path.read_text().rpartition(")")[2].split()[13:15]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def wait_for_sessions_to_end(self) -> None:
        """Only who has been reaped is counted."""
        while self.sql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgbench'")[0]:
            time.sleep(0.05)
        time.sleep(0.3)

    def written(self) -> tuple[int, int]:
        """HOT updates of accounts, and bytes of WAL, so far."""
        hot, wal = self.sql(
            "SELECT n_tup_hot_upd, pg_current_wal_insert_lsn() - '0/0' FROM pg_stat_user_tables "
            "WHERE relname = 'pgbench_accounts'"
        )
        return int(hot), int(wal)

    def native(self, number: int, case: str) -> None:
        """The yardstick."""
        index = CASES[case]
        unique, include = "UNIQUE" * index.native_is_unique, f" INCLUDE ({index.include})" if index.include else ""
        self.sql(f"CREATE {unique} INDEX yardstick ON pgbench_accounts ({index.key}){include}")
        self.measure(number, case, "native")
        self.sql("DROP INDEX yardstick")

    def ours(self, number: int, case: str) -> None:
        """One operation from prepare to publish, measured on its way."""
        chosen, database = self.chosen, self.database
        accounts = chosen.scale * 100_000
        lasts = (len(chosen.workloads) + 0.5) * chosen.seconds
        definition = IndexDefinition.parse(
            "ours", "pgbench_accounts", CASES[case].key, CASES[case].include, CASES[case].is_unique
        )
        options = BuildOptions(
            parallelism=1,
            batch_rows=min(100_000, max(1000, accounts // 50)),
            segments=chosen.segments,
            # For as long as it is measured: a build at full speed is over before.
            max_rows_per_second=max(1, int(accounts / lasts)) if "build" in chosen.states else None,
            verify="none",
            revert_window_s=0,
        )
        prepared = prepare.prepare(database, definition, options)
        self.measure(number, case, "capture")
        run = start_run(database, prepared.index, "bench", take_over=True)
        with beside(lambda: list(build.PHASE.work(database, run, 0))):
            self.measure(number, case, "build")
        build.finish(database, run)
        list(seal.PHASE.work(database, run, 0))
        seal.finish(database, run)
        switch.switch(database, run)
        halt = threading.Event()
        with beside(lambda: self.fold(run, lasts, halt), halt):
            self.measure(number, case, "fold")
        lifecycle.run_phases(database, run)
        self.measure(number, case, "active")
        report = verify(database, "ours")
        if not report.is_exact:
            raise SystemExit(f"not exact: {report}")
        drop.drop_index(database, "ours", "bench")

    def fold(self, run: Run, lasts: float, halt: threading.Event) -> None:
        """Folds the delta, evenly over `lasts` seconds."""
        with self.database.connect() as connection:
            with connection.begin():
                job = load_job(connection, run)
            worker = apply_delta.Folding(connection, job.generation_id, job.entry)
            blocks = self.sql(f"SELECT pg_relation_size('{physical.delta(job.generation_id)}') / 8192")[0]
            starts = range(0, blocks + 1, fold.BLOCKS_PER_STEP)
            for start in starts:
                with connection.begin():
                    worker.blocks(start, start + fold.BLOCKS_PER_STEP)
                if halt.wait(lasts / len(starts)):
                    return

    def round(self, number: int) -> None:
        """Each state of each case once, the ones without ours first or last by turns."""
        steps: list[Callable[[], None]] = [lambda: self.measure(number, "", "none")]
        for case in self.chosen.cases:
            pair = [lambda case=case: self.native(number, case), lambda case=case: self.ours(number, case)]
            steps += pair if number % 2 == 0 else pair[::-1]
        for step in steps:
            step()


@contextmanager
def beside(work: Callable[[], Any], halt: threading.Event | None = None) -> Iterator[None]:
    """Does it in a thread of its own meanwhile, and waits for its end."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if halt:
            halt.set()
        thread.join()
    if failed:
        raise failed[0]


def summary(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over the rounds, and the median of each round's ratio to its own native index."""

    def one(number: int, case: str, workload: str, state: str) -> dict[str, Any] | None:
        wanted = {"round": number, "case": "" if state == "none" else case, "workload": workload, "state": state}
        return next((row for row in measured if wanted.items() <= row.items()), None)

    rows = []
    numbers = sorted({row["round"] for row in measured})
    cases = sorted({row["case"] for row in measured} - {""})
    for case, workload, state in itertools.product(cases, WORKLOADS, STATES):
        mine = [row for number in numbers if (row := one(number, case, workload, state))]
        if not mine:
            continue
        beside_native = [(row, other) for row in mine if (other := one(row["round"], case, workload, "native"))]
        beside_none = [(row, other) for row in mine if (other := one(row["round"], case, workload, "none"))]
        rows.append(
            {
                "indexed columns": case,
                "workload": workload,
                "state": state,
                **{
                    name: round(statistics.median(row[name] for row in mine), 3)
                    for name in ("tps", "p50_ms", "p99_ms", "cpu_us", "wal_bytes", "hot_share")
                },
                "tps / native": ratio(beside_native, "tps"),
                "tps / none": ratio(beside_none, "tps"),
                "p99 / none": ratio(beside_none, "p99_ms"),
                "cpu / native": ratio(beside_native, "cpu_us"),
            }
        )
    return rows


def ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> float | None:
    """The median over the rounds; None if the other state wasn't measured."""
    return (
        round(statistics.median(row[name] / other[name] for row, other in pairs), 2)
        if all(other[name] for _, other in pairs) and pairs
        else None
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "| --- " * len(rows[0]) + "|"]
    return "\n".join(
        [*lines, *("| " + " | ".join("" if v is None else str(v) for v in row.values()) + " |" for row in rows)]
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=20, help="of pgbench: 100,000 accounts each")
    parser.add_argument("--seconds", type=int, default=6, help="of each workload in each state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--protocol", choices=("simple", "extended", "prepared"), default="simple", help="of pgbench")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["changes", "stays"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["simple", "tpcb", "paced"])
    parser.add_argument("--segments", type=int, help="of ours; the plan chooses by default")
    parser.add_argument("--indexes", type=int, default=0, help="that the table has besides")
    parser.add_argument("--results", type=Path, help="where to write them; by default benchmarks/results/writers.json")
    parser.add_argument("--bulk", type=int, metavar="ROWS", help="measure statements that write so many rows instead")
    parser.add_argument("--unique", action="store_true", help="with --bulk: a unique key")
    parser.add_argument("--parts", action="store_true", help="measure the parts of a removal instead")
    parser.add_argument("--pg", type=int, default=18, help="the server's major version")
    chosen = parser.parse_args()
    begun = time.monotonic()
    asked = {name: value for name, value in vars(chosen).items() if name != "results"}
    facts: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), **asked}
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder:
        server = start_postgres(Path(folder), chosen.pg, settings=SETTINGS)
        try:
            if chosen.bulk:
                rows = bulk.measure(server.get_uri(), chosen.bulk, chosen.rounds, chosen.unique, chosen.segments)
                path = chosen.results or RESULTS.with_name("bulk-unique.json" if chosen.unique else "bulk.json")
            elif chosen.parts:
                rows = removal_parts.measure(server.get_uri(), chosen.rounds)
                path = chosen.results or RESULTS.with_name("removal-parts.json")
            else:
                bench = Bench(server.get_uri(), chosen)
                facts["server"] = bench.sql("SHOW server_version")[0]
                facts["pgbench"] = subprocess.check_output([bench.program, "--version"], text=True).strip()
                for number in range(chosen.rounds):
                    bench.round(number)
                bench.connection.close()
                facts["rounds_measured"] = bench.measured
                rows = summary(bench.measured)
                path = chosen.results or RESULTS
        finally:
            server.cleanup()
    RESULTS.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({**facts, "seconds_in_all": round(time.monotonic() - begun), "results": rows}, indent=1) + "\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
