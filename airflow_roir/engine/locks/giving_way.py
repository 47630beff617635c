"""A long statement of ours gives way to whoever waits for its lock, as autovacuum does.

The statement can't look around while it runs: a thread does, with a session of its own, and cancels it. What it has
done is rolled back; whoever waits gets the lock, and the work starts again after that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.retry.trouble import CANCELED

# How long somebody waits before we notice. A look takes a millisecond.
LOOK_EVERY_S = 0.1
LOOK_AGAIN_S = 2.0

# Not our own kind: the seal of a worker that was fenced, or its vacuum, has nothing to win here.
WAITERS = """
SELECT EXISTS (
  SELECT FROM (SELECT DISTINCT l.pid FROM pg_locks l
                WHERE NOT l.granted AND l.locktype = 'relation'
                  AND l.mode NOT IN ('ShareLock', 'ShareUpdateExclusiveLock')
                  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                  AND l.relation = ANY (SELECT to_regclass(n)::oid FROM unnest(%(relations)s::text[]) n)
               OFFSET 0) w
   WHERE %(pid)s = ANY (pg_blocking_pids(w.pid)))
"""


class GaveWay(Exception):  # no error: the work is to be done again
    """The statement was cancelled since somebody waited for its lock. Its transaction is rolled back."""


@contextmanager
def giving_way(database: Database, connection: Connection, relations: Sequence[str]) -> Iterator[None]:
    """While the block works on `connection`, cancel it as soon as somebody waits for a lock that it has.

    relations: the names of those whose locks count. Raises GaveWay then, out of the block. A transaction of the block
    must begin and end within it.
    """
    # Asked of the server: what a session was told at its start is a pooler's own number where there is one.
    pid = execute(connection, "SELECT pg_backend_pid()").scalar_one()
    connection.rollback()
    watch = _Watch(database, pid, relations)
    watch.start()
    try:
        yield
    except DBAPIError as error:
        watch.end()
        if watch.cancelled and sqlstate(error) == CANCELED:
            raise GaveWay from error
        raise
    finally:
        watch.end()
    if watch.cancelled:
        # It came too late to cancel the work; it must not cancel what comes after it.
        with_no_effect(connection)


def with_no_effect(connection: Connection) -> None:
    """Let a cancel that may be on its way hit a statement that doesn't matter."""
    try:
        execute(connection, "SELECT 1")
    except DBAPIError as error:
        if sqlstate(error) != CANCELED:
            raise
    finally:
        connection.rollback()


class _Watch:
    """Looks regularly whether somebody waits. cancelled: somebody did, and the work was told to stop."""

    def __init__(self, database: Database, pid: int, relations: Sequence[str]) -> None:
        self._database = database
        self._values = {"pid": pid, "relations": list(relations)}
        self._over = threading.Event()
        # Held while a cancel is sent: none is on its way once `end` has returned.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="roir-giving-way", daemon=True)
        self.cancelled = False

    def start(self) -> None:
        """Begin to look, once the work has lasted for a while: most work ends before."""
        self._thread.start()

    def end(self) -> None:
        """The work is done, one way or the other."""
        with self._lock:
            self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                with self._database.connect() as connection:
                    self._look_until_the_end(connection)
            except DBAPIError:
                # The work meets whatever is wrong with the server by itself. Nobody asks a server ten times a second
                # for a session that it hasn't.
                self._over.wait(LOOK_AGAIN_S)

    def _look_until_the_end(self, connection: Connection) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            waits = execute(connection, WAITERS, self._values).scalar_one()
            connection.rollback()
            if not waits:
                continue
            with self._lock:
                if self._over.is_set():
                    return
                # A cancel by libpq holds up all threads of the process, for as long as a network likes.
                execute(connection, "SELECT pg_cancel_backend(%(pid)s)", self._values)
                self.cancelled = True
                connection.rollback()
