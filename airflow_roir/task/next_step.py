"""Whether it is this task's turn to drive an operation: a decision from what the control tables say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from airflow_roir.operation import Phase, Status


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
    """Drive it: nobody else does, and nobody wants it to rest."""


@dataclass(frozen=True)
class Done:
    """What this task is for has been done, by an earlier try or by somebody else."""


@dataclass(frozen=True)
class Wait:
    """Leave, and look again later. `by_switch` where the pause ends with the DAG's own switch."""

    why: str
    by_switch: bool = False


@dataclass(frozen=True)
class Stop:
    """Fail: no try of this task can help."""

    why: str


Turn = Go | Done | Wait | Stop


def decide(
    operation: OperationState, done_phases: frozenset[Phase], switch: str, dag_paused: bool, driver: str | None
) -> Turn:
    """Decide from committed state alone.

    done_phases: phases in which this task has nothing left to do.
    switch: the name under which this DAG's switch pauses; such a pause ends as soon as the DAG isn't paused.
    driver: who drives the operation now, other than this DAG run; None for nobody.

    A pause that a run took upon itself, because something failed, is no wish to rest: a later try goes on.
    """
    if operation.status == Status.COMPLETED:
        return Done()
    if operation.status in (Status.ABORTING, Status.ABORTED):
        return Stop(f"operation {operation.id} was aborted; trigger a new run to begin anew")
    if operation.status == Status.FAILED:
        return Stop(
            f"operation {operation.id} has failed and can only be aborted: {operation.error or 'no reason kept'}"
        )
    if operation.phase in done_phases:
        return Done()
    if operation.status == Status.PAUSED and operation.paused_by not in (switch, operation.owner, None):
        return Wait(f"paused by {operation.paused_by} ({operation.pause_reason}): resume it to go on")
    if driver is not None:
        return Wait(f"driven by {driver}: this run goes on when that one ends")
    if dag_paused:
        return Wait(f"paused by {switch}: unpause to resume", by_switch=True)
    return Go()
