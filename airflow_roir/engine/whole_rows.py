"""The command rows-view: makes the rows view of an index, makes it follow its table, or drops it."""

from __future__ import annotations

from collections.abc import Callable

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.lock_waits import Waiter
from airflow_roir.engine.locks.locks import Attempts
from airflow_roir.engine.readers import rows_view
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.server_timeline import in_one_history
from airflow_roir.errors import InvalidInput, NotFound


@in_one_history
def make_rows_view(
    database: Database,
    index: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> str:
    """Make the view `<index>_rows` of an index, or make it follow its table; returns its name as SQL.

    Safe to repeat. patience_s: how long to try for the lock on a view that exists. Grants are kept; a new view has
    none. Raises NotFound, LockNotAcquired, and InvalidInput: the index is over shards or isn't published, or the name
    is taken; nothing was changed.
    """

    def body(connection: Connection) -> str:
        found = _found(connection, index)
        before = rows_view.shown(connection, found.id)
        rows_view.make(connection, operations.index_name(found), found.id)
        if before is None:
            operations.record_event(connection, found.id, None, actor, "rows view")
        name = rows_view.shown(connection, found.id)
        assert name is not None
        return name

    return _attempt(database, index, body, report, patience_s)


@in_one_history
def drop_rows_view(
    database: Database,
    index: str,
    actor: str,
    report: Callable[[str], None] = lambda line: None,
    patience_s: float = 60.0,
) -> str:
    """Drop the rows view of an index; returns its name as SQL.

    Raises NotFound (no index, or it has none), LockNotAcquired, and InvalidInput if other objects depend on the view:
    nothing was changed.
    """

    def body(connection: Connection) -> str:
        found = _found(connection, index)
        name = rows_view.shown(connection, found.id)
        if name is None:
            raise NotFound(f"index {operations.index_name(found)} has no rows view")
        rows_view.drop(connection, found.id)
        operations.record_event(connection, found.id, None, actor, "drop rows view")
        return name

    try:
        return _attempt(database, index, body, report, patience_s)
    except DBAPIError as error:
        if not isinstance(error.orig, pg_errors.DependentObjectsStillExist):
            raise
        raise InvalidInput(
            f"the rows view of index {index} can't be dropped: {error.orig.diag.message_detail}. Nothing was changed. "
            f"Drop these objects first. Then: roir rows-view {argument(index)} --drop"
        ) from error


def _found(connection: Connection, index: str) -> operations.Row[object]:
    found = operations.find_index(connection, parse_name(index, "index"))
    if found.shard_table is not None:
        raise rows_view.over_shards(operations.index_name(found))
    if found.expressions or found.condition:
        raise rows_view.computed(operations.index_name(found))
    return found


def _attempt(
    database: Database,
    index: str,
    body: Callable[[Connection], str],
    report: Callable[[str], None],
    patience_s: float,
) -> str:
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        found = _found(connection, index)
        name = rows_view.shown(connection, found.id)
        held = [] if name is None else [name]
        oids = [] if name is None else [execute(connection, "SELECT %(n)s::regclass::oid", {"n": name}).scalar_one()]
    about = name or str(rows_view.name_of(operations.index_name(found)))
    waiter = Waiter("rows-view", str(operations.index_name(found)))
    return Attempts(database, about, oids, database.limits.attempt_ms, patience_s, waiter=waiter).run(
        body, report, held
    )
