"""Readers at each level among writers and shippers whose steps come by chance, against what the shards had when."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Connection, text

from airflow_roir.engine.database import execute
from airflow_roir.errors import StaleAnswer
from airflow_roir.reading import candidates, sharded
from airflow_roir.shards.announce import intents
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import Feed
from tests.engine import steps
from tests.engine.steps import sql
from tests.shards.announced import Polled
from tests.shards.conftest import Make
from tests.shards.reading import Ground, T, ground, with_servers

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)",)
STRICT = 'SELECT id, k, v, shard FROM roir.strict(NULL::public.t_by_k, \'{"k": "a"}\')'
CLEARED = """
DELETE FROM {table} WHERE version IN (
    SELECT version FROM {table} WHERE version = ANY (%(versions)s) FOR UPDATE SKIP LOCKED)
"""
Value = tuple[str | None, int]
Found = set[tuple[Any, ...]]


class Past:
    """The history of each row: its values, each with a number and a time."""

    def __init__(self) -> None:
        self.now = 0
        self.rows: dict[tuple[str, int], list[tuple[int, float, Value | None]]] = {}

    def put(self, shard: str, values: dict[int, Value | None]) -> None:
        self.now += 1
        for id_, value in values.items():
            self.rows.setdefault((shard, id_), [(0, 0.0, None)]).append((self.now, time.time(), value))

    def during(self, since: int, key: tuple[str, int], before: float = float("inf")) -> list[Value | None]:
        """The row's values since then. Values that were committed after `before` are left out."""
        past = self.rows[key]
        at = max(i for i, (number, _, _) in enumerate(past) if number <= since)
        return [value for _, when, value in past[at:] if when < before] if past[at][1] < before else [None]

    def check(self, found: Found, since: int, before: float, what: str) -> None:
        """`before`: what was committed later may be missed."""
        assert len({(row[3], row[0]) for row in found}) == len(found), f"{what}: a row twice: {found}"
        for shard, id_ in self.rows:
            values = self.during(since, (shard, id_))
            rows = [row for row in found if (row[3], row[0]) == (shard, id_)]
            assert all(k == "a" and (k, v) in values for _, k, v, _ in rows), f"{what} lies: {rows} of {values}"
            old = self.during(since, (shard, id_), before)
            there = all(value is not None and value[0] == "a" for value in values)
            if there and old[0] is not None:
                assert rows, f"{what} misses {shard} {id_}: {values}"


class Writer:
    """One transaction after the other over rows of its own."""

    def __init__(self, ground: Ground, past: Past, shard: str, ids: list[int], chance: random.Random) -> None:
        self.ground, self.past, self.shard, self.ids, self.chance = ground, past, shard, ids, chance
        self.connection: Connection = ground.engines[shard].connect()
        self.is_announced = False
        self.changes: dict[int, Value | None] = {}
        self.rows: dict[int, Value | None] = dict.fromkeys(ids)

    def step(self) -> None:
        if not self.changes or (not self.is_announced and self.chance.random() < 0.3):
            self.change()
        elif not self.is_announced:
            self.ground.announce(self.connection)
            self.is_announced = True
        elif self.chance.random() < 0.2:
            self.connection.rollback()
            self.changes, self.is_announced = {}, False
        else:
            self.connection.commit()
            self.past.put(self.shard, self.changes)
            self.rows |= self.changes
            self.changes, self.is_announced = {}, False

    def change(self) -> None:
        id_ = self.chance.choice(self.ids)
        value = self.chance.choice([("a", 1), ("a", 2), ("b", 3), (None, 4), None])
        values = {"id": id_, "k": value and value[0], "v": value and value[1]}
        if value is None:
            self.connection.execute(text("DELETE FROM t WHERE id = :id"), values)
        else:
            self.connection.execute(
                text("INSERT INTO t VALUES (:id, :k, :v) ON CONFLICT (id) DO UPDATE SET k = :k, v = :v"), values
            )
        self.changes[id_] = value


class Shipper:
    """Passes of one feed, each of four steps."""

    def __init__(self, ground: Ground, feed: Feed) -> None:
        self.scene, self.feed = ground.scene, feed
        self.at = 0
        self.began: Any = None
        self.looked = intents.Look()
        self.polled: Polled | None = None

    def step(self) -> None:
        (self.look, self.poll, self.apply, self.clear)[self.at]()
        self.at = (self.at + 1) % 4

    def look(self) -> None:
        [(self.began,)] = self.scene.made.ask("SELECT clock_timestamp()")
        self.looked = self.scene.look(self.feed)

    def poll(self) -> None:
        self.polled = self.scene.poll(self.feed, self.looked)

    def apply(self) -> None:
        assert self.polled is not None
        self.scene.apply(self.feed, self.polled)
        self.scene.made.ask("UPDATE roir.feed SET fresh_at = %s WHERE id = %s", self.began, self.feed.id)

    def clear(self) -> None:
        assert self.polled is not None
        versions = [version for version, _, _ in self.polled.rows if version is not None]
        with self.scene.made.shard(self.feed.shard.name).transaction() as connection:
            statement = CLEARED.format(table=outbox.table(self.feed.outbox))
            execute(connection, statement, {"versions": versions})


