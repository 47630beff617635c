"""What an application gains by `roir_client`: SQLAlchemy's statements by a key, over more and more partitions.

Each side is the same code: without the client, and with it. 0 partitions is a plain table. Several clients, each a
process with one session, send one statement per transaction. Also counted: the relations that a transaction locks. Run
by `make bench-application`; writes benchmarks/results/application.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg2
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session, registry

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install
from airflow_roir.engine.database import Database
from benchmarks.engine import build_index
from roir_client.sqlalchemy import Indexes, use_indexes
from servers.postgres import embedded_postgres

RESULTS = Path(__file__).parent / "results"
DAYS = 6000
COLUMNS = "id int, day int, no text, note text, PRIMARY KEY (id, day)"
PLAIN = f"CREATE TABLE orders ({COLUMNS}); CREATE TABLE others (id int PRIMARY KEY); INSERT INTO others VALUES (1);"
PARTITIONED = (
    f"CREATE TABLE orders ({COLUMNS}) PARTITION BY RANGE (day);"
    "CREATE TABLE others (id int PRIMARY KEY); INSERT INTO others VALUES (1);"
    "DO $$ BEGIN FOR n IN 0..{last} LOOP "
    "EXECUTE format('CREATE TABLE orders_%s PARTITION OF orders FOR VALUES FROM (%s) TO (%s)', "
    "n, n * {width}, (n + 1) * {width}); END LOOP; END $$;"
)
ROWS = (
    f"INSERT INTO orders SELECT i, i % {DAYS}, 'no' || i, repeat('x', 60) FROM generate_series(1, {{rows}}) i; "
    "CREATE INDEX ON orders (no);"
)
LOCKED = text(
    "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation' AND relation > 16383"
)

mapping = registry()
orders = Table(
    "orders",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("day", Integer),
    Column("no", Text),
    Column("note", Text),
)


class Order:
    """An order, by its id alone."""


mapping.map_imperatively(Order, orders)
others = Table("others", MetaData(), Column("id", Integer, primary_key=True))


def select_by_no(connection: Connection, number: int) -> None:
    """A row by its number."""
    assert connection.execute(select(orders).where(orders.c.no == f"no{number}")).one().id == number


def get_by_id(connection: Connection, number: int) -> None:
    """An object by its id, a part of the primary key."""
    with Session(connection) as session:
        session.get_one(Order, number)


def update_by_no(connection: Connection, number: int) -> None:
    """A change of a row by its number."""
    change = update(orders).where(orders.c.no == f"no{number}").values(note=str(random.random()))
    assert connection.execute(change).rowcount == 1


STATEMENTS: dict[str, Callable[[Connection, int], None]] = {
    "select": select_by_no,
    "get": get_by_id,
    "update": update_by_no,
}


@contextmanager
def using(dsn: str, driver: str, with_client: bool) -> Iterator[tuple[Engine, Indexes]]:
    """An engine of one side."""
    engine = create_engine(dsn.replace("postgresql://", f"postgresql+{driver}://", 1))
    indexes = use_indexes(engine, least_partitions=1)
    if not with_client:
        indexes.stop()
    yield engine, indexes
    engine.dispose()


def client(
    dsn: str, driver: str, with_client: bool, statement: str, rows: int, seconds: float, seed: int, done: Any
) -> None:
    """Sends one statement per transaction for some seconds; puts how many into `done`."""
    chance = random.Random(seed)
    send = STATEMENTS[statement]
    with using(dsn, driver, with_client) as (engine, _):
        count = 0
        begun = until = 0.0
        with engine.connect() as connection:
            while count < 3 or time.perf_counter() < until:
                with connection.begin():
                    send(connection, chance.randint(1, rows))
                count += 1
                if count == 2:
                    begun = time.perf_counter()
                    until = begun + seconds
        done.put((count - 2) / (time.perf_counter() - begun))


def locks(dsn: str, driver: str, with_client: bool, statement: str) -> int:
    """How many relations a transaction of one statement locks."""
    with using(dsn, driver, with_client) as (engine, _), engine.connect() as connection:
        connection.execute(select(others))
        connection.rollback()
        with connection.begin():
            STATEMENTS[statement](connection, 7)
            return int(connection.execute(LOCKED).scalar_one())


def per_second(dsn: str, options: argparse.Namespace, with_client: bool, statement: str) -> float:
    """The transactions per second of all clients."""
    done: Any = multiprocessing.Queue()
    of = dsn, options.driver, with_client, statement, options.rows, options.seconds
    clients = [multiprocessing.Process(target=client, args=(*of, seed, done)) for seed in range(options.clients)]
    for one in clients:
        one.start()
    rates = [done.get() for _ in clients]
    for one in clients:
        one.join()
    return sum(rates)


def overhead_us(dsn: str, driver: str, rounds: int = 2000) -> dict[str, float]:
    """Microseconds that the interception takes: of statements that no index can serve, and of a whole look-up."""
    with using(dsn, driver, True) as (engine, indexes), engine.connect() as connection:
        heard: list[Any] = []

        @event.listens_for(engine, "before_cursor_execute")
        def hear(*sent: Any) -> None:
            heard.append(sent)

        def taken(statement: Any) -> float:
            connection.execute(statement)
            # With a look-up there are two.
            sent = heard[-1]
            found = []
            for _ in range(rounds):
                begun = time.perf_counter()
                indexes._before_cursor_execute(*sent)
                found.append(time.perf_counter() - begun)
            return round(statistics.median(found) * 1e6, 1)

        return {
            "another table": taken(select(others).where(others.c.id == 1)),
            "another condition": taken(select(orders).where(orders.c.note == "x", orders.c.day > 3)),
            "an object of another condition": taken(select(Order).where(orders.c.note == "x")),
            "text": taken(text("SELECT 1")),
            "look-up": taken(select(orders).where(orders.c.no == "no7")),
        }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--partitions", type=int, nargs="+", default=[0, 1, 60, 600, 2000])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--driver", default="psycopg2")
    parser.add_argument("--pg", type=int, default=18)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    overhead: dict[str, float] = {}
    for count in options.partitions:
        with embedded_postgres(options.pg, fsync="off") as dsn:
            database = Database(dsn, "roir bench")
            install.init(database)
            connection = psycopg2.connect(dsn)
            connection.autocommit = True
            with connection.cursor() as cursor:
                made = PARTITIONED.format(last=count - 1, width=DAYS // count) if count else PLAIN
                cursor.execute(made)
                cursor.execute(ROWS.format(rows=options.rows))
                cursor.execute("VACUUM (ANALYZE) orders")
            connection.close()
            if count:
                for name, key in (("orders_by_no", "no"), ("orders_by_id", "id")):
                    definition = IndexDefinition.parse(name, "orders", key, unique=True)
                    build_index(database, definition, parallelism=1)
            database.engine.dispose()
            for statement in STATEMENTS:
                for with_client in (False, True) if count else (False,):
                    row = {
                        "partitions": count,
                        "statement": statement,
                        "client": with_client,
                        "per_second": round(per_second(dsn, options, with_client, statement), 1),
                        "locks": locks(dsn, options.driver, with_client, statement),
                    }
                    results.append(row)
                    print(row, flush=True)
            if count:
                overhead = overhead_us(dsn, options.driver)
                print({"partitions": count, "microseconds": overhead}, flush=True)
    RESULTS.mkdir(exist_ok=True)
    facts = vars(options) | {"microseconds": overhead, "results": results}
    (RESULTS / "application.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
