"""A viewer and an operator sign in to a real Airflow and use both pages by the keyboard alone, in both themes.

By hand, `make test-browser`. No task runs here: the operations are carried by the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.prepare import prepare
from airflow_roir.options import BuildOptions
from servers.airflow import ApiServer
from servers.postgres import embedded_postgres
from tests.airflow.a11y import violations
from tests.airflow.screen import browser_page, sign_in
from tests.engine import steps

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(900)]

DAG, INDEX = "rebuild_index", "public.item_by_price"
FOCUSED = "() => document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
PATIENCE_MS = 120_000
# Airflow's own page has a stop for each task of each run.
MOST_STOPS = 300


@pytest.fixture(scope="module")
def api(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with embedded_postgres() as metadata, ApiServer(tmp_path_factory.mktemp("api"), dags_folder, metadata) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
def runs(api: ApiServer, shop: Any) -> Iterator[dict[str, str]]:
    """A run of each state: `running`, but not driven now; `paused`; and `failed` before its build began. `connection`:
    of their database.
    """
    name = f"warehouse_{shop.fields['schema']}"
    api.add_connection(name, "postgres", **{key: value for key, value in shop.fields.items() if value})
    found = {"connection": name}
    for state in ("running", "paused", "failed"):
        index = f"{INDEX}_{state}"
        conf = {"index": index, "table": "public.item", "keys": "price", "postgres_conn_id": name}
        found[state] = run = api.trigger(DAG, conf)
        if state == "failed":
            api.call("PATCH", f"/api/v2/dags/{DAG}/dagRuns/{quote(run, safe='')}", {"state": "failed"})
            continue
        definition = IndexDefinition.parse(index, "public.item", ["price"])
        prepare(shop.database, definition, BuildOptions(parallelism=2), f"airflow {DAG} {run}")
        # Its run will come.
        shop.run("UPDATE roir.operation SET awaited_until = clock_timestamp() + interval '1 h'")
        if state == "paused":
            requests.pause(shop.database, index, "ann", "month-end close")
    steps.make_index(shop.database, INDEX, "public.item", ["price"])
    yield found
    api.call("DELETE", f"/api/v2/connections/{name}")


@pytest.fixture
def page(api: ApiServer, user: str) -> Iterator[Any]:
    """A page of Airflow's UI of a user who has signed in."""
    with browser_page(1320, 1040) as page:
        sign_in(page, api, user)
        yield page


class Walk:
    """One of our pages within Airflow's, and a walk through it by Tab."""

    def __init__(self, page: Any, address: str, title: str, ready: str) -> None:
        self.page = page
        page.goto(address)
        self.inside = page.frame_locator(f'iframe[title="{title}"]')
        self.inside.locator(ready).first.wait_for()
        self.frame = page.locator(f'iframe[title="{title}"]').element_handle().content_frame()

    def is_inside(self) -> bool:
        """True if our page has the focus."""
        return bool(self.page.evaluate("document.activeElement.tagName === 'IFRAME'"))

    def names(self) -> list[str]:
        """From Airflow's page by Tab into ours and to its end: what is come by."""
        for _ in range(MOST_STOPS):
            self.page.keyboard.press("Tab")
            if self.is_inside():
                break
        found = []
        while self.is_inside() and len(found) < MOST_STOPS:
            found.append(str(self.frame.evaluate(FOCUSED)))
            self.page.keyboard.press("Tab")
        return found

    def buttons(self) -> list[str]:
        """The buttons that can be seen."""
        return [
            one.get_attribute("aria-label") or one.inner_text() for one in self.inside.locator("button:visible").all()
        ]


STEPPER = ["One worker fewer", "One worker more", "Rate limit"]
VALUES, LINKS = "Values of this run", ["Run", "All indexes"]
HISTORY = "History"
# The stops of a viewer; the buttons of an operator, in the order of Tab.
BUILDS = {
    "running": ([HISTORY, VALUES, *LINKS], ["Pause", "Throttle", "Abort", *STEPPER]),
    "paused": ([HISTORY, VALUES, *LINKS], ["Resume", "Throttle", "Abort", *STEPPER]),
    "failed": (["All indexes", VALUES], ["Trigger again"]),
}
READY = {"running": ".chip[data-status=undriven]", "paused": ".chip[data-status=paused]", "failed": ".failures li"}
OF_INDEX = ["Rebuild", "Verify"]


by_user = pytest.mark.parametrize("user", ["viewer", "op"])


