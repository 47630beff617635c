"""A unique index over shards that go, come back, are restored, and an index server that fails over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.engine import install, lifecycle, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.errors import DuplicatesFound, InvalidInput, NotStrict
from airflow_roir.options import VerifyOptions
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce, foreign, intents
from airflow_roir.shards.ship.shipping import Shipper
from airflow_roir.shards.unique import enforce, holders
from servers import contrib as contribs
from servers.killable import Server, running_server
from servers.shards import Shards
from tests.engine import interposed
from tests.engine.pair import pair
from tests.engine.test_replication import replayed, wait_until
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make
from tests.shards.test_lost_commits import Copies, copies  # noqa: F401
from tests.shards.test_unique import problem
from tests.shards.test_unique_attacks import TABLE, enforced, holders_of, settle

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def old_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each poll takes along all intents that there are."""
    monkeypatch.setattr(intents, "look", partial(intents.look, old_s=0.0))


def repaired(made: Shards) -> Any:
    """Repairs by a verification, while a shipper runs; returns its report."""
    with Shipper(made.database, every_s=0.1).running():
        return verify(made.database, "public.ix", VerifyOptions(repair=True))


@pytest.mark.by_hand("sweeps")
def test_a_shard_from_an_old_backup_whose_key_is_taken_is_listed_and_healed(
    contrib_shards: Make,
    copies: Copies,  # noqa: F811
) -> None:
    made = contrib_shards(2, TABLE)
    generation_id = enforced(made)
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
    apart.ship_all(made, generation_id)
    before = copies.keep(made.dsns["s0"])
    made.run("DELETE FROM t", only="s0")
    settle(made, generation_id)
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s1")
    apart.ship_all(made, generation_id)
    copies.restore(made.dsns["s0"], before)
    apart.ship_all(made, generation_id)
    assert "has lost its last commits" in problem(made, generation_id)
    # Nothing is refused, what both have can be changed.
    made.run("UPDATE t SET v = 1")
    announce.announce(made.database, "public.ix", "server")
    # It is no use to wait.
    with pytest.raises(NotStrict, match=r"roir verify public\.ix --repair ends that"):
        enforce.enforce_index(made.database, "public.ix")
    assert repaired(made).is_exact
    with pytest.raises(DuplicatesFound):
        enforce.enforce_index(made.database, "public.ix")
    assert made.ask("SELECT key, partition FROM roir.duplicate WHERE healed_at IS NULL ORDER BY id") == [
        (["a"], "s0"),
        (["a"], "s1"),
    ]
    made.run("DELETE FROM t", only="s0")
    assert enforce.enforce_index(made.database, "public.ix")
    assert (problem(made, generation_id), holders_of(made, generation_id)) == (None, ["s1"])


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_is_gone_for_good_keeps_the_rest_from_nothing(contrib_shards: Make) -> None:
    """The index was rebuilt without it; only the generation that a revert would show has it."""
    made = contrib_shards(3, TABLE)
    first = enforced(made)
    made.run("INSERT INTO t VALUES (1, 'a{number}', 0)")
    apart.ship_all(made, first)
    prepared, run = apart.begin(made, keys=None, include=None, table=None, shards=["s0", "s1"])
    apart.finish_all(made, run)
    second = prepared.generation_id
    # As long as both are enforced, keys are free in both.
    with pytest.raises(errors.UniqueViolation, match="already exists in shard s2"):
        made.run("INSERT INTO t VALUES (5, 'a2', 0)", only="s0")
    made.ask("UPDATE roir.shard SET dsn = 'host=127.0.0.1 port=1' WHERE name = 's2'")
    told: list[str] = []
    announce.announce(made.database, "public.ix", "server", told.append)
    assert any("generation 1: left, since readers see another generation" in line for line in told)
    assert enforce.enforce_index(made.database, "public.ix", told.append)
    assert any(line.startswith("generation 1, which a revert would show, isn't enforced") for line in told)
    assert problem(made, second) is None
    assert problem(made, first) is not None
    made.run("INSERT INTO t VALUES (5, 'a2', 0)", only="s0")
    with pytest.raises(errors.UniqueViolation, match="already exists in shard s1"):
        made.run("INSERT INTO t VALUES (6, 'a1', 0)", only="s0")
    revert.revert(made.database, "public.ix", "test")
    apart.ship_all(made, second)
    assert problem(made, first) is not None


