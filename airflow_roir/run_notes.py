"""Writes an index's name into the note of its DAG run, so that lists of runs show it (entry point `airflow.plugins`).

A task can't write its run's note: the API for tasks has no call for that. The scheduler calls listeners for each run
that starts, and saves the run afterwards.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin

from airflow_roir.one_line import one_line
from airflow_roir.task import failure

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

OURS = "airflow_roir.operators."
# Airflow's own limit of a note is 1,000 characters.
LONGEST = 200


def note_of(dag_run: Any) -> str | None:
    """The note for a run; None if the run is of another DAG, has no index, or has a note already."""
    if dag_run.note or not any(_module(task).startswith(OURS) for task in getattr(dag_run.dag, "tasks", ())):
        return None
    given = dag_run.conf or {}
    index = given.get("index") if "index" in given else dict(dag_run.dag.params.dump()).get("index")
    if not isinstance(index, str) or not index.strip():
        return None
    action = "census" if given.get("census") in (True, "true", "True") else given.get("action")
    name = one_line(index[:LONGEST], LONGEST)
    # A note is shown as Markdown; the name must not be read as that.
    return (f"{action} " if isinstance(action, str) and action.isalpha() else "") + f"`{name.replace('`', ' ')}`"


def _module(task: Any) -> str:
    return str(getattr(task, "_task_module", "") or type(task).__module__)


@hookimpl  # type: ignore[untyped-decorator]  # pluggy's marker has no types here
def on_dag_run_running(dag_run: DagRun, msg: str) -> None:
    """Sets the note, in the scheduler, before it saves the run. The scheduler logs an error of this and goes on."""
    if (note := note_of(dag_run)) is not None:
        dag_run.note = note


class RunNotes(AirflowPlugin):
    """Registers the listeners: of runs that start, and of tasks that fail (`task/failure.py`)."""

    name = "roir_run_notes"
    listeners = [sys.modules[__name__], failure]
