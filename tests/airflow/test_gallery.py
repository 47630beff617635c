"""Fails in each way on a real Airflow, and writes docs/failures.md: what each surface says, what helps, a picture.

By hand, `make pictures`. Each row ends with an assertion on its words, so that no picture shows something else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from psycopg2.extensions import parse_dsn

from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from servers.airflow import StandaloneAirflow, wait_until
from servers.postgres import embedded_postgres
from tests.airflow.screen import browser_page, keep
from tests.airflow.test_failures import Failing
from tests.airflow.test_marks import PATIENCE_S, Row, is_alive
from tests.conftest import run_sql
from tests.crash import gate as gates

pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.by_hand("pictures"), pytest.mark.timeout(1200)]

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
INDEX, CONNECTION = "shop.orders_by_customer", "postgres_default"
# The DAG as it is shipped; a copy that tries once and has both of Airflow's timeouts; one whose file gets broken.
DAG, ONCE, BROKEN = "rebuild_index", "nightly_orders", "weekly_orders"
LIMITS = '"execution_timeout": timedelta(hours=1),\n        "retries": 0,'
CONF = {"table": "shop.orders", "keys": "customer_id, ordered_at", "include": "status", "ranges": 4}
CONF |= {"batch_rows": 1000, "parallelism": 1, "spark": "local[1]", "postgres_conn_id": CONNECTION}
WIDTH = 880
MOST_HEIGHT = 900
WHILE = "while"


@dataclass(frozen=True)
class Failure:
    """name: of the picture. what: failed. deed: as in `test_marks`. helps: Markdown. ready: a selector of the tab.

    wanted: words that the tab has. closed: no server listens at the connection's address.
    """

    name: str
    what: str
    deed: Row
    helps: str
    wanted: str
    ready: str = ".failures li"
    closed: bool = False
    conf: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def is_killing(self) -> bool:
        """Whether the task's process ends by it."""
        return self.deed.moment == WHILE and self.deed.deed not in ("file broken", "long paused", "aborted")


ENDED = Row("prepare", "after", "nothing", dag=ONCE)
BUILD = Row("build", WHILE, "nothing", dag=ONCE)
CONTINUE = "*Continue*"
TABLE = [
    Failure(
        "wrong_value",
        "A column, a key or a connection doesn't exist",
        ENDED,
        "*Trigger again* with the right value: the message names the nearest",
        "custumer_id",
        conf={"keys": "custumer_id, ordered_at"},
    ),
    Failure(
        "database_away",
        "The database can't be reached",
        ENDED,
        "Start the database or correct the connection, then *Trigger again*",
        "refused",
        closed=True,
    ),
    Failure(
        "process_killed",
        "The task's process was killed, and no try is left",
        replace(BUILD, deed="process killed"),
        f"Find the cause, often too little memory. Then {CONTINUE}",
        "its process ended without a message",
    ),
    Failure(
        "supervisor_killed",
        "The task's supervisor or its worker was killed",
        replace(BUILD, deed="killed"),
        CONTINUE,
        "its process ended before",
    ),
    Failure(
        "execution_timeout",
        "The task reached its `execution_timeout`",
        replace(BUILD, deed="timed out"),
        f"{CONTINUE}. Give the task no `execution_timeout`, or a longer one",
        "execution_timeout",
    ),
    Failure(
        "marked_failed",
        "A user marked the task or the run as failed",
        replace(BUILD, deed="marked failed"),
        f"{CONTINUE}, or clear the task with *Downstream*",
        "a user marked it as failed",
    ),
    Failure(
        "dagrun_timeout",
        "The run reached its `dagrun_timeout`",
        replace(BUILD, deed="run timed out"),
        f"{CONTINUE}. Set no `dagrun_timeout`: it counts paused time",
        "took longer than the dagrun_timeout",
    ),
    Failure(
        "try_failed",
        "A try failed, and more are left",
        replace(BUILD, deed="process killed", dag=DAG),
        "Nothing: the next try continues after the last committed batch",
        "Goes on by itself at the next try",
        ready="text=Goes on by itself at the next try",
    ),
    Failure(
        "dag_broken",
        "The DAG's file is broken, or gone",
        replace(BUILD, deed="file broken", dag=BROKEN),
        "Repair the file, or drive the operation by `roir resume INDEX`",
        "can't be imported",
        ready="text=can't be imported",
    ),
    Failure(
        "marked_success",
        "A user marked the run as success in mid-build",
        replace(BUILD, deed="run marked success"),
        f"{CONTINUE}, or clear `build` with *Downstream*",
        "This run has ended, and no run drives the operation",
        ready="text=This run has ended, and no run drives the operation",
    ),
    Failure(
        "abandoned",
        "A power cut ended all processes, and a user marked the run as failed",
        replace(BUILD, deed="everything killed, run marked failed"),
        f"{CONTINUE}, here or on *Indexes*; or *Abort*",
        "Abandoned",
        ready=".chip[data-status=abandoned]",
    ),
    Failure(
        "long_pause",
        "A build has been paused for too long",
        replace(BUILD, deed="long paused"),
        "*Resume*, or *Abort*. `roir change INDEX --warn-after 7d` allows a longer pause",
        "still captures writes",
        ready="text=still captures writes",
    ),
    Failure(
        "aborted",
        "A user aborted the build",
        replace(BUILD, deed="aborted"),
        "To build it, trigger the DAG again",
        "aborted",
    ),
]


