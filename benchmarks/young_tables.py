"""The tables of `make bench-young`, their daily writes and their lookups: the same for all sides, by a seed.

Nothing depends on the place of a row, so each side gets the same rows on the same day.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from airflow_roir.definition import IndexDefinition

# Seconds of a day, which are what `event.at` and `task.touched` count.
DAY = 86_400
TITLE = "rpad('number ' || i, 40, '.')"
# The entries that a range reads, or fewer at the end of the key.
RANGE = 50


@dataclass(frozen=True)
class Lookup:
    """One statement to be prepared, with its parameters' types, and the values that it is run with."""

    name: str
    types: str
    statement: str
    values: list[tuple[Any, ...]]


class Churn(ABC):
    """A table with one index of ours, and how it ages.

    rows: about as many as it has all the time. segments: of its index, whenever that is built.
    """

    table: ClassVar[str]
    key: ClassVar[str]
    create: ClassVar[str]

    def __init__(self, rows: int, seed: int, segments: int = 1) -> None:
        self.rows, self.seed, self.segments = rows, seed, segments

    @property
    def index(self) -> str:
        """The index's name."""
        return f"public.{self.table}_index"

    @property
    def definition(self) -> IndexDefinition:
        """The index, which covers the title."""
        return IndexDefinition.parse(self.index, f"public.{self.table}", self.key, "title")

    @abstractmethod
    def load(self, cursor: Any) -> None:
        """The rows before the first day."""

    @abstractmethod
    def write(self, cursor: Any, day: int) -> None:
        """Writes one day's changes, in the caller's transaction."""

    @abstractmethod
    def hot(self, day: int) -> str:
        """SQL: the condition of rows that are looked up more often."""

    def lookups(self, cursor: Any, day: int, count: int) -> list[Lookup]:
        """Lookups of one entry and of a short range, `count` of each: half of them of hot rows, mixed."""
        *equal, last = self.key.split(", ")
        apart = f"PARTITION BY {', '.join(equal)} " if equal else ""
        chance = self.chance(day)
        keys: list[tuple[Any, ...]] = []
        for condition in (self.hot(day), "true"):
            cursor.execute(
                f"SELECT {self.key}, until FROM (SELECT *, lead({last}, {RANGE - 1}, {last}) OVER "
                f"({apart}ORDER BY {last}, id) AS until FROM {self.table}) t WHERE {condition} "
                f"ORDER BY hashint8extended(id, {self.seed + day}), id LIMIT {count}"
            )
            found = cursor.fetchall()
            keys += [found[n % len(found)] for n in range(count)] if found else []
        chance.shuffle(keys)
        n = len(equal) + 1
        before = "".join(f"{column} = ${i} AND " for i, column in enumerate(equal, start=1))
        read = f"SELECT id, title FROM {self.index} WHERE {before}{last}"
        return [
            Lookup(f"{self.table}_one", self.types, f"{read} = ${n}", [key[:-1] for key in keys[:count]]),
            Lookup(f"{self.table}_range", f"{self.types}, bigint", f"{read} BETWEEN ${n} AND ${n + 1}", keys[count:]),
        ]

    @property
    def types(self) -> str:
        """The types of the key's columns."""
        return ", ".join("text" if column == "status" else "bigint" for column in self.key.split(", "))

    def chance(self, day: int) -> random.Random:
        """The random numbers of this table on this day."""
        return random.Random(f"{self.table} {self.seed} {day}")


