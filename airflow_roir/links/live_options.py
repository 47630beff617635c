"""The button that leads to where a build's parallelism is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink
from airflow.sdk.configuration import conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class LiveOptionsLink(BaseOperatorLink):
    """Opens the task's Task State Store, where `parallelism` and `batch_rows` are edited, running or paused."""

    name = "Change parallelism"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The page's address, as a path where Airflow's `[api] base_url` isn't set."""
        base = conf.get("api", "base_url", fallback="").rstrip("/")
        run_id = quote(ti_key.run_id, safe="")
        return f"{base}/dags/{ti_key.dag_id}/runs/{run_id}/tasks/{ti_key.task_id}/task-state-store"
