"""A DAG run by its name as an owner, and its fate by its state. For tasks and pages, which read the state elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from airflow_roir.actor import RUN
from airflow_roir.engine.control.expected import COMES, ENDED, Fate, FateOf
from airflow_roir.task.dag_switch import actor_of_switch

OVER = ("success", "failed")
# Airflow is about to start these tasks, but has no free slot.
ABOUT_TO_START = ("scheduled", "queued")


def fates_by(read: Callable[[str, str], Fate]) -> FateOf:
    """Finds the fate of the run with an owner's name; None if the owner is no run.

    read: the fate of a run by its DAG's id and its own; called once for each run.
    """
    known: dict[tuple[str, str], Fate] = {}

    def fate_of(owner: str) -> Fate | None:
        named = RUN.fullmatch(owner)
        if named is None:
            return None
        run = (named[1], named[2])
        if run not in known:
            known[run] = read(*run)
        return known[run]

    return fate_of


def fate(state: Any, switch_off: bool, tasks: Callable[[], Iterable[Any]], dag_id: str) -> Fate:
    """The fate of a run. state, and the states of its `tasks`: as Airflow has them, texts or members of an enum.

    tasks: called only if they matter.
    """
    if _name(state) in OVER:
        return ENDED
    if switch_off:
        return Fate(switch=actor_of_switch(dag_id))
    return Fate(waits=True) if any(_name(one) in ABOUT_TO_START for one in tasks()) else COMES


def _name(state: Any) -> str:
    return str(getattr(state, "value", state))
