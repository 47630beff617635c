"""The parts of a removal: where the capture function is cut short, and what the figures are."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.removal_parts import ALL, BEFORE, NONE, SIDES, by_parts, cut_short

BODY = (Path(__file__).parent / "engine" / "golden" / "plain_active.sql").read_text()
SEGMENTS = ["roir_data.g1_s001", "roir_data.g1_s002"]


def test_each_side_returns_right_before_the_next_part_begins() -> None:
    texts = cut_short(BODY, SEGMENTS)
    assert [*texts] == [*SIDES[1:-1]]
    assert texts[ALL] == BODY
    reached = {side: text.partition("RETURN NULL;")[0] for side, text in texts.items()}
    assert "careful :=" not in reached["call"]
    assert "gone := true" in reached["questions"]
    assert "INTO here" not in reached["questions"]
    assert "INTO here" in reached["lookup"]
    assert "DELETE FROM" not in reached["lookup"]
    assert all(f"DELETE FROM {name}" in BODY for name in SEGMENTS)
    assert not any(f"DELETE FROM {name}" in texts["choice of the segment"] for name in SEGMENTS)


def test_a_function_of_another_shape_is_not_measured() -> None:
    with pytest.raises(ValueError, match="IF gone THEN"):
        cut_short(BODY.replace("IF gone THEN", "IF lost THEN"), SEGMENTS)
    with pytest.raises(ValueError, match="2 of 3 segments"):
        cut_short(BODY, [*SEGMENTS, "roir_data.g1_s003"])


def test_the_parts_add_up_to_the_whole() -> None:
    medians = dict(zip(SIDES, (1.0, 1.8, 2.3, 5.3, 5.4, 10.0, 21.0), strict=True))
    parts = by_parts({side: [value, value + 50, value - 0.5] for side, value in medians.items()})
    assert parts["all"] == 9.0
    assert parts["all, before"] == 20.0
    assert sum(parts[side] for side in SIDES if side not in (NONE, BEFORE)) == pytest.approx(parts["all"])
