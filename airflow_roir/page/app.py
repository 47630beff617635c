"""The web app of the pages. Airflow authenticates no user of it: every route asks for access itself, by its method.

No `from __future__ import annotations` for types that are local to `create_app`: FastAPI resolves them by module.
"""

import asyncio
from collections.abc import Callable, Hashable
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal

from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import get_user
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.snapshot.operation import ABANDONED
from airflow_roir.errors import InvalidInput, NotFound, RoirError
from airflow_roir.hooks.allowed import allowed_connections
from airflow_roir.options import MAX_PARALLELISM
from airflow_roir.page import access, databases, first_build, lookups, new_index, settings
from airflow_roir.page.answer import answer, bounded
from airflow_roir.page.cache import AIRFLOW, Looks, NoAnswer
from airflow_roir.page.continuing import continuation, options_text, wish
from airflow_roir.page.listings import Listings
from airflow_roir.page.next_task import next_task
from airflow_roir.page.run_operation import Change, is_paused_by_switch
from airflow_roir.page.targets import Found, read_run

# A list of columns may be long.
Text2000 = Annotated[str, Query(max_length=2000)]
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
    "setup.js": "text/javascript; charset=utf-8",
    "new_index.js": "text/javascript; charset=utf-8",
    "draw.js": "text/javascript; charset=utf-8",
    "failures.js": "text/javascript; charset=utf-8",
    "nothing.js": "text/javascript; charset=utf-8",
    "values.js": "text/javascript; charset=utf-8",
}
# A page may have been left open over an upgrade: ask whether the file is still the same.
NO_CACHE = {"Cache-Control": "private, no-cache"}
# The page Indexes measures the sizes of all indexes.
INDEXES_FRESH_S = 4.0
# The states of an operation that may have to be cleaned up.
LIVE = ("running", "paused", "failed", "aborting")


class NoAnswerYet(HTTPException):
    """The database can't be reached now."""

    def __init__(self, detail: str) -> None:
        super().__init__(503, detail, {"Retry-After": "2"})


class Body(BaseModel):
    """The fields of every request for a change."""

    model_config = ConfigDict(extra="forbid", strict=True)
    connection: str = Field(min_length=1, max_length=250, pattern=r"^[^\x00-\x1f\x7f]*$")
    operation: int = Field(ge=1, lt=2**63)


