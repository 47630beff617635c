"""The pages by keyboard and for a screen reader, in Chromium, with answers of the test's own, in both themes.

By hand, `make test-browser`. `test_users.py` does the same with a real Airflow and two users.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.airflow.a11y import drawings, hear, heard, stops, violations
from tests.airflow.test_failures_script import COMPLAINT, FAILED, FAILURE, NOTHING
from tests.airflow.test_page_script import (
    ABANDONED_INDEX,
    FOUND,
    FOUND_AT,
    PROGRESS,
    SEGMENT,
    THROTTLE,
    WISH,
    Airflow,
    airflow,
    playwright,
    tab,
)
from tests.airflow.test_setup_script import SET_UP

__all__ = ["airflow", "tab"]
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

Stop = tuple[str, str]


def of(role: str, *names: str) -> list[Stop]:
    """Stops of one role."""
    return [(role, name) for name in names]


def buttons(*names: str) -> list[Stop]:
    return of("button", *names)


def folds(*names: str) -> list[Stop]:
    return of("DisclosureTriangle", *names)


LINKS = of("link", "Run", "All indexes")
STEPPER = buttons("One worker fewer", "One worker more", "Rate limit")
FULL: dict[str, Any] = {
    "percent_complete": 45.2,
    "seconds_left": 12.0,
    "phases": [
        {"name": "prepare", "state": "done", "seconds": 1.0},
        {"name": "build", "state": "now", "seconds": 5.0},
        {"name": "publish", "state": "ahead", "seconds": None},
    ],
    "bars": {"of": "ranges", "done": 1, "count": 2, "items": [{"from": 1, "to": 1, "state": "done", "done": 1}]},
    "samples": [[0, 0, 0], [1, 5, 1], [2, 9, 2]],
    "delta": {"rows": 7, "bytes": 8192, "regular": 4, "antimatter": 3, "ghosts": 0, "sampled": False},
    "events": [{"at": FOUND_AT, "actor": "ann", "action": "pause", "detail": "month-end close"}],
    "errors": [{"at": FOUND_AT, "text": "a worker has failed", "remedy": "nothing to do"}],
    "pauses": [{"at": FOUND_AT, "until": FOUND_AT, "by": "ann", "why": "month-end close"}],
    "worth": "yes: 4 ms instead of 90 ms",
    "queries": ["SELECT k FROM public.i WHERE k = …"],
    "governor": THROTTLE,
    "shards": [
        {"shard": "s1", "ranges": 4, "ranges_done": 2, "rows": 9, "readers": 1, "lag_seconds": None, "problem": None},
        {"shard": "s2", "ranges": 4, "ranges_done": 2, "rows": 9, "readers": 1, "lag_seconds": 1.0, "problem": "down"},
    ],
}
LONG = FAILURE | {"message": "\n".join([COMPLAINT] * 60)}
PAUSED = {"name": "paused", "word": "Paused", "note": "Paused; nothing is lost"}
PUBLISHED = ABANDONED_INDEX | {
    "state": "published",
    "operation": None,
    "state_of_operation": None,
    "continues": None,
    "rows": 5,
    "bytes": 8192,
    "source_bytes": 16384,
    "published_at": FOUND_AT,
    "revert_until": "2999-01-31T10:05:00+00:00",
    "verified": {"outcome": "2 differences", "at": FOUND_AT, "differences_left": 2, "missing": 2},
    "bloat": {"share": 0.3, "bytes": 4096, "ghosts": 3, "win_bytes": 4096, "win_share": 0.3, "note": None},
    "warnings": ["not every write to public.t is captured"],
    "generations": [
        {"status": "active", "bytes": 8192, "published_at": FOUND_AT, "retired_at": None, "drop_after": None}
    ],
    "segments": {"count": 1, "rows": 5, "bytes": 8192, "needed": 4096, "worst": [SEGMENT]},
    "queries": ["SELECT k FROM public.i WHERE k = …"],
}
BUSY = PUBLISHED | {"index": "public.busy", "operation": 9}
BUSY |= {"state_of_operation": {"name": "running", "word": "Running", "noun": "rebuild"}}
BUSY |= {"run": {"dag_id": "rebuild_index", "run_id": "r"}}
NAMES = {
    "rebuild": "rebuild_index",
    "verify": "verify_index",
    "control": "control_index",
    "clean_up": "clean_up_indexes",
}


def running(airflow: Airflow, may: bool) -> None:
    airflow.progress |= FULL
    airflow.more |= {"may_change": may, "task": {"task_id": "build", "map_index": -1}}
    airflow.run["values"] = {"index": "public.i"}


def paused(airflow: Airflow, may: bool) -> None:
    airflow.progress |= {"status": "paused", "state": PAUSED, "workers": {"wanted": 2, "alive": 0, "list": []}}
    airflow.progress["duplicate_keys"] = 3
    airflow.progress |= {"has_duplicates": True, "unique": True, "duplicate_rows": 9, "census": False}
    airflow.more |= {"may_change": may}


def by_switch(airflow: Airflow, may: bool) -> None:
    airflow.progress |= {"status": "paused", "state": PAUSED}
    airflow.more |= {"may_change": may, "paused_by_switch": True}
    airflow.run["switch_off"] = True


def abandoned(airflow: Airflow, may: bool) -> None:
    airflow.progress |= {
        "status": "abandoned",
        "state": {"name": "abandoned", "word": "Abandoned", "note": "None will"},
    }
    airflow.more |= {"may_change": may, "continues": WISH if may else None}


def failed(airflow: Airflow, may: bool) -> None:
    airflow.run |= {"state": "failed", "values": {"index": "public.i"}}
    shown = [LONG] if may else [LONG | {"message": ""}]
    airflow.more |= FAILED | NOTHING | {"failures": shown, "again": FAILED["again"] if may else None}


def waiting(airflow: Airflow, may: bool) -> None:
    airflow.run["switch_off"] = True
    airflow.more |= NOTHING | {"may_change": may}


def several(airflow: Airflow, may: bool) -> None:
    airflow.more |= {"may_change": may, "operations": [FOUND, FOUND | {"operation": 8, "index": "public.j"}]}


def indexes(airflow: Airflow, may: bool) -> None:
    away = {"connection": "d", "indexes": [], "trouble": "the database of connection d refuses the login"}
    shown = [PUBLISHED, BUSY, ABANDONED_INDEX | {"index": "public.left", "continues": WISH if may else None}]
    database = {"connection": "c", "indexes": shown, "trouble": None}
    content = {"databases": [database, away], "dags": NAMES, "may": dict.fromkeys([*NAMES, "begin"], may)}
    airflow.pages["api/indexes"] = content


def no_index(airflow: Airflow, may: bool) -> None:
    indexes(airflow, may)
    airflow.pages["api/indexes"]["databases"] = [{"connection": "c", "indexes": [], "trouble": None}]
    airflow.pages["api/set-up"] = SET_UP


@dataclass(frozen=True)
class State:
    """A state of a page. ready: a selector of what it shows. viewer, operator: the stops by Tab for a user who may only
    read, and for one who may change.
    """

    set_up: Callable[[Airflow, bool], None]
    ready: str
    viewer: list[Stop]
    operator: list[Stop]
    page: str = "run"


LISTS = folds("1 segment, 4.0 kB of 8.0 kB free", "1 generation")
SHARES = of("region", "Rows that share a key")
MORE = [*folds("Duplicates: 9 rows share 3 keys"), *SHARES, *buttons("More")]
REST = [*folds("History", "Values of this run"), *of("link", "Log"), *LINKS]
VERBS = ("Rebuild", "Verify", "Repair", "Revert")
STATES = {
    "running": State(
        running,
        "text=Query it",
        [*of("region", "Table of shards"), *REST],
        [*buttons("Pause", "Abort", "Change limits"), *of("region", "Table of shards"), *STEPPER, *REST],
    ),
    "paused": State(
        paused,
        "th[scope=rowgroup]",
        [*MORE, *LINKS],
        [*buttons("Resume", "Throttle", "Abort"), *MORE, *STEPPER, *LINKS],
    ),
    "paused by the switch": State(
        by_switch, ".note", LINKS, [*buttons("Resume", "Throttle", "Abort"), *STEPPER, *LINKS]
    ),
    "abandoned": State(
        abandoned,
        ".chip[data-status=abandoned]",
        LINKS,
        [*buttons("Continue", "Throttle", "Abort"), *STEPPER, *LINKS],
    ),
    "failed": State(
        failed,
        ".failures li",
        [*of("link", "All indexes", "Log of prepare"), *folds("Values of this run")],
        [
            *of("link", "All indexes"),
            *buttons("Trigger again"),
            *of("group", "Message of prepare"),
            *of("link", "Log of prepare"),
            *folds("Values of this run"),
        ],
    ),
    "waiting": State(waiting, "text=No index build yet", LINKS[1:], LINKS[1:]),
    "several": State(
        several,
        "nav.operations",
        [*buttons("public.i · first build", "public.j · first build"), *LINKS],
        [
            *buttons("public.i · first build", "public.j · first build", "Pause", "Throttle", "Abort"),
            *STEPPER,
            *LINKS,
        ],
    ),
    "indexes": State(
        indexes,
        "h3 >> nth=2",
        [
            *of("searchbox", "Filter by name or table"),
            *LISTS,
            *of("link", "Watch it: public.busy"),
            *LISTS,
        ],
        [
            *of("searchbox", "Filter by name or table"),
            *buttons("Check for a first build: connection c", "Clean up", *(f"{verb} public.i" for verb in VERBS)),
            *LISTS,
            *of("link", "Watch it: public.busy"),
            *buttons(*(f"{verb} public.busy" for verb in VERBS)),
            *LISTS,
            *buttons("Continue public.left", "Abort public.left", "Check for a first build: connection d"),
        ],
        "indexes",
    ),
    "no index": State(
        no_index,
        "text=No index yet",
        of("searchbox", "Filter by name or table"),
        [
            *of("searchbox", "Filter by name or table"),
            *buttons("Check for a first build: connection c", "Clean up"),
        ],
        "indexes",
    ),
}


def show(airflow: Airflow, tab: Any, state: State, may: bool, theme: str = "light") -> None:
    state.set_up(airflow, may)
    tab.evaluate("theme => localStorage.setItem('theme', theme)", theme)
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/{state.page}?dag_id=rebuild_index&run_id=r")
    tab.locator(state.ready).first.wait_for()
    assert tab.locator("html").get_attribute("data-theme") == theme


UNFOLD = "document.querySelectorAll('details').forEach((one) => (one.open = true))"
by_state = pytest.mark.parametrize("name", STATES)


@by_state
@pytest.mark.parametrize("who", ["viewer", "operator"])
def test_each_control_is_reached_by_tab_shows_the_focus_and_has_a_name(
    airflow: Airflow, tab: Any, name: str, who: str
) -> None:
    state = STATES[name]
    show(airflow, tab, state, who == "operator")
    found = stops(tab)
    assert [one.told for one in found] == (state.operator if who == "operator" else state.viewer)
    assert [one.told for one in found if not one.is_seen] == []


@by_state
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("who", ["viewer", "operator"])
def test_axe_finds_nothing(airflow: Airflow, tab: Any, name: str, theme: str, who: str) -> None:
    may = who == "operator"
    show(airflow, tab, STATES[name], may, theme)
    tab.evaluate(UNFOLD)
    for width in (1400, 420) if may else (1400,):
        tab.set_viewport_size({"width": width, "height": 900})
        assert violations(tab) == ""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_old_figures_can_be_read(airflow: Airflow, tab: Any, theme: str) -> None:
    """Found: the figures of a page whose server is away were so pale that their contrast was 2.9."""
    show(airflow, tab, STATES["running"], True, theme)
    tab.route("**/api/run?*", lambda route: route.fulfill(status=503, body="{}"))
    tab.get_by_text("Trying again").wait_for()
    tab.locator("main.stale").wait_for()
    assert violations(tab) == ""


QUESTIONS = [
    ("running", "Pause", "Pause this operation?"),
    ("running", "Change limits", "Limits of signals"),
    ("running", "Abort", "Abort this build?"),
    ("running", "Rate limit", "Rate limit"),
    ("several", "Throttle", "Limits of signals"),
    ("failed", "Trigger again", "Trigger rebuild_index again?"),
    ("indexes", "Clean up", "Clean up this database?"),
    ("indexes", "Rebuild public.i", "Rebuild this index?"),
    ("indexes", "Verify public.i", "Verify this index?"),
    ("indexes", "Repair public.i", "Repair this index?"),
    ("indexes", "Revert public.i", "Revert the last rebuild?"),
    ("indexes", "Continue public.left", "Continue this operation?"),
    ("indexes", "Abort public.left", "Abort this operation?"),
]


@pytest.mark.parametrize(("name", "button", "title"), QUESTIONS)
def test_a_question_keeps_the_focus_and_gives_it_back(
    airflow: Airflow, tab: Any, name: str, button: str, title: str
) -> None:
    """Found: Tab left an open question for the page below it."""
    show(airflow, tab, STATES[name], True)
    asks = tab.get_by_role("button", name=button, exact=True)
    asks.focus()
    tab.keyboard.press("Enter")
    question = tab.get_by_role("alertdialog", name=title, exact=True)
    question.wait_for()
    assert question.get_attribute("aria-describedby")
    inside = "form => form.contains(document.activeElement)"
    tab.wait_for_function("document.activeElement.closest('form')")
    for keys in ("Tab", "Shift+Tab"):
        met = set()
        for _ in range(6):
            tab.keyboard.press(keys)
            assert question.evaluate(inside), keys
            met.add(tab.evaluate("document.activeElement.outerHTML"))
        assert len(met) == question.locator("input, button").count()
    tab.keyboard.press("Escape")
    question.wait_for(state="detached")
    playwright.expect(asks).to_be_focused()
    assert airflow.sent == []


REFUSED = "throttle: there is no signal replica_lagg"
REFUSABLE = [("Pause", "pause", "Pause", "reason"), ("Abort", "abort", "Abort", "reason")]
REFUSABLE += [("Change limits", "throttle", "Set limits", "throttle")]


@pytest.mark.parametrize(("button", "verb", "sure", "field"), REFUSABLE)
def test_a_question_whose_value_is_refused_stays_with_the_value(
    airflow: Airflow, tab: Any, button: str, verb: str, sure: str, field: str
) -> None:
    """Found: a signal's name with one letter too many closed the question, and all limits had to be typed again."""
    show(airflow, tab, STATES["running"], True)
    airflow.refuses = {verb: (422, REFUSED)}
    asks = tab.get_by_role("button", name=button, exact=True)
    asks.click()
    hear(tab)
    question = tab.get_by_role("alertdialog")
    typed = question.get_by_role("textbox")
    typed.fill("replica_lagg=1GB")
    for _ in range(2):
        tab.keyboard.press("Enter")
        question.get_by_role("alert").get_by_text(REFUSED).wait_for()
        playwright.expect(typed).to_be_focused()
        playwright.expect(typed).to_have_attribute("aria-invalid", "true")
        assert (typed.input_value(), violations(tab)) == ("replica_lagg=1GB", "")
        tab.get_by_role("button", name="Cancel").focus()
        typed.focus()
    assert set(heard(tab)) == {REFUSED}
    assert [(path, body[field]) for path, body in airflow.sent] == [(f"/roir/api/run/{verb}", "replica_lagg=1GB")] * 2
    airflow.refuses = {}
    typed.fill("replica_lag=1GB")
    question.get_by_role("button", name=sure, exact=True).click()
    question.wait_for(state="detached")
    playwright.expect(asks).to_be_focused()


