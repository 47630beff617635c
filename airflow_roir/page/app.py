"""The web app of the pages. Airflow authenticates no user of it: every route asks for access itself, by its method.

No `from __future__ import annotations` for types that are local to `create_app`: FastAPI resolves them by module.
"""

import asyncio
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any, Literal

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import get_user, requires_access_dag
from airflow.models.dag import DagModel
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DBAPIError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_roir.engine.snapshot.words import State, state_of, undriven
from airflow_roir.errors import InvalidInput, NotFound, RoirError, SchemaMissing, SchemaVersionMismatch
from airflow_roir.hooks.allowed import allowed_connections
from airflow_roir.options import MAX_PARALLELISM
from airflow_roir.page import databases, settings
from airflow_roir.page.answer import answer, bounded
from airflow_roir.page.cache import AIRFLOW, Looks, NoAnswer
from airflow_roir.page.run_operation import Change, is_paused_by_switch
from airflow_roir.page.segments import shown_segments
from airflow_roir.page.targets import Found, Run, operations_of, read_run, runs_of

# As Airflow has it for ids of DAGs and tasks; ids of runs may hold more, but nothing that a database refuses.
DAG_ID = re.compile(r"[\w.-]{1,250}")
PLAIN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,250}")
Text250 = Annotated[str, Query(min_length=1, max_length=250)]
STATIC = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
    "indexes.js": "text/javascript; charset=utf-8",
    "duplicates.js": "text/javascript; charset=utf-8",
    "throttle.js": "text/javascript; charset=utf-8",
    "shards.js": "text/javascript; charset=utf-8",
    "segments.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    # Scripts and styles from here alone, none within the page; only Airflow's own UI may frame it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}
# A page may have been left open over an upgrade: ask whether the file is still the same.
NO_CACHE = {"Cache-Control": "private, no-cache"}
# The page Indexes looks at the sizes of all that there is.
INDEXES_FRESH_S = 4.0
# Of several databases the others are shown all the same.
SEVERAL_S = 4.0
# An operation of which something may have to be cleaned up.
LIVE = ("running", "paused", "failed", "aborting")
# The largest body that anybody needs, many times over.
MOST_BYTES = 16_384

User = Annotated[BaseUser, Depends(get_user)]


class NoAnswerYet(HTTPException):
    """The database can't be reached now."""

    def __init__(self, detail: str) -> None:
        super().__init__(503, detail, {"Retry-After": "2"})


def plain(name: str, value: str | None, pattern: re.Pattern[str] = PLAIN) -> str:
    """The value if it can be what it is said to be. Raises HTTPException."""
    if value is None or not pattern.fullmatch(value):
        raise HTTPException(422, f"{name} is missing, or can't be one")
    return value


def dag_access(method: Literal["GET", "PUT"], entity: DagAccessEntity) -> Callable[..., None]:
    """A dependency: the user may do that with this part of the DAG that the query names."""

    def check(request: Request, user: User) -> None:
        given = request.query_params.getlist("dag_id")
        # Two would let one be checked and the other be used.
        dag_id = plain("dag_id", given[0] if len(given) == 1 else None, DAG_ID)
        requires_access_dag(method, entity, dag_id)(request, user)

    return check


def indexes_access(request: Request, user: User) -> None:
    """Who may read the runs of the DAG that builds may read of all indexes."""
    requires_access_dag("GET", DagAccessEntity.RUN, settings.build_dag())(request, user)


def from_our_page(request: Request) -> None:
    """Refuse a request that another site may have had the user's browser send.

    A form can't set the header, and a script of another origin may only after a preflight, which isn't granted.
    """
    if request.headers.get("x-roir") != "1":
        raise HTTPException(403, "the header X-Roir: 1 is missing")
    if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise HTTPException(403, "the request comes from another site")
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON")


class Body(BaseModel):
    """What every change names."""

    model_config = ConfigDict(extra="forbid", strict=True)
    connection: str = Field(min_length=1, max_length=250, pattern=r"^[^\x00-\x1f\x7f]*$")
    operation: int = Field(ge=1, lt=2**63)


