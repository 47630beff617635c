"""Shares looks at the databases: many tabs that poll one operation within a second share one query."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from airflow_roir.errors import RoirError

T = TypeVar("T")

# The interval of a page's requests.
FRESH_S = 1.0
# A database that can't be reached isn't asked by every tab in turn.
FAILED_FRESH_S = 3.0
# A request doesn't wait as long as an attempt to connect may take (ten seconds).
PATIENCE_S = 8.0
# The results kept; each has some ten kilobytes.
KEPT = 256
# Threads by database: one that hangs must hold up neither the others nor Airflow's own API.
THREADS = 2
LANES = 32
# The most looks of a lane that may wait for a thread, abandoned ones included.
WAITING = 64
# The lane of questions to Airflow itself: no connection has an empty id.
AIRFLOW = ""


class NoAnswer(RoirError):
    """A database did not answer in time."""


@dataclass
class _Look:
    future: Future[Any] = field(default_factory=Future)
    until: float = float("inf")
    # The callers that wait for it. A look without callers isn't begun.
    askers: int = 0
    has_begun: bool = False


@dataclass
class _Lane:
    executor: ThreadPoolExecutor
    waiting: int = 0


class Looks:
    """Shares results by key, within a lane (a database); bounded in keys, lanes and threads. Safe between threads.

    fresh_s: the time that a result is given to other requests for the same; failed_s: the same for an error.
    """

    def __init__(self, fresh_s: float = FRESH_S, failed_s: float = FAILED_FRESH_S, kept: int = KEPT) -> None:
        self._fresh_s, self._failed_s, self._kept = fresh_s, failed_s, kept
        self._looks: OrderedDict[Hashable, _Look] = OrderedDict()
        self._lanes: OrderedDict[str, _Lane] = OrderedDict()
        self._lock = threading.Lock()

    async def look(self, lane: str, key: Hashable, work: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        """The result of `work`, or of another call with that key, if one is under way or fresh.

        Raises the error of `work`; NoAnswer after `patience_s` seconds, or at once if WAITING looks wait in that lane.
        """
        whole = (lane, key)
        look = self._begin(lane, whole, work)
        try:
            # Shielded: one tab that is closed must not end the look of the others.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(look.future)), patience_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise NoAnswer(f"{_asked(lane)} hasn't answered within {patience_s:g} s") from None
        finally:
            with self._lock:
                look.askers -= 1
                if not look.askers and not look.has_begun and self._looks.get(whole) is look:
                    # The next caller begins a new look, at the end of the queue.
                    del self._looks[whole]

    async def change(self, lane: str, work: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        """The result of `work`, not shared. If the caller has left before it begins, it doesn't begin.

        Raises the error of `work`, NoAnswer after `patience_s` seconds.
        """
        try:
            # A key of its own: no two changes are one.
            return await self.look(lane, object(), work, patience_s)
        except NoAnswer as reason:
            raise NoAnswer(f"{reason}. A change that has begun may still take effect: look again") from None

    def forget(self, lane: str) -> None:
        """Drops the results of a database, after a change in it: the next requests look again."""
        with self._lock:
            for key in [key for key in self._looks if isinstance(key, tuple) and key[0] == lane]:
                del self._looks[key]

    def __len__(self) -> int:
        return len(self._looks)

    def _begin(self, lane: str, key: Hashable, work: Callable[[], Any]) -> _Look:
        with self._lock:
            look = self._looks.get(key)
            if look is None or time.monotonic() >= look.until:
                found = self._lane(lane)
                if found.waiting >= WAITING:
                    raise NoAnswer(f"{_asked(lane)} hasn't answered yet, and {found.waiting} requests wait for it")
                look = self._looks[key] = _Look()
                found.waiting += 1
                # Still under the lock, since another call may drop the lane. `submit` doesn't wait for a free thread.
                found.executor.submit(self._run, found, look, work)
            look.askers += 1
            self._looks.move_to_end(key)
            while len(self._looks) > self._kept:
                self._looks.popitem(last=False)
        return look

    def _lane(self, lane: str) -> _Lane:
        found = self._lanes.pop(lane, None) or _Lane(ThreadPoolExecutor(THREADS, thread_name_prefix="roir-look"))
        self._lanes[lane] = found
        while len(self._lanes) > LANES:
            self._lanes.popitem(last=False)[1].executor.shutdown(wait=False)
        return found

    def _run(self, lane: _Lane, look: _Look, work: Callable[[], Any]) -> None:
        with self._lock:
            lane.waiting -= 1
            if not look.askers:
                return
            look.has_begun = True
        begun = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # handed on to all who wait
            look.until = time.monotonic() + self._failed_s
            look.future.set_exception(error)
        else:
            # A result that took longer than callers wait is kept for as long: otherwise no caller would ever get it.
            look.until = time.monotonic() + max(self._fresh_s, 2 * (time.monotonic() - begun))
            look.future.set_result(result)


def _asked(lane: str) -> str:
    return f"the database of connection {lane}" if lane != AIRFLOW else "Airflow's own database"
