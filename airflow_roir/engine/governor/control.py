"""The control law: turns readings of signals into the number of workers that may work (docs/architecture.md#governor).

It has no side effects. A budget above its limit stops the work. Among the other signals, the one nearest to its limit
steers, by Spirit's zones: below 0.4 of the limit one more worker; up to 0.7 as many as now; up to 1 one less; above
that half of them. Below one worker, the last worker rests for a part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_roir.signals import Reading

MORE, LESS, HALF = 0.4, 0.7, 1.0
# The time between two changes: the first must show in the signals before the next.
STEP_S = 5.0
# A sixteenth of the time is little enough for any server, and a build still ends.
FEWEST = 1 / 16
# The number of workers at the beginning: on a small server users notice even one whole worker.
FIRST = 1 / 4
# After a budget stopped the work, the work begins again below this part of the limit, so that it doesn't flap.
AGAIN = 0.8
# One worker less only after this many high readings in a row: a single one is noise.
LESS_STEPS = 2
# Between MORE and LESS there may be room for one more worker: tried after this many steps without a change.
STEADY_STEPS = 4
# A number of workers that was too much is tried again after this time, doubled each time that it is too much again.
RETRY_S, LONGEST_RETRY_S = 20.0, 640.0
# A number of workers that was too much once, and has worked for this long, no longer counts as too much.
PROVEN_S = 120.0
UNREADABLE = "unreadable"
STARTING = "starting"


@dataclass(frozen=True)
class Grant:
    """How many workers may work, and why.

    workers: 0 is a hold, a fraction is one worker that rests between. cause: the signal's name, or `unreadable`, or
    `starting`; why: a sentence. Both are None if all workers may work.
    """

    workers: float
    cause: str | None = None
    why: str | None = None


class Control:
    """Decides for one run. If a signal steers, begins with few workers and doubles them until they are too many."""

    def __init__(self, first: float = FIRST) -> None:
        """first: the number of workers to begin with, if a signal steers."""
        self._first = first
        self._workers: float | None = None
        self._stopped: set[tuple[str, str]] = set()
        self._step_at = 0.0
        self._steady = 0
        self._high = 0
        self._is_starting = True
        self._cut_by: Reading | None = None
        self._is_settling = False
        # The number of workers that was too much last, when to try it again, and the pause before the try after that.
        self._too_much = math.inf
        self._retry_at = 0.0
        self._retry_s = RETRY_S
        self._raised_at = 0.0

    def decide(self, readings: Sequence[Reading], parallelism: int, now: float) -> Grant:
        """The grant from now on. now: seconds of a clock that never goes back. Call it about once a second."""
        unreadable = [reading for reading in readings if reading.value is None]
        if unreadable:
            self._rest(now)
            return Grant(0.0, UNREADABLE, str(unreadable[0]))
        stopped_before = self._stopped
        if (stopping := self._stopping(readings)) is not None:
            if stopping.signal.steers and self._workers is not None and not stopped_before:
                # The present number of workers led to this: begin again with half of them.
                self._cut(stopping, self._workers / 2, now)
            self._rest(now)
            return Grant(0.0, stopping.signal.name, str(stopping))
        steering = [reading for reading in readings if reading.signal.steers]
        if not steering:
            self._workers = None
            return Grant(float(parallelism))
        worst = max(steering, key=lambda reading: reading.load)
        if self._workers is None:
            self._workers = self._first
            self._rest(now)
        elif now >= self._step_at:
            self._step(worst, parallelism, now)
        self._workers = min(self._workers, float(parallelism))
        return self._grant(worst, parallelism)

    def _grant(self, worst: Reading, parallelism: int) -> Grant:
        assert self._workers is not None
        if self._workers >= parallelism:
            return Grant(float(parallelism))
        if self._cut_by is None:
            return Grant(self._workers, STARTING, f"beginning with few workers: {worst}")
        if worst.load >= MORE:
            return Grant(self._workers, worst.signal.name, str(worst))
        return Grant(self._workers, self._cut_by.signal.name, f"workers come back step by step after: {self._cut_by}")

    def _stopping(self, readings: Sequence[Reading]) -> Reading | None:
        """The worst budget that stops the work: it is over its limit, or was, and isn't far enough below yet."""
        budgets = {(r.signal.name, r.of): r for r in readings if r.signal.stops}
        # A replica without a reading no longer counts.
        self._stopped = {key for key, r in budgets.items() if r.is_over or (key in self._stopped and r.load >= AGAIN)}
        return max((budgets[key] for key in self._stopped), key=lambda reading: reading.load, default=None)

    def _rest(self, now: float) -> None:
        self._step_at = now + STEP_S
        self._steady = 0

    def _step(self, worst: Reading, parallelism: int, now: float) -> None:
        assert self._workers is not None
        self._step_at = now + STEP_S
        load = worst.load
        self._high = self._high + 1 if load >= LESS else 0
        if load >= HALF or self._high >= LESS_STEPS:
            self._cut(worst, self._workers / 2 if load >= HALF else _less(self._workers), now)
            return
        if self._high:
            return
        self._is_settling = False
        if self._workers >= self._too_much:
            if load < MORE:
                # That number is no longer too much: other load has ended.
                self._too_much, self._retry_s = math.inf, RETRY_S
            elif now - self._raised_at < PROVEN_S:
                return
            else:
                # The present number is no longer too much. One more may be.
                self._too_much, self._raised_at = _more(self._workers), now
        self._steady += 1
        if load < MORE or self._steady >= STEADY_STEPS:
            self._raise(parallelism, now, load)

    def _raise(self, parallelism: int, now: float, load: float) -> None:
        assert self._workers is not None
        more = self._workers * 2 if self._is_starting else _more(self._workers)
        more = min(more, float(parallelism))
        too_early = more >= self._too_much and now < self._retry_at and load >= MORE / 2
        if more <= self._workers or too_early:
            return
        self._workers, self._raised_at, self._steady = more, now, 0

    def _cut(self, by: Reading, to: float, now: float) -> None:
        assert self._workers is not None
        if not (self._is_settling and by.load >= HALF):
            # The number that was too much before, or a smaller one, is too much again: wait longer before the next try.
            again = self._workers <= self._too_much < math.inf
            self._retry_s = min(self._retry_s * 2, LONGEST_RETRY_S) if again else RETRY_S
            self._too_much = self._workers
        # Statements of users that have queued up stay slow for a while after a cut. Until then high readings come from
        # the workers before the first cut, not from the present ones.
        self._is_settling, self._retry_at = True, now + self._retry_s
        self._workers = max(FEWEST, to)
        self._cut_by, self._is_starting, self._steady, self._high = by, False, 0, 0


def _more(workers: float) -> float:
    return workers + 1 if workers >= 1 else workers * 2


def _less(workers: float) -> float:
    return workers - 1 if workers > 1.5 else workers / 2
