"""A DAG run by its name as an owner, and its fate by its state. For tasks and pages, which read the state elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable

from airflow_roir.engine.control.expected import COMES, ENDED, Fate
from airflow_roir.task.dag_switch import actor_of_switch

# As `owner_of` has it; a DAG's id has no space. `airflow user NAME` is one who has aborted it.
OWNER = re.compile(r"airflow (?!user )([\w.-]+) (.+?)(?: \[(\d+)\])?")
OVER = ("success", "failed")
# Airflow is about to start them, and has no free slot.
ABOUT_TO_START = ("scheduled", "queued")


def fate(state: str | None, switch_off: bool, tasks: Callable[[], list[str]], dag_id: str) -> Fate:
    """What is to be expected of a run. state: None if it is gone; tasks: the states of its tasks, if they matter."""
    if state is None or state in OVER:
        return ENDED
    if switch_off:
        return Fate(switch=actor_of_switch(dag_id))
    return Fate(waits=True) if any(one in ABOUT_TO_START for one in tasks()) else COMES