class Reason(Body):
    """A change with a reason, for other users to read."""

    reason: str = Field("", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")


class Workers(Body):
    """A number of workers."""

    parallelism: int = Field(ge=1, le=MAX_PARALLELISM)


class Rate(Body):
    """A rate limit of all workers together, in rows per second; 0 is none."""

    max_rows_per_second: int = Field(ge=0, lt=2**63)


class Limits(Body):
    """All limits of the throttle, as text; empty is none."""

    throttle: str = Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")


def create_app() -> FastAPI:
    """The app, without documentation of itself: the pages are its only users."""
    app = FastAPI(title="roir", docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(get_user)])
    app.add_middleware(access.Guard)
    app.state.looks = Looks()
    app.state.rare_looks = Looks(fresh_s=INDEXES_FRESH_S)
    _answer_errors(app)
    _pages(app)
    _reads(app)
    _changes(app)
    return app


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

    @app.get("/run", dependencies=[Depends(access.dag_access("GET", DagAccessEntity.RUN))])
    def run_page() -> Response:
        return page("run")

    @app.get("/indexes", dependencies=[Depends(access.indexes_access)])
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

    @app.get("/api/run", dependencies=[Depends(access.dag_access("GET", DagAccessEntity.RUN))])
    async def read_progress(
        request: Request,
        user: access.User,
        dag_id: Text250,
        run_id: Text250,
        kind: Annotated[Literal["build", "verify", "compact", ""], Query()] = "",
        task_id: Annotated[str, Query(max_length=250)] = "",
        map_index: Annotated[int, Query(ge=-1, lt=2**31)] = -1,
        connection: Annotated[str | None, Query(max_length=250)] = None,
        operation: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    ) -> Response:
        access.plain("run_id", run_id)
        run = await lookups.the_run(looks, dag_id, run_id)
        found, troubles = await lookups.operations_found(looks, run)
        if (
            operation is None
            and kind not in ("verify", "compact")
            and (begun := run.prepared_by(task_id, map_index)) is not None
        ):
            mine = [one for one in found if one.operation == begun]
            shown = lookups.choose(mine or found, kind, None, None)
        elif operation is None and kind == "compact" and map_index >= 0:
            # Each instance of a mapped task has a compaction of its own.
            mine = [one for one in found if (one.kind, one.map_index) == (kind, map_index)]
            shown = lookups.choose(mine or found, kind, None, None)
        else:
            shown = lookups.choose(found, kind, connection, operation)
        readable = await run_in_threadpool(access.may_read_logs, user, dag_id)
        failures = await lookups.failures(looks, run, task_id, map_index)
        repeats = failures and run.can_be_repeated and await run_in_threadpool(access.is_allowed, user, "POST", dag_id)
        content: dict[str, Any] = {
            "run": {
                "dag_id": run.dag_id,
                "run_id": run.run_id,
                "state": run.state,
                "switch_off": run.switch_off,
                "has_ended": run.has_ended,
                "values": run.form,
            },
            "failures": [one.as_dict(readable) for one in failures],
            "again": wish(dag_id, run.form) if repeats else None,
            "may_change": await run_in_threadpool(access.is_allowed, user, "PUT", dag_id),
            "operations": [vars(one) for one in found],
            "troubles": troubles,
            "chosen": None if shown is None else vars(shown),
            "progress": None,
        }
        if shown is None:
            # If the run has ended, there may never be more to say. If a first task has failed, it says more.
            if troubles and run.is_ours and not run.has_ended and (run.prepared or not failures):
                raise NoAnswerYet(troubles[0])
            content["looked_in"] = [] if run.is_ours else await lookups.connections(looks)
            content["wanted"] = run.missed
            return answer(request, content)
        one = shown
        content |= {"task": run.task_of(one), "continued_by": run.continued_by(one)}
        coming = await looks.look(AIRFLOW, ("next", run.dag_id, run.run_id, one.operation), lambda: next_task(run, one))
        content["clean_up"] = settings.CLEAN_UP_DAG
        content["may_clean_up"] = one.status in LIVE and await run_in_threadpool(
            access.is_allowed, user, "POST", settings.CLEAN_UP_DAG
        )
        try:
            content["progress"] = await looks.look(
                one.connection,
                ("progress", one.operation, coming),
                lambda: lookups.progress_of(one.connection, one.operation, coming),
            )
        except (DBAPIError, NoAnswer) as error:
            reason = str(error) if isinstance(error, NoAnswer) else databases.trouble(one.connection, error)
            if not run.has_ended:
                raise NoAnswerYet(reason) from None
            return answer(request, content | {"troubles": [*troubles, reason], "wanted": one.index})
        progress = content["progress"]
        if progress["status"] == "completed" and one.operation in run.prepared.values():
            # The index is published: with the same values the next run would rebuild it.
            content["again"] = None
        left = run.left_behind(one)
        held = progress["held_up"]
        by = next((one["by"] for one in progress["pauses"] if one["until"] is None), None)
        content["paused_by_switch"] = is_paused_by_switch(run, by)
        if left and held["by"] in ("pause", "no run"):
            text = f"{held['text']}. {run.how_to_go_on(one)}" if one.status == "paused" else run.how_to_go_on(one)
        elif held["by"] == "pause" and not content["paused_by_switch"]:
            text = f"{held['text']}; {progress['state']['remedy']}"
        else:
            text = held["text"]
        # A copy: other requests share the result of the look.
        content["progress"] = {**progress, "held_up": {**held, "text": text}}
        content["continues"] = None
        if progress["status"] == ABANDONED or (left and progress["status"] == "paused"):
            content["continues"] = await continues(user, one, progress)
        return answer(request, content)

    async def continues(user: BaseUser, one: Found, progress: dict[str, Any]) -> dict[str, Any] | None:
        """The run that would continue an operation, if the user may trigger it."""
        asked = (one.connection, one.index, one.kind, one.created_by, options_text(progress))
        found = await looks.look(AIRFLOW, ("continues", *asked), lambda: continuation(*asked))
        may = found is not None and await run_in_threadpool(access.is_allowed, user, "POST", found["dag_id"])
        return found if may else None

    @app.get("/api/run/duplicates", dependencies=[Depends(access.dag_access("GET", DagAccessEntity.RUN))])
    async def read_duplicates(
        request: Request,
        dag_id: Text250,
        run_id: Text250,
        connection: Text250,
        operation: Annotated[int, Query(ge=1, lt=2**63)],
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
    ) -> Response:
        access.plain("run_id", run_id)
        found, _ = await lookups.operations_found(looks, await lookups.the_run(looks, dag_id, run_id))
        if lookups.choose(found, "", connection, operation) is None:
            raise HTTPException(404, "the run has no such operation")
        try:
            content = await looks.look(
                connection,
                ("duplicates", operation, after),
                lambda: lookups.duplicates_of(connection, operation, after),
            )
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(connection, error)) from None
        return answer(request, content)

    listings = Listings(rare)

    @app.get("/api/indexes", dependencies=[Depends(access.indexes_access)])
    async def read_indexes(request: Request, user: access.User) -> Response:
        ids = await lookups.connections(looks)
        seen = await asyncio.gather(*map(listings.of, ids))
        # Only a run's form has named such a connection, unless the configuration names all: it may have no index.
        bare = [one for one in seen if one["lacks"] and not allowed_connections()]
        found = [one for one in seen if one not in bare]
        dags = {
            "rebuild": settings.build_dag(),
            "verify": settings.VERIFY_DAG,
            "control": settings.CONTROL_DAG,
            "clean_up": settings.CLEAN_UP_DAG,
        }
        rights = {
            name: await run_in_threadpool(access.is_allowed, user, "POST", dag_id) for name, dag_id in dags.items()
        }
        rights["begin"] = await run_in_threadpool(access.may_begin, user)
        shown = [one | {"indexes": [await of_user(user, index) for index in one["indexes"]]} for one in found]
        return answer(request, {"databases": shown, "bare": bare, "dags": dags, "may": rights})

    @app.get("/api/set-up", dependencies=[Depends(access.first_build_access)])
    async def read_set_up(request: Request, connection: Text250) -> Response:
        if connection not in await lookups.connections(looks):
            raise HTTPException(404, "the pages don't show this connection")
        look = partial(first_build.look, connection)
        return answer(request, await rare.look(connection, "set-up", look, first_build.PATIENCE_S))

    @app.get("/api/tables", dependencies=[Depends(access.first_build_access)])
    async def read_tables(request: Request, connection: Text250) -> Response:
        return answer(request, await of_database(connection, "tables", partial(new_index.tables_of, connection)))

    @app.get("/api/check", dependencies=[Depends(access.first_build_access)])
    async def read_check(
        request: Request,
        connection: Text250,
        index: Text250,
        table: Text2000 = "",
        keys: Text2000 = "",
        include: Text2000 = "",
        unique: bool = False,
        where: Text2000 = "",
    ) -> Response:
        asked = new_index.Asked(index, table, keys, include, unique, where)
        return answer(request, await of_database(connection, asked, partial(new_index.check, connection, asked)))

    async def of_database(connection: str, key: Hashable, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if connection not in await lookups.connections(looks):
            raise HTTPException(404, "the pages don't show this connection")
        try:
            return await rare.look(connection, key, work)
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(connection, error)) from None

    async def of_user(user: BaseUser, index: dict[str, Any]) -> dict[str, Any]:
        """An index as a user may see it: the values of a run are for those alone who may trigger it again."""
        found = index["continues"]
        if found is None or await run_in_threadpool(access.is_allowed, user, "POST", found["dag_id"]):
            return index
        return index | {"continues": None}


