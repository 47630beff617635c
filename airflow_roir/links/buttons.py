"""The buttons that a task shows in Airflow: to the page of its build, and to the place to change its parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import RuntimeTaskInstanceProtocol, TaskInstanceKey


class IndexBuildLink(BaseOperatorLink):
    """Opens the tab *Index build* of the task's run; of a mapped task, its own."""

    name = "Index build"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The page's address; a path if Airflow's `[api] base_url` isn't set."""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        if is_mapped(ti_key):
            # In a mapped group each task has an index of its own.
            return f"{base}{task_path(ti_key)}/plugin/index-build-of-task"
        return f"{base}/dags/{ti_key.dag_id}/runs/{quote(ti_key.run_id, safe='')}/plugin/index-build"


def show_link(operator: BaseOperator, ti: RuntimeTaskInstanceProtocol) -> None:
    """Shows the button while the task runs."""
    link = IndexBuildLink()
    ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))


if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class LiveOptionsLink(BaseOperatorLink):
    """Opens the task's Task State Store, where `parallelism` and `batch_rows` are edited, running or paused."""

    name = "Change parallelism"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The page's address, as a path where Airflow's `[api] base_url` isn't set."""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        return f"{base}{task_path(ti_key)}/task-state-store"


def task_path(ti_key: TaskInstanceKey) -> str:
    """The task instance's page in Airflow's UI; one of a mapped task has a page of its own."""
    path = f"/dags/{ti_key.dag_id}/runs/{quote(ti_key.run_id, safe='')}/tasks/{ti_key.task_id}"
    return f"{path}/mapped/{ti_key.map_index}" if is_mapped(ti_key) else path


def is_mapped(ti_key: TaskInstanceKey) -> bool:
    """True if the key is of one of several instances of a mapped task."""
    map_index = getattr(ti_key, "map_index", None)
    return map_index is not None and map_index >= 0
