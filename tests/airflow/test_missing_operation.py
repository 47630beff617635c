"""The operation that a build's tasks take for their own: each way an id may come × each state of the index's newest
operation.

A task must not succeed having done nothing, and must not drive what another run began for something else. The id comes
by the XCom of `prepare`, which may have been deleted (`airflow db clean`, a user), or never written (prepare was marked
as success); or it is one of another run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowRescheduleException

from airflow_roir.assets import published_alias
from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import operations, requests
from airflow_roir.operation import PHASES_OF
from airflow_roir.operators.build import BuildIndexOperator
from airflow_roir.operators.finalize import FinalizeIndexBuildOperator
from airflow_roir.options import BuildOptions
from tests.airflow.test_operators import INDEX, WHAT, context, driver_code

__all__ = ["context", "driver_code"]
pytestmark = pytest.mark.sample(3)

OWN, OTHER = "airflow rebuild_index run_1", "airflow rebuild_index run_0"
TASKS: dict[str, Any] = {"build": BuildIndexOperator, "finalize": FinalizeIndexBuildOperator}
# As a template renders what isn't there, and as the output of a task gives it.
IDS = ("gone", "None", "unset", "given")
PHASES = {kind.value: phases[0].value for kind, phases in PHASES_OF.items()}
STATES = ("running", "paused", "failed", "aborting", "completed", "aborted")
# The run that began the operation, or that has adopted it.
PARTS = ("own", "other", "adopted")
CASES = [
    (task, given, kind, status, part)
    for task, given, kind, status, part in itertools.product(TASKS, IDS, PHASES, STATES, PARTS)
    if (status != "aborted" or kind != "create")
]


def begin(shop: Any, kind: str, status: str, part: str, task: str = "build") -> int:
    """An operation of that kind in that state, as the control tables hold it."""
    owner = OWN if part == "own" else OTHER
    definition = IndexDefinition.parse(INDEX, "item", "kind", "price")
    found = prepare.prepare(shop.database, definition, BuildOptions(batch_rows=1000), owner).operation_id
    if part == "adopted":
        prepare.prepare(shop.database, definition, BuildOptions(), OWN)
    phase = "done" if status == "completed" else PHASES[kind]
    if task == "finalize" and phase == "build":
        phase = "fold"
    shop.run(
        "SET session_replication_role = replica; "
        f"UPDATE roir.operation SET kind = '{kind}', status = '{status}', phase = '{phase}', owner = '{owner}', "
        f"paused_by = CASE WHEN '{status}' = 'paused' THEN '{owner}' END, "
        f"pause_reason = CASE WHEN '{status}' = 'paused' THEN 'a test' END, "
        f"paused_at = CASE WHEN '{status}' = 'paused' THEN now() END, "
        f"error = CASE WHEN '{status}' = 'failed' THEN 'a test' END, "
        f"finished_at = CASE WHEN '{status}' IN ('completed', 'aborted') THEN now() END, heartbeat_at = NULL; "
        f"UPDATE roir.generation SET status = 'active', capture_mode = 'active' WHERE '{status}' = 'completed'"
    )
    return found


def expected(given: str, kind: str, status: str, part: str) -> str:
    """`drives`, `done` or `fails`."""
    if kind not in ("create", "rebuild"):
        return "fails"
    unfinished = status in ("running", "paused")
    if given in ("gone", "None"):
        return "drives" if unfinished and part != "other" else "fails"
    if unfinished:
        return "drives"
    return "done" if status == "completed" and part != "other" else "fails"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("task", "given", "kind", "status", "part"), CASES)
def test_a_task_drives_its_own_operation_or_fails(
    context: dict[str, Any],
    driver_code: Callable[[str], list[list[str]]],
    shop: Any,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    given: str,
    kind: str,
    status: str,
    part: str,
) -> None:
    """Found: a task whose *prepare* had no XCom any more (deleted, cleaned, or marked as success) took the index's
    newest operation for its own: *finalize* said "Published" of an index that the run had not built, with an asset
    event, of kind `verify` if that was the newest. It holds: the task drives the unfinished build that its own run has
    begun or adopted; without one it fails and names the remedy.
    """
    number = begin(shop, kind, status, part, task)
    asked = driver_code("raise SystemExit(9)")
    folded: list[Any] = []

    def finalize(*_: Any, **wish: Any) -> Any:
        folded.append(wish["operation"])
        raise AirflowException("driven")

    monkeypatch.setattr("airflow_roir.operators.finalize.lifecycle.finalize", finalize)
    operator = TASKS[task](task_id=task, operation_id={"unset": None}.get(given, str(number)), **WHAT)
    if given in ("gone", "None"):
        operator.operation_id = None if given == "gone" else "None"
    try:
        operator.execute(context)
        came = "done"
    except AirflowRescheduleException:
        came = "waits"
    except AirflowFailException:
        came = "fails"
    except AirflowException:
        came = "drives"
    driven = asked or folded
    assert bool(driven) == (came == "drives")
    assert came == expected(given, kind, status, part)
    events = context["outlet_events"][published_alias()].added
    assert bool(events) == (task == "finalize" and came == "done")


def test_a_missing_id_says_how_to_come_to_one(context: dict[str, Any], shop: Any) -> None:
    begin(shop, "rebuild", "completed", "own")
    operator = BuildIndexOperator(task_id="build", operation_id="{{ ti.xcom_pull(task_ids='prepare') }}", **WHAT)
    operator.operation_id = "None"
    with pytest.raises(AirflowFailException, match=r"XCom of the prepare task is gone.*Clear the prepare task"):
        operator.execute(context)  # type: ignore[arg-type]


def test_what_begins_between_the_look_and_the_run_is_not_driven(
    context: dict[str, Any], shop: Any, driver_code: Callable[[str], list[list[str]]]
) -> None:
    """The driver is given the operation's id, not the index's name alone."""
    number = begin(shop, "create", "running", "own")
    asked = driver_code("raise SystemExit(9)")
    with pytest.raises(AirflowException):
        BuildIndexOperator(task_id="build", operation_id=number, **WHAT).execute(context)  # type: ignore[arg-type]
    assert asked[0][asked[0].index("--operation") + 1] == str(number)
    with pytest.raises(operations.IllegalTransition, match=f"operation {number} .*has begun since"):
        requests.pause(shop.database, INDEX, "test", operation=number - 1)
