"""The workers' side of the governor: a worker waits while the operation is on hold, and rests after work if paced.

Meanwhile it has no open transaction, and notices a pause within half a second.
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
SELECT o.epoch, o.status, o.parallelism, o.max_rows_per_second, roir.granted(o) AS granted
  FROM roir.operation o WHERE o.id = %(operation)s
"""


def share_of(granted: float | None, among: int = 0) -> float:
    """The part of its time that each worker may work: a grant of 2.5 is three workers at five sixths.

    among: the number of workers, if they stay even when the grant is smaller.
    """
    return 1.0 if not granted else granted / max(among, math.ceil(granted))


class Turn:
    """One worker's waits and rests. wait: sleeps for some seconds. letting_go: called before, to give up a snapshot.

    among: how many workers share the work; if given, none of them leaves before it is done.
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
        """Return when this worker may work, or must stop: its own next look finds that out. Raises Fenced."""
        self.rest(0.0)

    def rest(self, seconds: float, rows: int = 0) -> None:
        """Rest after work that took this long, for as long as the grant and the rate limit require. Raises Fenced.

        rows: the copied ones, which alone count for the rate limit.
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
            # Time on hold doesn't count as rest.
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
                raise operations.no_operation(self._connection, self._run.operation_id)
            check_epoch(self._connection, row, self._run)
        return row
