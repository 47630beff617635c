"""The looks of the pages' routes, in Airflow and in the databases; requests at the same time share them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.compact.segment import Segment, worst_first
from airflow_roir.engine.control.long_pause import long_pauses
from airflow_roir.engine.control.remedies import way_on_without_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.operation import ABANDONED, OperationStatus, rows
from airflow_roir.engine.snapshot.parts import NextTask
from airflow_roir.engine.snapshot.words import State, noun, paused_by, state_of, way_on
from airflow_roir.errors import InvalidInput, NotFound, SchemaVersionMismatch
from airflow_roir.operation import Status
from airflow_roir.page import databases, fates
from airflow_roir.page.cache import AIRFLOW, Looks, NoAnswer
from airflow_roir.page.continuing import continuation, options_text
from airflow_roir.page.failures import Failure, failures_of, shown
from airflow_roir.page.targets import Found, Run, operations_of, read_run, runs_of

# If one of several databases doesn't answer in this time, the others are shown without it.
SEVERAL_S = 4.0
# An index may have hundreds; those whose compaction would free most are worth a row.
MOST_SEGMENTS = 20
CREATORS = "SELECT id, created_by FROM roir.operation WHERE id = ANY (%(ids)s)"


async def the_run(looks: Looks, dag_id: str, run_id: str) -> Run:
    """The DAG run that a page is about."""
    return await looks.look(AIRFLOW, ("run", dag_id, run_id), lambda: read_run(dag_id, run_id))


async def failures(looks: Looks, run: Run, task_id: str, map_index: int) -> list[Failure]:
    """The tasks of the run that failed, and why; first the one that the page is about, if it is about one."""
    of_run = ("failures", run.dag_id, run.run_id)
    return shown(await looks.look(AIRFLOW, of_run, lambda: failures_of(run.dag_id, run.run_id)), task_id, map_index)


async def connections(looks: Looks) -> list[str]:
    """The ids of the connections that the pages may look into."""
    return await looks.look(AIRFLOW, "connections", databases.connection_ids)


async def operations_found(looks: Looks, run: Run) -> tuple[list[Found], list[str]]:
    """The run's operations, in the connection that its form names or in all, and the connections that can't be read."""
    ids = [run.connection] if run.connection else await connections(looks)
    found: list[Found] = []
    troubles: list[str] = []

    async def look(connection_id: str) -> None:
        def work() -> list[Found]:
            with databases.reading(connection_id) as database:
                seen = operations_of(database, connection_id, run)
                idle = [one.operation for one in seen if one.drives and one.status == "running" and not one.at_work]
                if idle:
                    fates.settle_runs(connection_id, database, idle)
                paused = [one.operation for one in seen if one.status == "paused" and one.elsewhere]
                gone = fates.left(database, paused)
                return [replace(one, left=one.left or one.operation in gone) for one in seen]

        key = ("operations", run.dag_id, run.run_id, run.adopted)
        try:
            found.extend(await looks.look(connection_id, key, work, SEVERAL_S))
        except DBAPIError as error:
            troubles.append(databases.trouble(connection_id, error))
        except NoAnswer as reason:
            troubles.append(str(reason))
        except (SchemaVersionMismatch, NotFound, InvalidInput) as reason:
            # In a DAG of ours the form names the connection; elsewhere the database may be unrelated to the run.
            if run.is_ours:
                troubles.append(str(reason))

    await asyncio.gather(*map(look, ids))
    return sorted(found, key=lambda one: (not one.drives, not one.at_work, -one.operation)), sorted(troubles)


def choose(found: list[Found], kind: str, connection: str | None, operation: int | None) -> Found | None:
    """The operation that the request names; otherwise the first of that kind, or of any."""
    if operation is not None:
        return next((one for one in found if (one.operation, one.connection) == (operation, connection)), None)
    of_kind = [one for one in found if not kind or kind == (one.kind if one.kind in ("verify", "compact") else "build")]
    return next(iter(of_kind or found), None)


def progress_of(connection_id: str, operation: int, task: NextTask | None = None) -> dict[str, Any]:
    """An operation's progress and state, for JSON. task: the one that will drive it."""
    from airflow_roir.engine.snapshot.details import progress

    with databases.reading(connection_id) as database:
        one = progress(database, operation_id=operation, next_task=task)
        warned = warnings_of(database, [one])
    return one.as_dict(whole=True) | {"state": shown_state(state_of(one)), "long_pause": warned.get(operation)}


