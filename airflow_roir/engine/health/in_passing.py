"""Looks for faults in passing: waits for no lock, and looks at many indexes by as many statements as at two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute, has_vanished, sqlstate
from airflow_roir.engine.health import faults
from airflow_roir.engine.side_by_side import AT_ONCE, side_by_side
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT, PATIENCE_MS

# More to look for beside faults, of an operation's index.
More = Callable[[Connection, int], list[str]]


def warnings_at_once(connection: Connection, operation_id: int, index: str, *more: More) -> list[str]:
    """As `faults.warnings`, for one index, but waits for no lock, though definitions of views and bounds are read under
    one.

    more: other looks at the operation's index, which need not find faults.
    If another session has an exclusive lock on the table or the view, a line says that they weren't checked.
    """
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        return [
            *faults.warnings(connection, operation_id),
            *(line for look in more for line in look(connection, operation_id)),
        ]
    except DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT:
            raise
        return [
            f"index {index}: can't be checked now, since a session holds a lock on its table or its view; look again "
            "when that is released"
        ]
    finally:
        savepoint.rollback()


def warnings_of_many(connection: Connection, asked: Mapping[int, tuple[int, str]], *more: More) -> dict[int, list[str]]:
    """As `warnings_at_once`, by index id. asked: for each index id its newest operation and its name."""
    found: dict[int, list[str]] = {}
    ids = list(asked)
    # The definitions of views are read under locks, which last until the end of a savepoint.
    for first in range(0, len(ids), AT_ONCE):
        found |= _together(connection, {one: asked[one] for one in ids[first : first + AT_ONCE]}, more)
    return found


def _together(
    connection: Connection, asked: Mapping[int, tuple[int, str]], more: tuple[More, ...]
) -> dict[int, list[str]]:
    """The warnings of some indexes. If a look at one of them fails, each half of them is looked at apart."""
    ids = list(asked)
    if len(ids) == 1:
        operation_id, name = asked[ids[0]]
        return {ids[0]: warnings_at_once(connection, operation_id, name, *more)}
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        subjects = faults.subjects(connection, ids)
        looks = [partial(_look, of=subjects[one], operation_id=asked[one][0], more=more) for one in ids]
        return dict(zip(ids, side_by_side(connection, looks), strict=True))
    except DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT and not has_vanished(error):
            raise
    finally:
        savepoint.rollback()
    half = len(ids) // 2
    first, second = ({one: asked[one] for one in some} for some in (ids[:half], ids[half:]))
    return _together(connection, first, more) | _together(connection, second, more)


def _look(connection: Connection, of: faults.Subject, operation_id: int, more: tuple[More, ...]) -> list[str]:
    return [
        *faults.warnings_in(connection, of),
        *(line for look in more for line in look(connection, operation_id)),
    ]
