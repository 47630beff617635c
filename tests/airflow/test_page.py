"""The pages: who may read, who may change, what no answer contains. With a real API server and real users."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import NullPool, create_engine

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, lifecycle, prepare
from airflow_roir.engine.control import admission, expected, operations, requests
from airflow_roir.engine.control.remedies import moment
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.forecast import set_up
from airflow_roir.errors import DuplicatesFound, OperationQueued
from airflow_roir.options import BuildOptions
from airflow_roir.page.access import MOST_BYTES
from airflow_roir.page.answer import LONGEST_TEXT
from airflow_roir.page.app import create_app
from airflow_roir.page.failures import UNREADABLE
from servers.airflow import ApiServer, wait_until
from servers.postgres import embedded_postgres
from tests.engine import steps
from tests.test_cli_doctor import everything

DAG = "rebuild_index"
INDEX = "public.item_by_price"
MORE: dict[str, dict[str, Any]] = {
    "workers": {"parallelism": 3},
    "throttle": {"throttle": "lock_waits=50"},
    "rate": {"max_rows_per_second": 6000},
}
FROM_PAGE = {"X-Roir": "1", "Sec-Fetch-Site": "same-origin"}
ROUTES = [route for route in create_app().routes if isinstance(route, APIRoute)]
CASES = [(method, route.path) for route in ROUTES for method in sorted(route.methods)]
READS = [path for method, path in CASES if method == "GET"]
# The paths that only users who may trigger a build read.
FIRST_BUILD = ("/api/set-up", "/api/tables", "/api/check")
CHANGES = [path for method, path in CASES if method != "GET"]
# FAB has no user of its own with these names; `clerk` reads another DAG and its runs, and nothing else.
FAB_USERS = """
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder
import sys
with get_application_builder() as builder:
    sm = builder.sm
    sm.sync_roles()
    clerk = sm.add_role("Clerk")
    for action, resource in [("can_read", "DAG:control_index"), ("can_read", "DAG Runs"), ("can_read", "Website")]:
        sm.add_permission_to_role(clerk, sm.create_permission(action, resource))
    for name, role in [("admin", "Admin"), ("op", "Op"), ("user", "User"), ("viewer", "Viewer"), ("clerk", "Clerk")]:
        assert sm.add_user(name, name, name, name + "@example.org", sm.find_role(role), password=sys.argv[1])
"""


def file_of(path: str) -> str:
    return path.replace("{name}", "page.css")


@pytest.mark.parametrize(("method", "path"), CASES)
def test_nobody_gets_anything_without_signing_in(method: str, path: str) -> None:
    """Each route has to ask for Airflow's own check: plugins' apps don't get it otherwise."""
    answer = TestClient(create_app()).request(
        method,
        file_of(path),
        params={"dag_id": DAG, "run_id": "a"},
        json=None if method == "GET" else {"connection": "c", "operation": 1, "parallelism": 1},
        headers=FROM_PAGE,
    )
    assert answer.status_code == 401, answer.text


def test_every_route_but_the_files_asks_for_a_right_on_a_dag() -> None:
    for route in ROUTES:
        asked = {getattr(one.dependency, "__qualname__", "") for one in route.dependencies}
        if route.path != "/static/{name}":
            assert asked & {"dag_access.<locals>.check", "indexes_access", "first_build_access"}, route.path
        if route.methods != {"GET"}:
            assert "from_our_page" in asked, route.path
    apis = {"/api/run", "/api/run/duplicates", "/api/indexes", "/api/set-up", "/api/tables", "/api/check"}
    assert {*READS} == {"/run", "/indexes", "/static/{name}", *apis}
    assert {*CHANGES} == {f"/api/run/{verb}" for verb in ("pause", "resume", "abort", "workers", "rate", "throttle")}


class Page:
    """A client of the server that keeps all answers, to search them for secrets."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.seen: list[str] = []
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def ask(
        self, user: str | None, method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx.Response:
        """Asks the page's app as a user; None: without a login."""
        signed = {} if user is None else {"Authorization": f"Bearer {self.server.token(user)}"}
        answer = self.client.request(method, f"/roir{path}", headers=signed | (headers or {}), **more)
        self.seen.append(f"{answer.headers} {answer.text}")
        return answer

    def change(self, user: str | None, verb: str, run: str, body: dict[str, Any], dag: str = DAG) -> httpx.Response:
        """Sends the request that a button of the page sends."""
        where = f"/api/run/{verb}"
        return self.ask(user, "POST", where, headers=FROM_PAGE, params={"dag_id": dag, "run_id": run}, json=body)


