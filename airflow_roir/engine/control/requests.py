"""The requests of users for a live operation: pause, resume, change, abort; by the functions that SQL has, too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.live_options import check_throttle
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import Complaints, IllegalTransition, InvalidInput, NotFound, RoirError
from airflow_roir.options import LIVE_OPTIONS, check_live_options
from airflow_roir.signals import with_nearest_signals


def pause(database: Database, index: str, actor: str, reason: str = "", operation: int | None = None) -> OperationRow:
    """Pauses the running operation of an index; a no-op if it is paused already.

    Takes effect at once in the control tables and within one batch in the workers, which commit their current batch.
    operation: the id that the index's latest operation must have; None: any.
    Raises NotFound, IllegalTransition (nothing is running, or another operation has begun since).
    """
    return _request(database, "pause", index, {"reason": reason or "on request", "actor": actor}, operation)


def resume(
    database: Database, index: str, actor: str, operation: int | None = None, **options: int | str | None
) -> OperationRow:
    """Lifts the pause of an operation: a DAG run that waits for that continues. options: as for `change_options`.

    `resume` drives nothing itself; `start_run` does. operation: as for `pause`.
    Raises NotFound, InvalidInput, IllegalTransition (not paused, or another operation has begun since).
    """
    _check(database, index, options)
    return _request(database, "resume", index, {"actor": actor, **options}, operation)


def change_options(
    database: Database, index: str, *, actor: str, operation: int | None = None, **options: int | str | None
) -> OperationRow:
    """Changes a live operation's options, running or paused; workers follow at their next batch. None keeps a value.

    options: those of `LIVE_OPTIONS`, as `BuildOptions` has them; 0 means no limit, or never. A throttle changes single
    limits: `replica_lag=50MB` sets that limit, `replica_lag=off` removes it, `off` removes all. An event is written for
    each value that really changes. operation: as for `pause`.
    Raises InvalidInput for a bad value (nothing is changed), or for no value at all; NotFound; IllegalTransition
    (nothing is live, or another operation has begun since).
    """
    _check(database, index, options)
    return _request(database, "change", index, {"actor": actor, **options}, operation)


def _check(database: Database, index: str, options: Mapping[str, object]) -> None:
    unknown = set(options) - set(LIVE_OPTIONS)
    if unknown:
        raise TypeError(f"no options of a live operation: {', '.join(sorted(unknown))}")
    wrong = Complaints()
    with wrong.noted():
        check_live_options(options)
    look_further(wrong, database, index, options)
    wrong.settle()


def look_further(wrong: Complaints, database: Database, index: str, options: Mapping[str, object]) -> None:
    """If options are wrong, adds what is wrong with the index's name and the throttle, so that one error says all.

    Adds nothing if the database can't be asked.
    """
    if not wrong:
        return
    with suppress(DBAPIError, RoirError):
        with wrong.noted():
            operations.find_operation(database, index)
        with wrong.noted():
            check_throttle(database, options.get("throttle"))


def request_abort(
    database: Database, index: str, actor: str, reason: str = "", operation: int | None = None
) -> OperationRow:
    """Marks an operation as `aborting`, and so fences each worker at its next commit; a no-op if it is marked already.

    `abort.abort` or a clean-up then removes the generation. operation: as for `pause`. Raises NotFound,
    IllegalTransition.
    """
    return _request(database, "abort", index, {"reason": reason or "on request", "actor": actor}, operation)


# The errors that the functions in migrations/sql/operations.sql raise.
_REFUSALS = {"P0002": NotFound, "55000": IllegalTransition, "42P09": InvalidInput, "22023": InvalidInput}


def _request(
    database: Database, function: str, index: str, values: dict[str, Any], operation: int | None = None
) -> OperationRow:
    """Calls one of the SQL functions that users can call, too, so that each request has one implementation."""
    arguments = ", ".join(f"{name} => %({name})s" for name in values)
    name = str(parse_name(index, "index"))
    try:
        with database.transaction() as connection:
            check_schema(connection, writes=True)
            if operation is not None:
                expect(connection, name, operation)
            execute(connection, f"SELECT roir.{function}(%(index)s, {arguments})", {"index": name, **values})
            return operations.live_or_last(connection, parse_name(index, "index"))
    except DBAPIError as error:
        refusal = _REFUSALS.get(sqlstate(error))
        if refusal is None:
            raise
        raise refusal(with_nearest_signals(said(error))) from None


def expect(connection: Connection, index: str, operation_id: int) -> None:
    """Locks the latest operation of an index, if it is the expected one, so that no other begins in this transaction.

    Raises IllegalTransition if another one has begun since, DBAPIError as the SQL functions do.
    """
    latest = execute(connection, "SELECT l.id, l.kind FROM roir.latest_operation(%(index)s) l", {"index": index}).one()
    if latest.id != operation_id:
        raise has_begun_since(index, operation_id, latest)


def has_begun_since(index: str, operation_id: int, latest: Row[Any]) -> IllegalTransition:
    """The error if an operation isn't the latest of its index any more. latest: a row with id and kind."""
    return IllegalTransition(
        f"index {index}: operation {operation_id} has ended; {operations.named(latest)} has begun since"
    )