class Events(Churn):
    """Appended by the time, and deleted in waves, once they have been kept for long enough."""

    table = "event"
    key = "at"
    create = "CREATE TABLE event (id bigint PRIMARY KEY, at bigint NOT NULL, title varchar(60) NOT NULL)"
    kept_days = 90
    wave_days = 30

    @property
    def daily(self) -> int:
        """Rows a day."""
        return max(1, self.rows // self.kept_days)

    def load(self, cursor: Any) -> None:
        self._append(cursor, -self.kept_days, 0)

    def write(self, cursor: Any, day: int) -> None:
        self._append(cursor, day, day + 1)
        if day % self.wave_days == 0:
            cursor.execute("DELETE FROM event WHERE at < %s", ((day - self.kept_days) * DAY,))

    def _append(self, cursor: Any, first: int, end: int) -> None:
        cursor.execute(
            f"INSERT INTO event SELECT i, i * {DAY} / {self.daily}, {TITLE} FROM generate_series(%s::bigint, %s) i",
            (first * self.daily, end * self.daily - 1),
        )

    def hot(self, day: int) -> str:
        return f"at >= {(day - 2) * DAY}"


class Tasks(Churn):
    """Updated by Zipf's law: each update moves an entry to the end of its status, and cold ones stay behind."""

    table = "task"
    key = "status, touched"
    create = (
        "CREATE TABLE task (id bigint PRIMARY KEY, status text NOT NULL, touched bigint NOT NULL, "
        "title varchar(60) NOT NULL)"
    )
    # The share of the rows that is updated in a day; some are hit more than once.
    share = 0.04
    status = "(ARRAY['done', 'done', 'open', 'waiting'])[1 + (hashint8extended({0}, {1}) & 3)]"

    def load(self, cursor: Any) -> None:
        cursor.execute(
            f"INSERT INTO task SELECT i, {self.status.format('i', 0)}, (i * 7919 %% {self.rows} - {self.rows}) "
            f"* {90 * DAY} / {self.rows}, {TITLE} FROM generate_series(0, %s::bigint) i",
            (self.rows - 1,),
        )

    def write(self, cursor: Any, day: int) -> None:
        chance = self.chance(day)
        ids = list(dict.fromkeys(self.row(self.rank(chance)) for _ in range(int(self.rows * self.share))))
        cursor.execute(
            f"UPDATE task t SET status = {self.status.format('t.id', self.seed + day)}, "
            f"touched = {day * DAY} + u.n FROM unnest(%s) WITH ORDINALITY u (id, n) WHERE t.id = u.id",
            (ids,),
        )

    def rank(self, chance: random.Random) -> int:
        """A rank by Zipf's law with exponent 1: the logarithm of a rank is uniform."""
        return int(self.rows ** chance.random()) - 1

    def row(self, rank: int) -> int:
        """The row of that rank: neighbours in rank aren't in the table."""
        return rank * 7919 % self.rows

    def hot(self, day: int) -> str:
        return f"id = ANY (ARRAY[{', '.join(str(self.row(rank)) for rank in range(min(self.rows, 500)))}])"


class Stock(Churn):
    """Inserted and deleted all over the key; now and then most of one stretch of the key is deleted at once."""

    table = "stock"
    key = "part"
    create = "CREATE TABLE stock (id bigint PRIMARY KEY, part bigint NOT NULL, title varchar(60) NOT NULL)"
    # In each 1,024 rows, this many are deleted in a day; as many are inserted for each 1,024 rows of the first day.
    daily = 15
    wave_days = 45
    stretches = 8
    # In each 16 rows of the stretch, this many are deleted.
    wave = 13

    @property
    def parts(self) -> int:
        """Keys are below this."""
        return self.rows * 10

    def load(self, cursor: Any) -> None:
        self._insert(cursor, 0, self.rows)

    def write(self, cursor: Any, day: int) -> None:
        daily = self.rows * self.daily // 1024
        cursor.execute(f"DELETE FROM stock WHERE hashint8extended(id, {self.seed + day}) & 1023 < {self.daily}")
        self._insert(cursor, self.rows + day * daily, daily)
        if day % self.wave_days == self.wave_days - 1:
            low, high = self.stretch(day)
            cursor.execute(
                f"DELETE FROM stock WHERE part >= %s AND part < %s AND hashint8extended(id, 1) & 15 < {self.wave}",
                (low, high),
            )

    def _insert(self, cursor: Any, first: int, count: int) -> None:
        cursor.execute(
            f"INSERT INTO stock SELECT i, (hashint8extended(i, {self.seed}) & {2**62 - 1}) %% {self.parts}, "
            f"{TITLE} FROM generate_series(%s::bigint, %s) i",
            (first, first + count - 1),
        )

    def stretch(self, day: int) -> tuple[int, int]:
        """The stretch of keys of the latest wave, or of the next one; half-open."""
        wave = (day + 1) // self.wave_days
        at = wave * 3 % self.stretches
        return self.parts * at // self.stretches, self.parts * (at + 1) // self.stretches

    def hot(self, day: int) -> str:
        low, high = self.stretch(day)
        return f"part >= {low} AND part < {high}"


CHURNS: tuple[type[Churn], ...] = (Events, Tasks, Stock)
