"""Transactions in all interleavings, on a real server: the index is the projection of the source afterwards.

Otherwise a transaction was refused with 40001, or got an error that it also gets without the index. Each schedule is
played on a twin too, which has no index, or PostgreSQL's own constraint if the index is unique. With an ordinary
primary key and READ COMMITTED there are no other errors and no other waits than on the twin. No unique key is ever
there twice.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from airflow_roir.engine import switch
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run
from tests.engine import stages, steps
from tests.engine.ground import (
    DEFERRED,
    IMMEDIATE,
    KINDS,
    ORDINARY,
    Failure,
    Ground,
    Outcomes,
    PartialGround,
    by_slot,
    grounds_of,
)
from tests.engine.isolation import (
    BUILD,
    COMMIT,
    LEVELS,
    READ_COMMITTED,
    REPEATABLE_READ,
    ROLLBACK,
    SERIALIZABLE,
    Play,
    Schedule,
    Session,
    Transaction,
    all_pairs,
    by_chance,
    interleavings,
    shuffled,
)
from tests.engine.unique_ground import PARTITIONED, PLAIN, SOURCES, PartialUniqueGround, UniqueGround

pytestmark = pytest.mark.sample(2)

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))
OLD = (REPEATABLE_READ, SERIALIZABLE)
PARTIAL, PARTIAL_UNIQUE = "partial", "partial and unique"
GROUNDS = (*KINDS, PARTIAL, *SOURCES, PARTIAL_UNIQUE)
# Two of these in all orders beside a third statement. They meet, part or move the row that the other transaction
# deletes.
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
# The row that another transaction has deleted meanwhile comes back, by statements for which the capture asks the
# source.
RETURNS = {
    "by upserting it twice": ("upsert b", "upsert b"),
    "by another row that takes its primary key": ("a to b",),
    "and is locked and updated": ("insert b", "lock the new b", "update the new b"),
    "and is deleted again": ("insert b", "delete the new b"),
}

PHASES = ("nothing", "prepared", "built", "sealed", "switched", "folded", "published")
# These phases begin with a wait for all writers.
DRAINED = ("prepared", "switched", "published")
# Plays at a time. Each has two of the server's hundred sessions.
ABREAST = 12
NUMBERS = itertools.count()
LEGS = tuple(itertools.combinations(PHASES, 2))

Grounds = Callable[[str], Ground]


@pytest.fixture(scope="module")
def grounds(server: str) -> Iterator[Grounds]:
    """The ground of each kind, in a database of its own. At the end its operations are finished.

    A kind is one of primary keys, with stages from the build to the end, or one of unique indexes, from the switch on.
    """

    def make(dsn: str, kind: str) -> Ground:
        if kind == PARTIAL:
            return PartialGround(dsn, ORDINARY)
        if kind == PARTIAL_UNIQUE:
            return PartialUniqueGround(dsn, PARTITIONED)
        return (UniqueGround if kind in SOURCES else Ground)(dsn, kind)

    with grounds_of(server, "interleavings", make) as ground:
        yield ground


# -- an operation that continues in the middle of schedules


def drains(begin: str, end: str) -> bool:
    """True if a drain between two phases waits for all writers."""
    return any(phase in PHASES[PHASES.index(begin) + 1 : PHASES.index(end) + 1] for phase in DRAINED)


class Crossing:
    """Plays whose builds go on in their middle. Each has a table of its own, and sessions that stay open."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.sessions: list[list[Session]] = []

    def __enter__(self) -> Crossing:
        for _ in range(ABREAST):
            self.sessions.append([Session(self.ground.dsn) for _ in range(2)])
        return self

    def __exit__(self, *_: object) -> None:
        for session in itertools.chain(*self.sessions):
            session.close()

    def sweep(self, schedules: Iterable[Schedule], begin: str, end: str) -> None:
        """As `Ground.sweep`, while the operation goes from one phase to another."""
        for lot in self.ground.lots(schedules, ABREAST):
            self.play(*lot, begin, end)

    def play(self, schedules: Sequence[Schedule], twins: Sequence[Outcomes], begin: str, end: str) -> list[Failure]:
        """As `Ground.play`. At the build's turn the operation goes from one phase to another."""
        ground, name = self.ground, f"crossed_{next(NUMBERS)}"
        ground.run(f"{ground.create(name)}; {ground.fill(name, ABREAST)}; ANALYZE {name}")
        operation = Voyage(ground, name)
        operation.reach(begin)
        if begin != "nothing" and not operation.touched:
            operation.touch()
        plays = [
            Play(schedule, ground.rows(name, slot).sql, self.sessions[slot], ground.watcher)
            for slot, schedule in enumerate(schedules)
        ]
        for play in plays:
            play.go_on()
        operation.reach(end)
        for play in plays:
            while not play.over:
                play.go_on()
        wrong = operation.wrong()
        operation.reach("published")
        for slot, later in operation.wrong().items():
            wrong.setdefault(slot, [f"after publish: {', '.join(later)}"])
        return ground.judge(plays, twins, wrong, f"{begin} to {end}")


