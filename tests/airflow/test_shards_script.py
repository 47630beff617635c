"""The pages' text about shards, in Chromium, with answers of the test's own. By hand, `make test-browser`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.airflow.test_page_script import Airflow, airflow, playwright, tab

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]
assert playwright

WIDTHS = (400, 800, 1400)
HOSTILE = "<img src=x onerror=alert(1)>" + "x" * 35


def shard(name: str, **more: Any) -> dict[str, Any]:
    """A shard as `ShardStanding.as_dict` returns it."""
    plain = {
        "problem": None,
        "doubt": None,
        "captured": True,
        "lag_seconds": None,
        "pending": None,
        "is_shipped": False,
    }
    return plain | {"shard": name, "ranges": 8, "ranges_done": 2, "rows": 25_000, "readers": 1} | more


def listed(name: str, **more: Any) -> dict[str, Any]:
    """A shard as `ShardLag.as_dict` returns it."""
    plain = {"generation": "active", "lag_seconds": 0.4, "pending": 0, "pending_bytes": 0, "oldest_seconds": None}
    return plain | {"shipped": 1234, "shipper": "app@host", "problem": None, "doubt": None, "shard": name} | more


def draw(tab: Any, folder: Path, name: str) -> None:
    """Draws the page in both themes, without sideways scrolling at any width."""
    for theme in ("dark", "light"):
        tab.evaluate("theme => document.documentElement.setAttribute('data-theme', theme)", theme)
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 1000})
            wider = tab.locator("html").evaluate("html => html.scrollWidth - html.clientWidth")
            assert wider <= 0, (name, theme, width)
        tab.screenshot(path=folder / f"{name}_{theme}.png", full_page=True)


def test_a_build_names_its_shards_and_what_is_wrong_with_each(airflow: Airflow, tab: Any, tmp_path: Path) -> None:
    panel = tab.get_by_role("region", name="Shards").first
    assert panel.is_hidden(), "of an index in its table's database"
    airflow.progress["source"] = "public.orders in orders_0, orders_1"
    airflow.progress["shard_parallelism"] = 1
    airflow.progress["shards"] = [shard("orders_0"), shard("orders_1", readers=0, ranges_done=8)]
    panel.get_by_text("at most 1 worker in each").wait_for()
    tab.get_by_role("row", name="orders_0 25.0 k rows, 2 of 8 ranges 1 –").wait_for()
    tab.get_by_role("row", name="orders_1 25.0 k rows, 8 of 8 ranges 0 not shipped to the end yet").wait_for()
    away = 'connection to server at "10.0.0.7", port 5432 failed: Connection refused'
    airflow.progress["shards"] = [
        shard("orders_0", problem=away, readers=0),
        shard("orders_1", ranges_done=8, readers=0, lag_seconds=1.24, pending=40),
        shard("orders_2", captured=False, problem=None),
        shard(HOSTILE, doubt=f"shard {HOSTILE} has lost commits that the index has", lag_seconds=7200.0),
    ]
    panel.get_by_text("3 of 4 shards in trouble").wait_for()
    row = tab.locator("tr[data-trouble=away]", has_text="orders_0")
    row.get_by_text(away).wait_for()
    tab.get_by_role("row", name="1.2 s, 40 rows to ship").wait_for()
    tab.locator("tr[data-trouble=bad]", has_text="Entries may be wrong: shard <img").wait_for()
    tab.locator("tr[data-trouble=away]", has_text="Not captured yet").wait_for()
    draw(tab, tmp_path, "build")
    # A verification has no ranges.
    airflow.progress |= {"kind": "verify", "shards": [shard("orders_0", ranges=0, lag_seconds=0.5)]}
    tab.get_by_role("row", name="orders_0 – – 0.5 s").wait_for()


INDEX: dict[str, Any] = {
    "index": "public.orders_by_email",
    "source": "public.orders in orders_0, orders_1",
    "definition": "on public.orders in orders_0, orders_1 by email",
    "state": "published",
    "apart": True,
    "rows": 50_000,
    "bytes": 4_000_000,
    "source_bytes": 0,
    "published_at": "2026-01-31T10:05:00+00:00",
    "generations": [],
    "verified": None,
    "warnings": [],
    "bloat": None,
    "operation": None,
    "run": None,
    "announced_by": None,
    "strict_problem": None,
}


def test_an_index_over_shards_says_how_far_each_is_behind_and_which_reads_it_allows(
    airflow: Airflow, tab: Any, tmp_path: Path
) -> None:
    def show(*shards: dict[str, Any], **more: Any) -> None:
        may = {"trigger": True, "clean_up": True, "build": True, "verify": True, "control": True}
        dags = dict.fromkeys(may, "a_dag")
        database = {"connection": "warehouse", "trouble": None, "indexes": [INDEX | {"shards": shards} | more]}
        airflow.pages["api/indexes"] = {"databases": [database], "may": may, "dags": dags}
        tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
        tab.locator("h3", has_text="public.orders_by_email").wait_for()

    def fact(name: str) -> str:
        return str(tab.locator(".facts > div", has_text=name).inner_text()).replace("\n", ": ")

    show(listed("orders_0"), listed("orders_1", lag_seconds=2.5, pending=7))
    assert fact("Behind") == "Behind: 2.5 s: the worst of 2 shards: orders_1"
    assert fact("Strict reads") == "Strict reads: off: writes aren’t announced"
    assert tab.locator(".warnings li:visible").count() == 0
    tab.get_by_text("2 shards", exact=True).click()
    tab.get_by_role("row", name="orders_1 2.5 s, 7 rows to ship 1,234 rows app@host").wait_for()
    refused = "not all that was written in shard orders_1 before its writers announced has come yet: roir ship"
    show(
        listed("orders_0", shipper=None),
        listed("orders_1", problem="connection to server failed", shipper=None, lag_seconds=4000.0),
        listed(HOSTILE, doubt="it was restored", lag_seconds=None),
        listed("orders_0", generation="retired", doubt="an old one"),
        announced_by="server",
        strict_problem=refused,
    )
    assert fact("Behind") == "Behind: not known: a shard wasn’t shipped to the end yet"
    assert fact("Strict reads") == f"Strict reads: refused: {refused}"
    warnings = tab.locator(".warnings li")
    assert warnings.all_inner_texts() == [
        "Shard orders_1: connection to server failed",
        f"Shard {HOSTILE}: Entries may be wrong: it was restored",
        "No shipper is running for orders_0. Run roir ship, or turn on the DAG ship_changes.",
    ]
    tab.get_by_text("3 shards", exact=True).click()
    draw(tab, tmp_path, "indexes")
    show(*(listed(f"s{number}", shipper=None) for number in range(7)))
    assert warnings.all_inner_texts() == [
        "No shipper is running for s0, s1, s2, s3, s4 and 2 more. Run roir ship, or turn on the DAG ship_changes."
    ]
    show(listed("orders_0"), announced_by="client")
    assert fact("Strict reads") == "Strict reads: possible: announced by the client"
    assert fact("Behind") == "Behind: 0.4 s"
