"""A table of orders with indexes, and an application of it that uses them by SQLAlchemy."""

from __future__ import annotations

from datetime import date
from typing import Any

from sqlalchemy import Connection, Engine, ForeignKey, create_engine, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps

PARTITIONS = 12
DRIVERS = ("psycopg2", "psycopg")
ORDERS = (
    "CREATE SCHEMA shop",
    "CREATE TABLE shop.orders (id int, created date, no text, customer int, status text DEFAULT 'open', "
    "note text, PRIMARY KEY (id, created)) PARTITION BY RANGE (created)",
    *(
        f"CREATE TABLE shop.orders_{n} PARTITION OF shop.orders "
        f"FOR VALUES FROM ('{2000 + n}-01-01') TO ('{2001 + n}-01-01')"
        for n in range(PARTITIONS)
    ),
    f"INSERT INTO shop.orders SELECT i, make_date(2000 + i % {PARTITIONS}, 1 + i % 12, 1 + i % 28), 'no' || i, "
    "nullif(i % 50, 3), CASE i % 3 WHEN 0 THEN 'open' WHEN 1 THEN 'paid' END FROM generate_series(1, 600) i",
    "CREATE TABLE shop.payments (id int PRIMARY KEY, order_id int, amount int)",
    "INSERT INTO shop.payments SELECT i, i % 600 + 1, i FROM generate_series(1, 900) i",
    "CREATE TABLE shop.big_orders (order_ptr_id int PRIMARY KEY, extra int)",
    "ANALYZE",
)
INDEXES = (
    ("shop.by_no", "shop.orders", "no", {"unique": True}),
    ("shop.by_customer", "shop.orders", "customer,status", {}),
    ("shop.by_id", "shop.orders", "id", {"unique": True}),
)


def make(dsn: str) -> None:
    """Makes the tables and builds the indexes."""
    run_sql(dsn, *ORDERS)
    database = Database(dsn, "roir tests")
    for index, table, keys, how in INDEXES:
        steps.make_index(database, index, table, keys, **how)
    database.engine.dispose()


class Base(DeclarativeBase):
    """The application's models."""


class Order(Base):
    """An order, by its id alone, as most applications map it."""

    __tablename__ = "orders"
    __table_args__ = {"schema": "shop"}
    id: Mapped[int] = mapped_column(primary_key=True)
    created: Mapped[date]
    no: Mapped[str]
    customer: Mapped[int | None]
    status: Mapped[str | None]
    note: Mapped[str | None]
    payments: Mapped[list[Payment]] = relationship(back_populates="order", order_by="Payment.id")


class Payment(Base):
    """A payment of an order."""

    __tablename__ = "payments"
    __table_args__ = {"schema": "shop"}
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("shop.orders.id"))
    amount: Mapped[int]
    order: Mapped[Order] = relationship(back_populates="payments")


orders: Any = Order.__table__
payments: Any = Payment.__table__


def engine_of(dsn: str, driver: str, **options: Any) -> Engine:
    """An engine of the application."""
    return create_engine(dsn.replace("postgresql://", f"postgresql+{driver}://", 1), **options)


class Heard:
    """The texts of the statements that an engine sends."""

    def __init__(self, engine: Engine) -> None:
        self.statements: list[str] = []
        event.listen(engine, "before_cursor_execute", self._hear)

    def _hear(self, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.statements.append(statement)

    @property
    def last(self) -> str:
        """The last one."""
        return self.statements[-1]


LOCKED = text(
    "SELECT count(DISTINCT l.relation) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation "
    "WHERE i.inhparent = 'shop.orders'::regclass AND l.pid = pg_backend_pid()"
)


OF_INDEXES = text(
    "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation IN (to_regclass('shop.by_no'), "
    "to_regclass('shop.by_customer'), to_regclass('shop.by_id'))"
)


def locked(connection: Connection) -> int:
    """How many partitions of the orders the transaction has locked. It must have no lock of an index.

    Found: a publish, which locks the source and then the view, and users who had the view and wrote to the source,
    waited for each other, until the publish gave up, again and again.
    """
    assert connection.execute(OF_INDEXES).scalar_one() == 0
    return int(connection.execute(LOCKED).scalar_one())
