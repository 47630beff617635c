"""The script of the page Index build, in Chromium, with answers of the test's own. By hand, `make test-browser`."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from copy import deepcopy
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from airflow_roir import page as package

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("test-browser"), pytest.mark.timeout(300)]

STATIC = Path(package.__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
RUN = {
    "dag_id": "rebuild_index",
    "run_id": "manual__2026-01-31T10:00:00+00:00",
    "state": "running",
    "switch_off": False,
}
FOUND = {"connection": "c", "operation": 7, "index": "public.i", "kind": "create", "status": "running", "drives": True}
PROGRESS: dict[str, Any] = {
    "operation_id": 7,
    "kind": "create",
    "index": "public.i",
    "source": "public.t",
    "definition": "on public.t by k",
    "status": "running",
    "phase": "build",
    "state": {"name": "running", "word": "Running", "note": "about 12 s left"},
    "percent_complete": 12.3,
    "rows": 1,
    "rows_estimate": 300_000,
    "rows_per_second": None,
    "rows_per_second_now": None,
    "total_execution_time": 1.0,
    "held_up": {"by": "rate limit", "text": "the limit of 500 rows/s"},
    "workers": {"wanted": 2, "alive": 1, "list": [{"worker": 0, "holds": "range 1", "state": "idle"}]},
    "pauses": [],
    "samples": [],
}
CONTENT = {
    "run": RUN,
    "may_change": True,
    "operations": [FOUND],
    "troubles": [],
    "chosen": FOUND,
    "paused_by_switch": False,
}


FOUND_AT = "2026-01-31T10:05:00+00:00"
GROUPS: list[dict[str, Any]] = [
    {
        "id": n,
        "key": key,
        "count": 3,
        "rows": [
            {"primary_key": f"{n}{place}, 2026-01-0{place}", "partition": part, "found_at": FOUND_AT, "healed_at": None}
            for place, part in ((1, "public.p1"), (2, None))
        ],
    }
    for n, key in enumerate(("a@b", "<script>alert(1)</script>", "x" * 300), start=1)
]


class Airflow(ThreadingHTTPServer):
    """Answers the page with `progress`, and keeps what it sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.progress = deepcopy(PROGRESS)
        self.run: dict[str, Any] = dict(RUN)
        self.more: dict[str, Any] = {}
        self.pages: dict[str, Any] = {}
        self.sent: list[tuple[str, Any]] = []
        self.arrived = threading.Event()
        self.asked: list[str] = []
        # The run was deleted.
        self.gone = False
        self.answered = 0
        self.said = "done"
        # Its last part: the status and the text of a refusal.
        self.refuses: dict[str, tuple[int, str]] = {}
        # While it is cleared, looks get no answer.
        self.answers = threading.Event()
        self.answers.set()

    def duplicates(self, path: str) -> dict[str, Any]:
        """Two groups at a time of those that there are."""
        self.asked.append(path)
        after = int(parse_qs(urlsplit(path).query)["after"][0])
        groups = [one for one in GROUPS if one["id"] > after]
        return {"groups": groups[:2], "last": len(groups) <= 2}


