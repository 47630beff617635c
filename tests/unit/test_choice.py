"""The choice of what to compact: laws that hold for any index, and the cases that it is made for."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import product
from typing import Any

import pytest

from airflow_roir.engine.compact import choice, cost_model
from airflow_roir.engine.compact.budget import Budget
from airflow_roir.engine.compact.choice import Candidate, Choice, Kind, Terms, pick
from airflow_roir.engine.compact.cost_model import Known
from airflow_roir.engine.compact.segment import Segment
from airflow_roir.errors import InvalidInput

NOW = datetime(2026, 11, 24, 12, tzinfo=timezone.utc)
TERMS = Terms(NOW)
MB = 1 << 20
GB = 1 << 30

pytestmark = pytest.mark.sample(4)


def segment(ordinal: int, place: int | None = None, *, of: int = 10, mb: float = 100, **given: Any) -> Segment:
    """A fresh segment of an index with `of` segments: three fifths table, two fifths B-tree. place: in key order."""
    place = ordinal - 1 if place is None else place
    heap, tree = int(mb * MB * 0.6), int(mb * MB * 0.4)
    facts: dict[str, Any] = {
        "lower": None if ordinal == 0 or place == 0 else (f"{place:05}",),
        "upper": None if ordinal == 0 or place == of - 1 else (f"{place + 1:05}",),
        "rows": heap // 64,
        "heap_bytes": heap,
        "tree_bytes": tree,
        "heap_needed": heap,
        "tree_needed": tree,
        "leaf_density": None,
        "dead_rows": 0,
        "scans": 7_000,
        "rows_read": 70_000,
        "blocks_read": 7_000,
        "blocks_hit": 63_000,
        "since": NOW - timedelta(days=7),
        "sealed_at": NOW - timedelta(days=300),
        "growth": 1.0,
    }
    return Segment(ordinal, f"roir_data.g1_s{ordinal:03}", **(facts | given))


def bloated(one: Segment, tree: float = 1.0, heap: float = 1.0) -> Segment:
    """The same segment with a B-tree that is `tree` times as big, and a table that is `heap` times as big."""
    return replace(one, tree_bytes=int(one.tree_bytes * tree), heap_bytes=int(one.heap_bytes * heap))


def emptied(one: Segment, left: float = 0.01) -> Segment:
    """The same after deletions, of which VACUUM gave no page back."""
    assert one.rows is not None
    assert one.heap_needed is not None
    assert one.tree_needed is not None
    return replace(
        one,
        rows=int(one.rows * left),
        heap_needed=int(one.heap_needed * left),
        tree_needed=max(8192, int(one.tree_needed * left)),
    )


def fresh(count: int = 10, chance: random.Random | None = None) -> list[Segment]:
    """An index that was just built, with its default segment."""
    chance = chance or random.Random(1)
    rest = segment(0, mb=0.02, rows=0)
    return [rest, *(segment(i, of=count, mb=chance.uniform(60, 150)) for i in range(1, count + 1))]


def any_index(chance: random.Random) -> list[Segment]:
    """Segments of any age: bloated, emptied, grown, small, unknown; ordinals in no order."""
    count = chance.randrange(1, 9)
    found = [segment(0, mb=chance.choice([0.02, 30]))]
    ordinals = chance.sample(range(1, 30), count)
    for place, ordinal in enumerate(ordinals):
        one = segment(
            ordinal,
            place,
            of=count,
            mb=chance.choice([0.05, 1, 20, 100, 100, 100, 3_000]),
            scans=chance.choice([0, 10, 10_000, 10_000_000]),
            dead_rows=chance.choice([0, 1_000]),
        )
        age = chance.randrange(6)
        if age == 1:
            one = bloated(one, chance.uniform(1, 4), chance.uniform(1, 4))
        elif age == 2:
            one = emptied(one, chance.uniform(0, 0.5))
        elif age == 3 and chance.random() < 0.3:
            one = replace(one, rows=None, note="never analyzed")
        found.append(one)
    chance.shuffle(found)
    return found


def neighbours(segments: list[Segment]) -> set[tuple[int, int]]:
    ranged = [one for one in segments if one.ordinal]
    return {(a.ordinal, b.ordinal) for a in ranged for b in ranged if a.upper is not None and a.upper == b.lower}


@pytest.mark.parametrize("seed", range(60))
def test_laws(seed: int) -> None:
    chance = random.Random(seed)
    segments = any_index(chance)
    terms = replace(TERMS, segment_bytes=chance.choice([None, None, 200 * MB]))
    free = pick(segments, terms)
    adjacent = neighbours(segments)
    whole = int(free.totals["budgeted"])
    before = 0.0
    for part in (0.05, 0.2, 0.5, 0.9, 1.1):
        for budget in (Budget(bytes=int(whole * part) + 1), Budget(seconds=free.totals["seconds"] * part + 1e-3)):
            made = pick(segments, terms, budget)
            assert sum(one.budgeted for one in made.actions) <= (budget.bytes or float("inf")), seed
            assert made.totals["seconds"] <= (budget.seconds or float("inf")) * (1 + 1e-9), seed
            check(made, segments, adjacent)
            net = made.totals["gain"] - made.totals["cost"]
            assert net <= free.totals["gain"] - free.totals["cost"] + 1e-6, seed
            if budget.bytes is not None:
                assert net >= before - 1e-6, f"seed {seed}: more budget, less gain"
                before = net
    for one in free.actions:
        # A byte is missing.
        made = pick(segments, terms, Budget(bytes=one.budgeted - 1))
        assert made.totals["budgeted"] < one.budgeted, seed
        made = pick(segments, terms, Budget(bytes=one.budgeted))
        assert made.totals["gain"] - made.totals["cost"] >= one.net - 1e-6, seed
    check(free, segments, adjacent)


def check(made: Choice, segments: list[Segment], adjacent: set[tuple[int, int]]) -> None:
    touched = [ordinal for one in made.actions for ordinal in one.ordinals]
    assert len(touched) == len(set(touched)), "a segment in two actions"
    unknown = {one.ordinal for one in segments if one.rows is None}
    assert unknown.isdisjoint(touched)
    assert unknown <= {ordinal for one in made.left_out for ordinal in one.ordinals}
    for action in made.actions:
        assert action.net > 0
        assert 0 not in action.ordinals or action.kind is Kind.REWRITE
        assert (len(action.ordinals) > 1) == (action.kind is Kind.MERGE)
        assert (action.parts > 1) == (action.kind is Kind.SPLIT)
        pairs = set(zip(action.ordinals, action.ordinals[1:], strict=False))
        assert pairs <= adjacent, "merges strangers"
    ratios = [one.gain / one.cost for one in made.actions]
    assert ratios == sorted(ratios, reverse=True)
    json.dumps(made.as_dict())


def by_force(among: list[Candidate], budget: Budget, steps: int) -> float:
    """The best net gain, over all sets. Weighed in steps, as `best` does."""
    greatest = 0.0
    for taken in product([False, True], repeat=len(among)):
        some = [one for one, wanted in zip(among, taken, strict=True) if wanted]
        places = [place for one in some for place in range(one.start, one.stop)]
        if len(places) == len(set(places)) and (
            not budget.is_limited or sum(choice.weight_of(one.action, budget, steps) for one in some) <= steps
        ):
            greatest = max(greatest, sum(one.action.net for one in some))
    return greatest


@pytest.mark.parametrize("seed", range(60))
def test_the_choice_is_the_best_there_is(seed: int) -> None:
    chance = random.Random(seed)
    segments = any_index(chance)
    chains = [[Known.of(one, NOW) for one in chain] for chain in choice.in_key_order(segments)]
    among = [
        one for one in choice.candidates(chains, choice.target_bytes(segments, TERMS), TERMS) if one.action.net > 0
    ][:12]
    whole = sum(one.action.budgeted for one in among)
    for budget in (Budget(), *(Budget(bytes=int(whole * chance.random()) + 1) for _ in range(3))):
        found = choice.best(among, len(segments), budget)
        assert sum(one.net for one in found) == pytest.approx(
            by_force(among, budget, choice.steps_of(len(segments)))
        ), (seed, budget)


def test_steps_of_the_budget_lose_little() -> None:
    """Against sums in bytes: as good as the best under a budget that is less by a step for each action."""
    for seed in range(30):
        chance = random.Random(seed)
        among = []
        for place in range(10):
            made = cost_model.rewrite(known(bloated(segment(place + 1, mb=chance.uniform(1, 400)), 5, 5)), TERMS)
            assert made is not None
            among.append(Candidate(place, place + 1, made))
        whole = sum(one.action.budgeted for one in among)
        budget = int(whole * chance.uniform(0.2, 0.9))
        less = budget * (1 - len(among) / choice.steps_of(10))
        exact = max(
            sum(one.action.net for one in some)
            for taken in product([False, True], repeat=len(among))
            for some in [[one for one, wanted in zip(among, taken, strict=True) if wanted]]
            if sum(one.action.budgeted for one in some) <= less
        )
        assert sum(one.net for one in choice.best(among, 10, Budget(bytes=budget))) >= exact - 1e-6, seed


def known(one: Segment) -> Known:
    found = Known.of(one, NOW)
    assert found is not None
    return found


@pytest.mark.parametrize("seed", range(10))
def test_a_fresh_index_needs_nothing(seed: int) -> None:
    chance = random.Random(seed)
    made = pick(fresh(chance.randrange(1, 60), chance), TERMS)
    assert not made.actions
    assert not made.left_out
    assert not made.rebuild_is_cheaper


def test_one_bloated_segment_in_fifty_is_made_again_alone() -> None:
    segments = fresh(50)
    segments[17] = bloated(segments[17], tree=3)
    (action,) = pick(segments, TERMS).actions
    assert (action.kind, action.ordinals) == (Kind.REWRITE, (17,))
    assert action.room_saved == pytest.approx(segments[17].tree_bytes * 2 / 3, rel=0.01)
    assert action.pages_saved_per_day > 0
    assert "1,000 reads a day" in action.why


def test_a_bloated_table_is_written_again_too() -> None:
    segments = fresh()
    segments[4] = bloated(segments[4], tree=3, heap=3)
    (action,) = pick(segments, TERMS).actions
    assert (action.kind, action.ordinals) == (Kind.REWRITE, (4,))


def test_what_comes_back_by_itself_is_left() -> None:
    """A B-tree at ln 2 of its pages, the state of random inserts."""
    segments = [bloated(one, tree=0.9 / 0.69) for one in fresh()]
    assert not pick(segments, TERMS).actions


def test_the_segment_that_grew_is_split_even_if_there_are_two() -> None:
    for count in (2, 10):
        segments = fresh(count)
        segments[-1] = segment(count, of=count, mb=2_000)
        (action,) = pick(segments, TERMS).actions
        assert (action.kind, action.ordinals) == (Kind.SPLIT, (count,))
        assert 10 <= action.parts <= 33


def test_a_given_size_splits_and_a_single_segment_without_one_is_left() -> None:
    only = [segment(0, mb=0.02), segment(1, of=1, mb=900)]
    assert not pick(only, TERMS).actions
    (action,) = pick(only, replace(TERMS, segment_bytes=100 * MB)).actions
    assert (action.kind, action.parts) == (Kind.SPLIT, 9)


def test_neighbours_that_deletions_have_emptied_become_one() -> None:
    """Neighbours are found by their bounds, whatever their numbers; a segment between them that isn't empty keeps them
    apart."""
    ordinals = [9, 3, 7, 1, 5, 2, 8, 4]
    segments = [segment(0, mb=0.02)]
    for place, ordinal in enumerate(ordinals):
        one = segment(ordinal, place, of=8)
        segments.append(emptied(one) if place in (1, 2, 3, 6) else one)
    made = pick(segments, TERMS)
    by_kind = {one.kind: one.ordinals for one in made.actions}
    assert by_kind == {Kind.MERGE: (3, 7, 1), Kind.REWRITE: (8,)}
    assert made.totals["room_saved"] > 390 * MB


def test_a_missing_segment_parts_neighbours() -> None:
    segments = [emptied(segment(i, of=4)) for i in range(1, 5)]
    del segments[1]
    merged = [one.ordinals for one in pick([*segments, *_big(20)], TERMS).actions if one.kind is Kind.MERGE]
    assert merged == [(3, 4)]
    unknown = [emptied(segment(i, of=6)) for i in range(1, 7)]
    unknown[2] = replace(unknown[2], rows=None)
    made = pick([*unknown, *_big(20)], TERMS)
    assert {one.ordinals for one in made.actions} == {(1, 2), (4, 5, 6)}


def _big(count: int) -> list[Segment]:
    return [
        replace(segment(100 + i, 100 + i, of=1_000), lower=(f"x{2 * i}",), upper=(f"x{2 * i + 1}",))
        for i in range(count)
    ]


def test_what_is_read_goes_first_and_a_budget_takes_it_alone() -> None:
    segments = fresh()
    for place, scans in ((3, 100), (6, 10_000_000)):
        busy = {"scans": scans, "rows_read": 10 * scans, "blocks_read": scans, "blocks_hit": 9 * scans}
        segments[place] = bloated(segment(place, mb=100, **busy), tree=3)
    made = pick(segments, TERMS)
    assert [one.ordinals for one in made.actions] == [(6,), (3,)]
    budget = Budget(bytes=int(made.totals["budgeted"] * 0.6))
    less = pick(segments, TERMS, budget)
    assert [one.ordinals for one in less.actions] == [(6,)]
    (left,) = less.left_out
    assert left.ordinals == (3,)
    assert str(budget) in left.why


def test_a_ratio_alone_would_choose_worse() -> None:
    """Small and very worth it, or large and worth more: of a budget for one of them the greater gain is taken."""
    segments = fresh()
    segments[2] = emptied(segment(2, mb=90), 0.2)
    segments[5] = emptied(segment(5, mb=500), 0.3)
    both = pick(segments, TERMS)
    small, large = both.actions
    assert small.ordinals == (2,)
    made = pick(segments, TERMS, Budget(bytes=large.budgeted))
    assert [one.ordinals for one in made.actions] == [(5,)]


def test_the_default_segment_is_made_again_and_neither_split_nor_merged() -> None:
    (action,) = pick([bloated(segment(0, mb=300), 4, 4), *fresh()[1:]], TERMS).actions
    assert (action.kind, action.ordinals) == (Kind.REWRITE, (0,))
    assert not pick([segment(0, mb=9_000), *fresh()[1:]], TERMS).actions
    assert not pick([emptied(segment(0, mb=0.1), 0), *fresh()[1:]], TERMS).actions


def test_what_isnt_known_is_left_out_with_its_reason() -> None:
    segments = fresh()
    segments[2] = replace(segments[2], rows=None, note="it has no statistics: ANALYZE makes them")
    segments[3] = replace(segments[3], tree_needed=None)
    left = {one.ordinals: one.why for one in pick(segments, TERMS).left_out}
    assert left == {(2,): "it has no statistics: ANALYZE makes them", (3,): "how much of it is waste isn't known"}


def test_reads_since_nobody_knows_when_count_for_nothing() -> None:
    unknown = bloated(segment(1, since=None, sealed_at=None), tree=3)
    assert known(unknown).scans == 0
    # One hour's reads aren't multiplied by 24 for a day.
    assert known(replace(unknown, since=NOW - timedelta(hours=1))).scans == unknown.scans


def test_waste_that_costs_more_than_it_saves_is_told() -> None:
    segments = fresh()
    segments[2] = bloated(segments[2], tree=1.5, heap=1.5)
    made = pick(segments, replace(TERMS, horizon_days=1))
    assert not made.actions
    (left,) = made.left_out
    assert left.ordinals == (2,)
    assert "costs more page reads" in left.why


def test_where_all_is_waste_a_rebuild_is_told() -> None:
    segments = [segment(0, mb=0.02), *(bloated(one, 4, 4) for one in fresh()[1:])]
    made = pick(segments, TERMS)
    assert len(made.actions) == 10
    assert made.rebuild_is_cheaper
    assert not pick(segments, TERMS, Budget(bytes=made.rebuild_bytes // 2)).rebuild_is_cheaper
    half = [segment(0, mb=0.02), *(bloated(one, 4, 4) if n % 2 else one for n, one in enumerate(fresh()[1:]))]
    assert len(pick(half, TERMS).actions) == 5
    assert not pick(half, TERMS).rebuild_is_cheaper


def test_prices_of_pages() -> None:
    assert cost_model.price(1.0) == 4.0
    assert cost_model.price(0.0) == 0.125
    assert [cost_model.levels(pages) for pages in (0, 1, 2, 150, 151, 22_500, 22_501)] == [0, 0, 1, 1, 2, 2, 3]
    # Half of the visits are cached: half of the pages are. Once there are half as many pages, all are.
    assert cost_model.relief(0.5, 0.5) == 0.5
    assert cost_model.relief(0.9, 0.5) == pytest.approx(0.1)
    assert cost_model.relief(0.0, 0.1) == 0.0
    assert cost_model.relief(1.0, 0.1) == 0.0
    assert cost_model.relief(0.3, 1.0) == 0.0
    assert cost_model.relief(0.3, 0.0) == 0.3


def test_costs_are_what_is_read_written_and_logged() -> None:
    one = known(bloated(segment(1, mb=100), tree=3))
    made = cost_model.rewrite(one, TERMS)
    assert made is not None
    assert made.pages_read == -(-one.heap // 8192)
    assert made.bytes_written == one.needed
    assert made.bytes_logged > one.tree_needed + cost_model.SEGMENT_WAL
    assert made.cost == (one.heap + 2 * made.bytes_written + 2 * made.bytes_logged) / 8192
    assert made.seconds == (one.heap + made.budgeted) / cost_model.BYTES_PER_SECOND
    assert replace(TERMS, bytes_per_second=40 << 20) != TERMS


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        (None, Budget()),
        ("", Budget()),
        ("20GB", Budget(bytes=20 * GB)),
        ("1.5 MB", Budget(bytes=3 * MB // 2)),
        ("512kb", Budget(bytes=512 << 10)),
        ("100B", Budget(bytes=100)),
        ("30min", Budget(seconds=1_800)),
        ("1h 30min", Budget(seconds=5_400)),
        ("90s", Budget(seconds=90)),
    ],
)
def test_budgets(text: str | None, budget: Budget) -> None:
    assert Budget.parse(text) == budget


@pytest.mark.parametrize(
    "text", ["20", "0GB", "0s", "-1GB", "GB", "many", "20 G B", "1.5h", "off", "never", 20, "20GB 30min"]
)
def test_no_budget(text: object) -> None:
    with pytest.raises(InvalidInput, match=r"--budget is .*"):
        Budget.parse(text)


def test_budgets_are_told() -> None:
    assert str(Budget.parse("20GB")) == "20 GB"
    assert str(Budget.parse("90min")) == "1 h 30 min"
    assert str(Budget()) == "no limit"
