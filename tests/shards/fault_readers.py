"""Readers at each level behind a failing network: refused is allowed, wrong is not."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import psycopg2
from sqlalchemy import Column, Integer, MetaData, Table, Text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from airflow_roir.errors import IndexUnreachable, NotStrict, ShardUnreachable
from airflow_roir.reading import ShardedIndex
from tests.shards.fault_writers import KEYS, engine

if TYPE_CHECKING:
    from tests.shards.faults import Traffic

INDEX = "public.ix"
T = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", Text), Column("v", Integer))
STRICT = "SELECT id, k, v, shard FROM roir.strict(NULL::public.ix, jsonb_build_object('k', %s::text))"
BOUNDED = """
SELECT s.name, extract(epoch FROM l.fresh_at)::float8,
       (SELECT e.v FROM public.ix e WHERE e.shard = s.name AND e.id = -1 AND e.k = 'count')
  FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id JOIN roir.generation g ON g.id = l.generation_id
 WHERE g.status = 'active' AND l.fresh_at IS NOT NULL
"""
# Not now; a server that is away, a connection that broke.
REFUSED = ("55000", "40001", "08", "57P", None)
# Strict in SQL: a shard can't be reached.
AWAY = "08001"


class StrictReader:
    """Asks for one key after the other, in Python or in SQL, and compares with what writers know."""

    def __init__(self, traffic: Traffic, number: int, chance: random.Random) -> None:
        self.traffic, self.chance, self.in_sql = traffic, chance, number == 1 and traffic.in_sql
        self.index = engine(traffic.network.dsn("", traffic.READERS))
        shards = {name: engine(traffic.network.dsn(name, traffic.READERS)) for name in traffic.made.names}
        self.sharded = ShardedIndex(self.index, INDEX, shards)
        self.plain = engine(traffic.network.dsn("", traffic.READERS), poolclass=NullPool)

    def run(self) -> None:
        with self.sharded:
            while not self.traffic.stopped.is_set():
                self.look(self.chance.choice(KEYS))
                self.traffic.stopped.wait(0.005)

    def look(self, key: str | None) -> None:
        certain = self.traffic.covered
        since = time.monotonic()
        try:
            found = self._in_sql(key) if self.in_sql else self._in_python(key)
        except (NotStrict, ShardUnreachable, IndexUnreachable) as error:
            self.traffic.happened[type(error).__name__] += 1
            return
        except DBAPIError as error:
            state = getattr(error.orig, "pgcode", None)
            if not any(state == one or (one and state and state.startswith(one)) for one in REFUSED):
                raise
            self.traffic.happened[f"a reader's {state or 'connection'}"] += 1
            return
        until = time.monotonic()
        problems = self.traffic.histories.wrong(key, found, since, until, certain & self.traffic.covered)
        self.traffic.wrong += [f"strict{' in SQL' if self.in_sql else ''}, {key}: {one}" for one in problems]
        self.traffic.happened["strict reads in SQL" if self.in_sql else "strict reads"] += 1

    def _in_python(self, key: str | None) -> list[Any]:
        condition = T.c.k.is_(None) if key is None else T.c.k == key
        return [(*row, shard) for row, shard in self.sharded.rows(T, condition, "strict") if row.id >= 0]

    def _in_sql(self, key: str | None) -> list[Any]:
        with self.plain.connect() as connection:
            return [tuple(row) for row in connection.exec_driver_sql(STRICT, (key,)) if row.id >= 0]


class BoundedReader:
    """Checks that all that was committed before `fresh_at` is in the index."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def run(self) -> None:
        while not self.traffic.stopped.wait(0.01):
            try:
                found = self.traffic.made.ask(BOUNDED)
            except psycopg2.Error as error:
                # The view is guarded by what was published after the snapshot.
                if error.pgcode is not None and not error.pgcode.startswith(("40", "57P")):
                    raise
                continue
            for shard, fresh, count in found:
                due = max(n for at, n in list(self.traffic.done[shard]) if at < fresh)
                if (count or 0) < due:
                    self.traffic.wrong.append(
                        f"{shard}: fresh at {fresh}, {due} was committed before, the entry says {count}"
                    )
                self.traffic.happened["bounded reads"] += due > 0