class Handler(BaseHTTPRequestHandler):
    server: Airflow

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0].removeprefix("/roir/")
        if path == "api/run" and self.server.gone:
            self.server.answered += 1
            self.give("application/json", b'{"detail": "DAG rebuild_index has no run r"}', 404)
        elif path == "api/run":
            self.server.answers.wait(60)
            self.server.answered += 1
            content = CONTENT | {"progress": self.server.progress, "run": self.server.run} | self.server.more
            self.give("application/json", json.dumps(content).encode())
        elif path == "api/run/duplicates":
            self.give("application/json", json.dumps(self.server.duplicates(self.path)).encode())
        elif path in self.server.pages:
            self.give("application/json", json.dumps(self.server.pages[path]).encode())
        elif path in ("run", "indexes"):
            self.give("text/html", (STATIC / "page.html").read_bytes().replace(b"PAGE", path.encode()))
        elif path.startswith("static/"):
            file = STATIC / path.removeprefix("static/")
            self.give(TYPES[file.suffix], file.read_bytes())
        else:
            self.give("text/html", b"another page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.sent.append((self.path.split("?")[0], body))
        self.server.arrived.set()
        if refusal := self.server.refuses.get(self.path.split("?")[0].rpartition("/")[2]):
            self.give("application/json", json.dumps({"detail": refusal[1]}).encode(), refusal[0])
            return
        self.give("application/json", json.dumps({"said": self.server.said, "dag_run_id": "manual__2"}).encode())

    def give(self, kind: str, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def airflow() -> Iterator[Airflow]:
    with Airflow() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tab(airflow: Airflow) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or None, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page()
        wrong: list[str] = []
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/run?dag_id=rebuild_index&run_id=r")
        tab.locator("h1", has_text="public.i").wait_for()
        yield tab
        browser.close()
        assert wrong == []


def test_a_click_counts_although_the_user_leaves_at_once(airflow: Airflow, tab: Any) -> None:
    for _ in range(2):
        tab.get_by_role("button", name="One worker more").click()
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/elsewhere")
    assert airflow.arrived.wait(60)
    body = {"connection": "c", "operation": 7, "parallelism": 4}
    assert airflow.sent == [("/roir/api/run/workers", body)], "several clicks are one change"


def test_figures_and_workers_are_told_in_words(airflow: Airflow, tab: Any) -> None:
    tab.get_by_text("of about 300 k", exact=True).wait_for()
    tab.get_by_role("row", name="0 range 1 waits for the rate limit").wait_for()
    airflow.progress["held_up"] = {"by": "writing", "text": "the worker is writing"}
    airflow.progress["rows_estimate"] = 99_900
    tab.get_by_role("row", name="0 range 1 idle").wait_for()
    tab.get_by_text("of about 99.9 k", exact=True).wait_for()


def test_a_first_build_says_whether_the_index_will_pay_while_it_runs(airflow: Airflow, tab: Any) -> None:
    airflow.progress["worth"] = "no: the table has 3 partitions"
    tab.reload()
    said = tab.get_by_text("Will it pay? no: the table has 3 partitions.", exact=True)
    said.wait_for()
    airflow.progress |= {"status": "completed", "state": {"name": "completed", "word": "Completed", "note": "Done"}}
    tab.reload()
    tab.get_by_text("Completed", exact=True).first.wait_for()
    assert said.count() == 0


def test_a_published_index_says_how_to_query_it(airflow: Airflow, tab: Any) -> None:
    panel = tab.get_by_role("heading", name="Query it")
    assert panel.count() == 0, "hidden until it is published"
    airflow.progress |= {"status": "completed", "queries": ["SELECT k FROM public.i WHERE k = …", "<b>whole</b>"]}
    airflow.progress["state"] = {"name": "completed", "word": "Completed", "note": "Done"}
    tab.reload()
    panel.wait_for()
    shown = tab.locator("section", has=panel).locator("code")
    assert shown.all_text_contents() == airflow.progress["queries"]


def test_fewer_tiles_fill_their_row_and_millions_have_a_capital(airflow: Airflow, tab: Any) -> None:
    """Found: an empty grey cell while Spark started, and `1.3 m`, which reads as metres."""
    airflow.progress |= {"rows": 1_300_000, "rows_per_second": None, "rows_per_second_now": None}
    airflow.progress["workers"] = {"wanted": 2, "alive": 0, "list": []}
    tab.reload()
    tab.locator(".tile strong", has_text="1.3 M").wait_for()
    right = "node => node.getBoundingClientRect().right"
    tiles = tab.locator(".tile:visible")
    assert tiles.count() == 3
    assert tab.locator(".tiles").evaluate(right) - tiles.last.evaluate(right) < 3


def test_links_mark_their_tab_as_the_open_one(airflow: Airflow, tab: Any) -> None:
    """Airflow compares addresses as they are written, with the signs of a run's usual id as they are."""
    airflow.run["run_id"] = "manual__2026-01-31T10:00:00+00:00/?#%"
    tab.reload()
    address = tab.get_by_role("link", name="Run", exact=True).get_attribute("href")
    assert address.endswith("/dags/rebuild_index/runs/manual__2026-01-31T10:00:00+00:00%2F%3F%23%25")


def test_a_switch_that_is_on_again_is_said_to_be_enough(airflow: Airflow, tab: Any) -> None:
    airflow.progress["status"] = "paused"
    airflow.run["switch_off"] = True
    airflow.more["paused_by_switch"] = True
    tab.get_by_text("Turn the switch of rebuild_index on to resume").wait_for()
    assert tab.get_by_role("button", name="Resume").is_disabled()
    airflow.run["switch_off"] = False
    tab.get_by_text("The switch of rebuild_index is on: the task continues within half a minute.").wait_for()


def test_an_operation_that_no_run_drives_is_not_said_to_run(airflow: Airflow, tab: Any) -> None:
    """Found: the page of a run that had ended before its operation: "Running", "about 1 s left", a range "being worked
    on"; of one that had ended before *prepare* was done: "This run builds and verifies no index". It holds: *Not
    driven*, no time left, no range at work; which index the run should have worked on, and what to do.
    """
    # The range of a worker that has gone without giving it back.
    piece = {"from": 1, "to": 1, "state": "working", "done": 0.5, "workers": [0], "rows": 5}
    airflow.progress["bars"] = {"of": "ranges", "done": 0, "count": 1, "items": [piece]}
    tab.locator(".chip[data-status=running]", has_text="Running").wait_for()
    tab.locator(".cell[data-state=working]").wait_for()
    tab.locator(".left", has_text="about").wait_for()
    airflow.progress["held_up"] = {"by": "no run", "text": "This run has ended, and no run drives the operation"}
    airflow.progress["state"] = {"name": "undriven", "word": "Not driven", "note": "No run drives it; nothing is lost"}
    airflow.progress["workers"] = {"wanted": 2, "alive": 0, "list": []}
    tab.locator(".chip[data-status=undriven]", has_text="Not driven").wait_for()
    tab.locator(".left", has_text="No run drives it; nothing is lost").wait_for()
    tab.locator(".cell[data-state=waiting]").wait_for()


# A number that a script rounds.
EXACT = '{"index": "public.i", "table": "public.t", "postgres_conn_id": "c", "priority": 9007199254740993}'
WISH = {"dag_id": "rebuild_index", "conf": EXACT}


@pytest.mark.parametrize("status", ["abandoned", "paused"])
def test_an_operation_whose_run_is_over_is_continued_as_it_was_begun(airflow: Airflow, tab: Any, status: str) -> None:
    """Its run has ended: a resume alone would lift the pause, and nothing would go on."""
    airflow.progress["status"] = status
    airflow.progress["state"] = {"name": status, "word": status.title(), "note": "No run drives it, and none will"}
    airflow.more["continues"] = WISH
    tab.locator(f".chip[data-status={status}]", has_text=status.title()).wait_for()
    tab.get_by_role("button", name="Continue").wait_for()
    for name in ("Pause", "Resume"):
        assert not tab.get_by_role("button", name=name, exact=True).is_visible()
    assert tab.get_by_role("button", name="Abort").is_visible()
    tab.get_by_role("button", name="Continue").click()
    tab.get_by_text("rebuild_index is triggered, and continues the operation.").wait_for()
    tab.get_by_role("link", name="See its run").wait_for()
    # Found: nothing else changed, and the button could be pressed again.
    tab.locator(".chip", has_text="Continued").wait_for()
    tab.locator(".left", has_text="Continued by run").wait_for()
    assert not tab.get_by_role("button", name="Continue", exact=True).is_visible()
    assert not tab.get_by_role("button", name="Resume", exact=True).is_visible()
    trigger = ("/api/v2/dags/rebuild_index/dagRuns", {"logical_date": None, "conf": json.loads(EXACT)})
    resume = ("/roir/api/run/resume", {"connection": "c", "operation": 7})
    assert airflow.sent == [trigger] + ([resume] if status == "paused" else [])


def test_a_pause_stays_if_no_run_could_be_triggered_to_continue(airflow: Airflow, tab: Any) -> None:
    """Found: Airflow answered 500, and the pause was lifted all the same, so its reason was gone."""
    airflow.progress |= {"status": "paused", "state": {"name": "paused", "word": "Paused", "note": "Paused"}}
    airflow.more |= {"continues": WISH, "again": WISH}
    airflow.refuses = {"dagRuns": (500, ""), "resume": (409, "another run has it")}
    tab.get_by_role("button", name="Continue").click()
    tab.get_by_text("No run of rebuild_index could be triggered: Refused (500).").wait_for()
    assert [path for path, _ in airflow.sent] == ["/api/v2/dags/rebuild_index/dagRuns"]
    assert tab.get_by_role("button", name="Continue").is_visible()
    del airflow.refuses["dagRuns"]
    tab.get_by_role("button", name="Continue").click()
    tab.get_by_text(
        "rebuild_index is triggered, and waits, as the pause couldn't be lifted: another run has it."
    ).wait_for()
    tab.get_by_role("link", name="See its run").wait_for()


def test_a_failed_run_is_not_triggered_again_beside_the_run_that_continues_it(airflow: Airflow, tab: Any) -> None:
    """Found: *Trigger again* in the box of the failure, beside `Continued by run …`."""
    failure = {"task_id": "build", "map_index": -1, "try_number": 1, "at": FOUND_AT, "text": "Task build has failed"}
    airflow.progress |= {"status": "abandoned", "state": {"name": "abandoned", "word": "Abandoned", "note": ""}}
    airflow.run["state"] = "failed"
    airflow.more |= {"continues": WISH, "again": WISH, "failures": [failure | {"message": "", "again": None}]}
    tab.get_by_role("button", name="Continue").click()
    tab.locator(".left", has_text="Continued by run").wait_for()
    again = tab.get_by_role("button", name="Trigger again")
    assert not again.is_visible()
    airflow.more |= {"continues": None, "continued_by": {"dag_id": "rebuild_index", "run_id": "manual__2"}}
    tab.get_by_text("Continued by run manual__2 of rebuild_index.").wait_for()
    assert not again.is_visible()
    assert not tab.get_by_role("button", name="Continue", exact=True).is_visible()
    assert tab.get_by_role("link", name="See its run").first.is_visible()
    airflow.more["continued_by"] = None
    again.wait_for()


def test_the_tab_of_a_run_names_the_run_that_continued_its_operation(airflow: Airflow, tab: Any) -> None:
    """Found: only the tab whose user had pressed *Continue* said so, until it was reloaded."""
    airflow.run["state"] = "failed"
    airflow.more["continued_by"] = {"dag_id": "rebuild_index", "run_id": "manual__2026-01-31T11:00:00+00:00"}
    tab.reload()
    tab.get_by_text("Continued by run manual__2026-01-31T11:00:00+00:00 of rebuild_index. See its run").wait_for()
    address = tab.get_by_role("link", name="See its run").get_attribute("href")
    assert address.endswith("/dags/rebuild_index/runs/manual__2026-01-31T11:00:00+00:00/plugin/index-build")
    airflow.more["continued_by"] = {"name": "ann@desk pid 4711"}
    tab.get_by_text("Continued by ann@desk pid 4711.", exact=True).wait_for()
    assert tab.get_by_role("link", name="See its run").count() == 0
    airflow.more["continued_by"] = None
    tab.get_by_text("Continued by").wait_for(state="hidden")


def test_figures_of_workers_that_have_left_are_not_shown(airflow: Airflow, tab: Any) -> None:
    """Found: *Rows/s now* 707 with no worker; after *Pause* the state was *Running* for seconds."""
    airflow.progress["rows_per_second_now"] = 707
    tab.locator(".tile", has_text="707").wait_for()
    airflow.said = ""
    airflow.answers.clear()
    tab.get_by_role("button", name="Pause", exact=True).click()
    tab.locator(".asks").get_by_role("button", name="Pause", exact=True).click()
    tab.locator(".chip", has_text="Pausing").wait_for()
    airflow.progress["workers"] = {"wanted": 2, "alive": 0, "list": []}
    airflow.answers.set()
    tab.get_by_text("0 of 2", exact=True).wait_for()
    assert tab.locator(".tile", has_text="707").count() == 0


def test_who_may_not_trigger_the_dag_has_no_continue(airflow: Airflow, tab: Any) -> None:
    airflow.progress["status"] = "abandoned"
    airflow.progress["state"] = {"name": "abandoned", "word": "Abandoned", "note": "No run drives it, and none will"}
    airflow.more["continues"] = None
    tab.locator(".chip[data-status=abandoned]").wait_for()
    tab.get_by_role("button", name="Abort").wait_for()
    assert not tab.get_by_role("button", name="Continue").is_visible()


ABANDONED_INDEX: dict[str, Any] = {
    "index": "public.i",
    "source": "public.t",
    "definition": "on public.t by k",
    "state": "building",
    "unique": False,
    "operation": 7,
    "state_of_operation": {"name": "abandoned", "word": "Abandoned", "note": "", "noun": "first build", "left": True},
    "continues": WISH,
    "run": None,
    "generations": [],
    "warnings": [],
}


def test_indexes_pauses_an_operation_whose_run_isn_t_in_this_airflow(airflow: Airflow, tab: Any) -> None:
    """Found: with a new database of Airflow's, no page had a button while the old task's process worked."""
    names = {"rebuild": "rebuild_index", "verify": "verify_index", "control": "control_index", "clean_up": "clean"}
    state = {"name": "running", "word": "Running", "note": "", "noun": "first build", "left": False, "stray": True}
    index = ABANDONED_INDEX | {"state_of_operation": state | {"why": "running: its run isn't there"}, "continues": None}
    may = {"rebuild": True, "verify": True, "control": True, "clean_up": False}
    database = {"connection": "c", "indexes": [index], "trouble": None}
    airflow.pages["api/indexes"] = {"databases": [database], "dags": names, "may": may}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.get_by_text("Operation 7 (first build): running: its run isn't there.").wait_for()
    assert tab.get_by_role("button", name="Abort public.i").is_visible()
    tab.get_by_role("button", name="Pause public.i").click()
    tab.locator(".asks").get_by_role("button", name="Pause", exact=True).click()
    tab.get_by_text("control_index is triggered.").wait_for()
    [(path, sent)] = airflow.sent
    assert (path, sent["conf"]["action"]) == ("/api/v2/dags/control_index/dagRuns", "pause")


def test_indexes_says_why_an_operation_is_paused_and_continues_it(airflow: Airflow, tab: Any) -> None:
    """Found: it said *paused*, and nothing else."""
    names = {"rebuild": "rebuild_index", "verify": "verify_index", "control": "control_index", "clean_up": "clean"}
    state = {
        "name": "paused",
        "word": "Paused",
        "note": "",
        "noun": "first build",
        "why": "paused by ann: lunch",
        "left": True,
    }
    database = {"connection": "c", "indexes": [{**ABANDONED_INDEX, "state_of_operation": state}], "trouble": None}
    may = {"rebuild": True, "verify": True, "control": True, "clean_up": False}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.get_by_text("Looking …").wait_for()
    airflow.pages["api/indexes"] = {"databases": [database], "dags": names, "may": may}
    tab.reload()
    tab.get_by_text("Operation 7 (first build): paused by ann: lunch.").wait_for()
    assert tab.get_by_role("button", name="Abort public.i").is_visible()
    tab.get_by_role("button", name="Continue public.i").click()
    tab.locator(".asks").get_by_role("button", name="Continue", exact=True).click()
    tab.get_by_text("rebuild_index is triggered.").wait_for()
    assert [path for path, _ in airflow.sent] == [
        "/api/v2/dags/rebuild_index/dagRuns",
        "/api/v2/dags/control_index/dagRuns",
    ], "no pause is lifted without a run"


def test_indexes_says_that_an_operation_is_abandoned_and_continues_it(airflow: Airflow, tab: Any) -> None:
    """Found: the page said of such a build that it was under way."""
    names = {"rebuild": "rebuild_index", "verify": "verify_index", "control": "control_index", "clean_up": "clean"}
    database = {"connection": "c", "indexes": [ABANDONED_INDEX], "trouble": None}
    may = {"rebuild": True, "verify": True, "control": True, "clean_up": False}
    airflow.pages["api/indexes"] = {"databases": [database], "dags": names, "may": may}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.locator(".chip[data-status=abandoned]", has_text="Abandoned").wait_for()
    tab.get_by_text("Operation 7 (first build): abandoned.").wait_for()
    tab.get_by_role("button", name="Continue public.i").click()
    tab.get_by_role("button", name="Continue", exact=True).click()
    tab.get_by_text("rebuild_index is triggered.").wait_for()
    tab.get_by_role("button", name="Abort public.i").click()
    tab.get_by_role("button", name="Abort", exact=True).click()
    tab.get_by_text("control_index is triggered.").wait_for()
    abort = {"index": "public.i", "postgres_conn_id": "c", "action": "abort", "reason": "on the page Indexes"}
    assert [body["conf"] for _, body in airflow.sent] == [json.loads(EXACT), abort]


def test_a_run_that_ended_before_it_began_says_with_which_index(airflow: Airflow, tab: Any) -> None:
    """Found: the page of a run that had ended before its operation: "Running", "about 1 s left", a range "being worked
    on"; of one that had ended before *prepare* was done: "This run builds and verifies no index". It holds: *Not
    driven*, no time left, no range at work; which index the run should have worked on, and what to do.
    """
    airflow.run["state"] = "failed"
    airflow.more |= {"progress": None, "wanted": "public.i"}
    tab.reload()
    tab.get_by_text("ended before it began to work on public.i").wait_for()
    airflow.more["wanted"] = None
    tab.reload()
    tab.get_by_text("This run neither builds nor verifies an index.").wait_for()


NO_RIGHT = dict.fromkeys(("rebuild", "verify", "control", "clean_up"), False)


def test_indexes_counts_no_database_that_refuses(airflow: Airflow, tab: Any) -> None:
    """Found: "0 indexes in 1 database" of a database that refused."""
    refused = {"connection": "d", "indexes": [], "trouble": "the database of connection d refuses the login"}
    shown = {"databases": [refused], "dags": {}, "may": NO_RIGHT}
    airflow.pages["api/indexes"] = shown
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.get_by_text("1 database can’t be read", exact=True).wait_for()
    tab.get_by_text("Not shown: the database of connection d refuses the login.").wait_for()
    shown["databases"] = [refused, {"connection": "c", "indexes": [ABANDONED_INDEX], "trouble": None}]
    tab.reload()
    tab.get_by_text("1 index in 1 database; 1 database can’t be read", exact=True).wait_for()


def test_indexes_says_from_when_old_figures_are(airflow: Airflow, tab: Any) -> None:
    """Found: figures of eleven minutes ago, without their age, and a dropped index as *Building*."""
    at = datetime.now(timezone.utc) - timedelta(minutes=11)
    index = ABANDONED_INDEX | {"operation": None, "state_of_operation": None, "continues": None, "aged": True}
    database = {"connection": "c", "indexes": [index], "trouble": "it hasn't answered", "as_of": at.isoformat()}
    airflow.pages["api/indexes"] = {"databases": [database], "dags": {}, "may": NO_RIGHT}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.get_by_text(re.compile(r"These figures are from [\d:]+ \S+, 11 min ago: it hasn't answered")).wait_for()
    tab.locator(".chip[data-status=aged]", has_text=re.compile(r"Building at [\d:]+")).wait_for()
    database["trouble"] = None
    tab.reload()
    tab.get_by_text("a look at this database takes long").wait_for()


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "31 Jan 2026, 19:05 GMT+9"),
        ('"UTC"', "31 Jan 2026, 10:05 UTC"),
        ('"Europe/Berlin"', "31 Jan 2026, 11:05 CET"),
        ('"Pacific/Kiritimati"', "1 Feb 2026, 00:05 GMT+14"),
        ('"Nowhere"', "31 Jan 2026, 10:05 UTC"),
        ("no JSON", "31 Jan 2026, 10:05 UTC"),
    ],
)
def test_times_are_in_the_zone_that_airflows_ui_shows_and_name_it(
    airflow: Airflow, tab: Any, kept: str | None, said: str
) -> None:
    """Found: the browser's zone, whatever the user had chosen in Airflow, beside texts in UTC; no time named its zone.

    Where the user has chosen none, Airflow's UI shows the browser's zone. It keeps a choice as `timezone`.
    """
    index = ABANDONED_INDEX | {"published_at": FOUND_AT, "rows": 5, "bytes": 8192}
    index |= {"source_bytes": 8192, "state": "published", "revert_until": None, "bloat": None, "verified": None}
    airflow.pages["api/indexes"] = {
        "databases": [{"connection": "c", "indexes": [index], "trouble": None}],
        "dags": {},
        "may": NO_RIGHT,
    }
    airflow.progress["errors"] = [{"at": FOUND_AT, "text": "broken", "remedy": "repair it"}]
    airflow.progress["pauses"] = [{"at": FOUND_AT, "by": "ann", "why": "x", "until": FOUND_AT}]
    airflow.progress["events"] = [{"at": FOUND_AT, "actor": "ann", "action": "pause", "detail": "x"}]
    own = tab.context.browser.new_context(timezone_id="Asia/Tokyo")
    try:
        page = own.new_page()
        if kept is not None:
            page.add_init_script(f"localStorage.setItem('timezone', {json.dumps(kept)})")
        page.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
        page.locator(".facts", has_text=said).wait_for()
        page.goto(f"http://127.0.0.1:{airflow.server_port}/roir/run?dag_id=rebuild_index&run_id={RUN['run_id']}")
        page.locator("li small", has_text=re.compile(f"^{re.escape(said)}$")).wait_for()
        page.locator("li small", has_text=re.compile(f"to {re.escape(said)}$")).wait_for()
        page.locator("td", has_text=said).wait_for(state="attached")
    finally:
        own.close()


