"""How long planning takes: 10,000 ranges over more and more partitions."""

from __future__ import annotations

import statistics
import time
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run, install
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from benchmarks.partitions import DAYS, ROWS_PER_CUSTOMER, TABLE
from benchmarks.server import bench_server, facts

RANGES = 10_000
ROWS = 1_000_000


def measure(
    version: int, shared_buffers: str, partitions: list[int], rounds: int, rows: int = ROWS
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts, and a row for each number of partitions: the median seconds of a dry run, which changes nothing."""
    found = []
    for count in partitions:
        with bench_server(version, shared_buffers) as server:
            dsn = server.dsn("bench")
            server.execute(
                TABLE.format(last=count - 1, days=DAYS // count, rows=rows, customers=rows // ROWS_PER_CUSTOMER),
                "bench",
            )
            server.execute("VACUUM (ANALYZE) orders", "bench")
            database = Database(dsn, "roir bench")
            install.init(database)
            taken = []
            for _ in range(rounds):
                begun = time.perf_counter()
                dry = dry_run.run(
                    database, IndexDefinition.parse("ix", "orders", "customer"), BuildOptions(ranges=RANGES)
                )
                taken.append(time.perf_counter() - begun)
            with database.transaction() as connection:
                head = facts(connection.connection.cursor())
            found.append(
                {
                    "partitions": count,
                    "ranges": dry.plan.ranges,
                    "segments": dry.plan.segments,
                    "plan, s": round(statistics.median(taken), 2),
                }
            )
    return head | {"data": f"orders, {rows:,} rows", "rows": rows}, found
