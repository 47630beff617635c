"""UPDATE and DELETE that an index can serve open only the partitions of their rows, also those of the unit of work."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import Any

import pytest
from sqlalchemy import bindparam, delete, event, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, selectinload
from sqlalchemy.pool import NullPool

from roir_client.sqlalchemy import use_indexes
from tests.client.shop import DRIVERS, PARTITIONS, Order, Payment, engine_of, locked, orders, payments

CASES: dict[str, tuple[Any, int]] = {
    "update": (update(orders).where(orders.c.no == "no7").values(note="x"), 1),
    "update of several": (update(orders).where(orders.c.no.in_(["no7", "no8"])).values(note="x"), 2),
    "update of the key": (update(orders).where(orders.c.no == "no7").values(no="another"), 1),
    "update of none": (update(orders).where(orders.c.no == "nothing").values(note="x"), 0),
    "update, returning": (update(orders).where(orders.c.id == 7).values(note="x").returning(orders.c.no), 1),
    "update from": (
        update(orders).where(orders.c.id == 7, payments.c.order_id == orders.c.id).values(note=payments.c.amount),
        1,
    ),
    "a row that moves": (update(orders).where(orders.c.id == 7).values(created=date(2003, 1, 1)), 2),
    "update of all": (update(orders).values(note="x"), 12),
    "delete": (delete(orders).where(orders.c.no == "no7"), 1),
    "delete, returning": (delete(orders).where(orders.c.customer == 7, orders.c.status == "open").returning(orders), 2),
    "orm update": (update(Order).where(Order.no == "no7").values(note="x"), 1),
    "orm delete": (delete(Order).where(Order.no == "no7"), 1),
}
ALL = select(orders).order_by(orders.c.id, orders.c.created)


def effect(session: Session, statement: Any, **options: Any) -> tuple[Any, int, Any]:
    """The result of a statement, the number of partitions that it locks, and the rows of the table after it."""
    result: Any = session.execute(statement, execution_options=options)
    told = sorted(map(str, result)) if result.returns_rows else result.rowcount
    opened = locked(session.connection())
    after = session.execute(ALL).all()
    session.rollback()
    return told, opened, after


@pytest.mark.parametrize("driver", DRIVERS)
def test_partitions_of_the_rows_alone_are_opened(shop_dsn: str, driver: str) -> None:
    engine = engine_of(shop_dsn, driver)
    use_indexes(engine, least_partitions=1)
    with Session(engine) as session:
        for name, (statement, partitions) in CASES.items():
            told, opened, after = effect(session, statement)
            assert (name, opened) == (name, partitions)
            assert (told, after) == effect(session, statement, roir=False)[::2], name
    engine.dispose()


@pytest.mark.parametrize("synchronize", ["evaluate", "fetch", False])
def test_sessions_follow_what_they_change(shop_dsn: str, synchronize: Any) -> None:
    engine = engine_of(shop_dsn, "psycopg")
    use_indexes(engine, least_partitions=1)
    with Session(engine) as session:
        order = session.get_one(Order, 7)
        session.execute(
            update(Order).where(Order.no == "no7").values(note="x"),
            execution_options={"synchronize_session": synchronize},
        )
        assert order.note == (None if synchronize is False else "x")
        assert locked(session.connection()) == 1
    engine.dispose()


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_unit_of_work_writes_by_the_id(shop_dsn: str, driver: str) -> None:
    engine = engine_of(shop_dsn, driver)
    indexes = use_indexes(engine, least_partitions=1)
    with Session(engine) as session:
        order = session.get_one(Order, 7)
        order.note = "changed"
        session.flush()
        order.created = date(2003, 3, 3)
        session.flush()
        session.refresh(order)
        assert (order.note, order.created) == ("changed", date(2003, 3, 3))
        session.delete(session.get_one(Order, 600, options=[selectinload(Order.payments)]))
        for payment in session.scalars(select(Payment).where(Payment.order_id == 600)):
            session.delete(payment)
        session.flush()
        session.add(Order(id=1000, created=date(2001, 1, 1), no="new"))
        session.flush()
        # Its own writes.
        assert session.scalars(select(Order).where(Order.no == "new")).one().id == 1000
        assert session.scalars(select(Order).where(Order.no == "no600")).all() == []
        assert locked(session.connection()) == 4
        session.commit()
        assert session.get(Order, 600) is None
    assert set(indexes.counts) == {"rewritten"}
    engine.dispose()


def test_several_sets_of_parameters_stay(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1)
    with engine.begin() as connection:
        statement = update(orders).where(orders.c.no == bindparam("which")).values(note=bindparam("what"))
        connection.execute(statement, [{"which": "no7", "what": "a"}, {"which": "no8", "what": "b"}])
        assert not indexes.counts
        connection.execute(statement, {"which": "no7", "what": "c"})
        assert indexes.counts == {"rewritten": 1}
        found = select(orders.c.note).where(orders.c.id.in_([7, 8])).order_by(orders.c.id)
        assert connection.execute(found).scalars().all() == ["c", "b"]
    engine.dispose()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_async_engines(shop_dsn: str, driver: str) -> None:
    async def use() -> None:
        url = shop_dsn.replace("postgresql://", f"postgresql+{driver}://", 1)
        engine = create_async_engine(url, poolclass=NullPool)
        indexes = use_indexes(engine, least_partitions=1)

        async def opened(connection: AsyncConnection) -> int:
            return await connection.run_sync(locked)

        async with engine.connect() as connection:
            for number in range(1, 8):
                found = await connection.execute(select(orders.c.id).where(orders.c.no == f"no{number}"))
                assert found.scalars().all() == [number]
            assert await opened(connection) == 7
        async with AsyncSession(engine) as session:
            order = await session.get_one(Order, 7, options=[selectinload(Order.payments)])
            order.note = "changed"
            await session.flush()
            some = select(Order).where(Order.no.in_(["no7", "no8"])).order_by(Order.id)
            assert [one.id for one in await session.scalars(some)] == [7, 8]
            streamed = await session.stream(select(Order.id).where(Order.customer == 7, Order.status == "open"))
            assert len([row async for row in streamed]) == 4
            assert await opened(await session.connection()) == 4
        assert set(indexes.counts) == {"rewritten"}
        await engine.dispose()

    asyncio.run(use())


def test_an_engine_that_is_stopped_has_no_listener(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1)
    assert event.contains(engine, "before_cursor_execute", indexes._before_cursor_execute)
    again = use_indexes(engine, least_partitions=1)
    with engine.connect() as connection:
        connection.execute(select(orders).where(orders.c.no == "no7"))
    assert (indexes.counts, again.counts) == ({}, {"rewritten": 1})
    indexes.stop()
    again.stop()
    again.stop()
    assert not event.contains(engine, "before_cursor_execute", again._before_cursor_execute)
    assert not event.contains(engine, "before_cursor_execute", indexes._before_cursor_execute)
    assert PARTITIONS == 12
    engine.dispose()
