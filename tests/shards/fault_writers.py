"""Writers behind a failing network: those who fight for the same rows, and those who know what theirs were when."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg2
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from airflow_roir.announcing import announce
from tests.shards.histories import State

if TYPE_CHECKING:
    from tests.shards.faults import Traffic

KEYS = ("k0", "k1", "k2", None)
FIRST, EACH = 100, 6
NOT_ANNOUNCED = "55000"


def engine(dsn: str, **options: Any) -> Engine:
    return create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(dsn), **options)


def ids_of(writer: int) -> range:
    """The rows that are a keeper's own."""
    return range(FIRST + writer * EACH, FIRST + (writer + 1) * EACH)


class Writer:
    """Transactions in one shard, announced to the index server, of which some are cut off."""

    def __init__(self, traffic: Traffic, shard: str, number: int, chance: random.Random) -> None:
        self.traffic, self.shard, self.number, self.chance = traffic, shard, number, chance
        way = traffic.WRITERS + number % 2
        self.there = engine(traffic.network.dsn(shard, way), poolclass=NullPool)
        self.index = engine(traffic.network.dsn("", way), poolclass=NullPool)

    def run(self) -> None:
        while not self.traffic.stopped.is_set():
            try:
                with self.there.connect() as here:
                    while not self.traffic.stopped.is_set():
                        self.transaction(here)
                        self.traffic.stopped.wait(self.chance.uniform(0, 0.02))
            except DBAPIError as error:
                state = getattr(error.orig, "pgcode", None)
                if state == NOT_ANNOUNCED:
                    raise
                self.traffic.happened[f"a writer's {state or 'connection'}"] += 1
                self.traffic.stopped.wait(0.05)

    def transaction(self, here: Connection) -> None:
        raise NotImplementedError

    def announce(self, here: Connection) -> None:
        """If it is up to clients, there is something to announce."""
        with self.index.connect() as other:
            announce(here, other)


class Contender(Writer):
    """Writes rows that the other one of the shard writes, too. The first one's row -1 counts its transactions."""

    count = 0

    def transaction(self, here: Connection) -> None:
        if self.number == 0:
            self.count += 1
            here.exec_driver_sql(
                "INSERT INTO t VALUES (-1, 'count', %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v", (self.count,)
            )
        # In the order of ids, so that writers don't deadlock with each other: if one does, it is ours.
        rows = sorted(self.chance.sample(range(12), self.chance.randrange(1, 4)))
        for row in rows:
            self._statement(here, row, moves=rows == [row] and self.number > 0)
        if self.chance.random() < 0.2 and self.number:
            if self.chance.random() < 0.5:
                self.announce(here)
            here.rollback()
            return
        self.announce(here)
        here.commit()
        if self.number == 0:
            self.traffic.done[self.shard].append((time.time(), self.count))

    def _statement(self, here: Connection, row: int, moves: bool) -> None:
        key, value = self.chance.choice("abc"), self.chance.randrange(5)
        statement = self.chance.choices(
            [
                f"INSERT INTO t VALUES ({row}, '{key}', {value}) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
                f"UPDATE t SET k = '{key}', v = {value} WHERE id = {row}",
                f"UPDATE t SET v = v + 1 WHERE k = '{key}' AND id = {row}",
                f"DELETE FROM t WHERE id = {row}",
                f"UPDATE t SET id = {row} WHERE id = {max(row - 5, 0)} AND NOT EXISTS (SELECT FROM t WHERE id = {row})",
            ],
            [5, 5, 3, 3, 3 * moves],
        )[0]
        try:
            with here.begin_nested():
                here.exec_driver_sql(statement)
                if self.chance.random() < 0.05:
                    self.announce(here)
        except IntegrityError:
            return


class Keeper(Writer):
    """Writes rows of its own. If a commit's answer is lost, it finds out whether the transaction committed."""

    def __init__(self, traffic: Traffic, shard: str, number: int, chance: random.Random) -> None:
        super().__init__(traffic, shard, number, chance)
        self.count = 0
        self.unsure: dict[int, State] | None = None

    def run(self) -> None:
        super().run()
        self.traffic.until_it_answers(self.find_out)

    def transaction(self, here: Connection) -> None:
        self.traffic.until_it_answers(self.find_out)
        self.count += 1
        here.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (self.number,))
        here.exec_driver_sql(
            "INSERT INTO done VALUES (%s, %s) ON CONFLICT (writer) DO UPDATE SET n = excluded.n",
            (self.number, self.count),
        )
        changes: dict[int, State] = {}
        for id_ in sorted(self.chance.sample(ids_of(self.number), self.chance.randint(1, 3))):
            self._change(here, id_, changes)
        self.announce(here)
        if self.chance.random() < 0.15:
            here.rollback()
            return
        self.traffic.histories.begin(self.shard, changes)
        self.unsure = changes
        here.commit()
        self.traffic.histories.end(self.shard, changes, committed=True)
        self.unsure = None
        self.traffic.happened["kept"] += 1

    def _change(self, here: Connection, id_: int, changes: dict[int, State]) -> None:
        before = changes.get(id_, self.traffic.histories.rows[self.shard, id_].last)
        key = self.chance.choice(KEYS)
        new: State = (key, self.count)
        drawn = self.chance.random()
        if before is None:
            here.exec_driver_sql("INSERT INTO t VALUES (%s, %s, %s)", (id_, key, self.count))
        elif drawn < 0.2:
            new = None
            here.exec_driver_sql("DELETE FROM t WHERE id = %s", (id_,))
        elif drawn < 0.3:
            # Only the included column.
            new = (before[0], self.count)
            here.exec_driver_sql("UPDATE t SET v = %s WHERE id = %s", (self.count, id_))
        else:
            here.exec_driver_sql("UPDATE t SET k = %s, v = %s WHERE id = %s", (key, self.count, id_))
        changes[id_] = new

    def find_out(self) -> None:
        """Finds out whether the transaction whose answer was lost committed: it has ended once its lock is free."""
        if self.unsure is None:
            return
        with closing(psycopg2.connect(self.traffic.made.dsns[self.shard])) as direct, direct.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", (self.number,))
            cursor.execute("SELECT n FROM done WHERE writer = %s", (self.number,))
            row = cursor.fetchone()
        committed = row is not None and row[0] == self.count
        self.traffic.histories.end(self.shard, self.unsure, committed)
        self.traffic.happened["committed, unanswered" if committed else "not committed"] += 1
        self.unsure = None