class Voyage:
    """One operation on its way through the phases."""

    def __init__(self, ground: Ground, table: str) -> None:
        self.ground = ground
        self.table = table
        self.phase = "nothing"
        self.touched = False
        self.run: Run
        self.job: Job

    def reach(self, phase: str) -> None:
        """Carries the operation to a phase."""
        # Entries come into the delta of a unique index before its keys are enforced, so that the enforcement isn't
        # disturbed.
        if self.ground.definition.get("unique") and phase != "nothing" and not self.touched:
            self.reach_plainly("sealed")
            self.touch()
        self.reach_plainly(phase)

    def touch(self) -> None:
        """Brings some entries into the delta."""
        self.touched = True
        for statement in self.ground.touch(self.table, ABREAST):
            self.ground.run(statement)

    def reach_plainly(self, phase: str) -> None:
        """As `reach`, without writes on the way."""
        for following in PHASES[PHASES.index(self.phase) + 1 : PHASES.index(phase) + 1]:
            self._go_on(following)
            self.phase = following

    def _go_on(self, phase: str) -> None:
        database = self.ground.database
        if phase == "prepared":
            options = {"ranges": 3, "segments": 2, "batch_rows": 7, "lock_timeout_ms": 500, "lock_patience_s": 5}
            _, self.run = steps.begin(
                database, f"ix_{self.table}", self.table, include="v", **{**options, **self.ground.definition}
            )
            with database.transaction() as connection:
                self.job = load_job(connection, self.run)
        elif phase == "built":
            steps.build_all(database, self.run)
        elif phase == "sealed":
            steps.seal_all(database, self.run)
        elif phase == "switched":
            switch.switch(database, self.run)
        elif phase == "folded":
            steps.fold_delta(database, self.run)
        else:
            steps.publish_all(database, self.run)

    def wrong(self) -> dict[int, list[str]]:
        """The entries that are missing or too many, by slot."""
        with self.ground.database.transaction() as connection:
            return by_slot(stages.differences(connection, self.job, self.phase == "published"))


# -- chosen schedules


def returning(isolation: str, statements: tuple[str, ...], build: bool) -> Schedule:
    """An old snapshot, a deletion by another session, then the row comes back. build: its turn follows the deletion."""
    ours, theirs = Transaction(isolation, statements), Transaction(READ_COMMITTED, ("delete b",))
    return Schedule((ours, theirs), (0, 1, 1, *([BUILD] if build else []), *[0] * (len(statements) + 1)))


@pytest.mark.sample(0)
@pytest.mark.parametrize("statements", RETURNS.values(), ids=RETURNS)
def test_a_row_that_was_deleted_since_the_snapshot_comes_back(grounds: Grounds, statements: tuple[str, ...]) -> None:
    """Found: a row deleted since the snapshot came back (upserted twice, by another row's primary key, written or
    deleted again): its old entry stayed. It holds: the entry is that of the row's own version.
    """
    ground = grounds(ORDINARY)
    ground.sweep(returning(isolation, statements, build=False) for isolation in OLD for _ in range(3))
    with Crossing(ground) as crossing:
        late = (returning(isolation, statements, build=True) for isolation in OLD for _ in range(3))
        crossing.sweep(late, "nothing", "prepared")
    ground.settled(SEED)


@pytest.mark.sample(0)
@pytest.mark.parametrize("isolation", LEVELS)
@pytest.mark.parametrize("statement", ["insert b", "a to b", "insert b, then delete all but it"])
def test_a_deferred_primary_key_has_two_rows_while_one_of_them_is_being_deleted(
    grounds: Grounds, isolation: str, statement: str
) -> None:
    """For the transaction that writes the new row the old one isn't deleted yet; at its commit the old one is."""
    ground = grounds(DEFERRED)
    theirs, ours = Transaction(READ_COMMITTED, ("delete b",)), Transaction(isolation, (statement,))
    ground.sweep(Schedule((theirs, ours), turns) for turns in interleavings((theirs, ours)) for _ in range(3))
    ground.settled(SEED)