def test_an_index_has_no_facts_that_it_has_not_yet(airflow: Airflow, tab: Any) -> None:
    facts = {"rows": None, "bytes": 0, "source_bytes": 8192, "published_at": None, "bloat": None, "verified": None}
    index = ABANDONED_INDEX | facts | {"revert_until": None}
    database = {"connection": "c", "indexes": [index], "trouble": None}
    airflow.pages["api/indexes"] = {"databases": [database], "dags": {}, "may": NO_RIGHT}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.locator("h3", has_text="public.i").wait_for()
    assert not tab.locator(".facts").is_visible()
    database["indexes"] = [index | {"rows": 5, "bytes": 8192, "state": "published", "published_at": FOUND_AT}]
    tab.reload()
    tab.locator(".facts dt", has_text="Entries").wait_for()
    assert tab.locator(".facts dt").all_inner_texts() == ["Entries", "Size", "Built", "Verified", "Revert"]


def test_a_build_that_has_just_begun_has_no_empty_cards(airflow: Airflow, tab: Any) -> None:
    airflow.progress |= {"bars": {"of": "ranges", "done": 0, "count": 0, "items": []}, "delta": None, "events": []}
    tab.reload()
    tab.locator(".tile", has_text="Rows").first.wait_for()
    shown = tab.locator("section h2:visible").all_inner_texts()
    assert (shown, tab.locator("summary", has_text="History").is_visible()) == (["Workers"], False)
    assert tab.locator(".tile:visible span").all_inner_texts() == ["Rows", "Time worked", "Workers"]
    airflow.progress |= {"status": "completed", "samples": [[0, 0, 0], [1, 5, 1], [2, 9, 2]]}
    tab.get_by_text("Rows per second").wait_for()
    assert tab.locator(".tile:visible span").all_inner_texts() == ["Rows", "Time worked"]


