"""The cost of a verification: beside the build of the same index, quiet and under a writer, by the same two workers.

make bench-verify
make bench-verify ARGS="--rows 500000 --rounds 1"    # a quick look
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import install, lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.options import VerifyOptions
from benchmarks.data import DATASETS
from benchmarks.engine import build_index
from benchmarks.steady_writer import Writer
from servers.postgres import embedded_postgres

RESULTS = Path(__file__).parent / "results" / "verify.json"
DATA = DATASETS["item"]
INDEX = "item_by_part"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--writes", type=int, default=500, help="per second, beside the last verification of a round")
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    with embedded_postgres(fsync="on") as dsn:
        database = Database(dsn, "roir bench")
        install.init(database)
        connection = psycopg2.connect(dsn)
        connection.autocommit = True
        with connection.cursor() as cursor:
            DATA.load(cursor, options.rows)
            cursor.execute("VACUUM (ANALYZE) item")
            cursor.execute("SHOW server_version")
            version = cursor.fetchone()[0]
            for _ in range(options.rounds):
                built = build_index(database, DATA.definition(INDEX), parallelism=options.workers, verify="none")
                cursor.execute("CHECKPOINT")
                quiet, _report = timed(database, options.workers)
                with Writer(dsn, DATA.write(options.rows), options.writes) as writer:
                    busy, found = timed(database, options.workers)
                if not found.is_exact:
                    raise SystemExit(f"a false alarm: {found}")
                rounds.append(
                    {
                        "build_s": built["all"],
                        "verify_s": quiet,
                        "share": quiet / built["all"],
                        "verify_under_writer_s": busy,
                        "share_under_writer": busy / built["all"],
                        "writes": writer.written,
                    }
                )
                print({name: round(value, 3) for name, value in rounds[-1].items()}, file=sys.stderr)
    medians = {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
    RESULTS.write_text(
        json.dumps(
            {
                "rows": options.rows,
                "workers": options.workers,
                "server": version,
                "machine": platform.machine(),
                "medians": medians,
                "rounds": rounds,
            },
            indent=2,
        )
        + "\n"
    )
    print(f"{options.rows:,} rows, {options.workers} workers, medians of {options.rounds} rounds")
    for name, value in medians.items():
        print(f"{name:24} {value:g}")


def timed(database: Database, workers: int) -> tuple[float, Any]:
    """The seconds of one whole verification, and what it found."""
    begun = time.perf_counter()
    report = lifecycle.verify(database, INDEX, VerifyOptions(parallelism=workers), "bench")
    return time.perf_counter() - begun, report


if __name__ == "__main__":
    main()
