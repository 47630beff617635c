"""Acts between the engine's statements, or changes a statement on its way to the server, by SQLAlchemy's events."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from airflow_roir.engine.database import Database


@contextmanager
def before(database: Database, beginning: str, act: Callable[[], object], at: int = 1) -> Iterator[list[str]]:
    """In the block, calls `act` once: before statement number `at` of those that begin like this.

    Yields these statements, including the next one. Fails if the block ends before that statement.
    """
    seen: list[str] = []

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().startswith(beginning):
            seen.append(statement)
            if len(seen) == at:
                act()

    event.listen(database.engine, "before_cursor_execute", look)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", look)
    assert len(seen) >= at, f"{len(seen)} statements began with {beginning}"


@contextmanager
def changed(database: Database, old: str, new: str) -> Iterator[None]:
    """Sends `new` for whatever `old`, a regular expression, matches in a statement. Something must match."""
    found = 0

    def change(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        nonlocal found
        sent, times = re.subn(old, lambda _: new, statement)
        found += times
        return sent, parameters

    event.listen(database.engine, "before_cursor_execute", change, retval=True)
    try:
        yield
    finally:
        event.remove(database.engine, "before_cursor_execute", change)
        assert found, f"nothing like {old} was sent"


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed(engine: Any, at: int) -> Iterator[list[str]]:
    """In the block, the process dies before statement number `at`. Yields the statements up to that one.

    engine: the engine whose statements count, or the class for those of all databases.
    """
    seen: list[str] = []

    def die(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)
        if len(seen) == at:
            raise Killed

    event.listen(engine, "before_cursor_execute", die)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", die)