def by_client(ground: Ground, between: Callable[[], None], level: str, **values: Any) -> Found:
    found = ground.index.rows(T, T.c.k == "a", level, **values)  # type: ignore[arg-type]
    return {(*row, shard) for row, shard in found}


def by_server(ground: Ground, between: Callable[[], None]) -> Found:
    user = steps.session(ground.made.index)
    try:
        sql(user, f"DECLARE c CURSOR FOR {STRICT}")
        between()
        return set(sql(user, "FETCH ALL FROM c"))
    finally:
        user.close()


def run(ground: Ground, monkeypatch: pytest.MonkeyPatch, seed: int, rounds: int, only: str | None = None) -> list[str]:
    """Returns what was read."""
    chance = random.Random(seed)
    past = Past()
    actors: list[Any] = [
        Writer(ground, past, shard, ids, chance) for shard in ground.made.names for ids in ([1, 2], [3, 4])
    ]
    past.rows = {(shard, id_): [(0, 0.0, None)] for shard in ground.made.names for id_ in range(1, 5)}
    # Shippers are slower than writers, or nothing would be left to be wrong.
    actors += [Shipper(ground, feed) for feed in ground.scene.feeds]

    def some() -> None:
        for _ in range(chance.randrange(12)):
            chance.choice(actors).step()

    asked = sharded.ShardedIndex._ask

    def ask(self: Any, *values: Any) -> Any:
        some()
        return asked(self, *values)

    monkeypatch.setattr(sharded.ShardedIndex, "_ask", ask)
    done = []
    with ExitStack() as stack:
        for actor in actors:
            if isinstance(actor, Writer):
                stack.callback(actor.connection.close)
        for _ in range(rounds):
            some()
            since, begun, before = past.now, time.time(), float("inf")
            what = only or chance.choice(["eventual", "bounded", "strict", "strict by the server"])
            try:
                if what == "strict by the server":
                    found = by_server(ground, some)
                elif what == "bounded":
                    age = chance.choice([0.05, 0.2, 1.0])
                    before = begun - age
                    found = by_client(ground, some, what, max_staleness=age)
                else:
                    found = by_client(ground, some, what)
                    before = float("inf") if what == "strict" else 0.0
            except StaleAnswer:
                done.append("stale")
                continue
            past.check(found, since, before, what)
            done.append(what)
    return done


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(60))
def test_strict_never_misses_and_no_level_lies(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    with ground(contrib_shards(2, *TABLE)) as made:
        with_servers(made)
        done = run(made, monkeypatch, seed, 30)
        assert {"eventual", "strict", "strict by the server"} <= set(done)


def _no_intents(ground: Ground, patch: pytest.MonkeyPatch) -> None:
    read = candidates.read
    patch.setattr(candidates, "read", lambda connection, wanted: read(connection, wanted.selects[0]))


def _no_condition(ground: Ground, patch: pytest.MonkeyPatch) -> None:
    ask: Any = sharded.truth.ask
    patch.setattr(sharded.truth, "ask", lambda *values: ask(*values[:6], text("true"), *values[7:]))


BROKEN = {
    "no intents": (_no_intents, "misses"),
    "the condition isn't evaluated again": (_no_condition, "lies"),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_the_oracle_finds_broken_readers(shards: Make, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    spoil, message = BROKEN[broken]
    with ground(shards(2, *TABLE)) as made:
        spoil(made, monkeypatch)
        with pytest.raises(AssertionError, match=message):
            run(made, monkeypatch, 1, 300, "strict")


@pytest.mark.slow
def test_the_oracle_finds_a_freshness_that_is_too_young(shards: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """broken: each pass counts as if it had begun just now.

    It counted from its end before, and was found if a read came within 50 ms of both feeds' ends: on a slow machine
    each of 400 reads was refused as stale.
    """
    asked = sharded.ShardedIndex._ask

    def ask(self: Any, *values: Any) -> Any:
        made.scene.made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp() WHERE fresh_at IS NOT NULL")
        return asked(self, *values)

    monkeypatch.setattr(sharded.ShardedIndex, "_ask", ask)
    with ground(shards(2, *TABLE)) as made, pytest.raises(AssertionError, match="bounded misses"):
        run(made, monkeypatch, 1, 400, "bounded")