def test_thirty_operations_of_a_run_are_a_list_to_choose_from(airflow: Airflow, tab: Any) -> None:
    """Found: thirty buttons, four rows of them, above each operation."""
    many = [FOUND | {"operation": n, "index": f"public.i{n}"} for n in range(1, 31)]
    airflow.more["operations"] = many[:6]
    tab.get_by_role("button", name="public.i6 · first build").wait_for()
    assert not tab.get_by_label("Operation", exact=True).is_visible()
    airflow.more["operations"] = many
    choice = tab.get_by_label("Operation", exact=True)
    choice.wait_for()
    assert choice.input_value() == "7 c"
    assert choice.locator("option").count() == 30
    assert not tab.get_by_role("button", name="public.i6 · first build").is_visible()
    with tab.expect_request(lambda request: "operation=9" in request.url and "connection=c" in request.url):
        choice.select_option(label="public.i9 · first build · running")


def sent(airflow: Airflow, tab: Any, count: int) -> list[tuple[str, Any]]:
    """The requests that the page has sent, once there are `count` of them."""
    for _ in range(600):
        if len(airflow.sent) >= count:
            break
        tab.wait_for_timeout(100)
    return airflow.sent


def test_an_abort_triggers_the_clean_up_of_its_connection(airflow: Airflow, tab: Any) -> None:
    airflow.more |= {
        "clean_up": "clean_up_indexes",
        "may_clean_up": True,
        "task": {"task_id": "rebuild.build", "map_index": 1},
    }
    log = tab.get_by_role("link", name="Log")
    log.wait_for()
    assert log.get_attribute("href").endswith("/tasks/rebuild.build/mapped/1")
    tab.get_by_role("button", name="Abort").click()
    question = tab.locator(".question")
    question.get_by_text("which is then triggered").wait_for()
    question.get_by_role("button", name="Abort").click()
    aborted, cleaned_up = sent(airflow, tab, 2)
    assert aborted[0] == "/roir/api/run/abort"
    assert cleaned_up[0] == "/api/v2/dags/clean_up_indexes/dagRuns"
    assert cleaned_up[1]["conf"] == {"postgres_conn_id": "c"}
    airflow.progress["status"] = "aborting"
    airflow.more["chosen"] = FOUND | {"drives": False}
    tab.get_by_role("button", name="Clean up now").wait_for()
    for gone in ("Abort", "Resume"):
        assert not tab.get_by_role("button", name=gone).is_visible()


