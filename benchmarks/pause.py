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
import time
from pathlib import Path
from typing import Any

from airflow_roir.options import BuildOptions
from benchmarks.pause_bench import Bench
from benchmarks.pause_switch import pauses_by_switch
from benchmarks.pictures import of_pause
from benchmarks.quantile import quantile
from servers.killable import running_server

RESULTS = Path(__file__).parent / "results"


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
    """Writes the results, each measurement in a line of its own."""
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
            bench.run("TRUNCATE batch")
            by_switch = pauses_by_switch(bench, chosen.airflow)
            switched = [float(row[0]) for row in bench.run("SELECT seconds FROM batch")]
            summaries.append(summary("the DAG's switch", by_switch, switched, 2.0))
            # Kept beside the first part, be it of this run or, with --pauses 0, of an earlier one.
            keep((results if by_sql else earlier()) | {"by_switch": by_switch, "by_switch_summary": summaries[-1]})
        print(table(summaries))


if __name__ == "__main__":
    main()
