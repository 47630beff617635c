"""Looks for faults in passing: waits for no lock, and looks at many indexes by as many statements as at two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute, has_vanished, sqlstate
from airflow_roir.engine.health import faults
from airflow_roir.engine.sessions.side_by_side import AT_ONCE, side_by_side
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT, PATIENCE_MS

T = TypeVar("T")

# More to look for beside faults, of an operation's index.
More = Callable[[Connection, int], list[str]]

LOCKED = (
    "index {index}: can't be checked now, since a session holds a lock on its table or its view; look again when that "
    "is released"
)


def warnings_of_many(connection: Connection, asked: Mapping[int, tuple[int, str]], *more: More) -> dict[int, list[str]]:
    """As `faults.warnings`, for each of these indexes, but waits for no lock.

    asked: for each index id its newest operation and its name. more: other looks at that operation's index, which need
    not find faults. If another session has an exclusive lock on a table or a view, a line says that its index wasn't
    checked: definitions of views and bounds are read under a lock.
    """
    found = at_once(connection, {one: operation for one, (operation, _) in asked.items()}, *more)
    return {one: [LOCKED.format(index=asked[one][1])] if lines is None else lines for one, lines in found.items()}


def at_once(connection: Connection, asked: Mapping[int, int], *more: More) -> dict[int, list[str] | None]:
    """As `warnings_of_many`, but None for an index that another session locks. asked: operations by index id."""
    found: dict[int, list[str] | None] = {}
    ids = list(asked)
    # The definitions of views are read under locks, which last until the end of a savepoint.
    for first in range(0, len(ids), AT_ONCE):
        found |= _together(connection, {one: asked[one] for one in ids[first : first + AT_ONCE]}, more)
    return found


def _together(
    connection: Connection, asked: Mapping[int, int], more: tuple[More, ...], again: bool = True
) -> dict[int, list[str] | None]:
    """The warnings of some indexes. If a look at one of them fails, each half of them is looked at apart.

    again: if DDL of others drops a relation of a single index during the look, repeat the look.
    """
    ids = list(asked)
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        subjects = faults.subjects(connection, ids)
        looks = [partial(_look, of=subjects[one], operation_id=asked[one], more=more) for one in ids]
        return dict(zip(ids, side_by_side(connection, looks), strict=True))
    except DBAPIError as error:
        is_locked = sqlstate(error) == LOCK_TIMEOUT
        if not is_locked and not has_vanished(error):
            raise
        if len(ids) == 1 and is_locked:
            return {ids[0]: None}
        if len(ids) == 1 and not again:
            raise
    finally:
        savepoint.rollback()
    if len(ids) == 1:
        return _together(connection, asked, more, again=False)
    half = len(ids) // 2
    first, second = ({one: asked[one] for one in some} for some in (ids[:half], ids[half:]))
    return _together(connection, first, more) | _together(connection, second, more)


def looks_of_many(connection: Connection, looks: Mapping[int, Callable[[Connection], T]], locked: T) -> dict[int, T]:
    """The results of looks at many indexes, by index id, without a wait for locks.

    locked: the result if another session has an exclusive lock on what a look reads.
    """
    ids = list(looks)
    if len(ids) > AT_ONCE:
        rest = {one: looks[one] for one in ids[AT_ONCE:]}
        first = {one: looks[one] for one in ids[:AT_ONCE]}
        return looks_of_many(connection, first, locked) | looks_of_many(connection, rest, locked)
    if not ids:
        return {}
    savepoint = connection.begin_nested()
    try:
        execute(connection, f"SET LOCAL lock_timeout = {PATIENCE_MS}")
        return dict(zip(ids, side_by_side(connection, list(looks.values())), strict=True))
    except DBAPIError as error:
        if sqlstate(error) != LOCK_TIMEOUT and not has_vanished(error):
            raise
    finally:
        savepoint.rollback()
    if len(ids) == 1:
        return {ids[0]: locked}
    half = len(ids) // 2
    first, second = ({one: looks[one] for one in some} for some in (ids[:half], ids[half:]))
    return looks_of_many(connection, first, locked) | looks_of_many(connection, second, locked)


def _look(connection: Connection, of: faults.Subject, operation_id: int, more: tuple[More, ...]) -> list[str]:
    return [
        *faults.warnings_in(connection, of),
        *(line for look in more for line in look(connection, operation_id)),
    ]