def test_a_question_is_of_one_database(airflow: Airflow, tab: Any) -> None:
    """Two databases number their operations alike."""
    tab.get_by_role("button", name="Abort").click()
    tab.locator(".question").wait_for()
    airflow.more["chosen"] = FOUND | {"connection": "d"}
    tab.locator(".question").wait_for(state="detached")


def test_the_keyboard_and_a_screen_reader_are_enough(airflow: Airflow, tab: Any) -> None:
    bar = tab.get_by_role("progressbar", name="Work done")
    assert (bar.get_attribute("aria-valuenow"), bar.get_attribute("aria-valuemax")) == ("12", "100")
    tab.get_by_role("status").filter(has_text="public.i: Running, phase build").wait_for(state="attached")
    # The element that has the focus shows it.
    outlines = []
    for name in ("Pause", "Throttle", "Abort", "One worker fewer", "One worker more"):
        tab.keyboard.press("Tab")
        assert tab.get_by_role("button", name=name).evaluate("button => button === document.activeElement"), name
        outlines.append(tab.evaluate("getComputedStyle(document.activeElement).outlineStyle"))
    assert "none" not in outlines
    # A question takes the focus, and gives it back to the button.
    tab.get_by_role("button", name="Pause").focus()
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_label("Why")).to_be_focused()
    tab.keyboard.press("Escape")
    tab.locator(".question").wait_for(state="detached")
    assert tab.get_by_role("button", name="Pause").evaluate("button => button === document.activeElement")
    tab.keyboard.press("Enter")
    playwright.expect(tab.get_by_label("Why")).to_be_focused()
    tab.keyboard.type("month-end close")
    tab.keyboard.press("Enter")
    [(path, body)] = sent(airflow, tab, 1)
    assert path == "/roir/api/run/pause"
    assert body["reason"] == "month-end close"