@pytest.mark.sample(0)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("statement", ["insert b", "a to b"])
def test_a_deferrable_primary_key_whose_row_is_deleted_since_the_snapshot(
    grounds: Grounds, isolation: str, statement: str
) -> None:
    """The key is checked at the statement's end, but an old snapshot still shows the row that is gone."""
    ground = grounds(IMMEDIATE)
    theirs, ours = Transaction(READ_COMMITTED, ("delete b",)), Transaction(isolation, (statement,))
    ground.sweep(Schedule((theirs, ours), turns) for turns in interleavings((theirs, ours)) for _ in range(3))
    ground.settled(SEED)


@pytest.mark.sample(0)
def test_a_row_that_moves_while_its_key_is_asked_for(grounds: Grounds) -> None:
    """READ COMMITTED never gets 40001 for that. The move is half done, and waits for a third transaction."""
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
    ground.settled(SEED)


# -- random schedules, and all of them


@pytest.mark.sample(0)
@pytest.mark.parametrize("kind", GROUNDS)
def test_a_sample_of_schedules(grounds: Grounds, kind: str) -> None:
    ground = grounds(kind)
    ground.sweep(ground.drawn(random.Random(SEED), EXAMPLES or 240))
    ground.settled(SEED)


def crossings(ground: Ground, chance: random.Random, number: int, drained: bool) -> Iterator[Schedule]:
    """Schedules with a turn of the build. drained: no writer is under way at that turn."""
    while number:
        some = by_chance(chance, ground.choices(), 2, chance.choice(ground.levels))
        schedule = shuffled(chance, some, build=True)
        if not drained or schedule.idle_at_build:
            number -= 1
            yield schedule


def cross(ground: Ground, number: int, legs: Sequence[tuple[str, str]] = LEGS) -> None:
    """Plays `number` schedules on each leg of an operation."""
    chance = random.Random(SEED)
    with Crossing(ground) as crossing:
        for leg in legs:
            crossing.sweep(crossings(ground, chance, number, drains(*leg)), *leg)
    ground.settled(SEED)


# A unique index is enforced from the switch on.
CROSSED = {
    ORDINARY: (("nothing", "prepared"), ("sealed", "switched"), ("folded", "published")),
    PARTIAL: (("nothing", "prepared"), ("sealed", "switched"), ("folded", "published")),
    PLAIN: (("switched", "folded"), ("folded", "published"), ("switched", "published")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "leg"), [(kind, leg) for kind, legs in CROSSED.items() for leg in legs])
def test_a_sample_of_schedules_across_phases(grounds: Grounds, kind: str, leg: tuple[str, str]) -> None:
    cross(grounds(kind), 12 if kind in (ORDINARY, PARTIAL) else EXAMPLES or 48, [leg])


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("kind", [*KINDS, PARTIAL])
def test_a_build_goes_on_in_every_gap(grounds: Grounds, kind: str) -> None:
    """Every leg of an operation, at every possible turn."""
    cross(grounds(kind), EXAMPLES or 96)


PAIRS = (LEVELS[:1] * 2, LEVELS[1::-1], LEVELS[1:2] * 2, LEVELS[::2])


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize(
    ("kind", "levels"), [(kind, pair) for kind in GROUNDS for pair in PAIRS[: 3 if kind in (*KINDS, PARTIAL) else 4]]
)
def test_all_pairs_of_statements(grounds: Grounds, kind: str, levels: tuple[str, str]) -> None:
    ground = grounds(kind)
    ground.sweep(all_pairs(ground.choices(), levels))
    ground.settled(SEED)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("kind", [*KINDS, PARTIAL])
@pytest.mark.parametrize("isolation", LEVELS[:2])
def test_two_statements_beside_one(grounds: Grounds, kind: str, isolation: str) -> None:
    """Plays them in all interleavings; the transaction with one statement is READ COMMITTED."""
    ground = grounds(kind)
    core = [name for name in CORE if name in ground.choices()]
    transactions = (
        (Transaction(isolation, (first, second)), Transaction(READ_COMMITTED, (beside,)))
        for first, second, beside in itertools.product(core, repeat=3)
    )
    ground.sweep(Schedule(some, turns) for some in transactions for turns in interleavings(some))
    ground.settled(SEED)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("kind", GROUNDS)
def test_all_interleavings_of_transactions_by_chance(grounds: Grounds, kind: str) -> None:
    """Pairs with up to three statements each, at any two levels; and three transactions, in one interleaving each."""
    ground, chance = grounds(kind), random.Random(SEED)
    for _ in range(EXAMPLES or 40):
        two = by_chance(chance, ground.choices(), 2)
        ground.sweep(Schedule(two, turns) for turns in interleavings(two))
        ground.sweep(shuffled(chance, by_chance(chance, ground.choices(), 3)) for _ in range(48))
    ground.settled(SEED)
