"""The pages as a user meets them: Airflow's UI in Chromium. By hand, `make test-browser`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from psycopg2.extensions import parse_dsn

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.prepare import prepare
from airflow_roir.options import BuildOptions
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.engine import steps

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(1800)]

DAG, INDEX = "rebuild_index", "public.item_by_price"
ROWS, RATE = 300_000, 2_500
PATIENCE_S = 180
WIDTHS = (400, 800, 1400)
WIDTH, HEIGHT = 1320, 1040
# The sections of the form, of which one is open at a time; at first, that of the fields without one.
OPEN = "Run Parameters"
FORM = {
    OPEN: ("index", "table", "keys", "postgres_conn_id"),
    "How to build it": ("parallelism", "batch_rows", "ranges", "max_rows_per_second"),
    "When, and how hard": ("throttle", "windows"),
    "Where": ("shards",),
}


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """Airflow with the DAGs as they are shipped."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__"))
    with (
        embedded_postgres() as metadata,
        StandaloneAirflow(tmp_path_factory.mktemp("airflow"), dags, metadata) as running,
    ):
        running.wait_until_ready([DAG, "verify_index", "control_index", "clean_up_indexes"])
        yield running


@dataclass(frozen=True)
class Tab:
    """A tab of a browser that shows Airflow."""

    page: Any
    airflow: str

    def open(self, path: str) -> None:
        """Go to an address below Airflow's."""
        self.page.goto(f"{self.airflow}{path}")

    def frame(self, title: str) -> Any:
        """One of our pages, inside Airflow's."""
        return self.page.frame_locator(f'iframe[title="{title}"]')

    def trigger(self, values: dict[str, Any]) -> str:
        """Fills in the form of the DAG that builds, and presses Trigger; returns the run's id."""
        self.open(f"/dags/{DAG}")
        self.page.get_by_role("button", name="Trigger").first.click()
        form = self.page.get_by_role("dialog")
        for section, fields in FORM.items():
            if wanted := [name for name in fields if name in values]:
                if section != OPEN:
                    form.get_by_role("button", name=section).click()
                for name in wanted:
                    form.locator(f"[name=element_{name}]").fill(str(values[name]))
                    form.locator(f"[name=element_{name}]").press("Tab")
        form.get_by_role("contentinfo").get_by_role("button", name="Trigger").click()
        self.page.wait_for_url(f"**/dags/{DAG}/runs/*")
        return unquote(self.page.url.rsplit("/", 1)[1])

    def store(self, run: str, key: str, value: object) -> None:
        """Edit a key of the build task's Task State Store."""
        self.open(f"/dags/{DAG}/runs/{quote(run, safe=':+')}/tasks/build")
        self.page.get_by_role("link", name="Storage").click()
        row = self.page.get_by_role("row").filter(has=self.page.get_by_text(key, exact=True))
        row.get_by_role("button", name="Edit Task State Store").click()
        dialog = self.page.get_by_role("dialog")
        dialog.locator(".monaco-editor .view-lines").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.type(str(value))
        dialog.get_by_role("button", name="Save").click()
        dialog.wait_for(state="hidden")

    def switch(self) -> None:
        """Turn the DAG's switch, on a page of that DAG."""
        self.page.get_by_test_id("toggle-pause").first.click()

    def in_theme(self, theme: str, title: str, ready: str) -> Any:
        """Shows our page in that theme of Airflow's; returns the frame."""
        self.page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        self.page.reload()
        frame = self.frame(title)
        frame.locator(ready).first.wait_for()
        assert frame.locator("html").get_attribute("data-theme") == theme
        return frame

    def fits(self, title: str, ready: str) -> None:
        """Checks in both themes that the page needs no sideways scrolling at any width."""
        for theme in ("dark", "light"):
            frame = self.in_theme(theme, title, ready)
            for width in WIDTHS:
                self.page.set_viewport_size({"width": width, "height": HEIGHT})
                wider = frame.locator("html").evaluate("html => html.scrollWidth - html.clientWidth")
                assert wider <= 0, (theme, width)
            self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