@pytest.fixture(scope="module", params=["simple", "fab"])
def page(request: pytest.FixtureRequest, dags_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """An API server whose users come from Airflow's simple auth manager, or from FAB."""
    home = tmp_path_factory.mktemp("api")
    fab = request.param == "fab"
    with embedded_postgres() as metadata, ApiServer(home, dags_folder, metadata, fab=fab) as server:
        server.wait_until_ready()
        if fab:
            # Not beside the server's start: each of the two writes FAB's permissions, and one would fail.
            server.run_python("-c", FAB_USERS, server.password)
        yield Page(server)


@pytest.fixture
def warehouse(page: Page, shop: Any) -> str:
    """An Airflow connection to the shop; its password is like nothing else."""
    name = f"warehouse_{shop.fields['schema']}"
    page.server.add_connection(name, "postgres", **{key: value for key, value in shop.fields.items() if value})
    return name


@pytest.fixture
def build(page: Page, shop: Any, warehouse: str) -> tuple[str, dict[str, Any]]:
    """A run, and what a change of the operation that it drives names."""
    conf = {"index": INDEX, "postgres_conn_id": warehouse, "table": "public.item", "max_rows_per_second": 7_000}
    run = page.server.trigger(DAG, conf)
    definition = IndexDefinition.parse(INDEX, "public.item", ["price"])
    begun = prepare.prepare(shop.database, definition, BuildOptions(parallelism=2), f"airflow {DAG} {run}")
    return run, {"connection": warehouse, "operation": begun.operation_id}


@pytest.mark.sample(0)
def test_each_user_reads_and_changes_what_airflow_allows(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]]
) -> None:
    run, named = build
    about = {"dag_id": DAG, "run_id": run}
    for method, path in CASES:
        assert page.ask(None, method, file_of(path), params=about).status_code == 401, path
    for user in ("viewer", "user", "op", "admin"):
        for path in READS:
            more = named if path.endswith("duplicates") or path in FIRST_BUILD else {}
            more = more | ({"index": INDEX} if path == "/api/check" else {})
            is_refused = user == "viewer" and path in FIRST_BUILD
            code = page.ask(user, "GET", file_of(path), params=about | more).status_code
            assert code == (403 if is_refused else 200), (user, path)
        read = page.ask(user, "GET", "/api/run", params=about).json()
        del read["chosen"]["at_work"]
        assert read["chosen"] == named | {
            "index": INDEX,
            "kind": "create",
            "status": "running",
            "drives": True,
            "map_index": -1,
            "elsewhere": False,
            "created_by": f"airflow {DAG} {run}",
            "last_run": "",
            "left": False,
        }
        assert read["progress"]["operation_id"] == named["operation"]
        assert read["may_change"] is (user != "viewer")

    def row() -> operations.OperationRow:
        return operations.find_operation(shop.database, INDEX)

    for path in CHANGES:
        refused = page.change("viewer", path.rsplit("/", 1)[1], run, named | {"parallelism": 3})
        assert refused.status_code == 403, path
    assert (row().status, row().parallelism) == ("running", 2)

    assert page.change("user", "workers", run, named | {"parallelism": 5}).status_code == 200
    for rows, text in ((6000, "At most 6,000 rows/s from now on"), (0, "No rate limit from now on")):
        assert page.change("user", "rate", run, named | {"max_rows_per_second": rows}).json() == {"said": text}
        assert row().max_rows_per_second == (rows or None)
    by = shop.run("SELECT DISTINCT actor FROM roir.event WHERE action = 'change max_rows_per_second'")
    assert by == [("airflow user user",)]
    said = page.change("user", "throttle", run, named | {"throttle": "lock_waits=50 commit_latency=2s"}).json()["said"]
    assert said == "Limits from now on: commit_latency=2s lock_waits=50"
    said = page.change("user", "throttle", run, named | {"throttle": "lock_waits=40"}).json()["said"]
    assert said == "Limits from now on: lock_waits=40", "what isn't named any more has no limit"
    assert page.change("user", "pause", run, named | {"reason": "<b>month-end</b>"}).status_code == 200
    assert (row().status, row().parallelism, row().paused_by) == ("paused", 5, "airflow user user")
    assert row().pause_reason == "<b>month-end</b>"
    # The pause itself counted as a beat of the run's heart.
    shown = page.ask("viewer", "GET", "/api/run", params=about).json()["progress"]
    assert shown["status"] in ("pausing", "paused")
    assert [(one["by"], one["why"], one["until"]) for one in shown["pauses"]] == [
        ("airflow user user", "<b>month-end</b>", None)
    ]
    assert page.change("op", "resume", run, named).status_code == 200
    assert row().status == "running"
    assert page.change("op", "resume", run, named).status_code == 409

    other = page.server.trigger(DAG, {"index": INDEX, "postgres_conn_id": named["connection"]})
    shown = page.ask("viewer", "GET", "/api/run", params={"dag_id": DAG, "run_id": other}).json()
    assert shown["chosen"]["operation"] == named["operation"]
    foreign = page.server.trigger("clean_up_indexes", {"index": INDEX, "postgres_conn_id": named["connection"]})
    shown = page.ask("viewer", "GET", "/api/run", params={"dag_id": "clean_up_indexes", "run_id": foreign}).json()
    assert shown["operations"] == [], "in a DAG that isn't ours nobody's form names an index"
    assert named["connection"] in shown["looked_in"]
    with shop.database.transaction() as connection:
        connection.exec_driver_sql("UPDATE roir.operation SET owner = created_by, heartbeat_at = clock_timestamp()")
    assert page.change("admin", "pause", other, named).status_code == 409, "that run only waits for the first"
    assert page.change("admin", "pause", foreign, named, "clean_up_indexes").status_code == 409
    assert row().status == "running"

    aborted = page.change("user", "abort", run, named)
    assert f"A run of clean_up_indexes for connection {named['connection']} removes" in aborted.json()["said"]
    assert row().status == "aborting"
    for user in ("viewer", "user"):
        read = page.ask(user, "GET", "/api/run", params=about).json()
        assert (read["clean_up"], read["may_clean_up"]) == ("clean_up_indexes", user != "viewer")
    clean_up.clean_up(shop.database, "the DAG")
    # With the creation of an index its abort removes the index, too.
    assert shop.run("SELECT status FROM roir.operation") == [("aborted",)]
    assert shop.run("SELECT 1 FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace") == []
    assert page.change("user", "workers", run, named | {"parallelism": 3}).status_code in (404, 409)


