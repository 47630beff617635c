"""The errors that REINDEX INDEX CONCURRENTLY of a partition's index causes for writers by INSERT … ON CONFLICT.

make bench-reindex
make bench-reindex ARGS="--pg 16 --seconds 5"

Two writers upsert into a table of four partitions, each rows of its own, while the partitions' indexes are rebuilt one
after the other. No writer should ever notice. The bench counts the writers' errors.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter

import psycopg2

from servers.postgres import embedded_postgres

PARTITIONS, KEYS = 4, 100
EACH = KEYS // PARTITIONS
SETUP = (
    "CREATE TABLE b (k int, p int, v int) PARTITION BY RANGE (k)",
    *(
        f"CREATE TABLE b{n} PARTITION OF b FOR VALUES FROM ({n * EACH}) TO ({(n + 1) * EACH})"
        for n in range(PARTITIONS)
    ),
    "CREATE UNIQUE INDEX ON b (k, p)",
    f"INSERT INTO b SELECT i % {KEYS}, i / {KEYS}, 0 FROM generate_series(0, 9999) i",
)
UPSERT = "INSERT INTO b VALUES (%s, %s, 1) ON CONFLICT (k, p) DO UPDATE SET v = b.v + 1"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pg", type=int, default=18)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    errors: Counter[str] = Counter()
    written: Counter[int] = Counter()
    stop = threading.Event()
    with embedded_postgres(options.pg) as dsn:

        def write(number: int) -> None:
            chance = random.Random(options.seed + number)
            connection = psycopg2.connect(dsn)
            connection.autocommit = True
            with connection.cursor() as cursor:
                while not stop.is_set():
                    # No two writers ever have the same row.
                    row = (chance.randrange(KEYS), chance.randrange(100) * options.writers + number)
                    try:
                        cursor.execute(UPSERT, row)
                        written[number] += 1
                    except psycopg2.Error as error:
                        errors[f"{error.pgcode} {str(error).splitlines()[0]}"] += 1
            connection.close()

        connection = psycopg2.connect(dsn)
        connection.autocommit = True
        commands = 0
        with connection.cursor() as cursor:
            for statement in SETUP:
                cursor.execute(statement)
            writers = [threading.Thread(target=write, args=(number,)) for number in range(options.writers)]
            for writer in writers:
                writer.start()
            until = time.monotonic() + options.seconds
            while time.monotonic() < until:
                cursor.execute(f"REINDEX INDEX CONCURRENTLY b{commands % PARTITIONS}_k_p_idx")
                commands += 1
            stop.set()
            for writer in writers:
                writer.join()
            cursor.execute("SHOW server_version")
            [version] = cursor.fetchone() or ("",)
        connection.close()
    print(f"PostgreSQL {version}, seed {options.seed}: {commands:,} commands beside {sum(written.values()):,} writes")
    for said, times in errors.most_common() or [("no error", 0)]:
        print(f"{times:6,} × {said}")


if __name__ == "__main__":
    main()