def test_a_pause_and_a_resume_say_one_thing(airflow: Airflow, tab: Any) -> None:
    """Found: the page said `Paused.` twice beside its badge, and its former cause; a resume kept the pause."""
    said = "The workers finish their open batches"
    airflow.progress["held_up"] = {"by": "rate limit", "text": "the limit of 150 rows/s"}
    held = tab.get_by_text("the limit of 150 rows/s")
    held.wait_for()
    airflow.said = ""
    airflow.answers.clear()
    tab.get_by_role("button", name="Pause").click()
    tab.get_by_label("Why").press("Enter")
    tab.get_by_text(said).wait_for()
    assert not held.is_visible()
    assert tab.get_by_text("open batches").locator("visible=true").count() == 1
    airflow.progress |= {"status": "paused", "held_up": {"by": "pause", "text": "paused by ann"}}
    airflow.progress["state"] = {"name": "paused", "word": "Paused", "note": "Paused; nothing is lost"}
    airflow.answers.set()
    pause = tab.get_by_text("paused by ann")
    pause.wait_for()
    airflow.said = "Resumed. Waiting for Airflow to start task build."
    airflow.answers.clear()
    tab.get_by_role("button", name="Resume").click()
    tab.get_by_text(airflow.said).wait_for()
    assert not pause.is_visible()
    assert tab.locator(".chip").first.text_content() == "Waiting"
    airflow.answers.set()


