"""Writers who make duplicates of a key and heal them, and keep a log of it.

Some of what they do looks like a duplicate and never is one in any snapshot: a key that goes from one row to another in
one transaction, a row that is deleted and inserted again, a pair that is rolled back. None of these may be reported.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg2
import psycopg2.errors

# Keys and ids of writers lie above those of the table, each writer's apart.
FRESH = 1_000_000_000
NOTHING = ""
INSERT = "INSERT INTO customer (day, id, number, name) VALUES (%s, %s, %s, 'by a writer')"
MOVE = "UPDATE customer SET number = %s WHERE day = %s AND id = %s"
REMOVE = "DELETE FROM customer WHERE day = %s AND id = %s"
SWAP = (
    "UPDATE customer SET number = CASE id WHEN %(a)s THEN %(m)s ELSE %(n)s END "
    "WHERE (day, id) IN ((%(d)s, %(a)s), (%(e)s, %(b)s))"
)


@dataclass
class Event:
    """A transaction that made or healed a duplicate. ended: None until its commit has returned."""

    key: int
    makes: bool
    xid: int
    began: float
    ended: float | None = None


@dataclass
class Log:
    """The changes that writers made, and keys that never were a duplicate of theirs."""

    events: list[Event] = field(default_factory=list)
    never: set[int] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)


class Writer(threading.Thread):
    """standing: the number of duplicates that this writer makes and leaves. given: the rows that are its own to change.

    loaded: duplicates of the table that it may heal, as (key, row). While `honest` is set it makes none; while `still`
    is set it does nothing.
    """

    def __init__(
        self, dsn: str, number: int, chance: random.Random, table: Any, given: list[int], loaded: list[tuple[int, int]],
        standing: int, per_second: float,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.dsn, self.chance, self.table = dsn, chance, table
        self.given, self.loaded, self.standing, self.per_second = given, loaded, standing, per_second
        self.next_fresh = FRESH * (number + 1)
        self.log = Log()
        self.honest, self.still, self.halt, self.idle = (threading.Event() for _ in range(4))
        self.failed: BaseException | None = None
        self.mine: list[tuple[int, int, int]] = []
        self.ephemeral: list[tuple[int, int, int]] = []

    def run(self) -> None:
        try:
            connection = psycopg2.connect(self.dsn)
            with connection.cursor() as self.cursor:
                while not self.halt.is_set():
                    if self.still.is_set():
                        self.idle.set()
                        time.sleep(0.01)
                        continue
                    self.idle.clear()
                    self._act()
                    connection.rollback()
                    self.halt.wait(1 / self.per_second)
            connection.close()
        except BaseException as error:
            self.failed = error
            self.idle.set()

    def _act(self) -> None:
        acts: list[Callable[[], str]] = [self._work] * 2
        acts += [self._hand_over, self._again, self._roll_back, self._swap]
        if not self.honest.is_set():
            acts += [self._make_standing] * 4 * (self.standing > 0) + [self._make, self._heal, self._heal_loaded]
        name = self.chance.choice(acts)()
        if name != NOTHING:
            self.log.done[name] = self.log.done.get(name, 0) + 1

    def _fresh(self) -> int:
        self.next_fresh += 1
        return self.next_fresh

    def _commit(self, key: int | None = None, makes: bool = False, began: float = 0.0) -> None:
        """Commit; with a key: what makes or heals a duplicate of it, in the log before it can be seen."""
        event = None
        if key is not None:
            self.cursor.execute("SELECT pg_current_xact_id()::text")
            event = Event(key, makes, int(self.cursor.fetchone()[0]), began)
            self.log.events.append(event)
        self.cursor.connection.commit()
        if event is not None:
            event.ended = time.time()

    def _day(self) -> int:
        return self.chance.randrange(self.table.partitions)

    def _victim(self) -> tuple[int, int, int] | None:
        """A row of the table that no other writer touches: its day, id and key."""
        if not self.given:
            return None
        row = self.given.pop()
        return self.table.day(row), row, self.table.key(row)

    def _work(self) -> str:
        if self.mine and self.chance.random() < 0.6:
            day, row, _ = self.mine[self.chance.randrange(len(self.mine))]
            self.cursor.execute("UPDATE customer SET name = name || '.' WHERE day = %s AND id = %s", (day, row))
        else:
            day, row, key = self._day(), self._fresh(), self._fresh()
            self.cursor.execute(INSERT, (day, row, key))
            self.mine.append((day, row, key))
        self._commit()
        return "other writes"

    def _make_standing(self) -> str:
        if not (victim := self._victim()):
            return NOTHING
        self.standing -= 1
        self._make_of(victim)
        return "made, left"

    def _make(self) -> str:
        if not (victim := self._victim()):
            return NOTHING
        self.ephemeral.append(self._make_of(victim))
        return "made, to be healed"

    def _make_of(self, victim: tuple[int, int, int]) -> tuple[int, int, int]:
        began = time.time()
        day, row, key = self._day(), self._fresh(), victim[2]
        if self.mine and self.chance.random() < 0.5:
            day, row, _ = self.mine.pop()
            self.cursor.execute(MOVE, (key, day, row))
        else:
            self.cursor.execute(INSERT, (day, row, key))
        self._commit(key, True, began)
        return day, row, key

    def _heal(self) -> str:
        if not self.ephemeral:
            return NOTHING
        began = time.time()
        day, row, key = self.ephemeral.pop(0)
        if self.chance.random() < 0.5:
            self.cursor.execute(REMOVE, (day, row))
        else:
            self.cursor.execute(MOVE, (self._fresh(), day, row))
        self._commit(key, False, began)
        return "healed"

    def _heal_loaded(self) -> str:
        if not self.loaded:
            return NOTHING
        began = time.time()
        key, row = self.loaded.pop()
        self.cursor.execute(REMOVE, (self.table.day(row), row))
        self._commit(key, False, began)
        return "healed of the table's"

    def _hand_over(self) -> str:
        """A key goes to another row, in one transaction."""
        if not (victim := self._victim()):
            return NOTHING
        day, row, key = victim
        self.log.never.add(key)
        self.cursor.execute(MOVE, (self._fresh(), day, row))
        self.cursor.execute(INSERT, (self._day(), self._fresh(), key))
        self._commit()
        return "key handed over"

    def _again(self) -> str:
        """Deleted, and inserted again with the same key, in one transaction or in two."""
        if not (victim := self._victim()):
            return NOTHING
        day, row, key = victim
        self.log.never.add(key)
        self.cursor.execute(REMOVE, (day, row))
        if self.chance.random() < 0.5:
            self._commit()
        self.cursor.execute(INSERT, (self._day(), self._fresh(), key))
        self._commit()
        return "deleted and inserted again"

    def _roll_back(self) -> str:
        """A pair that no other session sees, or, once the key is enforced, one that is refused."""
        if not (victim := self._victim()):
            return NOTHING
        self.log.never.add(victim[2])
        try:
            self.cursor.execute(INSERT, (self._day(), self._fresh(), victim[2]))
        except psycopg2.errors.UniqueViolation:
            return "refused"
        finally:
            self.cursor.connection.rollback()
        return "rolled back"

    def _swap(self) -> str:
        """Two rows exchange their keys, in one statement."""
        if not (one := self._victim()) or not (two := self._victim()):
            return NOTHING
        self.log.never.update((one[2], two[2]))
        values = {"d": one[0], "a": one[1], "n": one[2], "e": two[0], "b": two[1], "m": two[2]}
        self.cursor.execute(SWAP, values)
        self._commit()
        return "keys swapped"
