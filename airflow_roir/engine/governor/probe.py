"""Measures how long a commit takes: a probe commits five times a second, in a thread and a session of its own.

It writes an empty message to the WAL and no table. Like every commit it waits for the disk and for synchronous
replicas.
"""

from __future__ import annotations

import threading
import time

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute

EVERY_S = 0.2
# A reading is the 95th percentile of these last seconds.
WINDOW_S = 5.0
SHARE = 0.95
COMMIT = "SELECT pg_logical_emit_message(true, 'roir', '')"


class Probe:
    """Measures commits from the first `read` on."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._took: list[tuple[float, float]] = []
        self._begun: float | None = None
        self._problem = "no commit was measured yet"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[float | None, str]:
        """The seconds that a commit takes; or None, and why that isn't known."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="roir-probe", daemon=True)
            self._thread.start()
            # Wait for the first commit: its time is the only one yet.
            self._stop.wait(EVERY_S)
        with self._lock:
            now = time.monotonic()
            self._took = [one for one in self._took if now - one[0] < WINDOW_S]
            took = sorted(seconds for _, seconds in self._took)
            # A commit that hasn't returned counts with the time until now.
            under_way = now - self._begun if self._begun is not None else 0.0
            if not took and not under_way:
                return None, self._problem
            usual = took[min(len(took) - 1, int(len(took) * SHARE))] if took else 0.0
            return max(usual, under_way), ""

    def close(self) -> None:
        """End the probe. Doesn't wait for a commit that hangs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * EVERY_S)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with self._database.autocommit() as connection:
                    while not self._stop.is_set():
                        self._commit(connection)
                        self._stop.wait(EVERY_S)
            except DBAPIError as error:
                with self._lock:
                    self._begun = None
                    self._problem = str(error.orig).strip().split("\n", 1)[0]
                self._stop.wait(1.0)
            except Exception as error:  # any error: without a reading the work is held
                with self._lock:
                    self._begun, self._problem = None, f"{type(error).__name__}: {error}"
                self._stop.wait(1.0)

    def _commit(self, connection: Connection) -> None:
        begun = time.monotonic()
        with self._lock:
            self._begun = begun
        execute(connection, COMMIT)
        with self._lock:
            self._begun = None
            self._took.append((time.monotonic(), time.monotonic() - begun))
