"""The task of a run that will drive an operation, and when, as Airflow knows it."""

from __future__ import annotations

from datetime import datetime, timezone

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.taskreschedule import TaskReschedule
from airflow.utils.session import create_session
from sqlalchemy import select
from sqlalchemy.orm import Session

from airflow_roir.engine.snapshot.parts import NextTask
from airflow_roir.page.failures import next_try
from airflow_roir.page.targets import Found, Run

# The states of a task that Airflow starts as soon as it can; None is the state before the first.
STARTS = (None, "scheduled", "queued", "restarting")


def next_task(run: Run, one: Found) -> NextTask | None:
    """The task of the run that drives the operation next; None if there is none, or if it isn't known."""
    named = run.task_of(one)
    if named is None or run.has_ended or run.switch_off or not one.drives or one.elsewhere:
        return None
    names = [named["task_id"]]
    if names[0].rpartition(".")[2] == "build":
        names.append(f"{names[0].removesuffix('build')}finalize")
    with create_session() as session:
        of_run = (TaskInstance.dag_id == run.dag_id, TaskInstance.run_id == run.run_id)
        for name in names:
            which = (TaskInstance.task_id == name, TaskInstance.map_index == named["map_index"])
            found = session.scalar(select(TaskInstance).where(*of_run, *which))
            if found is not None and found.state not in ("success", "skipped"):
                return _of(session, run, found)
    return None


def _of(session: Session, run: Run, one: TaskInstance) -> NextTask | None:
    state = None if one.state is None else str(getattr(one.state, "value", one.state))
    name = one.task_id if one.map_index < 0 else f"{one.task_id} [{one.map_index}]"
    at: datetime | None = None
    if state == "up_for_reschedule":
        looks = select(TaskReschedule.reschedule_date).where(TaskReschedule.ti_id == one.id)
        at = session.scalar(looks.order_by(TaskReschedule.id.desc()).limit(1))
    elif state == "up_for_retry":
        of_run = select(DagRun).where(DagRun.dag_id == run.dag_id, DagRun.run_id == run.run_id)
        at = next_try(session, session.scalars(of_run).one(), one)
    elif state != "running" and state not in STARTS:
        return None
    is_due = at is None or at <= datetime.now(timezone.utc)
    return NextTask(name, state == "running", state == "up_for_retry", None if is_due else at)
