"""Statements of Django that an index can serve open only the partitions of their rows; all others stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import Count, Exists, F, OuterRef, Q, Value
from django.db.models.functions import Collate, Lower

from airflow_roir.engine.database import Database
from airflow_roir.engine.unique.on_conflict import set_on_conflict
from roir_client.django import indexes, unchanged
from tests.client.django_shop import databases
from tests.client.django_shop.models import BigOrder, Order, OrderById, OrderRow, Payment
from tests.client.shop import LOCKED, OF_INDEXES
from tests.conftest import run_sql

orders, rows, payments = Order.objects, OrderRow.objects, Payment.objects
ROOT = Path(__file__).parents[2]
PATH = f"{ROOT}:{ROOT / 'client'}"
DAY = date(2007, 8, 8)


def locked() -> int:
    """How many partitions of the orders the transaction has locked. It must have no lock of an index."""
    with connection.cursor() as cursor:
        cursor.execute(str(OF_INDEXES))
        assert cursor.fetchone() == (0,)
        cursor.execute(str(LOCKED))
        (found,) = cursor.fetchone()
    return int(found)


def told(value: Any) -> Any:
    """A result that can be compared."""
    if hasattr(value, "_meta"):
        return type(value).__name__, [getattr(value, field.attname) for field in value._meta.concrete_fields]
    if isinstance(value, (str, int, tuple, dict, bool, type(None))):
        return value
    return sorted(map(repr, map(told, value)))


def effect(use: Callable[[], Any]) -> tuple[Any, int, Any]:
    """The result of a call, how many partitions it locks, and the rows of the tables after it. It is taken back."""
    with transaction.atomic():
        found = told(use())
        opened = locked()
        with unchanged():
            after = list(orders.order_by("id", "created").values_list()), list(payments.order_by("id").values_list())
        transaction.set_rollback(True)
    return found, opened, after


# Calls, and in how many partitions their rows are; 12 if they stay as they are.
SELECTS: dict[str, tuple[Callable[[], Any], int]] = {
    "filter": (lambda: orders.filter(no="no7"), 1),
    "in": (lambda: orders.filter(no__in=["no7", "no8", None]), 2),
    "in, no value": (lambda: orders.filter(no__in=[]), 0),
    "none found": (lambda: orders.filter(no="nothing"), 0),
    "null": (lambda: orders.filter(customer__isnull=True, status="open"), 2),
    "two columns": (lambda: orders.filter(customer=7, status="open"), 2),
    "is null after equal": (lambda: orders.filter(customer=7).filter(status=None), 2),
    "not null": (lambda: orders.filter(customer__isnull=False), 12),
    "not the first column": (lambda: orders.filter(status="open"), 12),
    "with others": (lambda: orders.filter(Q(no="no7") & (Q(id__gt=3) | Q(note="x"))), 1),
    "with others that exclude it": (lambda: orders.filter(no="no7", id__gt=30), 1),
    "or": (lambda: orders.filter(Q(no="no7") | Q(id=8)), 12),
    "or of one": (lambda: orders.filter(Q(Q(no="no7"), _connector=Q.OR)), 1),
    "xor": (lambda: orders.filter(Q(no="no7") ^ Q(id=8)), 12),
    "exclude": (lambda: orders.exclude(no="no7"), 12),
    "not": (lambda: orders.filter(~Q(no="no7")), 12),
    "not not": (lambda: orders.filter(~~Q(no="no7")), 1),
    "a transform": (lambda: orders.annotate(low=Lower("no")).filter(low="no7"), 12),
    "a collation": (lambda: orders.annotate(c=Collate("no", "C")).filter(c="no7"), 12),
    "iexact": (lambda: orders.filter(no__iexact="NO7"), 12),
    "another column": (lambda: orders.filter(no=F("note")), 12),
    "an expression": (lambda: orders.filter(no=Lower(Value("NO7"))), 12),
    "in, with an expression": (lambda: orders.filter(no__in=["no8", Lower(Value("NO7"))]), 12),
    "a value": (lambda: orders.filter(no=Value("no7")), 12),
    "partition key known": (lambda: orders.filter(id=7, created=DAY), 1),
    "too large": (lambda: orders.filter(id=2**40), 0),
    "get": (lambda: orders.get(no="no7"), 1),
    "get by id": (lambda: orders.get(pk=7), 1),
    "get by id, unmapped": (lambda: OrderById.objects.get(pk=7), 1),
    "first": (lambda: orders.filter(no="no7").first(), 1),
    "exists": (lambda: orders.filter(no="no7").exists(), 1),
    "count": (lambda: orders.filter(no="no7").count(), 1),
    "count of a slice": (lambda: orders.filter(customer=7, status="open")[:2].count(), 2),
    "count of distinct": (lambda: orders.filter(customer=7, status="open").distinct().count(), 2),
    "aggregate": (lambda: orders.filter(no="no7").aggregate(n=Count("payments")), 1),
    "annotate": (lambda: orders.annotate(n=Count("payments")).filter(no="no7").values_list("id", "n"), 1),
    "having": (lambda: orders.annotate(n=Count("payments")).filter(no="no7", n__gt=0).values_list("id", "n"), 1),
    "in_bulk": (lambda: list(orders.in_bulk([7, 8]).values()), 2),
    "only": (lambda: orders.filter(no="no7").only("id").values_list("id"), 1),
    "iterator": (lambda: list(orders.filter(no="no7").iterator(chunk_size=10)), 1),
    "for update": (lambda: orders.select_for_update().filter(no="no7"), 1),
    "ordered slice": (lambda: orders.filter(customer=7, status="open").order_by("-id")[:1], 2),
    "composite key": (lambda: rows.filter(no="no7"), 1),
    "composite key, whole": (lambda: rows.get(pk=(7, DAY)), 1),
    "composite key, a part": (lambda: rows.get(id=7), 1),
    "composite keys, whole": (lambda: rows.filter(pk__in=[(7, DAY), (9, DAY)]), 1),
    "union": (lambda: orders.filter(no="no7").union(orders.filter(no="no8")), 12),
    "sub-query": (lambda: payments.filter(order__in=orders.filter(no="no7")), 12),
    "exists with outer": (
        lambda: payments.filter(Exists(orders.filter(id=OuterRef("order_id"), no="no7"))).values_list("id"),
        12,
    ),
    "extra": (lambda: orders.extra(where=["customer IS NOT NULL"]).filter(no="no7"), 1),
    "raw": (lambda: orders.raw("SELECT * FROM shop.orders WHERE no = 'no7'"), 12),
    "joined": (lambda: payments.filter(order__no="no7").values_list("id", "order__no"), 1),
    "joined, and loaded": (lambda: payments.select_related("order").filter(order__no="no7"), 1),
    "loaded": (lambda: [one.order.no for one in payments.filter(order_id=7).select_related("order")], 12),
    "loaded later": (lambda: payments.get(id=6).order, 1),
    "loaded together": (lambda: [one.order.no for one in payments.filter(id__in=[6, 7]).prefetch_related("order")], 2),
    "from the other side": (lambda: orders.filter(no="no7", payments__amount__gt=0).values_list("payments__id"), 1),
    "no row behind": (lambda: payments.filter(order__no=None).values_list("id"), 12),
}
CHANGES: dict[str, tuple[Callable[[], Any], int]] = {
    "update": (lambda: orders.filter(no="no7").update(note="x"), 1),
    "update of several": (lambda: orders.filter(no__in=["no7", "no8"]).update(note=F("no")), 2),
    "update of the key": (lambda: orders.filter(no="no7").update(no="another"), 1),
    "update of none": (lambda: orders.filter(no="nothing").update(note="x"), 0),
    "update of all": (lambda: orders.update(note="x"), 12),
    "update of a whole row": (lambda: rows.filter(no="no7").update(status="x"), 1),
    "update by a join": (lambda: orders.filter(no="no7", payments__amount__gt=0).update(note="x"), 12),
    "a row that moves": (lambda: orders.filter(id=7).update(created=date(2003, 1, 1)), 2),
    "save": (lambda: saved(orders.get(no="no7")), 1),
    "save of a new one": (lambda: saved(Order(id=1000, created=DAY, no="new")), 1),
    "save of a whole row": (lambda: saved(rows.get(no="no7")), 1),
    "delete": (lambda: orders.filter(no="no7").delete(), 1),
    "delete of a whole row": (lambda: rows.filter(no="no7").delete(), 1),
    "delete of one": (lambda: orders.get(no="no7").delete(), 1),
    "raw delete": (lambda: orders.filter(customer=7, status="open")._raw_delete("default"), 2),
    "bulk_update": (lambda: orders.bulk_update([Order(id=n, note=f"x{n}") for n in (7, 8)], ["note"]), 2),
    "bulk_create": (
        lambda: orders.bulk_create([Order(id=1001, created=DAY, no="new")], ignore_conflicts=True),
        1,
    ),
    "get_or_create, got": (lambda: orders.get_or_create(no="no7", defaults={"id": 1002, "created": DAY}), 1),
    "get_or_create, created": (lambda: orders.get_or_create(no="new", defaults={"id": 1002, "created": DAY}), 1),
    "update_or_create, updated": (lambda: orders.update_or_create(no="no7", defaults={"note": "x"}), 1),
    "update_or_create, created": (
        lambda: orders.update_or_create(no="new", defaults={"note": "x"}, create_defaults={"id": 1002, "created": DAY}),
        1,
    ),
}


def saved(one: Any) -> None:
    one.status = "saved"
    one.save()


Cases = dict[str, tuple[Callable[[], Any], int]]
BOUND: dict[str, dict[str, Any]] = {
    "by the client": {},
    "by the server": {"server_side_binding": True},
    "prepared": {
        "server_side_binding": True,
        "prepare_threshold": 0,
        "options": "-c plan_cache_mode=force_generic_plan",
    },
}


@pytest.mark.parametrize("cases", [SELECTS, CHANGES], ids=["selects", "changes"])
@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.sample(2, 3)
def test_partitions_of_the_rows_alone_are_opened(shop_dsn: str, cases: Cases, bound: str) -> None:
    databases.point(shop_dsn, **BOUND[bound])
    look(cases, generic=bound == "prepared")
    databases.leave()


@pytest.mark.sample(0)
def test_the_same_by_psycopg2(shop_dsn: str) -> None:
    """Django takes psycopg 3 if there is one."""
    program = (
        "import sys; sys.modules['psycopg'] = None; import tests.client.conftest; "
        "from django.db.backends.postgresql.psycopg_any import is_psycopg3; assert not is_psycopg3; "
        "from tests.client.django_shop import databases; databases.point(sys.argv[1]); "
        "from tests.client.test_django import CHANGES, SELECTS, look; look(SELECTS); look(CHANGES)"
    )
    subprocess.run(
        [sys.executable, "-c", program, shop_dsn], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": PATH}
    )


def test_a_model_of_two_tables(shop_dsn: str) -> None:
    """An UPDATE of each of them, after a SELECT of the keys."""
    run_sql(shop_dsn, "INSERT INTO shop.big_orders SELECT i, i FROM generate_series(1, 600, 2) i")
    databases.point(shop_dsn)
    big = BigOrder.objects
    look(
        {
            "filter": (lambda: big.filter(no="no7"), 1),
            "get": (lambda: big.get(no="no7", extra=7), 1),
            # The condition is on the other table.
            "get by id": (lambda: big.get(pk=7), 12),
            "update of the first": (lambda: big.filter(no="no7").update(note="x"), 1),
            "update of both": (lambda: big.filter(no="no7").update(note="x", extra=8), 1),
            "save": (lambda: saved(big.get(no="no7")), 1),
            "delete": (lambda: big.filter(no="no7").delete(), 1),
        }
    )
    databases.leave()


# Their statements name the partition key, and stay as they are. A generic plan locks all partitions nevertheless.
NAMED = ("partition key known", "composite key, whole", "composite keys, whole", "save of a whole row")


def look(cases: Cases, generic: bool = False) -> None:
    """Makes each call with the indexes and without. generic: statements are prepared, with generic plans."""
    wrong = {}
    indexes().counts.clear()
    for name, (use, partitions) in cases.items():
        found, opened, after = effect(use)
        if opened != (12 if generic and name in NAMED else partitions):
            wrong[name] = opened
        with unchanged():
            assert (found, after) == effect(use)[::2], name
    assert wrong == {}
    assert set(indexes().counts) == {"rewritten"}


@pytest.mark.sample(0)
def test_bulk_create_ignores_rows_whose_key_is_taken(shop_dsn: str, django_shop: Any) -> None:
    """`ignore_conflicts` is ON CONFLICT DO NOTHING, which knows the primary key alone."""
    database = Database(shop_dsn, "roir tests")
    set_on_conflict(database, "shop.orders", "test")
    database.engine.dispose()
    new = [Order(id=id_, created=DAY, no=no) for id_, no in ((2001, "no7"), (2002, "new"), (2003, "new"), (7, "other"))]
    with pytest.raises(IntegrityError, match="no7"), transaction.atomic():
        orders.bulk_create(new, ignore_conflicts=True)
    with connection.cursor() as cursor:
        cursor.execute("SET roir.on_conflict = 'nothing'")
    orders.bulk_create(new, ignore_conflicts=True)
    orders.bulk_create(new, ignore_conflicts=True, batch_size=1)
    assert list(orders.filter(id__gt=2000).values_list("id", "no")) == [(2002, "new")]
    assert not orders.filter(no="other").exists()
