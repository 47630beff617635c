"""A stage and a twin that has no index: many schedules are played on both, each on rows of its own."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import psycopg2
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import database_dsn, run_sql
from tests.engine import stages
from tests.engine.isolation import (
    DEADLOCK,
    LEVELS,
    READ_COMMITTED,
    SERIALIZABLE,
    SERIALIZATION_FAILURE,
    Outcome,
    Play,
    Schedule,
    Session,
    Watcher,
    by_chance,
    shuffled,
)
from tests.engine.menu import HELD, TRIGGERS, Rows, choices
from tests.engine.stages import Stage

SLOTS = 24
TWIN = "twin"
# After this many fillings a VACUUM removes the bloat. With more fillings each comparison took longer.
FILLINGS_PER_VACUUM = 40
# A report shortens this many failures; the others are only counted.
SHORTENED = 30
ORDINARY, IMMEDIATE, DEFERRED = "ordinary", "DEFERRABLE INITIALLY IMMEDIATE", "DEFERRABLE INITIALLY DEFERRED"
KINDS = (ORDINARY, IMMEDIATE, DEFERRED)

Outcomes = dict[tuple[int, int], Outcome]


@dataclass(frozen=True)
class Failure:
    """One thing that was wrong after a schedule, and where it was found."""

    where: str
    schedule: Schedule
    slot: int
    what: str

    def __str__(self) -> str:
        return f"{self.where}, slot {self.slot}: {self.schedule}\n    {self.what}"


@dataclass
class Count:
    """Counts the work of a sweep."""

    played: int = 0
    impossible: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def told(self) -> str:
        """The number of plays, and their speed."""
        seconds = time.monotonic() - self.began
        kinds = dict(Counter(failure.where for failure in self.failures))
        return (
            f"{self.played} schedules in {seconds:.1f} s ({self.played / seconds * 60:,.0f} a minute), "
            f"{self.impossible} beginnings impossible, {self.refused} with 40001, {len(self.failures)} wrong"
            f"{f' {kinds}' if kinds else ''}"
        )


class Ground:
    """A database with the twin, and a stage for each mode of the capture. kind: of their primary key."""

    # Modes or phases of `Stage`.
    modes: Sequence[str] = ("mid-build", "direct", "active")
    # The other parts of the index's definition.
    definition: Mapping[str, object] = {}
    # The numbers and isolation levels of the transactions in a random schedule: these in turn.
    sizes: Sequence[int] = (2, 3)
    levels: Sequence[Sequence[str]] = (LEVELS,)

    def __init__(self, dsn: str, kind: str) -> None:
        self.dsn = dsn
        self.database = Database(dsn, "roir tests")
        self.kind = kind
        self.connection = psycopg2.connect(dsn)
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        self.watcher = Watcher(dsn)
        self.sessions = [Session(dsn) for _ in range(3)]
        self.run(f"{self.twin()}; {self.fill(TWIN)}")
        self.stages: dict[str, Stage] = {}
        for mode in self.modes:
            table = "t_" + mode.replace(" ", "_").replace("-", "_")
            self.run(f"{self.create(table)}; {self.fill(table)}; ANALYZE {table}")
            self.stages[mode] = Stage(
                self.database, mode, index=f"ix_{table}", table=table, include="v", **self.definition
            )
        self.fillings = 0
        self.count = Count()

    def rows(self, table: str, slot: int) -> Rows:
        """The rows of one play, and the texts of its statements."""
        return Rows(table, slot)

    def choices(self) -> list[str]:
        """The statements that can be played."""
        return choices(self.kind != ORDINARY)

    def drawn(self, chance: random.Random, number: int) -> list[Schedule]:
        """`number` random schedules."""
        return [
            shuffled(
                chance,
                by_chance(chance, self.choices(), self.sizes[i % len(self.sizes)], self.levels[i % len(self.levels)]),
            )
            for i in range(number)
        ]

    def fill(self, table: str, slots: int = SLOTS) -> str:
        """SQL that restores the rows of all slots."""
        held = ", ".join(f"({row})" for row in HELD)
        return (
            f"DELETE FROM {table}; INSERT INTO {table} SELECT s * 10 + r, 'k', r "
            f"FROM generate_series(0, {slots - 1}) s, (VALUES {held}) h (r)"
        )

    def create(self, table: str) -> str:
        """SQL for a source, with the users' triggers on it."""
        key = "" if self.kind == ORDINARY else self.kind
        return f"CREATE TABLE {table} (id int PRIMARY KEY {key}, k text, v int); {TRIGGERS.replace('{t}', table)}"

    def twin(self) -> str:
        """SQL for the table without an index of ours."""
        return self.create(TWIN)

    def touch(self, table: str, slots: int) -> list[str]:
        """SQL that brings some entries into the delta."""
        return [
            f"UPDATE {table} SET v = v + 10 WHERE id / 10 % 3 = 0",
            f"INSERT INTO {table} SELECT s * 10 + 7, 'k', 0 FROM generate_series(1, {slots - 1}, 3) s",
            f"DELETE FROM {table} WHERE id % 10 = 7",
        ]

    def run(self, statements: str) -> None:
        self.cursor.execute(statements)

    def close(self) -> None:
        """Carries each stage to its end, and checks that the index is exact."""
        for mode, stage in self.stages.items():
            self.refill(mode)
            stage.finish()
        for session in self.sessions:
            session.close()
        self.connection.close()
        self.watcher.connection.close()
        self.sessions.clear()

    def refill(self, mode: str) -> None:
        """Restores rows and entries. The slot decides which entries are in the base, the delta or both."""
        stage = self.stages[mode]
        job, base, delta = stage.job, stage.base, stage.delta
        table, columns = job.source.sql, ", ".join(job.entry.physical())
        statements = [self.fill(table), f"DELETE FROM {base}", f"DELETE FROM {delta}"]
        entry = job.entry
        projection = f"SELECT {', '.join(column.of('s') for column in entry.columns)} FROM {table} s"
        has_entry = entry.satisfied("s")
        absent = f"SELECT 'k', i * 10 + 7, NULL::int FROM generate_series(0, {SLOTS - 1}) i"
        if stage.phase == "published":
            statements.append(f"INSERT INTO {base} ({columns}) {projection} WHERE {has_entry}")
        else:
            scanned = stages.scanned(job, "s.id")
            layout, antimatter = "(s.id / 10 + s.id) % 3", "i % 3"
            stale = f"INSERT INTO {base} ({columns}) SELECT * FROM ({absent} WHERE {antimatter} = 1) x (k, id, v)"
            statements += [
                f"INSERT INTO {base} ({columns}) {projection} WHERE {has_entry} AND {layout} > 0 AND {scanned}",
                f"UPDATE {base} x SET c3 = NULL FROM {table} s WHERE s.id = x.c2 AND {layout} = 1",
                f"INSERT INTO {delta} SELECT *, 'regular' FROM ({projection} WHERE {has_entry} AND {layout} < 2) x",
                f"{stale} WHERE {stages.scanned(job, 'x.id')}",
                f"INSERT INTO {delta} SELECT x.*, 'antimatter' FROM ({absent} WHERE {antimatter} > 0) x",
            ]
            if stage.phase == "mid-fold":
                statements.append(f"UPDATE {delta} SET state = 'ghost' WHERE c2 % 10 = 7 AND c2 / 10 % 3 = 2")
        self.run("; ".join(statements))

    def vacuum(self) -> None:
        self.fillings += 1
        if self.fillings % FILLINGS_PER_VACUUM == 0:
            self.run("VACUUM")

    def play(self, schedules: Sequence[Schedule], twins: Sequence[Outcomes], mode: str) -> list[Failure]:
        """Plays schedules whose outcomes on the twin are known, in one mode; returns the failures."""
        self.refill(mode)
        table = self.stages[mode].job.source.sql
        plays = [self._play(schedule, self.rows(table, slot)) for slot, schedule in enumerate(schedules)]
        return self.judge(plays, twins, self.wrong(mode), mode)

    def wrong(self, mode: str) -> dict[int, list[str]]:
        """The entries that are missing or too many, by slot."""
        stage = self.stages[mode]
        with stage.connection.begin():
            return by_slot(stages.differences(stage.connection, stage.job, stage.phase == "published"))

    def judge(
        self, plays: Sequence[Play], twins: Sequence[Outcomes], wrong: dict[int, list[str]], mode: str
    ) -> list[Failure]:
        """The failures of plays that have ended. wrong: the wrong entries, by slot."""
        failures = []
        for slot, (play, twin) in enumerate(zip(plays, twins, strict=True)):
            what = [*wrong.get(slot, []), *self._unexpected(play, twin)]
            if what:
                found = f"{'; '.join(what)} ({play.told()})"
                failures.append(Failure(f"{self.kind} key, {mode}", play.schedule, slot, found))
        self.count.played += len(plays)
        self.count.refused += sum(
            any(one.error == SERIALIZATION_FAILURE for one in play.outcomes.values()) for play in plays
        )
        self.count.failures += failures
        return failures

    def twins(self, schedules: Iterable[Schedule]) -> Iterator[tuple[Schedule, Outcomes]]:
        """Plays schedules on the twin. Yields those that are possible, with their outcomes.

        If a beginning is impossible, every schedule that begins with it is skipped.
        """
        dead: set[tuple[object, ...]] = set()
        slots = itertools.cycle(range(SLOTS))
        for schedule in schedules:
            turns = schedule.turns
            if dead and any((schedule.transactions, turns[:i]) in dead for i in range(1, len(turns))):
                continue
            slot = next(slots)
            if slot == 0:
                self.run(self.fill(TWIN))
                self.vacuum()
            play = self._play(schedule, self.rows(TWIN, slot))
            if play.impossible:
                self.count.impossible += 1
                dead.add((schedule.transactions, play.prefix))
                continue
            yield schedule, play.outcomes

    def _play(self, schedule: Schedule, rows: Rows, refused: frozenset[tuple[int, int]] = frozenset()) -> Play:
        play = Play(schedule, rows.sql, self.sessions, self.watcher, refused)
        while not play.over:
            play.go_on()
        return play

    def _unexpected(self, play: Play, twin: Outcomes) -> list[str]:
        """Errors and waits that the twin doesn't have."""
        levels = {one.isolation for one in play.schedule.transactions}
        if play.outcomes == twin:
            return []
        mine = {one.error for one in play.outcomes.values()}
        theirs = {one.error for one in twin.values()}
        if DEADLOCK in theirs:  # milliseconds decide which transaction it ends
            return []
        if len(play.schedule.transactions) > 2:  # the order in which two waiters wake isn't defined either
            strange = mine - theirs - {"23505", SERIALIZATION_FAILURE}
            strange -= {DEADLOCK} if self.kind != ORDINARY else set()
            return [f"strange errors {sorted(strange)}"] if strange else []
        if levels == {READ_COMMITTED} and self.kind == ORDINARY:
            return [f"not as without the index: {compared(play, twin)}"]
        if DEADLOCK in mine:
            return [] if self.kind != ORDINARY else ["a deadlock"]
        # A transaction that waits at the entry for another transaction's end comes too late to delete the row that its
        # own commit meets.
        came_late = any(one.waited and not twin[turn].waited for turn, one in play.outcomes.items() if turn in twin)
        late = {"23505"} if came_late and self.kind != ORDINARY else set()
        if levels == {READ_COMMITTED}:
            return [] if mine - late <= theirs else [f"not as without the index: {compared(play, twin)}"]
        # Play the twin with the same refusals. A refusal may spare the other transaction its own, so repeat.
        refused: frozenset[tuple[int, int]] = frozenset()
        while more := {
            turn
            for turn, one in play.outcomes.items()
            if one.error == SERIALIZATION_FAILURE and twin.get(turn, one).error != SERIALIZATION_FAILURE
        }:
            refused |= more
            self.run(self.fill(TWIN, SLOTS + 1))
            twin = self._play(play.schedule, self.rows(TWIN, SLOTS), refused).outcomes
        for turn, one in play.outcomes.items():
            expected = twin[turn].error if turn in twin else None
            if one.error not in (expected, SERIALIZATION_FAILURE, *late) and not (
                SERIALIZABLE in levels and expected == SERIALIZATION_FAILURE
            ):
                return [f"not as without the index: {compared(play, twin)}"]
        return []

    def shortest(
        self, failure: Failure, play: Callable[[Sequence[Schedule], Sequence[Outcomes]], list[Failure]]
    ) -> Failure:
        """The same failure with as few statements as possible. play: plays schedules as the failure was found."""
        while True:
            # Three times, since the place of a slot's entries repeats with every third slot.
            simpler = [one for one in failure.schedule.simpler() for _ in range(3)]
            lot = list(itertools.islice(self.twins(simpler), SLOTS))
            found = play(*zip(*lot, strict=True)) if lot else []  # type: ignore[arg-type]
            if not found:
                return failure
            failure = found[0]

    def sweep(self, schedules: Iterable[Schedule]) -> None:
        """Plays all schedules in all modes, in lots of one per slot."""
        for lot in self.lots(schedules):
            for mode in self.stages:
                self.play(*lot, mode)

    def lots(
        self, schedules: Iterable[Schedule], slots: int = SLOTS
    ) -> Iterator[tuple[Sequence[Schedule], Sequence[Outcomes]]]:
        """Schedules with their outcomes on the twin, in lots of one per slot."""
        twins = self.twins(schedules)
        while lot := list(itertools.islice(twins, slots)):
            yield tuple(zip(*lot, strict=True))  # type: ignore[misc]

    def settled(self, seed: int) -> None:
        """Fails with a report if anything was wrong."""
        print(f"{self.kind}, seed {seed}: {self.count.told()}")
        if self.count.failures:
            pytest.fail(self.report())

    def report(self) -> str:
        """A report: one short failure of each kind, and how much was played."""
        found: dict[object, Failure] = {}
        for failure in self.count.failures:
            found.setdefault((failure.where, failure.schedule.transactions), failure)
        brief = {}
        for failure in list(found.values())[:SHORTENED]:
            mode = failure.where.partition(", ")[2]
            # A failure that crossed phases is reported as it was found, because its stage is gone.
            short = failure
            if mode in self.stages:
                short = self.shortest(failure, partial(self.play, mode=mode))
            brief.setdefault((short.where, str(short.schedule)), short)
        return "\n".join([self.count.told(), *map(str, brief.values())])


