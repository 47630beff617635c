"""How long a lookup by a column that isn't the partition key takes, over more and more partitions.

PostgreSQL's own way is an index on each partition, all of which a lookup visits. Ours is one index over all. Run by
`make bench-partitions`; writes benchmarks/results/partitions.json and .svg. With --builds it prints the seconds of each
phase of the build alone, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from benchmarks.engine import build_index
from benchmarks.pictures import of_partitions
from benchmarks.quantile import quantile
from servers.postgres import embedded_postgres

RESULTS = Path(__file__).parent / "results"
DAYS = 1000
ROWS_PER_CUSTOMER = 5

TABLE = """
CREATE TABLE orders (day int, id int, customer int, note text, PRIMARY KEY (day, id)) PARTITION BY RANGE (day);
DO $$ BEGIN FOR n IN 0..{last} LOOP
  EXECUTE format('CREATE TABLE orders_%s PARTITION OF orders FOR VALUES FROM (%s) TO (%s)',
                 n, n * {days}, (n + 1) * {days});
END LOOP; END $$;
INSERT INTO orders SELECT i * 7919 % 1000, i, i * 104729 % {customers}, repeat('x', 60)
  FROM generate_series(1, {rows}::bigint) i;
CREATE INDEX ON orders (customer);
"""

# The measured lookups, each planned every time, and prepared: a lookup by PostgreSQL's local indexes; by ours; ours
# with the rest of the row by a join, which opens every partition, since none can be left out before the entries are
# known; and ours with the rest of the row by a second statement, whose primary keys leave out all partitions but
# theirs.
LOOKUPS = {
    "local indexes": "SELECT day, id, note FROM orders WHERE customer = $1",
    "ours": "SELECT day, id FROM orders_by_customer WHERE customer = $1",
    "ours, joined": "SELECT o.* FROM orders_by_customer i JOIN orders o ON o.day = i.day AND o.id = i.id "
    "WHERE i.customer = $1",
    "roir.rows, by key": "SELECT * FROM roir.rows(NULL::orders, 'orders_by_customer', "
    "jsonb_build_object('customer', $1))",
    "roir.rows, by entries": "SELECT * FROM roir.rows(NULL::orders, "
    "ARRAY(SELECT i FROM orders_by_customer i WHERE customer = $1))",
}
BY_KEY = "ours, then by key"


def by_key(cursor: Any, customer: int) -> list[Any]:
    """The rows of a customer in two statements."""
    cursor.execute("SELECT day, id FROM orders_by_customer WHERE customer = %s", (customer,))
    keys = cursor.fetchall()
    wanted = " OR ".join(["day = %s AND id = %s"] * len(keys))
    cursor.execute(f"SELECT day, id, note FROM orders WHERE {wanted}", [value for key in keys for value in key])
    return list(cursor.fetchall())


def measure(connection: Any, query: str, prepared: bool, customers: list[int]) -> list[float]:
    """Milliseconds of each lookup, by one session after a few to warm up."""
    taken = []
    with connection.cursor() as cursor:
        if prepared:
            cursor.execute(f"PREPARE lookup (int) AS {query}")
        for n, customer in enumerate(customers):
            statement = f"EXECUTE lookup ({customer})" if prepared else query.replace("$1", str(customer))
            begun = time.perf_counter()
            if query == BY_KEY:
                found = by_key(cursor, customer)
            else:
                cursor.execute(statement)
                found = cursor.fetchall()
            if n >= 20:
                taken.append((time.perf_counter() - begun) * 1000)
            if len(found) != ROWS_PER_CUSTOMER:
                raise SystemExit(f"{query}: customer {customer} has {len(found)} rows")
        if prepared:
            cursor.execute("DEALLOCATE lookup")
    return taken


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--lookups", type=int, default=100)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--builds", action="store_true", help="only build, and print the seconds of each phase")
    options = parser.parse_args()
    customers = options.rows // ROWS_PER_CUSTOMER
    results: list[dict[str, Any]] = []
    for count in options.partitions:
        chance = random.Random(count)
        with embedded_postgres(fsync="on") as dsn:
            database = Database(dsn, "roir bench")
            install.init(database)
            connection = psycopg2.connect(dsn)
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SET plan_cache_mode = auto")
                cursor.execute(TABLE.format(last=count - 1, days=DAYS // count, rows=options.rows, customers=customers))
                cursor.execute("VACUUM (ANALYZE) orders")
            definition = IndexDefinition.parse("orders_by_customer", "orders", "customer")
            seconds = build_index(database, definition, parallelism=1)
            if options.builds:
                print({"partitions": count} | {phase: round(taken, 1) for phase, taken in seconds.items()}, flush=True)
                connection.close()
                continue
            built = seconds["all"]
            report = verify(database, "orders_by_customer")
            if not report.is_exact:
                raise SystemExit(f"not exact: {report}")
            for name, query in [*LOOKUPS.items(), (BY_KEY, BY_KEY)]:
                for prepared in (False, True) if query != BY_KEY else (False,):
                    asked = [chance.randrange(customers) for _ in range(options.lookups + 20)]
                    taken = measure(connection, query, prepared, asked)
                    row = {
                        "partitions": count,
                        "lookup": name,
                        "prepared": prepared,
                        "p50_ms": round(quantile(taken, 0.5), 3),
                        "p99_ms": round(quantile(taken, 0.99), 3),
                        "build_s": round(built, 1),
                    }
                    results.append(row)
                    print(row, flush=True)
            connection.close()
    if options.builds:
        return
    RESULTS.mkdir(exist_ok=True)
    facts = {"rows": options.rows, "lookups": options.lookups, "results": results}
    (RESULTS / "partitions.json").write_text(json.dumps(facts, indent=1) + "\n")
    of_partitions(RESULTS / "partitions.json")


if __name__ == "__main__":
    main()