def _changes(app: FastAPI) -> None:
    may_edit = [Depends(access.from_our_page), Depends(access.dag_access("PUT", DagAccessEntity.RUN))]

    @app.post("/api/run/pause", dependencies=may_edit)
    async def pause(user: access.User, dag_id: Text250, run_id: Text250, body: Reason) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.pause(body.reason))

    @app.post("/api/run/resume", dependencies=may_edit)
    async def resume(user: access.User, dag_id: Text250, run_id: Text250, body: Body) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.resume())

    @app.post("/api/run/abort", dependencies=may_edit)
    async def abort(user: access.User, dag_id: Text250, run_id: Text250, body: Reason) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.abort(body.reason))

    @app.post("/api/run/workers", dependencies=may_edit)
    async def workers(user: access.User, dag_id: Text250, run_id: Text250, body: Workers) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.set_workers(body.parallelism))

    @app.post("/api/run/rate", dependencies=may_edit)
    async def rate(user: access.User, dag_id: Text250, run_id: Text250, body: Rate) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.set_rate(body.max_rows_per_second))

    @app.post("/api/run/throttle", dependencies=may_edit)
    async def throttle(user: access.User, dag_id: Text250, run_id: Text250, body: Limits) -> dict[str, str]:
        return await change(user, dag_id, run_id, body, lambda one: one.set_limits(body.throttle))

    async def change(
        user: BaseUser, dag_id: str, run_id: str, body: Body, act: Callable[[Change], str]
    ) -> dict[str, str]:
        access.plain("run_id", run_id)
        about = await run_in_threadpool(read_run, dag_id, run_id)
        connection = body.connection
        known = [about.connection] if about.connection else await run_in_threadpool(databases.connection_ids)
        if connection not in known:
            raise HTTPException(404, "the run uses another connection")

        def work() -> str:
            database = databases.open_database(connection, user.get_name())
            return act(Change(database, connection, about, body.operation, user.get_name(), next_task))

        looks: Looks = app.state.looks
        try:
            said = await looks.change(connection, work)
        except DBAPIError as error:
            raise NoAnswerYet(databases.trouble(connection, error)) from None
        looks.forget(connection)
        app.state.rare_looks.forget(connection)
        looks.forget(AIRFLOW)
        return {"said": said}