class PartialGround(Ground):
    """A ground with an expression as key, and a condition that statements of the menu make true and false."""

    definition = {"keys": "k || '' AS key", "where": "k = 'k'"}


G = TypeVar("G", bound=Ground)


@contextmanager
def grounds_of(server: str, name: str, make: Callable[[str, str], G]) -> Iterator[Callable[[str], G]]:
    """A function that gives the ground of a kind, with a new count. Each ground is made once, in a database of its own.

    make: makes a ground from the database's DSN and the kind. At the end the grounds' operations are finished.
    """
    made: dict[str, G] = {}

    def ground(kind: str) -> G:
        if kind not in made:
            database = f"{name}_{len(made)}"
            run_sql(server, f"CREATE DATABASE {database} TEMPLATE roir_template")
            made[kind] = make(database_dsn(server, database), kind)
        made[kind].count = Count()
        return made[kind]

    yield ground
    for one in made.values():
        one.close()


def by_slot(different: Iterable[Sequence[str]]) -> dict[int, list[str]]:
    """Entries `(key,id,included)` by the slot of their ids."""
    found: dict[int, list[str]] = {}
    for what, entry in different:
        found.setdefault(int(entry.strip("()").split(",")[1]) // 10, []).append(f"{what} {entry}")
    return found


def compared(play: Play, twin: Outcomes) -> str:
    """The outcomes that differ: those on the twin, and those on the source."""
    return ", ".join(
        f"T{who + 1} {play.schedule.transactions[who].turns[position]}: {twin.get((who, position))} there, "
        f"{play.outcomes.get((who, position))} here"
        for who, position in sorted({*twin, *play.outcomes})
        if twin.get((who, position)) != play.outcomes.get((who, position))
    )
