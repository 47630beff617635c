"""Attacks on a unique index over shards: types, statements, what goes away, who has which rights."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest
from psycopg2 import errors

from airflow_roir.engine import drop
from airflow_roir.errors import InvalidInput
from airflow_roir.shards import registry, remove
from airflow_roir.shards.announce import announce
from airflow_roir.shards.unique import enforce
from servers import contrib as contribs
from servers.shards import Shards, shard_servers
from tests.shards import apart
from tests.shards.announced import index_dsn
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)"


def enforced(made: Shards, **options: Any) -> int:
    """A unique index, published and enforced; its generation."""
    if not made.ask("SELECT FROM roir.shard"):
        for name, dsn in made.dsns.items():
            registry.add(made.database, name, dsn, index_dsn=index_dsn(made))
    prepared, run = apart.begin(made, unique=True, **options)
    apart.finish_all(made, run)
    index = options.get("index", "public.ix")
    announce.announce(made.database, index, "server")
    assert enforce.enforce_index(made.database, index)
    return prepared.generation_id


@pytest.mark.by_hand("sweeps")
def test_writers_of_a_dropped_index_are_refused_nothing_while_a_shard_is_away(
    contrib_shards: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard is out of reach for the command that drops, and not for its writers: no poll settles there any
    more."""
    made = contrib_shards(2, TABLE)
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
    enforced(made)

    def away(*_: Any) -> None:
        raise InvalidInput("away")

    with monkeypatch.context() as patch:
        patch.setattr(remove.home, "check", away)
        drop.drop_index(made.database, "public.ix", "test")
    made.run("DELETE FROM t", only="s0")
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s1")
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")


# A type, a value, the same value written otherwise, another value.
TYPES = {
    "text": ("text", "'a'", "'a'", "'A'"),
    "text of a collation": ('text COLLATE "C"', "'ä'", "'ä'", "'a'"),
    "char": ("char(4)", "'a'", "'a  '", "'b'"),
    "varchar": ("varchar(40)", "'a'", "'a'::text", "'a '"),
    "numeric": ("numeric", "1.0", "1.00", "1.01"),
    "numeric, not a number": ("numeric", "'NaN'", "'nan'", "'Infinity'"),
    "float": ("double precision", "0", "'-0'", "1e-300"),
    "float, not a number": ("float8", "'NaN'", "'nan'", "'-Infinity'"),
    "real": ("real", "0.1", "0.10000000149", "0.10000001"),
    "timestamptz": ("timestamptz", "'2024-03-31 01:30+00'", "'2024-03-31 03:30+02'", "'2024-03-31 03:30+01'"),
    "interval": ("interval", "'1 day'", "'24 hours'", "'1 day 1 second'"),
    "timetz": ("timetz", "'01:00+00'", "'01:00:00+00'", "'02:00+01'"),
    "uuid": (
        "uuid",
        "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'",
        "'a0eebc999c0b4ef8bb6d6bb9bd380a11'",
        "'b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
    ),
    "bytea": ("bytea", r"'\x00ff'", r"'\000\377'", r"'\x00'"),
    "array": ("int[]", "'{1,NULL}'", "ARRAY[1,NULL]", "'{1}'"),
    "array with bounds": ("int[]", "'[0:1]={1,2}'", "'[0:1]={1,2}'", "'{1,2}'"),
    "jsonb": ("jsonb", """'{"a": 1, "b": 1.0}'""", """'{"b": 1.00, "a": 1}'""", "'null'"),
    "inet": ("inet", "'10.0.0.1/32'", "'10.0.0.1'", "'10.0.0.1/24'"),
    "macaddr": ("macaddr", "'08:00:2b:01:02:03'", "'08002b-010203'", "'08:00:2b:01:02:04'"),
    "bit": ("bit varying(8)", "B'101'", "B'101'", "B'0101'"),
    "range": ("int4range", "'[1,3]'", "'[1,4)'", "'empty'"),
    "multirange": ("int4multirange", "'{[1,2],[3,4]}'", "'{[1,5)}'", "'{}'"),
    "boolean": ("boolean", "true", "'yes'", "false"),
    "enum": ("mood", "'ok'", "'ok'", "'not ok'"),
    "domain": ("positive", "1.0", "1.000", "2"),
    "composite": ("pair", "ROW(1, 'x')", "'(1,x)'", "ROW(1, NULL)"),
    "composite of NULLs": ("pair", "ROW(NULL, NULL)", "'(,)'", "ROW(1, NULL)"),
    "money": ("money", "'1.00'", "1::money", "'1.01'"),
    "oid": ("oid", "4294967295", "'4294967295'", "0"),
    "name": ("name", "'a'", "'a'", "'b'"),
    "xid8": ("xid8", "'18446744073709551615'", "'18446744073709551615'", "'1'"),
    "tsvector": ("tsvector", "'a b'", "'b a'", "'a:1 b'"),
}
MADE = (
    "CREATE TYPE mood AS ENUM ('ok', 'not ok')",
    "CREATE DOMAIN positive AS numeric CHECK (VALUE > 0)",
    "CREATE TYPE pair AS (a int, b text)",
)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("name", TYPES)
def test_equal_is_what_the_type_says(contrib_shards: Make, name: str) -> None:
    """However the value is written in another shard; and each refusal ends with what refuses."""
    type_, value, same, other = TYPES[name]
    made = contrib_shards(2, *MADE, f"CREATE TABLE t (id int PRIMARY KEY, k {type_} UNIQUE, v int)")
    for statement in MADE:
        made.ask(statement)
    made.run(f"INSERT INTO t VALUES (1, {value}, 1), (9, NULL, 1)", only="s0")
    made.run("INSERT INTO t VALUES (9, NULL, 1)", only="s1")
    generation_id = enforced(made)
    for refused in (f"INSERT INTO t VALUES (2, {same}, 1)", f"UPDATE t SET k = {same}"):
        with pytest.raises(errors.UniqueViolation, match="already exists in shard s0"):
            made.run(refused, only="s1")
    made.run(f"INSERT INTO t VALUES (2, {other}, 1)", only="s1")
    made.run(f"UPDATE t SET k = {same}, v = 2 WHERE id = 1", only="s0")
    made.run("DELETE FROM t WHERE id = 1", f"INSERT INTO t VALUES (3, {same}, 1)", only="s0")
    apart.ship_all(made, generation_id)
    with pytest.raises(errors.UniqueViolation, match="already exists in shard s1"):
        made.run(f"INSERT INTO t VALUES (4, {other}, 1)", only="s0")
    made.run("DELETE FROM t WHERE id = 3", only="s0")
    settle(made, generation_id)
    made.run(f"UPDATE t SET k = {value} WHERE id = 9", only="s1")
    settle(made, generation_id)
    assert holders_of(made, generation_id) == ["s1", "s1"]
    assert made.ask("SELECT roir.unique_problem(%s)", generation_id) == [(None,)]
    apart.assert_exact(made, generation_id)


