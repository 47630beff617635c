"""Writers that behave like an application: random transactions at every isolation level, with savepoints."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions

from tests.engine.steps import session

ISOLATIONS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Writer(threading.Thread):
    """Writes to table `t (id, k, v)` until it is stopped. Retries after serialization failures, as clients do.

    rest_s: seconds between two transactions. Without a rest the writers would take the cores that the build needs.
    """

    rest_s = 0.005

    def __init__(self, dsn: str, seed: int, number: int, ids: int) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(f"{seed}/{number}")
        self.dsn = dsn
        self.ids = ids
        self.isolation = ISOLATIONS[number % len(ISOLATIONS)]
        self.halt = threading.Event()
        self.commits = 0
        self.retried = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        connection = session(self.dsn, self.isolation)
        try:
            while not self.halt.is_set():
                try:
                    self._transaction(connection)
                    connection.commit()
                    self.commits += 1
                except psycopg2.errors.SerializationFailure:
                    connection.rollback()
                    self.retried += 1
                if self.rest_s:
                    self.halt.wait(self.rest_s)
        except BaseException as error:
            self.error = error
        finally:
            connection.close()

    def finish(self) -> None:
        """Stops the writer; raises its error."""
        self.halt.set()
        self.join()
        if self.error is not None:
            raise self.error

    def _transaction(self, connection: psycopg2.extensions.connection) -> None:
        with connection.cursor() as cursor:
            # In id order, so that writers never deadlock among themselves: any deadlock is then the build's.
            for identity in sorted(self.random.sample(range(1, self.ids), self.random.randint(1, 4))):
                savepoint = self.random.random() < 0.3
                if savepoint:
                    cursor.execute("SAVEPOINT s")
                self._write(cursor, identity)
                if savepoint and self.random.random() < 0.5:
                    cursor.execute("ROLLBACK TO s")
        if self.random.random() < 0.1:
            connection.rollback()

    def _write(self, cursor: Any, identity: int) -> None:
        key = self.random.choice([None, *map(str, range(20))])
        match self.random.randrange(6):
            case 0:
                cursor.execute("DELETE FROM t WHERE id = %s", (identity,))
            case 1:
                cursor.execute("UPDATE t SET k = %s WHERE id = %s", (key, identity))
            case 2:
                cursor.execute("UPDATE t SET v = v + 1 WHERE id = %s", (identity,))
            case 3:
                cursor.execute("DELETE FROM t WHERE id = %s", (identity,))
                cursor.execute("INSERT INTO t VALUES (%s, %s, 0) ON CONFLICT DO NOTHING", (identity, key))
            case _:
                cursor.execute(
                    "INSERT INTO t VALUES (%s, %s, 1) ON CONFLICT (id) DO UPDATE SET k = excluded.k, v = t.v + 1",
                    (identity, key),
                )


@contextmanager
def at_work(writers: Sequence[Writer]) -> Iterator[None]:
    """Lets the writers write while the block runs; raises their errors."""
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        for writer in writers:
            writer.finish()
