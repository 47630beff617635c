"""Keeps the sessions by which the pages read: one per database, since a new one has to fill its caches."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg2
from sqlalchemy import event
from sqlalchemy.pool import QueuePool

from airflow_roir.engine.database import Database

# Longer than the time between two looks of an open page, and short enough for a server that has few sessions.
IDLE_S = 20.0
# After a failover the address may lead to another server, and the old one may still answer.
RENEW_S = 120
# The most databases with a session that is kept.
MOST_DATABASES = 16
# No look takes longer than its statements may, unless the server hangs, while its kernel still answers.
HUNG_S = 30.0


@dataclass
class _Kept:
    database: Database
    used_at: float
    users: int = 0
    retired: bool = False
    sessions: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        event.listen(self.database.engine, "connect", lambda session, _record: self.sessions.add(session))

    def hang_up(self) -> None:
        """Ends the statements that looks wait for."""
        for session in list(self.sessions):
            with suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(session.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)


class Sessions:
    """Handles of databases that keep one session each, and close it when it isn't used. Safe between threads.

    open_database: makes a handle of a DSN; it passes the pool's arguments on to `Database`. idle_s: the time that a
    session is kept without a look, and at most twice that. hung_s: the time after which any look is ended.
    """

    def __init__(
        self,
        open_database: Callable[..., Database],
        idle_s: float = IDLE_S,
        most: int = MOST_DATABASES,
        hung_s: float = HUNG_S,
    ) -> None:
        self._open, self._idle_s, self._most, self._hung_s = open_database, idle_s, most, hung_s
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    @contextmanager
    def database(self, name: str, dsn: str) -> Iterator[Database]:
        """Yields the handle of that name. If its DSN has changed, closes the session to the former one."""
        with self._lock:
            kept = self._kept.pop(name, None)
            if kept is None or kept.database.dsn != dsn:
                self._retire(kept)
                kept = _Kept(self._pooled(dsn), time.monotonic())
            kept.users += 1
            self._kept[name] = kept
            while len(self._kept) > self._most:
                self._retire(self._kept.popitem(last=False)[1])
            self._watch()
        timer = threading.Timer(self._hung_s, kept.hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield kept.database
        finally:
            timer.cancel()
            with self._lock:
                kept.users -= 1
                kept.used_at = time.monotonic()
                if kept.retired:
                    self._retire(kept)

    def _pooled(self, dsn: str) -> Database:
        # A look at the same time as another gets a session of its own. The server may have been restarted between two
        # looks, so a session is tested before it is used.
        return self._open(
            dsn, poolclass=QueuePool, pool_size=1, max_overflow=-1, pool_pre_ping=True, pool_recycle=RENEW_S
        )

    def _close_idle(self) -> None:
        with self._lock:
            self._timer = None
            until = time.monotonic() - self._idle_s
            for name, kept in list(self._kept.items()):
                if not kept.users and kept.used_at <= until:
                    self._retire(self._kept.pop(name))
            self._watch()

    def _watch(self) -> None:
        if self._timer is None and self._kept:
            self._timer = threading.Timer(self._idle_s, self._close_idle)
            self._timer.daemon = True
            self._timer.start()

    @staticmethod
    def _retire(kept: _Kept | None) -> None:
        if kept is not None:
            kept.retired = True
            if not kept.users:
                kept.database.engine.dispose()
