"""The operation of `benchmarks.unique`: its drivers, what kills and pauses it when, and a diary of how far it was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2

from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.errors import RoirError
from airflow_roir.operation import BY_DUPLICATES
from benchmarks.unique_table import INDEX

WATCH_EVERY_S = 0.02
# An operation that this many drivers haven't ended never will.
MOST_DRIVERS = 60
STATE = """
SELECT o.status, o.phase, o.paused_by IN (o.owner, %(duplicates)s), o.pause_reason,
       coalesce((SELECT count(*) FILTER (WHERE done)::float8 / nullif(count(*), 0) FROM roir.scan_range r
                  WHERE r.operation_id = o.id), 0),
       coalesce((SELECT count(*) FILTER (WHERE s.status = 'sealed' OR s.refused_epoch = o.epoch)::float8
                               / nullif(count(*), 0)
                   FROM roir.segment s WHERE s.generation_id = o.generation_id), 0)
  FROM roir.operation o ORDER BY o.id DESC LIMIT 1
"""


@dataclass(frozen=True)
class Moment:
    """The moment of an event: at this share of a phase's ranges or segments; in the fold, this many seconds after its
    begin."""

    phase: str
    share: float
    what: str


def draw(chance: random.Random, count: int) -> list[Moment]:
    """Draws `count` moments, in the order of their phases."""
    order = ("build", "seal", "fold")
    found = [
        Moment(phase := chance.choice(("build", "build", "build", "seal", "seal", "fold")), chance.random(),
               # In the fold the driver does the work itself.
               chance.choice(("worker", "worker", "driver", "pause") if phase != "fold" else ("driver", "pause")))
        for _ in range(count)
    ]  # fmt: skip
    return sorted(found, key=lambda one: (order.index(one.phase), one.share))


class Operation:
    """An operation, with the process that drives it, the events that disturb that, and a diary of its progress."""

    def __init__(
        self, dsn: str, database: Database, parallelism: int, moments: list[Moment], paused: Callable[[str], None]
    ) -> None:
        """paused: called at each pause that the bench asked for."""
        self.dsn, self.database, self.parallelism, self.paused = dsn, database, parallelism, paused
        self.moments = moments
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.diary: list[tuple[float, str, float]] = []
        self.happened: list[str] = []
        self.groups: list[int] = []
        self.halt = threading.Event()
        self.driver: subprocess.Popen[bytes] | None = None
        self.phase_since = (time.time(), "")
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()

    def state(self) -> Any:
        """Status, phase, whether it paused itself, why, and the shares of ranges and segments done."""
        with self.connection.cursor() as cursor:
            cursor.execute(STATE, {"duplicates": BY_DUPLICATES})
            return cursor.fetchone()

    def carry_on(self) -> None:
        """Starts drivers until the operation is completed, or pauses for a reason of its own."""
        for _ in range(MOST_DRIVERS):
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.unique_driver", INDEX, str(self.parallelism)],
                env={**os.environ, "ROIR_DSN": self.dsn},
                start_new_session=True,
            )
            self.groups.append(self.driver.pid)
            self.driver.wait()
            status, phase, by_itself, reason, *_ = self.state()
            if status == "completed" or (status == "paused" and by_itself and "share" in reason):
                return
            if status not in ("running", "paused"):
                raise SystemExit(f"the operation is {status}: {reason}")
            if status == "paused" and not by_itself:
                self.paused(phase)
        raise SystemExit(f"{MOST_DRIVERS} drivers did not end it: {self.state()}")

    def _watch(self) -> None:
        watching = psycopg2.connect(self.dsn)
        watching.autocommit = True
        with watching.cursor() as cursor:
            while not self.halt.wait(WATCH_EVERY_S):
                cursor.execute(STATE, {"duplicates": BY_DUPLICATES})
                if (row := cursor.fetchone()) is None:
                    continue
                status, phase, _, _, ranges, segments = row
                now = time.time()
                if phase != self.phase_since[1]:
                    self.phase_since = (now, phase)
                self.diary.append((now, phase, ranges))
                share = {"build": ranges, "seal": segments}.get(phase, min(0.99, now - self.phase_since[0]))
                if status == "running" and self.moments and self._has_come(self.moments[0], phase, share):
                    with suppress(ProcessLookupError):
                        self._happens(self.moments.pop(0), share)
        watching.close()

    def _has_come(self, moment: Moment, phase: str, share: float) -> bool:
        order = ("build", "seal", "fold", "publish")
        here = order.index(phase) if phase in order else len(order)
        return self.driver is not None and (here, share) >= (order.index(moment.phase), moment.share)

    def _happens(self, moment: Moment, share: float) -> None:
        driver = self.driver
        what = moment.what
        if driver is None or driver.poll() is not None:
            self.moments.insert(0, moment)
            return
        if what == "pause":
            with suppress(RoirError):
                requests.pause(self.database, INDEX, "the bench", "by chance")
        elif what == "driver":
            # Its workers live on, until the next one fences them.
            driver.kill()
        else:
            workers = _children(driver.pid)
            if not workers:
                self.moments.insert(0, moment)
                return
            os.kill(workers[-1], signal.SIGKILL)
        self.happened.append(f"{what} in {self.phase_since[1]} at {share:.2f}")

    def close(self) -> None:
        """Nothing of it is left running."""
        self.halt.set()
        self.watcher.join()
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Linux only: elsewhere a driver's worker isn't found, and none is killed."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
