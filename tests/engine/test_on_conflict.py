"""`roir.on_conflict = 'nothing'`, beside a twin without partitions that has PostgreSQL's own unique index.

Both get the same statements, most of them with ON CONFLICT DO NOTHING. docs/architecture.md#on-conflict names the
differences, which are checked here: a row whose key is taken is skipped, even if its primary key is taken, too; and
who waits for such a primary key holds the key already, so there are deadlocks that the twin doesn't have.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_roir.engine.unique.on_conflict import set_on_conflict
from tests.engine.ground import TWIN, Outcomes, grounds_of
from tests.engine.isolation import (
    DEADLOCK,
    LEVELS,
    READ_COMMITTED,
    SERIALIZATION_FAILURE,
    Outcome,
    Play,
    Schedule,
    all_pairs,
)
from tests.engine.menu import KEYS, WIDTH, KeyRows, Rows
from tests.engine.unique_ground import PLAIN, SOURCES, UniqueGround

EXAMPLES = int(os.environ.get("ROIR_EXAMPLES", "0"))
SEED = int(os.environ.get("ROIR_SEED") or (random.randrange(1_000_000) if EXAMPLES else 1))

_NOTHING = " ON CONFLICT DO NOTHING"
_INSERT = "INSERT INTO {t} VALUES "
_WITH = ("c with a's key", "c with b's key", "c with k2", "d with k2", "d with a's key", "c and d")
_AS_IT_IS = (
    *("a takes k2", "a takes b's key", "b takes a's key", "touch a", "delete a", "delete b", "delete c", "delete k2"),
    *("move a", "move b, with a's key", "a becomes c", "a takes k2 in vain", "delete a in vain"),
    *("upsert a with k2", "upsert a with b's key", "upsert c with a's key"),
)
CONFLICTS = {
    **{f"insert {what}": KEYS[f"insert {what}"] + _NOTHING for what in _WITH},
    **{name: KEYS[name] for name in _AS_IT_IS},
    "insert c and d, alike": _INSERT + "({c}, 0, {k2}, {v}), ({d}, 1, {k2}, {v})" + _NOTHING,
    "insert c twice": _INSERT + "({c}, 0, {k2}, {v}), ({c}, 0, {k2}, {v})" + _NOTHING,
    "insert a again": _INSERT + "({a}, 0, {k0}, {v})" + _NOTHING,
    "insert a again with k2": _INSERT + "({a}, 0, {k2}, {v})" + _NOTHING,
    "insert a again with b's key": _INSERT + "({a}, 0, {k1}, {v})" + _NOTHING,
    "insert c in vain": "SAVEPOINT s; " + _INSERT + "({c}, 0, {k2}, {v})" + _NOTHING + "; ROLLBACK TO s",
    "c instead of a": "DELETE FROM {t} WHERE id = {a}; INSERT INTO {t} VALUES ({c}, 0, {k0}, {v})" + _NOTHING,
}


class ConflictRows(KeyRows):
    """The rows of one slot of a table."""

    def sql(self, name: str, who: int, position: int) -> str:
        ids = {letter: self.slot * 10 + row for letter, row in zip("abcd", (1, 2, 3, 4), strict=True)}
        keys = {f"k{i}": self.slot * WIDTH + i for i in range(3)}
        return CONFLICTS[name].format(t=self.table, v=100 * (who + 1) + position, **ids, **keys)


class Ended(dict[tuple[int, int], Outcome]):
    """The outcomes of a play, and the rows that it left."""

    rows: list[tuple[Any, ...]]


class ConflictGround(UniqueGround):
    """A ground whose sessions have the setting."""

    def __init__(self, dsn: str, kind: str) -> None:
        super().__init__(dsn, kind)
        self.run(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET roir.on_conflict = ''nothing''', "
            "current_database()); END $$"
        )
        for session in self.sessions:
            session.send("SET roir.on_conflict = 'nothing'")
            while not session.ended(1.0):
                pass
        for stage in self.stages.values():
            set_on_conflict(self.database, stage.job.source.sql, "test")

    def rows(self, table: str, slot: int) -> Rows:
        return ConflictRows(table, slot)

    def choices(self) -> list[str]:
        return [*CONFLICTS]

    def twin(self) -> str:
        return f"{self.create(TWIN, PLAIN)}; ALTER TABLE {TWIN} ADD UNIQUE (k)"

    def _play(self, schedule: Schedule, rows: Rows, refused: frozenset[tuple[int, int]] = frozenset()) -> Play:
        play = super()._play(schedule, rows, refused)
        ended = Ended(play.outcomes)
        relative = f"id - {rows.slot * 10}, part, k - {rows.slot * WIDTH}, v"
        self.cursor.execute(f"SELECT {relative} FROM {rows.table} WHERE id / 10 = {rows.slot} ORDER BY 1, 2")
        ended.rows = self.cursor.fetchall()
        play.outcomes = ended
        return play

    def _unexpected(self, play: Play, twin: Outcomes) -> list[str]:
        mine, theirs = play.outcomes, twin
        assert isinstance(mine, Ended)
        assert isinstance(theirs, Ended)
        alike = mine.keys() == theirs.keys() and all(mine[turn].error == theirs[turn].error for turn in mine)
        differ = [turn for turn in mine if turn not in theirs or mine[turn].error != theirs[turn].error]
        if not alike and all(turn in theirs and theirs[turn].error == SERIALIZATION_FAILURE for turn in differ):
            # Skipped for a row that its snapshot sees; the twin also met a younger row of its primary key.
            return [] if all(not mine[turn].error for turn in differ) else super()._unexpected(play, twin)
        if not alike:
            meet = (
                sum(
                    any(
                        "insert c" in name
                        or "c instead" in name
                        or "a becomes c" in name
                        or "upsert c" in name
                        or "insert a again" in name
                        for name in one.statements
                    )
                    for one in play.schedule.transactions
                )
                > 1
            )
            if meet and DEADLOCK in {one.error for one in mine.values()}:
                return []
            return super()._unexpected(play, twin)
        if len(play.schedule.transactions) > 2 and mine != theirs:
            # The order in which two waiters wake isn't defined.
            return []
        if mine.rows != theirs.rows:
            return [f"rows {mine.rows} here, {theirs.rows} there"]
        fewer = all(theirs[turn].waited or not mine[turn].waited for turn in mine)
        return [] if fewer else super()._unexpected(play, twin)


@pytest.fixture(scope="module")
def ground(server: str) -> Iterator[Callable[[str], ConflictGround]]:
    with grounds_of(server, "conflicts", ConflictGround) as made:
        yield made


@pytest.mark.sample(1)
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize("kind", SOURCES)
def test_pairs_of_statements_end_as_on_the_twin(ground: Callable[[str], ConflictGround], kind: str) -> None:
    one = ground(kind)
    schedules = list(all_pairs(one.choices(), (READ_COMMITTED, READ_COMMITTED)))
    one.sweep(random.Random(SEED).sample(schedules, EXAMPLES or 60))
    one.settled(SEED)


@pytest.mark.sample(0)
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize("kind", SOURCES)
def test_random_schedules_end_as_on_the_twin(ground: Callable[[str], ConflictGround], kind: str) -> None:
    one = ground(kind)
    one.sweep(one.drawn(random.Random(SEED), EXAMPLES or 60))
    one.settled(SEED)


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("deadlocks_meant")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", SOURCES)
def test_all_pairs_of_statements_end_as_on_the_twin(
    ground: Callable[[str], ConflictGround], kind: str, level: str
) -> None:
    one = ground(kind)
    one.sweep(all_pairs(one.choices(), (READ_COMMITTED, level)))
    one.settled(SEED)
