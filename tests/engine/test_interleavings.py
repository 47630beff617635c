"""Transactions in all interleavings, on a real server: the index is the projection of the source afterwards.

Or someone was refused with 40001, or got an error that he gets without the index too: each schedule is played on a twin
that has none. With an ordinary primary key and READ COMMITTED there is no other error and no other wait than there.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.engine import menu
from tests.engine.crossing import LEGS, Crossing, drains
from tests.engine.ground import DEFERRED, IMMEDIATE, KINDS, ORDINARY, Ground, grounds_of
from tests.engine.isolation import (
    BUILD,
    LEVELS,
    READ_COMMITTED,
    REPEATABLE_READ,
    SERIALIZABLE,
    Schedule,
    Transaction,
    all_pairs,
    by_chance,
    interleavings,
    shuffled,
)

pytestmark = pytest.mark.sample(1)

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
OLD = (REPEATABLE_READ, SERIALIZABLE)
# In the midst of a build some slots are scanned and some aren't.
MODES = ("mid-build", "direct", "active")
# Two of these in all orders beside a third: what meets, parts or moves the row that the other transaction deletes.
CORE = (
    "insert b",
    "delete the new b",
    "upsert b",
    "insert c or nothing",
    "merge c",
    "update b",
    "key of b",
    "a to b",
    "b to c",
    "delete b",
    "lock b",
    "delete b in vain",
    "swap a and b",
)
# The row that another transaction has deleted meanwhile comes back, by statements that the capture asks the source for.
RETURNS = {
    "by upserting it twice": ("upsert b", "upsert b"),
    "by another row that takes its primary key": ("a to b",),
    "and is locked and updated": ("insert b", "lock the new b", "update the new b"),
    "and is deleted again": ("insert b", "delete the new b"),
}

Grounds = Callable[[str], Ground]


@pytest.fixture(scope="module")
def grounds(server: str) -> Iterator[Grounds]:
    """The ground of a kind of primary key, in a database of its own; at the end its operations are finished."""
    with grounds_of(server, "interleavings", lambda dsn, kind: Ground(dsn, kind, MODES)) as ground:
        yield ground


def returning(isolation: str, statements: tuple[str, ...], build: bool) -> Schedule:
    """An old snapshot, a deletion by another session, and then the row comes back. build: after the deletion."""
    ours, theirs = Transaction(isolation, statements), Transaction(READ_COMMITTED, ("delete b",))
    return Schedule((ours, theirs), (0, 1, 1, *([BUILD] if build else []), *[0] * (len(statements) + 1)))


@pytest.mark.parametrize("statements", RETURNS.values(), ids=RETURNS)
def test_a_row_that_was_deleted_since_the_snapshot_comes_back(grounds: Grounds, statements: tuple[str, ...]) -> None:
    ground = grounds(ORDINARY)
    ground.sweep(returning(isolation, statements, build=False) for isolation in OLD for _ in range(3))
    with Crossing(ground) as crossing:
        late = (returning(isolation, statements, build=True) for isolation in OLD for _ in range(3))
        crossing.sweep(late, "nothing", "prepared")
    settled(ground)


@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("statement", ["insert b", "a to b", "insert b, then delete all but it"])
def test_a_deferred_primary_key_has_two_rows_while_one_of_them_is_being_deleted(
    grounds: Grounds, isolation: str, statement: str
) -> None:
    """The old row isn't deleted yet for whoever writes the new one; at his commit it is."""
    ground = grounds(DEFERRED)
    theirs, ours = Transaction(READ_COMMITTED, ("delete b",)), Transaction(isolation, (statement,))
    ground.sweep(Schedule((theirs, ours), turns) for turns in interleavings((theirs, ours)) for _ in range(3))
    settled(ground)


