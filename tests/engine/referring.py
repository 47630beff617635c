"""A child with a foreign key to a unique index, and a twin: a child with PostgreSQL's own foreign key to a table
without partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg2
import psycopg2.extensions

from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.reference import prepare
from airflow_roir.engine.snapshot.operation import OperationStatus
from airflow_roir.options import ReferenceOptions
from tests.conftest import run_sql
from tests.engine import steps

INDEX = "orders_by_id"
# o, p: the parent and the child. The child's added column has no place in the twin.
OURS, TWIN = {"o": "orders", "p": "payments"}, {"o": "twin_orders", "p": "twin_payments"}
YEARS = (2023, 2024, 2025)
FILL = (
    "INSERT INTO {o} SELECT i, date '2023-06-01' + (i %% 3) * 365, i FROM generate_series(1, 6) i".replace("%%", "%"),
    "INSERT INTO {p} (id, order_id, v) SELECT i, CASE WHEN i < 5 THEN i END, i FROM generate_series(1, 6) i",
)
# How the actions are written in SQL.
SQL = {
    "no-action": "NO ACTION",
    "restrict": "RESTRICT",
    "cascade": "CASCADE",
    "set-null": "SET NULL",
    "set-default": "SET DEFAULT",
}


def make_parent(dsn: str, rows: int = 6) -> None:
    """Creates the parent with a partition for each year."""
    run_sql(
        dsn,
        "CREATE TABLE orders (id bigint, created date, v int, PRIMARY KEY (id, created)) PARTITION BY RANGE (created)",
        *(
            f"CREATE TABLE orders_{year} PARTITION OF orders FOR VALUES FROM ('{year}-01-01') TO ('{year + 1}-01-01')"
            for year in YEARS
        ),
        f"INSERT INTO orders SELECT i, date '2023-06-01' + (i % 3) * 365, i FROM generate_series(1, {rows}) i",
    )


def make_child(dsn: str, rows: int = 6, default: str = "NULL") -> None:
    """Creates the child; the first four rows refer to orders, the others to none."""
    run_sql(
        dsn,
        f"CREATE TABLE payments (id bigint PRIMARY KEY, order_id bigint DEFAULT {default}, v int)",
        "INSERT INTO payments SELECT i, CASE WHEN i % 6 BETWEEN 1 AND 4 THEN i % 6 END, i "
        f"FROM generate_series(1, {rows}) i",
        "CREATE INDEX ON payments (order_id)",
    )


def make_twin(dsn: str, on_delete: str, on_update: str, deferred: bool) -> None:
    """Creates the twin, with the same rows."""
    when = " DEFERRABLE INITIALLY DEFERRED" if deferred else ""
    run_sql(
        dsn,
        "CREATE TABLE twin_orders (id bigint PRIMARY KEY, created date, v int)",
        "INSERT INTO twin_orders SELECT * FROM orders",
        "CREATE TABLE twin_payments (LIKE payments INCLUDING ALL)",
        "INSERT INTO twin_payments SELECT * FROM payments",
        "ALTER TABLE twin_payments ADD CONSTRAINT payments_order_id_fkey FOREIGN KEY (order_id) REFERENCES twin_orders "
        f"ON DELETE {SQL[on_delete]} ON UPDATE {SQL[on_update]}{when}",
    )


def begin(database: Database, **how: Any) -> int:
    """Begins the reference; returns its operation."""
    options = ReferenceOptions(**how.pop("options", {}))
    return prepare.begin(database, "payments(order_id)", INDEX, options, "test", **how).operation_id


def refer(database: Database, **how: Any) -> OperationStatus:
    """Makes the reference from beginning to end."""
    operation = begin(database, **how)
    return lifecycle.drive(database, INDEX, "test", operation=operation)


def make_pair(database: Database, dsn: str, **how: Any) -> None:
    """Makes parent, index, child, reference and twin."""
    make_parent(dsn)
    make_child(dsn, default=how.pop("default", "NULL"))
    steps.make_index(database, INDEX, "orders", "id", unique=True)
    make_twin(dsn, how.get("on_delete", "no-action"), how.get("on_update", "no-action"), how.get("deferred", False))
    refer(database, **how)


class Side:
    """One of both in a session. names: `OURS` or `TWIN`."""

    def __init__(self, dsn: str, names: dict[str, str], isolation: str = "READ COMMITTED") -> None:
        self.connection = steps.session(dsn, isolation)
        self.names = names

    def run(self, statements: Sequence[str]) -> tuple[Any, ...]:
        """Sends statements in one transaction; returns what clients see: the error's fields, and the rows left."""
        error: tuple[Any, ...] = ()
        try:
            with self.connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement.format(**self.names))
            self.connection.commit()
        except psycopg2.Error as caught:
            error = fields(caught)
            self.connection.rollback()
        return error, self.rows()

    def rows(self) -> tuple[Any, ...]:
        """All rows, without the added column."""
        found = tuple(
            tuple(steps.sql(self.connection, query.format(**self.names)))
            for query in ("SELECT id, created, v FROM {o} ORDER BY 1, 2", "SELECT id, order_id, v FROM {p} ORDER BY 1")
        )
        self.connection.commit()
        return found

    def close(self) -> None:
        """Ends the session."""
        self.connection.close()


def fields(error: psycopg2.Error) -> tuple[Any, ...]:
    """The fields of an error that clients look at, with the names of ours."""
    diag = error.diag
    said = (diag.sqlstate, diag.message_primary, diag.message_detail, diag.schema_name, diag.table_name)
    return tuple(one.replace("twin_", "") if one else one for one in (*said, diag.constraint_name))


UNFILLED = "SELECT count(*) FROM payments WHERE (order_id IS NULL) <> (order_created IS NULL)"
WRONG = """
SELECT count(*) FROM payments p WHERE p.order_id IS NOT NULL
   AND NOT EXISTS (SELECT FROM orders o WHERE o.id = p.order_id AND o.created = p.order_created)
"""


def wrong(dsn: str) -> tuple[int, int]:
    """The child's rows that have only a part of the key, and those whose parent isn't there."""
    session = steps.session(dsn)
    try:
        return steps.sql(session, UNFILLED)[0][0], steps.sql(session, WRONG)[0][0]
    finally:
        session.close()