def test_who_closes_a_question_before_its_answer_hears_of_a_refusal(airflow: Airflow, tab: Any) -> None:
    show(airflow, tab, STATES["running"], True)
    airflow.refuses = {"pause": (409, REFUSED)}
    held: list[Any] = []
    tab.route("**/api/run/pause?*", lambda route: held.append(route))
    tab.get_by_role("button", name="Pause", exact=True).click()
    playwright.expect(tab.get_by_label("Why")).to_be_focused()
    with tab.expect_request("**/api/run/pause?*"):
        tab.keyboard.press("Enter")
    tab.keyboard.press("Escape")
    tab.get_by_role("alertdialog").wait_for(state="detached")
    [route] = held
    route.fallback()
    tab.locator(".said", has_text=REFUSED).wait_for()


def test_the_focus_goes_to_what_can_be_done_next(airflow: Airflow, tab: Any) -> None:
    """Found: after a pause, and after each look that hid the focused button, the focus was at the top of the page."""
    show(airflow, tab, STATES["running"], True)
    tab.get_by_role("button", name="Pause").focus()
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_label("Why")).to_be_focused()
    airflow.progress |= {"status": "paused", "state": PAUSED}
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_role("button", name="Resume")).to_be_focused()
    airflow.progress |= PROGRESS
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_role("button", name="Pause")).to_be_focused()
    airflow.progress |= {"status": "completed", "state": {"name": "completed", "word": "Completed", "note": "Done"}}
    playwright.expect(tab.get_by_role("heading", name="public.i", exact=True)).to_be_focused()