def wished(wish: dict[str, Any] | None) -> tuple[str, Any] | None:
    """The DAG that a button triggers, and its conf."""
    return None if wish is None else (wish["dag_id"], json.loads(wish["conf"]))


ENDS = ["failed", "success", "deleted", "switch off", "clear", "renamed"]
STALE = """
import sys
from airflow.models.dag import DagModel
from airflow.utils.session import create_session
with create_session() as session:
    session.get(DagModel, "rebuild_index").is_stale = sys.argv[1] == "stale"
"""


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("way", ENDS)
def test_an_operation_whose_run_is_over_is_abandoned_and_can_be_continued(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]], way: str
) -> None:
    """Found: a build whose run was over, and that no run drove, was *Running* for two hours; *Indexes* said
    "under way", and nothing helped but to know the command.
    """
    run, named = build
    server, where = page.server, f"/api/v2/dags/{DAG}/dagRuns/{quote(run, safe='')}"
    # Between two tasks, or two stretches of one.
    shop.run("UPDATE roir.operation SET awaited_until = clock_timestamp() + interval '5 min', grace_s = 600")

    # Found: the run that continued set the rate limit of the first run again, which had been lowered since.
    wish_now = {"parallelism": 5, "max_rows_per_second": 600, "batch_rows": 5_000}
    requests.change_options(shop.database, INDEX, actor="ann", **wish_now)
    looked: list[str] = []

    def shown(user: str = "user") -> dict[str, Any]:
        """The page by a look that is newer than the last one: requests share a look."""

        def newer() -> dict[str, Any]:
            found: dict[str, Any] = page.ask(user, "GET", "/api/run", params={"dag_id": DAG, "run_id": run}).json()
            return {} if found["progress"]["now"] in looked else found

        found = wait_until(newer, 60, "a newer look")
        looked.append(found["progress"]["now"])
        return found

    def listed(user: str, state: str) -> dict[str, Any]:
        """The index on the page Indexes, once a look finds its operation in this state."""

        def found() -> dict[str, Any]:
            databases = page.ask(user, "GET", "/api/indexes").json()["databases"]
            [index] = [one for of in databases if of["connection"] == named["connection"] for one in of["indexes"]]
            return dict(index) if index["state_of_operation"]["name"] == state else {}

        return wait_until(found, 60, f"an operation that is {state}")

    shown()
    assert (shown()["progress"]["status"], shown()["continues"]) == ("running", None)
    if way == "deleted":
        # Another run's form names the connection still.
        server.trigger("verify_index", {"index": INDEX, "postgres_conn_id": named["connection"]})
        server.call("DELETE", where)
    elif way == "switch off":
        server.pause(DAG)
    elif way == "renamed":
        # No file has a DAG of that name any more; its runs stay as they are for ever.
        server.run_python("-c", STALE, "stale")
    else:
        server.call("PATCH", where, {"state": way if way != "clear" else "failed"})
    try:
        conf = {"index": INDEX, "postgres_conn_id": named["connection"], "table": "public.item", **wish_now}
        if way == "deleted":
            # Its first run is gone, and with it what it was triggered with. An empty field keeps the operation's value.
            del conf["table"], conf["max_rows_per_second"]
        wish = (DAG, conf)
        if way == "switch off":
            shown()
            assert shown()["progress"]["status"] == "paused"
            assert listed("user", "paused")["state_of_operation"]["name"] == "paused"
            return
        if way == "renamed":
            # A DAG that isn't there can't be triggered.
            shown()
            assert (shown()["progress"]["status"], shown()["continues"]) == ("abandoned", None)
            return
        if way != "deleted":
            shown()
            seen = shown()
            assert seen["progress"]["status"] == "abandoned"
            assert (seen["progress"]["state"]["word"], wished(seen["continues"])) == ("Abandoned", wish)
            assert "Continue it: that triggers a run for it" in seen["progress"]["held_up"]["text"]
            assert shown("viewer")["continues"] is None
        index = listed("user", "abandoned")
        assert (index["state_of_operation"]["word"], wished(index["continues"])) == ("Abandoned", wish)
        assert listed("viewer", "abandoned")["continues"] is None
        if way == "clear":
            server.call("PATCH", where, {"state": "queued"})
            shown()
            assert shown()["progress"]["status"] == "running"
        # The run that goes on is found by what it was triggered with.
        again = server.trigger(*wish)
        about = {"dag_id": DAG, "run_id": again}
        assert page.ask("user", "GET", "/api/run", params=about).json()["chosen"]["operation"] == named["operation"]
        if way in ("failed", "success"):
            expected.expect(shop.database, named["operation"], f"airflow {DAG} {again}", None)
            shown()
            seen = shown("viewer")
            assert (seen["continued_by"], seen["continues"]) == ({"dag_id": DAG, "run_id": again}, None)
    finally:
        if way == "renamed":
            server.run_python("-c", STALE, "fresh")
        server.unpause(DAG)


