"""Runs that fail: the page says which task did, why in its own words, and where it goes on. On one real Airflow."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import psycopg2.errors
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowTaskTimeout
from sqlalchemy.exc import OperationalError, StatementError

from airflow_roir.errors import InvalidInput
from airflow_roir.hooks.roir import dsn_of
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.prepare import PrepareIndexBuildOperator
from airflow_roir.page.answer import LONGEST_TEXT, bounded
from airflow_roir.page.failures import ENDS, OURS, Failure, failure_of, shown
from airflow_roir.task import failure
from servers.airflow import wait_until
from tests.airflow.test_marks import CONNECTION, CONTROL, DAG, ONCE, PATIENCE_S, Case, airflow
from tests.airflow.test_marks import Row as Deed

__all__ = ["airflow"]


# --- what a failing try keeps


class Ti:
    """A running task instance, as a listener gets it."""

    def __init__(self, task: Any) -> None:
        self.task, self.try_number = task, 3
        self.kept: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        self.kept[key] = value


def kept(error: BaseException | str | None, task: Any = None) -> Any:
    ti = Ti(task or BuildIndexOperator(task_id="build", index="i"))
    failure.on_task_instance_failed("running", ti, error)
    return ti.kept.get(failure.KEY)


COMPLAINTS = "2 values can't be used:\n- keys: there is no column <b>x</b>\n- ranges: 0 is too few"
DRIVER = OperationalError("SELECT %(secret)s", {"secret": "row 4711"}, Exception("gone\nCONTEXT:  row 4711"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AirflowFailException(COMPLAINTS), COMPLAINTS),
        (InvalidInput("no"), "no"),
        (AirflowException("operation 7 on index i, phase build: interrupted"), None),
        (DRIVER, "gone"),
        (psycopg2.errors.UniqueViolation("is there already\nDETAIL:  Key (card)=(4711)"), "is there already"),
        (StatementError("no", "SELECT %(card)s", {"card": "4711"}, ValueError("no")), "ValueError: no"),
        (AirflowTaskTimeout(), failure.TIME_OUT),
        (SystemExit(3), "Its process ended with exit code 3"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (AirflowException(" "), "AirflowException"),
        (InvalidInput("a\0b\ud800"), "a\N{REPLACEMENT CHARACTER}b?"),
        (InvalidInput("no server\n\tIs it running?"), "no server\n    Is it running?"),
        (InvalidInput("x" * 20_000), "x" * failure.LONGEST),
    ],
)
def test_a_failing_try_keeps_its_message_whole_and_no_values_of_rows(error: Any, message: str | None) -> None:
    assert kept(error) == {"try_number": 3, "message": str(error) if message is None else message}


def test_the_message_has_no_password() -> None:
    connection: Any = SimpleNamespace(
        conn_id="c", conn_type="postgres", host="h", port=1, login="u", password="open sesame", schema="d"
    )
    connection.extra_dejson = {}
    dsn = dsn_of(connection)
    assert kept(AirflowException(f"invalid dsn: {dsn}, password open sesame"))["message"].count("***") == 2


def test_other_tasks_and_servers_keep_nothing() -> None:
    class Own(BuildIndexOperator):
        """A user's own."""

    mapped = SimpleNamespace(operator_class=PrepareIndexBuildOperator)
    no = ValueError("no")
    assert kept(no, Own(task_id="own", index="i"))
    assert kept(no, mapped)
    # Found: the scheduler's own words, "the task instance's state attribute is running", as a killed task's message.
    assert kept("finished with state failed", mapped) is None
    assert kept(None) is None
    assert kept(no, SimpleNamespace()) is None
    # A task of one of our DAGs, or of its copy, by the tag.
    assert kept(no, SimpleNamespace(get_dag=lambda: SimpleNamespace(tags={"roir"})))
    assert kept(no, SimpleNamespace(get_dag=lambda: SimpleNamespace(tags={"mine"}))) is None
    assert kept(no, SimpleNamespace(get_dag=lambda: None)) is None