class Shown(Failing):
    """A row at work on the table of the docs."""

    def __init__(self, failure: Failure, airflow: StandaloneAirflow, dsn: str) -> None:
        self.row, self.airflow, self.dsn, self.dag = failure.deed, airflow, dsn, failure.deed.dag
        self.failure, self.index, self.run = failure, INDEX, ""
        run_sql(
            dsn,
            "CREATE SCHEMA shop",
            "CREATE TABLE shop.orders (id bigint, ordered_at date, customer_id int, status text, "
            "PRIMARY KEY (id, ordered_at)) PARTITION BY RANGE (ordered_at)",
            *(
                f"CREATE TABLE shop.orders_{year}_{month:02} PARTITION OF shop.orders FOR VALUES FROM "
                f"('{year}-{month:02}-01') TO (date '{year}-{month:02}-01' + interval '1 month')"
                for year in (2024, 2025)
                for month in range(1, 13)
            ),
            "INSERT INTO shop.orders SELECT n, date '2024-01-01' + n % 700, n % 97, 'paid' "
            "FROM generate_series(1, 7000) n",
            "ANALYZE shop.orders",
        )
        gates.install(dsn)
        known = parse_dsn(dsn)
        fields = {"host": known["host"], "login": known["user"], "schema": known["dbname"]}
        fields |= {"port": int(known["port"])} if "port" in known else {}
        if failure.closed:
            fields = {"host": "127.0.0.1", "port": 9, "login": "app", "password": "x", "schema": "shop"}
        airflow.add_connection(CONNECTION, "postgres", **fields)

    def trigger(self) -> None:
        conf = CONF | self.row.conf | self.failure.conf | {"index": self.index}
        self.run = self.airflow.trigger(self.dag, conf)

    def do(self) -> None:
        database = Database(self.dsn)
        match self.row.deed:
            case "file broken":
                file = Path(self.airflow.environment["AIRFLOW__CORE__DAGS_FOLDER"]) / f"{BROKEN}.py"
                file.write_text(file.read_text() + "\nimport no_such_module\n")
            case "long paused":
                requests.pause(database, INDEX, "ann", "month-end close")
            case "aborted":
                requests.request_abort(database, INDEX, "ann", "the wrong columns")
            case _:
                super().do()

    def is_shown_by(self) -> Callable[[], object]:
        """What to wait for once it has happened."""
        task = lambda: self.airflow.task_state(self.dag, self.run, "build")  # noqa: E731
        match self.failure.name:
            case "try_failed":
                return lambda: task() == "up_for_retry"
            case "dag_broken":
                return lambda: self.airflow.import_errors()
            case "long_pause":
                return lambda: task() == "up_for_reschedule"
        return lambda: self.airflow.run_state(self.dag, self.run) in ("failed", "success")

    def age(self) -> None:
        """As if it were some time ago."""
        earlier = "- interval '30 h'"
        if self.failure.name == "long_pause":
            run_sql(self.dsn, f"UPDATE roir.operation SET paused_at = paused_at {earlier}")
        if self.failure.name == "abandoned":
            at = "clock_timestamp() - interval '20 min'"
            run_sql(self.dsn, f"UPDATE roir.operation SET heartbeat_at = {at}, awaited_until = {at}")

    def status_lines(self) -> str:
        """The output of `roir status`, or why there is none."""
        dsn = "host=127.0.0.1 port=9 dbname=shop user=app" if self.failure.closed else self.dsn
        command = [str(Path(sys.executable).parent / "roir"), "status"]
        done = subprocess.run(command, env=os.environ | {"ROIR_DSN": dsn}, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def airflow(dags_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneAirflow]:
    """An Airflow with the three DAGs, which soon declares dead a task whose process has vanished."""
    dags = tmp_path_factory.mktemp("dags") / "dags"
    dags.mkdir()
    # Long enough for a picture between two tries.
    text = (dags_folder / f"{DAG}.py").read_text().replace("timedelta(seconds=30)", "timedelta(minutes=9)")
    (dags / f"{DAG}.py").write_text(text)
    for name in (ONCE, BROKEN):
        copy = text.replace(f'dag_id="{DAG}"', f'dag_id="{name}",\n    dagrun_timeout=timedelta(hours=6)')
        assert '"retries": 6,' in copy
        (dags / f"{name}.py").write_text(copy.replace('"retries": 6,', LIMITS))
    (dags / "clean_up_indexes.py").write_text((dags_folder / "clean_up_indexes.py").read_text())
    more = {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60", "AIRFLOW__ROIR__CONNECTIONS": CONNECTION}
    more |= {"AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3"}
    more |= {"AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "20"}
    # On a busy machine a file takes long to read.
    more |= {"AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "300", "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "320"}
    home = tmp_path_factory.mktemp("airflow")
    with embedded_postgres() as metadata, StandaloneAirflow(home, dags, metadata, environment=more) as running:
        address = running.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]
        running.environment["METADATA"] = address.replace("+psycopg2", "")
        running.wait_until_ready([DAG, ONCE, BROKEN])
        # On a busy machine the first task of a cold Airflow may die before it has begun.
        first = running.trigger(ONCE, {"index": "shop.none"})
        wait_until(lambda: running.run_state(ONCE, first) == "failed", PATIENCE_S, "the first run's end")
        yield running


# Texts that differ from run to run.
PLAIN = (
    (r"(manual|scheduled)__[\d-]+T[\d:.]+\+\d\d:\d\d", "RUN"),
    (r"(?<![\d:])\d\d:\d\d(:\d\d)?( UTC)?", "13:04"),
    (r"(under )?\b\d+(\.\d+)? (s|min|h|d|days?)\b( \d+ (s|min|h)\b)?", "…"),
    (r"[\d,]+ rows? \(\S+ \w+\)", "…"),
    (r"airflow \w+ RUN", "its run"),
)


def plain(text: str) -> str:
    """The text as it is at each time, for a paragraph of Markdown."""
    for pattern, instead in PLAIN:
        text = re.sub(pattern, instead, text)
    return " ".join(text.split()).replace("<", "&lt;")


def said_by_tab(page: Any) -> str:
    """The tab's words about the failure: the state, the failed task with its message, what to do."""
    found = [page.locator(".chip:visible, h1:visible").last.inner_text()]
    for item in page.locator(".failures > li").all()[:1]:
        found.append(item.locator("b").inner_text())
        if item.locator("pre").is_visible():
            found.append(f"`{plain(item.locator('pre').inner_text())}`")
        if "next try" in (rest := item.locator("small").inner_text()):
            found.append(rest.split(" · ")[0])
    found += [one.inner_text() for one in page.locator(".held:visible, .note.warn:visible").all()]
    return plain(". ".join(one.rstrip(".") for one in found))


def said_by_status(text: str) -> str:
    """The notes on the operation: the lines below its row in the table."""
    has_notes = text.startswith("indexes")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") or not has_notes]
    return plain("; ".join(line for line in lines if not line.startswith("yes")))


class Gallery:
    """The sections of docs/failures.md: those that it has, and those that are drawn now."""

    def __init__(self) -> None:
        self.sections: dict[str, str] = {}

    def draw(self, failure: Failure, tab: str, status: str) -> None:
        """Keeps what both surfaces say."""
        picture = f"![{failure.what}](images/failed_{failure.name}.png)"
        parts = ("*Index build* says:", f"> {tab}", "`roir status` says:", f"> {status}", picture)
        self.sections[failure.what] = "\n\n".join(parts)

    def write(self) -> None:
        """Replaces the page's table and sections."""
        kept = re.findall(r"^## (.*)\n\n((?:(?!^## |^<!--).*\n)*)", PAGE.read_text(), flags=re.MULTILINE)
        self.sections = {what: text.strip() for what, text in kept} | self.sections
        table, below = ["| what failed | what helps |", "| --- | --- |"], []
        for one in (one for one in TABLE if one.what in self.sections):
            link = re.sub(r"[^\w\- ]", "", one.what.lower()).replace(" ", "-")
            table.append(f"| [{one.what}](#{link}) | {one.helps} |")
            below += ["", f"## {one.what}", "", self.sections[one.what]]
        made = "\n".join([*table, *below])
        pattern = r"(<!-- made: failures -->\n\n).*?(\n<!-- end -->)"
        page = re.sub(pattern, lambda found: f"{found[1]}{made}\n{found[2]}", PAGE.read_text(), flags=re.DOTALL)
        PAGE.write_text(page)


@pytest.fixture(scope="module")
def gallery() -> Iterator[Gallery]:
    gallery = Gallery()
    yield gallery
    gallery.write()


@pytest.fixture
def case(failure: Failure, airflow: StandaloneAirflow, dsn: str) -> Iterator[Shown]:
    for dag in (DAG, ONCE, BROKEN):
        airflow.unpause(dag)
    case = Shown(failure, airflow, dsn)
    yield case
    with suppress(Exception):
        case.mark_run("failed")
    airflow.call("DELETE", f"/api/v2/connections/{CONNECTION}")


@pytest.mark.parametrize("failure", TABLE, ids=str)
def test_a_failure_and_its_picture(failure: Failure, case: Shown, airflow: StandaloneAirflow, gallery: Gallery) -> None:
    go_on = case.to_the_moment()
    process = case.process() if failure.is_killing else None
    case.do()
    if process is not None:
        # Else the driver would go on through the open gate.
        wait_until(lambda: not is_alive(process), PATIENCE_S, "the end of the task's process")
    if failure.name not in ("long_pause", "aborted"):
        wait_until(case.is_shown_by(), PATIENCE_S, failure.what)
    go_on()
    wait_until(case.is_shown_by(), PATIENCE_S, failure.what)
    if failure.name not in ("try_failed", "dag_broken", "long_pause"):
        case.ended()
    case.age()
    query = urlencode({"dag_id": case.dag, "run_id": case.run})
    with browser_page(WIDTH, 1400) as page:
        page.goto(f"{airflow.url}/roir/run?{query}")
        page.locator(failure.ready).first.wait_for()
        # Moving parts, such as the bar, come to rest.
        page.wait_for_timeout(1_500)
        said = said_by_tab(page)
        assert failure.wanted in page.locator("main").inner_text(), said
        assert ("can't be imported" in said) is (failure.name == "dag_broken"), said
        parts = page.locator(".empty:visible, .of-failures:visible, .hero:visible, .held:visible, .note.warn:visible")
        boxes = [box for one in parts.all() if (box := one.bounding_box())]
        height = min(max(box["y"] + box["height"] for box in boxes) + 6, MOST_HEIGHT)
        keep(f"failed_{failure.name}", page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}))
    gallery.draw(failure, said, said_by_status(case.status_lines()))