@pytest.mark.sample(0)
@pytest.mark.parametrize("way", ["failed", "deleted"])
def test_a_paused_operation_whose_run_is_gone_can_be_continued(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]], way: str
) -> None:
    """Found: after the deletion of its run there was no button for it."""
    run, named = build
    page.server.trigger("verify_index", {"index": INDEX, "postgres_conn_id": named["connection"]})
    requests.pause(shop.database, INDEX, "ann")

    def shown() -> list[dict[str, Any]]:
        databases = page.ask("user", "GET", "/api/indexes").json()["databases"]
        return [one for of in databases if of["connection"] == named["connection"] for one in of["indexes"]]

    def left() -> bool:
        # A database that takes long to answer is left out of a look.
        [index] = wait_until(shown, 60, "the index")
        state = index["state_of_operation"]
        assert state["name"] == "paused"
        assert state["left"] == (index["continues"] is not None)
        return bool(state["left"])

    assert not left(), "its run goes on after a resume"
    where = f"/api/v2/dags/{DAG}/dagRuns/{quote(run, safe='')}"
    if way == "deleted":
        page.server.call("DELETE", where)
    else:
        page.server.call("PATCH", where, {"state": way})
    wait_until(left, 60, "the buttons")


# Faster than Airflow's own models in a process for each.
STATE_OF = """
UPDATE dag_run SET state = 'running' WHERE run_id = %(run)s;
UPDATE task_instance
   SET state = %(state)s, try_number = 1, max_tries = 6, start_date = now(), end_date = now() + interval '3 d'
 WHERE run_id = %(run)s AND task_id = %(task)s;
INSERT INTO task_reschedule (ti_id, start_date, end_date, duration, reschedule_date)
SELECT id, now(), now(), 0, now() + interval '3 d' FROM task_instance
 WHERE run_id = %(run)s AND task_id = %(task)s AND state = 'up_for_reschedule'
"""


def put_task(server: ApiServer, run: str, task: str, state: str | None) -> None:
    """Gives a task of a run a state in Airflow's database."""
    engine = create_engine(server.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"], poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(STATE_OF, {"run": run, "task": task, "state": state})


@pytest.mark.by_hand("sweeps")
def test_the_task_that_drives_the_operation_next_is_told_as_airflow_knows_it(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]]
) -> None:
    """Found: between two tasks of a healthy run *Not driven*, with the command to resume; and two times for one try."""
    run, named = build
    page.server.run_python("-c", PREPARED, DAG, run, str(named["operation"]))
    # Its task `prepare` has ended.
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL, awaited_by = created_by, awaited_until = 'infinity'")

    def shown(task: str, state: str | None, note: str) -> dict[str, Any]:
        put_task(page.server, run, task, state)

        def found() -> dict[str, Any]:
            seen: dict[str, Any] = page.ask("user", "GET", "/api/run", params={"dag_id": DAG, "run_id": run}).json()
            return seen if note in seen["progress"]["state"]["note"] else {}

        return wait_until(found, 30, f"the note: {note}")

    for state in (None, "scheduled", "queued"):
        progress = shown("build", state, "Waiting for Airflow to start task build")["progress"]
        assert progress["state"]["word"] == "Waiting"
        assert (progress["held_up"]["by"], progress["expected_at"]) == ("starting", None)
        assert "roir resume" not in f"{progress['held_up']} {progress['state']}"
    assert shown("build", "running", "Task build is starting")["progress"]["state"]["word"] == "Starting"
    shown("build", "success", "Waiting for Airflow to start task finalize")
    seen = shown("build", "up_for_retry", "Task build is tried again about ")
    again, expects = (seen["failures"][0]["again"], seen["progress"]["expected_at"])
    assert datetime.fromisoformat(again) == datetime.fromisoformat(expects)
    assert f"about {moment(datetime.fromisoformat(again))}" in seen["progress"]["held_up"]["text"]

    shown("build", "up_for_reschedule", "Task build looks again about ")
    # Another time, by which the task's silence is bounded.
    shop.run("UPDATE roir.operation SET awaited_until = clock_timestamp() + interval '100 min', grace_s = 1000")
    assert page.change("user", "pause", run, named).status_code == 200
    shop.run("UPDATE roir.operation SET heartbeat_at = NULL")
    paused = shown("build", "up_for_reschedule", "Paused; nothing is lost; its run looks again about ")["progress"]
    said = page.change("user", "resume", run, named).json()["said"]
    about = moment(datetime.fromisoformat(paused["expected_at"]))
    assert paused["state"]["note"].endswith(f"about {about}")
    assert said == f"Resumed. Task build looks again about {about}, and continues."
    put_task(page.server, run, "build", "queued")
    assert page.change("user", "pause", run, named).status_code == 200
    said = page.change("user", "resume", run, named).json()["said"]
    assert said == "Resumed. Waiting for Airflow to start task build."


