"""Keeps the message of a task's failing try where the page reads it, in an XCom of the task: Airflow keeps none.

A listener of Airflow, since errors of templates, of `pre_execute` and of time-outs never reach `execute`. Airflow
deletes the XCom when the task's next try starts.
"""

from __future__ import annotations

from typing import Any

from airflow.listeners import hookimpl

KEY = "roir_failure"
OURS = "airflow_roir.operators."
# The tag of our DAGs, which their copies keep.
TAG = "roir"
# Many times the longest message of ours.
LONGEST = 16_000
TIME_OUT = (
    "The task took longer than its execution_timeout, which counts from its last start. Airflow has ended it. "
    "Everything that was committed stays"
)


@hookimpl  # type: ignore[untyped-decorator]  # pluggy's marker has no types here
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: BaseException | str | None) -> None:
    """Keeps the message, in the task's own process. Airflow's servers call this with texts of their own, for marks and
    for tasks whose process has vanished: these are no messages of the task, and the page has better words.
    """
    if not isinstance(error, BaseException) or not _is_ours(getattr(task_instance, "task", None)):
        return
    task_instance.xcom_push(
        key=KEY, value={"try_number": int(task_instance.try_number), "message": message_of(error)[:LONGEST]}
    )


def message_of(error: BaseException) -> str:
    """The error in words, without the secrets that Airflow masks in logs, and without statements and their values."""
    from airflow.sdk.exceptions import AirflowException, AirflowTaskTimeout
    from airflow.sdk.log import redact
    from sqlalchemy.exc import DBAPIError, StatementError

    from airflow_roir.engine.database import said
    from airflow_roir.errors import RoirError

    if hasattr(error, "diag"):
        # A driver's own, as from a hook in a user's task.
        error = DBAPIError(None, None, error)
    elif isinstance(error, StatementError) and not isinstance(error, DBAPIError) and error.orig is not None:
        # Its text has the statement and its values.
        error = error.orig
    if isinstance(error, AirflowTaskTimeout):
        text = TIME_OUT
    elif isinstance(error, DBAPIError):
        # Without its detail and context, which may contain values of rows.
        text = said(error)
    elif isinstance(error, RoirError | AirflowException) and str(error).strip():
        text = str(error)
    elif isinstance(error, SystemExit):
        text = f"Its process ended with exit code {error.code}"
    else:
        text = f"{type(error).__name__}: {str(error).strip()}".removesuffix(": ")
    # Airflow's database can't hold all that a form's value may contain.
    return (
        str(redact(text.strip()))
        .expandtabs(4)
        .encode("utf-8", "replace")
        .decode()
        .replace("\0", "\N{REPLACEMENT CHARACTER}")
    )


def _is_ours(task: Any) -> bool:
    """True for an operator of ours, or a user's class that is made of one; and for each task of our DAGs."""
    # A mapped task that couldn't be unmapped has only its operator's class.
    of = getattr(task, "operator_class", None)
    if any(one.__module__.startswith(OURS) for one in (of if isinstance(of, type) else type(task)).__mro__):
        return True
    dag = task.get_dag() if hasattr(task, "get_dag") else None
    return TAG in getattr(dag, "tags", ())
