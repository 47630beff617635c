"""The cost of the build's locks for writers: statements' latency without one, in each phase, paused and after.

`make bench-locks`, or `python -m benchmarks.locks --rows 300000 --idle 60 --rebuilds 5`. It starts a PostgreSQL of its
own. Results: benchmarks/results/locks.json, and two tables.

Four writers, each a process, send short transactions of one to three statements, 2 ms apart. An index is created under
them, with a transaction that stays idle for a minute before each of the three drains, and is paused once; then it is
rebuilt a few times without an idle transaction. A statement (a COMMIT is one) counts in every phase that it overlaps.
An attempt lasts from its LOCK to the end of its transaction, which is how long a writer may have queued behind it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, install, prepare, publish, seal, switch
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.locks.locks import Drain
from airflow_roir.options import BuildOptions
from benchmarks.quantile import quantile
from servers.killable import running_server
from tests.engine import steps

RESULTS = Path(__file__).parent / "results"
WRITERS, PAUSE_S, CALM_S, WORKERS = 4, 0.002, 10, 2
Measured = tuple[float, float]


def write(dsn: str, seed: int, rows: int, stop: Event, results: Any) -> None:
    """One writer, until it is stopped: sends back when each statement began and ended."""
    chosen = random.Random(seed)
    connection = psycopg2.connect(dsn)
    cursor = connection.cursor()
    measured: list[Measured] = []

    def timed(work: Callable[..., Any], *arguments: Any) -> None:
        begun = time.monotonic()
        work(*arguments)
        measured.append((begun, time.monotonic()))

    while not stop.is_set():
        # In the order of their ids, so that writers don't deadlock among themselves.
        for identity in sorted(chosen.sample(range(1, rows), chosen.randint(1, 3))):
            match chosen.randrange(4):
                case 0:
                    timed(cursor.execute, "DELETE FROM t WHERE id = %s", (identity,))
                case 1:
                    values = (identity, chosen.randrange(1000), "new")
                    timed(cursor.execute, "INSERT INTO t VALUES (%s, %s, %s) ON CONFLICT (id) DO NOTHING", values)
                case 2:
                    timed(cursor.execute, "UPDATE t SET k = %s WHERE id = %s", (chosen.randrange(1000), identity))
                case _:
                    timed(cursor.execute, "UPDATE t SET v = v || '.' WHERE id = %s", (identity,))
        timed(connection.commit)
        time.sleep(PAUSE_S)
    results.put(measured)


class Bench:
    """An index that is built and rebuilt, and when each phase of that was."""

    def __init__(self, dsn: str, rows: int, batch_rows: int, idle_s: float) -> None:
        self.dsn, self.rows, self.idle_s = dsn, rows, idle_s
        self.database = Database(dsn, "roir bench")
        install.init(self.database)
        self.options = BuildOptions(
            parallelism=WORKERS, batch_rows=batch_rows, lock_patience_s=int(idle_s) + 60, revert_window_s=0
        )
        self.phases: dict[str, list[Measured]] = {}
        self.drains: dict[str, list[list[float]]] = {}
        self.attempts: list[list[float]] = []
        self.run: Run | None = None
        connection = psycopg2.connect(dsn)
        with connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE t (id bigint PRIMARY KEY, k int, v text)")
            cursor.execute(
                "INSERT INTO t SELECT i, (i::bigint * 7919) %% 1000, md5(i::text) FROM generate_series(0, %s) i",
                (rows,),
            )
            cursor.execute("ANALYZE t")
        connection.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note when it began and ended."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.phases.setdefault(name, []).append((begun, time.monotonic()))
            print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)

    def calm(self, name: str) -> None:
        """A phase in which nothing of ours happens."""
        with self.phase(name):
            time.sleep(CALM_S)

    def drain(self, name: str, step: Callable[[Callable[[str], None]], Any], idle: bool) -> Any:
        """A phase with a drain lock, and how long each attempt at it lasted."""
        name = f"{name}, somebody idle" if idle else name
        self.attempts = []
        sleeper = threading.Thread(target=self.sleep_in_transaction)
        if idle:
            sleeper.start()
            time.sleep(1)

        def tell(line: str) -> None:
            if len(self.attempts) == 1:
                print(line, flush=True)

        with self.phase(name):
            result = step(tell)
        self.attempts[-1][1] = time.monotonic()
        self.drains.setdefault(name, []).extend(self.attempts)
        if idle:
            sleeper.join()
        return result

    def sleep_in_transaction(self) -> None:
        """A transaction that writes one row, which no other session writes, and then does nothing for long."""
        connection = psycopg2.connect(self.dsn)
        with connection, connection.cursor() as cursor:
            cursor.execute("UPDATE t SET v = 'idle' WHERE id = 0")
            time.sleep(self.idle_s)
        connection.close()

    def in_parallel(self, work: Callable[..., Any]) -> None:
        """A phase's workers, as threads."""
        threads = [
            threading.Thread(target=lambda n=number: list(work(self.database, self.run, n)))
            for number in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def operate(self, kind: str, idle: bool) -> None:
        """One operation from prepare to publish; the first is paused in its build."""
        create = kind == "create"
        definition = IndexDefinition.parse(
            "ix", "t" if create else None, "k" if create else None, "v" if create else None
        )
        database = self.database
        self.drain(
            "prepare", lambda said: prepare.prepare(database, definition, self.options, "bench", said), idle=idle
        )
        self.run = start_run(database, "ix", "bench", take_over=True)
        if create:
            with self.phase("build"):
                pause = threading.Timer(0.5, lambda: requests.pause(database, "ix", "bench", "to measure"))
                pause.start()
                self.in_parallel(build.PHASE.work)
                pause.join()
            self.calm("paused")
            self.run = start_run(database, "ix", "bench", take_over=True)
        with self.phase("build"):
            self.in_parallel(build.PHASE.work)
            build.finish(database, self.run)
        with self.phase("seal"):
            self.in_parallel(seal.PHASE.work)
            seal.finish(database, self.run)
        run = self.run
        self.drain("switch", lambda said: switch.switch(database, run, said), idle=idle)
        with self.phase("fold"):
            steps.fold_delta(database, run)
        self.drain("publish", lambda said: publish.publish(database, run, said), idle=idle)


def watch_attempts(bench: Bench) -> None:
    """Note when each attempt at a drain lock begins."""
    lock = Drain.lock

    def noted(drain: Drain, connection: Any) -> None:
        bench.attempts.append([time.monotonic(), 0.0])
        try:
            lock(drain, connection)
        except BaseException:
            bench.attempts[-1][1] = time.monotonic()
            raise

    Drain.lock = noted  # type: ignore[method-assign]


def latencies(bench: Bench, statements: list[Measured]) -> list[dict[str, Any]]:
    """Quantiles of each phase, in milliseconds."""
    rows = []
    for name, spans in bench.phases.items():
        took = [
            (ended - begun) * 1000
            for begun, ended in statements
            if any(begun < end and ended > start for start, end in spans)
        ]
        if took:
            quantiles = {f"p{share * 100:g}": round(quantile(took, share), 2) for share in (0.5, 0.99, 0.999)}
            seconds = round(sum(end - start for start, end in spans), 1)
            row = {"phase": name, "seconds": seconds, "statements": len(took), **quantiles, "max": round(max(took), 1)}
            rows.append(row)
    return rows


def drains(bench: Bench) -> list[dict[str, Any]]:
    """Attempts at each drain lock, and how long the longest one may have kept writers waiting."""
    return [
        {
            "drain": name,
            "taken": len(bench.phases[name]),
            "attempts": len(attempts),
            "longest attempt, ms": round(max(end - begun for begun, end in attempts) * 1000, 1),
            "lock_timeout, ms": bench.options.lock_timeout_ms,
        }
        for name, attempts in bench.drains.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "| --- " * len(rows[0]) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--batch-rows", type=int, default=10_000)
    parser.add_argument("--idle", type=float, default=60, metavar="SECONDS", help="how long somebody stays idle")
    parser.add_argument("--rebuilds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    results: dict[str, Any] = {**vars(chosen), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    with running_server() as server:
        server.execute("CREATE DATABASE bench")
        bench = Bench(server.dsn("bench"), chosen.rows, chosen.batch_rows, chosen.idle)
        watch_attempts(bench)
        stop, sent = multiprocessing.Event(), multiprocessing.SimpleQueue()
        writers = [
            multiprocessing.Process(
                target=write, args=(bench.dsn, chosen.seed + n, chosen.rows, stop, sent), daemon=True
            )
            for n in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        bench.calm("no build")
        bench.operate("create", idle=chosen.idle > 0)
        for _ in range(chosen.rebuilds):
            bench.operate("rebuild", idle=False)
        bench.calm("published")
        stop.set()
        statements = [one for _ in writers for one in sent.get()]
        report = verify(bench.database, "ix")
        assert report.is_exact, report
    results |= {
        "load_at_end": os.getloadavg()[0],
        "latencies_ms": latencies(bench, statements),
        "drains": drains(bench),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "locks.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results["latencies_ms"]), table(results["drains"]), sep="\n\n")


if __name__ == "__main__":
    main()
