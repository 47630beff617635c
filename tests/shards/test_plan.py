"""`roir plan` over shards: each line is of shards, and each shard's objections come with its name."""

from __future__ import annotations

import json

import pytest

from airflow_roir.definition import IndexDefinition, parse_name
from airflow_roir.engine import prepare
from airflow_roir.engine.database import execute
from airflow_roir.engine.forecast import locks, objections
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.engine.source import catalog
from airflow_roir.errors import InvalidInput
from airflow_roir.options import BuildOptions
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import dry_run
from servers.shards import Shards
from tests.shards import apart
from tests.shards.announced import of_shard
from tests.shards.conftest import Make
from tests.shards.test_attacks_user import roir

pytestmark = pytest.mark.sample(1)

ROWS = "INSERT INTO t SELECT i, i % 7, i FROM generate_series(1, 100) i"
ASKED = ("plan", "ix", "--table", "t", "--keys", "k", "--shards", "s0,s1,s2")


def definition(made: Shards) -> IndexDefinition:
    return IndexDefinition.parse("public.ix", "t", "k", None, shards=made.names)


def test_what_is_refused_is_told_of_each_shard(shards: Make) -> None:
    made = apart.add_all(shards(3))
    assert not objections.find(made.database, definition(made), BuildOptions())
    made.run("CREATE PUBLICATION p FOR ALL TABLES", only="s0")
    made.run("ALTER TABLE t RENAME TO gone", only="s1")
    with pytest.raises(InvalidInput, match=r'^shard "s0": publication "p" is for all tables'):
        prepare.prepare(made.database, definition(made), BuildOptions(), "test")
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's2'")
    found = objections.find(made.database, definition(made), BuildOptions()).refused
    assert [one.split(":")[0].split(" can't")[0] for one in found] == ['shard "s0"', 'shard "s1"', 'shard "s2"']
    ended = roir(made, *ASKED)
    assert ended.returncode == 2
    assert [ended.stderr.count(f'refused: shard "s{n}"') for n in range(3)] == [1, 1, 1]


@pytest.mark.by_hand("sweeps")
def test_each_line_is_of_shards(shards: Make) -> None:
    made = apart.add_all(shards(3))
    made.run(ROWS, "ANALYZE t")
    made.ask("UPDATE roir.shard SET index_dsn = 'dbname=x user=y' WHERE name = 's2'")
    lines = dict(line.split("  ", 1) for line in roir(made, *ASKED).stdout.splitlines() if line[0] != " ")
    assert "CONCURRENTLY" not in lines["expects"]
    assert "2 workers of the build at most in a shard" in lines["sessions"]
    assert lines["throttle"].strip().startswith("of the index server: ")
    told = lines["strict reads"]
    assert 'needs more: shard "s0" has no address of the index server' in told
    needs = json.loads(roir(made, *ASKED, "--json").stdout)["announce_by_server_needs"]
    assert list(needs) == ["s0", "s1", "s2"]
    assert [any("ROIR_INDEX_DSN" in one for one in needs[name]) for name in needs] == [True, True, False]


@pytest.mark.sample(0)
def test_partitions_keep_an_index_from_strict_reads(shards: Make) -> None:
    made = apart.add_all(
        shards(
            3,
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE t0 PARTITION OF t DEFAULT",
        )
    )
    assert "strict reads     not possible: the table has partitions" in roir(made, *ASKED).stdout


@pytest.mark.sample(0)
def test_the_locks_are_those_that_are_taken(shards: Make) -> None:
    """By the events of the capture's DDL, which say what the table is locked with besides."""
    made = apart.add_all(shards(1))
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    [(name,)] = made.ask("SELECT outbox FROM roir.feed")
    with of_shard(made, "s0").transaction() as connection:
        source = catalog.read_source(connection, parse_name("public.t", "table"))
        foreseen = dry_run.foresee(source, definition(made).name, "rebuild", BuildOptions(), DEFAULT)
        told = {lock.phase: lock.mode for lock in foreseen if lock.of != locks.VIEW}
        execute(connection, f"DROP TRIGGER {outbox.trigger(name)} ON public.t")
        mode = "SELECT mode FROM pg_locks WHERE relation = 'public.t'::regclass AND pid = pg_backend_pid() AND granted"
        strongest = {one.removesuffix("Lock") for one in execute(connection, mode).scalars()}
        assert "AccessExclusive" in strongest
        connection.rollback()
    assert told == {
        "plan": locks.ACCESS_SHARE,
        "prepare": locks.SHARE_ROW_EXCLUSIVE,
        "build": locks.ACCESS_SHARE,
        "verify": locks.ACCESS_SHARE,
        "clean-up": locks.ACCESS_EXCLUSIVE,
    }
