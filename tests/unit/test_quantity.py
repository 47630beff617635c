"""Quantities as people read them."""

from __future__ import annotations

import pytest

from airflow_roir.engine.governor.control import STARTING, UNREADABLE
from airflow_roir.engine.retry.trouble import LACKS, Trouble
from airflow_roir.quantity import CAUSES, counted, duration, left, lost, percent, rate, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0, "0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (3520, "58 min 40 s"),
        (3599.7, "1 h"),
        (11_520, "3 h 12 min"),
        (86_399, "1 d"),
        (190_800, "2 d 5 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_counts_rates_and_percentages() -> None:
    assert [size(n) for n in (0, 1, 8192, 1_048_570, 1_300_000_000, 5 << 40)] == [
        "0 bytes",
        "1 byte",
        "8 kB",
        "1.0 MB",
        "1.2 GB",
        "5.0 TB",
    ]
    assert [
        counted(1, "worker"),
        counted(2000, "row"),
        counted(1, "entry", "entries"),
        counted(0, "entry", "entries"),
    ] == [
        "1 worker",
        "2,000 rows",
        "1 entry",
        "0 entries",
    ]
    assert [rate(1785.4), rate(0.42)] == ["1,785 rows/s", "0.4 rows/s"]
    assert [percent(99.97), percent(100), percent(0)] == ["99.9 %", "100 %", "0 %"]


def test_what_is_left_is_as_exact_as_an_estimate_and_never_nothing() -> None:
    assert left(None) is None
    assert left(0, 0, 0.5) == "a few seconds left"
    assert left(12, 11, 13) == "about 12 s left"
    assert left(300, 200, 400) == "3 min 20 s to 6 min 40 s left"
    assert left(20, 0, 40) == "up to 40 s left"
    assert left(7_000, 6_500, 7_500) == "about 1 h 56 min left" or left(7_000, 6_500, 7_500) == "about 2 h left"


def test_lost_time_names_its_causes_in_words() -> None:
    """Found: `lost 13 s to exhausted`; then `to a lack of disk, memory or connections`, whichever it was."""
    seconds = {"replica_lag": 192, "memory": 13, "lock_waits": 0.0}
    assert lost(seconds) == "lost 3 min 12 s to replica_lag, 13 s to a lack of memory"
    assert lost({}) == ""
    assert {*CAUSES} == {
        UNREADABLE,
        STARTING,
        *LACKS.values(),
        *(one.value for one in Trouble if one is not Trouble.LOST),
    }
