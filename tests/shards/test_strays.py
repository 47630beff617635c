"""Captures in a shard for an index that the index server doesn't know are found, reported and removed.

Such a capture keeps writers from committing if it announces into a table that doesn't exist.
"""

from __future__ import annotations

from contextlib import suppress

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.engine import clean_up
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from airflow_roir.shards.capture import strays
from airflow_roir.shards.shard import find
from airflow_roir.shards.unique import enforce
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_lost_commits import Copies, copies  # noqa: F401
from tests.shards.test_unique_attacks import TABLE, enforced

pytestmark = pytest.mark.sample(1)
WRITE = "INSERT INTO t SELECT 1 + coalesce(max(id), 0), '{number}-' || 1 + coalesce(max(id), 0), 0 FROM t"
OUTBOXES = "SELECT count(*) FROM roir_shard.outbox"


def rebuilt(made: Shards) -> int:
    prepared, run = apart.begin(made, keys=None, include=None, table=None)
    apart.finish_all(made, run)
    return prepared.generation_id


def lost_here(made: Shards, copies: Copies) -> None:  # noqa: F811
    """The index server loses a rebuild, whose generation the shards announce to."""
    enforced(made)
    before = copies.keep(made.index)
    rebuilt(made)
    copies.restore(made.index, before)


def restored_there(made: Shards, copies: Copies) -> None:  # noqa: F811
    """A shard comes from a backup of before a rebuild whose predecessor is gone by now."""
    enforced(made)
    before = copies.keep(made.dsns["s0"])
    rebuilt(made)
    made.ask("UPDATE roir.generation SET drop_after = clock_timestamp() WHERE status = 'retired'")
    assert clean_up.clean_up(made.database).generations_dropped == 1
    copies.restore(made.dsns["s0"], before)


def is_kept_out(made: Shards, shard: str) -> bool:
    with suppress(errors.UndefinedTable):
        made.run(WRITE, only=shard)
        return False
    return True


@pytest.mark.by_hand("sweeps")
def test_a_failover_of_the_index_server_that_loses_a_rebuild_keeps_no_writer_out(
    contrib_shards: Make,
    copies: Copies,  # noqa: F811
) -> None:
    made = contrib_shards(2, TABLE)
    lost_here(made, copies)
    assert [is_kept_out(made, name) for name in made.names] == [True, True]
    assert "captures for generations that this server doesn't know" in str(registry.probe(made.database, "s0"))
    told: list[str] = []
    announce.announce(made.database, "public.ix", "server", told.append)
    assert sum("doesn't know is removed" in line for line in told) == 2
    assert enforce.enforce_index(made.database, "public.ix")
    made.run(WRITE)
    assert registry.probe(made.database, "s0") is None
    assert [made.ask(OUTBOXES, shard=name) for name in made.names] == [[(1,)], [(1,)]]


@pytest.mark.by_hand("sweeps")
def test_a_shard_from_an_old_backup_announces_to_no_generation_that_is_gone(
    contrib_shards: Make,
    copies: Copies,  # noqa: F811
) -> None:
    made = contrib_shards(2, TABLE)
    restored_there(made, copies)
    assert is_kept_out(made, "s0")
    told: list[str] = []
    registry.add(made.database, "s0", made.dsns["s0"], report=told.append)
    assert len(told) == 1
    made.run(WRITE)
    assert made.ask(OUTBOXES, shard="s0") == [(0,)]


@pytest.mark.by_hand("sweeps")
def test_a_shard_that_comes_back_after_it_was_forgotten(contrib_shards: Make) -> None:
    made = contrib_shards(3, TABLE)
    enforced(made)
    prepared, run = apart.begin(made, keys=None, include=None, table=None, shards=["s0", "s1"])
    apart.finish_all(made, run)
    made.ask("UPDATE roir.generation SET drop_after = clock_timestamp() WHERE status = 'retired'")
    # Away from here, and not from its writers.
    made.ask("UPDATE roir.shard SET dsn = 'host=127.0.0.1 port=1' WHERE name = 's2'")
    assert clean_up.clean_up(made.database).waiting
    said: list[str] = []
    registry.remove(made.database, "s2", True, said.append)
    assert "add it again, which removes it: roir shard add s2" in said[-1]
    assert clean_up.clean_up(made.database).waiting == []
    assert is_kept_out(made, "s2")
    registry.add(made.database, "s2", made.dsns["s2"])
    made.run(WRITE)
    registry.remove(made.database, "s2")
    assert made.ask("SELECT to_regnamespace('roir_shard')", shard="s2") == [(None,)]
    apart.ship_all(made, prepared.generation_id)
    apart.assert_exact(made, prepared.generation_id)


@pytest.mark.sample(0)
def test_what_is_another_index_servers_is_left(contrib_shards: Make) -> None:
    made = contrib_shards(1, TABLE)
    enforced(made)
    made.run(
        "INSERT INTO roir_shard.outbox (name, server, index_name, source, entry) VALUES ('o_x', 'y', 'z', 0, '{}')"
    )
    with made.database.transaction() as connection:
        shard = find(connection, "s0")
    assert strays.find(made.database, shard) == []
    made.run("UPDATE roir_shard.outbox SET server = (SELECT server FROM roir_shard.outbox WHERE name <> 'o_x')")
    assert strays.find(made.database, shard) == ["o_x"]
    strays.remove(made.database, shard, 5.0)
    assert made.ask(OUTBOXES, shard="s0") == [(1,)]
    made.run(WRITE)


@pytest.mark.sample(0)
def test_announcing_that_the_index_server_has_forgotten_is_turned_off(
    contrib_shards: Make,
    copies: Copies,  # noqa: F811
) -> None:
    """A failover lost `roir announce`: the announcing login has no rights on the index server."""
    made = contrib_shards(2, TABLE)
    made.ask("DROP ROLE IF EXISTS forgotten_announcer")
    made.ask("CREATE ROLE forgotten_announcer LOGIN")
    for name, dsn in made.dsns.items():
        index = psycopg2.extensions.make_dsn(made.index, user="forgotten_announcer")
        registry.add(made.database, name, dsn, index_dsn=index)
    _, run = apart.begin(made, unique=True)
    apart.finish_all(made, run)
    before = copies.keep(made.index)
    announce.announce(made.database, "public.ix", "server")
    copies.restore(made.index, before)
    with pytest.raises(errors.InsufficientPrivilege):
        made.run(WRITE)
    assert announce.announce(made.database, "public.ix", None) == []
    made.run(WRITE)
    made.ask("DROP OWNED BY forgotten_announcer")
    made.ask("DROP ROLE forgotten_announcer")
