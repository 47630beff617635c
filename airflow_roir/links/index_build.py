"""The button that leads from a task to the page of its build."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

from airflow_roir.links.live_options import is_mapped, task_path

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import RuntimeTaskInstanceProtocol, TaskInstanceKey


class IndexBuildLink(BaseOperatorLink):
    """Opens the tab *Index build* of the task's run; of a mapped task, its own."""

    name = "Index build"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The page's address, as a path where Airflow's `[api] base_url` isn't set."""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        if is_mapped(ti_key):
            # Of a mapped group each task has an index of its own.
            return f"{base}{task_path(ti_key)}/plugin/index-build-of-task"
        return f"{base}/dags/{ti_key.dag_id}/runs/{quote(ti_key.run_id, safe='')}/plugin/index-build"


def show_link(operator: BaseOperator, ti: RuntimeTaskInstanceProtocol) -> None:
    """Show the button while the task runs."""
    link = IndexBuildLink()
    ti.xcom_push(key=link.xcom_key, value=link.get_link(operator, ti_key=ti))
