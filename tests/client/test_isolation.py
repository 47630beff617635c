"""Others commit between a look-up and its statement: the rows that it sees, at each isolation level."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from sqlalchemy import Engine, delete, event, insert, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError

from roir_client.sqlalchemy import use_indexes
from tests.client.shop import Heard, engine_of, orders

FOUND = select(orders.c.id, orders.c.created).where(orders.c.customer == 7, orders.c.status == "open")
CHANGED = update(orders).where(orders.c.customer == 7, orders.c.status == "open").values(note="x")
DELETED = delete(orders).where(orders.c.customer == 7, orders.c.status == "open")
# Rows 57, 207, 357 and 507 are found. Then another session commits one of these; READ COMMITTED sees the rows given.
OTHERS: dict[str, tuple[Any, list[int]]] = {
    "nothing": (text("SELECT 1"), [57, 207, 357, 507]),
    "another key": (update(orders).where(orders.c.id == 57).values(customer=8), [207, 357, 507]),
    "deleted": (delete(orders).where(orders.c.id == 57), [207, 357, 507]),
    "changed": (update(orders).where(orders.c.id == 57).values(note="other"), [57, 207, 357, 507]),
    # As at the moment of the look-up.
    "new": (insert(orders).values(id=999, created=date(2005, 1, 1), customer=7, status="open"), [57, 207, 357, 507]),
    "has the key now": (update(orders).where(orders.c.id == 1).values(customer=7, status="open"), [57, 207, 357, 507]),
    # Its new place isn't known.
    "moved": (update(orders).where(orders.c.id == 57).values(created=date(2001, 1, 1)), [207, 357, 507]),
}


def between(engine: Engine, commit: Callable[[], None]) -> None:
    """Calls `commit` once, after a look-up and before the statement that it is for."""
    waits = [commit]

    def before(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if " IN (E'" in statement and waits:
            waits.pop()()

    event.listen(engine, "before_cursor_execute", before)


def committed(dsn: str, statement: Any) -> None:
    other = engine_of(dsn, "psycopg2")
    with other.begin() as connection:
        connection.execute(statement)
    other.dispose()


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.sample(3)
def test_read_committed_sees_the_moment_of_the_look_up_minus_what_changed(shop_dsn: str, what: str) -> None:
    statement, expected = OTHERS[what]
    engine = engine_of(shop_dsn, "psycopg2", isolation_level="READ COMMITTED")
    use_indexes(engine, least_partitions=1)
    between(engine, lambda: committed(shop_dsn, statement))
    with engine.connect() as connection:
        assert sorted(connection.execute(FOUND).scalars()) == expected
    engine.dispose()


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("change", [CHANGED, DELETED], ids=["update", "delete"])
@pytest.mark.sample(2)
def test_changes_at_read_committed_touch_what_selects_see(shop_dsn: str, what: str, change: Any) -> None:
    statement, expected = OTHERS[what]
    engine = engine_of(shop_dsn, "psycopg2", isolation_level="READ COMMITTED")
    use_indexes(engine, least_partitions=1)
    between(engine, lambda: committed(shop_dsn, statement))
    with engine.begin() as connection:
        assert connection.execute(change).rowcount == len(expected)
    engine.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("change", [None, CHANGED, DELETED], ids=["select", "update", "delete"])
@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.sample(4)
def test_with_one_snapshot_nothing_differs(shop_dsn: str, level: str, change: Any, what: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2", isolation_level=level)
    indexes = use_indexes(engine, least_partitions=1)
    between(engine, lambda: committed(shop_dsn, OTHERS[what][0]))
    told = []
    with engine.connect() as connection:
        assert sorted(connection.execute(FOUND).scalars()) == [57, 207, 357, 507]
        for options in ({}, {"roir": False}):
            with connection.begin_nested() as savepoint:
                try:
                    result: Any = connection.execute(FOUND if change is None else change, execution_options=options)
                    told.append(sorted(result.all()) if change is None else result.rowcount)
                except OperationalError as error:
                    told.append(error.orig.pgcode)  # type: ignore[union-attr]
                savepoint.rollback()
    assert told[0] == told[1]
    assert (told[0] == "40001") == (change is not None and what in ("another key", "deleted", "changed", "moved"))
    assert indexes.counts == {"rewritten": 2}
    engine.dispose()


@pytest.mark.parametrize("roir", [True, False])
def test_serializable_transactions_that_both_find_nothing_do_not_both_insert(shop_dsn: str, roir: bool) -> None:
    engine = engine_of(shop_dsn, "psycopg2", isolation_level="SERIALIZABLE")
    indexes = use_indexes(engine, least_partitions=1, enabled=roir)
    none = select(orders.c.id).where(orders.c.customer == 999)
    with engine.connect() as one, engine.connect() as two:
        assert [connection.execute(none).all() for connection in (one, two)] == [[], []]
        one.execute(insert(orders).values(id=1001, created=date(2001, 1, 1), customer=999))
        one.commit()
        with pytest.raises(OperationalError, match="could not serialize"):
            two.execute(insert(orders).values(id=1002, created=date(2002, 1, 1), customer=999))
    assert indexes.counts == ({"rewritten": 2} if roir else {})
    engine.dispose()


def test_statements_of_their_own_and_savepoints(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg")
    indexes = use_indexes(engine, least_partitions=1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        assert len(connection.execute(FOUND).all()) == 4
        assert connection.execute(CHANGED).rowcount == 4
    with engine.begin() as connection:
        with connection.begin_nested() as savepoint:
            assert connection.execute(DELETED).rowcount == 4
            savepoint.rollback()
        with pytest.raises(DBAPIError), connection.begin_nested():
            connection.execute(text("SELECT 1 / 0"))
        assert connection.execute(DELETED).rowcount == 4
        assert connection.execute(FOUND).all() == []
    assert indexes.counts == {"rewritten": 5}
    engine.dispose()


def test_each_statement_looks_up_again(shop_dsn: str) -> None:
    engine = engine_of(shop_dsn, "psycopg2", isolation_level="READ COMMITTED")
    use_indexes(engine, least_partitions=1)
    heard = Heard(engine)
    with engine.connect() as connection:
        assert len(connection.execute(FOUND).all()) == 4
        committed(shop_dsn, OTHERS["moved"][0])
        committed(shop_dsn, OTHERS["new"][0])
        assert sorted(connection.execute(FOUND).scalars()) == [57, 207, 357, 507, 999]
    assert sum("SELECT roir.look_up" in statement for statement in heard.statements) == 2
    engine.dispose()
