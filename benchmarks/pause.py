"""How soon a pause takes effect, and what it costs: pauses at random moments of a build by the real Spark driver.

`make bench-pause`, or `python -m benchmarks.pause --rows 5000000 --pauses 100 --airflow 8`. It starts a PostgreSQL of
its own, and for the last part an Airflow. Results: benchmarks/results/pause.json and pause.svg, and a table.

Measured from the request (the call of `roir.pause`, or of Airflow's API for the DAG's switch) until the last worker's
session has left the server. Lost: rows that the watermarks claim and the base lacks. Redone: rows that were inserted
and rolled back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, install, prepare
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from benchmarks.pictures import of_pause
from benchmarks.quantile import quantile
from servers.killable import Server, running_server

RESULTS = Path(__file__).parent / "results"
LONGEST_STRETCH_S = 1.5
# So many drivers are waited for to their end, to see how long Spark itself takes to go.
FULL_ENDS = 10
# A JVM that starts with half the work; it isn't what is measured, and the copying is PostgreSQL's.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
PATIENCE_S = 180
WORKERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'roir % worker %'"
COMMITTED = "SELECT coalesce(sum(rows), 0)::bigint FROM roir.scan_range WHERE operation_id = %s"
INSERTED = (
    "SELECT coalesce(sum(pg_stat_get_tuples_inserted(inhrelid)), 0)::bigint FROM pg_inherits "
    "WHERE inhparent = %s::regclass"
)
STATE = "SELECT status, phase FROM roir.operation WHERE id = %s"
# A batch's own duration, as the worker measured it, all but its commit.
RECORD_BATCHES = """
CREATE TABLE batch (seconds numeric);
CREATE FUNCTION record_batch() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO public.batch VALUES (NEW.seconds - OLD.seconds); RETURN NULL; END $$;
CREATE TRIGGER record_batch AFTER UPDATE OF watermark ON roir.scan_range FOR EACH ROW
WHEN (NEW.batches > OLD.batches) EXECUTE FUNCTION record_batch();
"""


class Bench:
    """One table, and operations on it that are paused until enough pauses were measured."""

    def __init__(self, server: Server, rows: int, batch_rows: int, seed: int) -> None:
        self.rows, self.batch_rows = rows, batch_rows
        self.random = random.Random(seed)
        server.execute("CREATE DATABASE bench")
        self.dsn = server.dsn("bench")
        self.server = server
        self.database = Database(self.dsn, "roir bench")
        install.init(self.database)
        self.session = psycopg2.connect(self.dsn)
        self.session.autocommit = True
        self.run(RECORD_BATCHES)
        self.run("CREATE TABLE t (id bigint PRIMARY KEY, k int, a int, b text)")
        columns = "i, (i::bigint * 7919) %% 1000003, i %% 97, md5(i::text)"
        self.run(f"INSERT INTO t SELECT {columns} FROM generate_series(1, %s) i", rows)
        self.run("VACUUM ANALYZE t")
        self.prepared: Any = None
        self.redone_before = 0
        self.measured = 0

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """A statement in the watching session."""
        with self.session.cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def begin(self) -> None:
        """A fresh operation; the last one, unless it is the first, is thrown away."""
        if self.prepared is not None:
            abort.abort(self.database, "ix", "bench")
        options = BuildOptions(parallelism=2, batch_rows=self.batch_rows)
        definition = IndexDefinition.parse("ix", "t", "k", "a, b")
        self.prepared = prepare.prepare(self.database, definition, options, "bench")
        self.redone_before = 0

    def building(self) -> bool:
        """True while there is an operation with something left to copy."""
        if self.prepared is None:
            return False
        ((status, phase),) = self.run(STATE, self.prepared.operation_id)
        return status in ("running", "paused") and phase == "build"

    def pause_driver(self) -> dict[str, Any] | None:
        """Start the driver, pause it at a random moment; None where the build was over before."""
        if not self.building():
            self.begin()
        command = [sys.executable, "-m", "airflow_roir.spark", "--index", "ix", "--owner", "bench", "--take-over"]
        driver = subprocess.Popen(
            [*command, "--master", "local[4]", "--conf", "spark.ui.enabled=false"],
            env={**os.environ, "ROIR_DSN": self.dsn, "JAVA_TOOL_OPTIONS": QUICK_JVM},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.wait_for(lambda: self.run(WORKERS)[0][0] >= 2 or driver.poll() is not None)
            time.sleep(self.random.uniform(0, LONGEST_STRETCH_S))
            if not self.building() or not self.run(WORKERS)[0][0]:
                # It ended first, all of it or what there was to copy: nothing is left that could be paused.
                return None
            begun = time.monotonic()
            self.run("SELECT roir.pause('ix', 'bench')")
            measured = self.stopped(begun)
            if self.measured < FULL_ENDS:
                driver.wait(PATIENCE_S)
                measured["driver_gone_s"] = round(time.monotonic() - begun, 3)
            self.measured += 1
            return measured
        finally:
            # All that was to be seen of it is over: Spark's own leisurely end would double the time of a hundred.
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()

    def stopped(self, begun: float) -> dict[str, Any]:
        """Wait for the last worker's end, and count."""
        self.wait_for(lambda: self.run(WORKERS)[0][0] == 0, every=0.002)
        seconds = time.monotonic() - begun
        table = f"roir_data.g{self.prepared.generation_id}"
        committed = self.run(COMMITTED, self.prepared.operation_id)[0][0]
        kept = self.run(f"SELECT count(*) FROM {table}")[0][0]
        redone = self.run(INSERTED, table)[0][0] - committed
        before, self.redone_before = self.redone_before, redone
        return {
            "seconds": round(seconds, 3),
            "rows": committed,
            "rows_lost": committed - kept,
            "batches_redone": round((redone - before) / self.batch_rows, 2),
        }

    @staticmethod
    def wait_for(condition: Any, every: float = 0.02) -> None:
        """Poll until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("waited in vain")
            time.sleep(every)


def summary(name: str, pauses: list[dict[str, Any]], batches: list[float], allowance_s: float) -> dict[str, Any]:
    """Quantiles of the pauses beside those of the same run's batches."""
    seconds = [pause["seconds"] for pause in pauses]
    goal = quantile(batches, 0.99) + allowance_s
    return {
        "paused_by": name,
        "pauses": len(pauses),
        "p50_s": round(quantile(seconds, 0.5), 3),
        "p99_s": round(quantile(seconds, 0.99), 3),
        "max_s": round(max(seconds), 3),
        "batch_p50_s": round(quantile(batches, 0.5), 3),
        "batch_p99_s": round(quantile(batches, 0.99), 3),
        "goal_s": round(goal, 3),
        "met": quantile(seconds, 0.99) <= goal,
        "rows_lost": sum(pause["rows_lost"] for pause in pauses),
        "most_batches_redone": max(pause["batches_redone"] for pause in pauses),
    }


