"""Unique over shards, step by step: two puts and a poll, and what a put may meet while keys are looked over.

Each schedule is also run with a broken variant, which breaks what the schedule is about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.errors import DuplicatesFound, LockNotAcquired
from airflow_roir.shards.announce import announce, intents
from airflow_roir.shards.ship.feed import FeedShipper
from airflow_roir.shards.ship.poll import Poll
from airflow_roir.shards.unique import enforce, fill_holders, holders
from airflow_roir.shards.unique.enforce import Enforcing
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_unique import built, enforced, problem

pytestmark = pytest.mark.sample(1)
TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)",)
OWN = "INSERT INTO t VALUES (1, 'k', 1)"
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND cardinality(pg_blocking_pids(pid)) > 0"
WITHOUT_LEAVING = "SELECT WHERE false AND %(locked)s::text[] IS NULL AND %(entries)s::text[] IS NULL"


@pytest.fixture(autouse=True)
def old_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll takes along all intents that there are."""
    monkeypatch.setattr(intents, "look", partial(intents.look, old_s=0.0))


@contextmanager
def put(made: Shards, shard: str, *statements: str) -> Iterator[Any]:
    """A transaction of a shard whose intents are on the index server, and not committed there yet."""
    with closing(psycopg2.connect(made.dsns[shard])) as there:
        with there.cursor() as cursor:
            for statement in (*statements, "SET CONSTRAINTS ALL IMMEDIATE"):
                cursor.execute(statement)
        yield there


def shipper(made: Shards, shard: str) -> FeedShipper:
    [(feed,)] = made.ask("SELECT l.id FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id WHERE s.name = %s", shard)
    found = FeedShipper(made.database, feed, "test")
    assert found.claim(take_over=True)
    return found


def ship(made: Shards, shard: str) -> None:
    one = shipper(made, shard)
    one.ship_pass()
    one.close()


def given_up(made: Shards) -> tuple[FeedShipper, Poll]:
    """The key of s0 whose row is deleted, and a poll that has seen so and isn't applied yet."""
    enforced(made)
    made.run(OWN, only="s0")
    ship(made, "s0")
    made.run("DELETE FROM t", only="s0")
    polls = shipper(made, "s0")
    found = polls.poll()
    assert isinstance(found, Poll)
    return polls, found


def shards_with_it(made: Shards) -> list[str]:
    return [name for name in made.names if made.ask("SELECT 1 FROM t WHERE k = 'k'", shard=name)]


def is_blocked(made: Shards) -> bool:
    database = psycopg2.extensions.parse_dsn(made.index)["dbname"]
    return bool(made.ask(BLOCKED, database)[0][0])


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def without_key_share(monkeypatch: pytest.MonkeyPatch) -> None:
    real = holders._put
    monkeypatch.setattr(holders, "_put", lambda *given: real(*given).replace(" FOR KEY SHARE", ""))


