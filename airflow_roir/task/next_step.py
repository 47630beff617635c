"""Decides from the control tables whether it is this task's turn to drive an operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from airflow_roir.operation import BY_WINDOW, Phase, Status


class OperationState(Protocol):
    """The columns of `roir.operation` that the decision needs."""

    id: int
    status: str
    phase: str
    owner: str | None
    paused_by: str | None
    pause_reason: str | None
    error: str | None


@dataclass(frozen=True)
class Go:
    """Drive the operation: no other run does, and no user has paused it."""


@dataclass(frozen=True)
class Done:
    """The work of this task is done, by an earlier try or by another run."""


@dataclass(frozen=True)
class Wait:
    """Leave, and look again later. `by_switch`: the pause ends with the DAG's own switch."""

    why: str
    by_switch: bool = False


@dataclass(frozen=True)
class Fail:
    """Fail: no try of this task can help."""

    why: str


Turn = Go | Done | Wait | Fail


def decide(
    operation: OperationState,
    done_phases: frozenset[Phase],
    switch: str,
    dag_paused: bool,
    driver: str | None,
    aborted: str | None = None,
    window_opens: bool = False,
) -> Turn:
    """Decides from committed state alone.

    done_phases: phases in which this task has nothing left to do.
    switch: the name under which this DAG's switch pauses; such a pause ends as soon as the DAG isn't paused.
    driver: the other run that drives the operation now; None if there is none.
    aborted: the actor who aborted the operation, with the reason, if they are known.
    window_opens: go on also if a window has paused the operation: the caller then checks its windows, and waits if none
        is open.

    A run also pauses its operation if something fails: a later try resumes it.
    """
    if operation.status == Status.COMPLETED:
        return Done()
    if operation.status in (Status.ABORTING, Status.ABORTED):
        return Fail(was_aborted(operation.id, aborted))
    if operation.status == Status.FAILED:
        return Fail(
            f"operation {operation.id} has failed: {operation.error or 'no reason kept'}. Abort it, then trigger a "
            "new run"
        )
    if operation.phase in done_phases:
        return Done()
    if operation.status == Status.PAUSED and operation.paused_by == BY_WINDOW:
        if not window_opens:
            return Wait(f"{operation.pause_reason}; this run continues by itself then")
    elif operation.status == Status.PAUSED and operation.paused_by not in (switch, operation.owner, None):
        return Wait(
            f"paused by {operation.paused_by} ({operation.pause_reason}); this run continues once the operation is "
            "resumed"
        )
    if driver is not None:
        return Wait(f"driven by {driver}; this run continues when that run ends")
    if dag_paused:
        return Wait(f"paused by {switch}: unpause to resume", by_switch=True)
    return Go()


def was_aborted(operation_id: int, who: str | None) -> str:
    """A message about an aborted operation. who: the actor, with the reason, if they are known."""
    return f"operation {operation_id} was aborted{f' by {who}' if who else ''}; trigger a new run to start again"
