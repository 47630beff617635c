"""A look at many indexes, as the page Indexes and `roir status` take it: its statements and its time.

make bench-many
make bench-many ARGS="--indexes 30"

Each index is a real one, over a table of its own of 100 rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sqlalchemy import event

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, lifecycle, prepare
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.snapshot.overview import overview
from airflow_roir.options import BuildOptions
from servers.postgres import embedded_postgres

ROWS = 100
BUILDERS = 8
TABLE = f"""
CREATE TABLE shop.t{{n}} (id int PRIMARY KEY, k int);
INSERT INTO shop.t{{n}} SELECT i, i % 7 FROM generate_series(1, {ROWS}) i;
ANALYZE shop.t{{n}}
"""


def main() -> None:
    """Build, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--indexes", type=int, nargs="+", default=[30, 100, 1000])
    parser.add_argument("--looks", type=int, default=3)
    options = parser.parse_args()
    with embedded_postgres(fsync="off") as dsn:
        database = Database(dsn, "roir bench")
        install.init(database)
        with database.transaction() as connection:
            execute(connection, "CREATE SCHEMA shop")
        built = 0
        print("indexes  look    statements  seconds")
        for wanted in sorted(options.indexes):
            # Side by side: a build of a small table mostly waits.
            with ThreadPoolExecutor(BUILDERS) as builders:
                list(builders.map(partial(build, database), range(built + 1, wanted + 1)))
            built = max(built, wanted)
            for name, look in (("page", indexes), ("status", overview)):
                statements, seconds = measure(database, look, options.looks)
                print(f"{wanted:7,}  {name:6}  {statements:10,}  {seconds:7.2f}", flush=True)


def build(database: Database, number: int) -> None:
    """An index over a new table."""
    with database.transaction() as connection:
        execute(connection, TABLE.format(n=number))
    definition = IndexDefinition.parse(f"shop.i{number}", f"shop.t{number}", "k", None)
    begun = prepare.prepare(database, definition, BuildOptions(parallelism=1), "bench")
    lifecycle.run_phases(database, start_run(database, begun.index, "bench", take_over=True))


def measure(database: Database, look: Callable[[Database], object], looks: int) -> tuple[int, float]:
    """The statements of a look, and the middle of its times."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    took = []
    for _ in range(looks):
        sent.clear()
        began = time.perf_counter()
        look(database)
        took.append(time.perf_counter() - began)
    event.remove(database.engine, "before_cursor_execute", note)
    return len(sent), statistics.median(took)


if __name__ == "__main__":
    main()
