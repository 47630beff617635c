"""An error that no retry can help fails a task at once; what may heal costs a try. For every operator."""

from __future__ import annotations

import inspect
import io
import json
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psycopg2
import pytest
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError
from sqlalchemy.exc import TimeoutError as PoolTimeout

import airflow_roir.operators
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.engine.work.worker import worker_failed
from airflow_roir.errors import Fenced, InvalidInput, LockNotAcquired, SourceChanged, SparkFailed
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.spark import __main__ as driver
from airflow_roir.spark import task as spark_worker
from airflow_roir.spark.driver_process import PERMANENT
from tests.airflow.test_operators import INDEX, WHAT, MemoryStore, Task, build, context, driver_code, prepare

__all__ = ["context", "driver_code"]


def refused(state: str | None, kind: type[psycopg2.Error] = psycopg2.Error, text: str = "no such thing") -> DBAPIError:
    """An error of the server with this SQLSTATE."""
    return DBAPIError("SELECT 'secret'", None, type(kind.__name__, (kind,), {"pgcode": state})(text))


NEVER: dict[str, BaseException] = {
    "column": refused("42703"),
    "table": refused("42P01"),
    "function": refused("42883"),
    "right": refused("42501"),
    "value": refused("22P02"),
    "feature": refused("0A000"),
    "schema": refused("3F000"),
    "dsn": refused(None, psycopg2.ProgrammingError),
    "driver's own": psycopg2.ProgrammingError("no results to fetch"),
    "argument": ArgumentError("not an expression"),
    "session": InvalidRequestError("closed"),
    "shape": SourceChanged("the table has changed"),
    "worker": worker_failed(1, refused("42703")),
}
PASSES: dict[str, BaseException] = {
    "connection": refused("08006"),
    "no answer": refused(None, psycopg2.OperationalError),
    "memory": refused("53200"),
    "room": refused("53100"),
    "shutdown": refused("57P01"),
    "cancelled": refused("57014"),
    "deadlock": refused("40P01"),
    "lock": refused("55P03"),
    "disk": refused("58030"),
    "pool": PoolTimeout("no session left"),
    "blockers": LockNotAcquired("blocked"),
    "spark": SparkFailed("no executor"),
    "worker": worker_failed(1, refused("53100")),
}


@pytest.mark.parametrize("case", NEVER)
def test_what_every_try_would_meet_is_permanent(case: str) -> None:
    assert is_permanent(NEVER[case])


@pytest.mark.parametrize("case", PASSES)
def test_what_may_heal_is_not(case: str) -> None:
    assert not is_permanent(PASSES[case])


@pytest.mark.parametrize("cause", [refused("42703"), refused("53100")])
def test_sparks_rows_keep_whether_a_workers_error_is_permanent(
    monkeypatch: pytest.MonkeyPatch, cause: DBAPIError
) -> None:
    def fails(*_of: Any) -> Any:
        raise worker_failed(1, cause)

    monkeypatch.setattr(spark_worker.worker, "work", fails)
    found = spark_worker.error_of(list(spark_worker.work(None, None, "build", 1)))  # type: ignore[arg-type]
    assert found is not None
    assert (is_permanent(found), str(found)) == (is_permanent(cause), str(worker_failed(1, cause)))


def _operators() -> dict[str, type[BaseOperator]]:
    """Every operator that a DAG's author can name."""
    found: dict[str, type[BaseOperator]] = {}
    for one in pkgutil.iter_modules(airflow_roir.operators.__path__, "airflow_roir.operators."):
        for name, each in vars(import_module(one.name)).items():
            if inspect.isclass(each) and issubclass(each, BaseOperator) and each.__module__ == one.name:
                found[name] = each
    return {name: each for name, each in found.items() if name.endswith("Operator") and not inspect.isabstract(each)}