class Reason(Body):
    """A change with a reason, which others read."""

    reason: str = Field("", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")


class Workers(Body):
    """A number of workers."""

    parallelism: int = Field(ge=1, le=MAX_PARALLELISM)


class Limits(Body):
    """All limits of the throttle, as text; empty is none."""

    throttle: str = Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")


def may(user: BaseUser, method: Literal["POST", "PUT"], dag_id: str) -> bool:
    """Whether the user may trigger, or edit, runs of a DAG that exists."""
    dag = DagModel.get_dagmodel(dag_id)
    if dag is None or dag.is_stale:
        return False
    details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
    allowed = get_auth_manager().is_authorized_dag(
        method=method, access_entity=DagAccessEntity.RUN, details=details, user=user
    )
    return bool(allowed)


def create_app() -> FastAPI:
    """The app, without documentation of itself: the pages are its only users."""
    app = FastAPI(title="roir", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(get_user)])
    app.add_middleware(Guard)
    app.state.looks = Looks()
    app.state.rare_looks = Looks(fresh_s=INDEXES_FRESH_S)
    _answer_errors(app)
    _pages(app)
    _reads(app)
    _changes(app)
    return app


class Guard:
    """Headers on every answer, and no endless bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on."""
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


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(RoirError)
    async def refused(_request: Request, error: RoirError) -> Response:
        status = 503 if isinstance(error, NoAnswer) else 404 if isinstance(error, NotFound) else 409
        return JSONResponse({"detail": bounded(str(error))}, 422 if isinstance(error, InvalidInput) else status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        # Without the values: they may be endless, or not even be text.
        said = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:5])
        return JSONResponse({"detail": bounded(said) or "the request can't be read"}, 422)


def _pages(app: FastAPI) -> None:
    static = files("airflow_roir.page") / "static"

    def page(script: str) -> Response:
        html = (static / "page.html").read_text("utf-8").replace("PAGE", script)
        return Response(html, media_type="text/html; charset=utf-8", headers=NO_CACHE)

    @app.get("/run", dependencies=[Depends(dag_access("GET", DagAccessEntity.RUN))])
    def run_page() -> Response:
        return page("run")

    @app.get("/indexes", dependencies=[Depends(indexes_access)])
    def indexes_page() -> Response:
        return page("indexes")

    @app.get("/static/{name}")
    def asset(name: str) -> Response:
        if name not in STATIC:
            raise HTTPException(404, "there is no such file")
        return Response((static / name).read_bytes(), media_type=STATIC[name], headers=NO_CACHE)


