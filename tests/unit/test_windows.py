"""When windows are open: beside an oracle that looks at every minute of two years."""

from __future__ import annotations

from bisect import bisect_right
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from airflow_roir.errors import InvalidInput
from airflow_roir.windows import parse_windows

MINUTE = timedelta(minutes=1)
START = datetime(2027, 1, 1, tzinfo=timezone.utc)
MINUTES = 2 * 366 * 1440

# Expression, how many minutes, zone; what names a minute by the clock: minute, hour, day, month, weekday from Sunday.
CASES = (
    ("0 22 * * 1-5", 480, "Europe/Berlin", lambda m, h, d, o, w: (m, h) == (0, 22) and 1 <= w <= 5),
    ("0 0 * * 6,7", 1440, "Europe/Berlin", lambda m, h, d, o, w: (m, h) == (0, 0) and w in (6, 0)),
    ("30 2 * * *", 60, "Europe/Berlin", lambda m, h, d, o, w: (m, h) == (30, 2)),
    ("30 1 * * *", 90, "America/New_York", lambda m, h, d, o, w: (m, h) == (30, 1)),
    ("15 2 * * *", 10, "Australia/Lord_Howe", lambda m, h, d, o, w: (m, h) == (15, 2)),
    ("0 0 * * *", 30, "America/Santiago", lambda m, h, d, o, w: (m, h) == (0, 0)),
    ("45 23 * * *", 45, "America/Santiago", lambda m, h, d, o, w: (m, h) == (45, 23)),
    ("*/20 * * * *", 7, "Europe/London", lambda m, h, d, o, w: m % 20 == 0),
    # Longer than its period: always open.
    ("0 * * * *", 90, "Asia/Kolkata", lambda m, h, d, o, w: m == 0),
    # Each touches the next one.
    ("0 0-5 * * *", 60, "Europe/Paris", lambda m, h, d, o, w: m == 0 and h <= 5),
    ("0 0 29 2 *", 1440, "UTC", lambda m, h, d, o, w: (m, h, d, o) == (0, 0, 29, 2)),
    # A day of the month or a weekday.
    ("0 3 13 * fri", 60, "Asia/Kathmandu", lambda m, h, d, o, w: (m, h) == (0, 3) and (d == 13 or w == 5)),
    ("0 12 1 jan-mar *", 3 * 1440, "Pacific/Apia", lambda m, h, d, o, w: (m, h, d) == (0, 12, 1) and o <= 3),
)


def openings(names, zone: str) -> list[datetime]:
    """Each minute of two years that the clock shows and the expression names, and those that it leaves out."""
    found, clock = [], ZoneInfo(zone)
    begin = START - 40 * 1440 * MINUTE
    shown = begin.astimezone(clock).replace(tzinfo=None) - MINUTE
    # Clocks change at quarters of an hour.
    for quarter in range((MINUTES + 52 * 1440) // 15):
        moment = begin + quarter * 15 * MINUTE
        now = moment.astimezone(clock).replace(tzinfo=None)
        while shown + MINUTE < now:
            # Left out.
            shown += MINUTE
            if names(shown.minute, shown.hour, shown.day, shown.month, shown.isoweekday() % 7):
                found.append(moment)
        day = (now.day, now.month, now.isoweekday() % 7)
        found += [moment + number * MINUTE for number in range(15) if names(now.minute + number, now.hour, *day)]
        shown = now + 14 * MINUTE
    return sorted(set(found))


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[2]}")
def test_windows_are_open_when_every_single_minute_says_so(case: tuple) -> None:
    """Around each opening and each end to the second, and at minutes all over the two years."""
    cron, minutes, zone, names = case
    found, length = openings(names, zone), minutes * MINUTE
    windows = parse_windows(f"{cron} for {minutes}min in {zone}")
    edges = [opening + shift for opening in found[:: max(len(found) // 200, 1)] for shift in (0 * MINUTE, length)]
    second = timedelta(seconds=1)
    moments = [edge + shift for edge in edges for shift in (-second, 0 * second, second)]
    # The nights when clocks change, each minute.
    nights = [
        START + n * MINUTE
        for n in range(0, MINUTES, 60)
        if (START + n * MINUTE).astimezone(ZoneInfo(zone)).utcoffset()
        != (START + (n + 60) * MINUTE).astimezone(ZoneInfo(zone)).utcoffset()
    ]
    moments += [night + n * MINUTE for night in nights for n in range(-200, 400, 3)]
    moments += [START + n * MINUTE for n in range(0, MINUTES, 4_801)]
    for now in moments:
        if not START <= now < START + MINUTES * MINUTE:
            continue
        at = bisect_right(found, now)
        last = found[at - 1] if at else None
        is_open = last is not None and now < last + length
        assert windows.is_open(now) == is_open, now
        if not is_open and at < len(found):
            assert windows.opens_at(now) == found[at], now


def test_windows_of_several_zones_are_open_where_one_of_them_is() -> None:
    windows = parse_windows("0 22 * * 1-5 for 8h in Europe/Berlin; 0 6 * * * for 1h in UTC;")
    friday = datetime(2026, 11, 27, 21, tzinfo=timezone.utc)
    assert windows.is_open(friday)
    # It ends at 6 in Berlin, and the other one opens an hour later.
    assert windows.is_open(friday + timedelta(hours=8, minutes=-1))
    assert not windows.is_open(friday + timedelta(hours=8))
    assert windows.opens_at(friday + timedelta(hours=8)) == friday + timedelta(hours=9)
    assert windows.shown(friday) == "2026-11-27 22:00 Europe/Berlin"


def test_none_are_always_open() -> None:
    for text in (None, "", " off "):
        windows = parse_windows(text)
        assert windows.is_open(START)
        assert windows.opens_at(START) == START


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 0 31 2 * for 1h", "never comes"),
        ("0 0 30 feb * for 1h", "never comes"),
        ("0 22 * * for 1h", "five fields"),
        ("0 0 22 * * 1 for 1h", "five fields"),
        ("61 * * * * for 1h", "no cron expression"),
        ("R 22 * * * for 1h", "no list of numbers"),
        ("0 0 L * * for 1h", "no list of numbers"),
        ("0 0 * * xyz for 1h", "no cron expression"),
        ("@daily for 1h", "five fields"),
        ("0 22 * * * for 8h in Europe/Atlantis", "no time zone"),
        ("0 22 * * * for 8h in ../etc/passwd", "no time zone"),
        ("0 22 * * * for ever", "no duration"),
        ("0 22 * * * for 0h", "no duration"),
        ("0 22 * * * for 367d", "no duration"),
        ("0 22 * * *", "no window"),
        ("0 22 * * * for 1h;;x", "no window"),
    ],
)
def test_what_is_no_window_is_refused_with_an_example(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as refused:
        parse_windows(text)
    assert "0 22 * * 1-5 for 8h in Europe/Berlin" in str(refused.value)


def test_a_29_february_is_found_over_a_century_without_one() -> None:
    windows = parse_windows("0 0 29 2 * for 1d")
    assert windows.opens_at(datetime(2096, 3, 5, tzinfo=timezone.utc)) == datetime(2104, 2, 29, tzinfo=timezone.utc)