@pytest.fixture
def tab(airflow: StandaloneAirflow) -> Iterator[Tab]:
    """A tab in which no script fails."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or None,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.set_default_timeout(PATIENCE_S * 1000)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield Tab(page, airflow.url)
        browser.close()
        assert wrong == []


@pytest.fixture
def form(airflow: StandaloneAirflow, shop: Any) -> Iterator[dict[str, Any]]:
    """The values of the form for a build of a table that takes a while."""
    shop.run(f"INSERT INTO public.item SELECT n, 'k' || n % 97, n % 1000 FROM generate_series(20001, {ROWS}) n")
    airflow.add_connection("warehouse", "postgres", **{key: value for key, value in shop.fields.items() if value})
    yield {"index": INDEX, "batch_rows": 1_000, "ranges": 60, "postgres_conn_id": "warehouse"}
    airflow.call("DELETE", "/api/v2/connections/warehouse")


def until(what: str, condition: Callable[[], object]) -> None:
    wait_until(condition, PATIENCE_S, what)


def test_a_build_from_the_form_to_the_publish(airflow: StandaloneAirflow, tab: Tab, shop: Any, form: Any) -> None:
    def row() -> operations.OperationRow:
        return operations.find_operation(shop.database, INDEX)

    # The form.
    run = tab.trigger({"table": "public.item", "keys": "price", "max_rows_per_second": RATE} | form)
    path = f"/dags/{DAG}/runs/{quote(run, safe=':+')}"
    tab.page.get_by_role("link", name="Index build").click()
    build = tab.frame("Index build")
    build.locator(".cell[data-state=working]").first.wait_for()
    build.locator(".chart .line").first.wait_for()
    seen = [build.locator("[role=progressbar]").get_attribute("aria-valuenow")]

    # The workers: by the page, although the user leaves at once, and by the Task State Store.
    build.get_by_role("button", name="One worker more").click()
    build.get_by_role("button", name="One worker more").click()
    build.get_by_role("button", name="One worker fewer").click()
    tab.page.get_by_role("link", name="Task Instances").click()
    until("three workers", lambda: row().parallelism == 3)
    until("the store", lambda: airflow.get_stored(DAG, run, "build").get("parallelism") == 3)
    tab.store(run, "parallelism", 4)
    tab.page.get_by_role("link", name="Index build").click()
    build.locator("output", has_text="4 workers").wait_for()
    build.locator(".tile", has_text="4 of 4").wait_for()
    tab.open(f"{path}/plugin/index-build")
    writes = "UPDATE public.item SET price = price + 1 WHERE id % 300 = 7; DELETE FROM public.item WHERE id % 900 = 1"
    shop.run(writes)
    tab.fits("Index build", ".cell[data-state=working]")
    seen.append(build.locator("[role=progressbar]").get_attribute("aria-valuenow"))

    # A pause by the page, and its end.
    build.get_by_role("button", name="Pause").click()
    build.get_by_label("Why").fill("month-end close")
    build.get_by_label("Why").press("Enter")
    build.locator(".chip", has_text=re.compile("^Paused")).wait_for()
    assert (row().paused_by, row().pause_reason) == ("airflow user Anonymous", "month-end close")
    build.get_by_text("month-end close").first.wait_for()
    build.get_by_role("button", name="Resume").click()
    until("a resume", lambda: row().status == "running")
    build.locator(".cell[data-state=working]").first.wait_for()
    assert row().parallelism == 4

    # A pause by the switch, and its end.
    tab.switch()
    build.get_by_text(f"Turn the switch of {DAG} on to resume").wait_for()
    build.locator(".chip", has_text=re.compile("^Paused")).wait_for()
    assert build.get_by_role("button", name="Resume").is_disabled()
    tab.fits("Index build", ".chip[data-status=paused]")
    tab.switch()
    seen.append(build.locator("[role=progressbar]").get_attribute("aria-valuenow"))
    build.locator(".chip", has_text="Running").wait_for()
    build.locator(".chip", has_text="Completed").wait_for(timeout=4000 * PATIENCE_S)
    assert build.locator("[role=progressbar]").get_attribute("aria-valuenow") == "100"
    assert seen == sorted(seen, key=int)
    until("the run's end", lambda: airflow.run_state(DAG, run) == "success")


def test_a_throttle_tells_why_and_its_limits_change_on_the_page(
    airflow: StandaloneAirflow, tab: Tab, shop: Any, form: Any, tmp_path: Path
) -> None:
    """Busy, on hold, unreadable, free again; what the tab shows is drawn beside the test's own files."""
    limits = "oldest_transaction=2s commit_latency=5s"
    about = {"table": "public.item", "keys": "price", "max_rows_per_second": RATE, "throttle": limits}
    run = tab.trigger(about | form)
    tab.page.get_by_role("link", name="Index build").click()
    build = tab.frame("Index build")
    throttle = build.get_by_role("region", name="Throttle")
    throttle.locator(".signal", has_text="Commit latency").wait_for()
    build.locator(".cell[data-state=working]").first.wait_for()

    def draw(name: str) -> None:
        for theme in ("dark", "light"):
            frame = tab.in_theme(theme, "Index build", ".signal")
            for width in WIDTHS:
                tab.page.set_viewport_size({"width": width, "height": HEIGHT})
                assert frame.locator("html").evaluate("html => html.scrollWidth - html.clientWidth") <= 0, width
            tab.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            tab.page.wait_for_timeout(2_000)
            tab.page.screenshot(path=tmp_path / f"{name}_{theme}.png")

    draw("busy")
    # A user's transaction stays open.
    user = steps.old_session(shop.dsn)
    build.locator(".held", has_text="a transaction has been open for").wait_for()
    throttle.get_by_text("on hold since").wait_for()
    draw("held")
    user.rollback()
    user.close()
    throttle.get_by_text("on hold since").wait_for(state="hidden")

    def change(text: str) -> None:
        throttle.get_by_role("button", name="Change limits").click()
        build.get_by_label("Limits", exact=True).fill(text)
        build.get_by_role("button", name="Set limits").click()

    # A replica of such a name isn't there.
    hostile = "<img/src=x/onerror=alert(1)>" + "x" * 150
    change(f"replica_lag=1MB replicas={hostile}")
    throttle.get_by_text("can’t be read").first.wait_for()
    build.locator(".held", has_text="<img/src").wait_for()
    draw("unreadable")
    change("nothing=1")
    build.get_by_role("alertdialog").get_by_text("there is no signal nothing").wait_for()
    until("the store", lambda: "replicas=<img" in str(airflow.get_stored(DAG, run, "build").get("throttle")))
    change("")
    throttle.get_by_text("none", exact=True).wait_for()
    until("the store", lambda: airflow.get_stored(DAG, run, "build").get("throttle") == "off")
    requests.change_options(shop.database, INDEX, actor="test", max_rows_per_second=0)
    build.locator(".chip", has_text="Completed").wait_for(timeout=4000 * PATIENCE_S)
    assert throttle.locator(".lost").get_by_text("Oldest transaction").count() == 1
    draw("ended")


