"""Measures the gain of an application by `roir_client`: statements by a key, by SQLAlchemy and Django, over partitions.

Sides: `as it is`: the same code without an index; `by hand`: a second table with the key as its primary key, kept by a
trigger, and read before the row; `roir`: a unique index, with roir-client. 0 partitions is a plain table. Several
clients, each a process with one session, send one statement per transaction. Also counted: the relations that a
transaction locks. Run by `make bench-application`; writes benchmarks/results/application.json and .md.
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
from itertools import count as numbers
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import parse_dsn
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    Table,
    Text,
    create_engine,
    delete,
    event,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session, registry

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import drop, install
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
BY_HAND = """
CREATE TABLE orders_by_hand (no text PRIMARY KEY, id int, day int);
INSERT INTO orders_by_hand SELECT no, id, day FROM orders;
CREATE FUNCTION keep_by_hand() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND (OLD.no, OLD.id, OLD.day) IS NOT DISTINCT FROM (NEW.no, NEW.id, NEW.day) THEN
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM orders_by_hand WHERE no = OLD.no;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO orders_by_hand VALUES (NEW.no, NEW.id, NEW.day);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON orders FOR EACH ROW EXECUTE FUNCTION keep_by_hand();
"""
NOT_BY_HAND = "DROP TRIGGER keep ON orders; DROP FUNCTION keep_by_hand; DROP TABLE orders_by_hand"
LOCKED = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation' AND relation > 16383"
AS_IS, HAND, ROIR = "as it is", "by hand", "roir"

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
by_hand = Table("orders_by_hand", MetaData(), Column("no", Text), Column("id", Integer), Column("day", Integer))
_new = numbers(1)


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


def delete_by_no(connection: Connection, number: int) -> None:
    """A row is deleted by its number, and comes back."""
    found = connection.execute(delete(orders).where(orders.c.no == f"no{number}").returning(*orders.c)).one()
    connection.execute(insert(orders).values(**found._mapping))


def insert_one(connection: Connection, number: int) -> None:
    """A new row. Only its writer pays for an index."""
    new = 1_000_000_000 + multiprocessing.current_process()._identity[0] * 1_000_000 + next(_new)  # type: ignore[attr-defined]
    connection.execute(insert(orders).values(id=new, day=number % DAYS, no=f"no{new}", note="x" * 60))


def change_key(connection: Connection, number: int) -> None:
    """A row, which its primary key names, gets another number and the old one back."""
    row = orders.c.id == number, orders.c.day == number % DAYS
    for no in (f"other{number}", f"no{number}"):
        assert connection.execute(update(orders).where(*row).values(no=no)).rowcount == 1


def select_by_hand(connection: Connection, number: int) -> None:
    """A row by its number, which the second table has."""
    found = connection.execute(select(by_hand).where(by_hand.c.no == f"no{number}")).one()
    row = orders.c.id == found.id, orders.c.day == found.day, orders.c.no == f"no{number}"
    assert connection.execute(select(orders).where(*row)).one().id == number


READERS = {"select": select_by_no, "get": get_by_id, "update": update_by_no, "delete": delete_by_no}
WRITERS = {"insert": insert_one, "change the key": change_key}
STATEMENTS: dict[str, Callable[[Connection, int], None]] = {**READERS, **WRITERS}


@contextmanager
def using(dsn: str, driver: str, with_client: bool) -> Iterator[tuple[Engine, Indexes]]:
    """An engine of one side."""
    engine = create_engine(dsn.replace("postgresql://", f"postgresql+{driver}://", 1))
    indexes = use_indexes(engine, least_partitions=1)
    if not with_client:
        indexes.stop()
    yield engine, indexes
    engine.dispose()


@contextmanager
def sqlalchemy_sends(dsn: str, driver: str, side: str, name: str) -> Iterator[Callable[[int], int]]:
    """Sends a statement in a transaction, and gives the number of relations that it has locked if that is asked for."""
    statement = select_by_hand if (side, name) == (HAND, "select") else STATEMENTS[name]
    with using(dsn, driver, side == ROIR) as (engine, _), engine.connect() as connection:

        def send(number: int, count: bool = False) -> int:
            with connection.begin():
                statement(connection, number)
                return int(connection.exec_driver_sql(LOCKED).scalar_one()) if count else 0

        yield send


@contextmanager
def django_sends(dsn: str, _driver: str, side: str, name: str) -> Iterator[Callable[[int], int]]:
    """The same by Django."""
    import django
    from django.conf import settings
    from django.db import connection, transaction

    parts = parse_dsn(dsn)
    place = {"NAME": parts["dbname"], "USER": parts["user"], "HOST": parts["host"], "CONN_MAX_AGE": None}
    options = {"roir": {"least_partitions": 1, "enabled": side == ROIR}}
    settings.configure(DATABASES={"default": {"ENGINE": "roir_client.django", "OPTIONS": options, **place}})
    django.setup()
    from django.db import models

    meta = type("Meta", (), {"app_label": "bench", "db_table": "orders", "managed": False})
    fields = {"id": models.IntegerField(primary_key=True), "day": models.IntegerField()}
    fields |= {name: models.TextField() for name in ("no", "note")}
    orders_of: Any = type("Orders", (models.Model,), {**fields, "Meta": meta, "__module__": __name__}).objects  # type: ignore[attr-defined]
    statements: dict[str, Callable[[int], Any]] = {
        "select": lambda number: orders_of.get(no=f"no{number}"),
        "get": lambda number: orders_of.get(id=number),
        "update": lambda number: orders_of.filter(no=f"no{number}").update(note=str(random.random())),
    }

    def send(number: int, count: bool = False) -> int:
        with transaction.atomic():
            assert statements[name](number)
            if not count:
                return 0
            with connection.cursor() as cursor:
                cursor.execute(LOCKED)
                return int(cursor.fetchone()[0])

    yield send
    connection.close()


ORMS: dict[str, Any] = {"SQLAlchemy": sqlalchemy_sends, "Django": django_sends}


def client(orm: str, of: tuple[str, str, str, str], rows: int, seconds: float, seed: int, done: Any) -> None:
    """Sends one statement per transaction for some seconds; puts how many into `done`, and the relations locked."""
    chance = random.Random(seed)
    with ORMS[orm](*of) as send:
        count = locks = 0
        begun = until = 0.0
        while count < 3 or time.perf_counter() < until:
            locks = max(locks, send(chance.randint(1, rows), count == 1))
            count += 1
            if count == 2:
                begun = time.perf_counter()
                until = begun + seconds
    done.put(((count - 2) / (time.perf_counter() - begun), locks))


def measured(orm: str, of: tuple[str, str, str, str], options: argparse.Namespace) -> tuple[float, int]:
    """The transactions per second of all clients, and the relations that one of them locked."""
    done: Any = multiprocessing.Queue()
    clients = [
        multiprocessing.Process(target=client, args=(orm, of, options.rows, options.seconds, seed, done))
        for seed in range(options.clients)
    ]
    for one in clients:
        one.start()
    found = [done.get() for _ in clients]
    for one in clients:
        one.join()
    return sum(rate for rate, _ in found), found[0][1]


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


def measure(count: int, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All sides over a number of partitions."""
    results = []

    def take(side: str, orm: str, names: Any) -> None:
        for name in names:
            rate, locks = measured(orm, (dsn, options.driver, side, name), options)
            row = {"partitions": count, "orm": orm, "statement": name, "side": side}
            results.append(row | {"per_second": round(rate, 1), "locks": locks})
            print(results[-1], flush=True)

    with embedded_postgres(options.pg, fsync="off", settings="max_locks_per_transaction = 1024") as dsn:
        database = Database(dsn, "roir bench")
        install.init(database)
        connection = psycopg2.connect(dsn)
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(PARTITIONED.format(last=count - 1, width=DAYS // count) if count else PLAIN)
        cursor.execute(ROWS.format(rows=options.rows))
        cursor.execute("VACUUM (ANALYZE) orders")
        take(AS_IS, "SQLAlchemy", STATEMENTS)
        take(AS_IS, "Django", ("select", "get", "update"))
        if count == 0:
            return results, {}
        cursor.execute(BY_HAND)
        cursor.execute("VACUUM (ANALYZE) orders_by_hand")
        take(HAND, "SQLAlchemy", ("select", *WRITERS))
        cursor.execute(NOT_BY_HAND)
        for name, key in (("orders_by_no", "no"), ("orders_by_id", "id")):
            build_index(database, IndexDefinition.parse(name, "orders", key, unique=True), parallelism=1)
        take(ROIR, "SQLAlchemy", READERS)
        take(ROIR, "Django", ("select", "get", "update"))
        overhead = overhead_us(dsn, options.driver)
        # The table by hand has one key, too.
        drop.drop_index(database, "orders_by_id", "benchmark")
        take(ROIR, "SQLAlchemy", WRITERS)
        database.engine.dispose()
        connection.close()
    return results, overhead


def told(results: list[dict[str, Any]]) -> str:
    """The transactions per second and locks as a table: a line for each statement, a column for each side."""
    lines = [f"| partitions | statement | {AS_IS} | {HAND} | {ROIR} |", "| --- | --- | --- | --- | --- |"]
    found: dict[Any, dict[str, str]] = {}
    for row in results:
        key = row["partitions"], f"{row['orm']}: {row['statement']}"
        found.setdefault(key, {})[row["side"]] = f"{row['per_second']:,.0f} ({row['locks']:,} locks)"
    for (partitions, statement), sides in found.items():
        shown = " | ".join(sides.get(side, "") for side in (AS_IS, HAND, ROIR))
        lines.append(f"| {partitions:,} | {statement} | {shown} |")
    return "\n".join(lines)


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
        found, taken = measure(count, options)
        results += found
        overhead = taken or overhead
    table = told(results)
    print(table, overhead, sep="\n")
    RESULTS.mkdir(exist_ok=True)
    facts = vars(options) | {"microseconds": overhead, "results": results}
    (RESULTS / "application.json").write_text(json.dumps(facts, indent=1) + "\n")
    (RESULTS / "application.md").write_text(
        f"# An application's statements\n\n"
        f"Transactions per second of {options.clients} clients over {options.rows:,} rows, "
        f"by `make bench-application` ({options.driver}, PostgreSQL {options.pg}).\n\n{table}\n\n"
        f"Microseconds of the interception: {json.dumps(overhead)}.\n"
    )


if __name__ == "__main__":
    main()
