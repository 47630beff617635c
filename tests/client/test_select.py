"""SELECTs that an index can serve open only the partitions of their rows; all others stay as they are."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from sqlalchemy import and_, bindparam, case, func, literal, or_, select
from sqlalchemy.orm import Session, aliased, joinedload, selectinload

from roir_client.sqlalchemy import use_indexes
from tests.client.shop import DRIVERS, Heard, Order, Payment, engine_of, locked, orders, payments

ALIAS = orders.alias("o")
# Statements, and in how many partitions their rows are; 12 if they stay as they are.
CASES: dict[str, tuple[Any, int]] = {
    "equal": (select(orders).where(orders.c.no == "no7"), 1),
    "turned round": (select(orders).where(literal("no7") == orders.c.no), 1),
    "in": (select(orders).where(orders.c.no.in_(["no7", "no8", None])), 2),
    "in, no value": (select(orders).where(orders.c.no.in_([])), 0),
    "none found": (select(orders).where(orders.c.no == "nothing"), 0),
    "null": (select(orders).where(orders.c.customer.is_(None), orders.c.status == "open"), 2),
    "two columns": (select(orders).where(orders.c.customer == 7, orders.c.status == "open"), 2),
    "is null after equal": (select(orders).where(orders.c.customer == 7, orders.c.status.is_(None)), 2),
    "not the first column": (select(orders).where(orders.c.status == "open"), 12),
    "with others": (select(orders).where(and_(orders.c.no == "no7", or_(orders.c.id > 3, orders.c.note == "x"))), 1),
    "or": (select(orders).where(or_(orders.c.no == "no7", orders.c.id == 8)), 12),
    "not": (select(orders).where(~(orders.c.no == "no7")), 12),
    "a function around": (select(orders).where(func.lower(orders.c.no) == "no7"), 12),
    "a collation": (select(orders).where(orders.c.no.collate("C") == "no7"), 12),
    "partition key known": (select(orders).where(orders.c.id == 7, orders.c.created == date(2007, 8, 8)), 1),
    "alias": (select(ALIAS.c.id).where(ALIAS.c.no == "no7"), 1),
    "one of two aliases": (
        select(ALIAS.c.id, orders.c.id).where(ALIAS.c.no == "no7", orders.c.id < 3, ALIAS.c.id == orders.c.id),
        12,
    ),
    "values expanded before": (
        select(orders.c.id, case((orders.c.id.in_([1, 2]), 1), else_=2)).where(orders.c.no == "no7").limit(3),
        1,
    ),
    "values expanded before and behind": (
        select(orders.c.id, orders.c.id.in_([1, 2])).where(orders.c.no.in_(["no7", "no8"]), orders.c.id > 3),
        12,
    ),
    "two tables": (
        select(orders.c.id, ALIAS.c.id).where(orders.c.no == "no7", ALIAS.c.no == "no8", orders.c.id < ALIAS.c.id),
        2,
    ),
    # Found: the look-up failed for want of the value.
    "a value written into the text": (
        select(orders).where(orders.c.no == bindparam("n", "no7", literal_execute=True), orders.c.customer == 7),
        6,
    ),
    "count": (select(func.count()).select_from(orders).where(orders.c.no == "no7"), 1),
    "for update": (select(orders).where(orders.c.no == "no7").with_for_update(), 1),
    "join": (
        select(orders.c.no, payments.c.id).join(payments, payments.c.order_id == orders.c.id).where(orders.c.id == 7),
        1,
    ),
    "sub-query": (select(payments).where(payments.c.id.in_(select(orders.c.id).where(orders.c.no == "no7"))), 12),
}
TOO_MANY = orders.c.no.in_([f"no{n}" for n in range(5)])


def rows(connection: Any, statement: Any) -> list[Any]:
    return sorted(connection.execute(statement).all(), key=str)


@pytest.mark.parametrize("driver", DRIVERS)
def test_partitions_of_the_rows_alone_are_opened(shop_dsn: str, driver: str) -> None:
    engine = engine_of(shop_dsn, driver)
    use_indexes(engine, least_partitions=1)
    wrong = {}
    for name, (statement, partitions) in CASES.items():
        # psycopg prepares what it has executed five times.
        for _ in range(7 if name == "equal" else 1):
            with engine.connect() as connection:
                found = rows(connection, statement)
                if (opened := locked(connection)) != partitions:
                    wrong[name] = opened
                assert found == rows(connection, statement.execution_options(roir=False)), name
    assert wrong == {}
    engine.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_orm_finds_its_objects(shop_dsn: str, driver: str) -> None:
    engine = engine_of(shop_dsn, driver)
    indexes = use_indexes(engine, least_partitions=1)
    other = aliased(Order)
    with Session(engine) as session:
        assert session.get_one(Order, 7).no == "no7"
        assert session.scalars(select(Order).where(Order.no == "no8")).one().id == 8
        assert session.scalars(select(Order).filter_by(customer=7, status="open")).all()
        assert session.scalars(select(other).where(other.no == "no8")).one().id == 8
        assert session.query(Order).filter(Order.no == "no9").one().id == 9
        assert locked(session.connection()) == 4
    with Session(engine) as session:
        assert len(session.get_one(Payment, 20).order.payments) == 2
        loaded = session.scalars(select(Payment).where(Payment.id.in_([30, 42])).options(selectinload(Payment.order)))
        assert [payment.order.no for payment in loaded] == ["no31", "no43"]
        limited = select(Order).where(Order.no == "no33").options(joinedload(Order.payments)).limit(2)
        assert [len(order.payments) for order in session.scalars(limited).unique()] == [2]
        assert locked(session.connection()) == 2
    assert indexes.counts.keys() == {"rewritten"}
    engine.dispose()


def test_values_may_come_with_the_execution(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1)
    named = select(orders.c.id).where(orders.c.no == bindparam("wanted"))
    anonymous = select(orders.c.id).where(orders.c.no == "no1")
    several = select(orders.c.id).where(orders.c.no.in_(bindparam("some", expanding=True))).order_by(orders.c.id)
    with engine.connect() as connection:
        for number in (5, 6):
            assert connection.execute(named, {"wanted": f"no{number}"}).scalar() == number
            assert connection.execute(named.params(wanted=f"no{number}")).scalar() == number
            assert connection.execute(anonymous, {"no_1": f"no{number}"}).scalar() == number
        assert connection.execute(several, {"some": ["no3", "no2"]}).scalars().all() == [2, 3]
    assert indexes.counts == {"rewritten": 7}
    engine.dispose()


def test_one_compiled_form_serves_all_values(shop_dsn: str) -> None:
    """Otherwise SQLAlchemy would compile each statement."""
    engine = engine_of(shop_dsn, "psycopg2")
    use_indexes(engine, least_partitions=1)
    compiled: Any = engine._compiled_cache
    with engine.connect() as connection:
        for number in range(1, 30):
            assert connection.execute(select(orders.c.id).where(orders.c.no == f"no{number}")).scalar() == number
            if number == 1:
                before = len(compiled)
    assert len(compiled) == before
    engine.dispose()


def test_what_is_done_can_be_seen_and_switched(shop_dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(shop_dsn, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1, enabled=False)
    heard = Heard(engine)
    statement = select(orders.c.id).where(orders.c.no == "no7")
    plain = str(statement.compile(engine)).split("WHERE ")[1]

    def sent(**options: Any) -> list[str]:
        heard.statements.clear()
        with engine.connect().execution_options(**options) as connection:
            assert connection.execute(statement).scalars().all() == [7]
        return heard.statements

    assert len(sent()) == 1
    indexes.enabled = True
    with caplog.at_level("DEBUG", logger="roir_client"):
        assert "roir.look_up" in sent()[-2]
    assert caplog.messages[-1] == "index shop.by_no: found, 1 rows"
    added = "shop.orders.id IN (E'7') AND shop.orders.created IN (E'2007-08-08') AND "
    assert sent()[-1].split("WHERE ")[1] == added + plain
    assert len(sent(roir=False)) == 1
    indexes.stop()
    assert len(sent()) == 1
    engine.dispose()


def test_more_rows_than_the_bound_stay_with_the_plain_statement(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1, most_rows=4)
    with engine.connect() as connection:
        of_one = select(orders.c.id).where(orders.c.customer == 7)
        for statement in (of_one, of_one.where(orders.c.status == "open"), select(orders.c.id).where(TOO_MANY)):
            assert rows(connection, statement) == rows(connection, statement.execution_options(roir=False))
    assert indexes.counts == {"many": 1, "rewritten": 1, "values": 1}
    engine.dispose()
    few_partitions = engine_of(shop_dsn, "psycopg2")
    assert not use_indexes(few_partitions).counts
    few_partitions.dispose()
