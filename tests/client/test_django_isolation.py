"""Others commit between a look-up and its statement of Django: the rows that it sees, in transactions and without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from django.db import IntegrityError, InternalError, OperationalError, connection, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from roir_client.django import indexes, unchanged
from tests.client.django_shop import databases
from tests.client.django_shop.models import Order
from tests.conftest import run_sql

FOUND = Order.objects.filter(customer=7, status="open")
ALL = [57, 207, 357, 507]
# These rows are found. Then another session commits one of these changes; READ COMMITTED sees the rows given.
OTHERS: dict[str, tuple[str, list[int]]] = {
    "nothing": ("SELECT 1", ALL),
    "another key": ("UPDATE shop.orders SET customer = 8 WHERE id = 57", ALL[1:]),
    "deleted": ("DELETE FROM shop.orders WHERE id = 57", ALL[1:]),
    "changed": ("UPDATE shop.orders SET note = 'other' WHERE id = 57", ALL),
    # As at the moment of the look-up.
    "new": ("INSERT INTO shop.orders (id, created, customer) VALUES (999, '2005-01-01', 7)", ALL),
    "has the key now": ("UPDATE shop.orders SET customer = 7, status = 'open' WHERE id = 1", ALL),
    # Their new places aren't known.
    "moved": ("UPDATE shop.orders SET created = '2001-01-01' WHERE id = 57", ALL[1:]),
    "another id": ("UPDATE shop.orders SET id = 1057 WHERE id = 57", ALL[1:]),
}
USES: dict[str, Callable[[], Any]] = {
    "select": lambda: sorted(FOUND.values_list("id", flat=True)),
    "update": lambda: FOUND.update(note="x"),
    "delete": lambda: FOUND._raw_delete("default"),
}


@contextmanager
def between(dsn: str, *statements: str) -> Iterator[None]:
    """Another session commits once, after a look-up and before the statement that it is for."""
    waits = list(statements)

    def commit(execute: Any, sql: str, *rest: Any) -> Any:
        if " IN (E'" in sql:
            while waits:
                run_sql(dsn, waits.pop(0))
        return execute(sql, *rest)

    with connection.execute_wrapper(commit):
        yield
    assert waits == []


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("within", [transaction.atomic, nullcontext], ids=["atomic", "autocommit"])
@pytest.mark.sample(3, 6)
def test_read_committed_sees_the_moment_of_the_look_up_minus_what_changed(
    shop_dsn: str, within: Callable[[], Any], use: str, what: str
) -> None:
    statement, expected = OTHERS[what]
    databases.point(shop_dsn)
    with within(), between(shop_dsn, statement):
        assert USES[use]() == (expected if use == "select" else len(expected))
    assert indexes().counts == {"rewritten": 1}
    databases.leave()


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
@pytest.mark.sample(2, 6)
def test_with_one_snapshot_nothing_differs(shop_dsn: str, level: str, use: str, what: str) -> None:
    databases.point(shop_dsn, isolation_level=IsolationLevel[level])
    told: list[Any] = []
    with transaction.atomic():
        with between(shop_dsn, OTHERS[what][0]):
            assert USES["select"]() == ALL
        for leave in (nullcontext, unchanged):
            try:
                with transaction.atomic(), leave():
                    told.append(USES[use]())
                    raise ArithmeticError
            except ArithmeticError:
                pass
            except OperationalError as error:
                told.append(error.__cause__.sqlstate)
        transaction.set_rollback(True)
    assert told[0] == told[1]
    assert (told[0] == "40001") == (use != "select" and (what == "changed" or OTHERS[what][1] != ALL))
    assert indexes().counts == {"rewritten": 2}
    databases.leave()


@pytest.mark.parametrize(
    "options",
    [{"isolation_level": IsolationLevel.SERIALIZABLE}, {"options": "-c default_transaction_isolation=serializable"}],
    ids=["of Django", "of the session"],
)
def test_two_snapshots_above_read_committed_would_differ(shop_dsn: str, options: dict[str, Any]) -> None:
    databases.point(shop_dsn, **options)
    assert USES["select"]() == ALL
    assert indexes().counts == {"isolation": 1}
    with transaction.atomic():
        assert USES["select"]() == ALL
    assert indexes().counts == {"isolation": 1, "rewritten": 1}
    databases.leave()


def test_a_row_that_moves_meanwhile_is_not_made_twice(shop_dsn: str) -> None:
    """`get_or_create` doesn't find the row, its INSERT is refused, and it gets the row then."""
    databases.point(shop_dsn)
    with between(shop_dsn, OTHERS["moved"][0]):
        got, created = Order.objects.get_or_create(no="no57", defaults={"id": 2000, "created": "2002-02-02"})
    assert (got.pk, created) == (57, False)
    databases.leave()


@pytest.mark.usefixtures("django_shop")
def test_nothing_is_asked_in_a_transaction_that_is_over() -> None:
    sent: list[str] = []

    def hear(execute: Any, sql: str, *rest: Any) -> Any:
        sent.append(sql)
        return execute(sql, *rest)

    with transaction.atomic():
        indexes().refresh()
        with pytest.raises(IntegrityError):
            Order.objects.create(id=7, created="2007-08-08", no="no7")
        with pytest.raises(transaction.TransactionManagementError):
            USES["select"]()
        transaction.set_rollback(True)
    with transaction.atomic():
        # Without Django's knowledge.
        with pytest.raises(Exception, match="zero"), connection.connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        with connection.execute_wrapper(hear), pytest.raises(InternalError, match="aborted"):
            USES["select"]()
        transaction.set_rollback(True)
    assert len(sent) == 1
    assert "roir.look_up" not in sent[0]
    assert USES["select"]() == ALL
    assert indexes().counts == {"rewritten": 1}


@pytest.mark.usefixtures("django_shop")
def test_savepoints_and_the_transactions_own_writes() -> None:
    with transaction.atomic():
        with transaction.atomic():
            assert USES["delete"]() == 4
            transaction.set_rollback(True)
        assert USES["select"]() == ALL
        Order.objects.create(id=2000, created="2007-08-08", no="new", customer=7, status="open")
        Order.objects.filter(id=57).update(created="2001-01-01")
        assert USES["select"]() == [*ALL, 2000]
        transaction.set_rollback(True)
    assert set(indexes().counts) == {"rewritten"}


@pytest.mark.usefixtures("django_shop")
def test_async() -> None:
    async def found() -> list[int]:
        return [one.id async for one in FOUND.order_by("id")]

    async def left() -> Any:
        with unchanged():
            return await Order.objects.aget(no="no8")

    assert asyncio.run(Order.objects.aget(no="no7")).pk == 7
    assert asyncio.run(found()) == ALL
    assert indexes().counts == {"rewritten": 2}
    assert asyncio.run(left()).pk == 8
    assert indexes().counts == {"rewritten": 2}
