"""The fates of DAG runs: which of them have ended, wait or are switched off, as a running task can know it.

A task asks Airflow's server for the state of any run; the pages read Airflow's database (`page/targets.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.configuration import conf
from airflow.sdk.exceptions import AirflowRuntimeError

from airflow_roir.engine import abort
from airflow_roir.engine.control import expected, operations
from airflow_roir.engine.control.expected import ENDED, Fate, FateOf, Unknown
from airflow_roir.errors import NotFound
from airflow_roir.task.roir_operator import owner_of
from airflow_roir.task.run_state import OVER, fate, fates_by

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from airflow_roir.engine.database import Database

# A task that begins has a driver with a heartbeat within this time: Spark starts slowly on a busy machine.
START_S = 180
# The longest delay of a retry, as Airflow bounds it.
MOST_DELAY_S = 86_400.0
# The time for the scheduler's turns and the start of a process, besides the times that Airflow's configuration names.
SPARE_S = 90


def fates(ti: RuntimeTaskInstanceProtocol) -> FateOf:
    """Finds the fate of the run with an owner's name; asks Airflow's server once for each run."""
    return fates_by(lambda dag_id, run_id: _asked(ti, dag_id, run_id))


def _asked(ti: RuntimeTaskInstanceProtocol, dag_id: str, run_id: str) -> Fate:
    state = _if_there(lambda: ti.get_dagrun_state(dag_id, run_id))
    dag = None if state is None else _if_there(lambda: ti.get_dag(dag_id))
    if state is None or dag is None:
        return ENDED

    def tasks() -> Iterable[Any]:
        found: dict[str, dict[str, Any]] = _if_there(lambda: ti.get_task_states(dag_id, run_ids=[run_id])) or {}
        return found.get(run_id, {}).values()

    return fate(state, bool(dag.is_paused), tasks, dag_id)


def _if_there(ask: Callable[[], Any]) -> Any:
    """The answer; None if the thing doesn't exist. Raises Unknown."""
    try:
        return ask()
    except AirflowRuntimeError as error:
        if (error.error.detail or {}).get("status_code") == 404:
            return None
        raise Unknown(str(error)) from None
    except (EOFError, OSError) as error:
        raise Unknown(str(error)) from None


def expect(
    database: Database,
    operation_id: int,
    task: Any,
    ti: RuntimeTaskInstanceProtocol,
    within_s: int,
    last_try: bool = False,
) -> None:
    """Writes that this task drives the operation within these seconds, or looks again. last_try: as the engine has it;
    a task that leaves to look again keeps its try."""
    expected.expect(database, operation_id, owner_of(ti), within_s, grace_s(task, ti.try_number), last_try)


def is_last_try(ti: RuntimeTaskInstanceProtocol) -> bool:
    """True if Airflow won't try the task again when it fails."""
    return bool(ti.try_number > int(getattr(ti, "max_tries", ti.try_number)))


def leaves(
    database: Database, operation_id: int, task: Any, ti: RuntimeTaskInstanceProtocol, within_s: int
) -> Cause | None:
    """As `expect`, for a task that Airflow ends. If its run has ended, too, or the task was marked, writes that no task
    will look again. Returns why Airflow ends the task, None if it isn't known: as at a shutdown, it comes back.
    """
    is_lost = False
    try:
        found, cause = fates(ti)(owner_of(ti)), _cause(ti)
    except Unknown:
        # Airflow doesn't hear that this task leaves, either.
        found, cause, is_lost = None, None, True
    if (found is not None and found.ended) or (cause is not None and not cause.comes_back):
        expected.has_ended(database, operation_id, owner_of(ti))
    else:
        expect(database, operation_id, task, ti, within_s, is_lost and is_last_try(ti))
    return cause


@dataclass(frozen=True)
class Cause:
    """Why Airflow ends a task. comes_back: the task will be tried again."""

    text: str
    comes_back: bool = False


def _cause(ti: RuntimeTaskInstanceProtocol) -> Cause | None:
    """Raises Unknown."""
    of_map = {} if ti.map_index is None or ti.map_index < 0 else {"map_index": ti.map_index}
    runs = _if_there(lambda: ti.get_task_states(ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], **of_map))
    states = list((runs or {}).get(ti.run_id, {}).values())
    if runs is not None and ti.run_id in runs and not states:
        return None
    state = str(getattr(states[0], "value", states[0])) if states else None
    if state == "running":
        return None
    if state in OVER:
        return Cause(f"its task {ti.task_id} was marked as {state}")
    if state == "skipped":
        return Cause("its run has reached its dagrun_timeout, or was marked")
    if not states:
        return Cause("its run was deleted")
    return Cause(f"its task {ti.task_id} was cleared", comes_back=True)


def await_turn(database: Database, operation_id: int, task: Any, ti: RuntimeTaskInstanceProtocol) -> None:
    """Writes that a later task of this run drives the operation, whenever its turn comes."""
    expected.expect(database, operation_id, owner_of(ti), None, grace_s(task, ti.try_number))


def look_at_others(database: Database, index: str, ti: RuntimeTaskInstanceProtocol, log: Any) -> None:
    """For a task that waits for another run's operation: warns if no run drives that operation any more.

    Aborts an operation that has been abandoned for longer than its options allow.
    """
    try:
        operation = operations.find_operation(database, index).id
    except NotFound:
        return
    expected.settle_runs(database, fates(ti), [operation])
    abort.settle_pauses(database, owner_of(ti), operation, lambda pause: log.warning("%s", pause.text), log.info)


def grace_s(task: Any, tries: int) -> int:
    """The seconds of silence after which a run is gone for good: Airflow finds a task dead, waits, and tries again.

    task: with Airflow's own `retry_delay` and so on. tries: the number of tries until now, this one included.
    """
    noticed = conf.getint("scheduler", "task_instance_heartbeat_timeout", fallback=300)
    looks = conf.getfloat("scheduler", "task_instance_heartbeat_timeout_detection_interval", fallback=10.0)
    delay = _seconds(task.retry_delay)
    if grows := task.retry_exponential_backoff:
        # Airflow's own formula, whose spread at most doubles the delay. Former versions of Airflow have True here.
        delay *= 2 * (2.0 if grows is True else float(grows)) ** min(max(tries - 1, 0), 20)
    if task.max_retry_delay is not None:
        delay = min(delay, _seconds(task.max_retry_delay))
    return int(noticed + looks + min(delay, MOST_DELAY_S) + SPARE_S)


def _seconds(delay: timedelta | float) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