@pytest.mark.sample(0)
def test_an_operation_that_waits_for_its_turn_is_shown_as_waiting(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]]
) -> None:
    run, named = build
    other = IndexDefinition.parse("public.item_by_kind", "public.item", ["kind"])
    prepare.prepare(shop.database, other, BuildOptions(), "cli")
    admission.set_most(shop.database, 1)
    start_run(shop.database, "public.item_by_kind", "cli")
    with pytest.raises(OperationQueued, match="place 1 of 1"):
        start_run(shop.database, INDEX, f"airflow {DAG} {run}")
    shown = page.ask("viewer", "GET", "/api/run", params={"dag_id": DAG, "run_id": run}).json()
    assert shown["chosen"]["operation"] == named["operation"]
    assert shown["progress"]["state"] == {
        "name": "queued",
        "word": "Waiting",
        "note": "It begins once others have ended",
        "remedy": "roir queue shows the operations before it",
    }


@pytest.mark.sample(0)
def test_who_reads_another_dag_gets_nothing_of_this_one(page: Page, build: tuple[str, dict[str, Any]]) -> None:
    if not page.server.fab:
        pytest.skip("the simple auth manager has no rights by DAG")
    run, named = build
    for path in READS:
        if path == "/static/{name}":
            continue
        answer = page.ask("clerk", "GET", path, params={"dag_id": DAG, "run_id": run})
        assert answer.status_code == 403, path
        # Whichever of two is checked, the other isn't used.
        for first, second in (("control_index", DAG), (DAG, "control_index")):
            both = [("dag_id", first), ("dag_id", second), ("run_id", run)]
            assert page.ask("clerk", "GET", path, params=both).status_code in (403, 422), path
    assert page.change("clerk", "pause", run, named).status_code == 403
    mine = page.server.trigger("control_index", {"index": INDEX, "action": "pause"})
    assert page.ask("clerk", "GET", "/run", params={"dag_id": "control_index", "run_id": mine}).status_code == 200


FAILED = """
import sys
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils import timezone
from airflow.utils.session import create_session
dag_id, run_id, task_id, message = sys.argv[1:]
with create_session() as session:
    run = session.query(DagRun).filter_by(dag_id=dag_id, run_id=run_id).one()
    run.state, run.end_date = "failed", timezone.utcnow()
    for one in session.query(TaskInstance).filter_by(dag_id=dag_id, run_id=run_id):
        if one.task_id == task_id:
            one.state, one.try_number, one.max_tries = "failed", 7, 6
            one.start_date = one.end_date = timezone.utcnow()
            value = {"try_number": 7, "message": message}
            session.add(XComModel(dag_run_id=run.id, dag_id=dag_id, run_id=run_id, task_id=task_id, map_index=-1,
                                  key="roir_failure", value=value))
        else:
            one.state = "upstream_failed"
"""
RETRIED = (
    FAILED.replace('run.state, run.end_date = "failed", timezone.utcnow()', 'run.state = "running"')
    .replace('"failed", 7, 6', '"up_for_retry", 7, 13')
    .replace('"upstream_failed"', "None")
)
PREPARED = """
import sys
from airflow.models.dagrun import DagRun
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
dag_id, run_id, operation = sys.argv[1:]
with create_session() as session:
    run = session.query(DagRun).filter_by(dag_id=dag_id, run_id=run_id).one()
    session.add(XComModel(dag_run_id=run.id, dag_id=dag_id, run_id=run_id, task_id="prepare", map_index=-1,
                          key="return_value", value=int(operation)))
"""
SUCCEEDED = """
import sys
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
with create_session() as session:
    session.query(DagRun).filter_by(run_id=sys.argv[1]).one().state = "success"
"""


@pytest.mark.sample(0, 1)
def test_the_message_of_a_failed_task_is_for_users_who_may_read_its_log(page: Page, shop: Any, warehouse: str) -> None:
    """It triggers again with the same values, by the right to do so; also where the database can't be read any more."""
    # Longer than other texts of an answer, and with signs that mislead: it is sent as it was, but not shown so.
    keys = f"<b>x</b>\u202e{',x' * LONGEST_TEXT}"
    conf = {"index": INDEX, "postgres_conn_id": warehouse, "keys": keys}
    said = "there is no column <b>x</b>\n" + "and so on " * 500
    run = page.server.trigger(DAG, conf)
    about = {"dag_id": DAG, "run_id": run}
    # Found: the tab of a run that had failed before it began showed another run's operation of its index.
    prepare.prepare(shop.database, IndexDefinition.parse(INDEX, "public.item", ["price"]), BuildOptions(), "cli")
    assert page.ask("viewer", "GET", "/api/run", params=about).json()["chosen"]["created_by"] == "cli"
    page.server.run_python("-c", FAILED, DAG, run, "prepare", said)
    for user in ("viewer", "user", "admin"):
        seen = page.ask(user, "GET", "/api/run", params=about).json()
        first, rest = seen["failures"]
        assert (first["text"], first["message"]) == ("Task prepare has failed at try 7 of 7", said)
        assert rest["text"] == "Not started, since a task before failed: verify_before, build, finalize"
        assert wished(seen["again"]) == (None if user == "viewer" else (DAG, conf))
        assert (seen["wanted"], seen["chosen"], seen["progress"]) == (INDEX, None, None)
        assert seen["run"]["values"]["keys"] == f"<b>x</b>\N{REPLACEMENT CHARACTER}{',x' * LONGEST_TEXT}"[:1999] + "…"
    if page.server.fab:
        mine = page.server.trigger("control_index", {"index": INDEX, "action": "pause"})
        page.server.run_python("-c", FAILED, "control_index", mine, "pause", "no operation of it is running")
        told = "Task pause has failed at try 7 of 7"
        for user, text, message in (
            ("clerk", told + UNREADABLE, ""),
            ("viewer", told, "no operation of it is running"),
        ):
            seen = page.ask(user, "GET", "/api/run", params={"dag_id": "control_index", "run_id": mine}).json()
            assert (seen["failures"][0]["text"], seen["failures"][0]["message"]) == (text, message)
    # Found: "Trying again …" for ever, below a run that had failed since its database refused.
    end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'roir page'"
    shop.run(f"ALTER ROLE {shop.fields['login']} NOLOGIN; {end}")

    def troubled() -> dict[str, Any]:
        """The answer, once a look has found that the database refuses and the run has ended."""

        def found() -> dict[str, Any]:
            seen: dict[str, Any] = page.ask("viewer", "GET", "/api/run", params=about).json()
            return seen if seen.get("troubles") else {}

        return wait_until(found, 60, "an answer with the trouble")

    seen = troubled()
    assert seen["troubles"] == [f"the database of connection {warehouse} refuses the login"]
    assert seen["failures"][0]["message"] == said
    about["run_id"] = page.server.trigger(DAG, conf)
    assert page.ask("viewer", "GET", "/api/run", params=about).status_code == 503
    # Found: this also hid that its first task would be tried again, and when.
    page.server.run_python("-c", RETRIED, DAG, about["run_id"], "prepare", said)
    [tried] = wait_until(
        lambda: page.ask("user", "GET", "/api/run", params=about).json().get("failures"), 60, "the failed try"
    )
    assert (tried["text"], tried["message"]) == ("Try 7 of 14 of task prepare has failed", said)
    assert tried["again"] > tried["at"]
    page.server.run_python("-c", SUCCEEDED, about["run_id"])
    assert troubled()["failures"] == []