def test_a_button_that_is_off_says_why_and_does_nothing(airflow: Airflow, tab: Any) -> None:
    show(airflow, tab, STATES["indexes"], True)
    [rebuild] = [one for one in stops(tab) if one.name == "Rebuild public.busy"]
    assert (rebuild.is_disabled, rebuild.description) == (True, "This index has an unfinished operation")
    tab.get_by_role("button", name="Rebuild public.busy").focus()
    tab.keyboard.press("Enter")
    assert tab.get_by_role("alertdialog").count() == 0
    show(airflow, tab, STATES["paused by the switch"], True)
    [resume] = [one for one in stops(tab) if one.name == "Resume"]
    assert (resume.is_disabled, resume.description) == (True, "Turn the switch of rebuild_index on first")
    tab.get_by_role("button", name="Resume").focus()
    tab.keyboard.press("Enter")
    assert airflow.sent == []


def test_a_button_stays_what_it_is_while_it_has_the_focus(airflow: Airflow, tab: Any) -> None:
    """Found: the first button of a card became another one under the user's finger."""
    show(airflow, tab, STATES["indexes"], True)
    database = airflow.pages["api/indexes"]["databases"][0]
    verify = tab.get_by_role("button", name="Verify public.i")
    verify.focus()
    left = {"state_of_operation": ABANDONED_INDEX["state_of_operation"], "continues": WISH, "operation": 7}
    database["indexes"][0] = PUBLISHED | left
    tab.get_by_role("button", name="Continue public.i").wait_for()
    playwright.expect(verify).to_be_focused()
    tab.get_by_role("button", name="Continue public.i").focus()
    database["indexes"][0] = PUBLISHED
    playwright.expect(tab.get_by_role("heading", name="public.i", exact=True)).to_be_focused()


