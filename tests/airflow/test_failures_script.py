"""The tab of a run that failed, in Chromium, with answers of the test's own. By hand, `make test-browser`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.airflow.test_page_script import Airflow, airflow, tab

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

COMPLAINT = "2 values can't be used:\n- keys: there is no column <img src=x onerror=alert(1)>\n- ranges: 0 is too few"
FAILURE = {
    "text": "Task prepare has failed at try 7 of 7",
    "message": COMPLAINT,
    "task_id": "prepare",
    "map_index": -1,
    "try_number": 7,
    "at": "2026-01-31T10:05:00+00:00",
    "again": None,
}
CONF = {"index": "public.i", "keys": "<b>x</b>", "unique": False}
NOTHING = {"operations": [], "chosen": None, "progress": None, "wanted": "public.i", "looked_in": []}
# A number that a script rounds, and one that it writes otherwise.
EXACT = json.dumps(CONF)[:-1] + ', "priority": 9007199254740993, "ranges": 4.0}'
FAILED = {"failures": [FAILURE], "again": {"dag_id": "rebuild_index", "conf": EXACT}}


def fail(airflow: Airflow, **more: Any) -> None:
    airflow.run |= {"state": "failed", "values": CONF | {"table": None}}
    airflow.more |= FAILED | NOTHING | more


def test_a_run_that_failed_before_its_build_says_why_and_triggers_again(
    airflow: Airflow, tab: Any, tmp_path: Path
) -> None:
    """Found: "This run builds and verifies no index". The message is text, whatever is in it."""
    fail(airflow)
    tab.reload()
    tab.get_by_role("heading", name="This run has failed", exact=True).wait_for()
    tab.get_by_text("It ended before it began to work on public.i.").wait_for()
    assert tab.locator(".failures pre").inner_text() == COMPLAINT
    assert tab.locator(".failures img").count() == 0
    log = tab.get_by_role("link", name="Log of prepare").get_attribute("href")
    assert log.endswith("/dags/rebuild_index/runs/manual__2026-01-31T10:00:00+00:00/tasks/prepare?try_number=7")
    assert tab.get_by_text("neither builds nor verifies").count() == 0
    tab.screenshot(path=tmp_path / "failed.png")
    tab.get_by_role("button", name="Trigger again").click()
    tab.get_by_text("With the values of this run: index=public.i, keys=<b>x</b>, unique=false. To correct").wait_for()
    tab.get_by_role("button", name="Trigger", exact=True).click()
    tab.get_by_text("rebuild_index is triggered.").wait_for()
    assert airflow.sent == [("/api/v2/dags/rebuild_index/dagRuns", {"logical_date": None, "conf": json.loads(EXACT)})]
    tab.get_by_text("Values of this run", exact=True).click()
    tab.get_by_role("row", name="keys <b>x</b>").wait_for()
    assert tab.get_by_role("row", name="table").count() == 0


def test_a_first_task_that_is_tried_again_says_so_while_its_database_is_away(airflow: Airflow, tab: Any) -> None:
    tried = FAILURE | {"text": "Try 1 of 7 of task prepare has failed", "again": "2026-01-31T10:06:00+00:00"}
    airflow.run["state"] = "running"
    away = "the database of connection c can't be reached"
    airflow.more |= NOTHING | {"failures": [tried], "again": None, "wanted": None, "troubles": [away]}
    tab.reload()
    tab.get_by_text("Goes on by itself at the next try, about").wait_for()
    tab.get_by_text(f"Not searched: {away}.").wait_for()
    assert tab.locator(".failures pre").inner_text() == COMPLAINT
    airflow.more["failures"] = [tried | {"map_index": index} for index in (0, 1)]
    tab.reload()
    log = tab.get_by_role("link", name="Log of prepare [1]", exact=True).get_attribute("href")
    assert log.endswith("/tasks/prepare/mapped/1?try_number=7")


def test_an_open_question_stays_while_the_page_asks_again(airflow: Airflow, tab: Any) -> None:
    fail(airflow)
    airflow.run["state"] = "running"
    airflow.more["failures"] = [
        FAILURE | {"again": "2026-01-31T11:04:30", "text": "Try 1 of 7 of task prepare has failed"}
    ]
    tab.reload()
    tab.get_by_text("Goes on by itself at the next try, about ").wait_for()
    tab.get_by_role("button", name="Trigger again").click()
    airflow.run["state"] = "failed"
    tab.get_by_role("heading", name="Why this run has failed").wait_for()
    assert tab.get_by_role("alertdialog").is_visible()


def test_a_viewer_gets_no_button_and_a_task_without_a_message_no_box(airflow: Airflow, tab: Any) -> None:
    fail(airflow, again=None, failures=[FAILURE | {"message": ""}, FAILURE | {"task_id": "", "text": "Not started: x"}])
    tab.reload()
    tab.get_by_text("Not started: x.").wait_for()
    assert tab.locator(".failures pre:visible").count() == 1
    assert not tab.get_by_role("button", name="Trigger again").is_visible()


def test_a_build_that_failed_shows_its_error_above_its_figures(airflow: Airflow, tab: Any, tmp_path: Path) -> None:
    airflow.run["state"] = "failed"
    airflow.more |= FAILED
    airflow.progress |= {"status": "paused", "state": {"name": "paused", "word": "Paused", "note": "Nothing is lost"}}
    tab.get_by_role("heading", name="Why this run has failed").wait_for()
    assert tab.get_by_role("button", name="Trigger again").is_visible()
    airflow.more["continues"] = {"dag_id": "rebuild_index", "conf": EXACT}
    tab.get_by_role("button", name="Continue").wait_for()
    tab.get_by_role("button", name="Trigger again").wait_for(state="hidden")
    tab.screenshot(path=tmp_path / "failed_build.png", full_page=True)
    # Found: "Trying again …" for ever. Its database is gone: the figures stay, and are called old.
    airflow.more |= {"progress": None, "troubles": ["the database of connection c refuses the login"]}
    tab.get_by_text("The database of connection c refuses the login. These figures are from").wait_for()
    assert tab.get_by_text("Trying again").count() == 0
    tab.reload()
    tab.get_by_text("Not searched: the database of connection c refuses the login.").wait_for()
    tab.get_by_text("Task prepare has failed at try 7 of 7.").wait_for()
    assert tab.get_by_text("It ended before").count() == 0
    airflow.run["state"] = "success"
    airflow.more |= {"failures": [], "again": None, "wanted": "public.i"}
    tab.reload()
    tab.get_by_text("This run has ended. Its work on public.i can't be shown now.").wait_for()


def test_a_run_that_was_deleted_is_not_asked_for_again(airflow: Airflow, tab: Any) -> None:
    """Found: "Trying again …" for ever."""
    airflow.gone = True
    tab.get_by_text("DAG rebuild_index has no run r. These figures are from").wait_for()
    assert tab.get_by_text("Trying again").count() == 0
    asked = airflow.answered
    tab.wait_for_timeout(3_000)
    assert airflow.answered == asked
