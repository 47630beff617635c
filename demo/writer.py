"""A writer that inserts, updates and deletes all the while, and measures what it feels."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import psycopg2

from demo.dataset import Dataset

# An application's think time; without it the writer would measure how fast it can saturate a core.
THINK_S = 0.004


@dataclass(frozen=True)
class Felt:
    """Commits and their latencies over a stretch of time, in milliseconds."""

    commits: int
    p50_ms: float
    p99_ms: float


class Writer(threading.Thread):
    """One connection, one small transaction after the other, until `finish`."""

    def __init__(self, dsn: str, dataset: Dataset, seed: int = 1) -> None:
        super().__init__(name="demo-writer", daemon=True)
        self._dsn = dsn
        self._dataset = dataset
        self._chance = random.Random(seed)
        self._halt = threading.Event()
        self._latencies: list[float] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with psycopg2.connect(self._dsn, application_name="demo writer") as connection:
                cursor = connection.cursor()
                while not self._halt.wait(THINK_S):
                    begun = time.perf_counter()
                    self._dataset.write(cursor, self._chance)
                    connection.commit()
                    self._latencies.append((time.perf_counter() - begun) * 1000)
        except psycopg2.Error as error:
            self.error = error

    def take(self) -> Felt:
        """The latencies that were felt since the last take."""
        taken, self._latencies = sorted(self._latencies), []
        if not taken:
            return Felt(0, 0.0, 0.0)
        return Felt(len(taken), taken[len(taken) // 2], taken[min(len(taken) * 99 // 100, len(taken) - 1)])

    def finish(self) -> None:
        """Stops it; raises the error that it met."""
        self._halt.set()
        self.join()
        if self.error is not None:
            raise self.error
