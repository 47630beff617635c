"""One history: what is decided of a server is done to no other one.

A server that fails over to a replica may have lost its last commits, and one that was recovered to an earlier moment
has; ids are then given again. Each transaction is right wherever it runs, and so is what was committed, which is always
a prefix of what was. Only what a process remembers from one transaction to the next isn't: an id of what was never made
there, a copy that is finished here and not there. So who remembers something opens all of its sessions in one history,
and begins again in another.
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

# So many failovers during one command are one that can't be worked with.
MOST_FAILOVERS = 5
# A promotion, and a recovery to an earlier moment, begin a new timeline. A standby has none of its own.
HISTORY = """
SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system()) || '/'
       || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8)
 WHERE NOT pg_catalog.pg_is_in_recovery()
"""


class _Pin:
    """The history that the sessions of a block have in common: that of the first one which writes."""

    def __init__(self) -> None:
        self.history: str | None = None

    def look(self, connection: Any) -> None:
        """Of a psycopg2 session that has just begun. Raises HistoryChanged."""
        found = _history(connection)
        if found is None:
            return
        self.history = self.history or found
        if found != self.history:
            raise HistoryChanged(
                "the server has failed over to a replica, or was restored, in the middle of this, and may have lost "
                "its last commits. Nothing was changed by what had begun before. Run it again: it goes on after what "
                "this server has"
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
        # A server without such functions, or that keeps them from us.
        return None
    finally:
        if not connection.closed:
            connection.autocommit = False


@contextmanager
def one_history(database: Database) -> Iterator[None]:
    """Within the block, and in all threads, sessions are of one history. A block within the block is the same.

    Opening one of another history raises HistoryChanged.
    """
    if database.look is not None:
        yield
        return
    database.look = _Pin().look
    try:
        yield
    finally:
        database.look = None


def in_one_history(work: Callable[Concatenate[Database, P], T]) -> Callable[Concatenate[Database, P], T]:
    """For a function that is safe to repeat: in another history it begins again."""

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