@by_user
@pytest.mark.parametrize("state", BUILDS)
def test_a_run_by_its_keys(api: ApiServer, page: Any, user: str, runs: dict[str, str], state: str) -> None:
    address = f"{api.url}/dags/{DAG}/runs/{quote(runs[state], safe=':+')}/plugin/index-build"
    stops, buttons = BUILDS[state]
    for theme in ("dark", "light"):
        page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        walk = Walk(page, address, "Index build", READY[state])
        assert walk.inside.locator("html").get_attribute("data-theme") == theme
        assert walk.buttons() == (buttons if user == "op" else [])
        names = walk.names()
        assert [one for one in names if one not in buttons] == stops
        assert [one for one in names if one in buttons] == (buttons if user == "op" else [])
        assert violations(walk.frame) == ""


@by_user
def test_indexes_by_its_keys(api: ApiServer, page: Any, user: str, runs: dict[str, str]) -> None:
    for theme in ("dark", "light"):
        page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        walk = Walk(page, f"{api.url}/plugin/indexes", "Indexes", f"h3:text-is('{INDEX}')")
        of_database = [f"Check for a first build: connection {runs['connection']}", "Clean up"]
        buttons = [*of_database, *(f"{verb} {INDEX}" for verb in OF_INDEX)] if user == "op" else []
        assert walk.buttons() == buttons
        names = walk.names()
        assert names[0] == "Filter by name or table"
        assert [one for one in names if one in buttons] == buttons
        assert violations(walk.frame) == ""


@pytest.mark.parametrize("user", ["op"])
def test_an_operator_pauses_by_the_keys(api: ApiServer, page: Any, runs: dict[str, str], shop: Any) -> None:
    """From Airflow's own page: into the frame, to the button, through its question, and on to Resume."""
    address = f"{api.url}/dags/{DAG}/runs/{quote(runs['running'], safe=':+')}/plugin/index-build"
    walk = Walk(page, address, "Index build", READY["running"])
    while not (walk.is_inside() and walk.frame.evaluate(FOCUSED) == "Pause"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    playwright.expect(walk.inside.get_by_label("Why")).to_be_focused()
    page.keyboard.type("month-end close")
    page.keyboard.press("Enter")
    walk.inside.locator(".chip", has_text="Paus").wait_for()
    playwright.expect(walk.inside.get_by_role("button", name="Resume")).to_be_focused(timeout=PATIENCE_MS)
    row = operations.find_operation(shop.database, f"{INDEX}_running")
    assert (row.status, row.paused_by, row.pause_reason) == ("paused", "airflow user op", "month-end close")


@pytest.mark.parametrize("user", ["op"])
@pytest.mark.parametrize("of_task", [False, True])
def test_an_operator_corrects_the_values_of_a_failed_run(
    api: ApiServer, page: Any, runs: dict[str, str], of_task: bool
) -> None:
    """Found: *Trigger again* repeated the misspelt table, and all values had to be typed again into an empty form."""
    run = f"{api.url}/dags/{DAG}/runs/{quote(runs['failed'], safe=':+')}"
    address = f"{run}/tasks/prepare/plugin/index-build-of-task" if of_task else f"{run}/plugin/index-build"
    walk = Walk(page, address, "Index build", READY["failed"])
    walk.inside.get_by_role("button", name="Trigger again").press("Enter")
    form = page.get_by_role("dialog")
    field = form.locator("[name=element_table]")
    playwright.expect(field).to_have_value("public.item")
    field.fill("public.items")
    form.get_by_role("contentinfo").get_by_role("button", name="Trigger").click()
    page.wait_for_url(lambda url: "/runs/" in url and quote(runs["failed"], safe=":+") not in url)
    [newest] = api.call("GET", f"/api/v2/dags/{DAG}/dagRuns?order_by=-run_after&limit=1")["dag_runs"]
    assert (newest["conf"]["table"], newest["conf"]["index"]) == ("public.items", f"{INDEX}_failed")


@by_user
def test_the_first_stop_of_airflow_s_page_leads_into_ours(
    api: ApiServer, page: Any, user: str, runs: dict[str, str]
) -> None:
    """Found: 73 stops of Airflow's own before *Pause*."""
    address = f"{api.url}/dags/{DAG}/runs/{quote(runs['running'], safe=':+')}/plugin/index-build"
    walk = Walk(page, address, "Index build", READY["running"])
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to Index build")
    playwright.expect(skip).to_be_focused()
    assert skip.bounding_box()["width"] > 100, "it is seen"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert walk.is_inside()
    assert walk.frame.evaluate(FOCUSED) == ("Pause" if user == "op" else HISTORY)
    page.get_by_role("link", name="Dags", exact=True).first.click()
    playwright.expect(page.locator("#roir-skip")).to_have_count(0)
    page.goto(f"{api.url}/plugin/indexes")
    page.frame_locator('iframe[title="Indexes"]').locator("h3").first.wait_for()
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_role("link", name="Skip to Indexes")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName === 'IFRAME'")