OPERATORS = _operators()
GIVEN = {"index": INDEX, "table": "item", "keys": "kind", "partition": "item_1", "bounds": "DEFAULT", "reason": "test"}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("state", ["42703", "57P01"])
def test_each_operator_fails_at_once_if_no_retry_can_help(
    monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    assert len(OPERATORS) >= 14
    monkeypatch.setenv("AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres", "host": "nowhere"}))

    def fails(*_of: Any, **_more: Any) -> Any:
        raise refused(state)

    monkeypatch.setattr(Database, "transaction", fails)
    monkeypatch.setattr(Database, "retry", fails)
    of = OPERATORS[name]
    takes = {one for each in of.__mro__ for one in inspect.signature(each).parameters}
    given = {key: value for key, value in GIVEN.items() if key in takes}
    operator = of(task_id="one", postgres_conn_id="warehouse", **given)
    with pytest.raises(Exception) as ending:  # noqa: PT011 - its class is asserted
        operator.execute({"ti": Task(), "task_state_store": MemoryStore(), "outlet_events": {}})  # type: ignore[arg-type]
    if state == "42703":
        assert type(ending.value) is AirflowFailException
        assert "no such thing. A retry can't help: remove the cause, then clear the task" in str(ending.value)
        assert "secret" not in str(ending.value)
    else:
        assert not isinstance(ending.value, AirflowFailException)


@pytest.mark.parametrize("code", [PERMANENT, 1])
def test_a_driver_says_whether_a_retry_can_help(context: dict[str, Any], driver_code: Any, code: int) -> None:
    operation = prepare(context)
    driver_code(f"import sys; print('no such column', file=sys.stderr); sys.exit({code})")
    with pytest.raises(AirflowException, match="no such column") as failure:
        build(context, operation)
    assert isinstance(failure.value, AirflowFailException) == (code == PERMANENT)


HANGS = """
import signal, sys, time
from tests.airflow.test_operators import TAKE_UP
exec(TAKE_UP)
def leave(*_):
    print("roir: interrupted; continue with: roir resume public.item_by_kind")
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
while True:
    time.sleep(0.05)
"""


@pytest.mark.sample(0)
@pytest.mark.parametrize("state", ["42703", "58030"])
def test_the_cause_stands_before_the_drivers_end_and_the_advice_fits(
    context: dict[str, Any],
    shop: Any,
    driver_code: Callable[[str], Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
) -> None:
    operation = prepare(context)
    driver_code(HANGS)
    operator = BuildIndexOperator(task_id="build", operation_id=operation, **WHAT)

    def fails(*_of: Any) -> Any:
        if operations.find_operation(shop.database, INDEX).heartbeat_at is not None:
            raise refused(state)

    monkeypatch.setattr("airflow_roir.task.progress.Progress.turn", fails)
    capsys.readouterr()
    with pytest.raises(Exception, match="no such thing") as ending:
        operator.execute(context)  # type: ignore[arg-type]
    assert isinstance(ending.value, AirflowFailException) == (state == "42703")
    said = capsys.readouterr()
    log = said.out + said.err
    assert "continue with: roir resume" not in log
    cause = log.index("The task ends: no such thing. Everything committed stays.")
    assert cause < log.index("Spark's driver was interrupted")
    assert ("remove the cause, then clear the task" in log, "The next try continues" in log) == (
        (True, False) if state == "42703" else (False, True)
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (refused("42703"), PERMANENT),
        (refused("53100"), 1),
        (SourceChanged("the table has changed"), PERMANENT),
        (InvalidInput("a name"), InvalidInput.exit_code),
        (LockNotAcquired("blocked"), 1),
        (Fenced("a newer run"), Fenced.exit_code),
    ],
)
def test_the_drivers_exit_code_says_it_too(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def fails(*_of: Any, **_more: Any) -> Any:
        raise error

    monkeypatch.setattr("airflow_roir.engine.lifecycle.drive", fails)
    options = driver._parser().parse_args(["--index", INDEX])
    voice = io.StringIO()
    assert driver._drive(None, options, None, voice, None) == code  # type: ignore[arg-type]
    assert "secret" not in voice.getvalue()
