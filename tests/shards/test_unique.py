"""A unique index over shards: what is refused, when, and how; where enforcement begins and ends."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine.drop import drop_index
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.unique import duplicate_report
from airflow_roir.engine.unique.statements import statements
from airflow_roir.errors import DuplicatesFound, InvalidInput
from airflow_roir.options import VerifyOptions
from airflow_roir.shards import registry, sources
from airflow_roir.shards.announce import announce
from airflow_roir.shards.shard import Shard
from airflow_roir.shards.unique import enforce, uniqueness
from servers.shards import Shards
from tests.shards import apart
from tests.shards.announced import index_dsn, of_shard
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(3)
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
    with made.database.transaction() as connection:
        found = duplicate_report.of_index(connection, "public.ix")
        [group] = duplicate_report.groups(connection, found)
    _, statement = statements(found, group)
    assert sorted(made.ask(statement)) == [("both", "s0", 50, 1), ("both", "s1", 50, 1)]
    assert problem(made, generation_id) == (
        "in several shards 2 rows share 1 key (roir duplicates public.ix); when that is repaired: "
        "roir announce INDEX --by server, which checks the keys"
    )
    # Nothing is refused: what is wrong can be changed.
    made.run("UPDATE t SET v = 2 WHERE k = 'both'")
    made.run("DELETE FROM t WHERE k = 'both'", only="s1")
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    assert problem(made, generation_id) is None
    assert made.ask("SELECT count(*) FROM roir.duplicate WHERE healed_at IS NULL") == [(0,)]
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (60, 'both', 1)", only="s1")


# The table's definition in one shard, and the objection to it.
REFUSED = {
    "nothing": ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "no unique index of its own"),
    "partial": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int); CREATE UNIQUE INDEX ON t (k) WHERE v > 0",
        "no unique index of its own",
    ),
    "expression": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int); CREATE UNIQUE INDEX ON t (lower(k))",
        "no unique index of its own",
    ),
    "more columns": ("CREATE TABLE t (id int PRIMARY KEY, k text, v int, UNIQUE (k, v))", "no unique index of its own"),
    "not valid": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int); CREATE UNIQUE INDEX i ON t (k); "
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'i'::regclass",
        "no unique index of its own",
    ),
    "excluded": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, EXCLUDE USING btree (k WITH =))",
        "no unique index of its own",
    ),
    "partitions": (
        "CREATE TABLE t (id int, k text, v int, PRIMARY KEY (id)) PARTITION BY HASH (id); "
        "CREATE TABLE p PARTITION OF t FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
        "has partitions",
    ),
    "collation": (
        # Not every server has ICU.
        "CREATE COLLATION c (locale = 'C'); CREATE TABLE t (id int PRIMARY KEY, k text COLLATE c UNIQUE, v int); "
        "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'c'",
        "equality each server's own libraries decide",
    ),
    "citext": (
        "CREATE EXTENSION citext; CREATE TABLE t (id int PRIMARY KEY, k citext UNIQUE, v int)",
        "equality each server's own libraries decide",
    ),
    "citext in a domain": (
        "CREATE EXTENSION citext; CREATE DOMAIN d AS citext; CREATE TABLE t (id int PRIMARY KEY, k d UNIQUE, v int)",
        "equality each server's own libraries decide",
    ),
}
TAKEN = {
    "deferrable": "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE DEFERRABLE INITIALLY DEFERRED, v int)",
    "another operator class": "CREATE TABLE t (id int PRIMARY KEY, k text, v int); "
    "CREATE UNIQUE INDEX ON t (k text_pattern_ops) INCLUDE (v)",
    "nulls": "CREATE TABLE t (id int PRIMARY KEY, k text, v int); CREATE UNIQUE INDEX ON t (k) NULLS NOT DISTINCT",
    "another collation": 'CREATE TABLE t (id int PRIMARY KEY, k text COLLATE "C", v int); '
    'CREATE UNIQUE INDEX ON t (k COLLATE "POSIX")',
}


@pytest.mark.parametrize("what", REFUSED)
def test_tables_that_it_cannot_be_over(contrib_shards: Make, what: str) -> None:
    table, said = REFUSED[what]
    made = contrib_shards(1, *table.split("; "))
    with pytest.raises(InvalidInput, match=said):
        built(made)
    assert made.ask("SELECT count(*) FROM roir.index") == [(0,)]


@pytest.mark.parametrize("what", TAKEN)
def test_unique_indexes_that_will_do(contrib_shards: Make, what: str) -> None:
    made = contrib_shards(1, *TAKEN[what].split("; "))
    registry.add(made.database, "s0", made.dsns["s0"])
    with of_shard(made, "s0").transaction() as connection:
        source = sources.read(connection, QualifiedName("public", "t"))
        uniqueness.check(connection, Shard(1, "s0", made.dsns["s0"]), source, IndexDefinition.parse("ix", "t", "k"))


@pytest.mark.sample(0)
def test_options_that_it_cannot_have(contrib_shards: Make) -> None:
    made = contrib_shards(1, *TABLE)
    with pytest.raises(InvalidInput, match="over shards NULLs are distinct"):
        IndexDefinition.parse("ix", "t", "k", unique=True, nulls_not_distinct=True, shards="s0")
    for option in ({"census": True}, {"on_duplicate": "stop"}):
        with pytest.raises(InvalidInput, match="leave census and on_duplicate out"):
            built(made, **option)
    built(made)
    with pytest.raises(InvalidInput, match="let the servers announce"):
        announce.announce(made.database, "public.ix", "client")


# The changes that end enforcement, and the reason that is given.
ENDS = {
    "its own index": ("s0", "ALTER TABLE t DROP CONSTRAINT t_k_key", "no unique index of its own on the key any more"),
    "its trigger": ("s0", "ALTER TABLE t DISABLE TRIGGER USER", "don't announce"),
    "announcing": ("s0", "DROP TRIGGER roir_announce ON {outbox}", "don't announce"),
    "its commits": ("s0", "UPDATE roir_shard.outbox SET tick = 0", "has lost its last commits"),
    "another history": (None, "UPDATE roir.feed SET strict_history = 'another'", "promoted or recovered"),
}


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("what", ENDS)
def test_where_it_ends_nothing_is_refused(contrib_shards: Make, what: str) -> None:
    shard, statement, said = ENDS[what]
    made = contrib_shards(2, *TABLE)
    generation_id = enforced(made)
    made.run("UPDATE t SET v = 0")
    apart.ship_all(made, generation_id)
    if shard is not None:
        [(outbox,)] = made.ask("SELECT name FROM roir_shard.outbox", shard=shard)
        made.run(statement.replace("{outbox}", f"roir_shard.{outbox}"), only=shard)
    else:
        made.ask(statement)
    made.run("UPDATE t SET v = 1", only="s1")
    apart.ship_all(made, generation_id)
    assert said in problem(made, generation_id)
    assert made.ask("SELECT unique_mode FROM roir.generation") == [("off",)]
    # Keys that two shards have can be changed and deleted.
    made.run("INSERT INTO t VALUES (100, 's0-1', 1)", only="s1")
    made.run("UPDATE t SET v = 5 WHERE id = 100; DELETE FROM t WHERE id = 100", only="s1")


def test_keys_that_the_server_generates_again_end_it(contrib_shards: Make) -> None:
    made = contrib_shards(
        2,
        "CREATE TABLE t (id int PRIMARY KEY, n int, k int GENERATED ALWAYS AS (n) STORED UNIQUE, v int)",
        "INSERT INTO t (id, n) VALUES (1, 1 + {number})",
    )
    if made.ask("SELECT current_setting('server_version_num')::int < 170000")[0][0]:
        pytest.skip("PostgreSQL 17 has SET EXPRESSION")
    generation_id = enforced(made)
    made.run("ALTER TABLE t ALTER k SET EXPRESSION AS (n + 1)", only="s0")
    apart.ship_all(made, generation_id)
    assert "rows of shard" in problem(made, generation_id)
    # Two shards have it now, and both may change it.
    made.run("UPDATE t SET v = 1")
    announce.announce(made.database, "public.ix", "server")
    with pytest.raises(DuplicatesFound):
        enforce.enforce_index(made.database, "public.ix")
    made.run("DELETE FROM t", only="s1")
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")


@pytest.mark.by_hand("sweeps")
def test_nothing_of_it_is_left(contrib_shards: Make) -> None:
    made = contrib_shards(1, *TABLE)
    enforced(made)
    drop_index(made.database, "public.ix", "test")
    assert (
        made.ask(
            "SELECT relname::text FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace UNION ALL "
            "SELECT proname FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace"
        )
        == []
    )


@pytest.mark.by_hand("sweeps")
def test_a_verification_looks_at_holders(contrib_shards: Make) -> None:
    made = contrib_shards(2, *TABLE)
    generation_id = enforced(made)
    [(holder,), *_] = made.ask("SELECT c1 FROM roir_data.g1_holder WHERE c1 LIKE 's0%' ORDER BY 1")
    assert verify(made.database, "public.ix").found == 0
    # One that nothing is left of, which a repair takes away.
    made.ask("INSERT INTO roir_data.g1_holder (c1, c2) VALUES ('gone', 's0')")
    assert verify(made.database, "public.ix").damaged == 1
    found = verify(made.database, "public.ix", VerifyOptions(repair=True))
    assert (found.damaged, found.repaired) == (1, 1)
    assert verify(made.database, "public.ix").found == 0
    assert problem(made, generation_id) is None
    # An entry whose key is free, or another shard's: then it isn't enforced any more.
    made.ask("DELETE FROM roir_data.g1_holder WHERE c1 = %s", holder)
    made.ask("UPDATE roir_data.g1_holder SET c2 = 's1' WHERE c1 = 's0-2'")
    found = verify(made.database, "public.ix")
    assert (found.damaged >= 1, found.duplicate) == (True, 1)
    assert "a verification found entries" in problem(made, generation_id)
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    assert verify(made.database, "public.ix").found == 0
