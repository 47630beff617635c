"""Mapped classes that share tables: the conditions of what they select from are restricted, or stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Integer, MetaData, Table, Text, select, update
from sqlalchemy.orm import Session, aliased, registry, with_polymorphic

from roir_client.sqlalchemy import use_indexes
from tests.client.shop import engine_of, locked, orders
from tests.conftest import run_sql

metadata = MetaData()
base = Table("orders", metadata, *(column._copy() for column in orders.columns), schema="shop")
gifts = Table(
    "gifts",
    metadata,
    Column("id", Integer, ForeignKey("shop.orders.id"), primary_key=True),
    Column("card", Text),
    schema="shop",
)
mapping = registry()


class Sale:
    """An order of any kind."""

    id: Any
    no: Any
    card: Any


class Paid(Sale):
    """An order with a status of its own, in the same table."""


class Gift(Sale):
    """An order with a table of its own besides."""


mapping.map_imperatively(Sale, base, polymorphic_on=base.c.status, polymorphic_identity="open")
mapping.map_imperatively(Paid, inherits=Sale, polymorphic_identity="paid")
mapping.map_imperatively(Gift, gifts, inherits=Sale, polymorphic_identity="gift")


@pytest.fixture
def engine(shop_dsn: str) -> Iterator[Engine]:
    """An engine of a shop that has gifts, with its indexes."""
    run_sql(
        shop_dsn,
        "CREATE TABLE shop.gifts (id int PRIMARY KEY, card text)",
        "UPDATE shop.orders SET status = 'gift' WHERE id % 5 = 0",
        "UPDATE shop.orders SET status = 'open' WHERE status IS NULL",
        "INSERT INTO shop.gifts SELECT id, 'best wishes' FROM shop.orders WHERE status = 'gift'",
    )
    one = engine_of(shop_dsn, "psycopg")
    use_indexes(one, least_partitions=1)
    yield one
    one.dispose()


FLAT = aliased(Gift, flat=True)
EVERY = with_polymorphic(Sale, "*")
EVERY_FLAT = with_polymorphic(Sale, "*", flat=True)
CASES: dict[str, Any] = {
    "base": select(Sale).where(Sale.no == "no10"),
    "single table": select(Paid).where(Paid.no == "no1"),
    "joined": select(Gift).where(Gift.no == "no10"),
    "joined, by both tables": select(Gift).where(Gift.no == "no10", Gift.card == "best wishes"),
    "flat alias": select(FLAT).where(FLAT.no == "no10"),
    "polymorphic": select(EVERY).where(EVERY.no == "no10"),
    "polymorphic, flat": select(EVERY_FLAT).where(EVERY_FLAT.no == "no10"),
    "null of a nullable side": select(EVERY).where(EVERY.Gift.card.is_(None), EVERY.no == "no1"),
    "update": update(Paid).where(Paid.no == "no1").values(note="x"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(4)
@pytest.mark.filterwarnings("error")
def test_classes_find_their_rows(engine: Engine, name: str) -> None:
    told = []
    for options in ({}, {"roir": False}):
        with Session(engine) as session:
            result: Any = session.execute(CASES[name], execution_options=options)
            found = [(type(one), one.id) for one in result.scalars()] if name != "update" else result.rowcount
            told.append((found, locked(session.connection())))
    assert told[0][0] == told[1][0]
    assert told[0][0]
    assert (told[0][1], told[1][1]) == (1, 12)
