"""Which indexes a Django project uses: switches, options and logs; an index that has gone; backends of others."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from airflow_roir.engine import drop
from airflow_roir.engine.database import Database
from roir_client.django import indexes, unchanged
from tests.client.django_shop import databases
from tests.client.django_shop.counting.base import counts
from tests.client.django_shop.models import Order, Payment, Strange
from tests.client.test_django import locked
from tests.client.test_names import VALUES
from tests.conftest import run_sql
from tests.engine import steps


def opened(*before: str) -> int:
    """How many partitions are opened for row 7, in a transaction that goes on."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            for one in before:
                cursor.execute(one)
        assert Order.objects.get(no="no7").pk == 7
        with connection.cursor() as cursor:
            cursor.execute("RESET ROLE")
        found = locked()
        transaction.set_rollback(True)
    return found


@pytest.mark.sample(0)
@pytest.mark.usefixtures("django_shop")
def test_an_index_that_was_dropped_is_forgotten(shop_dsn: str) -> None:
    assert opened() == 1
    database = Database(shop_dsn, "roir tests")
    drop.drop_index(database, "shop.by_no", "test")
    assert opened() == 12
    indexes().refresh()
    assert opened() == 12
    assert indexes().counts == {"rewritten": 1, "gone": 1}
    steps.make_index(database, "shop.by_no", "shop.orders", "no")
    database.engine.dispose()
    indexes().refresh()
    assert opened() == 1