@pytest.mark.by_hand("sweeps")
def test_a_run_that_has_published_its_index_is_not_offered_again(
    page: Page, shop: Any, build: tuple[str, dict[str, Any]]
) -> None:
    """It failed after the publish, and another one with the same values would rebuild the index."""
    run, named = build
    page.server.run_python("-c", PREPARED, DAG, run, str(named["operation"]))
    page.server.run_python("-c", FAILED, DAG, run, "finalize", "no event was sent")

    def shown(status: str) -> dict[str, Any]:
        def found() -> dict[str, Any]:
            seen: dict[str, Any] = page.ask("user", "GET", "/api/run", params={"dag_id": DAG, "run_id": run}).json()
            return seen if seen["progress"]["status"] == status else {}

        return wait_until(found, 60, f"an operation that is {status}")

    assert wished(shown("abandoned")["again"]) is not None
    driven = start_run(shop.database, INDEX, f"airflow {DAG} {run}")
    steps.build_all(shop.database, driven)
    steps.seal_all(shop.database, driven)
    lifecycle.run_phases(shop.database, driven)
    seen = shown("completed")
    assert (seen["failures"][0]["message"], seen["again"]) == ("no event was sent", None)


@pytest.mark.sample(0)
def test_no_other_site_changes_anything(page: Page, shop: Any, build: tuple[str, dict[str, Any]]) -> None:
    run, named = build
    about = {"dag_id": DAG, "run_id": run}
    for path in CHANGES:
        body = named | MORE.get(path.rsplit("/", 1)[1], {})
        for headers in ({}, {"X-Roir": "1", "Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-origin"}):
            refused = page.ask("admin", "POST", path, headers=headers, params=about, json=body)
            assert refused.status_code == 403, (path, headers)
        # A request that a form of another site can send.
        as_form = page.ask("admin", "POST", path, params=about, data={"connection": "c", "operation": "1"})
        assert as_form.status_code == 422 or as_form.status_code == 403
        assert page.ask("admin", "GET", path, params=about).status_code == 405
    assert operations.find_operation(shop.database, INDEX).status == "running"
    policy = page.ask("viewer", "GET", "/run", params=about).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


HOSTILE = (
    "",
    "~",
    "\0",
    "a\0b",
    "../..",
    "%00",
    "' OR 1=1 --",
    "<script>",
    "x" * 5000,
    "-1",
    "9" * 40,
    "\u202e",
    "é\n",
)


