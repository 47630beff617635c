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

# Which scenarios show the mistake, and the invariant that it breaks first.
MISTAKES = [
    (Variant.NO_DRAIN_AT_PREPARE, "a rebuild", "I3"),
    (Variant.NO_DRAIN_AT_SWITCH, "every statement in two steps", "I5"),
    (Variant.PUBLISH_LEAVES_HELD_ROWS, "a rebuild", "I1"),
    (Variant.NO_ISOLATION_CHECKS, "an old snapshot with two writes", "I3"),
    (Variant.NO_MODE_ROW, "three writers", "I3"),
    (Variant.WATERMARK_BEFORE_ROWS, "a second worker and a zombie", "I3"),
    (Variant.NO_COMPARE_AND_SET, "a second worker and a zombie", "I4"),
    (Variant.FOLD_WITHOUT_LOCKS, "three writers", "I3"),
    (Variant.ANTIMATTER_DROPPED_AT_INSERT, "three writers", "I3"),
    (Variant.BASE_WINS, "an included column", "I1"),
    (Variant.DIRECT_MODE_IGNORES_DELTA, "three writers", "I3"),
    (Variant.REBUILD_FORGETS_ACTIVE, "a rebuild", "I1"),
    (Variant.MOVED_KEYS_QUICKLY, "swapped primary keys", "I3"),
    (Variant.TRUNCATE_BETWEEN_READ_AND_WRITE, "a truncate", "I3"),
    (Variant.ANY_VERSION_ANSWERS, "a deleted row in an old snapshot", "I3"),
    (Variant.ANY_VERSION_ANSWERS, "a primary key moves onto a deleted one", "I3"),
    (Variant.ANY_VERSION_ANSWERS, "a deferred key", "I3"),
    (Variant.OWN_HIDES_OTHERS, "a deferred key, alone", "I1"),
    (Variant.KEY_SHARE, "a deferred key, old snapshots", "I1"),
    (Variant.NO_LOCK, "a deleted row in an old snapshot", "I3"),
    (Variant.NO_LOCK, "a deferred key, old snapshots", "I1"),
    (Variant.LOOK_ONCE, "a deferred key, a trigger that deletes", "I1"),
    (Variant.CAPTURE_MODE_TAKES_OLD_SNAPSHOTS, "a deferred key, a snapshot before prepare", "I3"),
    (Variant.CARRY_WITHOUT_COMPARE, "two of one scan", "I4"),
    (Variant.CARRY_INTO_OLD_SNAPSHOT, "two of one scan", "I3"),
    (Variant.CARRY_ABORTED, "two of one scan, one is aborted", "C1"),
    (Variant.CARRY_OR_FAIL, "two of one scan, one is aborted", "C2"),
    (Variant.STALE_COPY_REPORTED, "unique: a create", "U2"),
    (Variant.SEAL_LEAVES_TOUCHED, "unique: a create", "U2"),
    (Variant.ANTIMATTER_HIDES_PAIR, "unique: a deleted row beside a pair", "U3"),
    (Variant.NO_DRAIN_AT_SWITCH, "unique: a deleted row beside a pair", "U1"),
    (Variant.NO_LAST_LOOK, "unique: a create", "U3"),
    (Variant.ONLY_AGAINST_BASE, "unique: a create", "U3"),
    (Variant.RECORDED_FORGOTTEN, "unique: a create", "U3"),
    (Variant.LOOKED_AT_FLIGHT, "unique: a create", "U3"),
    (Variant.REMOVAL_BY_KEY, "unique: direct mode", "I3"),
    (Variant.REMOVAL_BY_KEY, "unique: active, old snapshots", "I1"),
    (Variant.BASE_BEFORE_DELTA, "unique: direct mode", "I6"),
    (Variant.OTHERS_IN_DELTA_IGNORED, "unique: direct mode", "U1"),
    (Variant.NO_QUESTION, "unique: active", "U4"),
    (Variant.ASK_WITHOUT_LOCK, "unique: active", "U4"),
    (Variant.ASK_KEY_SHARE, "unique: active, old snapshots", "U4"),
    (Variant.ASK_WITHOUT_LOCK_IN_OLD_SNAPSHOT, "unique: active, old snapshots", "U4"),
    (Variant.ASK_ONCE, "unique: active", "U1"),
    (Variant.ASK_ONCE, "unique: direct mode", "U1"),
    (Variant.FOLD_KEEPS_HOLDER, "unique: direct mode", "I1"),
    (Variant.FOLD_WAITS_AT_BASE, "unique: two fold steps", "I6"),
    (Variant.FOLD_WAITS_AT_BASE, "unique: direct mode, a trigger that deletes", "I6"),
]
# A second line of defence, or more than is needed: the model doesn't find anything that only it would stop.
HARMLESS = [
    (Variant.NO_PROBE, "three writers"),
    (Variant.LOCK_ON_PLAIN_KEYS, "a primary key moves onto a deleted one"),
    (Variant.OWN_HIDES_OTHERS_ON_PLAIN_KEYS, "a primary key moves onto a deleted one"),
    (Variant.LOCK_ANY_VERSION, "a primary key moves onto a deleted one"),
    (Variant.LOCK_ANY_VERSION, "a deferred key, old snapshots"),
    (Variant.LOCK_ANY_VERSION, "a deferred key, a trigger that deletes"),
    (Variant.NO_LOCK_BUT_REFUSAL, "a deferred key, old snapshots"),
    (Variant.NO_LOCK_BUT_REFUSAL, "a deferred key, a trigger that deletes"),
    (Variant.NO_PROBE, "unique: direct mode, old snapshots"),
    (Variant.ANTIMATTER_IS_STALE, "unique: direct mode"),
]
if SCENARIOS is not DEFAULT:
    HARMLESS += [
        (Variant.LOCK_ON_PLAIN_KEYS, "a deleted row in an old snapshot"),
        (Variant.OWN_HIDES_OTHERS_ON_PLAIN_KEYS, "a deleted row in an old snapshot"),
        (Variant.LOCK_ANY_VERSION, "a deleted row in an old snapshot"),
        (Variant.LOCK_ANY_VERSION, "a deferred key"),
        (Variant.LOCK_ANY_VERSION, "a deferred key, three writers"),
        (Variant.NO_LOCK_BUT_REFUSAL, "a deferred key"),
        (Variant.NO_LOCK_BUT_REFUSAL, "a deferred key, three writers"),
        (Variant.NO_PROBE, "unique: swapped keys, an old snapshot"),
        (Variant.NO_PROBE, "unique: active, old snapshots"),
        (Variant.ANTIMATTER_IS_STALE, "unique: direct mode, three writers"),
    ]
