"""One history: decisions that were made on one server's state are never carried out on another's.

A server that fails over to a replica may have lost its last commits; one that was recovered to an earlier moment has
lost them, and gives the same ids again. Each single transaction is right on any server, and the commits that are left
are always a prefix of all. But a process may remember things from one transaction to the next that aren't true there:
the id of a row that doesn't exist, a copy that isn't finished. So a function that remembers anything opens all its
sessions in one history, and begins again in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg2

from airflow_roir.engine.database import Database
from airflow_roir.errors import HistoryChanged

P = ParamSpec("P")
T = TypeVar("T")

# A command during which a server fails over this often gives up.
MOST_FAILOVERS = 5
# A promotion, and a recovery to an earlier moment, begin a new timeline. A standby has none of its own.
HISTORY = """
SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()) || '/'
       || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8)
 WHERE NOT pg_catalog.pg_is_in_recovery()
"""


class _Pin:
    """The history that all sessions of a block share: that of the first session on a primary."""

    def __init__(self) -> None:
        self.history: str | None = None

    def look(self, connection: Any) -> None:
        """Check a psycopg2 session that has just begun. Raises HistoryChanged."""
        found = _history(connection)
        if found is None:
            return
        self.history = self.history or found
        if found != self.history:
            raise HistoryChanged(
                "the server has failed over to a replica, or was restored, while this ran, and may have lost its last "
                "commits. No open transaction was committed. Run it again: it continues after the server's last commit"
            )


def _history(connection: Any) -> str | None:
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute(HISTORY)
            found = cursor.fetchone()
            return None if found is None else str(found[0])
    except psycopg2.Error:
        if connection.closed:
            raise
        # The server lacks these functions, or our role may not call them.
        return None
    finally:
        if not connection.closed:
            connection.autocommit = False


@contextmanager
def one_history(database: Database) -> Iterator[None]:
    """Keeps all sessions that open during the block, in any thread, to one history. Blocks may be nested.

    If a session opens in another history, that raises HistoryChanged.
    """
    if database.look is not None:
        yield
        return
    if (kept := database.kept) is not None:
        # A session that is left from another history, on a server that still answers, must not decide this one.
        kept.close()
    database.look = _Pin().look
    try:
        yield
    finally:
        database.look = None


def in_one_history(work: Callable[Concatenate[Database, P], T]) -> Callable[Concatenate[Database, P], T]:
    """Decorates a function that is safe to repeat: if the history changes, it begins again."""

    def begun_again(database: Database, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if database.look is not None:
            return work(database, *args, **kwargs)
        for left in range(MOST_FAILOVERS, 0, -1):
            try:
                with one_history(database):
                    return work(database, *args, **kwargs)
            except HistoryChanged:
                if left == 1:
                    raise
        raise AssertionError

    return wraps(work)(begun_again)
