"""A share of the time that something may take, so that it never costs the build more than was promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """share: of the time since this was made, in which it grows. first_s: what may be spent at once."""

    def __init__(self, share: float, first_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._first_s = first_s
        self._clock = clock
        self._begun = clock()
        self.spent_s = 0.0

    def allows(self) -> bool:
        """Whether something may begin now. What it takes is counted when it has ended."""
        return self.spent_s <= self._first_s + self._share * (self._clock() - self._begun)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around what it is spent on."""
        begun = self._clock()
        try:
            yield
        finally:
            self.spent_s += self._clock() - begun
