"""The answer that the page Indexes gets about an index's segments."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from airflow_roir.engine.compact.segment import Segment
from airflow_roir.page.lookups import MOST_SEGMENTS, shown_segments

pytestmark = pytest.mark.sample(1)

AT = datetime(2026, 1, 31, tzinfo=timezone.utc)
ONE = Segment(1, "roir_data.g1_s001", ("1",), ("2",), 10, 300, 100, 200, 100, 0.9, 0, 1, 2, 3, 4, AT, AT, 1.0)


@pytest.mark.sample(1)
def test_it_gets_the_sum_and_those_with_most_to_win() -> None:
    assert shown_segments(()) is None
    found = [replace(ONE, ordinal=number, heap_needed=200 + number) for number in range(50)]
    shown = shown_segments(found)
    assert shown is not None
    assert (shown["count"], shown["rows"], shown["bytes"]) == (50, 500, 20_000)
    assert shown["needed"] == sum(one.needed or 0 for one in found)
    assert [one["ordinal"] for one in shown["worst"]] == list(range(MOST_SEGMENTS))
    assert shown["worst"][0]["sealed_at"] == AT.isoformat()


@pytest.mark.sample(1)
def test_what_is_not_known_is_no_zero_and_comes_last() -> None:
    shown = shown_segments([replace(ONE, ordinal=0, rows=None, heap_needed=None), ONE])
    assert shown is not None
    assert (shown["rows"], shown["needed"]) == (None, None)
    assert [one["ordinal"] for one in shown["worst"]] == [1, 0]
