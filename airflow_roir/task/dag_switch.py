"""Reads the DAG's own pause switch in a running task. All code that depends on Airflow's way of pausing is here."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowRescheduleException, AirflowRuntimeError

from airflow_roir.actor import SWITCH

if TYPE_CHECKING:
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

# A rescheduled task keeps its try number. If it starts again before the executor's report on the stretch that
# just ended has arrived, the scheduler takes that report for the new stretch and fails it: seen at 0 to 5 s, never
# in 16 tries at 15 s and more.
LEAVE_S = 16
# A look costs one short-lived process, so a task that waits for another run or a user looks again after this time, and
# less and less often: after a tenth of the time that it has waited, at most after `MOST_S`.
LOOK_AGAIN_S = 30
MOST_S = 300


def is_dag_paused(ti: RuntimeTaskInstanceProtocol) -> bool | None:
    """True if the switch of the task's DAG is off now; None if that isn't known: then continue.

    Blocks while the API server can't be reached. Raises EOFError or OSError when the task's supervisor is gone.
    """
    try:
        return bool(ti.get_dag(ti.dag_id).is_paused)
    except AirflowRuntimeError:
        return None


def actor_of_switch(dag_id: str) -> str:
    """The actor of a pause by this DAG's switch, as the `event` table shows it.

    By this name a later stretch of the task knows that the pause ends when the switch is turned on.
    """
    return f"{SWITCH}{dag_id}"


def look_again_s(waited: float, least: int = LOOK_AGAIN_S) -> int:
    """The seconds until the next look of a task that has waited for these seconds. least: at first."""
    return int(min(max(least, waited / 10), MOST_S))


def leave(seconds: int) -> AirflowRescheduleException:
    """The exception that ends this stretch of the task: it costs no retry, and while the DAG is paused Airflow doesn't
    start the next one.

    seconds: earliest start of the next stretch from now; at least `LEAVE_S`, see there.
    """
    return AirflowRescheduleException(datetime.now(timezone.utc) + timedelta(seconds=max(seconds, LEAVE_S)))