@pytest.mark.sample(0)
@pytest.mark.parametrize("broken", [False, True])
def test_a_poll_leaves_a_holder_that_a_put_has_found(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    made = contrib_shards(2, *TABLE)
    if broken:
        without_key_share(monkeypatch)
    polls, found = given_up(made)
    with put(made, "s0", OWN) as there:
        polls.apply(found)
        there.commit()
    polls.close()
    if broken:
        made.run(OWN, only="s1")
        assert shards_with_it(made) == ["s0", "s1"]
        return
    # Not yet known whether it stays there.
    with pytest.raises(errors.SerializationFailure):
        made.run(OWN, only="s1")
    ship(made, "s0")
    with pytest.raises(errors.UniqueViolation):
        made.run(OWN, only="s1")


@pytest.mark.sample(0)
@pytest.mark.parametrize("broken", [False, True])
def test_a_put_waits_for_a_poll_that_takes_its_holder_away(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    made = contrib_shards(2, *TABLE)
    polls, found = given_up(made)
    outcome: list[str] = []
    threads: list[threading.Thread] = []
    ready = threading.Event()

    def writer() -> None:
        try:
            with put(made, "s0", OWN) as there:
                ready.set()
                # Where the poll waits for us, it is after its look at the intents.
                until(lambda: is_blocked(made))
                there.commit()
                outcome.append("done")
        except errors.SerializationFailure as error:
            outcome.append(str(error.pgcode))

    real = holders.execute

    def stepped(connection: Any, statement: str, *values: Any) -> Any:
        if statement.lstrip().startswith("DELETE FROM roir_data") and "_holder h" in statement:
            threads.append(in_background(writer))
            until(lambda: ready.is_set() or is_blocked(made))
        return real(connection, statement, *values)

    monkeypatch.setattr(holders, "execute", stepped)
    if broken:
        monkeypatch.setattr(holders, "LOCK", holders.LOCK.replace(" FOR UPDATE OF h SKIP LOCKED", ""))
    polls.apply(found)
    monkeypatch.setattr(holders, "execute", real)
    for one in threads:
        one.join()
    polls.close()
    assert outcome == (["done"] if broken else ["40001"])
    made.run(OWN, only="s1")
    assert shards_with_it(made) == (["s0", "s1"] if broken else ["s1"])


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("broken", [False, True])
def test_a_holder_that_a_poll_could_not_look_at_goes_with_a_later_one(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    made = contrib_shards(2, *TABLE)
    if broken:
        monkeypatch.setattr(holders, "LEAVE", WITHOUT_LEAVING)
    polls, found = given_up(made)
    with put(made, "s0", OWN) as there:
        polls.apply(found)
        there.rollback()
    # The outbox row that named the key is gone.
    polls.acknowledge()
    polls.close()
    for _ in range(2):
        ship(made, "s0")
    if broken:
        with pytest.raises(errors.UniqueViolation):
            made.run(OWN, only="s1")
        return
    made.run(OWN, only="s1")


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("broken", [False, True])
def test_a_key_is_not_free_before_what_was_announced_has_ended(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    made = contrib_shards(2, *TABLE)
    if broken:
        ignoring = "AND NOT EXISTS (SELECT FROM {intent} i WHERE {same_i_h})"
        assert ignoring in holders.RELEASE
        monkeypatch.setattr(holders, "RELEASE", holders.RELEASE.replace(ignoring, ""))
    enforced(made)
    made.run(f"{OWN}; DELETE FROM t", only="s0")
    # Its intent is committed here, and its own commit is still to come.
    [(later,)] = made.ask("SELECT pg_snapshot_xmax(pg_current_snapshot())::text", shard="s0")
    polls = shipper(made, "s0")
    found = polls.poll()
    made.ask("INSERT INTO roir_data.g1_intent (c1, c2, c3, xid) VALUES ('k', 's0', 1, %s::xid8)", later)
    polls.apply(found)
    polls.close()
    if broken:
        made.run(OWN, only="s1")
        return
    with pytest.raises(errors.SerializationFailure):
        made.run(OWN, only="s1")


@pytest.mark.by_hand("sweeps")
def test_keys_are_not_looked_over_beside_a_put_in_flight(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    generation_id = built(made)
    announce.announce(made.database, "public.ix", "server")
    with put(made, "s0", OWN) as there:
        with pytest.raises(LockNotAcquired):
            Enforcing(made.database, generation_id, patience_s=0.3).begin()
        there.commit()
    made.run(OWN, only="s1")
    with pytest.raises(DuplicatesFound):
        enforce.enforce_index(made.database, "public.ix")


@pytest.mark.sample(0)
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("stays", [False, True])
def test_a_key_that_comes_to_another_shard_while_it_is_looked_over(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch, stays: bool, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(fill_holders, "OF_ENTRIES", "SELECT WHERE %(first)s::tid = %(last)s::tid")
    made = contrib_shards(2, *TABLE)
    made.run(OWN, only="s0")
    generation_id = built(made)
    announce.announce(made.database, "public.ix", "server")
    apart.ship_all(made, generation_id)
    looking = Enforcing(made.database, generation_id, patience_s=5.0)
    looking.await_announced()
    looking.begin()
    # Its holder is there before that of the row which has the key.
    with put(made, "s1", OWN) as there:
        there.commit() if stays else there.rollback()
    if not stays:
        made.run(f"{OWN}; DELETE FROM t", only="s1")
    looking.fill()
    if broken:
        assert looking.switch() == 0
        return
    assert looking.switch() == 1
    apart.ship_all(made, generation_id)
    if stays:
        with pytest.raises(DuplicatesFound):
            looking.await_switch()
        return
    looking.await_switch()
    assert problem(made, generation_id) is None
    with pytest.raises(errors.UniqueViolation):
        made.run(OWN, only="s1")


@pytest.mark.sample(0)
def test_two_shards_that_take_a_key_at_once(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    enforced(made)
    refused: list[str | None] = []

    def second() -> None:
        try:
            made.run(OWN, only="s1")
        except psycopg2.Error as error:
            refused.append(error.pgcode)

    with put(made, "s0", OWN) as there:
        other = in_background(second)
        until(lambda: is_blocked(made))
        there.commit()
        other.join()
    assert refused == ["40001"]
    made.run("DELETE FROM t", only="s0")
    ship(made, "s0")
    with put(made, "s0", OWN) as there:
        other = in_background(second)
        until(lambda: is_blocked(made))
        with suppress(psycopg2.Error):
            there.rollback()
        other.join()
    assert (refused, shards_with_it(made)) == (["40001"], ["s1"])


@pytest.mark.sample(0)
def test_a_shard_that_names_another_one_settles_its_own_keys_alone(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    generation_id = enforced(made)
    polls = shipper(made, "s0")
    for statement in (OWN, "DELETE FROM t WHERE k = 'k'"):
        made.run(statement, only="s0")
        found = polls.poll()
        lies: dict[str, Any] = {
            name: tuple(one.replace(",s0,", ",s1,") for one in getattr(found, name)) for name in ("there", "gone")
        }
        assert lies != {name: getattr(found, name) for name in lies}
        polls.apply(replace(found, **lies))
    polls.close()
    assert problem(made, generation_id) is None
    assert not made.ask(f"SELECT 1 FROM {holders.table(generation_id)} WHERE c1 = 'k'")
    made.run(OWN, only="s1")
