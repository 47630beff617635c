"""How long a worker or driver waits between attempts: back-off that grows, and an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_roir.engine.database import LONGEST_WAIT_S

FIRST_WAIT_S = 0.2


class Patience:
    """As `engine.database.retry`, for work that isn't one transaction but continues from its last commit.

    Waits double up to LONGEST_WAIT_S, `patience_s` in all. wait: how to sleep, in seconds.
    """

    def __init__(self, patience_s: float, wait: Callable[[float], object] = time.sleep) -> None:
        self._patience_s = patience_s
        self._wait = wait
        self.renew()

    def renew(self) -> None:
        """Something has worked: the next outage has all of the patience again."""
        self._left = self._patience_s
        self._next = FIRST_WAIT_S

    def wait(self) -> bool:
        """Wait before another attempt; False, at once, where the patience is over."""
        if self._left <= 0:
            return False
        self._wait(self._next)
        self._left -= self._next
        self._next = min(self._next * 2, LONGEST_WAIT_S)
        return True