def test_duplicates_are_asked_for_when_somebody_looks_and_again_once_some_are_healed(
    airflow: Airflow, tab: Any
) -> None:
    panel = tab.locator("details", has=tab.locator(".of-duplicates"))
    assert not panel.is_visible()
    assert airflow.asked == []
    unique = {"unique": True, "census": False, "has_duplicates": True, "duplicate_keys": 3, "duplicate_rows": 9}
    airflow.progress |= unique
    panel.locator("summary", has_text="9 rows share 3 keys").wait_for()
    assert tab.locator(".eyebrow").text_content() == "First build of unique index"
    # The build runs: there is nothing to do yet.
    assert airflow.asked == []
    panel.locator("summary").click()
    panel.locator("th[scope=rowgroup]").nth(1).wait_for()
    assert panel.locator("th[scope=rowgroup]").all_text_contents() == ["a@b", "<script>alert(1)</script>"]
    assert "and 1 more" in panel.text_content()
    panel.get_by_role("button", name="More").click()
    panel.locator("th[scope=rowgroup]").nth(2).wait_for()
    assert not panel.get_by_role("button", name="More").is_visible()
    assert len(airflow.asked) == 2
    airflow.progress |= {"duplicate_keys": 2, "duplicate_rows": 6}
    panel.locator("summary", has_text="6 rows share 2 keys").wait_for()
    tab.wait_for_function("document.querySelectorAll('th[scope=rowgroup]').length === 2")
    assert len(airflow.asked) == 3
    airflow.progress |= {"duplicate_keys": 0, "duplicate_rows": 0}
    panel.locator("summary", has_text="all are healed").wait_for()


def test_a_pause_by_duplicates_opens_their_list(airflow: Airflow, tab: Any) -> None:
    of = {"unique": True, "census": False, "has_duplicates": True, "duplicate_keys": 3, "duplicate_rows": 9}
    airflow.progress |= of | {"status": "paused"}
    tab.locator(".of-duplicates th[scope=rowgroup]").first.wait_for()
    if folder := os.environ.get("ROIR_PICTURES"):
        tab.screenshot(path=f"{folder}/duplicates.png", full_page=True)
    tab.locator("details", has=tab.locator(".of-duplicates")).locator("summary").click()
    assert not tab.locator(".of-duplicates").is_visible()


def signal(name: str, unit: str, values: list[float | None], limit: float, **more: Any) -> dict[str, Any]:
    points = [
        {"at": 1_769_853_600 + 2 * n, "value": value, "limit": limit, "of": more.get("of") and f"{more['of']}{n}"}
        for n, value in enumerate(values)
    ]
    found = {"name": name, "unit": unit, "per": "", "below": False, "stops": False, "has_limit": True, "problem": None}
    return found | {name: value for name, value in more.items() if name != "of"} | {"points": points}


THROTTLE: dict[str, Any] = {
    "limits": "commit_latency=20ms replica_lag=100MB",
    "throttled": "throttled: replica r2 is 340 MB behind, limit 100 MB",
    "since": "2026-01-31T10:01:00+00:00",
    "granted": 0.0,
    "lost": [
        {"cause": "replica_lag", "seconds": 192.0, "share": 0.4},
        {"cause": "unreadable", "seconds": 40.0, "share": 0.08},
    ],
    "signals": [
        signal("commit_latency", "seconds", [0.004 + n % 5 / 1000 for n in range(60)], 0.02),
        signal("replica_lag", "bytes", [n * 6e6 for n in range(60)], 100 * 2.0**20, of="r", stops=True),
        signal("lock_waits", "number", [*range(20), *[None] * 20, *range(20)], 30),
        signal("slot_room", "bytes", [3e9 - n * 4e7 for n in range(60)], 1e9, below=True),
    ],
    "grants": [[1_769_853_600 + 2 * n, 2.0 if n < 20 else 0.25 if n < 40 else 0.0] for n in range(60)],
}


def test_nothing_of_a_throttle_is_shown_where_there_is_none(airflow: Airflow, tab: Any) -> None:
    assert tab.locator(".throttle").is_hidden()
    tab.get_by_role("button", name="Throttle", exact=True).click()
    tab.get_by_label("Limits", exact=True).fill("commit_latency=20ms")
    tab.get_by_role("button", name="Set limits").click()
    assert airflow.arrived.wait(60)
    sent = {"connection": "c", "operation": 7, "throttle": "commit_latency=20ms"}
    assert airflow.sent == [("/roir/api/run/throttle", sent)]
    airflow.more = {"may_change": False}
    tab.get_by_role("button", name="Throttle", exact=True).wait_for(state="hidden")


def test_the_rate_limit_is_changed_where_the_workers_are(airflow: Airflow, tab: Any) -> None:
    """Found: `Held up: the limit of 6,000 rows/s`, and no way to change that on the page."""
    airflow.progress["max_rows_per_second"] = 6000
    tab.locator(".tile", has_text="limit 6,000 rows/s").wait_for()
    button = tab.get_by_role("button", name="Rate limit", exact=True)
    wanted: list[Any] = []
    for text, rows in (("12,000", 12_000), ("", 0)):
        button.click()
        field = tab.get_by_label("Rows per second", exact=True)
        assert field.input_value() == "6000"
        field.fill("many")
        field.press("Enter")
        tab.get_by_role("alert").get_by_text("The limit must be a whole number of rows per second.").wait_for()
        field.fill(text)
        field.press("Enter")
        field.wait_for(state="detached")
        wanted.append(("/roir/api/run/rate", {"connection": "c", "operation": 7, "max_rows_per_second": rows}))
    assert airflow.sent == wanted
    airflow.more["may_change"] = False
    button.wait_for(state="hidden")


