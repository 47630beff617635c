"""How long a worker or driver waits for a server that is away: back-off that grows, and an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import is_transient

T = TypeVar("T")

# A server that restarts is back within this; longer outages pause the operation.
OUTAGE_S = 60.0
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


class Patience:
    """Waits between attempts, doubling up to LONGEST_WAIT_S, for OUTAGE_S of waiting in all.

    wait: how to sleep, in seconds; tests replace it.
    """

    def __init__(self, wait: Callable[[float], object] = time.sleep) -> None:
        self._wait = wait
        self.renew()

    def renew(self) -> None:
        """Something has worked: the next outage has all of the patience again."""
        self._left = OUTAGE_S
        self._next = FIRST_WAIT_S

    def wait(self) -> bool:
        """Wait before another attempt; False, at once, where the patience is over."""
        if self._left <= 0:
            return False
        self._wait(self._next)
        self._left -= self._next
        self._next = min(self._next * 2, LONGEST_WAIT_S)
        return True


def patiently(work: Callable[[], T], wait: Callable[[float], object] = time.sleep) -> T:
    """Run `work`, one whole transaction that is safe to repeat, until it works or the patience is over.

    Raises what `work` raised last; at once where trying again can't help.
    """
    patience = Patience(wait)
    while True:
        try:
            return work()
        except DBAPIError as error:
            if not is_transient(error) or not patience.wait():
                raise
