"""An index that is gone, new, doubtful or not readable, a name that means another table: never an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Column, Engine, MetaData, Table, Text, select, text

from airflow_roir.engine import drop
from airflow_roir.engine.database import Database
from roir_client import registry
from roir_client.sqlalchemy import Indexes, use_indexes
from tests.client.shop import engine_of, locked, orders
from tests.conftest import run_sql
from tests.engine import steps

ONE = select(orders.c.id).where(orders.c.no == "no7")


@pytest.fixture
def engine(shop_dsn: str) -> Iterator[Engine]:
    """An engine of the shop."""
    one = engine_of(shop_dsn, "psycopg2")
    yield one
    one.dispose()


def opened(engine: Engine, statement: Any = ONE, *before: str) -> int:
    """How many partitions are opened for row 7, in a transaction that goes on."""
    with engine.connect() as connection:
        for one in before:
            connection.execute(text(one))
        assert connection.execute(statement).scalars().all() == [7]
        assert connection.execute(text("SELECT 1")).scalar() == 1
        connection.execute(text("RESET ROLE"))
        return locked(connection)


def used(engine: Engine, **options: Any) -> Indexes:
    """The indexes of an engine, which has read them."""
    indexes = use_indexes(engine, least_partitions=1, **options)
    assert opened(engine) == 1
    indexes.counts.clear()
    return indexes


def test_an_index_that_was_dropped_is_forgotten(engine: Engine, shop_dsn: str) -> None:
    indexes = used(engine)
    database = Database(shop_dsn, "roir tests")
    drop.drop_index(database, "shop.by_no", "test")
    assert opened(engine) == 12
    assert indexes.counts == {"gone": 1}
    indexes.refresh()
    assert opened(engine) == 12
    assert indexes.counts == {"gone": 1}
    steps.make_index(database, "shop.by_no", "shop.orders", "no")
    database.engine.dispose()
    indexes.refresh()
    assert opened(engine) == 1


@pytest.mark.sample(0)
def test_a_rebuilt_index_is_used_again(engine: Engine, shop_dsn: str) -> None:
    indexes = used(engine)
    database = Database(shop_dsn, "roir tests")
    steps.make_index(database, "shop.by_no", None, None)
    database.engine.dispose()
    assert opened(engine) == 12
    indexes.refresh()
    assert opened(engine) == 1
    assert indexes.counts == {"gone": 1, "rewritten": 1}


@pytest.mark.sample(0)
def test_a_snapshot_older_than_the_publish_reads_the_table(engine: Engine, shop_dsn: str) -> None:
    indexes = used(engine)
    old = engine.execution_options(isolation_level="REPEATABLE READ")
    with old.connect() as connection:
        connection.execute(text("SELECT count(*) FROM pg_class"))
        database = Database(shop_dsn, "roir tests")
        steps.make_index(database, "shop.by_no", None, None)
        database.engine.dispose()
        assert connection.execute(ONE).scalars().all() == [7]
        assert connection.execute(text("SELECT 1")).scalar() == 1
    assert indexes.counts.keys() <= {"gone", "error"}


@pytest.mark.parametrize(
    ("revoked", "outcome"),
    [("SELECT ON shop.by_no", "rights"), ("SELECT ON shop.orders", "rights"), ("USAGE ON SCHEMA shop", None)],
)
def test_rights_that_are_missing(engine: Engine, shop_dsn: str, revoked: str, outcome: str | None) -> None:
    indexes = used(engine)
    role = shop_dsn.split("?")[0].rsplit("/", 1)[1] + "_role"
    granted = ["USAGE ON SCHEMA shop", "SELECT ON shop.by_no", "SELECT ON shop.orders"]
    run_sql(shop_dsn, f"CREATE ROLE {role}", *(f"GRANT {right} TO {role}" for right in granted))
    try:
        assert opened(engine, ONE, f"SET ROLE {role}") == 1
        run_sql(shop_dsn, f"REVOKE {revoked} FROM {role}", f"GRANT SELECT (id, no) ON shop.orders TO {role}")
        if outcome is not None:
            assert opened(engine, ONE, f"SET ROLE {role}") == 12
            assert indexes.counts == {"rewritten": 1, outcome: 1}
    finally:
        run_sql(shop_dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_an_index_with_differences_is_not_used_until_they_are_repaired(engine: Engine, shop_dsn: str) -> None:
    indexes = used(engine)
    run_sql(
        shop_dsn,
        "INSERT INTO roir.verification (index_id, operation_id, generation_id, mode, options, buckets) "
        "SELECT o.index_id, o.id, o.generation_id, 'only', '{}', 1 FROM roir.operation o "
        "JOIN roir.index i ON i.id = o.index_id WHERE i.name = 'by_no'",
    )
    assert opened(engine) == 1
    run_sql(
        shop_dsn,
        "INSERT INTO roir.discrepancy (verification_id, unit_id, kind, key, primary_key) "
        "SELECT v.id, 1, 'missing', '[]', '[]' FROM roir.verification v",
    )
    assert opened(engine) == 12
    run_sql(shop_dsn, "UPDATE roir.verification SET missing = 1, complete = true, finished_at = now()")
    assert opened(engine) == 12
    run_sql(shop_dsn, "UPDATE roir.verification SET repaired = 1")
    assert opened(engine) == 1
    assert indexes.counts == {"rewritten": 2, "doubtful": 2}


@pytest.mark.parametrize(
    ("setting", "outcome"),
    [
        ("datestyle = 'SQL, DMY'", "settings"),
        ("extra_float_digits = 0", "settings"),
        ("intervalstyle = 'iso_8601'", "settings"),
        ("datestyle = 'ISO, DMY'", "rewritten"),
        ("transaction_read_only = on", "rewritten"),
        ("standard_conforming_strings = off", "rewritten"),
        ("quote_all_identifiers = on", "rewritten"),
        ("search_path = ''", "rewritten"),
        ("plan_cache_mode = force_generic_plan", "rewritten"),
    ],
)
@pytest.mark.sample(2)
def test_settings_of_the_session(engine: Engine, setting: str, outcome: str) -> None:
    indexes = used(engine)
    assert opened(engine, ONE, f"SET {setting}") == (1 if outcome == "rewritten" else 12)
    assert indexes.counts == {outcome: 1}


def test_a_lock_on_the_view_is_not_waited_for_beyond_the_sessions_limit(engine: Engine, shop_dsn: str) -> None:
    indexes = used(engine)
    other = steps.session(shop_dsn)
    steps.sql(other, "ALTER VIEW shop.by_no SET SCHEMA shop")
    assert opened(engine, ONE, "SET LOCAL lock_timeout = '10ms'") == 12
    assert indexes.counts == {"error": 1}
    other.rollback()


def test_a_name_that_means_another_table(engine: Engine, shop_dsn: str) -> None:
    run_sql(
        shop_dsn,
        "CREATE SCHEMA aside",
        "CREATE TABLE aside.orders (LIKE shop.orders)",
        "INSERT INTO aside.orders (id, created, no) VALUES (7, '2020-01-01', 'no7')",
    )
    unqualified = Table("orders", MetaData(), *(column._copy() for column in orders.columns))
    statement = select(unqualified.c.id).where(unqualified.c.no == "no7")
    indexes = use_indexes(engine, least_partitions=1)
    assert opened(engine, statement, "SET search_path = shop, aside") == 1
    assert opened(engine, statement, "SET search_path = aside, shop") == 0
    assert indexes.counts == {"rewritten": 1, "name": 1}


def test_a_schema_may_be_translated(engine: Engine) -> None:
    indexes = used(engine)
    table = Table("orders", MetaData(), *(column._copy() for column in orders.columns), schema="tenant")
    statement = select(table.c.id).where(table.c.no == "no7")
    with engine.connect().execution_options(schema_translate_map={"tenant": "shop"}) as connection:
        assert connection.execute(statement).scalars().all() == [7]
        assert locked(connection) == 1
    assert indexes.counts == {"rewritten": 1}


def test_a_database_without_indexes(server: str) -> None:
    engine = engine_of(server, "psycopg2")
    indexes = use_indexes(engine, least_partitions=1)
    classes = Table("pg_class", MetaData(), Column("relname", Text), schema="pg_catalog")
    with engine.connect() as connection:
        assert connection.execute(select(classes.c.relname).where(classes.c.relname == "pg_class")).scalar()
    assert not indexes.counts
    engine.dispose()


def test_other_engines_are_refused() -> None:
    engine = engine_of("postgresql://", "psycopg2")
    engine.dialect.driver = "pg8000"
    with pytest.raises(ValueError, match="by psycopg2, psycopg"):
        use_indexes(engine)


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_registry_that_cannot_be_read_is_no_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, autocommit: bool
) -> None:
    monkeypatch.setattr(registry, "INDEXES", "SELECT 1/0")
    indexes = use_indexes(engine, least_partitions=1)
    options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    with engine.connect().execution_options(**options) as connection:
        assert connection.execute(ONE).scalars().all() == [7]
        assert connection.execute(ONE).scalars().all() == [7]
    assert indexes.counts == {}


def test_outside_transactions_serializable_statements_stay_as_they_are(engine: Engine, shop_dsn: str) -> None:
    name = shop_dsn.split("?")[0].rsplit("/", 1)[1]
    counts = []
    for level in ("read committed", "serializable"):
        run_sql(shop_dsn, f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
        other = engine_of(shop_dsn, "psycopg")
        indexes = use_indexes(other, least_partitions=1)
        with other.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            assert connection.execute(ONE).scalars().all() == [7]
        counts.append(dict(indexes.counts))
        other.dispose()
    assert counts == [{"rewritten": 1}, {"isolation": 1}]


def test_one_compiled_form_serves_several_schemas(engine: Engine, shop_dsn: str) -> None:
    """The copy in the other schema has no index."""
    run_sql(shop_dsn, "CREATE SCHEMA other", "CREATE TABLE other.orders (LIKE shop.orders)")
    run_sql(shop_dsn, "INSERT INTO other.orders (id, no, created) VALUES (8, 'no7', '2000-01-01')")
    indexes = use_indexes(engine, least_partitions=1)
    for schema, found in (("shop", 7), ("other", 8), ("shop", 7)):
        with engine.connect().execution_options(schema_translate_map={"shop": schema}) as connection:
            assert connection.execute(ONE).scalars().all() == [found]
    assert indexes.counts == {"rewritten": 2}


def test_a_partial_index_is_left_alone(engine: Engine, shop_dsn: str) -> None:
    """It lacks rows: a statement that used it would miss them."""
    indexes = used(engine)
    database = Database(shop_dsn, "roir tests")
    drop.drop_index(database, "shop.by_no", "test")
    steps.make_index(database, "shop.by_no", "shop.orders", "no", where="no <> 'no7'")
    steps.make_index(database, "shop.by_lower_no", "shop.orders", "lower(no)")
    database.engine.dispose()
    indexes.refresh()
    assert opened(engine) == 12
    assert not indexes.counts
