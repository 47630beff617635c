"""An index apart from its source within small bounds, every order of steps, and each known mistake.

`make model` explores larger bounds.
"""

from __future__ import annotations

import os

import pytest
from _pytest.mark import ParameterSet

from tests.model.apart_explorer import explore
from tests.model.apart_scenarios import DEFAULT, LARGE, NOT_PROMISED
from tests.model.apart_state import Variant

IS_LARGE = os.environ.get("ROIR_MODEL") == "large"
ALL = {**DEFAULT, **LARGE}
SCENARIOS = ALL if IS_LARGE else DEFAULT

# Which scenario shows the mistake, and the invariant that it breaks first.
MISTAKES = [
    (Variant.ACK_BEFORE_APPLY, "answers are lost", "A1"),
    (Variant.ACK_WITHOUT_VERSION, "two writers", "A1"),
    (Variant.SNAPSHOT_BEFORE_CLAIM, "two shippers", "A3"),
    (Variant.FRESH_FROM_END, "two writers", "A3"),
    (Variant.PASS_ENDS_EARLY, "two rows, one a poll", "A3"),
    (Variant.SHIP_BEFORE_COPIES, "a build", "A3"),
    (Variant.CAPTURE_AFTER_COPY, "a build", "A1"),
    (Variant.CAPTURE_WITHOUT_DRAIN, "a build", "A1"),
    (Variant.EMPTIED_LAST, "a truncate", "A3"),
    (Variant.EMPTIED_FORGOTTEN, "a truncate", "A1"),
    (Variant.TICK_ON_INDEX_ALONE, "a shard loses its last commits, answers are lost", "A1"),
    (Variant.STEP_OVERWRITTEN, "the index server loses its last commits", "A1"),
    (Variant.INTENT_AFTER_COMMIT, "strict", "A4"),
    (Variant.INTENTS_BY_GUESS, "strict, a read of the other key", "A4"),
    (Variant.SETTLE_WITHOUT_SNAPSHOT, "strict", "A4"),
    (Variant.BEYOND_THE_END_ANY, "strict", "A4"),
    (Variant.TWO_STATEMENTS, "strict", "A4"),
    (Variant.NAMED_UNTRUE, "strict, one row a poll", "A4"),
    (Variant.START_UNNOTICED, "strict, an older copy of the index server", "A4"),
    (Variant.PROVED_BY_A_PASS, "strict, an older copy of the index server", "A4"),
    (Variant.HORIZON_OF_BEFORE, "strict, an older copy of the index server", "A4"),
]
# These take half a minute each.
MISTAKES_LARGE = [
    (Variant.NOTHING_CHECKED, "two shippers, two writers", "A3"),
    (Variant.OLD_SNAPSHOT, "two shippers, two writers", "A3"),
    (Variant.SAME_TOKEN_TWICE, "the index server loses its last commits, two shippers", "A1"),
]
# One of two lines of defence, or more than is needed: the model finds nothing wrong without it.
HARMLESS = [
    (Variant.TOKEN_UNCHECKED, "two shippers"),
    (Variant.APPLIED_TICK_UNCHECKED, "two shippers"),
    (Variant.PASS_BY_IDENTITY, "two rows, one a poll"),
    (Variant.TICK_WITHOUT_TOKEN, "a shard loses its last commits, answers are lost"),
]


def _by_time(name: str, *values: object) -> ParameterSet:
    """A case's parameters; marked slow if its scenario has 2,000 states or more (it takes more than two seconds)."""
    return pytest.param(*values, marks=[pytest.mark.slow] if ALL[name][1] >= 2_000 else [])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [_by_time(name, name) for name in SCENARIOS])
def test_what_is_apart_keeps_its_invariants(name: str) -> None:
    bounds, least, reached = SCENARIOS[name]
    found = explore(bounds)
    print(f"{name}: {found}, {sorted(found.reached)}")
    assert not found.violation, found
    assert found.states >= least
    assert reached in found.reached
    assert not bounds.readers or "read" in found.reached


def test_every_variant_is_looked_at() -> None:
    looked = [*MISTAKES, *MISTAKES_LARGE, *HARMLESS]
    assert {Variant.CORRECT, *(variant for variant, *_ in looked)} == set(Variant)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("variant", "name", "invariant"), [_by_time(one[1], *one) for one in MISTAKES + MISTAKES_LARGE * IS_LARGE]
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_PROMISED)
def test_what_is_not_promised_can_be(name: str) -> None:
    """If there were no violation, the documents would promise too little."""
    found = explore(NOT_PROMISED[name])
    print(f"{name}:\n{found}")
    assert found.violation[:2] == "A4"
