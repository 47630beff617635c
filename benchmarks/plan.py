"""How good `roir plan` is: room, WAL and seconds that it announces, beside what the build of several tables then takes.

`make bench-plan`, or `python -m benchmarks.plan --rows 300000`. It starts a PostgreSQL of its own. One worker without
Spark does the work, and nothing is verified: the seconds are those of the phases.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, install, lifecycle, prepare, seal
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import forecast, space
from airflow_roir.engine.forecast.trial import Trial
from airflow_roir.engine.lifecycle import verify
from airflow_roir.options import BuildOptions, VerifyOptions
from servers.killable import running_server

PARTITIONED = "CREATE TABLE t (id bigint PRIMARY KEY, k text, v text) PARTITION BY HASH (id);" + "".join(
    f"CREATE TABLE t{n} PARTITION OF t FOR VALUES WITH (MODULUS 100, REMAINDER {n});" for n in range(100)
)
LONG = "(SELECT string_agg(md5((i + j)::text), '') FROM generate_series(1, 100) j)"
# A table's statement, a row's values, a share of the rows that were asked for, the columns of the index.
SHAPES: dict[str, tuple[str, str, float, str, str | None]] = {
    "narrow": ("CREATE TABLE t (id bigint PRIMARY KEY, k int)", "i, i::bigint * 7919 % 100003", 1, "k", None),
    "text": ("CREATE TABLE t (id bigint PRIMARY KEY, k text, v text)", "i, md5(i::text), repeat('x', 50)", 1, "k", "v"),
    "by uuid": ("CREATE TABLE t (id uuid PRIMARY KEY, k text)", "gen_random_uuid(), md5(i::text)", 1, "k", None),
    "100 partitions": (PARTITIONED, "i, md5(i::text), 'v'", 1, "k", "v"),
    "long values": (
        "CREATE TABLE t (id bigint PRIMARY KEY, k text, v text)",
        f"i, md5(i::text), {LONG}",
        0.05,
        "k",
        "v",
    ),
}
SIZES = """
SELECT sum(pg_table_size(oid)), sum(pg_indexes_size(oid)) FROM pg_class WHERE relname ~ '^g[0-9]+_s[0-9]{3}$'
"""


def ask(dsn: str, statement: str) -> tuple[Any, ...]:
    """One row."""
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchone() or ()) if cursor.description else ()
    finally:
        connection.close()


def measure(dsn: str, shape: str, rows: int) -> None:
    """Plan and build one table, and print how they compare."""
    made, row, share, keys, include = SHAPES[shape]
    ask(dsn, "DROP SCHEMA IF EXISTS roir, roir_data CASCADE")
    ask(
        dsn,
        f"DROP TABLE IF EXISTS t; {made}; INSERT INTO t SELECT {row} FROM generate_series(1, {int(rows * share)}) i",
    )
    ask(dsn, "ANALYZE t")
    ask(dsn, "CHECKPOINT")
    database = Database(dsn, "roir bench")
    install.init(database)
    definition, options = IndexDefinition.parse("ix", "t", keys, include), BuildOptions(parallelism=1)
    begun = time.monotonic()
    planned = forecast.run(database, definition, options, with_trial=True)
    plan_s = time.monotonic() - begun
    assert isinstance(planned.trial, Trial), planned.trial
    with database.transaction() as connection:
        room = space.foresee(connection, planned.plan, options, planned.trial, None, None)
    [position] = ask(dsn, "SELECT pg_current_wal_lsn()")
    begun = time.monotonic()
    prepared = prepare.prepare(database, definition, options, "bench")
    run = start_run(database, prepared.index, "bench")
    for _ in build.PHASE.work(database, run, 0):
        pass
    build.finish(database, run)
    for _ in seal.PHASE.work(database, run, 0):
        pass
    seal.finish(database, run)
    lifecycle.run_phases(database, run)
    [wal] = ask(dsn, f"SELECT pg_current_wal_lsn() - '{position}'::pg_lsn")
    verify(database, "ix", VerifyOptions(parallelism=1), "bench")
    took = time.monotonic() - begun
    base, index = ask(dsn, SIZES)
    work = planned.expectation.work
    print(
        f"| {shape} | {planned.plan.rows:,} | {plan_s:.2f} | {room.base / float(base):.2f} | "
        f"{room.index / float(index):.2f} | {room.wal_low / float(wal):.2f} to {room.wal_high / float(wal):.2f} | "
        f"{work.low:.1f} to {work.high:.1f} | {took:.1f} |",
        flush=True,
    )


def main() -> None:
    """Every table, one after another."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=300_000)
    rows = arguments.parse_args().rows
    print("| table | rows | plan, s | entries, planned / taken | B-tree | WAL | expected, s | taken, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with running_server() as server:
        for shape in SHAPES:
            measure(server.dsn(), shape, rows)


if __name__ == "__main__":
    main()
