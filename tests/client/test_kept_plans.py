"""The session keeps the plans of look-ups. They stay right, whatever happens to the session or the view."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, bindparam, select, text

from roir_client import lookup, registry
from roir_client.sqlalchemy import use_indexes
from tests.client.shop import engine_of, locked, orders
from tests.conftest import run_sql

PLANS = text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'roir %'")
NO = select(orders.c.id).where(orders.c.no == bindparam("no"))
SOME = select(orders.c.id).where(orders.c.no.in_(bindparam("some", expanding=True)))


@pytest.fixture
def session(shop_dsn: str) -> Iterator[Connection]:
    """A session of the shop's application; all its statements must use an index."""
    engine = engine_of(shop_dsn, "psycopg2", isolation_level="AUTOCOMMIT")
    indexes = use_indexes(engine, least_partitions=1)
    with engine.connect() as connection:
        yield connection
    assert indexes.counts.keys() == {"rewritten"}
    engine.dispose()


def found(session: Connection, number: int = 7) -> list[int]:
    return list(session.execute(NO, {"no": f"no{number}"}).scalars())


def test_a_form_of_a_condition_has_one_plan(session: Connection) -> None:
    for number in (7, 8, 9):
        assert found(session, number) == [number]
    assert session.execute(PLANS).scalar() == 1
    for numbers in ([7, 8], [9], [1, 2, 3, 4, 5]):
        names = [f"no{number}" for number in numbers]
        assert sorted(session.execute(SOME, {"some": names}).scalars()) == numbers
    assert session.execute(PLANS).scalar() == 2
    assert len(session.execute(select(orders.c.id).where(orders.c.customer.is_(None))).all()) == 12
    assert session.execute(PLANS).scalar() == 3


@pytest.mark.parametrize(
    "what", ["DISCARD ALL", "DEALLOCATE ALL", "DISCARD PLANS", "SET search_path = pg_temp", "SET ROLE pg_read_all_data"]
)
@pytest.mark.sample(2)
def test_what_the_session_forgets_is_made_again(session: Connection, what: str) -> None:
    assert found(session) == [7]
    session.execute(text(what))
    assert [found(session, number) for number in (7, 8, 7)] == [[7], [8], [7]]


@pytest.mark.parametrize(
    ("values", "outcome", "rows"),
    [
        (["CAST(7 AS smallint)", "CAST(8 AS int)"], lookup.FOUND, 24),
        (["CAST(7 AS smallint)", "CAST(8 AS bigint)", "CAST(9 AS int)"], lookup.FOUND, 36),
        (["'7'", "'8'"], lookup.FOUND, 24),
        (["7", "'8'"], "type", 0),
        (["7", "8.5"], "type", 0),
    ],
)
def test_a_list_of_values_of_several_types(shop_dsn: str, values: list[str], outcome: str, rows: int) -> None:
    """Some drivers send each whole number as the smallest type that holds it."""
    engine = engine_of(shop_dsn, "psycopg")
    with engine.connect() as connection:
        known = registry.read(lambda sql: connection.execute(text(sql)).scalar())
        [index] = [one for one in known.of("shop", "orders") if one.name == "shop.by_customer"]
        sql = lookup.statement(index, ("shop", "orders"), [(index.key[0], lookup.ONE_OF, values)], 100)
        answer = lookup.answer(connection.execute(text(sql)).scalar_one(), 100)
    assert (answer.outcome, len(answer.keys or ())) == (outcome, rows)
    engine.dispose()


def test_another_view_with_the_name_of_the_index_is_not_read(session: Connection, shop_dsn: str) -> None:
    """The view of the index is `by_no` at first; then this is a view that hides all rows."""
    assert [found(session, number) for number in (7, 8)] == [[7], [8]]
    run_sql(
        shop_dsn,
        "ALTER VIEW shop.by_no RENAME TO by_number",
        "CREATE VIEW shop.by_no AS SELECT * FROM shop.by_number WHERE false",
    )
    assert [found(session, number) for number in (7, 8)] == [[7], [8]]
    run_sql(shop_dsn, "DROP VIEW shop.by_no", "ALTER VIEW shop.by_number RENAME TO by_no")
    assert found(session, 8) == [8]
    assert locked(session) == 0
