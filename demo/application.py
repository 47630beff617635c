"""The application: a query by SQLAlchemy that knows no index, before and after `use_indexes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, select, text

from demo.dataset import Dataset
from roir_client.sqlalchemy import use_indexes

_OPENED = text(
    "SELECT count(DISTINCT l.relation) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation "
    "WHERE i.inhparent = to_regclass(:parent) AND l.pid = pg_backend_pid()"
)


@dataclass(frozen=True)
class Asked:
    """The rows that the query found, and in how many partitions it looked, before and after."""

    keys: str
    rows: tuple[int, int]
    partitions: tuple[int, int]
    same: bool


def ask(dataset: Dataset, dsn: str) -> Asked:
    """Asks for the rows with the key of one of them."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://", 1))
    schema, name = dataset.table.split(".")
    table = Table(name, MetaData(), schema=schema, autoload_with=engine)
    keys = [table.c[key.strip()] for key in (dataset.unique or dataset).keys.split(",")]
    with engine.connect() as connection:
        values = connection.execute(select(*keys).where(*(key.is_not(None) for key in keys)).limit(1)).one()
    query = select(table).where(*(key == value for key, value in zip(keys, values, strict=True)))
    try:
        before = _found(engine, query, dataset)
        # The demo's tables have few partitions; by default tables with fewer than 100 aren't worth it.
        use_indexes(engine, least_partitions=1)
        after = _found(engine, query, dataset)
    finally:
        engine.dispose()
    named = ", ".join(key.name for key in keys)
    return Asked(named, (len(before[0]), len(after[0])), (before[1], after[1]), before[0] == after[0])


def _found(engine: Engine, query: Any, dataset: Dataset) -> tuple[list[Any], int]:
    connection: Connection
    with engine.connect() as connection:
        rows = connection.execute(query).all()
        return sorted(rows, key=str), int(connection.execute(_OPENED, {"parent": dataset.table}).scalar_one())
