"""Upserts by a unique index: what is done to the row, and what others commit between an attempt's two statements."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from roir_client.sqlalchemy import Upserted, upsert, use_indexes
from tests.client.shop import DRIVERS, Heard, Order, engine_of
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.test_compact_attacks import waits_for_a_lock

DAY = date(2003, 5, 1)
# Another session's statement between the question and the INSERT.
NEW = "INSERT INTO shop.orders (id, created, no) VALUES (901, '2005-01-01', 'new')"


@pytest.fixture(params=[*DRIVERS, "with look-ups"])
def engine(shop_dsn: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine by each driver, and one whose statements use the indexes."""
    made = engine_of(shop_dsn, request.param if request.param in DRIVERS else "psycopg")
    if request.param not in DRIVERS:
        use_indexes(made, least_partitions=1)
    yield made
    made.dispose()


@pytest.fixture
def plain(shop_dsn: str) -> Iterator[Engine]:
    """An engine."""
    made = engine_of(shop_dsn, "psycopg")
    yield made
    made.dispose()


def order(session: Session, no: str, by: Any = "shop.by_no", **values: Any) -> Upserted[Order]:
    return upsert(session, Order, {"no": no, **values}, by=by, new={"id": 900, "created": DAY})


def rows(engine: Engine, no: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        asked = text("SELECT id, created, note FROM shop.orders WHERE no = :no ORDER BY id")
        return [tuple(row) for row in connection.execute(asked, {"no": no})]


def between(engine: Engine, *others: Callable[[], None]) -> Heard:
    """Calls the next of these before each INSERT."""
    waits = [*others]

    def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT") and waits:
            waits.pop(0)()

    event.listen(engine, "before_cursor_execute", before)
    return Heard(engine)


@pytest.mark.parametrize("by", ["shop.by_no", "by_no", [Order.no], ["no"]])
def test_a_row_is_inserted_or_updated(engine: Engine, by: Any) -> None:
    with Session(engine) as session, session.begin():
        was = order(session, "no7", by, note="seen")
        assert (was.inserted, was.row.id, was.row.created) == (False, 7, date(2007, 8, 8))
        made = order(session, "none yet", by, note="made")
        assert (made.inserted, made.row.id) == (True, 900)
        again = order(session, "none yet", by, note="again")
        assert (again.inserted, again.row) == (False, made.row)
    assert rows(engine, "no7") == [(7, date(2007, 8, 8), "seen")]
    assert rows(engine, "none yet") == [(900, DAY, "again")]


def test_a_row_that_others_insert_meanwhile_is_updated(engine: Engine, shop_dsn: str) -> None:
    between(engine, lambda: None, lambda: run_sql(shop_dsn, NEW))
    with Session(engine) as session, session.begin():
        session.add(Order(id=950, created=DAY, no="the application's own"))
        made = order(session, "new", note="late")
        assert (made.inserted, made.row.id) == (False, 901)
    assert rows(engine, "new") == [(901, date(2005, 1, 1), "late")]
    assert rows(engine, "the application's own")


def test_a_row_that_comes_and_goes_is_inserted_at_last(plain: Engine, shop_dsn: str) -> None:
    heard = between(plain, lambda: run_sql(shop_dsn, NEW))
    event.listen(plain, "rollback_savepoint", lambda *_: run_sql(shop_dsn, "DELETE FROM shop.orders WHERE id = 901"))
    with Session(plain) as session, session.begin():
        assert order(session, "new").inserted
    assert [row[0] for row in rows(plain, "new")] == [900]
    assert sum(said.startswith("INSERT") for said in heard.statements) == 2


def test_a_row_that_is_hidden_ends_the_attempts(plain: Engine, shop_dsn: str) -> None:
    """A policy hides the row that has the key: no attempt can find it."""
    run_sql(
        shop_dsn,
        "CREATE ROLE app",
        "GRANT USAGE ON SCHEMA shop TO app",
        "GRANT ALL ON shop.orders, shop.by_no TO app",
        "ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY visible ON shop.orders USING (id <> 7) WITH CHECK (true)",
    )
    heard = Heard(plain)
    try:
        with Session(plain) as session:
            session.execute(text("SET ROLE app"))
            with pytest.raises(IntegrityError, match="by_no"):
                upsert(session, Order, {"no": "no7"}, by="by_no", new={"id": 900, "created": DAY}, attempts=3)
        assert sum(said.startswith("INSERT") for said in heard.statements) == 3
    finally:
        run_sql(shop_dsn, "DROP OWNED BY app", "DROP ROLE app")


def test_another_constraint_is_no_reason_to_look_again(plain: Engine) -> None:
    heard = Heard(plain)
    with Session(plain) as session:
        # Row 7 has the primary key, and the key of another index.
        with pytest.raises(IntegrityError, match="orders_7_pkey"):
            upsert(session, Order, {"no": "other"}, by="by_no", new={"id": 7, "created": date(2007, 8, 8)})
        assert session.scalar(text("SELECT 1")) == 1
        with pytest.raises(IntegrityError, match="by_id"):
            upsert(session, Order, {"no": "other"}, by="by_no", new={"id": 7, "created": DAY})
    assert sum(said.startswith("INSERT") for said in heard.statements) == 2


def test_a_row_that_moves_meanwhile_is_found_in_its_new_partition(plain: Engine, shop_dsn: str) -> None:
    """PostgreSQL refuses (40001) to lock a row that has moved, at READ COMMITTED, too: it is found by a new snapshot.

    The question waits for the transaction that moves the row.
    """
    mover = steps.session(shop_dsn)
    steps.sql(mover, "UPDATE shop.orders SET created = '2001-01-01' WHERE id = 7")
    with Session(plain) as session, session.begin():
        asking = threading.Thread(target=lambda: order(session, "no7", note="x"))
        asking.start()
        waits_for_a_lock(shop_dsn, asking)
        mover.commit()
        asking.join()
    assert rows(plain, "no7") == [(7, date(2001, 1, 1), "x")]


def test_a_row_that_moves_after_its_look_up_is_updated(plain: Engine, shop_dsn: str) -> None:
    use_indexes(plain, least_partitions=1)
    with Session(plain) as session, session.begin():
        order(session, "no8")
        moves = ["UPDATE shop.orders SET created = '2001-01-01' WHERE id = 7"]

        def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if " IN (E'" in statement and moves:
                run_sql(shop_dsn, moves.pop())

        event.listen(plain, "before_cursor_execute", before)
        assert not order(session, "no7", note="x").inserted
        assert not moves
    assert rows(plain, "no7") == [(7, date(2001, 1, 1), "x")]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_one_snapshot_a_younger_row_is_40001(shop_dsn: str, level: Any) -> None:
    engine = engine_of(shop_dsn, "psycopg", isolation_level=level)
    heard = between(engine, lambda: run_sql(shop_dsn, NEW))
    with Session(engine) as session, pytest.raises(OperationalError) as refused:
        order(session, "new")
    assert getattr(refused.value.orig, "sqlstate", "") == "40001"
    assert sum(said.startswith("INSERT") for said in heard.statements) == 1
    with Session(engine) as session, session.begin():
        assert not order(session, "new", note="x").inserted
    engine.dispose()


@pytest.mark.parametrize(
    ("by", "values", "said"),
    [
        ("by_nothing", {"no": "x"}, "shop.orders has no published unique index by_nothing"),
        (["customer", "status"], {"customer": 1, "status": "x"}, "no published unique index customer, status"),
        ("by_customer", {"customer": 1, "status": "x"}, "no published unique index by_customer"),
        ("by_no", {"note": "x"}, "upsert by shop.by_no needs a value of no"),
        ("by_no", {"no": None}, "upsert by shop.by_no needs a value of no"),
    ],
)
def test_what_cant_be_done_is_said(plain: Engine, by: Any, values: dict[str, Any], said: str) -> None:
    with Session(plain) as session, pytest.raises(ValueError, match=said):
        upsert(session, Order, values, by=by)


def test_an_index_that_is_new_is_found(plain: Engine, shop_dsn: str) -> None:
    with Session(plain) as session:
        order(session, "no7")
    run_sql(shop_dsn, "ALTER VIEW shop.by_no RENAME TO by_number")
    with Session(plain) as session:
        assert not order(session, "no7", "by_number").inserted


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_async_sessions_run_it(shop_dsn: str, driver: str) -> None:
    async def use() -> list[bool]:
        engine = create_async_engine(shop_dsn.replace("postgresql://", f"postgresql+{driver}://", 1))
        between(engine.sync_engine, lambda: run_sql(shop_dsn, NEW))
        async with AsyncSession(engine) as session, session.begin():
            done = [await session.run_sync(order, no) for no in ("no7", "new", "none yet")]
        await engine.dispose()
        return [one.inserted for one in done]

    assert asyncio.run(use()) == [False, False, True]