@pytest.mark.by_hand("sweeps")
def test_a_rebuild_over_one_more_shard_says_how_it_goes_on(contrib_shards: Make) -> None:
    """The new shard has a key of the others; those are enforced all the while."""
    made = contrib_shards(3, TABLE)
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    first = enforced(made, shards=["s0", "s1"])
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s2")
    apart.ship_all(made, first)
    prepared, run = apart.begin(made, keys=None, include=None, table=None, shards=made.names)
    with pytest.raises(DuplicatesFound, match=r"then: roir resume public\.ix$"):
        apart.finish_all(made, run)
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (7, 'a', 0)", only="s1")
    made.run("DELETE FROM t", only="s2")
    lifecycle.run_phases(made.database, run)
    assert (problem(made, first), problem(made, prepared.generation_id)) == (None, None)
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (7, 'a', 0)", only="s2")


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("moment", ["SELECT ARRAY[r.c1", "SELECT ARRAY[h.c1"])
def test_a_verification_finds_nothing_where_enforcement_ends_meanwhile(
    contrib_shards: Make, moment: str, again: bool
) -> None:
    """After the end, polls remove entries and leave their holders; if enforcement begins again, there is no holder at
    first."""
    made = contrib_shards(2, TABLE)
    made.run("INSERT INTO t SELECT i, '{number}-' || i, 0 FROM generate_series(1, 9) i")
    generation_id = enforced(made)

    def end() -> None:
        other = Database(made.index, "roir other")
        with other.transaction() as connection:
            holders.end(connection, generation_id, "it is tried", "test")
        made.run("DELETE FROM t WHERE id > 5")
        apart.ship_all(made, generation_id)
        if again:
            with other.transaction() as connection:
                holders.begin(connection, generation_id)

    database = made.database
    with interposed.before(database, moment, end):
        found = verify(database, "public.ix", VerifyOptions(repair=True))
    assert (found.damaged, found.duplicate) == (0, 0)
    assert made.ask("SELECT unique_mode FROM roir.generation") == [("count" if again else "off",)]


@pytest.mark.by_hand("sweeps")
def test_keys_are_put_whatever_role_replication_plays_on_the_index_server(contrib_shards: Make) -> None:
    made = contrib_shards(2, TABLE)
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
    enforced(made)
    name = psycopg2.extensions.parse_dsn(made.index)["dbname"]
    made.ask(f"ALTER DATABASE {name} SET session_replication_role = replica")
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s1")


@pytest.mark.sample(0)
def test_a_pooler_that_drops_what_sessions_are_given_is_told(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PgBouncer does with `options`: a commit there might be lost, and writers wait for each other for ever."""
    made = contrib_shards(1, TABLE)
    registry.add(made.database, "s0", made.dsns["s0"], index_dsn=index_dsn(made))
    _, run = apart.begin(made, unique=True)
    apart.finish_all(made, run)
    monkeypatch.setattr(foreign, "OPTIONS", "-c statement_timeout=30s")
    with pytest.raises(InvalidInput, match=r"lock_timeout is 0\): a pooler between them ignores options"):
        announce.announce(made.database, "public.ix", "server")
    monkeypatch.undo()
    announce.announce(made.database, "public.ix", "server")


@pytest.fixture(scope="module")
def primary(pg: int) -> Iterator[Server]:
    with running_server(contribs.find(pg) or contribs.ensure(pg)) as server:
        yield server


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("lost", [False, True])
def test_a_replica_of_the_index_server_takes_over(contrib_shards: Make, primary: Server, lost: bool) -> None:
    """The replica has all commits, or lacks the last ones, by which keys were given up and taken."""
    of_shards = contrib_shards(2, TABLE)
    name = f"taken_over_{lost}".lower()
    primary.execute(f"CREATE DATABASE {name}")
    install.init(Database(primary.dsn(name), "roir"))
    with pair(primary, primary.dsn(name)) as both:
        made = Shards(both.dsn, of_shards.dsns)
        for shard, dsn in made.dsns.items():
            registry.add(made.database, shard, dsn, index_dsn=both.dsn)
        generation_id = enforced(made)
        made.run("INSERT INTO t VALUES (1, 'a{number}', 0)")
        apart.ship_all(made, generation_id)
        replayed(both.here, both.there)
        standby = Shards(both.there, of_shards.dsns)
        assert "this server is a standby" in problem(standby, generation_id)
        with closing(psycopg2.connect(made.dsns["s1"])) as writer:
            if lost:
                both.lose()
            made.run("INSERT INTO t VALUES (2, 'new', 0); DELETE FROM t WHERE id = 1", only="s0")
            apart.ship_all(made, generation_id)
            made.run("INSERT INTO t VALUES (3, 'a0', 0)", only="s1")
            writer.cursor().execute("INSERT INTO t VALUES (4, 'open', 0); SET CONSTRAINTS ALL IMMEDIATE")
            if not lost:
                replayed(both.here, both.there)
            both.fail_over()
            with pytest.raises(psycopg2.Error):
                writer.commit()
        wait_until(lambda: answers(made), "the replica")
        assert "was promoted or recovered" in problem(made, generation_id)
        apart.ship_all(made, generation_id)
        # Keys of lost commits are free until enforcement is checked again.
        made.run("INSERT INTO t VALUES (5, 'new', 0)", only="s1")
        made.run("DELETE FROM t WHERE id = 5", only="s1")
        announce.announce(made.database, "public.ix", "server")
        if lost:
            with pytest.raises(NotStrict, match="this server has lost its last commits"):
                enforce.enforce_index(made.database, "public.ix")
            assert repaired(made).is_exact
        assert enforce.enforce_index(made.database, "public.ix")
        settle(made, generation_id)
        assert (problem(made, generation_id), holders_of(made, generation_id)) == (None, ["s0", "s1", "s1"])
        apart.assert_exact(made, generation_id)
        for key, other in (("new", "s1"), ("a0", "s0")):
            with pytest.raises(errors.UniqueViolation):
                made.run(f"INSERT INTO t VALUES (9, '{key}', 0)", only=other)
        made.run("INSERT INTO t VALUES (9, 'open', 0)", only="s0")


def answers(made: Shards) -> bool:
    try:
        return bool(made.ask("SELECT 1"))
    except psycopg2.Error:
        return False
