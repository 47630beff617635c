"""Names of shards, tables, columns and indexes that must be quoted everywhere."""

from __future__ import annotations

import json

import pytest

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.lifecycle import verify
from airflow_roir.shards import registry
from airflow_roir.shards.announce import announce
from servers.shards import Shards
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make
from tests.shards.reading import create_servers

# Each sign that means something in SQL, in a placeholder, in a pattern, in a list of options.
HOSTILE = """a"b'c%s\\d%%e.f:g$h{i}"""
NAMES = ('"', "'", "%", "\\", "%(outbox)s", "S0", "ä ö", HOSTILE)


def renamed(made: Shards, *names: str) -> Shards:
    """The same databases as other shards."""
    return Shards(made.index, dict(zip(names, made.dsns.values(), strict=True)))


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", NAMES)
def test_a_shard_may_be_called_anything(shards: Make, name: str) -> None:
    plain = shards(2, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t VALUES (1, 'a', 1)")
    made = apart.add_all(renamed(plain, name, f"{name}2"))
    prepared, run = apart.begin(made, shards=made.names)
    apart.finish_all(made, run)
    made.run("UPDATE t SET v = 2", "INSERT INTO t VALUES (2, 'b', 2)")
    apart.ship_all(made, prepared.generation_id)
    assert apart.assert_exact(made, prepared.generation_id) == 4
    assert verify(made.database, "public.ix").found == 0


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
def test_strict_reads_of_names_that_must_be_quoted(contrib_shards: Make, by: str) -> None:
    schema, table, key, value = (quote(f"{one} {HOSTILE}") for one in "STKV")
    source = f"{schema}.{table}"
    made = contrib_shards(
        2,
        f"CREATE SCHEMA {schema}",
        f"CREATE TABLE {source} (id int, {key} text, {value} int, {key.lower()} int, PRIMARY KEY (id, {key.lower()}))",
        # Names that differ in case alone.
        f"CREATE TABLE {schema}.{table.lower()} (id int PRIMARY KEY)",
        f"INSERT INTO {source} SELECT i, 'k' || i % 3, i, 1 FROM generate_series(1, 9) i",
    )
    made = renamed(made, HOSTILE, f"{HOSTILE}2")
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    index = f"public.{quote(f'I {HOSTILE}')}"
    prepared, run = apart.begin(made, key, value, source, index=index, shards=made.names)
    apart.finish_all(made, run)
    create_servers(made)
    announce.announce(made.database, index, by)
    apart.ship_all(made, prepared.generation_id)
    there = Database(made.index)
    for dsn in made.dsns.values():
        with Database(dsn).connect() as here, there.connect() as other:
            execute(here, f"UPDATE {source} SET {key} = 'new' WHERE id = 3")
            assert announce_by_client(here, other) == (2 if by == "client" else 0)
            here.commit()
    asked = f"SELECT count(*), count(DISTINCT shard) FROM roir.strict(NULL::{index.replace('%', '%%')}, %s)"
    assert made.ask(asked, json.dumps({f"K {HOSTILE}": "new"})) == [(2, 2)]
    apart.ship_all(made, prepared.generation_id)
    assert apart.assert_exact(made, prepared.generation_id) == 18
    assert made.ask(asked, json.dumps({f"K {HOSTILE}": "new"})) == [(2, 2)]
    assert verify(made.database, index).found == 0