def test_the_user_stays_where_another_operation_is_chosen(airflow: Airflow, tab: Any) -> None:
    """Found: the page was drawn again, and the focus at its top."""
    show(airflow, tab, STATES["several"], True)
    tab.get_by_role("button", name="public.j · first build").focus()
    airflow.progress |= {"operation_id": 8, "index": "public.j"}
    airflow.more["chosen"] = FOUND | {"operation": 8, "index": "public.j"}
    tab.keyboard.press("Enter")
    tab.get_by_role("heading", name="public.j", exact=True).wait_for()
    playwright.expect(tab.get_by_role("button", name="public.j · first build")).to_be_focused()


def test_a_link_keeps_the_focus_while_the_page_waits(airflow: Airflow, tab: Any) -> None:
    """Found: each look replaced the link, every three seconds."""
    show(airflow, tab, STATES["waiting"], True)
    link = tab.get_by_role("link", name="All indexes")
    link.focus()
    answered = airflow.answered
    while airflow.answered < answered + 2:
        tab.wait_for_timeout(200)
    playwright.expect(link).to_be_focused()


def look(airflow: Airflow, tab: Any, **shown: Any) -> None:
    """Has the page show these figures."""
    airflow.progress |= shown
    tab.get_by_text(f"{shown['percent_complete']:.1f} %", exact=True).wait_for()


