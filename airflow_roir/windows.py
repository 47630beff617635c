"""Windows: the hours in which an operation may work, as `CRON for DURATION in ZONE`, separated by semicolons.

`0 22 * * 1-5 for 8h in Europe/Berlin; 0 0 * * 6,7 for 24h in Europe/Berlin` is open on weekday nights and all weekend.
Without a zone it is UTC. A window opens at each minute that the expression names, by the zone's clock: twice if the
clock shows the minute twice; a minute that the clock skips counts as the one after the change. Its length is real time,
also over the night when clocks change.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from airflow_roir.errors import InvalidInput
from airflow_roir.nearest import meant, nearest

HINT = "write CRON for DURATION in ZONE, for example: 0 22 * * 1-5 for 8h in Europe/Berlin"
LONGEST = timedelta(days=366)
# The most characters of windows: any text can be written by SQL, and this one is read each second.
MOST_TEXT = 2_000

_WINDOW = re.compile(r"(?P<cron>.+?)\s+for\s+(?P<length>\S.*?)(?:\s+in\s+(?P<zone>\S+))?")
_PART = re.compile(r"(\d+)\s*(d|h|min|m)")
_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "m": 60}
# Croniter accepts more: an expression that is random, or depends on a hash, is no window.
_FIELD = re.compile(r"[0-9*,/\-]+|(?:[a-z]{3}[,\-]?)+", re.IGNORECASE)
_MINUTE = timedelta(minutes=1)
_DAY = timedelta(days=1)
# The longest time from one 29 February to the next, over a year such as 2100.
_MOST_DAYS = 8 * 366


@dataclass(frozen=True)
class Window:
    """A window, which opens when the cron expression says, by the zone's clock, for `length`.

    The sets are those of the expression; a weekday is 0 to 6 from Sunday on. either: a day of the month or a weekday
    is enough.
    """

    length: timedelta
    zone: ZoneInfo
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    def last_opening(self, now: datetime) -> datetime | None:
        """The latest opening at or before now; None if there is none in eight years."""
        # A clock that is put back over midnight is in a day once more.
        return self._first(now, -1)

    def next_opening(self, now: datetime) -> datetime | None:
        """The first opening after now; None if there is none in eight years."""
        return self._first(now, 1)

    def _first(self, now: datetime, way: int) -> datetime | None:
        day = now.astimezone(self.zone).date() - way * _DAY
        found: list[datetime] = []
        for _ in range(_MOST_DAYS):
            is_last = bool(found)
            if self._names(day):
                openings = _openings(self, day)
                at = bisect_right(openings, now)
                found += openings[at : at + 1] if way > 0 else openings[max(at - 1, 0) : at]
            if is_last:
                break
            day += way * _DAY
        return (min if way > 0 else max)(found, default=None)

    def _names(self, day: date) -> bool:
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return day.month in self.months and (by_month or by_week if self.either else by_month and by_week)


@lru_cache(maxsize=1024)
def _openings(window: Window, day: date) -> tuple[datetime, ...]:
    """The openings on a day that the expression names."""
    found: set[datetime] = set()
    for hour in window.hours:
        for minute in window.minutes:
            found |= _moments(datetime.combine(day, time(hour, minute)), window.zone)
    return tuple(sorted(found))


def _moments(shown: datetime, zone: ZoneInfo) -> set[datetime]:
    """The moments when the zone's clock shows this: one or two; if it skips it, the end of the skipped time."""
    early, late = (shown.replace(tzinfo=zone, fold=fold).astimezone(timezone.utc) for fold in (0, 1))
    found = {moment for moment in (early, late) if moment.astimezone(zone).replace(tzinfo=None) == shown}
    if found:
        return found
    # By the offset after the change it is before that, and the other way round.
    before, after = late, early
    while after - before > _MINUTE:
        between = before + (after - before) // _MINUTE // 2 * _MINUTE
        if between.astimezone(zone).replace(tzinfo=None) < shown:
            before = between
        else:
            after = between
    return {after}


@dataclass(frozen=True)
class Windows:
    """Several windows; without any it is always open. text: as it was written."""

    text: str
    windows: tuple[Window, ...]

    def is_open(self, now: datetime) -> bool:
        """True if work is allowed now; now: with its time zone."""
        openings = [(window.last_opening(now), window.length) for window in self.windows]
        return not openings or any(opened is not None and opened + length > now for opened, length in openings)

    def opens_at(self, now: datetime) -> datetime:
        """The next opening, or now if one is open."""
        openings = [found for window in self.windows if (found := window.next_opening(now)) is not None]
        return now if self.is_open(now) else min(openings)

    def shown(self, moment: datetime) -> str:
        """A moment by the clock of the first window, for people: `2026-11-24 22:00 Europe/Berlin`."""
        zone = self.windows[0].zone if self.windows else timezone.utc
        return f"{moment.astimezone(zone):%Y-%m-%d %H:%M} {getattr(zone, 'key', 'UTC')}"


@lru_cache(maxsize=64)
def parse_windows(text: str | None) -> Windows:
    """Reads windows as a user writes them; '' and `off` are none. Raises InvalidInput."""
    if text is None or text.strip() in ("", "off"):
        return Windows("", ())
    if len(text) > MOST_TEXT:
        raise InvalidInput(f"windows: the text has {len(text):,} characters, and may have {MOST_TEXT:,}; {HINT}")
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
        near = meant(nearest(zone, available_timezones()))
        raise InvalidInput(f"windows: there is no time zone {zone!r}; {HINT}{near}") from None
    window = Window(_length(found["length"]), where, *_fields(cron))
    if window.next_opening(datetime.now(timezone.utc)) is None:
        raise InvalidInput(f"windows: {cron!r} never comes; {HINT}")
    return window


def _fields(
    cron: str,
) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int], frozenset[int], frozenset[int], bool]:
    """The minutes, hours, days, months and weekdays of an expression; and whether either kind of day is enough."""
    # Spark's workers read the definition of windows too, and have no croniter.
    from croniter.croniter import CroniterError, croniter

    try:
        if unknown := [field for field in cron.split() if not _FIELD.fullmatch(field)]:
            raise ValueError(f"{unknown[0]!r} is no list of numbers or names")
        given = croniter.expand(cron)[0]
    except (CroniterError, ValueError, KeyError) as error:
        raise InvalidInput(f"windows: {cron!r} is no cron expression ({error}); {HINT}") from None
    every = (range(60), range(24), range(1, 32), range(1, 13), range(7))
    named = [everything if field[:1] == ["*"] else field for field, everything in zip(given, every, strict=True)]
    minutes, hours, days, months, weekdays = (sorted({int(value) for value in field}) for field in named)
    either = given[2][:1] != ["*"] and given[4][:1] != ["*"]
    return (
        tuple(minutes),
        tuple(hours),
        frozenset(days),
        frozenset(months),
        frozenset(day % 7 for day in weekdays),
        either,
    )


def _length(text: str) -> timedelta:
    parts = _PART.findall(text)
    try:
        length = timedelta(seconds=sum(int(number) * _UNITS[unit] for number, unit in parts))
    except OverflowError:
        length = timedelta.max
    if _PART.sub("", text).strip() or not timedelta(minutes=1) <= length <= LONGEST:
        raise InvalidInput(f"windows: {text!r} is no duration from 1min to 366d; {HINT}")
    return length
