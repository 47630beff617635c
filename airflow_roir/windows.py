"""Windows: when an operation may work, as `CRON for DURATION in ZONE`, several separated by semicolons.

`0 22 * * 1-5 for 8h in Europe/Berlin; 0 0 * * 6,7 for 24h in Europe/Berlin` is open on weekday nights and all weekend.
Without a zone it is UTC. A window's length is real time: one over the night when clocks change is as long as any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from airflow_roir.errors import InvalidInput

HINT = "write CRON for DURATION in ZONE, for example: 0 22 * * 1-5 for 8h in Europe/Berlin"
LONGEST = timedelta(days=366)

_WINDOW = re.compile(r"(?P<cron>.+?)\s+for\s+(?P<length>\S.*?)(?:\s+in\s+(?P<zone>\S+))?")
_PART = re.compile(r"(\d+)\s*(d|h|min|m)")
_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "m": 60}


@dataclass(frozen=True)
class Window:
    """It opens whenever the cron expression says, by the zone's clock, for `length`."""

    cron: str
    length: timedelta
    zone: ZoneInfo

    def last_opening(self, now: datetime) -> datetime:
        """The latest opening at or before now."""
        # Strictly before what it is given.
        return self._turn(now + timedelta(seconds=1), "prev")

    def next_opening(self, now: datetime) -> datetime:
        """The first opening after now."""
        return self._turn(now, "next")

    def _turn(self, moment: datetime, way: str) -> datetime:
        # Spark's workers read the definition of windows too, and have no croniter.
        from croniter import croniter

        turn = croniter(self.cron, moment.astimezone(self.zone), ret_type=datetime)
        found: datetime = turn.get_prev() if way == "prev" else turn.get_next()
        return found.astimezone(timezone.utc)


@dataclass(frozen=True)
class Windows:
    """Several windows; none at all is always open. text: as it was written."""

    text: str
    windows: tuple[Window, ...]

    def closes_at(self, now: datetime) -> datetime | None:
        """When what is open now closes, over windows that touch each other; None if none is open, or all are always.

        now: with its time zone.
        """
        end = self._end(now)
        # Windows that follow each other without a gap are one. Ones that never end are looked through for a while.
        while end is not None and end - now < LONGEST and (later := self._end(end)) is not None and later > end:
            end = later
        return end

    def is_open(self, now: datetime) -> bool:
        """Whether work is allowed now."""
        return not self.windows or self._end(now) is not None

    def opens_at(self, now: datetime) -> datetime:
        """The next opening, or now if one is open."""
        return now if self.is_open(now) else min(window.next_opening(now) for window in self.windows)

    def _end(self, now: datetime) -> datetime | None:
        ends = [window.last_opening(now) + window.length for window in self.windows]
        return max((end for end in ends if end > now), default=None)


@lru_cache(maxsize=64)
def parse_windows(text: str | None) -> Windows:
    """Read windows as a user writes them; '' and `off` are none. Raises InvalidInput."""
    if text is None or text.strip() in ("", "off"):
        return Windows("", ())
    return Windows(text.strip(), tuple(_window(part.strip()) for part in text.split(";") if part.strip()))


def _window(text: str) -> Window:
    found = _WINDOW.fullmatch(text)
    if found is None:
        raise InvalidInput(f"windows: {text!r} is no window; {HINT}")
    cron, zone = found["cron"], found["zone"] or "UTC"
    if len(cron.split()) != 5:
        raise InvalidInput(f"windows: {cron!r} hasn't the five fields minute, hour, day, month, weekday; {HINT}")
    try:
        where = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidInput(f"windows: there is no time zone {zone!r}; {HINT}") from None
    from croniter.croniter import CroniterError

    window = Window(cron, _length(found["length"]), where)
    try:
        window.next_opening(datetime.now(timezone.utc))
        window.last_opening(datetime.now(timezone.utc))
    except (CroniterError, ValueError) as error:
        raise InvalidInput(f"windows: {cron!r} is no cron expression ({error}); {HINT}") from None
    return window


def _length(text: str) -> timedelta:
    parts = _PART.findall(text)
    length = timedelta(seconds=sum(int(number) * _UNITS[unit] for number, unit in parts))
    if _PART.sub("", text).strip() or not timedelta(minutes=1) <= length <= LONGEST:
        raise InvalidInput(f"windows: {text!r} is no duration from 1min to 366d; {HINT}")
    return length
