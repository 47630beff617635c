"""Draws the pictures of the docs from a real Airflow in Chromium, in both themes. By hand, `make pictures`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from airflow_roir.engine.control import operations, requests
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.airflow.screen import browser_page, keep, set_theme, sign_in
from tests.engine import steps

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("pictures"), pytest.mark.timeout(1800)]

DAG, INDEX, USER = "rebuild_index", "shop.orders_by_customer", "ann"
WIDTH, HEIGHT = 1320, 1040
ROWS, RATE = 400_000, 2_000
PATIENCE_S = 300
TITLE = "Index build"
# A table as in docs/first-index.md.
TABLE = """
CREATE SCHEMA shop;
CREATE TABLE shop.orders (
    id bigint, ordered_at date, customer_id int, email text, status text, total numeric(10, 2), number bigint,
    PRIMARY KEY (id, ordered_at)
) PARTITION BY RANGE (ordered_at);
SELECT format('CREATE TABLE shop.orders_%s PARTITION OF shop.orders FOR VALUES FROM (%L) TO (%L)',
              to_char(month, 'YYYY_MM'), month, month + interval '1 month')
  FROM generate_series(timestamp '2023-01-01', '2026-12-01', '1 month') month;
"""
FILL = f"""
INSERT INTO shop.orders
SELECT n, date '2023-01-01' + n % 1400, n % 9973, n || '@example.org', (ARRAY['open', 'paid', 'sent'])[n % 3 + 1],
       n % 500, n
  FROM generate_series(1, {ROWS}) n;
ANALYZE shop.orders
"""


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """Airflow with the DAGs as they are shipped, and a user who may operate them."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    shutil.copytree(dags_folder, dags, ignore=shutil.ignore_patterns("__pycache__"))
    more = {"AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"admin:admin,{USER}:op"}
    home = tmp_path_factory.mktemp("airflow")
    with (
        embedded_postgres() as metadata,
        StandaloneAirflow(home, dags, metadata, environment=more, everyone_is_admin=False) as running,
    ):
        running.wait_until_ready([DAG])
        yield running


def make_table(shop: Any) -> None:
    """The orders of the docs, by months."""
    *made, parts = [one for one in TABLE.split(";") if one.strip()]
    for one in made:
        shop.run(one)
    for (one,) in shop.run(parts):
        shop.run(one)
    for one in FILL.split(";"):
        shop.run(one)


def draw(page: Any, name: str, title: str, ready: str, height: int = HEIGHT) -> None:
    """Our page within Airflow's, in both themes."""
    for theme in ("dark", "light"):
        set_theme(page, theme)
        page.reload()
        frame = page.frame_locator(f'iframe[title="{title}"]')
        frame.locator(ready).first.wait_for()
        assert frame.locator("html").get_attribute("data-theme") == theme
        # Moving parts, such as the bars, come to rest.
        page.wait_for_timeout(2_000)
        keep(f"{name}_{theme}", page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}))


def fill_in(page: Any, airflow: Any, values: dict[str, dict[str, Any]]) -> Any:
    """Opens the form of the DAG and fills in some values of each section, '' for the open one; returns the dialog."""
    page.goto(f"{airflow.url}/dags/{DAG}")
    page.get_by_role("button", name="Trigger").first.click()
    form = page.get_by_role("dialog")
    for section, fields in values.items():
        if section:
            form.get_by_role("button", name=section).click()
        for name, value in fields.items():
            form.locator(f"[name=element_{name}]").fill(str(value))
            form.locator(f"[name=element_{name}]").press("Tab")
    return form


def test_the_form(airflow: StandaloneAirflow) -> None:
    """As the README has it."""
    values = {"index": "public.flights_by_plane", "table": "public.flights", "keys": "tailnum, time_hour"}
    with browser_page(1000, 1500) as page:
        sign_in(page, airflow, USER)
        set_theme(page, "light")
        form = fill_in(page, airflow, {"": values | {"include": "dest"}})
        page.wait_for_timeout(1_000)
        page.evaluate("document.activeElement.blur()")
        keep("trigger_form", form.screenshot())


def test_a_build_its_pause_and_indexes(airflow: StandaloneAirflow, shop: Any) -> None:
    make_table(shop)
    fields = {key: value for key, value in shop.fields.items() if value}
    airflow.add_connection("postgres_default", "postgres", **fields)
    # Built twice, so that there is something to revert.
    for _ in range(2):
        steps.make_index(shop.database, "shop.orders_by_number", "shop.orders", "number", unique=True)
    what = {"index": INDEX, "table": "shop.orders", "keys": "customer_id, ordered_at", "include": "status"}
    how = {"parallelism": 2, "batch_rows": 1000, "ranges": 60, "max_rows_per_second": RATE}
    with browser_page(WIDTH, HEIGHT) as page:
        sign_in(page, airflow, USER)
        form = fill_in(page, airflow, {"": what, "How to build it": how})
        form.get_by_role("contentinfo").get_by_role("button", name="Trigger").click()
        page.wait_for_url(f"**/dags/{DAG}/runs/*")
        run = quote(unquote(page.url.rsplit("/", 1)[1]), safe=":+")
        build = page.frame_locator(f'iframe[title="{TITLE}"]')
        page.goto(f"{airflow.url}/dags/{DAG}/runs/{run}/plugin/index-build")
        build.locator(".cell[data-state=working]").first.wait_for()
        for _ in range(2):
            build.get_by_role("button", name="One worker more").click()
        build.locator(".tile", has_text="4 of 4").wait_for()
        shop.run("UPDATE shop.orders SET status = 'sent' WHERE id % 300 = 7")
        shop.run("DELETE FROM shop.orders WHERE id % 900 = 1")
        build.locator(".chart .line").first.wait_for()
        draw(page, "index_build", TITLE, ".cell[data-state=working]")

        page.goto(f"{airflow.url}/dags/{DAG}/runs/{run}/tasks/build")
        page.get_by_role("link", name="Storage").click()
        page.get_by_role("row").filter(has=page.get_by_text("max_rows_per_second", exact=True)).wait_for()
        page.wait_for_timeout(1_000)
        keep("task_state_store", page.screenshot())

        # The first way to pause.
        page.goto(f"{airflow.url}/dags/{DAG}/runs/{run}/plugin/index-build")
        build.get_by_role("button", name="Pause").click()
        build.get_by_label("Why").fill("month-end close")
        build.get_by_label("Why").press("Enter")
        build.locator(".chip[data-status=paused]").wait_for()
        draw(page, "index_build_paused", TITLE, ".chip[data-status=paused]")
        requests.change_options(shop.database, INDEX, actor=USER, max_rows_per_second=0)
        build.get_by_role("button", name="Resume").click()

        def is_done() -> bool:
            return operations.find_operation(shop.database, INDEX).status == "completed"

        wait_until(is_done, PATIENCE_S, "the publish")
        page.goto(f"{airflow.url}/plugin/indexes")
        draw(page, "indexes", "Indexes", f'button[aria-label="Verify {INDEX}"]', 760)
