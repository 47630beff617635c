"""Sessions for many short transactions: those of a run, its heartbeats.

A new session takes some 9 ms, and a run has dozens of transactions. In a new one, the server also reads catalogs and
plans statements again that a kept one remembers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import CONNECT_TIMEOUT_S, Database
from airflow_roir.engine.sessions import own_session
from airflow_roir.engine.sessions.session import pin
from airflow_roir.errors import InvalidInput

# By a session that began on a standby, a run would follow that server although its primary is back.
IS_PRIMARY = "SELECT NOT pg_catalog.pg_is_in_recovery()"
# The seconds that a session of a run's transactions lives. The address may lead to another server by now, while this
# one still answers: then the run and its workers would be on two servers.
MOST_AGE_S = 1.0
# All of DISCARD ALL but the plans. Code of others, such as an event trigger, may have left something in the session.
RESET = """
CLOSE ALL; SET SESSION AUTHORIZATION DEFAULT; RESET ALL; DEALLOCATE ALL; UNLISTEN *;
SELECT pg_catalog.pg_advisory_unlock_all(); DISCARD TEMP; DISCARD SEQUENCES
"""


class KeptSession:
    """Keeps one session of a database for transactions that follow one another, in one thread.

    Between two transactions the session is idle: it holds no lock and no snapshot. Before each transaction it is reset,
    and its settings are pinned, as in a new one. It must be young, answer, be on a primary, and pass the check of
    `one_history`. Otherwise a new one replaces it, with all checks of new sessions. An error ends the session.
    most_age_s: the seconds that a session lives.
    """

    def __init__(self, database: Database, most_age_s: float = math.inf) -> None:
        self.database = database
        self._most_age_s = most_age_s
        self._session: Connection | None = None
        self._opened_at = 0.0
        self._used = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """The session for one transaction, committed at the end of the block, rolled back on an error.

        Raises what a new session raises, HistoryChanged among them; RuntimeError within another transaction, which a
        check of the session would end, and its writes would be lost without an error.
        """
        if not self._used.acquire(blocking=False):
            raise RuntimeError("a kept session has one transaction at a time")
        try:
            connection = self._present()
            with connection.begin():
                yield connection
        except BaseException:
            self.close()
            raise
        finally:
            self._used.release()

    def close(self) -> None:
        """End the session, if there is one. The next transaction opens another."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(DBAPIError):
                session.close()

    def _present(self) -> Connection:
        if self._session is not None and not self._is_as_new(self._session):
            # Its end is known here, and unknown to SQLAlchemy, which would want to roll back.
            self._session.invalidate()
            self.close()
        if self._session is None:
            self._opened_at = time.monotonic()
            self._session = self.database.engine.connect()
        return self._session

    def _is_as_new(self, session: Connection) -> bool:
        raw: Any = session.connection.dbapi_connection
        look = self.database.look
        if time.monotonic() - self._opened_at > self._most_age_s:
            return False
        try:
            # A server that hangs is found as soon as it would be by a new session.
            with own_session.answering(raw, CONNECT_TIMEOUT_S):
                raw.autocommit = True
                with raw.cursor() as cursor:
                    # psycopg2 decodes as before, and sends no encoding that it thinks the session has.
                    cursor.execute(f"{RESET}; SET client_encoding = '{raw.encoding}'")
                    cursor.execute(IS_PRIMARY)
                    [(is_primary,)] = cursor.fetchall()
                pin(raw)
                if look is not None:
                    look(raw)
        except (psycopg2.Error, InvalidInput):
            return False
        return bool(is_primary)


class _KeptSessions:
    """Gives each transaction an idle session, if there is one, else a new one; keeps the last that became idle."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._idle: KeptSession | None = None
        self._ended = False
        self._lock = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A session for one transaction, as a KeptSession gives it; a second one within another transaction."""
        session = self._swap(None) or KeptSession(self._database, MOST_AGE_S)
        with session.transaction() as connection:
            yield connection
        if (other := self._swap(session)) is not None:
            other.close()
        if self._ended:
            self.close()

    def close(self) -> None:
        """End the idle session."""
        if (idle := self._swap(None)) is not None:
            idle.close()

    def end(self) -> None:
        """End all sessions: those in use, after their transactions."""
        self._ended = True
        self.close()

    def _swap(self, session: KeptSession | None) -> KeptSession | None:
        with self._lock:
            before, self._idle = self._idle, session
        return before


@contextmanager
def kept_sessions(database: Database) -> Iterator[None]:
    """The transactions of the block, in any thread, take one kept session by turns. Blocks may be nested.

    A transaction that begins while another is open has a session of its own, so no more are open at once than without
    the block, but for an idle one.
    """
    if database.kept is not None:
        yield
        return
    database.kept = kept = _KeptSessions(database)
    try:
        yield
    finally:
        database.kept = None
        kept.end()


def close_kept(database: Database) -> None:
    """Let the next transaction open a session, for a step that decides something."""
    kept = database.kept
    if kept is not None:
        kept.close()
