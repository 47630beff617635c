"""The parts of an operation's snapshot that `details.look` finds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Delta:
    """The rows of the delta, which wait for the fold or the clean-up. sampled: the numbers of rows are estimates."""

    rows: int
    regular: int
    antimatter: int
    ghosts: int
    bytes: int
    sampled: bool


@dataclass(frozen=True)
class PhaseOf:
    """One phase of an operation. state: done, now or ahead. seconds: of work, None if it hasn't begun."""

    name: str
    state: str
    seconds: float | None


@dataclass(frozen=True)
class Pause:
    """One pause of an operation. until: None while it lasts."""

    at: datetime
    by: str
    why: str
    until: datetime | None


@dataclass(frozen=True)
class Error:
    """An error of an operation. remedy: '' once it is over. continued_at, continued_by: when, and who continued it."""

    at: datetime
    text: str
    remedy: str
    continued_at: datetime | None = None
    continued_by: str | None = None


@dataclass(frozen=True)
class Event:
    """One event of an operation. actor: the user or run that acted."""

    at: datetime
    actor: str
    action: str
    detail: str | None


@dataclass(frozen=True)
class Worker:
    """One worker. holds: `range 12`, None between two. state: reading, writing, lock, idle.

    waits_for: the sessions that block its lock.
    """

    worker: int
    holds: str | None
    state: str
    waits_for: str | None = None


@dataclass(frozen=True)
class Workers:
    """The workers of an operation. wanted: the parallelism. alive: the workers that were found at work."""

    wanted: int
    alive: int
    list: tuple[Worker, ...]


@dataclass(frozen=True)
class NextTask:
    """The task that drives an operation next, as Airflow knows it.

    runs: it has begun, but doesn't drive the operation yet. retries: it has failed, and is tried again. at: when it
    looks or is tried again; None if Airflow is about to start it.
    """

    name: str
    runs: bool
    retries: bool
    at: datetime | None


@dataclass(frozen=True)
class HeldUp:
    """The cause that holds an operation up. text: the cause in words.

    by: nothing, reading, writing, lock, rate limit, starting, another run, no run, pause, server, or throttled.
    """

    by: str
    text: str


@dataclass(frozen=True)
class Lost:
    """The time lost to one cause. share: of the time that the operation has worked."""

    cause: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Point:
    """One reading of a signal. value: None if it couldn't be read. of: the replica, the worst of several."""

    at: float
    value: float | None
    limit: float
    of: str | None


@dataclass(frozen=True)
class SignalHistory:
    """One signal. below: True if it is bad below its limit. problem: why it can't be read now.

    has_limit: True if it still has a limit.
    """

    name: str
    unit: str
    per: str
    below: bool
    stops: bool
    has_limit: bool
    problem: str | None
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Throttle:
    """The throttle of an operation. limits: as users write them, '' for none. grants: unix seconds, workers.

    throttled, since: why the governor holds workers back, and since when, None if it doesn't. granted: how many workers
    may work, None if all may.
    """

    limits: str
    throttled: str | None
    since: datetime | None
    granted: float | None
    lost: tuple[Lost, ...]
    signals: tuple[SignalHistory, ...]
    grants: tuple[tuple[float, float], ...]
