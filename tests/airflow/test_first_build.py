"""The check for a first build on the page Indexes, in Airflow's UI in Chromium. By hand, `make test-browser`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servers.airflow import StandaloneAirflow, wait_until
from tests.airflow.test_browser import DAG, Tab, airflow, tab

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(600)]


def test_a_first_build_is_checked_before_it_is_triggered(
    airflow: StandaloneAirflow, tab: Tab, shop: Any, tmp_path: Path
) -> None:
    """By the page Indexes while there is no index: the database, Airflow's processes and DAGs, the API server."""
    airflow.add_connection(
        "postgres_default", "postgres", **{key: value for key, value in shop.fields.items() if value}
    )
    try:
        tab.open("/plugin/indexes")
        frame = tab.frame("Indexes")
        frame.get_by_text("No index yet.").wait_for()
        found = frame.get_by_role("region", name="Check of connection postgres_default for a first build")
        for row in ("OK session", "OK schema", "OK Scheduler runs", f"OK {DAG}", "OK postgres_default", "OK pyspark"):
            found.get_by_role("row", name=row).first.wait_for()
        found.get_by_text("API server's").wait_for()
        assert found.get_by_role("row", name="Problem").count() == 0
        frame.get_by_role("button", name="Check for a first build: connection postgres_default").focus()
        tab.page.keyboard.press("Enter")
        found.locator(".sum", has_text="1 warning.").wait_for()
        tab.page.screenshot(path=tmp_path / "first_build.png")
        build_one(airflow, tab, frame)
    finally:
        airflow.call("DELETE", "/api/v2/connections/postgres_default")


def build_one(airflow: StandaloneAirflow, tab: Tab, frame: Any) -> None:
    """By the form of a new index: a misspelt column is refused with the nearest, and the corrected one triggers."""
    frame.get_by_role("button", name="Build an index: connection postgres_default").click()
    form = frame.get_by_role("form", name="Build an index")
    form.get_by_label("Table, with its schema").fill("public.item")
    form.get_by_text("Its columns: id, kind, price").wait_for()
    form.get_by_label("Key columns").fill("prise")
    form.get_by_label("Name of the index").fill("public.item_by_price")
    form.get_by_role("button", name="Check and build").click()
    form.get_by_text("Did you mean price?").wait_for()
    assert airflow.call("GET", f"/api/v2/dags/{DAG}/dagRuns")["total_entries"] == 0
    form.get_by_label("Key columns").fill("price")
    form.get_by_role("button", name="Check and build").click()
    frame.get_by_text(f"{DAG} is triggered.").wait_for()
    [run] = airflow.call("GET", f"/api/v2/dags/{DAG}/dagRuns")["dag_runs"]
    assert (run["conf"]["index"], run["conf"]["keys"]) == ("public.item_by_price", "price")
    wait_until(lambda: airflow.run_state(DAG, run["dag_run_id"]) == "success", 120, "the build")
