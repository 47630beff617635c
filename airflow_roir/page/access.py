"""Checks a user's access to the pages, by the rights that Airflow gives on a DAG, and guards each request.

No `from __future__ import annotations`: FastAPI resolves the types of a dependency by its module.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user, requires_access_dag
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_roir.page import settings

# Airflow's own pattern for ids of DAGs and tasks. Ids of runs may contain more, but nothing that a database refuses.
DAG_ID = re.compile(r"[\w.-]{1,250}")
PLAIN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,250}")
User = Annotated[BaseUser, Depends(get_user)]


def plain(name: str, value: str | None, pattern: re.Pattern[str] = PLAIN) -> str:
    """The value if it fits the pattern. Raises HTTPException."""
    if value is None or not pattern.fullmatch(value):
        raise HTTPException(422, f"{name} is missing or invalid")
    return value


def dag_access(method: Literal["GET", "PUT"], entity: DagAccessEntity) -> Callable[..., None]:
    """A dependency that checks that the user may do this with this part of the DAG that the query names."""

    def check(request: Request, user: User) -> None:
        given = request.query_params.getlist("dag_id")
        # With two ids, one could be checked and the other used.
        dag_id = plain("dag_id", given[0] if len(given) == 1 else None, DAG_ID)
        requires_access_dag(method, entity, dag_id)(request, user)

    return check


def indexes_access(request: Request, user: User) -> None:
    """Lets a user read about all indexes if that user may read the runs of the DAG that builds."""
    requires_access_dag("GET", DagAccessEntity.RUN, settings.build_dag())(request, user)


def first_build_access(request: Request, user: User) -> None:
    """Lets a user see what a first build needs, roles and their missing rights too, if that user may trigger one."""
    indexes_access(request, user)
    requires_access_dag("POST", DagAccessEntity.RUN, settings.build_dag())(request, user)


def from_our_page(request: Request) -> None:
    """Refuses a request that another site may have made the user's browser send.

    A form can't set the header, and a script of another origin may only after a preflight, which isn't granted.
    """
    if request.headers.get("x-roir") != "1":
        raise HTTPException(403, "the header X-Roir: 1 is missing")
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise HTTPException(403, "the request comes from another site")
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON")


def is_allowed(user: BaseUser, method: Literal["POST", "PUT"], dag_id: str) -> bool:
    """True if the user may trigger, or edit, runs of a DAG that exists."""
    dag = DagModel.get_dagmodel(dag_id)
    return dag is not None and not dag.is_stale and _is_authorized(user, method, dag_id, DagAccessEntity.RUN)


def may_begin(user: BaseUser) -> bool:
    """True if the user may trigger the DAG that builds, or could if there were one."""
    return _is_authorized(user, "POST", settings.build_dag(), DagAccessEntity.RUN)


def may_read_logs(user: BaseUser, dag_id: str) -> bool:
    """True if the user may read the logs of a DAG's tasks, and so the message of one that failed."""
    return _is_authorized(user, "GET", dag_id, DagAccessEntity.TASK_LOGS)


def _is_authorized(user: BaseUser, method: Literal["GET", "POST", "PUT"], dag_id: str, entity: DagAccessEntity) -> bool:
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    allowed = get_auth_manager().is_authorized_dag(method=method, access_entity=entity, details=details, user=user)
    return bool(allowed)


HEADERS = {
    # Scripts and styles from here alone, none within the page; only Airflow's own UI may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
# Many times the largest body that a page sends.
MOST_BYTES = 16_384


class Guard:
    """Sets headers on every answer, and refuses endless bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        got = 0

        async def count() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > MOST_BYTES:
                raise HTTPException(413, f"the body is longer than {MOST_BYTES} bytes")
            return message

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, count, add)