# The least that must be reached, so that no exploration is empty: the number of states, and the generations' statuses.
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
    "a deleted row in an old snapshot": (6_000, "active"),
    "a primary key moves onto a deleted one": (3_000, "active"),
    "a deferred key, alone": (400, "active"),
    "a deferred key": (7_000, "active"),
    "a deferred key, old snapshots": (400, "active"),
    "a deferred key, a snapshot before prepare": (1_000, "active"),
    "a deferred key, a trigger that deletes": (700, "active"),
    "a deferrable key": (200, "active"),
    "two writes each": (80_000, "active"),
    "four writers": (70_000, "active"),
    "every statement in two steps, two fold workers": (70_000, "active"),
    "every statement in two steps, an included column": (50_000, "active"),
    "zombies of workers and folds": (300_000, "active"),
    "an abort with zombies, then a create": (20_000, "dropped,active"),
    "a create, then a rebuild, two writes": (18_000, "retired,active"),
    "swapped primary keys, old snapshots": (50_000, "active"),
    "swapped primary keys in a rebuild, a truncate": (20_000, "retired,active"),
    "old snapshots, every statement in two steps": (80_000, "active"),
    "old snapshots, moves and upserts": (4_000, "active"),
    "a deferred key, moves": (9_000, "active"),
    "a deferred key, three writers": (13_000, "active"),
    "a deferred key, two writes each": (35_000, "active"),
    "a deferrable key, two writes each": (20_000, "active"),
    "a deferred key, every statement in two steps": (60_000, "active"),
    "a deferred key, two writes each, every statement in two steps": (20_000, "active"),
    "a deferred key in a rebuild": (3_000, "retired,active"),
    "two of one scan": (18_000, "active,active"),
    "two of one scan, one is aborted": (15_000, "dropped,active"),
    "two of one scan, two writes": (150_000, "active,active"),
    "two of one scan, an old snapshot, an abort": (20_000, "dropped,active"),
    "unique: a create": (3_000, "active"),
    "unique: a deleted row beside a pair": (1_500, "active"),
    "unique: swapped keys": (8_000, "active"),
    "unique: a rebuild": (7_000, "retired,active"),
    "unique: direct mode": (3_000, "active"),
    "unique: direct mode, old snapshots": (5_000, "active"),
    "unique: direct mode, an included column": (2_500, "active"),
    "unique: direct mode, a trigger that deletes": (2_500, "active"),
    "unique: two fold steps": (1_500, "active"),
    "unique: active": (400, "active"),
    "unique: active, old snapshots": (5_000, "active"),
    "unique: active, a deferrable key": (400, "active"),
    "unique: active, a deferred key": (1_000, "active"),
    "unique: two writes each": (40_000, "active"),
    "unique: swapped keys, an old snapshot": (15_000, "active"),
    "unique: every statement in two steps": (20_000, "active"),
    "unique: swapped keys, every statement in two steps": (35_000, "active"),
    "unique: three writers": (25_000, "active"),
    "unique: shifted keys": (9_000, "active"),
    "unique: a trigger that deletes": (15_000, "active"),
    "unique: an abort, then a create": (15_000, "dropped,active"),
    "unique: a create, then a rebuild": (20_000, "retired,active"),
    "unique: a rebuild, an old snapshot": (12_000, "retired,active"),
    "unique: zombies of workers": (25_000, "active"),
    "unique: moves and upserts": (15_000, "active"),
    "unique: a truncate": (15_000, "active"),
    "unique: a deferred key": (35_000, "active"),
    "unique: active, three writers": (80_000, "active"),
    "unique: direct mode, three writers": (12_000, "active"),
    "unique: direct mode, every statement in two steps": (80_000, "active"),
    "unique: two fold steps, a third key": (130_000, "active"),
}


