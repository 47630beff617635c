"""Checks that sessions are roir's alone: a pooler may give a server's session to another client after a transaction.

roir's settings would then reach into transactions of others, and theirs into roir's. The check doesn't rely on a
pooler's name or mode: it observes what the pooler does, by transactions that change nothing.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2
from psycopg2.extensions import POLL_OK, POLL_READ

from airflow_roir.errors import InvalidInput

PID = "SELECT pg_catalog.pg_backend_pid()"
# For sessions that are read-only by default: with DEFERRABLE the transaction might wait for its snapshot. In other
# sessions the query is sent alone, so that it holds none of a pool's sessions until the next statement.
BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE; "
    "SET LOCAL idle_in_transaction_session_timeout = 0"
)
# A pooler with few sessions is found in the first round. One that uses its sessions in turn, or whose sessions other
# clients take in between, is found in a later one.
ROUNDS = 4
# The wait for a second session: a pool in session mode that has only one lets it wait.
ANOTHER_S = 2.0
# The servers that were checked: DSN, host and port.
_ours: set[tuple[str, str, int]] = set()


def check(dsn: str, connection: Any, another: Callable[[], Any]) -> None:
    """Raise InvalidInput if other clients get a psycopg2 session's server session between its transactions.

    connection: in autocommit mode, just opened by `dsn`, without changed settings; another: opens an asynchronous
    connection. A process checks each server once.
    """
    place = (dsn, connection.info.host, connection.info.port)
    if place in _ours:
        return
    if _is_shared(connection, another):
        raise InvalidInput(
            f"a pooler at port {connection.info.port} gives the server's session to others after each transaction or "
            "statement, so that roir's settings would apply to theirs: use the server's own port, or a pool in "
            "session mode"
        )
    _ours.add(place)


def _is_shared(connection: Any, another: Callable[[], Any]) -> bool:
    alone = connection.get_parameter_status("default_transaction_read_only") == "off"
    mine = _server_pid(connection, alone)
    # At the start, a server sends its own process id; a pooler, which has no server session yet, sends another number.
    if mine == connection.info.backend_pid:
        return False
    other = _Other(another(), alone)
    try:
        for _ in range(ROUNDS):
            other.ask(ANOTHER_S)
            if _server_pid(connection, alone) != mine:
                return True
            other.ask(0)
            if other.pid is None:
                # The second client waits for a session, and doesn't get this one.
                return False
            if other.pid == mine:
                return True
            other.pid = None
    finally:
        other.close()
    return False


def _server_pid(connection: Any, alone: bool) -> int:
    with connection.cursor() as cursor:
        cursor.execute(PID if alone else f"{BEGIN}; {PID}")
        pid = int(cursor.fetchone()[0])
        if not alone:
            cursor.execute("COMMIT")
    return pid


class _Other:
    """A second, asynchronous session, whose answers the caller awaits for a limited time. pid: its server process."""

    def __init__(self, connection: Any, alone: bool) -> None:
        self._connection = connection
        self._alone = alone
        self._cursor: Any = None
        self.pid: int | None = None

    def ask(self, seconds: float) -> None:
        """Ask for the pid, unless it is known, and wait for the answer at most this long."""
        deadline = time.monotonic() + seconds
        while self.pid is None and self._is_ready(deadline):
            if self._cursor is None:
                self._cursor = self._connection.cursor()
                self._cursor.execute(PID if self._alone else f"{BEGIN}; {PID}")
            else:
                self.pid = int(self._cursor.fetchone()[0])
                self._end()

    def _end(self) -> None:
        if not self._alone:
            self._cursor.execute("COMMIT")
            self._is_ready(time.monotonic() + ANOTHER_S)
        self._cursor = None

    def _is_ready(self, deadline: float) -> bool:
        while (state := self._connection.poll()) != POLL_OK:
            left = deadline - time.monotonic()
            ready = select.poll()
            ready.register(self._connection, select.POLLIN if state == POLL_READ else select.POLLOUT)
            if not ready.poll(max(left, 0) * 1000):
                return False
        return True

    def close(self) -> None:
        """End the session, even while it waits."""
        self._connection.close()


@contextmanager
def answering(connection: Any, seconds: float) -> Iterator[None]:
    """End a session if the block's statements get no answer from the server, or the pool, in time.

    Then raises psycopg2.OperationalError, as for a server that can't be reached.
    """
    given_up = threading.Event()
    line = socket.socket(fileno=os.dup(connection.fileno()))

    def give_up() -> None:
        given_up.set()
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except psycopg2.Error as error:
        if not given_up.is_set():
            raise
        raise psycopg2.OperationalError(
            f"no answer to a session's first statements within {seconds:g} s: the server hangs, or a pool in front of "
            "it has no session left"
        ) from error
    finally:
        timer.cancel()
        timer.join()
        line.close()