def _reads(app: FastAPI) -> None:
    looks: Looks = app.state.looks
    rare: Looks = app.state.rare_looks

    @app.get("/api/run", dependencies=[Depends(dag_access("GET", DagAccessEntity.RUN))])
    async def read_progress(
        request: Request,
        user: User,
        dag_id: Text250,
        run_id: Text250,
        kind: Annotated[Literal["build", "verify", "compact", ""], Query()] = "",
        task_id: Annotated[str, Query(max_length=250)] = "",
        map_index: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
        connection: Annotated[str | None, Query(max_length=250)] = None,
        operation: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    ) -> Response:
        plain("run_id", run_id)
        run = await _run(looks, dag_id, run_id)
        found, troubles = await _found(looks, run)
        if (
            operation is None
            and kind not in ("verify", "compact")
            and (begun := run.prepared_by(task_id, map_index)) is not None
        ):
            mine = [one for one in found if one.operation == begun]
            shown = _choose(mine or found, kind, None, None)
        elif operation is None and kind == "compact" and map_index >= 0:
            # Of a mapped task each has a compaction of its own.
            mine = [one for one in found if (one.kind, one.map_index) == (kind, map_index)]
            shown = _choose(mine or found, kind, None, None)
        else:
            shown = _choose(found, kind, connection, operation)
        content: dict[str, Any] = {
            "run": {"dag_id": run.dag_id, "run_id": run.run_id, "state": run.state, "switch_off": run.switch_off},
            "may_change": await run_in_threadpool(may, user, "PUT", dag_id),
            "operations": [vars(one) for one in found],
            "troubles": troubles,
            "chosen": None if shown is None else vars(shown),
            "progress": None,
        }
        if shown is None:
            if troubles and run.is_ours:
                raise NoAnswerYet(troubles[0])
            content["looked_in"] = [] if run.is_ours else await _connections(looks)
            content["wanted"] = run.missed
            return answer(request, content)
        one = shown
        content["task"] = run.task_of(one)
        content["clean_up"] = settings.CLEAN_UP_DAG
        content["may_clean_up"] = one.status in LIVE and await run_in_threadpool(
            may, user, "POST", settings.CLEAN_UP_DAG
        )
        try:
            content["progress"] = await looks.look(
                one.connection, ("progress", one.operation), lambda: _progress(one.connection, one.operation)
            )
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(one.connection, error)) from None
        if (left := run.left_behind(one)) is not None:
            held = content["progress"]["held_up"]
            if one.status == "paused":
                more = {"held_up": {**held, "text": f"{held['text']}. {left}"}}
            else:
                more = {"held_up": {"by": "no run", "text": left}, "state": _state(undriven(left))}
            # What was looked up is also others'.
            content["progress"] = {**content["progress"], **more}
        by = next((one["by"] for one in content["progress"]["pauses"] if one["until"] is None), None)
        content["paused_by_switch"] = is_paused_by_switch(run, by)
        return answer(request, content)

    @app.get("/api/run/duplicates", dependencies=[Depends(dag_access("GET", DagAccessEntity.RUN))])
    async def read_duplicates(
        request: Request,
        dag_id: Text250,
        run_id: Text250,
        connection: Text250,
        operation: Annotated[int, Query(ge=1, lt=2**63)],
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    ) -> Response:
        plain("run_id", run_id)
        found, _ = await _found(looks, await _run(looks, dag_id, run_id))
        if _choose(found, "", connection, operation) is None:
            raise HTTPException(404, "the run isn't about that operation")
        try:
            content = await looks.look(
                connection, ("duplicates", operation, after), lambda: _duplicates(connection, operation, after)
            )
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(connection, error)) from None
        return answer(request, content)

    # By connection: what is shown while a database with very many indexes is looked at again.
    last: dict[str, Any] = {}

    async def read_database(connection_id: str) -> dict[str, Any] | None:
        one: dict[str, Any] = {"connection": connection_id, "indexes": [], "trouble": None}
        try:
            one["indexes"] = await rare.look(connection_id, "indexes", lambda: _indexes(connection_id), SEVERAL_S)
            last[connection_id] = one["indexes"]
        except NoAnswer as reason:
            one["indexes"] = last.get(connection_id, [])
            one["trouble"] = f"{reason}; this was found before" if one["indexes"] else f"{reason}; nothing is shown yet"
        except DBAPIError as error:
            one["trouble"] = databases.trouble(connection_id, error)
        except (SchemaMissing, NotFound) as reason:
            if not allowed_connections():
                # Only a run's form has named it: it may have no index at all.
                return None
            one["trouble"] = str(reason)
        except RoirError as reason:
            one["trouble"] = str(reason)
        return one

    @app.get("/api/indexes", dependencies=[Depends(indexes_access)])
    async def read_indexes(request: Request, user: User) -> Response:
        ids = await _connections(looks)
        found = [one for one in await asyncio.gather(*map(read_database, ids)) if one is not None]
        dags = {
            "rebuild": settings.build_dag(),
            "verify": settings.VERIFY_DAG,
            "control": settings.CONTROL_DAG,
            "clean_up": settings.CLEAN_UP_DAG,
        }
        rights = {name: await run_in_threadpool(may, user, "POST", dag_id) for name, dag_id in dags.items()}
        return answer(request, {"databases": found, "dags": dags, "may": rights})


