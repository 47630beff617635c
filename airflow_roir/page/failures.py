"""Finds out why tasks of a DAG run failed: by their own messages, else by what Airflow knows of their ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from graphlib import TopologicalSorter
from typing import Any

from airflow.models.dag import DagModel
from airflow.models.dagbag import DBDagBag
from airflow.models.dagrun import DagRun
from airflow.models.errors import ParseImportError
from airflow.models.log import Log
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from airflow_roir.page.answer import Long
from airflow_roir.page.settings import our_dags
from airflow_roir.task.failure import KEY

# The most tasks shown of one run: a mapped group may have a hundred.
MOST = 20
# Airflow notes a mark some time before or after it.
AROUND = timedelta(minutes=1)
OURS = (
    "PrepareIndexBuildOperator",
    "BuildIndexOperator",
    "FinalizeIndexBuildOperator",
    "VerifyIndexOperator",
    "CompactIndexOperator",
    "PauseIndexBuildOperator",
    "ResumeIndexBuildOperator",
    "ChangeIndexBuildOperator",
    "AbortIndexBuildOperator",
    "RevertIndexOperator",
    "CleanUpIndexesOperator",
    "DetachPartitionOperator",
    "AttachPartitionOperator",
    "ShipChangesOperator",
)
# Airflow's events of ends that a task doesn't see, as its table `log` names them.
ENDS = {
    "heartbeat timeout": "its worker gave no sign of life any more, so Airflow gave the task up",
    "state mismatch": "it was killed before its end (often: out of memory, kill -9, a lost machine), or never began",
    "stuck in queued tries exceeded": "no worker took it up in time",
}
MARKS = (
    "patch_task_instance",
    "patch_task_group_instances",
    "bulk_task_instances",
    "patch_dag_run",
    "bulk_dag_runs",
)
UNREADABLE = ". You may not read this task's log, nor its message"
MARKED = "a user marked it as failed, as Airflow's Audit Log shows"


@dataclass(frozen=True)
class Failure:
    """A task that failed, or several that didn't start for that; or the end of a whole run, with task_id ''.

    message: of its last try; '' if that said nothing. try_number: of the log with the message. again: the moment of the
    next try.
    """

    text: str
    message: str = ""
    task_id: str = ""
    map_index: int = -1
    try_number: int = 0
    at: datetime | None = None
    again: datetime | None = None

    def as_dict(self, with_message: bool) -> dict[str, Any]:
        """For JSON; without the message for users who may not read logs."""
        shown = self if with_message or not self.message else replace(self, text=self.text + UNREADABLE, message="")
        return {**vars(shown), "message": Long(shown.message), "at": _iso(self.at), "again": _iso(self.again)}


def failures_of(dag_id: str, run_id: str) -> list[Failure]:
    """All failures of a run, the oldest first; none for a run that has none of our tasks, or succeeded."""
    with create_session() as session:
        run = session.scalar(select(DagRun).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id))
        if run is None or run.state == "success":
            return []
        if not _has_our_tasks(session, run):
            return []
        wrong = session.scalars(
            select(TaskInstance).where(
                TaskInstance.dag_id == dag_id,
                TaskInstance.run_id == run_id,
                TaskInstance.state.in_(("failed", "up_for_retry", "upstream_failed")),
            )
        ).all()
        found = sorted(
            _of_tasks(session, run, [one for one in wrong if one.state != "upstream_failed"]),
            key=lambda one: (one.at is None, one.at, one.task_id, one.map_index),
        )
        if never := {one.task_id for one in wrong if one.state == "upstream_failed"}:
            names = ", ".join(_in_order(session, run, never))
            found.append(Failure(f"Not started, since a task before failed: {names}"))
        if run.state == "failed" and not found:
            found.append(_of_run(session, run))
        found.extend(_of_file(session, dag_id))
        return found


def shown(found: Sequence[Failure], task_id: str, map_index: int) -> list[Failure]:
    """The first MOST failed tasks and all else of a run; before them the task of the page, if it has failed."""
    tasks = sorted(
        (one for one in found if one.task_id), key=lambda one: (one.task_id, one.map_index) != (task_id, map_index)
    )
    more = [Failure(f"{len(tasks) - MOST} more tasks have failed")] if len(tasks) > MOST else []
    return [*tasks[:MOST], *more, *(one for one in found if not one.task_id)]


def _has_our_tasks(session: Session, run: DagRun) -> bool:
    if run.dag_id in our_dags():
        return True
    ours = select(TaskInstance.task_id).where(
        TaskInstance.dag_id == run.dag_id, TaskInstance.run_id == run.run_id, TaskInstance.operator.in_(OURS)
    )
    # A user's own class, too, keeps its message.
    kept = select(XComModel.task_id).where(
        XComModel.dag_id == run.dag_id, XComModel.run_id == run.run_id, XComModel.key == KEY
    )
    return any(session.scalar(one.limit(1)) is not None for one in (ours, kept))


def _of_tasks(session: Session, run: DagRun, wrong: Sequence[TaskInstance]) -> Iterator[Failure]:
    if not wrong:
        return
    of_run = (XComModel.dag_id == run.dag_id, XComModel.run_id == run.run_id, XComModel.key == KEY)
    kept = {
        (one.task_id, one.map_index): _kept(one.value)
        for one in session.execute(select(XComModel.task_id, XComModel.map_index, XComModel.value).where(*of_run))
    }
    moments = [at for one in wrong for at in (one.start_date, one.queued_dttm, one.end_date) if at is not None]
    events = _events(session, run, min(moments, default=None))
    for one in wrong:
        number, message = kept.get((one.task_id, one.map_index), (0, ""))
        yield replace(
            failure_of(one, number, message, events),
            task_id=one.task_id,
            map_index=one.map_index,
            try_number=one.try_number,
            at=one.end_date,
            again=next_try(session, run, one) if one.state == "up_for_retry" else None,
        )


def failure_of(one: TaskInstance, number: int | None, message: str, events: Sequence[Any]) -> Failure:
    """How a task failed, in words. number, message: of the try that has kept a message; events: of Airflow's log.

    number: 0 if no try has, None if it is kept where only tasks can read it.
    """
    name = one.task_id if one.map_index < 0 else f"{one.task_id} [{one.map_index}]"
    tries = max(one.max_tries + 1, one.try_number)
    whole = f"Task {name} has failed"
    if one.state == "up_for_retry":
        whole = f"Try {one.try_number} of {tries} of task {name} has failed"
    elif one.try_number > 1:
        whole = f"Task {name} has failed at try {one.try_number} of {tries}"
    mark = any(_is_mark(event, one) for event in events) and one.state == "failed"
    if message and number == one.try_number:
        return Failure(f"{whole}, since {MARKED}; before, it had said" if mark else whole, message)
    known = [ENDS[event.event] for event in events if event.event in ENDS and _is_of(event, one)]
    if mark:
        why = MARKED
    elif known:
        why = known[0]
    elif number is None or one.operator not in OURS:
        why = "its log says why"
    elif one.start_date is None:
        why = "it never started"
    else:
        why = "its process ended without a message: it was killed, or ran out of memory. Its log may say more"
    return Failure(f"{whole}: {why}{f'. Its try {number} had said' if message else ''}", message)


def _in_order(session: Session, run: DagRun, tasks: set[str]) -> list[str]:
    """Tasks in the order of their DAG; by name if the DAG is gone."""
    dag = DBDagBag(load_op_links=False).get_dag_for_run(run, session)
    before = {task.task_id: task.upstream_task_ids for task in dag.tasks} if dag is not None else {}
    order = list(TopologicalSorter(before).static_order())
    return sorted(tasks, key=lambda task: (order.index(task) if task in order else len(order), task))


def _of_run(session: Session, run: DagRun) -> Failure:
    """The end of a run that failed without a task that did."""
    since = run.start_date or run.queued_at
    if any(
        event.event in ("patch_dag_run", "bulk_dag_runs") and _names_failed(event)
        for event in _events(session, run, since)
    ):
        return Failure("A user marked this run as failed, as Airflow's Audit Log shows", at=run.end_date)
    dag = DBDagBag(load_op_links=False).get_dag_for_run(run, session)
    if dag is not None and dag.dagrun_timeout is not None:
        return Failure(
            f"This run took longer than the dagrun_timeout of {run.dag_id}, {dag.dagrun_timeout}, which counts paused "
            "time, too. Everything that was committed stays",
            at=run.end_date,
        )
    return Failure("This run has failed, although none of its tasks has; the scheduler's log says why", at=run.end_date)


def _of_file(session: Session, dag_id: str) -> Iterator[Failure]:
    """Why Airflow starts no task of this DAG any more."""
    dag = session.get(DagModel, dag_id)
    if dag is not None:
        at = session.scalar(
            select(ParseImportError.timestamp).where(
                ParseImportError.filename == dag.relative_fileloc, ParseImportError.bundle_name == dag.bundle_name
            )
        )
        if at is not None:
            # Without the error: only users who may see import errors may see it.
            yield Failure(
                f"The file of DAG {dag_id} can't be imported, so none of its tasks can run. Airflow's page Dags shows "
                "the error",
                at=at,
            )
            return
    if dag is None or dag.is_stale:
        yield Failure(f"No file has DAG {dag_id} any more, so Airflow starts no task of it")


def _events(session: Session, run: DagRun, since: datetime | None) -> Sequence[Any]:
    """Airflow's events of this run's tasks that tell how they ended, the newest first.

    since: about when the first of them can be. The table keeps all events of all DAGs.
    """
    query = select(Log.id, Log.event, Log.task_id, Log.map_index, Log.dttm, Log.extra, Log.try_number).where(
        Log.dag_id == run.dag_id,
        Log.run_id == run.run_id,
        or_(Log.event.in_(list(ENDS)), Log.event.in_(MARKS)),
    )
    if since is not None:
        query = query.where(Log.dttm >= since - AROUND)
    # Sorted here: else a database may walk through the whole table by its id.
    return sorted(session.execute(query).all(), key=lambda event: -event.id)


def _is_of(event: Any, one: TaskInstance) -> bool:
    return (event.task_id, event.map_index, event.try_number) == (one.task_id, one.map_index, one.try_number)


def _is_mark(event: Any, one: TaskInstance) -> bool:
    """True if a user has marked this try of the task: alone, with its group, or with its run."""
    began, ended = one.start_date or one.queued_dttm, one.end_date
    if event.event not in MARKS or not _names_failed(event):
        return False
    # A mark of an earlier try, or of a run whose task had failed by itself before.
    if (began is not None and event.dttm < began) or (ended is not None and event.dttm > ended):
        return False
    if event.event != "patch_task_instance":
        return True
    given = _json(event.extra).get("map_index")
    return event.task_id == one.task_id and (given is None or str(given) == str(one.map_index))


def _names_failed(event: Any) -> bool:
    return '"failed"' in (event.extra or "")


def next_try(session: Session, run: DagRun, one: TaskInstance) -> datetime | None:
    """The moment of a task's next try, as the scheduler counts it; None if its DAG's file has changed."""
    dag = DBDagBag(load_op_links=False).get_dag_for_run(run, session)
    if dag is None or not dag.has_task(one.task_id):
        return None
    one.task = dag.get_task(one.task_id)
    found: datetime = one.next_retry_datetime()
    return found


def _kept(value: Any) -> tuple[int | None, str]:
    """The number and the message of the try that an XCom is of; (None, '') if a backend keeps it elsewhere."""
    read = _json(value)
    number, message = read.get("try_number"), read.get("message")
    return (number, message) if isinstance(number, int) and isinstance(message, str) else (None, "")


def _json(value: Any) -> dict[str, Any]:
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