def table(summaries: list[dict[str, Any]]) -> str:
    """Markdown."""
    columns = list(summaries[0])
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "| --- " * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(one[column]) for column in columns) + " |" for one in summaries)])


def keep(results: dict[str, Any]) -> None:
    """Write the results down, each measurement in a line of its own."""
    text = json.dumps(results, indent=1)
    (RESULTS / "pause.json").write_text(re.sub(r"\n {3,}|\n {2}(?=\})", " ", text) + "\n")


def earlier() -> dict[str, Any]:
    """The results of the run before."""
    path = RESULTS / "pause.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--pauses", type=int, default=100)
    parser.add_argument("--airflow", type=int, default=8, metavar="N", help="pauses by the DAG's switch")
    parser.add_argument("--seconds", type=float, default=7200, help="the first part ends then, with fewer pauses")
    parser.add_argument("--batch-rows", type=int, default=BuildOptions.batch_rows)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    results: dict[str, Any] = {**vars(chosen), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    with running_server() as server:
        bench = Bench(server, chosen.rows, chosen.batch_rows, chosen.seed)
        by_sql: list[dict[str, Any]] = []
        summaries: list[dict[str, Any]] = []
        begun = time.monotonic()
        while len(by_sql) < chosen.pauses and time.monotonic() - begun < chosen.seconds:
            if (measured := bench.pause_driver()) is not None:
                by_sql.append(measured)
                print(len(by_sql), measured, flush=True)
        batches = [float(row[0]) for row in bench.run("SELECT seconds FROM batch")]
        if by_sql:
            summaries.append(summary("select roir.pause(…)", by_sql, batches, 1.0))
            results |= {"load_at_end": os.getloadavg()[0], "summaries": summaries, "by_sql": by_sql}
            keep(results)
            of_pause(RESULTS / "pause.json")
        if chosen.airflow:
            from benchmarks.pause_switch import pauses_by_switch

            bench.run("TRUNCATE batch")
            by_switch = pauses_by_switch(bench, chosen.airflow)
            switched = [float(row[0]) for row in bench.run("SELECT seconds FROM batch")]
            summaries.append(summary("the DAG's switch", by_switch, switched, 2.0))
            # Kept beside the first part, be it of this run or, with --pauses 0, of an earlier one.
            keep((results if by_sql else earlier()) | {"by_switch": by_switch, "by_switch_summary": summaries[-1]})
        print(table(summaries))


if __name__ == "__main__":
    main()
