"""A unique index over shards: what is refused, when, and how; where enforcement begins and ends."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.engine.shards import announce, enforce, registry
from airflow_roir.errors import DuplicatesFound
from servers.shards import Shards
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)",
    "INSERT INTO t SELECT i, format('{shard}-%s', i), i FROM generate_series(1, 20) i",
)


def built(made: Shards, **options: Any) -> int:
    """A unique index on t (k), published; its generation."""
    for name, dsn in made.dsns.items():
        registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    prepared, run = apart.begin(made, unique=True, **options)
    apart.finish_all(made, run)
    return prepared.generation_id


def enforced(made: Shards) -> int:
    generation_id = built(made)
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    return generation_id


def problem(made: Shards, generation_id: int) -> Any:
    return made.ask("SELECT roir.unique_problem(%s)", generation_id)[0][0]


def test_a_key_of_another_shard_is_refused_as_postgresql_does(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    generation_id = enforced(made)
    assert problem(made, generation_id) is None
    with closing(psycopg2.connect(made.dsns["s1"])) as there, there.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (100, 's0-1', 1)")
        with pytest.raises(errors.UniqueViolation) as refused:
            there.commit()
    said = refused.value.diag
    assert said.message_primary == 'duplicate key value violates unique constraint "ix"'
    assert said.message_detail == "Key (k)=(s0-1) already exists in shard s0."
    assert (said.constraint_name, said.table_name, said.schema_name) == ("ix", "t", "public")
    made.run("INSERT INTO t VALUES (101, 'new', 1)", only="s1")
    with pytest.raises((errors.UniqueViolation, errors.SerializationFailure)):
        made.run("INSERT INTO t VALUES (101, 'new', 1)", only="s0")
    apart.ship_all(made, generation_id)
    with pytest.raises(errors.UniqueViolation):
        made.run("UPDATE t SET k = 'new' WHERE id = 1", only="s0")
    made.run("DELETE FROM t WHERE k = 'new'", only="s1")
    with pytest.raises(errors.SerializationFailure):
        made.run("UPDATE t SET k = 'new' WHERE id = 1", only="s0")
    apart.ship_all(made, generation_id)
    made.run("UPDATE t SET k = 'new' WHERE id = 1", only="s0")
    apart.ship_all(made, generation_id)
    apart.assert_exact(made, generation_id)


def test_duplicates_are_listed_and_keep_it_from_being_enforced(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    made.run("INSERT INTO t VALUES (50, 'both', 1), (51, NULL, 1)")
    generation_id = built(made)
    announce.announce(made.database, "public.ix", "server")
    with pytest.raises(DuplicatesFound, match=r"roir duplicates public\.ix lists them"):
        enforce.enforce_index(made.database, "public.ix")
    assert made.ask("SELECT key, primary_key, partition FROM roir.duplicate WHERE healed_at IS NULL ORDER BY id") == [
        (["both"], ["s0", "50"], "s0"),
        (["both"], ["s1", "50"], "s1"),
    ]
    assert "of the unique index" in problem(made, generation_id)
    # Nothing is refused: what is wrong can be changed.
    made.run("UPDATE t SET v = 2 WHERE k = 'both'")
    made.run("DELETE FROM t WHERE k = 'both'", only="s1")
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    assert problem(made, generation_id) is None
    assert made.ask("SELECT count(*) FROM roir.duplicate WHERE healed_at IS NULL") == [(0,)]
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (60, 'both', 1)", only="s1")
