"""Intents: when they may go, and that strict reads miss nothing and make nothing up (docs/architecture-shards.md)."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import Connection, text

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine.database import Database
from airflow_roir.shards.announce import intents
from tests.shards.announced import Found, Scene, scene
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(3)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)
CHANGE = text("UPDATE public.t SET k = :k, v = v + 1 WHERE id = :id")


class Writer:
    """A client of a shard, step by step."""

    def __init__(self, scene: Scene, shard: str = "s0") -> None:
        self.here = Database(scene.made.dsns[shard]).connect()
        self.there = Database(scene.made.index).connect()
        self.source, self.index = self.here.__enter__(), self.there.__enter__()

    def change(self, id_: int, k: str) -> None:
        self.source.execute(CHANGE, {"k": k, "id": id_})

    def announce(self) -> None:
        announce_by_client(self.source, self.index)

    def close(self) -> None:
        self.here.__exit__(None, None, None)
        self.there.__exit__(None, None, None)


@pytest.fixture
def found(shards: Make) -> Scene:
    return scene(shards(1, *TABLE), "client")


@pytest.fixture
def writer(found: Scene) -> Iterator[Writer]:
    with closing(Writer(found)) as one:
        yield one


@pytest.fixture
def other(found: Scene) -> Iterator[Writer]:
    with closing(Writer(found)) as one:
        yield one


def test_an_intent_stays_while_its_transaction_is_open(found: Scene, writer: Writer) -> None:
    [feed] = found.feeds
    writer.change(1, "n")
    writer.announce()
    for _ in range(2):
        assert found.ship(feed) > 0
        assert len(found.intents()) == 2
    writer.source.commit()
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def test_an_open_transaction_is_beyond_the_snapshots_end(found: Scene, writer: Writer) -> None:
    """A snapshot ends after the last transaction that has ended, and a younger one may be open: its intent stays.

    On a server of its own the shard's ids don't move when the index server commits; here the intent comes first.
    """
    [feed] = found.feeds
    for _ in range(20):
        xid = next_xid(found) + 1
        put(found, 1, "n", xid)
        looked = found.look(feed)
        writer.change(1, "n")
        polled = found.poll(feed, looked)
        given = writer.source.execute(text("SELECT pg_current_xact_id()::text")).scalar_one()
        if int(given) == xid == int(polled.snapshot.split(":")[1]):
            break
        writer.source.rollback()
        found.rest()
    else:
        pytest.fail("the case isn't met")
    found.apply(feed, polled)
    assert found.intents("xid::text") == [(str(xid),)]
    # With the snapshot's end as the bound, the intent is settled wrongly.
    found.apply(feed, replace(polled, own=str(xid)))
    assert found.intents() == []


def test_an_intent_of_a_transaction_that_was_rolled_back_goes(found: Scene, writer: Writer) -> None:
    writer.change(1, "n")
    writer.announce()
    writer.source.rollback()
    found.rest()
    assert found.intents() == []


def test_an_intent_that_came_after_the_look_is_not_settled(found: Scene, writer: Writer, other: Writer) -> None:
    """Even if its transaction has ended in the snapshot: of another history that would say nothing."""
    [feed] = found.feeds
    writer.change(1, "n")
    writer.announce()
    looked = found.look(feed)
    other.change(2, "n")
    other.announce()
    other.source.commit()
    writer.source.commit()
    polled = found.poll(feed, looked)
    found.apply(feed, polled)
    found.clear(feed, polled)
    assert {row[3] for row in found.intents()} == {2}
    found.rest()
    assert found.intents() == []


def test_the_poll_decides_not_the_moment_of_applying(found: Scene, writer: Writer) -> None:
    """A transaction that ends between poll and apply: what is applied doesn't have it."""
    [feed] = found.feeds
    writer.change(1, "n")
    writer.announce()
    polled = found.poll(feed, found.look(feed))
    writer.source.commit()
    found.apply(feed, polled)
    found.clear(feed, polled)
    assert len(found.intents()) == 2
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def next_xid(scene: Scene) -> int:
    return int(scene.made.ask("SELECT pg_snapshot_xmax(pg_current_snapshot())::text", shard="s0")[0][0])


def put(scene: Scene, id_: int, k: str, xid: int) -> None:
    scene.made.ask(
        f"INSERT INTO {intents.table(scene.generation_id)} (c1, c2, c3, xid) VALUES (%s, 's0', %s, %s::text::xid8)",
        k,
        id_,
        xid,
    )


