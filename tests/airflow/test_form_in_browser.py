"""Airflow's trigger form in Chromium refuses what can't be right, before the trigger. By hand, `make test-browser`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.airflow import ApiServer
from servers.postgres import embedded_postgres
from tests.airflow.screen import browser_page, sign_in

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(900)]

DAG, FIRST = "rebuild_index", ""
# By field: its section in the form, '' for the open one, a value that can't be right, and the refusal.
WRONG = {
    "parallelism": ("How to build it", "999", "the value is 999; it must be a whole number from 1 to 256"),
    "abort_after_s": ("When, and how hard", "5 parsecs", "the value is '5 parsecs'; it must be a duration, such as 2h"),
    "windows": ("When, and how hard", "at night", "windows: 'at night' is no window; write CRON for DURATION in ZONE"),
    "throttle": ("When, and how hard", "replica_lagg=1MB", "there is no signal replica_lagg"),
    "table": (FIRST, "a.b.c", "the value 'a.b.c': at most a schema and a name, found 3 parts"),
}


@pytest.fixture(scope="module")
def api(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with embedded_postgres() as metadata, ApiServer(tmp_path_factory.mktemp("api"), dags_folder, metadata) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def page(api: ApiServer) -> Iterator[Any]:
    with browser_page(1320, 1040) as page:
        sign_in(page, api, "op")
        yield page


@pytest.mark.parametrize("name", WRONG)
def test_the_form_refuses_what_can_t_be_right(api: ApiServer, page: Any, name: str, tmp_path: Path) -> None:
    """Found: it made 256 workers of 999, and `5 parsecs` was refused by the first task, minutes later."""
    section, value, said = WRONG[name]
    page.goto(f"{api.url}/dags/{DAG}")
    page.get_by_role("button", name="Trigger").first.click()
    form = page.get_by_role("dialog")
    # Found: all sections were closed, and a newcomer saw none of the fields that a build needs.
    for first in ("index", "table", "keys", "include", "postgres_conn_id"):
        form.locator(f"[name=element_{first}]").wait_for(timeout=15_000)
    form.locator("[name=element_index]").fill("public.i")
    if section:
        form.get_by_role("button", name=section).click()
    field = form.locator(f"[name=element_{name}]")
    field.fill(value)
    # Only when it loses the focus, Airflow would move a number.
    field.press("Tab")
    assert field.input_value() == value
    form.get_by_role("contentinfo").get_by_role("button", name="Trigger").click()
    try:
        form.get_by_text(f"Invalid input for param {name}: {said}").wait_for(timeout=15_000)
    finally:
        page.screenshot(path=tmp_path / "refused.png")
    assert api.call("GET", f"/api/v2/dags/{DAG}/dagRuns")["total_entries"] == 0
