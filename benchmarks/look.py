"""The server's cost of a look at an operation of many ranges: the processor time of its session, from the kernel.

make bench-page
make bench-page ARGS="--ranges 1000"

The page *Index build* asks once a second, in a session that it keeps. A session that is new has caches to fill.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine import install, prepare
from airflow_roir.engine.control import sign_of_life
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.options import BuildOptions
from airflow_roir.page.sessions import Sessions
from benchmarks.data import DATASETS
from servers.postgres import embedded_postgres

DATA = DATASETS["item"]
RANGES = """
INSERT INTO roir.scan_range (operation_id, ordinal, relation, rows, done, seconds, claim_epoch, claim_worker)
SELECT id, i, 'public.item'::regclass::oid, 100 * (i %% 10), i %% 3 = 0, 1.5, CASE WHEN i < 8 THEN epoch END,
       CASE WHEN i < 8 THEN i END
  FROM roir.operation, generate_series(0, %(ranges)s - 1) i
"""
SAMPLES = """
INSERT INTO roir.progress_sample
SELECT id, clock_timestamp() - i * interval '2 seconds', 'build', 0, 0, 0, 0, 2
  FROM roir.operation, generate_series(1, 200) i
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranges", type=int, default=10_000)
    parser.add_argument("--looks", type=int, default=50)
    options = parser.parse_args()
    with embedded_postgres(fsync="on") as dsn:
        database = Database(dsn, "roir bench")
        install.init(database)
        connection = psycopg2.connect(dsn)
        with connection, connection.cursor() as cursor:
            DATA.load(cursor, 1000)
        connection.close()
        prepared = prepare.prepare(database, DATA.definition("item_by_part"), BuildOptions())
        run = start_run(database, prepared.index, "bench", take_over=True)
        with database.transaction() as connection:
            execute(connection, "DELETE FROM roir.scan_range")
            execute(connection, RANGES, {"ranges": options.ranges})
            execute(connection, SAMPLES)
            execute(connection, "UPDATE roir.operation SET rows_estimate = 1000 * %(n)s", {"n": options.ranges})
        with database.autocommit() as connection:
            execute(connection, "VACUUM ANALYZE")
        sessions = Sessions(_session)
        pid = _look(sessions, dsn)
        before = _processor_ms(pid)
        began = time.perf_counter()
        for _ in range(options.looks):
            assert _look(sessions, dsn) == pid
        passed = (time.perf_counter() - began) * 1000 / options.looks
        spent = (_processor_ms(pid) - before) / options.looks
        print(f"{spent:.1f} ms a look, in the session that the page keeps; {passed:.0f} ms until its answer")
        news = []
        for _ in range(5):
            new = Sessions(_session)
            pid = _look(new, dsn)
            news.append(_processor_ms(pid))
        print(f"{statistics.median(news):.1f} ms a look, in a session of its own, with its begin")
        with database.connect() as connection:
            pid = execute(connection, "SELECT pg_backend_pid()").scalar_one()
            execute(connection, "SET synchronous_commit = off")
            before = _processor_ms(pid)
            for _ in range(10):
                execute(connection, "UPDATE roir.progress_sample SET at = at - interval '1.1 seconds'")
                sign_of_life.tick(connection, run.operation_id, run.epoch)
                connection.rollback()
            print(f"{(_processor_ms(pid) - before) / 10:.1f} ms a heartbeat, every two seconds")


def _session(dsn: str, **pool: Any) -> Database:
    return Database(dsn, "roir page", **pool)


def _look(sessions: Sessions, dsn: str) -> int:
    """Look as the page does; the process that has answered."""
    with sessions.database("bench", dsn) as database:
        progress(database)
        with database.connect() as connection:
            return int(execute(connection, "SELECT pg_backend_pid()").scalar_one())


def _processor_ms(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6


if __name__ == "__main__":
    main()
