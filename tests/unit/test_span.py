"""Durations as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_roir.errors import InvalidInput
from airflow_roir.span import seconds


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (None, None),
        ("", None),
        ("None", None),
        (90, 90),
        ("90", 90),
        ("3,600", 3600),
        ("90s", 90),
        ("90min", 5400),
        ("90 m", 5400),
        ("2h", 7200),
        ("1h 30min", 5400),
        ("1h30m", 5400),
        ("1d", 86_400),
        ("0", 0),
        ("off", 0),
        ("never", 0),
    ],
)
def test_a_duration_is_read(value: Any, read: int | None) -> None:
    assert seconds("max_duration_s", value) == read


@pytest.mark.parametrize("value", ["soon", "1.5h", "-1h", "2hours", "h", "1h x", True, 1.5, "²", "366d", "9" * 30, -1])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    """Found: `ship_for` of `ship_changes` could be any number of seconds: a run with some digits too many shipped for
    good; `warn_rows="2h"` was 7,200 rows, and a negative one always warned. It holds: a duration is at most a year, and
    a number of rows is a number.
    """
    with pytest.raises(InvalidInput, match="max_duration_s"):
        seconds("max_duration_s", value)
