"""Transactions in all interleavings at a unique index: waits and outcomes are those of PostgreSQL's own constraint.

Or someone with a snapshot was refused with 40001. No key is ever there twice, no entry is missing or too many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest

from tests.engine.crossing import Crossing, drains
from tests.engine.ground import grounds_of
from tests.engine.isolation import (
    COMMIT,
    LEVELS,
    READ_COMMITTED,
    ROLLBACK,
    Schedule,
    Transaction,
    all_pairs,
    by_chance,
    interleavings,
    shuffled,
)
from tests.engine.unique_ground import MENU, PARTITIONED, PLAIN, SOURCES, UniqueGround

pytestmark = pytest.mark.sample(1)

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
MODES = ("direct", "active")

Grounds = Callable[[str], UniqueGround]


@pytest.fixture(scope="module")
def grounds(server: str) -> Iterator[Grounds]:
    """A ground of either kind of source, in a database of its own."""
    with grounds_of(server, "unique", lambda dsn, source: UniqueGround(dsn, source, MODES)) as ground:
        yield ground


def settled(ground: UniqueGround) -> None:
    """Nothing was wrong."""
    print(f"{ground.kind} source, seed {SEED}: {ground.count.told()}")
    if ground.count.failures:
        pytest.fail(ground.report())


@pytest.mark.parametrize("source", SOURCES)
def test_a_sample_of_schedules(grounds: Grounds, source: str) -> None:
    ground, chance = grounds(source), random.Random(SEED)
    levels = (LEVELS[:1], LEVELS)
    number = EXAMPLES or 240
    ground.sweep([shuffled(chance, by_chance(chance, [*MENU], 2 + i % 5 // 4, levels[i % 2])) for i in range(number)])
    settled(ground)


@pytest.mark.sample(1)
def test_a_row_that_moves_while_its_key_is_asked_for(grounds: Grounds) -> None:
    """READ COMMITTED never gets 40001 for that: the move is half done, and waits for a third transaction."""
    ground = grounds(PARTITIONED)
    third = Transaction(READ_COMMITTED, ("touch b",))
    moves = Transaction(READ_COMMITTED, ("move a and b",))
    schedules = [
        Schedule((third, moves, Transaction(READ_COMMITTED, (insert,), end)), (0, 1, 2, 0, 1, 2))
        for insert in ("insert c with a's key", "insert d with a's key", "insert c with a's key, or catch")
        for end in (COMMIT, ROLLBACK)
        for _ in range(4)
    ]
    ground.sweep(schedules)
    assert ground.count.refused == 0, ground.count.told()
    settled(ground)


# From the switch on it is enforced.
LEGS = (("switched", "folded"), ("folded", "published"), ("switched", "published"))


@pytest.mark.parametrize("leg", LEGS, ids="-".join)
def test_a_fold_and_a_publish_come_between(grounds: Grounds, leg: tuple[str, str]) -> None:
    ground, chance = grounds(PLAIN), random.Random(SEED)
    with Crossing(ground) as crossing:
        for _ in range((EXAMPLES or 48) // 12):
            made: list[Schedule] = []
            while len(made) < 12:
                levels = chance.choice((LEVELS, LEVELS[:1]))
                schedule = shuffled(chance, by_chance(chance, [*MENU], 2, levels), build=True)
                if not drains(*leg) or schedule.idle_at_build:
                    made.append(schedule)
            crossing.sweep(made, *leg)
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("levels", [LEVELS[:1] * 2, LEVELS[1::-1], LEVELS[1:2] * 2, LEVELS[::2]], ids="-".join)
def test_all_pairs_of_statements(grounds: Grounds, source: str, levels: tuple[str, str]) -> None:
    ground = grounds(source)
    ground.sweep(all_pairs([*MENU], levels))
    settled(ground)


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
def test_all_interleavings_of_transactions_by_chance(grounds: Grounds, source: str) -> None:
    ground, chance = grounds(source), random.Random(SEED)
    for _ in range(EXAMPLES or 40):
        two = by_chance(chance, [*MENU], 2)
        ground.sweep(Schedule(two, turns) for turns in interleavings(two))
        ground.sweep(shuffled(chance, by_chance(chance, [*MENU], 3)) for _ in range(48))
    settled(ground)