def test_an_intent_of_a_history_that_was_lost_goes(found: Scene) -> None:
    """The shard was restored: it has given no such transaction id yet."""
    put(found, 1, "lost", next_xid(found) + 1_000)
    found.rest()
    assert found.intents() == []


def test_a_transaction_id_that_is_given_again_protects_itself(found: Scene, writer: Writer) -> None:
    """Lost intent and new one have the same entry and transaction id; an old poll settles the lost one alone."""
    [feed] = found.feeds
    ahead = next_xid(found) + 5
    put(found, 1, "n", ahead)
    looked = found.look(feed)
    polled = found.poll(feed, looked)
    assert int(polled.own) < ahead
    while True:
        writer.change(1, "n")
        [(xid,)] = writer.source.execute(text("SELECT pg_current_xact_id()::text")).all()
        if int(xid) >= ahead:
            break
        writer.source.rollback()
    assert int(xid) == ahead, "another one took it"
    writer.announce()
    found.apply(feed, polled)
    assert {row[1] for row in found.intents()} == {"n", "k1"}
    writer.source.commit()
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()


def test_a_shard_that_failed_over_between_poll_and_apply(found: Scene) -> None:
    """A new transaction took an id that had ended in the snapshot of before: its intent came after the look."""
    [feed] = found.feeds
    put(found, 1, "k1", 3)
    looked = found.look(feed)
    polled = found.poll(feed, looked)
    put(found, 1, "k1", 4)
    found.apply(feed, polled)
    assert found.intents("xid::text") == [("4",)]


def test_intents_of_transactions_that_are_open_for_long_do_not_hide_the_others(found: Scene, writer: Writer) -> None:
    [feed] = found.feeds
    for id_ in range(1, 7):
        writer.change(id_, "n")
    writer.announce()
    put(found, 50, "lost", 3)
    for _ in range(200):
        found.ship(feed, limit=2)
        if not [row for row in found.intents() if row[3] == 50]:
            break
    else:
        pytest.fail("never named")
    assert len(found.intents()) == 12


def test_equal_values_that_look_different_are_one_entry(shards: Make) -> None:
    found = scene(shards(1, "CREATE TABLE t (id int PRIMARY KEY, k numeric, v int)"), "client")
    [feed] = found.feeds
    found.made.ask(
        f"INSERT INTO {intents.table(found.generation_id)} (c1, c2, c3, xid) VALUES (1.50, 's0', 1, '3'), "
        "(NULL, 's0', 1, '3'), (1.5, 's1', 1, '3'), (1.5, 's0', 2, '3')"
    )
    looked = intents.Look((), 100)
    with found.database.transaction() as connection:
        gone = intents.settle(connection, feed, [("1.5", "1"), (None, "1")], looked, "100:100:")
    assert gone == 2
    assert [row[1:4] for row in found.intents("id, c1::text, c2, c3")] == [("1.5", "s1", 1), ("1.5", "s0", 2)]


# Random writers, shippers and readers, step by step: every state that was committed is known.

KEYS = ("k0", "k1", "k2")


@dataclass
class Reading:
    key: str
    entries: set[Found]
    asked: list[tuple[str, int]]
    states: list[set[Found]]
    found: set[Found] = field(default_factory=set)


