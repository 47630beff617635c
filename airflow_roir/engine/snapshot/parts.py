"""The parts of an operation's snapshot that `details.look` finds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Delta:
    """What writers left for the fold. sampled: the numbers of rows are estimates."""

    rows: int
    regular: int
    antimatter: int
    ghosts: int
    bytes: int
    sampled: bool


@dataclass(frozen=True)
class PhaseOf:
    """state: done, now or ahead. seconds: of work, None if it hasn't begun."""

    name: str
    state: str
    seconds: float | None


@dataclass(frozen=True)
class Pause:
    """until: None while it lasts."""

    at: datetime
    by: str
    why: str
    until: datetime | None


@dataclass(frozen=True)
class Error:
    """What went wrong, and what to do next."""

    at: datetime
    text: str
    remedy: str


@dataclass(frozen=True)
class Event:
    """Who did what."""

    at: datetime
    actor: str
    action: str
    detail: str | None


@dataclass(frozen=True)
class Worker:
    """holds: `range 12`, None between two. state: reading, writing, lock, idle. waits_for: who holds the lock."""

    worker: int
    holds: str | None
    state: str
    waits_for: str | None = None


@dataclass(frozen=True)
class Workers:
    """wanted: the parallelism. alive: None if nothing tells."""

    wanted: int
    alive: int
    list: tuple[Worker, ...]


@dataclass(frozen=True)
class HeldUp:
    """text: the same for people.

    by: nothing, reading, writing, lock, rate limit, starting, another run, no run, pause, server, or throttled.
    """

    by: str
    text: str


@dataclass(frozen=True)
class Lost:
    """share: of the time that the operation has worked."""

    cause: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Point:
    """value: None if it couldn't be read. of: whose it is, of several replicas the worst."""

    at: float
    value: float | None
    limit: float
    of: str | None


@dataclass(frozen=True)
class SignalHistory:
    """One signal. below: it is bad below its limit. problem: why it can't be read now. has_limit: still."""

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
    """limits: as users write them, '' for none. throttled: why it may not work as it could, since when; granted: how
    many workers may work, both None if all. grants: unix seconds, workers.
    """

    limits: str
    throttled: str | None
    since: datetime | None
    granted: float | None
    lost: tuple[Lost, ...]
    signals: tuple[SignalHistory, ...]
    grants: tuple[tuple[float, float], ...]
