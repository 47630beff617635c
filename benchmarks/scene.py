"""Where a side is measured: a server, a data set in it, and what every side does before and after."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg2

from airflow_roir.engine import drop, install
from airflow_roir.engine.database import Database
from airflow_roir.errors import NotFound
from benchmarks.data import Dataset
from benchmarks.server import BenchServer

INDEX = "public.bench_index"
NATIVE = "public.bench_native"
# The memory with which a worker of ours seals; another side gets as much for each process that builds its index.
MEMORY_PER_WORKER_MB = 256
SAMPLED_ROWS = 30_000

Result = dict[str, float]


@dataclass
class Scene:
    """A data set on a server. parallelism: of every side that doesn't say another one."""

    server: BenchServer
    data: Dataset
    rows: int
    parallelism: int
    writes: int
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dsn = self.server.dsn("bench")
        self.database = Database(self.dsn, "roir bench")
        self.session = self.connect()
        install.init(self.database)
        begun = time.perf_counter()
        with self.session.cursor() as cursor:
            self.data.load(cursor, self.rows)
            cursor.execute(f"VACUUM (ANALYZE) {self.data.table}")
        self.rows = int(self.value(f"SELECT count(*) FROM {self.data.table}"))
        self.load_s = time.perf_counter() - begun

    def connect(self, parallelism: int = 0) -> Any:
        """A session outside any transaction block. parallelism: it may use this many processes, and has as much memory
        as ours."""
        connection = psycopg2.connect(self.dsn)
        connection.autocommit = True
        if parallelism:
            with connection.cursor() as cursor:
                cursor.execute("; ".join(f"SET {name} = '{value}'" for name, value in self.memory(parallelism).items()))
        return connection

    def memory(self, parallelism: int) -> dict[str, str]:
        """The settings of a session that works in parallel: all the memory that `parallelism` workers of ours have."""
        return {
            "max_parallel_maintenance_workers": str(parallelism),
            "max_parallel_workers_per_gather": str(parallelism),
            "maintenance_work_mem": f"{parallelism * MEMORY_PER_WORKER_MB}MB",
            "work_mem": f"{MEMORY_PER_WORKER_MB}MB",
        }

    def run(self, *statements: str) -> None:
        """Statements, each by itself."""
        with self.session.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def value(self, query: str, *values: Any) -> Any:
        """One value."""
        with self.session.cursor() as cursor:
            cursor.execute(query, values or None)
            return cursor.fetchone()[0]

    def clear(self) -> None:
        """Drops what a side has made, and writes everything else out, so that the next one starts as all others did."""
        self.run("DROP SCHEMA IF EXISTS peer CASCADE", "CREATE SCHEMA peer", f"DROP INDEX IF EXISTS {NATIVE}")
        with suppress(NotFound):
            drop.drop_index(self.database, INDEX, "bench")
        self.run("CHECKPOINT")

    def cuts(self, pieces: int) -> list[str]:
        """WHERE conditions that cut the table into about equal pieces by the first column of its primary key."""
        share = min(100.0, 100.0 * SAMPLED_ROWS / max(self.rows, 1))
        column = self.data.pk[0]
        inner = [n / pieces for n in range(1, pieces)]
        found = self.value(
            f"SELECT (percentile_disc(%s::float[]) WITHIN GROUP (ORDER BY {column}))::text[] "
            f"FROM {self.data.table} TABLESAMPLE SYSTEM ({share:.6f})",
            inner,
        )
        bounds = [None, *(found or []), None]
        return [
            " AND ".join([f"{column} >= '{low}'"] * (low is not None) + [f"{column} < '{high}'"] * (high is not None))
            or "true"
            for low, high in pairwise(bounds)
        ]


@dataclass(frozen=True)
class Side:
    """One that is measured.

    run: does it, and returns the seconds of `all`, and of its parts. ready: the preparation, which isn't timed.
    lacking: why it can't run here, None if it can. title: for the table.
    """

    name: str
    title: str
    run: Callable[[Scene], Result]
    ready: Callable[[Scene], None] = lambda scene: None
    lacking: Callable[[Scene], str | None] = lambda scene: None


def timed(work: Callable[[], Any]) -> Result:
    """The seconds of some work."""
    begun = time.perf_counter()
    work()
    return {"all": time.perf_counter() - begun}
