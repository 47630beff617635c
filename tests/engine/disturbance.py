"""Disturbances in the middle of an engine step: before its n-th statement a user writes, or its session dies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import psycopg2
from hypothesis import strategies as st
from sqlalchemy import Connection, event

from airflow_roir.engine.database import Database
from tests.engine.users import Users, Write, writes

# The number of a statement (a commit counts as one), and the write before it; None is the session's death.
Disturbance = tuple[int, Write | None]


def disturbances(most_statements: int) -> st.SearchStrategy[list[Disturbance]]:
    """Disturbances, mostly none."""
    some = st.lists(st.tuples(st.integers(1, most_statements), st.none() | writes), max_size=2)
    return st.one_of(st.just([]), st.just([]), some)


class Disturber:
    """Follows the statements of every session of a `Database`. died: a session was killed since the last `arm`."""

    def __init__(self, database: Database, users: Users) -> None:
        self.users = users
        self.died = False
        self._due: list[Disturbance] = []
        self._statements = 0
        self._lock = threading.Lock()  # the fold has threads
        self._killer = psycopg2.connect(database.dsn)
        self._killer.autocommit = True
        self._watched = database.engine
        event.listen(self._watched, "before_cursor_execute", self._before)
        event.listen(self._watched, "commit", self._before)

    def arm(self, disturbances: Sequence[Disturbance]) -> None:
        """Sets the disturbances of the following statements, until the next call."""
        self._due, self._statements, self.died = list(disturbances), 0, False

    def close(self) -> None:
        event.remove(self._watched, "before_cursor_execute", self._before)
        event.remove(self._watched, "commit", self._before)
        self._killer.close()

    def _before(self, connection: Connection, *_: Any) -> None:
        with self._lock:
            self._statements += 1
            now = [who for number, who in self._due if number == self._statements]
            for who in now:
                if who is not None:
                    self.users.write(who, disturbing=True)
                    continue
                self.died = True
                session: Any = connection.connection.dbapi_connection
                with self._killer.cursor() as cursor:
                    cursor.execute("SELECT pg_terminate_backend(%s, 10000)", (session.info.backend_pid,))
