"""An index that is unique over shards within small bounds, every order of steps, and each known mistake.

`make model` explores larger bounds.
"""

from __future__ import annotations

import os

import pytest
from _pytest.mark import ParameterSet

from tests.model.holders_explorer import explore
from tests.model.holders_scenarios import DEFAULT, LARGE
from tests.model.holders_state import Variant

IS_LARGE = os.environ.get("ROIR_MODEL") == "large"
ALL = {**DEFAULT, **LARGE}
SCENARIOS = ALL if IS_LARGE else DEFAULT

# Which scenario shows the mistake, and the invariant that it breaks first.
MISTAKES = [
    (Variant.ONE_STATEMENT, "one shard", "H1"),
    (Variant.NO_KEY_SHARE, "one shard", "H1"),
    (Variant.SETTLE_FIRST, "two shards", "H3"),
    (Variant.NO_INTENT_LEFT, "two shards", "H3"),
    (Variant.INTENTS_UNSEEN, "two shards", "H1"),
    (Variant.ENTRIES_UNSEEN, "two rows", "H1"),
    (Variant.HOLDER_BY_KEY, "two writers of one shard", "H1"),
    (Variant.REFUSED_AT_ONCE, "two shards", "H2"),
    (Variant.HANDED_OVER, "two shards", "H1"),
    (Variant.PUT_AFTER_COMMIT, "two rows", "H1"),
    (Variant.NO_LOCAL_INDEX, "two rows", "H1"),
    (Variant.NULL_HELD, "null", "H2"),
    (Variant.TRIGGER_WITHOUT_DRAIN, "filled", "H1"),
    (Variant.FILL_BESIDE_POLLS, "filled", "H3"),
    (Variant.FILL_ENTRIES_ALONE, "filled", "H1"),
    (Variant.SWITCH_WITHOUT_LOCK, "filled", "H1"),
    (Variant.MODE_AS_ROW, "filled, one snapshot", "H1"),
    (Variant.PUT_UNCONTESTED, "filled", "H1"),
    (Variant.HOLDER_UNCHANGED, "filled", "H1"),
    (Variant.LISTED_EARLY, "filled with duplicates", "H4"),
    (Variant.POLL_FILLS, "filled", "H6"),
    (Variant.DOUBT_FORGOTTEN, "a shard loses its last commits", "H1"),
    (Variant.FILLED_ON_TOP, "a shard loses its last commits", "H3"),
]
# These take half a minute each.
MISTAKES_LARGE = [
    (Variant.REFUSES_ON, "a shard loses its last commits, three writers", "H5"),
    (Variant.LOST_PUT_UNDRAINED, "the index server loses its last commits", "H4"),
]
# More than is needed: the model finds nothing wrong without it.
HARMLESS = [
    (Variant.PUTS_ALONE, "two writers of one shard"),
    (Variant.PUTS_ALONE, "swapped"),
    (Variant.PUTS_ALONE, "announced midway"),
    (Variant.POLL_UNCONTESTED, "filled"),
    (Variant.POLL_UNCONTESTED, "a shard loses its last commits"),
]


def _by_time(name: str, *values: object) -> ParameterSet:
    """A case's parameters; marked slow if its scenario has 4,000 states or more (it takes more than a second)."""
    return pytest.param(*values, marks=[pytest.mark.slow] if ALL[name][1] >= 4_000 else [])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [_by_time(name, name) for name in SCENARIOS])
def test_what_is_unique_over_shards_keeps_its_invariants(name: str) -> None:
    bounds, least, reached = SCENARIOS[name]
    found = explore(bounds)
    print(f"{name}: {found}, {sorted(found.reached)}")
    assert not found.violation, found
    assert found.states >= least
    assert reached <= found.reached


def test_every_variant_is_looked_at() -> None:
    looked = [*MISTAKES, *MISTAKES_LARGE, *HARMLESS]
    assert {Variant.CORRECT, *(variant for variant, *_ in looked)} == set(Variant)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("variant", "name", "invariant"), [pytest.param(*one) for one in MISTAKES + MISTAKES_LARGE * IS_LARGE]
)
def test_each_mistake_is_found(variant: Variant, name: str, invariant: str) -> None:
    found = explore(ALL[name][0], variant)
    print(f"{variant.value}, in {name}:\n{found}")
    assert found.violation[:2] == invariant, f"{variant.value}: {found}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("variant", "name"), [_by_time(one[1], *one) for one in HARMLESS])
def test_what_is_there_twice_can_be_left_out_once(variant: Variant, name: str) -> None:
    found = explore(ALL[name][0], variant)
    assert not found.violation, f"not a second line of defence any more, list it as a mistake: {found}"
