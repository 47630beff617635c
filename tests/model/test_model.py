"""The algorithm within small bounds, every order of steps: it keeps its invariants, and each known mistake breaks one.

`make model` explores larger bounds.
"""

from __future__ import annotations

import os

import pytest

from tests.model.explorer import explore
from tests.model.scenarios import DEFAULT, LARGE
from tests.model.state import Variant

SCENARIOS = {**DEFAULT, **LARGE} if os.environ.get("ROIR_MODEL") == "large" else DEFAULT

# Which scenario shows the mistake, and the invariant that it breaks first.
MISTAKES = {
    Variant.NO_DRAIN_AT_PREPARE: ("a rebuild", "I3"),
    Variant.NO_DRAIN_AT_SWITCH: ("every statement in two steps", "I5"),
    Variant.PUBLISH_LEAVES_HELD_ROWS: ("a rebuild", "I1"),
    Variant.NO_ISOLATION_CHECKS: ("an old snapshot with two writes", "I3"),
    Variant.NO_MODE_ROW: ("three writers", "I3"),
    Variant.WATERMARK_BEFORE_ROWS: ("a second worker and a zombie", "I3"),
    Variant.NO_COMPARE_AND_SET: ("a second worker and a zombie", "I4"),
    Variant.FOLD_WITHOUT_LOCKS: ("three writers", "I3"),
    Variant.ANTIMATTER_DROPPED_AT_INSERT: ("three writers", "I3"),
    Variant.BASE_WINS: ("an included column", "I1"),
    Variant.DIRECT_MODE_IGNORES_DELTA: ("three writers", "I3"),
    Variant.REBUILD_FORGETS_ACTIVE: ("a rebuild", "I1"),
    Variant.MOVED_KEYS_QUICKLY: ("swapped primary keys", "I3"),
    Variant.TRUNCATE_BETWEEN_READ_AND_WRITE: ("a truncate", "I3"),
}
# A second line of defence: the model doesn't find anything that only it would stop.
HARMLESS = {Variant.NO_PROBE: "three writers"}
# What must be reached, so that an exploration can't become empty: states, and the statuses of the generations.
LEAST = {
    "a create": (7_000, "active"),
    "an old snapshot with two writes": (20_000, "active"),
    "an included column": (5_000, "active"),
    "three writers": (8_000, "active"),
    "every statement in two steps": (9_000, "active"),
    "a second worker and a zombie": (9_000, "active"),
    "an abort, then a create": (12_000, "dropped,active"),
    "a create, then a rebuild": (5_000, "retired,active"),
    "a rebuild": (6_000, "retired,active"),
    "swapped primary keys": (1_500, "active"),
    "a truncate": (15_000, "active"),
    "two writes each": (80_000, "active"),
    "four writers": (70_000, "active"),
    "every statement in two steps, two fold workers": (70_000, "active"),
    "every statement in two steps, an included column": (50_000, "active"),
    "zombies of workers and folds": (300_000, "active"),
    "an abort with zombies, then a create": (20_000, "dropped,active"),
    "a create, then a rebuild, two writes": (18_000, "retired,active"),
    "swapped primary keys, old snapshots": (50_000, "active"),
    "swapped primary keys in a rebuild, a truncate": (20_000, "retired,active"),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_algorithm_keeps_its_invariants(name: str) -> None:
    bounds = SCENARIOS[name]
    found = explore(bounds)
    print(f"{name}: {found}")
    assert not found.violation, found
    assert found.complete
    states, published = LEAST[name]
    assert found.states >= states
    assert any(statuses.endswith(published) for statuses in found.reached), found.reached
    # Old snapshots were there, and met what they must not touch.
    assert bool(found.refused) == any(isolation == "RR" for isolation, _ in bounds.users)


def test_every_variant_is_looked_at() -> None:
    assert {Variant.CORRECT, *MISTAKES, *HARMLESS} == set(Variant)


@pytest.mark.parametrize("variant", HARMLESS)
def test_what_is_there_twice_can_be_left_out_once(variant: Variant) -> None:
    found = explore(DEFAULT[HARMLESS[variant]], variant)
    assert not found.violation, f"not a second line of defence any more, list it as a mistake: {found}"


@pytest.mark.parametrize("variant", MISTAKES)
def test_each_mistake_is_found(variant: Variant) -> None:
    name, invariant = MISTAKES[variant]
    found = explore(DEFAULT[name], variant)
    print(f"{variant.value}, in {name}:\n{found}")
    assert found.violation[:2] == invariant, f"{variant.value}: {found}"