@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("statement", ["insert b", "a to b"])
def test_a_deferrable_primary_key_whose_row_is_deleted_since_the_snapshot(
    grounds: Grounds, isolation: str, statement: str
) -> None:
    """Checked at the statement's end, and yet an old snapshot shows the row that is gone."""
    ground = grounds(IMMEDIATE)
    theirs, ours = Transaction(READ_COMMITTED, ("delete b",)), Transaction(isolation, (statement,))
    ground.sweep(Schedule((theirs, ours), turns) for turns in interleavings((theirs, ours)) for _ in range(3))
    settled(ground)


def crossings(chance: random.Random, deferrable: bool, number: int, drained: bool) -> Iterator[Schedule]:
    """Schedules with a turn of the build. drained: no writer is under way then."""
    while number:
        schedule = shuffled(chance, by_chance(chance, menu.choices(deferrable), 2), build=True)
        if not drained or schedule.idle_at_build:
            number -= 1
            yield schedule


def cross(ground: Ground, chance: random.Random, number: int, legs: Sequence[tuple[str, str]] = LEGS) -> None:
    """So many schedules on each of some legs of an operation."""
    with Crossing(ground) as crossing:
        for begin, end in legs:
            schedules = crossings(chance, ground.kind != ORDINARY, number, drains(begin, end))
            crossing.sweep(schedules, begin, end)


def settled(ground: Ground) -> None:
    """Nothing was wrong."""
    print(f"{ground.kind} key, seed {SEED}: {ground.count.told()}")
    if ground.count.failures:
        pytest.fail(ground.report())


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_schedules(grounds: Grounds, kind: str) -> None:
    ground, chance = grounds(kind), random.Random(SEED)
    choices = menu.choices(kind != ORDINARY)
    sample = [shuffled(chance, by_chance(chance, choices, 2 + i % 2)) for i in range(240)]
    ground.sweep(sample)
    settled(ground)


def test_a_sample_of_schedules_across_phases(grounds: Grounds) -> None:
    ground, chance = grounds(ORDINARY), random.Random(SEED)
    cross(ground, chance, 12, (("nothing", "prepared"), ("sealed", "switched"), ("folded", "published")))
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("levels", [LEVELS[:1] * 2, LEVELS[1::-1], LEVELS[1:2] * 2], ids="-".join)
def test_all_pairs_of_statements(grounds: Grounds, kind: str, levels: tuple[str, str]) -> None:
    ground = grounds(kind)
    ground.sweep(all_pairs(menu.choices(kind != ORDINARY), levels))
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isolation", LEVELS[:2])
def test_two_statements_beside_one(grounds: Grounds, kind: str, isolation: str) -> None:
    """In all interleavings; the one is READ COMMITTED."""
    ground = grounds(kind)
    core = [name for name in CORE if name in menu.choices(kind != ORDINARY)]
    transactions = (
        (Transaction(isolation, (first, second)), Transaction(READ_COMMITTED, (beside,)))
        for first, second, beside in itertools.product(core, repeat=3)
    )
    ground.sweep(Schedule(some, turns) for some in transactions for turns in interleavings(some))
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_all_interleavings_of_transactions_by_chance(grounds: Grounds, kind: str) -> None:
    """Two to three statements each, at any two levels; and three transactions, one interleaving of each."""
    ground, chance = grounds(kind), random.Random(SEED)
    choices = menu.choices(kind != ORDINARY)
    print(f"seed {SEED}")
    for _ in range(EXAMPLES or 40):
        two = by_chance(chance, choices, 2)
        ground.sweep(Schedule(two, turns) for turns in interleavings(two))
        ground.sweep(shuffled(chance, by_chance(chance, choices, 3)) for _ in range(48))
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_build_goes_on_in_every_gap(grounds: Grounds, kind: str) -> None:
    """Every leg of an operation, at every turn where it can be."""
    ground, chance = grounds(kind), random.Random(SEED)
    print(f"seed {SEED}")
    cross(ground, chance, EXAMPLES or 96)
    settled(ground)
