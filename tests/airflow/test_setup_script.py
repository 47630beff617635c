"""The check for a first build on the page Indexes, in Chromium, with answers of the test's own. By hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_roir.errors import RoirError, SchemaMissing
from airflow_roir.page.databases import NoConnection, NotPostgres
from airflow_roir.page.lack import lack_of
from tests.airflow.test_page_script import ABANDONED_INDEX, NO_RIGHT, Airflow, airflow, tab
from tests.airflow.test_shards_script import draw

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

HOSTILE = "<img src=x onerror=alert(1)>" + "x" * 35


def finding(what: str, verdict: str, says: str, remedy: str = "", where: str = "database") -> dict[str, str]:
    return {"what": what, "verdict": verdict, "says": says, "remedy": remedy, "where": where}


def bare_of(connection: str, error: RoirError) -> dict[str, str]:
    """A connection as `/api/indexes` lists it, if it can't have an index for this error."""
    lack = lack_of(connection, error)
    return {"connection": connection, "trouble": lack.says, "remedy": lack.remedy, "lacks": lack.what}


SET_UP = {
    "found": [
        finding("session", "ok", "the server answers"),
        finding("rights", "problem", f"role {HOSTILE} lacks CREATE", 'GRANT CREATE ON DATABASE "d" TO "r"'),
        finding("guard", "warning", "DDL that no capture sees is only detected", "As a superuser: SELECT roir.guard()"),
        finding("Scheduler", "ok", "runs", where="Airflow"),
        finding("Java", "unknown", "there is none", "Install it", "machine api-1"),
    ],
    "note": "Machine api-1 is the API server's",
}


def open_indexes(airflow: Airflow, tab: Any, *indexes: Any, **more: Any) -> list[str]:
    """Opens the page; returns the addresses of the looks that it asks for, as they come."""
    asked: list[str] = []
    tab.on("request", lambda one: asked.append(one.url) if "api/set-up" in one.url else None)
    database = {"connection": "c", "indexes": list(indexes), "trouble": None}
    shown = {"databases": [database], "bare": [], "dags": {}, "may": NO_RIGHT | {"begin": True}} | more
    airflow.pages |= {"api/indexes": shown, "api/set-up": SET_UP}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    return asked


def test_without_an_index_the_page_checks_by_itself_and_once(airflow: Airflow, tab: Any, tmp_path: Path) -> None:
    asked = open_indexes(airflow, tab)
    tab.get_by_text("No index yet.").wait_for()
    tab.get_by_text("1 problem, 1 warning.", exact=True).first.wait_for()
    tab.get_by_role("row", name="Problem rights role <img src=x onerror=alert(1)>").wait_for()
    tab.get_by_text('GRANT CREATE ON DATABASE "d" TO "r"', exact=True).wait_for()
    tab.get_by_role("row", name="Not known Java there is none Install it", exact=True).wait_for()
    assert tab.locator(".of-set-up h4").all_inner_texts() == ["Database", "Airflow", "Machine api-1"]
    tab.get_by_text("Machine api-1 is the API server's.", exact=True).wait_for()
    assert tab.locator(".of-set-up img").count() == 0
    draw(tab, tmp_path, "set_up")
    tab.get_by_text("1 problem, 1 warning.", exact=True).first.wait_for()
    before = len(asked)
    with tab.expect_response("**/api/indexes"):
        tab.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    assert len(asked) == before, "the page's next look at the indexes asks for no other look at the set-up"
    with tab.expect_response("**/api/set-up?connection=c"):
        tab.get_by_role("button", name="Check for a first build: connection c").click()


def test_databases_without_the_control_schema_are_checked_too(airflow: Airflow, tab: Any) -> None:
    bare = [bare_of(name, SchemaMissing("")) for name in ("new", "ä/ö")]
    asked = open_indexes(airflow, tab, databases=[], bare=bare)
    for name in ("new", "ä/ö"):
        section = tab.get_by_role("region", name=f"Connection {name}", exact=True)
        said = f"The database of connection {name} has no control schema. Create it: roir init."
        section.get_by_text(said, exact=True).wait_for()
        section.get_by_text("1 problem, 1 warning.", exact=True).wait_for()
    assert [one.rpartition("=")[2] for one in asked] == ["new", "%C3%A4%2F%C3%B6"]


@pytest.mark.parametrize("may_begin", [True, False])
def test_an_empty_page_says_once_what_is_missing_and_what_helps(airflow: Airflow, tab: Any, may_begin: bool) -> None:
    """Found: without a connection the page said "No database has roir's control schema yet", and once more below it.

    Four causes, and each has a sentence of its own, with its remedy.
    """
    refused = "the database of connection r can't be reached"
    asked = open_indexes(
        airflow,
        tab,
        databases=[
            {"connection": "r", "indexes": [], "trouble": refused, "remedy": "Start the server"},
            {"connection": "e", "indexes": [], "trouble": None},
        ],
        bare=[bare_of("none", NoConnection()), bare_of("my", NotPostgres()), bare_of("new", SchemaMissing(""))],
        may=NO_RIGHT | {"begin": may_begin},
    )
    for name, said in {
        "none": "Airflow has no connection none. Add it: airflow connections add none --conn-uri "
        "postgresql://USER:PASSWORD@HOST/DATABASE.",
        "my": "Connection my isn't of type postgres. Make it of that type in Airflow's Admin → Connections or your "
        "secrets backend.",
        "new": "The database of connection new has no control schema. Create it: roir init.",
        "r": f"Not shown: {refused}. Start the server.",
        "e": "No index yet. Trigger rebuild_index to build one.",
    }.items():
        section = tab.get_by_role("region", name=f"Connection {name}", exact=True)
        section.get_by_text(said, exact=True).wait_for()
        assert [text for text in section.locator("p:visible:not(.of-set-up p)").all_inner_texts() if text] == [said]
    # The other causes would only be repeated by a check.
    assert sorted(one.rpartition("=")[2] for one in asked) == (["e", "new"] if may_begin else [])
    text = tab.locator("main").inner_text()
    assert text.count("control schema") == 1
    assert "0 indexes in 0 databases" not in text


def test_beside_an_index_the_page_checks_on_demand_and_says_why_it_can_not(airflow: Airflow, tab: Any) -> None:
    asked = open_indexes(airflow, tab, ABANDONED_INDEX)
    tab.locator("h3", has_text="public.i").wait_for()
    assert (asked, tab.locator(".of-set-up").is_visible()) == ([], False)
    refusal = {"status": 503, "content_type": "application/json", "body": json.dumps({"detail": "it hasn't answered"})}
    tab.route("**/api/set-up*", lambda route: route.fulfill(**refusal))
    button = tab.get_by_role("button", name="Check for a first build: connection c")
    button.click()
    tab.locator(".of-set-up").get_by_text("Not checked: it hasn't answered", exact=True).wait_for()
    tab.unroute("**/api/set-up*")
    button.click()
    tab.locator(".of-set-up").get_by_text("1 problem, 1 warning.", exact=True).wait_for()


def test_a_user_who_may_not_begin_a_build_is_not_offered_the_check(airflow: Airflow, tab: Any) -> None:
    asked = open_indexes(airflow, tab, may=NO_RIGHT | {"begin": False})
    tab.get_by_text("No index yet.").wait_for()
    assert tab.get_by_role("button", name="Check").count() == 0
    assert asked == []