def wander(scene: Scene, seed: int, steps: int = 150) -> str | None:
    """The first wrong answer of a strict reader, or None; at rest no intent may be left."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        writers = {
            (name, n): stack.enter_context(closing(Writer(scene, name))) for name in scene.made.names for n in range(2)
        }
        doing: dict[tuple[str, int], str] = {}
        touched: dict[tuple[str, int], set[int]] = defaultdict(set)
        shipping: dict[int, list[Any]] = {}
        connections = {
            name: stack.enter_context(Database(dsn, limits=scene.database.limits).connect())
            for name, dsn in scene.made.dsns.items()
        }
        for connection in connections.values():
            connection.exec_driver_sql("SET search_path = public")
            connection.commit()
        index = stack.enter_context(Database(scene.made.index).connect())
        readings: list[Reading] = []
        now = scene.truth()
        for _ in range(steps):
            match rng.choice(("write", "write", "ship", "ship", "read", "read")):
                case "write":
                    who = rng.choice(list(writers))
                    writer = writers[who]
                    match doing.get(who):
                        case None:
                            doing[who] = "open"
                        case "open" if rng.random() < 0.6:
                            held = set().union(*(touched[o] for o in touched if o != who and o[0] == who[0]), set())
                            free = [i for i in range(1, 7) if i not in held]
                            if free:
                                id_ = rng.choice(free)
                                touched[who].add(id_)
                                writer.change(id_, rng.choice(KEYS))
                        case "open":
                            writer.announce()
                            doing[who] = "announced"
                        case "announced":
                            if rng.random() < 0.7:
                                writer.source.commit()
                                now = scene.truth()
                                for reading in readings:
                                    reading.states.append(now)
                            else:
                                writer.source.rollback()
                            del doing[who]
                            touched[who] = set()
                case "ship":
                    feed = rng.choice(scene.feeds)
                    step = shipping.setdefault(feed.id, [])
                    if not step:
                        step.append(scene.look(feed, rng.choice((1, 100))))
                    elif len(step) == 1:
                        step.append(scene.poll(feed, step[0], rng.choice((1, 2, 100))))
                    elif len(step) == 2:
                        scene.apply(feed, step[1])
                        step.append(True)
                    else:
                        if rng.random() < 0.7:
                            scene.clear(feed, step[1])
                        shipping[feed.id] = []
                case "read":
                    if readings and (len(readings) == 3 or rng.random() < 0.6):
                        reading = readings.pop(rng.randrange(len(readings)))
                        reading.found = reading.entries | scene.repaired(connections, reading.asked, reading.key)
                        if wrong := judged(reading):
                            return wrong
                    else:
                        key = rng.choice(KEYS)
                        entries, asked = scene.candidates(index, key)
                        index.rollback()
                        readings.append(Reading(key, entries, asked, [now]))
        for writer in writers.values():
            writer.source.rollback()
    scene.rest()
    if scene.intents() or scene.stored() != scene.truth():
        return "not at rest"
    return None


def judged(reading: Reading) -> str | None:
    of_key = [{row for row in state if row[2] == reading.key} for state in reading.states]
    if missed := set.intersection(*of_key) - reading.found:
        return f"missed {missed}"
    if lies := reading.found - set.union(*of_key):
        return f"made up {lies}"
    return None


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(40))
def test_strict_reads_miss_nothing_and_make_nothing_up(shards: Make, seed: int) -> None:
    found = scene(shards(2, *TABLE), "client")
    assert wander(found, seed) is None, f"seed {seed}"


def settles_all(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settles all intents, whatever the snapshot says."""
    real = intents.settle

    def settle(connection: Connection, feed: Any, polled: Any, looked: Any, snapshot: str, own: Any = None) -> int:
        return real(connection, feed, polled, looked, "1000000000:1000000000:", own)

    monkeypatch.setattr(intents, "settle", settle)


def announces_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The intents come after the commit."""
    for name in scene.made.names:
        for feed in scene.feeds:
            if feed.shard.name == name:
                scene.made.run(f"ALTER TABLE roir_shard.{feed.outbox} DISABLE TRIGGER roir_announce", only=name)
    monkeypatch.setattr(Writer, "announce", lambda self: None)


def names_what_was_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client announces the new entries alone, as if it knew what it changes."""
    real = intents.table
    announces_late(scene, monkeypatch)

    def change(self: Writer, id_: int, k: str) -> None:
        self.source.execute(CHANGE, {"k": k, "id": id_})
        self.__dict__.setdefault("named", []).append((id_, k))

    def announce(self: Writer) -> None:
        xid = self.source.execute(text("SELECT pg_current_xact_id()::text")).scalar_one()
        shard = self.source.execute(text("SELECT current_database()")).scalar_one().rsplit("_", 1)[1]
        with self.index.begin():
            for id_, k in self.__dict__.pop("named", []):
                self.index.execute(
                    text(f"INSERT INTO {real(scene.generation_id)} (c1, c2, c3, xid) VALUES (:k, :s, :id, :xid)"),
                    {"k": k, "s": shard, "id": id_, "xid": xid},
                )

    monkeypatch.setattr(Writer, "change", change)
    monkeypatch.setattr(Writer, "announce", announce)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [settles_all, announces_late, names_what_was_read])
def test_broken_variants_are_found(shards: Make, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = scene(shards(2, *TABLE), "client")
    broken(found, monkeypatch)
    assert any(wander(found, seed, 300) for seed in range(15))