@pytest.mark.by_hand("sweeps")
def test_bad_input_is_refused_with_a_reason(page: Page, shop: Any, build: tuple[str, dict[str, Any]]) -> None:
    run, named = build
    good = {"dag_id": DAG, "run_id": run}
    for bad in HOSTILE:
        for name in ("dag_id", "run_id", "kind", "connection", "operation", "after"):
            for path in ("/api/run", "/run", "/api/run/duplicates"):
                more = named if path.endswith("duplicates") else {}
                answer = page.ask("admin", "GET", path, params=good | more | {name: bad})
                assert answer.status_code < 500, (path, name, bad, answer.text)
        assert 400 <= page.ask("admin", "GET", f"/static/x{quote(bad[:50], safe='')}").status_code < 500
        for path in CHANGES:
            usual = named | MORE.get(path.rsplit("/", 1)[1], {})
            for name in ("connection", "operation", "parallelism", bad):
                answer = page.ask("admin", "POST", path, headers=FROM_PAGE, params=good, json=usual | {name: bad})
                assert 400 <= answer.status_code < 500, (path, name, bad, answer.text)
                assert answer.json()["detail"]
        # A reason may be any text, so that this one may pause it.
        assert page.change("admin", "pause", run, named | {"reason": bad}).status_code < 500, bad
    for operation in (0, -1, 2**63, 1.5, True, None, [], "1"):
        answer = page.change("admin", "resume", run, named | {"operation": operation})
        assert 400 <= answer.status_code < 500, operation
    for parallelism in (0, -1, 257, 10**30, 2.5, True, None, "4"):
        answer = page.change("admin", "workers", run, named | {"parallelism": parallelism})
        assert answer.status_code == 422, parallelism
    for rows in (-1, 1_000_000_001, 2**63, 2.5, True, None, "4"):
        answer = page.change("admin", "rate", run, named | {"max_rows_per_second": rows})
        assert answer.status_code == 422, rows
    for throttle in ("nothing=1", "replica_lag", "x" * 501, "lock_waits=1\x00", None, 4):
        answer = page.change("admin", "throttle", run, named | {"throttle": throttle})
        assert answer.status_code == 422, throttle
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"connection": "\\ud800", "operation": 1}'):
        headers = FROM_PAGE | {"Content-Type": "application/json"}
        answer = page.ask("admin", "POST", "/api/run/resume", headers=headers, params=good, content=content)
        assert 400 <= answer.status_code < 500, content
    long = page.change("admin", "resume", run, named | {"reason": "x" * MOST_BYTES})
    assert long.status_code == 413
    assert page.change("admin", "resume", run, named | {"operation": 10**9}).status_code == 409
    shop.run("DROP SCHEMA roir CASCADE")
    for user_sees in ("/api/run", "/api/indexes"):
        answer = page.ask("admin", "GET", user_sees, params=good)
        assert answer.status_code in (200, 503), answer.text
    assert 400 <= page.change("admin", "resume", run, named).status_code < 500


@pytest.mark.by_hand("sweeps")
def test_duplicates_are_read_some_at_a_time_and_only_of_the_runs_own_operation(
    page: Page, shop: Any, warehouse: str
) -> None:
    run = page.server.trigger(DAG, {"index": INDEX, "postgres_conn_id": warehouse, "table": "public.item"})
    who = f"airflow {DAG} {run}"
    definition = IndexDefinition.parse(INDEX, "public.item", ["kind"], unique=True)
    prepare.prepare(shop.database, definition, BuildOptions(), who)
    driven = start_run(shop.database, INDEX, who)
    steps.build_all(shop.database, driven)
    with pytest.raises(DuplicatesFound):
        steps.seal_all(shop.database, driven)
    about = {"dag_id": DAG, "run_id": run}
    named = {"connection": warehouse, "operation": driven.operation_id}
    seen = page.ask("viewer", "GET", "/api/run", params=about).json()["progress"]
    assert (seen["unique"], seen["has_duplicates"], seen["duplicate_keys"], seen["duplicate_rows"]) == (
        True,
        True,
        97,
        20000,
    )
    first = page.ask("viewer", "GET", "/api/run/duplicates", params=about | named).json()
    assert (len(first["groups"]), first["last"]) == (50, False)
    assert {len(group["rows"]) for group in first["groups"]} == {20}
    assert sum(group["count"] for group in first["groups"]) > 10_000
    after = {"after": first["groups"][-1]["id"]}
    rest = page.ask("viewer", "GET", "/api/run/duplicates", params=about | named | after).json()
    assert (len(rest["groups"]), rest["last"]) == (47, True)
    assert len({group["key"] for group in first["groups"] + rest["groups"]}) == 97
    for other in (named | {"operation": driven.operation_id + 1}, named | {"connection": "postgres_default"}):
        assert page.ask("viewer", "GET", "/api/run/duplicates", params=about | other).status_code == 404


@pytest.mark.sample(0)
def test_what_has_not_changed_is_not_sent_again(page: Page, shop: Any, build: tuple[str, dict[str, Any]]) -> None:
    run, named = build
    about = {"dag_id": DAG, "run_id": run}
    assert page.change("admin", "pause", run, named).status_code == 200
    for path in ("/api/run", "/api/indexes"):
        tag, answers = "", []
        # The databases of earlier tests are gone; on a busy machine one may be said to be slow before it is.
        while 304 not in answers and len(answers) < 5:
            again = page.ask("viewer", "GET", path, params=about, headers={"If-None-Match": tag})
            answers.append(again.status_code)
            tag = again.headers["etag"]
        assert answers[0] == 200, path
        assert (answers[-1], again.text) == (304, ""), path
    tag = page.ask("viewer", "GET", "/api/run", params=about).headers["etag"]
    assert page.change("admin", "resume", run, named).status_code == 200
    changed = page.ask("viewer", "GET", "/api/run", params=about, headers={"If-None-Match": tag})
    assert changed.status_code == 200