def settle(made: Shards, generation_id: int) -> None:
    """Ship until no intent is left, those of transactions that rolled back, too."""
    intent = f"roir_data.g{generation_id}_intent"
    for _ in range(5):
        made.ask(f"UPDATE {intent} SET at = at - interval '5 s'")
        apart.ship_all(made, generation_id)
    assert made.ask(f"SELECT count(*) FROM {intent}") == [(0,)]


def holders_of(made: Shards, generation_id: int) -> list[str]:
    """The shards of all holders."""
    [(entry,)] = made.ask("SELECT entry FROM roir.generation WHERE id = %s", generation_id)
    column = next(n for n, one in enumerate(entry["columns"], 1) if one["source"] == "shard")
    return [shard for (shard,) in made.ask(f"SELECT c{column} FROM roir_data.g{generation_id}_holder ORDER BY 1")]


@pytest.mark.by_hand("sweeps")
def test_whoever_announces_may_only_insert(contrib_shards: Make) -> None:
    """The role that announces can't reach the holders, and its search_path, settings and objects change nothing."""
    made = contrib_shards(2, TABLE)
    made.ask("DROP ROLE IF EXISTS announcer_of_keys")
    made.ask("CREATE ROLE announcer_of_keys LOGIN PASSWORD 'x'")
    made.ask("ALTER ROLE announcer_of_keys SET search_path = evil, pg_catalog")
    made.ask("ALTER ROLE announcer_of_keys SET session_replication_role = origin")
    made.ask("CREATE SCHEMA evil AUTHORIZATION announcer_of_keys")
    made.ask("CREATE FUNCTION evil.never(text, text) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT false'")
    made.ask("CREATE OPERATOR evil.= (FUNCTION = evil.never, LEFTARG = text, RIGHTARG = text)")
    dsn = f"{index_dsn(made)} user=announcer_of_keys password=x"
    for name, one in made.dsns.items():
        registry.add(made.database, name, one, index_dsn=dsn)
    made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
    generation_id = enforced(made)
    with pytest.raises(errors.UniqueViolation, match="already exists in shard s0"):
        made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s1")
    made.run("INSERT INTO t VALUES (1, 'b', 0)", only="s1")
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        for statement in (
            "SELECT FROM {}_holder",
            "DELETE FROM {}_holder",
            "SELECT FROM {}_contested",
            "SELECT FROM {}_intent",
            "TRUNCATE {}_intent",
            "CREATE OR REPLACE FUNCTION {}_put() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                cursor.execute(statement.format(f"roir_data.g{generation_id}"))
            connection.rollback()
    assert holders_of(made, generation_id) == ["s0", "s1"]
    made.ask("DROP OWNED BY announcer_of_keys CASCADE")
    made.ask("DROP ROLE announcer_of_keys")


@pytest.mark.by_hand("sweeps")
def test_a_key_that_gets_another_expression_ends_it(contrib_shards: Make) -> None:
    """The table's rows have other keys then, and nothing was announced. The next pass notices it."""
    made = contrib_shards(
        2, "CREATE TABLE t (id int PRIMARY KEY, n text, k text GENERATED ALWAYS AS (n || '-') STORED UNIQUE, v int)"
    )
    made.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')", only="s0")
    made.run("INSERT INTO t VALUES (1, 'c')", only="s1")
    generation_id = enforced(made)
    another = made.ask("SELECT current_setting('server_version_num')::int >= 170000", shard="s1") == [(True,)]
    if another:
        made.run("ALTER TABLE t ALTER k SET EXPRESSION AS (left(n, 0) || 'b-')", only="s1")
    else:
        made.run("ALTER TABLE t ALTER k DROP EXPRESSION", only="s1")
    apart.ship_all(made, generation_id)
    assert "without a write to be announced" in made.ask("SELECT roir.unique_problem(%s)", generation_id)[0][0]
    apart.ship_all(made, generation_id)
    apart.assert_exact(made, generation_id)
    # Nothing is refused, so that duplicates can be taken away, if there are some.
    made.run("DELETE FROM t", only="s1")
    announce.announce(made.database, "public.ix", "server")
    assert enforce.enforce_index(made.database, "public.ix")
    with pytest.raises(errors.UniqueViolation):
        made.run("INSERT INTO t VALUES (5, 'z', " + ("DEFAULT)" if another else "'b-')"), only="s1")


@pytest.mark.by_hand("sweeps")
def test_servers_that_are_killed_lose_no_holder(pg: int) -> None:
    with shard_servers(2, contribs.find(pg) or contribs.ensure(pg)) as made:
        made.run(TABLE)
        made.run("INSERT INTO t VALUES (1, 'a', 0)", only="s0")
        generation_id = enforced(made)
        made.run("INSERT INTO t VALUES (2, 'b', 0)", only="s0")
        with closing(psycopg2.connect(made.dsns["s1"])) as writer, writer.cursor() as cursor:
            cursor.execute("INSERT INTO t VALUES (3, 'c', 0); SET CONSTRAINTS ALL IMMEDIATE")
            made.servers["index"].kill()
            with pytest.raises(psycopg2.Error, match="COMMIT TRANSACTION"):
                writer.commit()
        made.servers["index"].start()
        made.run("INSERT INTO t VALUES (3, 'c', 0)", only="s0")
        assert made.ask("SELECT roir.unique_problem(%s)", generation_id) == [(None,)]
        for key in "abc":
            with pytest.raises((errors.UniqueViolation, errors.SerializationFailure)):
                made.run(f"INSERT INTO t VALUES (9, '{key}', 0)", only="s1")
        with closing(psycopg2.connect(made.dsns["s0"])) as writer, writer.cursor() as cursor:
            cursor.execute("INSERT INTO t VALUES (4, 'd', 0); SET CONSTRAINTS ALL IMMEDIATE")
            made.servers["s0"].kill()
        made.servers["s0"].start()
        settle(made, generation_id)
        made.run("INSERT INTO t VALUES (4, 'd', 0)", only="s1")
        with pytest.raises(errors.UniqueViolation):
            made.run("INSERT INTO t VALUES (9, 'a', 0)", only="s1")
        settle(made, generation_id)
        assert holders_of(made, generation_id) == ["s0", "s0", "s0", "s1"]
        apart.assert_exact(made, generation_id)
