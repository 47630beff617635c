"""Reads durations as users write them: `2h`, `1h 30min`, `90`, which is seconds."""

from __future__ import annotations

import re
from typing import Any

from airflow_roir.errors import InvalidInput

_PART = re.compile(r"(\d+)\s*(d|h|min|m|s)(?=[\d\s]|$)")
LONGEST_S = 365 * 86_400
_UNITS = {"d": 86_400, "h": 3_600, "min": 60, "m": 60, "s": 1}


def seconds(name: str, value: Any) -> int | None:
    """Reads an optional duration, in seconds; None, '' and 'None' (an empty field, rendered) are None.

    `off` and `never` are 0. name: for the message. Raises InvalidInput, also for more than a year.
    """
    found = _read(name, value)
    if found is not None and not 0 <= found <= LONGEST_S:
        raise InvalidInput(f"{name} is {value!r}; it must be a duration of at most a year, {LONGEST_S // 86_400}d")
    return found


def _read(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip() if isinstance(value, str) else ""
    if isinstance(value, str) and text in ("", "None"):
        return None
    if text in ("off", "never"):
        return 0
    if text.isascii() and text.replace("_", "").replace(",", "").isdigit():
        return int(text.replace("_", "").replace(",", ""))
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip():
        raise InvalidInput(f"{name} is {value!r}; it must be a duration, such as 2h, 90min or 30 (seconds)")
    return sum(int(number) * _UNITS[unit] for number, unit in parts)
