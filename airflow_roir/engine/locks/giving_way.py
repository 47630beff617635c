"""Makes a long statement of roir give way to sessions that wait for its lock, as autovacuum does.

The statement can't look around while it runs: a thread does, with a session of its own, and cancels it. Its work is
rolled back, the session that waits gets the lock, and the work starts again after that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.retry.trouble import CANCELED

# How long a session may wait before roir notices. A look takes a millisecond.
LOOK_EVERY_S = 0.1
LOOK_AGAIN_S = 2.0

# Without the lock modes of roir's own work: to give way to the seal or vacuum of a fenced worker gains nothing.
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


class GaveWay(Exception):  # no error: the work must be done again
    """The statement was cancelled, since another session waited for its lock. Its transaction is rolled back."""


@contextmanager
def giving_way(database: Database, connection: Connection, relations: Sequence[str]) -> Iterator[None]:
    """While the block works on `connection`, cancel it as soon as another session waits for one of its locks.

    Then raises GaveWay. relations: the names of those whose locks count. Transactions of the block must begin and end
    within it.
    """
    # By a query: the number that libpq got at the session's start is a pooler's own, if there is one.
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
        # The cancel came too late for the work; it must not hit the next statement.
        with_no_effect(connection)


def with_no_effect(connection: Connection) -> None:
    """Send a statement that doesn't matter, for a cancel that may be on its way to hit."""
    try:
        execute(connection, "SELECT 1")
    except DBAPIError as error:
        if sqlstate(error) != CANCELED:
            raise
    finally:
        connection.rollback()


class _Watch:
    """Looks regularly for sessions that wait. cancelled: one did, and the work was cancelled."""

    def __init__(self, database: Database, pid: int, relations: Sequence[str]) -> None:
        self._database = database
        self._values = {"pid": pid, "relations": list(relations)}
        self._over = threading.Event()
        # Held while a cancel is sent: none is on its way once `end` has returned.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="roir-giving-way", daemon=True)
        self.cancelled = False

    def start(self) -> None:
        """Start the thread, which looks only after a while: most work ends before."""
        self._thread.start()

    def end(self) -> None:
        """Stop: the work has ended, with or without success."""
        with self._lock:
            self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                with self._database.connect() as connection:
                    self._look_until_the_end(connection)
            except DBAPIError:
                # The work meets the server's problem itself. Don't ask a server ten times a second for a session that
                # it hasn't.
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
                # Not libpq's cancel: it would hold up all threads of the process for as long as the network takes.
                execute(connection, "SELECT pg_cancel_backend(%(pid)s)", self._values)
                self.cancelled = True
                connection.rollback()
