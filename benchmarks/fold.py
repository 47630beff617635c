"""How fast a delta is folded: rows per second and worker, and how long a step takes, which a writer may wait for.

`make bench-fold`, or `make bench-fold ARGS="--rows 100000 --base 500000 --rounds 1"` for a quick look. It starts a
PostgreSQL of its own. Results: benchmarks/results/fold.json, and a table.

The delta is written as writers would leave it, in no order of its keys, by SQL and not by a million writes: regular
entries that the base has or hasn't, antimatter that annihilates or becomes a ghost. An entry has a key, a primary key
and two included columns. Each fold begins with the same tables.

`0` workers are the limit: the server applies the whole delta in one transaction, in the order of the base's index, and
truncates it. No other session may write to it meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2
from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, build, fold, install, prepare, seal, switch
from airflow_roir.engine.apply_delta import Folded
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.fold import FoldWorker, PartClaim
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.sessions.kept_session import KeptSession
from airflow_roir.engine.work.driver import PhaseDriver
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.engine.work.pool import ThreadPool
from airflow_roir.options import BuildOptions
from benchmarks.quantile import quantile
from benchmarks.writers import SETTINGS, table
from servers.postgres import start_postgres

RESULTS = Path(__file__).parent / "results" / "fold.json"
TABLE = """
CREATE TABLE item (id bigint PRIMARY KEY, part int, quantity numeric(12, 2), price numeric(12, 2));
INSERT INTO item SELECT i, i * 7919 % 200003, i % 50, (i % 100000) / 7.0 FROM generate_series(1, {base}::bigint) i;
"""
# Ten rows each. r: entries that change; n, u: new entries; a: deleted entries; g: deleted ones that no batch has
# copied.
MIXES = {"regular": "rruurrurru", "mixed": "rrrrunaaag", "antimatter": "aaaaaaaaag"}
DELTA = """
INSERT INTO {delta} (c1, c2, c3, c4, state)
SELECT CASE WHEN kind IN ('n', 'u') THEN i.part + 1 ELSE i.part END, CASE kind WHEN 'g' THEN -i.id ELSE i.id END,
       CASE WHEN kind NOT IN ('a', 'g') THEN 1 END, CASE WHEN kind NOT IN ('a', 'g') THEN 2 END,
       (CASE WHEN kind IN ('a', 'g') THEN 'antimatter' ELSE 'regular' END)::roir.entry_state
  FROM (SELECT *, substr('{mix}', (id % 10)::int + 1, 1) AS kind FROM item ORDER BY hashint8(id) LIMIT {rows}) i
"""


def apply_at_once(connection: Connection, generation_id: int, entry: Entry) -> Folded:
    """The same changes as a fold's, by one statement for each state."""
    base, delta = physical.base(generation_id), physical.delta(generation_id)
    columns = ", ".join(entry.physical())
    in_order = ", ".join(entry.physical(entry.identity_positions))
    upserted = execute(
        connection,
        f"INSERT INTO {base} ({columns}) SELECT {columns} FROM {delta} WHERE state = 'regular' ORDER BY {in_order} "
        f"{entry.on_conflict()}",
    ).rowcount
    annihilated = execute(
        connection,
        f"DELETE FROM {base} b USING {delta} d WHERE d.state = 'antimatter' AND {entry.equal('b.', 'd.', nulls=False)}",
    ).rowcount
    left = execute(connection, f"SELECT count(*) FROM {delta}").scalar_one()
    execute(connection, f"TRUNCATE {delta}")
    return Folded(upserted, annihilated, left - upserted - annihilated)


def measure(dsn: str, database: Database, mix: str, workers: int, rows: int) -> dict[str, Any]:
    """One fold of a fresh delta under a fresh base; no workers are the limit."""
    definition = IndexDefinition.parse("item_by_part", "item", "part", "quantity, price")
    prepared = prepare.prepare(database, definition, BuildOptions(parallelism=max(1, workers), verify="none"))
    run = start_run(database, prepared.index, "bench", take_over=True)
    for phase in (build, seal):
        list(phase.PHASE.work(database, run, 0))
        phase.finish(database, run)
    switch.switch(database, run)
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT max(id) FROM roir.generation")
        generation = cursor.fetchone()[0]
        cursor.execute(DELTA.format(delta=physical.delta(generation), mix=MIXES[mix], rows=rows))
    connection.close()
    with database.autocommit() as session:
        session.exec_driver_sql("CHECKPOINT")
    steps: list[float] = []
    step = FoldWorker.step

    def timed(self: FoldWorker, hold: PartClaim) -> Step | Stop:
        begun = time.perf_counter()
        done = step(self, hold)
        steps.append((time.perf_counter() - begun) * 1000)
        return done

    FoldWorker.step = timed  # type: ignore[method-assign]
    begun = time.perf_counter()
    if workers:
        fold.begin(database, run)
        with closing(KeptSession(database)) as looks:
            PhaseDriver(looks, run, fold.PHASE, ThreadPool(database, run, fold.PHASE)).run()
        with database.transaction() as session:
            counts = execute(session, fold.FOLDED, {"operation": run.operation_id}).one()
        folded = Folded(*(int(count) for count in counts[:3]))
    else:
        with database.transaction() as session:
            folded = apply_at_once(session, generation, load_job(session, run).entry)
        steps.append((time.perf_counter() - begun) * 1000)
    seconds = time.perf_counter() - begun
    FoldWorker.step = step  # type: ignore[method-assign]
    if folded.rows != rows:
        raise SystemExit(f"{rows} rows were in the delta, dealt with: {folded}")
    abort.abort(database, "item_by_part", "bench")
    return {
        "mix": mix,
        "workers": workers,
        "rows_per_s": round(rows / seconds),
        "rows_per_s_and_worker": round(rows / seconds / max(1, workers)),
        "step_p50_ms": round(quantile(steps, 0.5), 1),
        "step_p99_ms": round(quantile(steps, 0.99), 1),
        "step_max_ms": round(max(steps), 1),
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the delta")
    parser.add_argument("--base", type=int, default=5_000_000, help="entries")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="0: the limit")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pg", type=int, default=18, help="the server's major version")
    chosen = parser.parse_args()
    if chosen.rows > chosen.base:
        parser.error("the delta's rows are changes of the base's")
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="roir-pg-") as folder:
        server = start_postgres(Path(folder), chosen.pg, settings=SETTINGS)
        try:
            dsn = server.get_uri()
            database = Database(dsn, "roir bench")
            install.init(database)
            with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
                cursor.execute(TABLE.format(base=chosen.base))
                cursor.execute("ANALYZE item")
                cursor.execute("SHOW server_version")
                version = cursor.fetchone()[0]
            connection.close()
            for _ in range(chosen.rounds):
                for mix in chosen.mixes:
                    for workers in chosen.workers:
                        measured.append(measure(dsn, database, mix, workers, chosen.rows))
                        print(measured[-1], file=sys.stderr, flush=True)
        finally:
            server.cleanup()
    results = []
    for mix in chosen.mixes:
        for workers in chosen.workers:
            same = [row for row in measured if (row["mix"], row["workers"]) == (mix, workers)]
            medians = {name: statistics.median(row[name] for row in same) for name in list(same[0])[2:]}
            results.append({"mix": mix, "workers": workers, **medians})
    facts = {"server": version, "cores": os.cpu_count(), "machine": platform.machine(), **vars(chosen)}
    RESULTS.write_text(json.dumps({**facts, "rounds_measured": measured, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