@pytest.mark.sample(0)
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
    if bounds.unique and bounds.values and bounds.users:
        in_capture_mode = not bounds.built and not bounds.switched
        assert bool(found.paused) == in_capture_mode
        assert found.duplicates or (in_capture_mode and len(bounds.users) == 1)
    # Two rows met at one key, and their entries before them.
    if bounds.key == "deferred" and len(bounds.users) > 1 and bounds.users[-1][1] > 1:
        assert found.deadlocks


def test_every_variant_is_looked_at() -> None:
    assert {Variant.CORRECT, *(variant for variant, *_ in [*MISTAKES, *HARMLESS])} == set(Variant)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("variant", "name"), HARMLESS)
def test_what_is_there_twice_can_be_left_out_once(variant: Variant, name: str) -> None:
    found = explore(SCENARIOS[name], variant)
    assert not found.violation, f"not a second line of defence any more, list it as a mistake: {found}"


@pytest.mark.sample(3)
@pytest.mark.parametrize(("variant", "name", "invariant"), MISTAKES)
def test_each_mistake_is_found(variant: Variant, name: str, invariant: str) -> None:
    found = explore(DEFAULT[name], variant)
    print(f"{variant.value}, in {name}:\n{found}")
    assert found.violation[:2] == invariant, f"{variant.value}: {found}"