def test_a_message_reaches_the_page_whole() -> None:
    text = "x" * (LONGEST_TEXT + 1)
    [shown] = bounded([Failure("t", text).as_dict(True)])
    assert shown["message"] == text
    hidden = Failure("t", text).as_dict(False)
    assert (hidden["text"], hidden["message"]) == ("t. You may not read this task's log, nor its message", "")
    assert Failure("t").as_dict(False)["text"] == "t"
    assert len(bounded(text)) == LONGEST_TEXT


def test_of_many_failures_a_tasks_own_page_shows_its_own_first() -> None:
    each = [Failure(str(n), task_id="build", map_index=n) for n in range(25)]
    found = [*each, Failure("finalize was not started")]
    assert [one.text for one in shown(found, "", -1)] == [
        *map(str, range(20)),
        "5 more tasks have failed",
        "finalize was not started",
    ]
    assert [one.text for one in shown(found, "build", 24)][:2] == ["24", "0"]
    assert shown(found[-1:], "build", 24) == found[-1:]


def test_all_our_operators_are_known() -> None:
    """A task of an operator that isn't known wouldn't be looked at in a user's own DAG."""
    import importlib
    import pkgutil

    from airflow.sdk import BaseOperator

    from airflow_roir import operators

    found = {
        name
        for one in pkgutil.iter_modules(operators.__path__)
        for name, value in vars(importlib.import_module(f"airflow_roir.operators.{one.name}")).items()
        if isinstance(value, type)
        and issubclass(value, BaseOperator)
        and value.__module__ == f"airflow_roir.operators.{one.name}"
    }
    assert set(OURS) == found


# --- what the page says of a run

BEGAN = datetime(2026, 1, 31, 10, 0, tzinfo=timezone.utc)


def instance(**more: Any) -> Any:
    """A task instance as Airflow's database has it."""
    known = {"task_id": "g.build", "map_index": 2, "state": "failed", "try_number": 2, "max_tries": 6}
    known |= {"operator": "BuildIndexOperator", "start_date": BEGAN, "queued_dttm": BEGAN}
    known |= {"end_date": BEGAN + timedelta(seconds=2)}
    return SimpleNamespace(**known | more)


def event(name: str, extra: Any = None, **more: Any) -> Any:
    """An event of Airflow's log."""
    known = {"event": name, "task_id": "g.build", "map_index": 2, "try_number": 2, "extra": json.dumps(extra)}
    return SimpleNamespace(**known | {"dttm": BEGAN + timedelta(seconds=1)} | more)


MARK = event("patch_task_instance", {"new_state": "failed", "map_index": "2"}, map_index=None, try_number=None)
ONE = "Task g.build [2] has failed"
AT_2 = f"{ONE} at try 2 of 7"
DIED = "its process ended without a message: it was killed, or ran out of memory. Its log may say more"
KILLED = "it was killed before its end (often: out of memory, kill -9, a lost machine), or never began"
MARKED = "a user marked it as failed, as Airflow's Audit Log shows"


