"""The waits between attempts: a back-off that grows, and its end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from math import inf
from typing import Protocol

from airflow_roir.engine.retry.trouble import Trouble, cause_of, is_out_of_reach, reason_of, trouble_of
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.quantity import duration

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0
# A shortage ends when an administrator makes room. Each attempt takes the last resources from the users, above all a
# sort: so attempts become rarer and rarer.
EXHAUSTED_FIRST_S = 1.0
EXHAUSTED_LONGEST_S = 60.0
CANCELLED_FIRST_S = 1.0
# An attempt that lasted longer than any connection hangs has worked: the next error is a new outage.
WENT_WELL_S = 300.0
# An attempt that fails within this time counts as a part of the wait.
SHORT_S = 15.0
# The time between two lines about an outage.
AGAIN_S = 60.0


class BackOff:
    """Waits that double up to `longest_s`, `patience_s` in all. wait: sleeps for some seconds.

    went_well_s: after an attempt that lasted longer, the patience begins again.
    """

    def __init__(
        self,
        patience_s: float,
        wait: Callable[[float], object] = time.sleep,
        first_s: float = FIRST_WAIT_S,
        longest_s: float = LONGEST_WAIT_S,
        went_well_s: float = WENT_WELL_S,
    ) -> None:
        self._patience_s = patience_s
        self._wait = wait
        self._first_s = first_s
        self._longest_s = longest_s
        self._went_well_s = went_well_s
        self.renew()

    def renew(self) -> None:
        """Begin again after success: the next outage has the whole patience."""
        self._left = self._patience_s
        self._next = self._first_s
        self._since: float | None = None

    def wait(self) -> bool:
        """Wait before another attempt; False, at once, if the patience is over."""
        tried = 0.0 if self._since is None else time.monotonic() - self._since
        if tried > self._went_well_s:
            self.renew()
        elif tried < SHORT_S:
            self._left -= tried
        if self._left < self._next:
            return False
        # At random, so that workers which failed at the same moment don't all come back at once.
        pause = self._next * random.uniform(0.5, 1.0)
        self._wait(pause)
        self._left -= pause
        self._next = min(self._next * 2, self._longest_s)
        self._since = time.monotonic()
        return True


class OutageLog:
    """Says that the server is out of reach: when that begins, each minute, and when it is back.

    say: takes a line. clock: seconds that never go back. One error alone isn't said: a session may be lost, and the
    next one is open at once.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._since: float | None = None
        self._said_at: float | None = None

    @property
    def is_on(self) -> bool:
        """True from the first error on."""
        return self._since is not None

    def away(self, reason: str) -> None:
        """Called after each error."""
        now = self._clock()
        if self._since is None:
            self._since = now
        elif self._said_at is None:
            self._say(f"can't reach PostgreSQL: {reason}; waiting for it")
            self._said_at = now
        elif now - self._said_at >= AGAIN_S:
            self._say(f"can't reach PostgreSQL since {duration(now - self._since)}: {reason}")
            self._said_at = now

    def back(self) -> None:
        """Called after success."""
        if self._since is not None and self._said_at is not None:
            self._say(f"PostgreSQL is back after {duration(self._clock() - self._since)}")
        self._since = self._said_at = None


class Told(Protocol):
    """Gets the reports of waits."""

    def begin(self, trouble: Trouble, reason: str) -> None:
        """Called before each wait."""

    def away(self, reason: str) -> None:
        """Called in place of `begin` if the server is out of reach."""

    def back(self) -> None:
        """Called after each success."""

    def look(self) -> None:
        """Called every few seconds of a wait; may raise an error, which ends it."""

    def end(self, cause: str, seconds: float) -> None:
        """Called when the wait is over, with or without success, after these seconds of waits and failed attempts.

        cause: as `trouble.cause_of` names it.
        """


class Saying:
    """Reports waits as lines, if there is no operation whose row could show the reason.

    report: called with each new reason, and when the wait is over.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._reason = ""
        outage = OutageLog(report)
        self.away, self.back = outage.away, outage.back

    def begin(self, trouble: Trouble, reason: str) -> None:
        """Report the reason, once."""
        if reason != self._reason:
            self._report(f"waiting: {reason}")
        self._reason = reason

    def look(self) -> None:
        """Does nothing: only the end of the cause ends the wait."""

    def end(self, cause: str, seconds: float) -> None:
        """Report how long the wait was."""
        self._report(f"waited {seconds:.0f} s: {self._reason}")
        self._reason = ""


class Patience:
    """The waits of a caller that tries again, for each kind of trouble. The caller must hold no session meanwhile.

    The caller continues from its last commit, and calls `renew` after success.
    outage_s: in place of that in the limits, if the caller has a patience of its own.
    """

    def __init__(
        self,
        limits: Limits,
        wait: Callable[[float], object] | None = None,
        told: Told | None = None,
        outage_s: float | None = None,
    ) -> None:
        self._sleep: Callable[[float], object] = wait or time.sleep
        self._told = told
        self._cancels = self._most_cancels = limits.cancels
        longest = EXHAUSTED_LONGEST_S
        self._back_off = {
            Trouble.LOST: BackOff(limits.outage_s if outage_s is None else outage_s, self._sleep),
            Trouble.EXHAUSTED: BackOff(limits.exhausted_s, self._wait, EXHAUSTED_FIRST_S, longest, inf),
            Trouble.CANCELLED: BackOff(limits.exhausted_s, self._wait, CANCELLED_FIRST_S, longest, inf),
        }
        # The cause of the present wait; None while none is counted.
        self._cause: str | None = None
        self._since = 0.0

    def waits(self, error: BaseException) -> bool:
        """Wait before another attempt; False, at once, if the error won't pass or the patience is over.

        Raises what `told.look` raises.
        """
        trouble = trouble_of(error)
        if trouble is None:
            self._end()
            return False
        if trouble is Trouble.CANCELLED:
            self._cancels -= 1
        if self._cause != (cause := cause_of(error)):
            self._end()
            self._cause, self._since = cause, time.monotonic()
        if self._told is not None and trouble is not Trouble.LOST:
            self._told.begin(trouble, reason_of(error))
        elif self._told is not None and is_out_of_reach(error):
            self._told.away(reason_of(error))
        waited = False
        try:
            waited = self._cancels >= 0 and self._back_off[trouble].wait()
        finally:
            if not waited:
                self._end()
        return waited

    def renew(self) -> None:
        """Begin again after success."""
        self._end()
        if self._told is not None:
            self._told.back()
        self._cancels = self._most_cancels
        for one in self._back_off.values():
            one.renew()

    def _end(self) -> None:
        if self._cause is not None and self._told is not None:
            self._told.end(self._cause, time.monotonic() - self._since)
        self._cause = None

    def _wait(self, seconds: float) -> None:
        while seconds > 0:
            self._sleep(min(seconds, LONGEST_WAIT_S))
            seconds -= LONGEST_WAIT_S
            if self._told is not None:
                self._told.look()
