"""The workers' side: who is about to work waits while the operation is on hold, and rests after work if it is paced.

No transaction is open meanwhile, and a pause is seen within half a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.claims import why_stop
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, check_epoch
from airflow_roir.engine.database import execute

LOOK_EVERY_S = 0.5
GRANT = """
SELECT o.epoch, o.owner, o.status, o.parallelism, o.max_rows_per_second, roir.granted(o) AS granted
  FROM roir.operation o WHERE o.id = %(operation)s
"""


def share_of(granted: float | None, among: int = 0) -> float:
    """Of its time, what each worker may work: a grant of 2.5 is three workers at five sixths.

    among: workers that stay, even if they are more than were granted.
    """
    return 1.0 if not granted else granted / max(among, math.ceil(granted))


class Turn:
    """One worker's. wait: how to sleep, in seconds. letting_go: called before it waits, to give up what it holds.

    among: how many share the work; if given, none of them leaves before it is done.
    """

    def __init__(
        self,
        connection: Connection,
        run: Run,
        worker: int = 0,
        wait: Callable[[float], object] | None = None,
        letting_go: Callable[[], object] = lambda: None,
        among: int = 0,
    ) -> None:
        self._connection = connection
        self._run = run
        self._worker = worker
        self._wait = wait or time.sleep
        self._letting_go = letting_go
        self._among = among

    def come(self) -> None:
        """Return when this worker may work, or is to stop, which its own look then tells. Raises Fenced."""
        self.rest(0.0)

    def rest(self, seconds: float, rows: int = 0) -> None:
        """After work that took this long: rest for as long as the grant and the rate limit say. Raises Fenced.

        rows: that were copied; only they count for the rate limit.
        """
        rested = 0.0
        while True:
            row = self._look()
            if why_stop(row, self._worker):
                return
            due = LOOK_EVERY_S if row.granted == 0 else self._due(row, seconds, rows) - rested
            if due <= 0:
                return
            self._letting_go()
            self._wait(min(due, LOOK_EVERY_S))
            # A hold is no rest: what is due after it is due.
            rested += 0.0 if row.granted == 0 else min(due, LOOK_EVERY_S)

    def _due(self, row: Row[Any], seconds: float, rows: int) -> float:
        due = seconds * (1 / share_of(row.granted, self._among) - 1)
        if rows and row.max_rows_per_second:
            due = max(due, rows / (row.max_rows_per_second / row.parallelism) - seconds)
        return due

    def _look(self) -> Row[Any]:
        with self._connection.begin():
            row = execute(self._connection, GRANT, {"operation": self._run.operation_id}).first()
        if row is None:
            raise operations.no_operation(self._run.operation_id)
        check_epoch(row, self._run)
        return row
