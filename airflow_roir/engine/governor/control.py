"""The control law: readings of signals in, how many workers may work out. Pure (docs/architecture.md#governor).

A budget above its limit stops the work. Of the rest the one that is nearest to its limit steers, by Spirit's zones:
below 0.4 of the limit one more worker, to 0.7 as many as there are, to 1 one less, above that half of them. Below one
worker, the one that is left rests for a part of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_roir.engine.governor.signals import Reading

MORE, LESS, HALF = 0.4, 0.7, 1.0
# How often it steers: a change must show in the signals before the next one.
STEP_S = 5.0
# A sixteenth of the time is little enough for any server, and a build still ends.
FEWEST = 1 / 16
# A budget that stopped the work lets it begin again below this part of the limit, so that it doesn't flap.
AGAIN = 0.8
# Between MORE and LESS there may be room for one more: tried after this many steps without a change.
STEADY_STEPS = 4
# What was too much is tried again after this time, doubled each time that it is too much again.
RETRY_S, LONGEST_RETRY_S = 20.0, 320.0
# What has held for this long is no longer in doubt.
PROVEN_S = 30.0
UNREADABLE = "unreadable"
STARTING = "starting"


@dataclass(frozen=True)
class Grant:
    """workers: how many may work, 0 is a hold; fractions are one worker that rests. cause: the signal's name, or
    `unreadable`, or `starting`; why: a sentence. Both None if all may work.
    """

    workers: float
    cause: str | None = None
    why: str | None = None


class Control:
    """Decides for one run. It begins with one worker where something steers, and doubles until that is too much."""

    def __init__(self) -> None:
        self._workers: float | None = None
        self._stopped: set[tuple[str, str]] = set()
        self._step_at = 0.0
        self._steady = 0
        self._is_starting = True
        self._cut_by: Reading | None = None
        # What was too much the last time, when to try it again, and how long after that.
        self._too_much = math.inf
        self._retry_at = 0.0
        self._retry_s = RETRY_S
        self._raised_at = 0.0

    def decide(self, readings: Sequence[Reading], parallelism: int, now: float) -> Grant:
        """What may work from now on. now: seconds of a clock that never goes back; called about once a second."""
        unreadable = [reading for reading in readings if reading.value is None]
        if unreadable:
            self._rest(now)
            return Grant(0.0, UNREADABLE, str(unreadable[0]))
        stopped_before = self._stopped
        if (stopping := self._stopping(readings)) is not None:
            if stopping.signal.steers and self._workers is not None and not stopped_before:
                # It came to this with as many as there were.
                self._cut(stopping, self._workers / 2, now)
            self._rest(now)
            return Grant(0.0, stopping.signal.name, str(stopping))
        steering = [reading for reading in readings if reading.signal.steers]
        if not steering:
            self._workers = None
            return Grant(float(parallelism))
        worst = max(steering, key=lambda reading: reading.load)
        if self._workers is None:
            self._workers = 1.0
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
        # What steers now, if it does; else what it came down for.
        shown = worst if worst.load >= MORE else self._cut_by
        return Grant(self._workers, shown.signal.name, str(shown))

    def _stopping(self, readings: Sequence[Reading]) -> Reading | None:
        """The worst budget that forbids to work: it is over its limit, or was, and isn't far enough below yet."""
        budgets = {(r.signal.name, r.of): r for r in readings if r.signal.stops}
        # A replica that isn't asked about any more counts no more.
        self._stopped = {key for key, r in budgets.items() if r.is_over or (key in self._stopped and r.load >= AGAIN)}
        return max((budgets[key] for key in self._stopped), key=lambda reading: reading.load, default=None)

    def _rest(self, now: float) -> None:
        self._step_at = now + STEP_S
        self._steady = 0

    def _step(self, worst: Reading, parallelism: int, now: float) -> None:
        assert self._workers is not None
        self._step_at = now + STEP_S
        load = worst.load
        if load >= LESS:
            self._cut(worst, self._workers / 2 if load >= HALF else _less(self._workers), now)
            return
        if self._workers >= self._too_much and now - self._raised_at >= PROVEN_S:
            self._too_much, self._retry_s = math.inf, RETRY_S
        self._steady += 1
        if load >= MORE and self._steady < STEADY_STEPS:
            return
        self._raise(parallelism, now)

    def _raise(self, parallelism: int, now: float) -> None:
        assert self._workers is not None
        more = self._workers * 2 if self._is_starting else _more(self._workers)
        more = min(more, float(parallelism))
        if more <= self._workers or (more >= self._too_much and now < self._retry_at):
            return
        self._workers, self._raised_at, self._steady = more, now, 0

    def _cut(self, by: Reading, to: float, now: float) -> None:
        assert self._workers is not None
        # Once more what was too much before, or less than that: it is tried less often.
        again = self._workers <= self._too_much < math.inf
        self._retry_s = min(self._retry_s * 2, LONGEST_RETRY_S) if again else RETRY_S
        self._too_much, self._retry_at = self._workers, now + self._retry_s
        self._workers = max(FEWEST, to)
        self._cut_by, self._is_starting, self._steady = by, False, 0


def _more(workers: float) -> float:
    return workers + 1 if workers >= 1 else workers * 2


def _less(workers: float) -> float:
    return workers - 1 if workers > 1.5 else workers / 2
