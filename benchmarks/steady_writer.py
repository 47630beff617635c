"""A writer at a steady rate, beside what is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg2

# The number of a write to its statement and its values.
Write = Callable[[int], tuple[str, Any]]


class Writer(threading.Thread):
    """One statement after the other, each a transaction of its own. per_second: how many, as far as it keeps up."""

    def __init__(self, dsn: str, write: Write, per_second: int) -> None:
        super().__init__(daemon=True)
        self.dsn, self.write, self.per_second = dsn, write, per_second
        self.halt = threading.Event()
        self.written = 0

    def run(self) -> None:
        connection = psycopg2.connect(self.dsn)
        connection.autocommit = True
        begun = time.monotonic()
        with connection.cursor() as cursor:
            while not self.halt.is_set():
                cursor.execute(*self.write(self.written))
                self.written += 1
                self.halt.wait(max(0.0, begun + self.written / self.per_second - time.monotonic()))
        connection.close()

    def __enter__(self) -> Writer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.halt.set()
        self.join()