def test_a_change_of_state_is_said_once_and_figures_are_not(airflow: Airflow, tab: Any) -> None:
    """Found: while a server was away its page said so every few seconds, with another age each time."""
    show(airflow, tab, STATES["running"], True)
    hear(tab)
    for percent in (46.0, 47.0, 48.0):
        look(airflow, tab, percent_complete=percent, rows=int(percent))
    assert heard(tab) == []
    phases = [{"name": "build", "state": "done", "seconds": 1.0}, {"name": "seal", "state": "now", "seconds": 1.0}]
    look(airflow, tab, percent_complete=49.0, phase="seal", phases=phases)
    look(airflow, tab, percent_complete=50.0, status="paused", state=PAUSED)
    assert heard(tab) == ["public.i: Running, phase seal", "public.i: Paused, phase seal"]
    airflow.run["state"] = "failed"
    airflow.more["failures"] = [FAILURE | {"text": "Task build has failed"}]
    tab.get_by_text("Task build has failed").first.wait_for()
    assert heard(tab)[2:] == ["Task build has failed"]
    asked: list[int] = []

    def refuse(route: Any) -> None:
        asked.append(1)
        route.fulfill(status=503, body=json.dumps({"detail": "the database of connection c refuses the login"}))

    tab.route("**/api/run?*", refuse)
    while len(asked) < 3:
        tab.wait_for_timeout(200)
    assert heard(tab)[3:] == ["The database of connection c refuses the login."]