@pytest.mark.parametrize(
    ("of_task", "said", "events", "text"),
    [
        ({}, (2, "no"), [], AT_2),
        ({"try_number": 1, "map_index": -1}, (1, "no"), [], "Task g.build has failed"),
        ({"state": "up_for_retry"}, (2, "no"), [], "Try 2 of 7 of task g.build [2] has failed"),
        # Cleared after its last try: Airflow counts on.
        ({"try_number": 8, "max_tries": 13}, (8, "no"), [], f"{ONE} at try 8 of 14"),
        ({}, (0, ""), [], f"{AT_2}: {DIED}"),
        ({"state": "up_for_retry"}, (0, ""), [], f"Try 2 of 7 of task g.build [2] has failed: {DIED}"),
        ({}, (1, "no"), [], f"{AT_2}: {DIED}. Its try 1 had said"),
        ({"start_date": None}, (0, ""), [], f"{AT_2}: it never started"),
        ({"operator": "_PythonDecoratedOperator"}, (0, ""), [], f"{AT_2}: its log says why"),
        ({}, (0, ""), [event("state mismatch")], f"{AT_2}: {KILLED}"),
        *(({}, (0, ""), [event(name)], f"{AT_2}: {words}") for name, words in ENDS.items()),
        ({}, (0, ""), [event("heartbeat timeout", try_number=1)], f"{AT_2}: {DIED}"),
        ({}, (0, ""), [event("heartbeat timeout", map_index=1)], f"{AT_2}: {DIED}"),
        ({}, (0, ""), [MARK], f"{AT_2}: {MARKED}"),
        ({}, (2, "no"), [MARK], f"{AT_2}, since {MARKED}; before, it had said"),
        ({}, (0, ""), [event("patch_task_instance", {"new_state": "success"})], f"{AT_2}: {DIED}"),
        ({}, (0, ""), [event("patch_task_instance", {"new_state": "failed", "map_index": 1})], f"{AT_2}: {DIED}"),
        ({}, (0, ""), [event("patch_task_instance", {"new_state": "failed"}, task_id="b")], f"{AT_2}: {DIED}"),
        # Kept by a backend of XComs, which only tasks can read.
        ({}, (None, ""), [], f"{AT_2}: its log says why"),
        # It failed by itself, and then its run was marked.
        (
            {},
            (2, "no"),
            [event("patch_dag_run", {"state": "failed"}, dttm=BEGAN + timedelta(seconds=3), task_id=None)],
            AT_2,
        ),
        # The task was cleared after that.
        ({}, (0, ""), [event("patch_dag_run", {"state": "failed"}, dttm=BEGAN - timedelta(days=1))], f"{AT_2}: {DIED}"),
        ({}, (0, ""), [event("patch_dag_run", {"state": "failed"}, task_id=None)], f"{AT_2}: {MARKED}"),
        ({}, (0, ""), [event("bulk_task_instances", {"actions": [{"new_state": "failed"}]})], f"{AT_2}: {MARKED}"),
    ],
)
def test_how_a_task_failed_in_words(of_task: Any, said: tuple[int | None, str], events: list[Any], text: str) -> None:
    found = failure_of(instance(**of_task), *said, events)
    assert (found.text, found.message) == (text, said[1])


@dataclass(frozen=True)
class Row:
    """task and deed: as in `test_marks`. text, message: the page's first failure; `…` is any text. rest: of the others.

    closed: no server listens at the connection's address.
    """

    name: str
    text: str
    message: str
    deed: Deed
    rest: tuple[str, ...] = ()
    closed: bool = False
    conf: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


