"""The admin of a project that uses indexes: its pages open the partitions of the rows that they show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.test.testcases import LiveServerThread

from roir_client.django import indexes, unchanged
from tests.airflow.screen import browser_page
from tests.client.django_shop.models import Order, Payment
from tests.client.test_django import locked

ORDERS, PAYMENTS = "/admin/django_shop/order/", "/admin/django_shop/payment/"
FORM = {
    "id": "7",
    "created": "2007-08-08",
    "no": "no7",
    "customer": "7",
    "status": "sent",
    "note": "by the admin",
    "payments-TOTAL_FORMS": "0",
    "payments-INITIAL_FORMS": "0",
}


@pytest.fixture
def boss(django_shop: Any) -> Any:
    """A user who may do everything."""
    call_command("migrate", run_syncdb=True, verbosity=0)
    return User.objects.create_superuser("boss", password="of tests")


# Requests, their status, a text of the answer, and how many partitions they open.
PAGES: dict[str, tuple[Callable[[Client], Any], int, str, int]] = {
    "search": (lambda to: to.get(ORDERS, {"q": "no7"}), 200, "1 order", 1),
    "search without a result": (lambda to: to.get(ORDERS, {"q": "nothing"}), 200, "0 orders", 0),
    "change": (lambda to: to.get(f"{ORDERS}7/change/"), 200, "no7 | Change order", 1),
    "save": (lambda to: to.post(f"{ORDERS}7/change/", FORM), 302, "", 1),
    "history": (lambda to: to.get(f"{ORDERS}7/history/"), 200, "no7", 1),
    # It joins payments with their orders to name what goes, too.
    "delete?": (lambda to: to.get(f"{ORDERS}7/delete/"), 200, "Are you sure", 12),
    "delete": (lambda to: to.post(f"{ORDERS}7/delete/", {"post": "yes"}), 302, "", 12),
    "add": (lambda to: to.post(f"{ORDERS}add/", {**FORM, "id": "1000", "no": "new"}), 302, "", 1),
    "add what is there": (lambda to: to.post(f"{ORDERS}add/", FORM), 200, "already exists", 1),
    "delete several": (
        lambda to: to.post(ORDERS, {"action": "delete_selected", "_selected_action": ["7", "8"], "post": "yes"}),
        302,
        "",
        12,
    ),
    "payment": (lambda to: to.get(f"{PAYMENTS}6/change/"), 200, 'value="7"', 1),
}


def test_pages_open_the_partitions_of_their_rows(boss: Any) -> None:
    client = Client()
    client.force_login(boss)
    wrong = {}
    for name, (ask, status, text, partitions) in PAGES.items():
        with transaction.atomic():
            answer = ask(client)
            assert (name, answer.status_code) == (name, status)
            assert text in answer.content.decode(), name
            if (opened := locked()) != partitions:
                wrong[name] = opened
            transaction.set_rollback(True)
    assert wrong == {}
    assert set(indexes().counts) == {"rewritten"}


@pytest.fixture
def site(boss: Any) -> Iterator[str]:
    """The address of a server of the project."""
    server = LiveServerThread("127.0.0.1", StaticFilesHandler)
    server.daemon = True
    server.start()
    server.is_ready.wait()
    if server.error:
        raise server.error
    yield f"http://127.0.0.1:{server.port}"
    server.terminate()


@pytest.mark.by_hand("test-browser")
def test_a_user_finds_changes_and_deletes_an_order(site: str) -> None:
    with browser_page(1200, 900) as page:
        page.goto(f"{site}{ORDERS}")
        page.get_by_label("Username").fill("boss")
        page.get_by_label("Password").fill("of tests")
        page.get_by_role("button", name="Log in").click()
        page.locator("#result_list tbody tr").first.wait_for()
        used = indexes().counts["rewritten"]
        page.locator("#searchbar").fill("no7")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"q=no7$"))
        assert page.locator("#result_list tbody tr").count() == 1
        searched = indexes().counts["rewritten"]
        assert searched > used
        page.get_by_role("link", name="no7", exact=True).click()
        page.get_by_label("Note").fill("by the admin")
        assert indexes().counts["rewritten"] > searched
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_text("was changed successfully").wait_for()
        page.goto(f"{site}{ORDERS}7/change/")
        assert page.get_by_label("Note").input_value() == "by the admin"
        changed = indexes().counts["rewritten"]
        page.goto(f"{site}{ORDERS}7/delete/")
        page.get_by_role("button", name="Yes, I’m sure").click()
        page.get_by_text("was deleted successfully").wait_for()
        assert indexes().counts["rewritten"] > changed
    with unchanged():
        assert not Order.objects.filter(pk=7).exists()
        assert not Payment.objects.filter(order_id=7).exists()
    assert set(indexes().counts) == {"rewritten"}