def test_lost_time_without_limits_names_its_cause_in_words(airflow: Airflow, tab: Any) -> None:
    """Found: `Limits: none any more` where there had never been one."""
    lost = [{"cause": "memory", "seconds": 13.0, "share": 0.2}]
    airflow.progress["governor"] = THROTTLE | {"limits": "", "lost": lost, "signals": [], "grants": []}
    panel = tab.get_by_role("region", name="Throttle")
    panel.get_by_text("Limits: none", exact=True).wait_for()
    assert panel.locator(".lost dt").all_inner_texts() == ["Lack of memory"]


def test_the_throttle_tells_why_what_it_cost_and_how_each_signal_is(airflow: Airflow, tab: Any) -> None:
    airflow.progress["governor"] = THROTTLE
    airflow.progress["held_up"] = {"by": "throttled", "text": THROTTLE["throttled"]}
    panel = tab.get_by_role("region", name="Throttle")
    panel.wait_for()
    assert tab.locator(".held").inner_text() == "replica r2 is 340 MB behind, limit 100 MB"
    tab.get_by_role("row", name="0 range 1 waits: throttled").wait_for()
    panel.get_by_text("on hold since").wait_for()
    assert panel.locator(".lost dd").all_inner_texts() == ["3 min 12 s · 40 % of the work", "40 s · 8.0 % of the work"]
    assert panel.locator(".signal b").all_inner_texts() == [
        "Workers granted",
        "Commit latency",
        "Replica’s lag",
        "Waits for locks",
        "Room of slots",
    ]
    lag = panel.locator(".signal", has_text="Replica’s lag")
    assert (lag.get_attribute("data-state"), lag.locator(".now").inner_text()) == ("over", "338 MB")
    assert lag.locator("small").inner_text() == "limit 100 MB · replica r59"
    assert lag.locator(".over").get_attribute("d")
    # A gap is no zero, and the line isn't drawn through it.
    waits = panel.locator(".signal", has_text="Waits for locks")
    assert waits.locator(".line").get_attribute("d").count("M") == 2
    assert waits.locator(".gaps").get_attribute("d").count("M") == 20
    assert "couldn't be read" in waits.locator("svg").get_attribute("aria-label")
    room = panel.locator(".signal", has_text="Room of slots")
    assert room.get_attribute("data-state") == "over", "a floor: over is below"
    # As it was, to be changed.
    panel.get_by_role("button", name="Change limits").click()
    assert tab.get_by_label("Limits", exact=True).input_value() == THROTTLE["limits"]
    tab.get_by_role("button", name="Cancel").click()
    # A signal that can't be read says why, whatever it is called.
    hostile = "<img src=x onerror=alert(1)>" + "x" * 400
    airflow.progress["governor"] = THROTTLE | {
        "limits": f"lock_waits=30 replicas={hostile}",
        "signals": [signal("lock_waits", "number", [1, None], 30, problem=hostile), signal("new_one", "number", [], 1)],
    }
    panel.get_by_text("can’t be read").wait_for()
    assert hostile in panel.locator(".signal small").all_inner_texts()
    for width in (360, 800, 1400):
        tab.set_viewport_size({"width": width, "height": 900})
        assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    airflow.progress["governor"] = None
    panel.wait_for(state="hidden")


SEGMENT: dict[str, Any] = {
    "ordinal": 1,
    "name": "roir_data.g1_s001",
    "lower": None,
    "upper": ["<b>" + "x" * 60],
    "rows": 5_000,
    "heap_bytes": 3 << 20,
    "tree_bytes": 1 << 20,
    "heap_needed": 1 << 20,
    "tree_needed": 1 << 20,
    "leaf_density": 0.42,
    "dead_rows": 12,
    "scans": 7,
    "since": None,
    "sealed_at": None,
}


def test_an_index_lists_its_worst_segments_when_somebody_unfolds_them(airflow: Airflow, tab: Any) -> None:
    """As `shown_segments` gives them."""
    others = [SEGMENT | {"ordinal": n, "lower": ["a", "1"], "upper": None, "heap_needed": None} for n in range(2, 21)]
    segments = {"count": 23, "rows": 9, "bytes": 80 << 20, "needed": 60 << 20, "worst": [SEGMENT, *others]}
    index = {"index": "public.i", "source": "public.t", "definition": "on public.t by k"}
    index |= {"state": "published", "generations": [], "segments": segments}
    may = {"trigger": True, "clean_up": True, "build": True, "verify": True, "control": True}
    database = {"connection": "c", "trouble": None, "indexes": [index, index | {"index": "public.j", "segments": None}]}
    airflow.pages["api/indexes"] = {"databases": [database], "may": may, "dags": dict.fromkeys(may, "a_dag")}
    tab.goto(f"http://127.0.0.1:{airflow.server_port}/roir/indexes")
    tab.locator("h3", has_text="public.j").wait_for()
    assert tab.locator("summary", has_text="segments,").count() == 1
    tab.get_by_text("23 segments, 20.0 MB of 80.0 MB free").click()
    tab.get_by_role("row", name="1 below <b>xxxxxxxxxxxxxxxxxxxx… 5,000 4.0 MB 2.0 MB 42 % 12 – –").wait_for()
    tab.get_by_role("row", name="2 from a, 1 on 5,000 4.0 MB – 42 % 12 – –", exact=True).wait_for()
    tab.get_by_text("And 3 more with less to win").wait_for()
