"""The form of a new index on the page Indexes, in Chromium, with answers of the test's own. By hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.airflow.test_page_script import NO_RIGHT, Airflow, airflow, tab
from tests.airflow.test_shards_script import draw

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

HOSTILE = '"<img src=x onerror=alert(1)>"'
TABLES = [
    {"table": "shop.orders", "columns": ["id", "ordered_at", "customer_id"]},
    {"table": f"shop.{HOSTILE}", "columns": [HOSTILE]},
]


def open_form(airflow: Airflow, tab: Any, may: bool = True) -> Any:
    """Opens the page, and the form if the user may build; returns the form."""
    database = {"connection": "c", "indexes": [], "trouble": None}
    airflow.pages |= {
        "api/indexes": {
            "databases": [database],
            "bare": [],
            "dags": {"rebuild": "rebuild_index"},
            "may": NO_RIGHT | {"rebuild": may},
        },
        "api/tables": {"tables": TABLES},
        "api/check": {"refused": []},
    }
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.get_by_text("No index yet.").wait_for()
    if may:
        tab.get_by_role("button", name="Build an index: connection c").press("Enter")
    return tab.get_by_role("form", name="Build an index")


def test_a_new_index_is_checked_and_then_triggered(airflow: Airflow, tab: Any, tmp_path: Path) -> None:
    """Found: Airflow's form can't ask the database, so that the run's first task found a misspelt table."""
    form = open_form(airflow, tab)
    table = form.get_by_label("Table, with its schema")
    assert table.evaluate("input => input === document.activeElement")
    tab.locator("datalist option").first.wait_for(state="attached")
    assert tab.locator("datalist option").evaluate_all("all => all.map(one => one.value)") == [
        one["table"] for one in TABLES
    ]
    table.fill(f"shop.{HOSTILE}")
    form.get_by_text(f"Its columns: {HOSTILE}", exact=True).wait_for()
    table.fill("shop.orders")
    form.get_by_text("Its columns: id, ordered_at, customer_id", exact=True).wait_for()
    form.get_by_label("Key columns").fill("customer_id, orderd_at")
    name = form.get_by_label("Name of the index")
    assert name.input_value() == "shop.orders_by_customer_id"
    airflow.pages["api/check"] = {"refused": ["there is no column orderd_at. Did you mean ordered_at?", HOSTILE]}
    form.get_by_role("button", name="Check and build").click()
    form.get_by_text("Did you mean ordered_at?").wait_for()
    assert form.get_by_role("listitem").count() == 2
    assert airflow.sent == []
    draw(tab, tmp_path, "new_index")
    form.get_by_label("Key columns").fill("customer_id, ordered_at")
    name.fill("shop.by_customer")
    form.get_by_label("Condition").fill("customer_id > 0 ")
    form.get_by_label("Unique").check()
    airflow.pages["api/check"] = {"refused": []}
    form.get_by_role("button", name="Check and build").click()
    tab.get_by_text("rebuild_index is triggered.").wait_for()
    assert form.is_hidden()
    [(path, body)] = airflow.sent
    assert path.endswith("/api/v2/dags/rebuild_index/dagRuns")
    assert body["conf"] == {
        "index": "shop.by_customer",
        "table": "shop.orders",
        "keys": "customer_id, ordered_at",
        "include": None,
        "where": "customer_id > 0",
        "unique": True,
        "postgres_conn_id": "c",
    }


def test_only_who_may_trigger_the_dag_gets_the_form(airflow: Airflow, tab: Any) -> None:
    assert open_form(airflow, tab, may=False).count() == 0
    assert tab.get_by_role("button", name="Build an index").count() == 0


def test_escape_closes_the_form_and_gives_the_focus_back(airflow: Airflow, tab: Any) -> None:
    form = open_form(airflow, tab)
    tab.keyboard.press("Escape")
    assert form.is_hidden()
    button = tab.get_by_role("button", name="Build an index: connection c")
    assert button.evaluate("button => button === document.activeElement")
