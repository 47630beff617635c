"""Random schedules of writers and shippers, stepped one after the other, and what must be true of them.

Shippers overtake each other, and die between any two steps; what one has polled may be applied much later.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import psycopg2

from airflow_roir.errors import Fenced
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from airflow_roir.shards.ship.poll import Acknowledged, Poll
from tests.shards.laid import Laid

KEYS = ("a", "b", "c", None)
IDS = 6
Image = tuple[str | None, str | None] | None


class Broken(AssertionError):
    """Something is there that must not be."""


class Writer:
    """Writes in one shard, in transactions that stay open for some steps, and remembers what was acknowledged when."""

    def __init__(self, laid: Laid, shard: str, rng: random.Random) -> None:
        self.shard, self.rng = shard, rng
        self.connection = psycopg2.connect(laid.shards.dsns[shard])
        # By id: when a commit was acknowledged, and what the row was from then on.
        self.log: dict[int, list[tuple[float, Image]]] = defaultdict(lambda: [(0.0, None)])

    def step(self) -> str:
        with self.connection.cursor() as cursor:
            for _ in range(self.rng.randint(1, 3)):
                self._write(cursor)
        if self.rng.random() < 0.2:
            return "wrote"
        if self.rng.random() < 0.15:
            self.connection.rollback()
            return "rolled back"
        self.commit()
        return "committed"

    def commit(self) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT id, k, v::text FROM t")
            now: dict[int, Image] = {row[0]: (row[1], row[2]) for row in cursor.fetchall()}
        self.connection.commit()
        at = time.time()
        for number in set(now) | set(self.log):
            if self.log[number][-1][1] != now.get(number):
                self.log[number].append((at, now.get(number)))

    def _write(self, cursor: Any) -> None:
        number, key, value = self.rng.randrange(IDS), self.rng.choice(KEYS), self.rng.randrange(100)
        match self.rng.randrange(8):
            case 0 | 1 | 2:
                cursor.execute(
                    "INSERT INTO t VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE SET k = EXCLUDED.k, v = EXCLUDED.v",
                    (number, key, value),
                )
            case 3 | 4:
                cursor.execute("UPDATE t SET k = %s WHERE id = %s", (key, number))
            case 5:
                cursor.execute("UPDATE t SET v = %s WHERE id = %s", (value, number))
            case 6:
                cursor.execute("DELETE FROM t WHERE id = %s", (number,))
            case 7:
                if self.rng.random() < 0.15:
                    # While a TRUNCATE is open no other session can read the table, so it commits at once.
                    cursor.execute("TRUNCATE t")
                    self.commit()

    def close(self) -> None:
        with suppress(psycopg2.Error):
            self.connection.rollback()
            self.connection.close()


class Schedule:
    """One run. `say` keeps what was done, for the message."""

    def __init__(self, laid: Laid, seed: int) -> None:
        self.laid, self.rng = laid, random.Random(seed)
        self.told: list[str] = [f"seed {seed}"]
        self.writers = {name: Writer(laid, name, self.rng) for name in laid.shards.names}
        self.shippers: list[FeedShipper] = []
        self.polls: dict[int, Poll] = {}
        # By id: what the last poll of each was to acknowledge.
        self.applied: dict[int, Acknowledged | None] = {}
        self.born = 0

    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            self.rest()
        finally:
            self.close()

    def step(self) -> None:
        if self.rng.random() < 0.35 or not self.shippers:
            name = self.rng.choice(self.laid.shards.names)
            self.say(f"{name} {self.writers[name].step()}")
            if len(self.shippers) < 3:
                self.bear(name)
            return
        number = self.rng.randrange(len(self.shippers))
        shipper = self.shippers[number]
        if self.rng.random() < 0.06:
            self.say(f"{shipper.owner} dies")
            shipper.close()
            self.polls.pop(id(shipper), None)
            del self.shippers[number]
            return
        try:
            self.say(f"{shipper.owner} {self.ship(shipper)}")
        except (Fenced, InShard) as error:
            self.say(f"{shipper.owner} is told: {error}")
            self.polls.pop(id(shipper), None)
            shipper.claimed = None
        self.check_fresh()

    def ship(self, shipper: FeedShipper) -> str:
        """The next step of a shipper."""
        if shipper.claimed is None:
            self.applied.pop(id(shipper), None)
            return f"claims: {shipper.claim(take_over=self.rng.random() < 0.5)}"
        found = self.polls.pop(id(shipper), None)
        if found is not None:
            self.applied[id(shipper)] = shipper.apply(found).done
            return f"applies {found.there} without {found.gone}"
        if self.applied.pop(id(shipper), None) is not None and self.rng.random() < 0.5:
            shipper.acknowledge()
            return "acknowledges"
        self.polls[id(shipper)] = shipper.poll()
        return f"polls {self.polls[id(shipper)].versions}"

    def bear(self, shard: str) -> None:
        self.born += 1
        shipper = self.laid.shipper(shard, f"{shard}/{self.born}", most=self.rng.choice((1, 2, 20_000)))
        self.shippers.append(shipper)

    def check_fresh(self) -> None:
        """For each row, the base has the state that was committed last before `fresh_at`, or a later one."""
        feeds = self.laid.shards.ask(
            "SELECT s.name, extract(epoch FROM l.fresh_at)::float8 "
            "FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id WHERE l.fresh_at IS NOT NULL AND l.doubt IS NULL"
        )
        base = {(str(shard), int(str(number)), key): value for key, shard, number, value in self.laid.base()}
        for shard, fresh in feeds:
            for number in range(IDS):
                log = self.writers[shard].log[number]
                later = [image for _, image in log[max(i for i, (at, _) in enumerate(log) if at < fresh) :]]
                for key in KEYS:
                    # Each entry by itself: of a row whose key changes one may be shipped before the other.
                    value = base.get((shard, number, key))
                    if value not in [image[1] if image and image[0] == key else None for image in later]:
                        self.fail(f"fresh_at of {shard} is {fresh}, but id {number} with {key} is {value}, of {log}")

    def rest(self) -> None:
        for writer in self.writers.values():
            writer.connection.rollback()
        for shipper in self.shippers:
            shipper.close()
        self.laid.ship()
        if self.laid.base() != self.laid.projection():
            self.fail(f"at rest {self.laid.base()} is not {self.laid.projection()}")

    def say(self, line: str) -> None:
        self.told.append(line)

    def fail(self, why: str) -> None:
        raise Broken("\n".join([*self.told[:1], *self.told[-60:], why]))

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        for shipper in self.shippers:
            shipper.close()