def warnings_of(database: Database, ones: Sequence[OperationStatus]) -> dict[int, str]:
    """The warnings of those that are paused or abandoned for long."""
    left = [one.operation_id for one in ones if one.status in (Status.PAUSED, ABANDONED)]
    if not left:
        return {}
    with database.transaction() as connection:
        found = long_pauses(connection, left[0] if len(left) == 1 else None)
    return {one.operation_id: one.text for one in found}


def shown_state(state: State) -> dict[str, str]:
    """The state without its text, which contains an age and so would be sent again at each look."""
    return {"name": state.name, "word": state.word, "note": state.note, "remedy": state.remedy}


def duplicates_of(connection_id: str, operation: int, after: int) -> dict[str, Any]:
    """A page of an operation's duplicates, those after an id."""
    from airflow_roir.engine.unique import duplicate_report

    with databases.reading(connection_id) as database:
        return duplicate_report.page(database, operation, after)


def indexes_of(connection_id: str) -> list[dict[str, Any]]:
    """All indexes of a connection's database, with the runs and the states of their operations.

    continues: the run that would continue an abandoned operation.
    """
    from airflow_roir.engine.snapshot.index import indexes

    with databases.reading(connection_id) as database:
        fates.settle_runs(connection_id, database)
        found = [one.as_dict() | {"segments": shown_segments(one.segments)} for one in indexes(database)]
        unfinished = [one["operation"] for one in found if one["operation"] is not None]
        runs = runs_of(database, unfinished)
        deleted = fates.deleted(runs)
        states = states_of(database, connection_id, unfinished, deleted)
        runs = {operation: run for operation, run in runs.items() if operation not in deleted}
    nothing: dict[str, Any] = {"state_of_operation": None, "continues": None}
    return [one | {"run": runs.get(one["operation"])} | states.get(one["operation"], nothing) for one in found]


def states_now(connection_id: str) -> dict[str, tuple[str, int | None]]:
    """The state of each index, and its unfinished operation, by its name: one statement."""
    from airflow_roir.engine.snapshot.index import states

    with databases.reading(connection_id) as database:
        return states(database)


def states_of(
    database: Database, connection_id: str, ids: Sequence[int], deleted: Collection[int] = ()
) -> dict[int, dict[str, Any]]:
    """The states of unfinished operations, and what continues those that no run drives, and none will.

    deleted: those whose last run isn't in Airflow any more.
    """
    if not ids:
        return {}
    with database.transaction() as connection:
        shown = rows(connection, ids)
        by = {row.id: row.created_by for row in execute(connection, CREATORS, {"ids": list(ids)})}
    warned = warnings_of(database, shown)
    idle = [one.operation_id for one in shown if one.status == Status.PAUSED and not one.is_fresh]
    gone = fates.left(database, idle)
    left = {one.operation_id: one.status == ABANDONED or one.operation_id in gone for one in shown}
    strays = {one.operation_id for one in shown if one.driven and one.operation_id in deleted}
    return {
        one.operation_id: {
            "state_of_operation": shown_state(state_of(one))
            | {
                "noun": noun(one),
                "long_pause": warned.get(one.operation_id),
                "why": _why(one, left[one.operation_id] and one.operation_id in deleted, one.operation_id in strays),
                "left": left[one.operation_id],
                # No run's page has a button for it.
                "stray": one.operation_id in strays,
            },
            "continues": continuation(
                connection_id, one.index, one.kind, by[one.operation_id], options_text(one.options)
            )
            if left[one.operation_id]
            else None,
        }
        for one in shown
    }


def _why(one: OperationStatus, deleted: bool, stray: bool) -> str:
    """The cause of the pause and what continues it; of an abandoned one only that its run was deleted, if it was.

    stray: a process drives it whose run isn't in Airflow any more.
    """
    if stray:
        return f"{state_of(one).word.lower()}: its run isn't in this Airflow, but the run's process still works"
    if not deleted:
        return f"{paused_by(one)}; {way_on(one)}" if one.status == Status.PAUSED else ""
    on = way_on_without_run(one.index, one.paused_by or "", one.owner)
    return f"{paused_by(one) if one.status == Status.PAUSED else 'abandoned'}; {on}"


def shown_segments(found: Sequence[Segment]) -> dict[str, Any] | None:
    """The segments to show, for JSON; None if nothing is published."""
    if not found:
        return None
    rows = [one.rows for one in found if one.rows is not None]
    needed = [one.needed for one in found if one.needed is not None]
    return {
        "count": len(found),
        "rows": sum(rows) if len(rows) == len(found) else None,
        "bytes": sum(one.bytes for one in found),
        "needed": sum(needed) if len(needed) == len(found) else None,
        "worst": [one.as_dict() for one in worst_first(found)[:MOST_SEGMENTS]],
    }