@pytest.mark.usefixtures("django_shop")
def test_rights_and_settings(shop_dsn: str) -> None:
    role = shop_dsn.split("?")[0].rsplit("/", 1)[1] + "_role"
    run_sql(shop_dsn, f"CREATE ROLE {role}", f"GRANT USAGE ON SCHEMA shop TO {role}")
    run_sql(shop_dsn, f"GRANT SELECT ON shop.orders TO {role}")
    try:
        assert opened() == 1
        assert opened(f"SET LOCAL ROLE {role}") == 12
        assert opened("SET LOCAL datestyle = 'SQL, DMY'") == 12
        assert indexes().counts == {"rewritten": 1, "rights": 1, "settings": 1}
    finally:
        run_sql(shop_dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.usefixtures("django_shop")
def test_logs_show_look_ups_and_plans_the_changed_statement() -> None:
    with CaptureQueriesContext(connection) as sent:
        Order.objects.get(no="no7")
        plan = Order.objects.filter(no="no8").explain()
    assert [query["sql"].split(" FROM ")[0][-40:] for query in sent.captured_queries[::2]] == [
        "SELECT outcome, keys, said, current_setting('transaction_isolation')"[-40:]
    ] * 2
    assert "IN (E'2007-08-08')" in sent.captured_queries[1]["sql"]
    assert set(re.findall(r"orders_\d+", plan)) == {"orders_8"}
    with CaptureQueriesContext(connection) as sent:
        assert "look_up" not in str(Order.objects.filter(no="no7").query)
        assert not Payment.objects.filter(amount=-1).exists()
    assert len(sent) == 1


@pytest.mark.usefixtures("django_shop")
def test_a_statement_is_executed_again_with_other_rows() -> None:
    found = Order.objects.filter(no="no7")
    compiler = found.query.get_compiler("default")
    assert [row[0] for row in compiler.results_iter()] == [7]
    Order.objects.filter(no="no7").update(created="2001-01-01")
    assert [row[0] for row in compiler.results_iter()] == [7]
    assert [one.created.year for one in found] == [2001]


@pytest.mark.usefixtures("django_shop")
def test_switches() -> None:
    assert opened() == 1
    with unchanged():
        assert opened() == 12
        with unchanged():
            pass
        assert opened() == 12
    indexes().enabled = False
    assert opened() == 12
    indexes().enabled = True
    assert opened() == 1
    assert indexes().counts == {"rewritten": 2}


@pytest.mark.parametrize(
    ("option", "expected"),
    [(False, 12), ({"enabled": False}, 12), ({"least_partitions": 13}, 12), ({}, 12), ({"least_partitions": 12}, 1)],
)
def test_options(shop_dsn: str, option: Any, expected: int) -> None:
    databases.point(shop_dsn, roir=option)
    assert opened() == expected
    databases.leave()


def test_bounds_of_rows_and_values(shop_dsn: str) -> None:
    databases.point(shop_dsn, roir={"least_partitions": 1, "most_rows": 4})
    assert Order.objects.filter(no__in=[f"no{n}" for n in range(1, 6)]).count() == 5
    assert Order.objects.filter(customer=7).count() == 12
    assert Order.objects.filter(no__in=["no1", "no2"]).count() == 2
    assert indexes().counts == {"values": 1, "many": 1, "rewritten": 1}
    databases.leave()


def test_an_option_that_is_not_known(shop_dsn: str) -> None:
    databases.point(shop_dsn, roir={"most_row": 4})
    with pytest.raises(ImproperlyConfigured, match=r"\['default'\].*most_row"):
        Order.objects.get(no="no7")
    databases.leave()


def test_a_registry_that_cannot_be_read_is_no_error(shop_dsn: str) -> None:
    databases.point(shop_dsn, options="-c lock_timeout=10ms")
    other = steps.session(shop_dsn)
    steps.sql(other, "LOCK TABLE pg_inherits")
    with transaction.atomic():
        assert Payment.objects.filter(id=7).exists()
        assert Payment.objects.filter(id=8).exists()
    indexes().refresh()
    assert Payment.objects.filter(id=7).exists()
    other.rollback()
    assert Order.objects.filter(no="no7").exists()
    assert indexes().counts == {}
    indexes().refresh()
    assert opened() == 1
    databases.leave()


def test_a_database_without_indexes(server: str) -> None:
    databases.point(server, options="-c search_path=pg_catalog")
    assert len(connections["default"].introspection.table_names()) == 0
    with pytest.raises(Exception, match="does not exist"):
        Order.objects.get(no="no7")
    assert indexes().counts == {}
    databases.leave()


@pytest.mark.usefixtures("django_shop")
def test_threads_share_what_is_known() -> None:
    opened()
    others = []

    def use() -> None:
        with CaptureQueriesContext(connections["default"]) as sent:
            assert Order.objects.get(no="no8").pk == 8
        others.append((len(sent), indexes()))
        connections["default"].close()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert others == [(2, indexes())]
    assert indexes().counts == {"rewritten": 2}


def test_a_backend_with_compilers_of_its_own(shop_dsn: str) -> None:
    databases.point(shop_dsn, engine="tests.client.django_shop.counting", roir={"least_partitions": 1})
    counts.clear()
    assert opened() == 1
    assert counts["compiled"] == 1
    assert counts["cursors"] > 1
    assert indexes().counts == {"rewritten": 1}
    databases.leave()


@pytest.mark.parametrize("bound", [False, True], ids=["by the client", "by the server"])
@pytest.mark.sample(0)
def test_values_are_only_that(database: Database, dsn: str, bound: bool) -> None:
    """A partition per value: the partition key is one of the strange values, too."""
    run_sql(
        dsn,
        "CREATE TABLE strange (key text, value int, part text, PRIMARY KEY (key, part)) PARTITION BY LIST (part)",
        "CREATE TABLE strange_d PARTITION OF strange DEFAULT",
    )
    session = steps.session(dsn)
    for n, value in enumerate(VALUES):
        steps.sql(session, f"CREATE TABLE strange_{n} PARTITION OF strange FOR VALUES IN (%s)", value)
        steps.sql(session, "INSERT INTO strange VALUES (%s, %s, %s)", value, n, value)
    session.commit()
    steps.make_index(database, "by_key", "strange", "key")
    databases.point(dsn, server_side_binding=bound)
    for n, value in enumerate(VALUES):
        found = Strange.objects.filter(key=value)
        assert [one.value for one in found] == [n]
        assert list(Strange.objects.filter(key__in=[value, "none"]).values_list("value", flat=True)) == [n]
        assert found.update(value=n) == 1
    assert indexes().counts == {"rewritten": 3 * len(VALUES)}
    databases.leave()
