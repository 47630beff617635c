"""Samples beside a build: the age of its transactions, and the memory of its processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import build, lifecycle, prepare, seal
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from benchmarks.scene import INDEX, Scene

PHASES = {"build": build, "seal": seal}
WORKER = "roir memory"
# Sessions of ours by their names, those of the limit by what they do.
AGES = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float,
       coalesce(max(greatest(age(backend_xmin), age(backend_xid))), 0),
       (SELECT phase FROM roir.operation WHERE status = 'running' ORDER BY id DESC LIMIT 1)
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND (application_name LIKE 'roir %' OR query LIKE '%peer.entries%')
"""


# The current wait of each session of ours, and the operation's phase. Parallel workers have its name too.
WAITS = """
SELECT coalesce(wait_event_type || ': ' || wait_event, 'computes') AS does,
       coalesce((SELECT phase FROM roir.operation WHERE status = 'running' ORDER BY id DESC LIMIT 1), 'prepare')
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND application_name LIKE 'roir %' AND state <> 'idle'
   AND wait_event IS DISTINCT FROM 'ClientRead'
"""
# The blocks that the sessions and their helpers read and write; since PostgreSQL 16.
IO = """
SELECT context || ': ' || what, sum(blocks)::bigint
  FROM pg_stat_io i
 CROSS JOIN LATERAL (VALUES ('reads', i.reads), ('writes', i.writes), ('extends', i.extends), ('hits', i.hits))
       AS v (what, blocks)
 WHERE i.object = 'relation' AND i.backend_type IN ('client backend', 'background worker')
 GROUP BY 1 HAVING sum(blocks) > 0
"""


class Sampler(threading.Thread):
    """Calls `look` every `every_s` seconds until the block ends; keeps the answers, with their times since its
    begin."""

    def __init__(self, look: Callable[[Any], Any], dsn: str, every_s: float) -> None:
        super().__init__(daemon=True)
        self.look, self.dsn, self.every_s = look, dsn, every_s
        self.halt = threading.Event()
        self.samples: list[tuple[float, Any]] = []

    def run(self) -> None:
        connection = psycopg2.connect(self.dsn)
        connection.autocommit = True
        begun = time.monotonic()
        with connection.cursor() as cursor:
            while True:
                self.samples.append((round(time.monotonic() - begun, 3), self.look(cursor)))
                if self.halt.wait(self.every_s):
                    break
        connection.close()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.halt.set()
        self.join()


def ages(dsn: str) -> Sampler:
    """Samples of (seconds of the oldest transaction, age of the oldest transaction id that it holds, phase)."""

    def look(cursor: Any) -> tuple[float, int, str | None]:
        cursor.execute(AGES)
        return cursor.fetchone()

    return Sampler(look, dsn, 0.1)


def waits(dsn: str) -> Sampler:
    """Samples of (what a session of ours does, phase), one for each session."""

    def look(cursor: Any) -> list[tuple[str, str]]:
        cursor.execute(WAITS)
        return list(cursor.fetchall())

    return Sampler(look, dsn, 0.01)


def blocks_read(cursor: Any) -> dict[str, int]:
    """Blocks that sessions have read, written, added and found in memory so far, by kind. Empty before 16."""
    cursor.execute("SELECT to_regclass('pg_catalog.pg_stat_io') IS NOT NULL")
    if not cursor.fetchone()[0]:
        return {}
    cursor.execute(IO)
    return dict(cursor.fetchall())


def backend_memory(dsn: str) -> Sampler:
    """Samples of the most private memory, in MB, that a server process of a worker has."""

    def look(cursor: Any) -> float:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s", (f"{WORKER}%",))
        return max((_memory_mb(pid, "RssAnon") for (pid,) in cursor.fetchall()), default=0.0)

    return Sampler(look, dsn, 0.05)


def _memory_mb(process: int | str, field: str) -> float:
    """A field of /proc/…/status; 0 where the process has ended. Anonymous memory leaves out shared buffers."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), 0.0)


def _work(dsn: str, run: Run, phase: str, number: int, results: Any) -> None:
    """A worker in a process of its own; sends the most memory that it ever had."""
    list(PHASES[phase].PHASE.work(Database(dsn, f"{WORKER} {number}"), run, number))
    results.put(_memory_mb("self", "VmHWM"))


def memory(scene: Scene) -> dict[str, float]:
    """Builds an index by worker processes; returns the peak in MB of one of these and of its server process, by
    phase."""
    options = BuildOptions(
        parallelism=scene.parallelism, revert_window_s=0, **{"verify": "none", "covering": "all", **scene.options}
    )
    prepared = prepare.prepare(scene.database, scene.data.definition(INDEX), options)
    run = start_run(scene.database, prepared.index, "bench", take_over=True)
    found: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    for name, phase in PHASES.items():
        results = spawn.SimpleQueue()
        with backend_memory(scene.dsn) as sampler:
            workers = [
                spawn.Process(target=_work, args=(scene.dsn, run, name, number, results))
                for number in range(scene.parallelism)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if any(worker.exitcode for worker in workers):
            raise RuntimeError(f"a worker ended with {[worker.exitcode for worker in workers]}")
        found[f"{name}: worker"] = round(max(results.get() for _ in workers), 1)
        found[f"{name}: its session"] = round(max(peak for _, peak in sampler.samples), 1)
        phase.finish(scene.database, run)
    lifecycle.run_phases(scene.database, run)
    return found