def _changes(app: FastAPI) -> None:
    may_edit = [Depends(from_our_page), Depends(dag_access("PUT", DagAccessEntity.RUN))]

    @app.post("/api/run/pause", dependencies=may_edit)
    async def pause(user: User, dag_id: Text250, run_id: Text250, body: Reason) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.pause(body.reason))

    @app.post("/api/run/resume", dependencies=may_edit)
    async def resume(user: User, dag_id: Text250, run_id: Text250, body: Body) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.resume())

    @app.post("/api/run/abort", dependencies=may_edit)
    async def abort(user: User, dag_id: Text250, run_id: Text250, body: Reason) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.abort(body.reason))

    @app.post("/api/run/workers", dependencies=may_edit)
    async def workers(user: User, dag_id: Text250, run_id: Text250, body: Workers) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.set_workers(body.parallelism))

    @app.post("/api/run/throttle", dependencies=may_edit)
    async def throttle(user: User, dag_id: Text250, run_id: Text250, body: Limits) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.set_limits(body.throttle))

    async def change(
        user: BaseUser, dag_id: str, run_id: str, body: Body, act: Callable[[Change], str]
    ) -> dict[str, str]:
        plain("run_id", run_id)
        about = await run_in_threadpool(read_run, dag_id, run_id)
        connection = body.connection
        known = [about.connection] if about.connection else await run_in_threadpool(databases.connection_ids)
        if connection not in known:
            raise HTTPException(404, "the run isn't about that connection")

        def work() -> str:
            database = databases.open_database(connection, user.get_name())
            return act(Change(database, connection, about, body.operation, user.get_name()))

        looks: Looks = app.state.looks
        try:
            said = await looks.change(connection, work)
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(connection, error)) from None
        looks.forget(connection)
        app.state.rare_looks.forget(connection)
        looks.forget(AIRFLOW)
        return {"said": said}


async def _run(looks: Looks, dag_id: str, run_id: str) -> Run:
    return await looks.look(AIRFLOW, ("run", dag_id, run_id), lambda: read_run(dag_id, run_id))


async def _connections(looks: Looks) -> list[str]:
    return await looks.look(AIRFLOW, "connections", databases.connection_ids)


async def _found(looks: Looks, run: Run) -> tuple[list[Found], list[str]]:
    """The run's operations, in the connection that its form names or in all; and what can't be looked at."""
    ids = [run.connection] if run.connection else await _connections(looks)
    found: list[Found] = []
    troubles: list[str] = []

    async def look(connection_id: str) -> None:
        def work() -> list[Found]:
            with databases.reading(connection_id) as database:
                return operations_of(database, connection_id, run)

        key = ("operations", run.dag_id, run.run_id, run.adopted)
        try:
            found.extend(await looks.look(connection_id, key, work, SEVERAL_S))
        except DBAPIError as error:
            troubles.append(databases.trouble(connection_id, error))
        except NoAnswer as reason:
            troubles.append(str(reason))
        except (SchemaVersionMismatch, NotFound, InvalidInput) as reason:
            # In a DAG of ours the form names it; elsewhere it is a database that has nothing to do with the run.
            if run.is_ours:
                troubles.append(str(reason))

    await asyncio.gather(*map(look, ids))
    return sorted(found, key=lambda one: (not one.drives, not one.at_work, -one.operation)), sorted(troubles)


def _choose(found: list[Found], kind: str, connection: str | None, operation: int | None) -> Found | None:
    if operation is not None:
        return next((one for one in found if (one.operation, one.connection) == (operation, connection)), None)
    of_kind = [one for one in found if not kind or kind == (one.kind if one.kind in ("verify", "compact") else "build")]
    return next(iter(of_kind or found), None)


def _progress(connection_id: str, operation: int) -> dict[str, Any]:
    from airflow_roir.engine.snapshot.details import progress

    with databases.reading(connection_id) as database:
        one = progress(database, operation_id=operation)
    return one.as_dict(whole=True) | {"state": _state(state_of(one))}


def _state(state: State) -> dict[str, str]:
    """Without the text, which tells how long ago something was: nothing is sent again for that."""
    return {"name": state.name, "word": state.word, "note": state.note}


def _duplicates(connection_id: str, operation: int, after: int) -> dict[str, Any]:
    from airflow_roir.engine.unique import duplicate_report

    with databases.reading(connection_id) as database:
        return duplicate_report.page(database, operation, after)


def _indexes(connection_id: str) -> list[dict[str, Any]]:
    from airflow_roir.engine.snapshot.index import indexes

    with databases.reading(connection_id) as database:
        found = [one.as_dict() | {"segments": shown_segments(one.segments)} for one in indexes(database)]
        runs = runs_of(database, [one["operation"] for one in found if one["operation"] is not None])
    return [one | {"run": runs.get(one["operation"])} for one in found]
