"""Registers the pages with Airflow (entry point group `airflow.plugins`).

Every process of Airflow loads this module, also the scheduler and each task. FastAPI alone takes four seconds there,
so the app is imported by the first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

# Its import has the server refuse a form's wrong values.
import airflow_roir.task.formats  # noqa: F401

Scope = MutableMapping[str, Any]
Asgi = Callable[[Scope, Any, Any], Awaitable[None]]

PREFIX = "/roir"
# The last part of the addresses of a run's and a task's tab, in Airflow's UI.
BUILD_ROUTE = "index-build"


class LazyApp:
    """The FastAPI app, imported by the first request."""

    def __init__(self) -> None:
        self._app: Asgi | None = None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Hands the request on."""
        if self._app is None:
            from airflow_roir.page.app import create_app

            self._app = create_app()
        await self._app(scope, receive, send)


def root() -> str:
    """The path below which Airflow is served, without a slash at its end: relative addresses don't work everywhere."""
    return urlsplit(str(conf.get("api", "base_url", fallback=""))).path.rstrip("/")


class RoirPlugin(AirflowPlugin):
    """Two pages: of one run's build, as a tab on runs and task instances, and of all indexes, in the navigation."""

    name = "roir"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": PREFIX, "name": "roir"}]
    external_views = [
        {
            "name": "Index build",
            "href": f"{root()}{PREFIX}/run?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "destination": "dag_run",
            "url_route": BUILD_ROUTE,
        },
        {
            "name": "Index build",
            "href": f"{root()}{PREFIX}/run?dag_id={{DAG_ID}}&run_id={{RUN_ID}}&task_id={{TASK_ID}}"
            "&map_index={MAP_INDEX}",
            "destination": "task_instance",
            # Two views can't share a route.
            "url_route": f"{BUILD_ROUTE}-of-task",
        },
        {
            "name": "Indexes",
            "href": f"{root()}{PREFIX}/indexes",
            "destination": "nav",
            "category": "browse",
            "url_route": "indexes",
        },
    ]