NOT_STARTED = "Not started, since a task before failed: "
AFTER_FIRST = (NOT_STARTED + "prepare, build, finalize",)
AFTER_BUILD = (NOT_STARTED + "finalize",)
ENDED = Deed("prepare", "after", "nothing", dag=ONCE)
WHILE = "while"
TABLE = [
    Row(
        "an unknown key",
        "Task verify_before has failed",
        "The run's conf has keys that DAG rebuild_once has no parameter for (Keys: did you mean keys?). Nothing was "
        "done. Trigger the DAG again with the right names",
        ENDED,
        AFTER_FIRST,
        conf={"Keys": "k"},
    ),
    Row(
        "a task of our DAG that is no operator of ours",
        "Task choose has failed",
        "…that DAG control_index has no parameter for…",
        Deed("choose", "after", "nothing", dag=CONTROL),
        (NOT_STARTED + "abort, change, pause, resume, revert",),
    ),
    Row(
        "a refused value",
        "Task verify_before has failed",
        "…no column…",
        ENDED,
        AFTER_FIRST,
        conf={"keys": "<b>nope</b>"},
    ),
    Row(
        "no connection",
        "Task verify_before has failed",
        "…nowhere…",
        ENDED,
        AFTER_FIRST,
        conf={"postgres_conn_id": "nowhere"},
    ),
    Row(
        "the database refuses",
        "Task verify_before has failed",
        "…onnection refused…",
        ENDED,
        AFTER_FIRST,
        closed=True,
    ),
    Row(
        "build killed",
        f"Task build has failed: {DIED}",
        "",
        Deed("build", WHILE, "process killed", dag=ONCE),
        AFTER_BUILD,
    ),
    Row(
        "build and its supervisor killed",
        f"Task build has failed: {KILLED}",
        "",
        Deed("build", WHILE, "killed", dag=ONCE),
        AFTER_BUILD,
    ),
    Row(
        "build timed out",
        "Task build has failed",
        failure.TIME_OUT,
        Deed("build", WHILE, "timed out", dag=ONCE),
        AFTER_BUILD,
    ),
    Row(
        "build marked failed",
        "Task build has failed: a user marked it as failed, as Airflow's Audit Log shows",
        "",
        Deed("build", WHILE, "marked failed", dag=ONCE),
        AFTER_BUILD,
    ),
    Row(
        "run marked failed",
        "Task build has failed: a user marked it as failed, as Airflow's Audit Log shows",
        "",
        Deed("build", WHILE, "run marked failed", dag=ONCE),
    ),
    Row(
        "run timed out",
        "This run took longer than the dagrun_timeout of rebuild_once, 6:00:00, which counts paused time, too. "
        "Everything that was committed stays",
        "",
        Deed("build", WHILE, "run timed out", dag=ONCE),
    ),
    Row("finalize fails", "Task finalize has failed", failure.TIME_OUT, Deed("finalize", WHILE, "timed out", dag=ONCE)),
    Row(
        "verify_before fails",
        "Task verify_before has failed",
        failure.TIME_OUT,
        Deed("verify_before", WHILE, "timed out", dag=ONCE, rebuild=True, conf={"verify": "before"}),
        (NOT_STARTED + "prepare, build, finalize",),
    ),
]


class Failing(Case):
    """A case that may also kill the task's process alone."""

    def do(self) -> None:
        if self.row.deed == "process killed":
            self.process().send_signal(signal.SIGKILL)
        elif self.row.deed != "nothing":
            super().do()

    def shown(self, user: str = "admin") -> dict[str, Any]:
        query = urlencode({"dag_id": self.dag, "run_id": self.run})
        found: dict[str, Any] = self.airflow.call("GET", f"/roir/api/run?{query}", user=user)
        return found


@pytest.fixture
def failing(request: pytest.FixtureRequest, airflow: Any, dsn: str) -> Any:
    """Makes a case of a row; its connections are gone afterwards."""
    for dag in (DAG, ONCE):
        airflow.unpause(dag)

    def make(row: Row) -> Failing:
        case = Failing(replace(row.deed, conf=row.deed.conf | row.conf), airflow, dsn)
        if row.closed:
            of = f"/api/v2/connections/{CONNECTION}"
            fields = {"host": "127.0.0.1", "port": 9, "login": "app", "password": "sesame", "schema": "app"}
            airflow.call("PATCH", of, {"connection_id": CONNECTION, "conn_type": "postgres", **fields})
        return case

    yield make
    airflow.call("DELETE", f"/api/v2/connections/{CONNECTION}")


def says(wanted: str, said: str) -> bool:
    if wanted.startswith("…"):
        return wanted.strip("…") in said
    return wanted == said


@pytest.mark.sample(0, 2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_the_page_of_a_failed_run_says_which_task_failed_and_why(row: Row, failing: Callable[[Row], Failing]) -> None:
    """Found: the tab of a run that had failed: "This run builds and verifies no index", or endless "Trying again"."""
    case = failing(row)
    go_on = case.to_the_moment()
    case.do()
    if row.deed.moment == WHILE:
        wait_until(lambda: case.airflow.run_state(case.dag, case.run) == "failed", PATIENCE_S, "the run's end")
    go_on()
    case.ended()
    failures = case.shown()["failures"]
    assert failures, case.shown()
    first, *rest = failures
    assert first["text"] == row.text
    assert says(row.message, first["message"]), first
    assert "sesame" not in str(failures)
    assert tuple(one["text"] for one in rest) == row.rest
    assert first["task_id"] == ("" if row.name == "run timed out" else row.text.split()[1])