def troubles(page: Page, found: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The trouble of each connection on the page Indexes, once `found` accepts it: a look is shared for some
    seconds."""
    deadline = time.monotonic() + 60
    while True:
        answer = page.ask("admin", "GET", "/api/indexes").json()
        shown = {one["connection"]: one["trouble"] for one in answer["databases"]}
        if found(shown) or time.monotonic() > deadline:
            return shown
        time.sleep(0.5)


@pytest.mark.sample(0)
def test_a_database_of_another_version_is_not_passed_over(page: Page, shop: Any, warehouse: str) -> None:
    """A database without a control schema has nothing to do with the page. A schema of another version is shown with
    the remedy."""
    page.server.trigger(DAG, {"index": INDEX, "postgres_conn_id": warehouse})

    shop.run("UPDATE roir.schema_version SET version_num = '9999'")
    assert "which is newer than this code" in troubles(page, lambda shown: warehouse in shown)[warehouse]
    shop.run("DROP SCHEMA roir CASCADE")
    assert warehouse not in troubles(page, lambda shown: warehouse not in shown)


@pytest.mark.by_hand("sweeps")
def test_indexes_checks_what_a_first_build_needs_as_the_command_does(page: Page, shop: Any, warehouse: str) -> None:
    """The same findings in the same words, on demand, by the API server; nothing in the database changes."""

    def asked(user: str = "user", connection: str = warehouse) -> Any:
        return page.ask(user, "GET", "/api/set-up", params={"connection": connection})

    assert asked().status_code == 404, "no run has named it yet"
    page.server.trigger(DAG, {"index": INDEX, "postgres_conn_id": warehouse})
    wait_until(lambda: asked().status_code == 200, 60, "the connection to be known")
    assert asked("viewer").status_code == 403, "it names roles and their missing rights"
    before = everything(shop.dsn)
    seen = asked().json()
    assert everything(shop.dsn) == before
    found = {one["what"]: one for one in seen["found"]}

    def told(of: list[dict[str, Any]]) -> list[Any]:
        """Without the numbers of sessions, sizes and settings of the moment."""
        return [
            (one["what"], one["verdict"], one["says"] if one["verdict"] != "ok" else "", one["remedy"])
            for one in of
            if one["where"] == "database"
        ]

    assert told(seen["found"]) == told([one.as_dict() for one in set_up.look(shop.database)])
    assert [found[what]["verdict"] for what in ("session", "schema", "Airflow", warehouse, DAG)] == ["ok"] * 5
    # No scheduler runs here.
    assert (found["Scheduler"]["verdict"], found["Scheduler"]["remedy"]) == ("problem", "airflow scheduler")
    here = [one for one in seen["found"] if one["where"].startswith("machine ")]
    assert {one["what"] for one in here} >= {"Java", "pyspark"}
    assert {one["verdict"] for one in here} <= {"ok", "unknown"}, "tasks may run on another machine"
    assert here[0]["where"].removeprefix("machine ") in seen["note"]
    assert "API server" in seen["note"]

    shop.run("DROP SCHEMA roir CASCADE")
    bare = wait_until(
        lambda: [
            one
            for one in page.ask("user", "GET", "/api/indexes").json()["bare"]
            if (one["connection"], one["lacks"]) == (warehouse, "schema")
        ],
        60,
        "an empty database",
    )
    assert bare[0]["remedy"] == "Create it: roir init"
    wait_until(lambda: "roir init" in str(asked().json()), 60, "the schema to be missed")
    shop.run(f"ALTER ROLE {shop.fields['login']} NOLOGIN")
    refusal = f"the database of connection {warehouse} refuses the login"
    wait_until(lambda: asked().json()["found"][0]["says"] == refusal, 60, "a refusal without host and role")
    assert [one["where"] for one in asked().json()["found"]].count("database") == 1


@pytest.mark.sample(0)
def test_a_database_that_is_down_is_said_to_be_and_nothing_more(page: Page, shop: Any, warehouse: str) -> None:
    where = {"host": "127.0.0.1", "port": 1, "login": "never-seen-role", "schema": "never-seen-database"}
    page.server.add_connection(f"down_{warehouse}", "postgres", password="never-seen-password", **where)
    run = page.server.trigger(DAG, {"index": INDEX, "postgres_conn_id": f"down_{warehouse}"})
    answer = page.ask("admin", "GET", "/api/run", params={"dag_id": DAG, "run_id": run})
    assert answer.status_code == 503
    assert answer.json()["detail"] == f"the database of connection down_{warehouse} can't be reached"
    shown = troubles(page, lambda shown: f"down_{warehouse}" in shown)
    assert shown[f"down_{warehouse}"] == f"the database of connection down_{warehouse} can't be reached"


@pytest.mark.sample(0)
def test_no_answer_has_a_secret(page: Page, shop: Any, build: tuple[str, dict[str, Any]]) -> None:
    """Searches all answers of the tests of this server, errors included."""
    run, named = build
    for path in READS:
        page.ask("admin", "GET", file_of(path), params={"dag_id": DAG, "run_id": run})
    # A role that may not log in any more: libpq's own error quotes it.
    end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE application_name = 'roir page'"
    shop.run(f"ALTER ROLE {shop.fields['login']} NOLOGIN; {end}")
    for path in ("/api/run", "/api/indexes"):
        page.ask("admin", "GET", path, params={"dag_id": DAG, "run_id": run})
    page.change("admin", "resume", run, named)
    answers = "\n".join(page.seen)
    assert INDEX in answers
    assert "refuses the login" in answers
    for secret in ("never-seen", shop.fields["password"], shop.fields["login"], shop.fields["host"]):
        assert secret not in answers
