"""Cutting a sample: contiguous runs of about equal counts, whatever the counts are."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from airflow_roir.engine.generation.cut import Piece, Plan, cut

COUNTED = st.lists(st.integers(1, 1000), max_size=60).map(
    lambda counts: [((f"{i:04}",), count) for i, count in enumerate(counts)]
)


@given(values=COUNTED, pieces=st.integers(1, 20))
def test_bounds_are_increasing_values_and_no_more_than_asked_for(
    values: list[tuple[tuple[str, ...], int]], pieces: int
) -> None:
    bounds, largest = cut(values, pieces)
    assert len(bounds) <= pieces - 1
    assert all(low < high for low, high in pairwise(bounds))
    known = [value for value, _ in values]
    assert all(bound in known[1:] for bound in bounds), "a bound at the first value would leave a run empty"
    edges = [0, *(known.index(bound) for bound in bounds), len(values)]
    runs = [sum(count for _, count in values[low:high]) for low, high in pairwise(edges)]
    assert largest == max(runs, default=0)


@given(values=COUNTED, pieces=st.integers(1, 20))
def test_no_run_is_larger_than_its_share_and_one_value(values: list[tuple[tuple[str, ...], int]], pieces: int) -> None:
    _, largest = cut(values, pieces)
    heaviest = max((count for _, count in values), default=0)
    assert largest <= sum(count for _, count in values) / pieces + heaviest


def test_equal_counts_are_cut_evenly() -> None:
    bounds, largest = cut([((str(i),), 1) for i in range(8)], 4)
    assert bounds == [("2",), ("4",), ("6",)]
    assert largest == 2


def test_what_follows_a_heavy_value_is_not_put_on_top_of_it() -> None:
    bounds, largest = cut([(("a",), 1), (("b",), 100), (("c",), 1)], 3)
    assert bounds == [("c",)]
    assert largest == 101


def test_nothing_can_be_cut_from_nothing() -> None:
    assert cut([], 5) == ([], 0)
    plan = Plan(0, 0, (Piece(1, None, None),), (), 1)
    assert plan.ranges == plan.segments == 1
