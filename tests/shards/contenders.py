"""Writers of several shards that take, swap and give up the same few keys, and what must be true of them.

Each writer changes rows of its own alone, so it knows them. A row has its key *for sure* from when its commit has
returned until the commit that takes it away begins, and *maybe* from when its commit begins until that other one has
returned.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import psycopg2
from psycopg2 import errors

from airflow_roir.engine.database import Database
from airflow_roir.errors import Fenced, RoirError
from airflow_roir.shards.ship.feed import FeedShipper, InShard
from servers.shards import Shards

KEYS = [f"k{i}" for i in range(5)]
END = float("inf")
FEEDS = """
SELECT l.id FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id
 WHERE g.status IN ('active', 'retired') AND l.removed_at IS NULL ORDER BY l.id
"""


@dataclass
class Stay:
    """A row that had a key. put, taken: when the commit that brought it began, and returned; left, gone: likewise."""

    shard: str
    key: str
    put: float
    taken: float
    left: float = END
    gone: float = END


@dataclass
class Refusal:
    """A commit that was refused: the error's detail, and when the commit began and ended."""

    shard: str
    detail: str
    begun: float
    ended: float


@dataclass
class Contest:
    """happened: how writes ended, by SQLSTATE. stays, refusals: of all writers."""

    made: Shards
    seed: int
    stays: list[Stay] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    failed: list[BaseException] = field(default_factory=list)

    def run(self, seconds: float, writers: int = 2, shippers: int = 2, meanwhile: Any = None) -> None:
        """Runs `writers` writers of each shard and `shippers` shippers, which are killed; `meanwhile` runs in this
        thread."""
        stop = threading.Event()
        chances = random.Random(self.seed)
        threads = [
            threading.Thread(target=self._guarded, args=(self._write, stop, shard, number, chances.random()))
            for shard in self.made.names
            for number in range(writers)
        ]
        threads += [
            threading.Thread(target=self._guarded, args=(self._ship, stop, f"shipper {i}", chances.random()))
            for i in range(shippers)
        ]
        for one in threads:
            one.start()
        try:
            until = time.monotonic() + seconds
            if meanwhile is not None:
                meanwhile()
            stop.wait(max(0.0, until - time.monotonic()))
        finally:
            stop.set()
            for one in threads:
                one.join()
        if self.failed:
            raise self.failed[0]

    def violations(self) -> list[str]:
        """Two shards that had one key for sure at one moment."""
        return [
            f"{one} beside {other}"
            for one, other in combinations(sorted(self.stays, key=lambda stay: stay.taken), 2)
            if one.key == other.key and one.shard != other.shard and other.taken < one.left and one.taken < other.left
        ]

    def false_refusals(self) -> list[str]:
        """Commits that were refused for a key that the shard which they name had at no time."""
        return [
            str(one)
            for one in self.refusals
            if not any(
                one.detail == f"Key (k)=({stay.key}) already exists in shard {stay.shard}."
                and stay.put < one.ended
                and stay.gone > one.begun
                for stay in self.stays
            )
        ]

    def _guarded(self, work: Any, stop: threading.Event, *given: Any) -> None:
        try:
            work(stop, *given)
        except BaseException as error:
            self.failed.append(error)
            stop.set()

    def _write(self, stop: threading.Event, shard: str, number: int, chance: float) -> None:
        chances = random.Random(chance)
        mine: dict[int, Stay | None] = dict.fromkeys(range(10 * number, 10 * number + 3))
        with closing(psycopg2.connect(self.made.dsns[shard])) as there, there.cursor() as cursor:
            cursor.execute("SET deadlock_timeout = '100ms'; SET lock_timeout = '5s'")
            there.commit()
            while not stop.is_set():
                wanted = dict(self._some(chances, mine))
                try:
                    level = chances.choice(["READ COMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
                    cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
                    # Else a row would meet the key of another one of the transaction.
                    for id_ in wanted:
                        cursor.execute("DELETE FROM t WHERE id = %s", (id_,))
                    for id_, key in wanted.items():
                        if key is not None:
                            cursor.execute("INSERT INTO t VALUES (%s, %s, 0)", (id_, key))
                    if chances.random() < 0.2:
                        cursor.execute("UPDATE t SET v = v + 1 WHERE id = ANY (%s)", (list(wanted),))
                    asked = time.monotonic()
                    if chances.random() < 0.2:
                        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
                        if chances.random() < 0.5:
                            # Announced, and doesn't commit.
                            there.rollback()
                            self.happened["rolled back"] += 1
                            continue
                    begun = time.monotonic()
                    for id_ in wanted:
                        if (stay := mine[id_]) is not None:
                            stay.left = begun
                    there.commit()
                    ended = time.monotonic()
                except psycopg2.Error as error:
                    ended = time.monotonic()
                    there.rollback()
                    for id_ in wanted:
                        if (stay := mine[id_]) is not None:
                            stay.left = END
                    self.happened[error.pgcode or "lost"] += 1
                    if isinstance(error, errors.UniqueViolation) and error.diag.constraint_name == "ix":
                        self.refusals.append(Refusal(shard, error.diag.message_detail or "", asked, ended))
                    elif (error.pgcode or "")[:2] not in ("40", "23") and error.pgcode != "55P03":
                        raise
                    continue
                self.happened["done"] += 1
                for id_, key in wanted.items():
                    if (stay := mine[id_]) is not None:
                        stay.gone = ended
                    mine[id_] = None if key is None else Stay(shard, key, begun, ended)
                    if (now := mine[id_]) is not None:
                        self.stays.append(now)

    @staticmethod
    def _some(chances: random.Random, mine: dict[int, Stay | None]) -> Iterator[tuple[int, str | None]]:
        """Some rows get keys, or give them up; two may swap theirs."""
        ids = chances.sample(sorted(mine), chances.choice([1, 1, 2]))
        had = [stay.key for id_ in ids if (stay := mine[id_]) is not None]
        if len(ids) == len(had) == 2 and chances.random() < 0.5:
            yield from zip(ids, reversed(had), strict=True)
            return
        keys = chances.sample(KEYS, len(ids))
        for id_, key in zip(ids, keys, strict=True):
            yield id_, None if chances.random() < 0.4 else key

    def _ship(self, stop: threading.Event, owner: str, chance: float) -> None:
        """Ships feeds by chance, and is often killed: what it had in its hands is given up, and others take over."""
        chances = random.Random(chance)
        database = Database(self.made.index, f"roir {owner}")
        while not stop.is_set():
            feed = chances.choice([row[0] for row in self.made.ask(FEEDS)])
            shipper = FeedShipper(database, feed, f"{owner} {chances.random()}")
            with suppress(Fenced, InShard, RoirError):
                if shipper.claim(take_over=True):
                    for _ in range(chances.choice([1, 2, 3])):
                        found = shipper.poll()
                        if chances.random() < 0.2:
                            time.sleep(chances.random() / 20)
                        if chances.random() < 0.2:
                            break
                        shipper.apply(found)
            shipper.close()