def test_a_filter_says_what_it_leaves_once(airflow: Airflow, tab: Any) -> None:
    show(airflow, tab, STATES["indexes"], True)
    hear(tab)
    tab.get_by_label("Filter by name or table").focus()
    tab.keyboard.type("public.i")
    tab.get_by_role("status").filter(has_text="The filter leaves 1 index").wait_for(state="attached")
    assert heard(tab) == ["The filter leaves 1 index"]
    tab.get_by_role("button", name="Verify public.i", exact=True).click()
    tab.get_by_role("button", name="Verify", exact=True).click()
    tab.get_by_text("verify_index is triggered.").wait_for()
    assert len(heard(tab)) == 2, "once, not by two regions"


@pytest.mark.parametrize("name", ["running", "paused", "indexes"])
def test_tables_have_headers(airflow: Airflow, tab: Any, name: str) -> None:
    show(airflow, tab, STATES[name], True)
    tab.evaluate(UNFOLD)
    tables = tab.locator("table:visible").all()
    assert tables
    for table in tables:
        heads = table.locator("thead th[scope=col]").count()
        assert (heads > 1, bool(table.locator("caption").text_content())) == (True, True)
        assert table.locator("tbody tr").first.locator("th, td").count() == heads


def test_drawings_have_names_and_the_bar_its_value(airflow: Airflow, tab: Any) -> None:
    show(airflow, tab, STATES["running"], True)
    found = drawings(tab)
    assert ("progressbar", "Work done", "45 %, Running") in found
    names = [name for _, name, _ in found]
    for words in ("1 of 2 ranges done", "Rows per second from", "New and changed entries: 4", "Replica’s lag from"):
        assert [name for name in names if name.startswith(words)], names
    assert "" not in names


LABELS = """() => [...document.querySelectorAll("button, a[href], summary, [role=button]")]
  .filter((one) => one.checkVisibility())
  .map((one) => [one.innerText.trim().replace(/\\s+/g, " "), one.getAttribute("aria-label")])"""


@pytest.mark.parametrize("name", STATES)
def test_a_button_is_called_by_what_is_written_on_it(airflow: Airflow, tab: Any, name: str) -> None:
    """Found: *Check for a first build* was called "Check connection c for a first build": a user who speaks what the
    button shows didn't reach it (WCAG 2.5.3). A sign alone, as + for one worker more, is no text.
    """
    show(airflow, tab, STATES[name], may=True)
    seen = [(text, label) for text, label in tab.evaluate(LABELS) if label is not None and re.search(r"\w", text)]
    assert [(text, label) for text, label in seen if text.lower() not in label.lower()] == []
    assert seen or STATES[name].page != "indexes"