def test_shards_from_the_form_to_a_server_that_is_down(
    airflow: StandaloneAirflow, tab: Tab, shop: Any, orders: dict[str, str], tmp_path: Path
) -> None:
    """Draws the pages, and leaves the pictures beside the test's own files."""
    index = "public.orders_by_email"
    about = {"index": index, "table": "public.orders", "keys": "email", "batch_rows": 1_000, "ranges": 8}
    # A line that is empty names no shard.
    about |= {"shards": "orders_0\n\norders_1\n", "max_rows_per_second": 400}
    tab.trigger(about | {"postgres_conn_id": "postgres_default"})
    tab.page.get_by_role("link", name="Index build").click()
    build = tab.frame("Index build")
    build.get_by_text("on public.orders in orders_0, orders_1 by ").wait_for()
    build.locator(".cell[data-state=working]").first.wait_for()

    def draw(name: str, title: str, ready: str) -> None:
        for theme in ("dark", "light"):
            frame = tab.in_theme(theme, title, ready)
            tab.page.wait_for_timeout(1_000)
            assert frame.locator("html").evaluate("html => html.scrollWidth - html.clientWidth") <= 0
            tab.page.screenshot(path=tmp_path / f"{name}_{theme}.png")

    # One of them is down: it is named, and the other is read.
    database = parse_dsn(orders["orders_1"])["dbname"]
    shop.run(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
    shop.run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
    down = build.locator("tr[data-trouble=away]", has_text="orders_1")
    down.get_by_text("not currently accepting connections").wait_for()
    build.get_by_role("region", name="Shards").first.get_by_text("1 of 2 shards in trouble").wait_for()
    draw("down", "Index build", "tr[data-trouble=away]")
    shop.run(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
    requests.change_options(shop.database, index, actor="test", max_rows_per_second=0)
    down.wait_for(state="hidden")
    build.locator(".chip", has_text="Completed").wait_for(timeout=4000 * PATIENCE_S)
    draw("done", "Index build", "tr >> text=orders_1")
    tab.open("/plugin/indexes")
    card = tab.frame("Indexes")
    card.get_by_text("No shipper is running for orders_0, orders_1.").wait_for()
    assert card.locator(".facts > div", has_text="Strict reads").inner_text().split("\n")[1] == "off"
    card.get_by_text("2 shards", exact=True).click()
    draw("index", "Indexes", ".facts")


def test_an_abort_the_clean_up_a_verification_a_rebuild_and_its_revert(tab: Tab, shop: Any, form: Any) -> None:
    prepare(shop.database, IndexDefinition.parse(INDEX, "public.item", ["price"]), BuildOptions())
    run = start_run(shop.database, INDEX, "test")
    steps.finish_all(shop.database, run)
    end_run(shop.database, run)

    def row() -> operations.OperationRow:
        return operations.find_operation(shop.database, INDEX)

    # The abort asks first.
    tab.trigger({"max_rows_per_second": 500} | form)
    tab.page.get_by_role("link", name="Index build").click()
    build = tab.frame("Index build")
    build.locator(".cell[data-state=working]").first.wait_for()
    build.get_by_role("button", name="Abort").click()
    build.locator(".question").get_by_role("button", name="Cancel").click()
    assert row().status == "running"
    build.get_by_role("button", name="Abort").click()
    build.get_by_label("Why").fill("the wrong table")
    build.locator(".question").get_by_role("button", name="Abort").click()
    build.locator(".chip", has_text="Abort").wait_for()

    # From page to page, and by the navigation.
    build.get_by_role("link", name="All indexes").click()
    indexes = tab.frame("Indexes")

    def press(verb: str, name: str, dag: str) -> None:
        indexes.get_by_role("button", name=name, exact=True).and_(indexes.locator(":not([aria-disabled])")).click()
        indexes.locator(".question").get_by_role("button", name=verb, exact=True).click()
        indexes.locator(".said", has_text=f"{dag} is triggered").wait_for()

    press("Clean up", "Clean up", "clean_up_indexes")
    until("the clean-up", lambda: row().status == "aborted")
    tab.page.get_by_role("button", name="Browse").click()
    tab.page.get_by_role("menuitem", name="Indexes").click()
    press("Verify", f"Verify {INDEX}", "verify_index")
    until("the verification", lambda: (row().kind, row().status) == ("verify", "completed"))
    press("Rebuild", f"Rebuild {INDEX}", DAG)
    until("the rebuild", lambda: (row().kind, row().status) == ("rebuild", "completed"))
    tab.fits("Indexes", f'button[aria-label="Revert {INDEX}"]')
    active = "SELECT id FROM roir.generation WHERE status = 'active'"
    before = shop.run(active)
    press("Revert", f"Revert {INDEX}", "control_index")
    until("the revert", lambda: shop.run(active) != before)
    assert len(shop.run(active)) == 1
