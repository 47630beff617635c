"""Obstacles for users: messages about shards that are away, differ, or hold what the index server can't."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import dry_run
from airflow_roir.engine.database import execute
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.engine.verify import record
from airflow_roir.errors import InvalidInput, RoirError, ShardUnreachable
from airflow_roir.options import BuildOptions, VerifyOptions
from airflow_roir.shards import registry, shard
from airflow_roir.shards.ship.shipping import Shipper, ship_once
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.laid import lay

pytestmark = pytest.mark.sample(2)

MOODS = "CREATE TYPE mood AS ENUM ('ok', 'sad')"
MOODY = "CREATE TABLE t (id int PRIMARY KEY, k text, v mood)"


def roir(made: Shards, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "airflow_roir.cli", *arguments]
    environment = os.environ | {"ROIR_DSN": made.index}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_an_error_of_a_shards_server_names_the_shard(shards: Make) -> None:
    made = shards(1)
    added = registry.add(made.database, "s0", made.dsns["s0"])
    with added.database("t", made.database.limits).transaction() as connection:
        with pytest.raises(DBAPIError) as told:
            execute(connection, "SELECT none")
        assert told.value.detail == ['shard "s0"']
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none'")
    with made.database.transaction() as connection:
        found = shard.find(connection, "s0")
    with (
        pytest.raises(DBAPIError, match='shard "s0"'),
        found.database("t", made.database.limits).transaction() as connection,
    ):
        pass


@pytest.mark.sample(0)
def test_a_command_names_the_shard_that_is_away(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    laid.ship()
    made.ask("UPDATE roir.generation SET status = 'active'")
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's1'")
    ended = roir(made, "announce", "ix", "--by", "client")
    assert ended.returncode == 1
    assert ended.stderr.startswith('roir: shard "s1": connection to server')
    assert "\\t" not in ended.stderr
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's0'")
    with pytest.raises(ShardUnreachable) as told:
        record.begin(laid.database, "ix", VerifyOptions(), "test")
    assert re.fullmatch(
        r"the verification can't begin: shard \"s0\" can't be reached: .*nowhere.*; shard \"s1\" can't be reached: .*"
        r"\. Nothing was changed\. Begin it once all shards answer, .*",
        str(told.value),
    )
    assert made.ask("SELECT count(*) FROM roir.shard WHERE problem IS NOT NULL") == [(2,)]
    assert made.ask("SELECT FROM roir.operation") == []


def test_a_value_that_the_index_server_lacks_is_told_by_the_plan(shards: Make) -> None:
    made = apart.add_all(shards(1, MOODS, MOODY, "INSERT INTO t VALUES (1, 'a', 'sad')", "ANALYZE t"))
    made.ask("CREATE TYPE mood AS ENUM ('ok')")
    wanted = IndexDefinition.parse("public.ix", "t", "k", "v", shards=made.names)
    with pytest.raises(InvalidInput, match=r'of shard "s0": invalid input value for enum .*: "sad"\. Give the index'):
        dry_run.run(made.database, wanted, BuildOptions())


def test_a_value_that_the_index_server_lacks_is_named_until_it_has_it(shards: Make) -> None:
    made = shards(2, "CREATE TYPE mood AS ENUM ('ok')", MOODY)
    made.ask("CREATE TYPE mood AS ENUM ('ok')")
    laid = lay(made)
    made.run("ALTER TYPE mood ADD VALUE 'sad'")
    made.run("INSERT INTO t VALUES (1, 'a', 'sad')", only="s0")
    made.run("INSERT INTO t VALUES (1, 'b', 'ok')", only="s1")
    with pytest.raises(RoirError, match=r'^shard "s0": .* index public\.ix: invalid input value for enum .*they wait$'):
        ship_once(Shipper(laid.database))
    assert [row[0] for row in laid.base()] == ["b"]
    [found] = indexes(laid.database)
    assert [one.shard for one in found.shards if one.problem is not None] == ["s0"]
    made.ask("ALTER TYPE mood ADD VALUE 'sad'")
    ship_once(Shipper(laid.database))
    laid.assert_exact()
    [found] = indexes(laid.database)
    assert [one.problem for one in found.shards] == [None, None]


def test_who_has_shards_is_not_told_to_ship_one_that_is_away_nor_a_size_of_the_source(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    laid.ship()
    made.ask("UPDATE roir.shard SET problem = 'gone'")
    [found] = indexes(laid.database)
    assert str(found.shards[0]).endswith("behind, and has no shipper")
    assert found.source_bytes == 0


def test_the_plan_names_the_locked_table_as_it_is(shards: Make) -> None:
    made = apart.add_all(shards(1))
    ended = roir(made, "plan", "ix", "--table", "t", "--keys", "k", "--shards", "s0")
    assert '"public"."t" in each shard (prepare)' in ended.stdout


def test_no_login_to_the_index_server_stays_in_a_shard_that_is_removed(contrib_shards: Make) -> None:
    made = contrib_shards(1)
    registry.add(made.database, "s0", made.dsns["s0"])
    name = '"roir index server 01234567 (see roir announce)"'
    with closing(psycopg2.connect(made.dsns["s0"])) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE EXTENSION postgres_fdw; CREATE SERVER own FOREIGN DATA WRAPPER postgres_fdw")
        cursor.execute(f"CREATE SERVER {name} FOREIGN DATA WRAPPER postgres_fdw")
        cursor.execute(f"CREATE USER MAPPING FOR CURRENT_USER SERVER {name} OPTIONS (user 'u', password 'hush')")
        connection.commit()
    registry.remove(made.database, "s0")
    assert made.ask("SELECT srvname FROM pg_foreign_server", shard="s0") == [("own",)]
    assert made.ask("SELECT FROM pg_user_mappings", shard="s0") == []
