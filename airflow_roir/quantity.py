"""Writes quantities for people: `58 min 40 s`, `1.2 GB`, `1 worker`; the same in terminal and logs."""

from __future__ import annotations

from collections.abc import Mapping

# A duration is shown in its greatest unit and the next one.
_SPANS = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))
_SIZES = ("bytes", "kB", "MB", "GB", "TB", "PB")
# The causes of lost time that aren't signals, in words; as `NAMES` in page/static/throttle.js.
CAUSES = {
    "disk": "a lack of disk",
    "memory": "a lack of memory",
    "connections": "a lack of connections",
    "limit": "a limit of the server",
    "exhausted": "a lack of the server's resources",
    "cancelled": "statements that others cancelled",
    "unreadable": "signals that couldn't be read",
    "starting": "a start with few workers",
}
# An estimate isn't more exact than this.
A_FEW_SECONDS = 5.0


def duration(seconds: float) -> str:
    """A duration: `0.4 s`, `12 s`, `58 min 40 s`, `3 h 12 min`, `2 d 5 h`; a second part of 0 is left out."""
    seconds = max(0.0, seconds)
    if round(seconds, 1) < 10:
        return f"{round(seconds, 1):g} s"
    for unit, size, part, step in _SPANS:
        # Rounded first: 59.6 s is 1 min and not 60 s.
        whole = round(seconds / step) * step
        if whole >= size:
            rest = whole % size // step
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{seconds:.0f} s"


def size(count: float) -> str:
    """A number of bytes, in PostgreSQL's units (1 kB is 1,024 bytes): `8 kB`, `1.2 GB`."""
    if count < 1024:
        return f"{count:.0f} {'byte' if count == 1 else 'bytes'}"
    unit = 0
    while count >= 1023.5 and unit < len(_SIZES) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {_SIZES[unit]}" if round(count, 1) < 10 and unit > 1 else f"{count:,.0f} {_SIZES[unit]}"


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 row`, `2,000 rows`; plural: if it isn't the noun with an s."""
    return f"{number:,.0f} {noun if round(number) == 1 else plural or f'{noun}s'}"


def shared(groups: int, rows: int) -> str:
    """A sentence about duplicates: `12 rows share 5 keys`, `no two rows share a key`."""
    return f"{counted(rows, 'row')} share {counted(groups, 'key')}" if groups else "no two rows share a key"


def rate(rows_per_second: float) -> str:
    """A rate: `1,785 rows/s`; below ten with a decimal, so that a slow one isn't 0."""
    return f"{rows_per_second:,.0f} rows/s" if rows_per_second >= 10 else f"{rows_per_second:.1f} rows/s"


def percent(value: float) -> str:
    """A percentage: `43.2 %`, `100 %`. It isn't rounded up: 100 % means done."""
    return f"{int(value * 10) / 10:g} %"


def left(likely: float | None, low: float | None = None, high: float | None = None) -> str | None:
    """An estimate of seconds as text: `about 12 s left`, `2 min to 5 min left`; None if there is none.

    Never `0 s left`, but `a few seconds`.
    """
    if likely is None:
        return None
    if max(likely, high or 0.0) < A_FEW_SECONDS:
        return "a few seconds left"
    if low is not None and high is not None and high > 1.5 * low:
        return f"{expected(low, high)} left"
    return f"about {duration(_coarse(likely))} left"


def expected(low: float, high: float) -> str:
    """Two estimates of seconds as text: `a few seconds`, `up to 12 s`, `2 min to 5 min`, `about 12 s`."""
    if high < A_FEW_SECONDS:
        return "a few seconds"
    lower, upper = duration(_coarse(low)), duration(_coarse(high))
    if low < 1:
        return f"up to {upper}"
    return f"{lower} to {upper}" if lower != upper else f"about {upper}"


def lost(seconds: Mapping[str, float]) -> str:
    """Lost time, by cause: `lost 3 min 12 s to replica_lag, 40 s to commit_latency`; '' for none.

    seconds: by cause, as the control tables name it.
    """
    most = sorted(((value, cause) for cause, value in seconds.items() if value > 0), reverse=True)
    return (
        "lost " + ", ".join(f"{duration(value)} to {CAUSES.get(cause, cause)}" for value, cause in most) if most else ""
    )


def _coarse(seconds: float) -> float:
    """The seconds as exact as an estimate is: whole ones below a minute, then two digits."""
    for limit, step in ((60, 1), (600, 10), (3_600, 60), (36_000, 600)):
        if seconds < limit:
            return max(1.0, round(seconds / step) * step)
    return round(seconds / 3_600) * 3_600.0
