"""Strict reads of what is easily taken for something else: values, rows of a subclass, tables and generations."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Column, Integer, MetaData, Numeric, Table, Text, Time, TypeDecorator, literal_column
from sqlalchemy.dialects.postgresql import INTERVAL, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from airflow_roir.errors import NotStrict
from airflow_roir.shards.announce import intents
from servers.shards import run_sql
from tests.shards import announced
from tests.shards.conftest import Make
from tests.shards.reading import T, ground, with_servers

pytestmark = pytest.mark.sample(3)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)


class Lower(TypeDecorator[str]):
    """Gives back what it doesn't take."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        """In lower case."""
        return value and value.lower()


@pytest.mark.parametrize(
    ("of", "value", "column"),
    [
        ("time", "24:00", Time()),
        ("interval", "1 year", INTERVAL()),
        ("numeric", "12345678901234567890.12", Numeric(asdecimal=False)),
        ("text", "ABC", Lower()),
        ("jsonb", "null", JSONB()),
        ("jsonb", '{"a": 1}', JSONB()),
        ("jsonb[]", "{1}", JSONB()),
    ],
)
def test_a_primary_key_is_asked_for_as_it_is(shards: Make, of: str, value: str, column: Any) -> None:
    made = shards(1, f"CREATE TABLE t (id {of} PRIMARY KEY, k text, v int)")
    t = Table("t", MetaData(), Column("id", column, primary_key=True), Column("k", Text), Column("v", Integer))
    with ground(made) as found:
        with found.writer("s0") as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (%s, 'a', 1)", (value,))
        assert len(found.index.rows(t, t.c.k == "a", "strict")) == 1


def test_jsons_null_is_a_key_and_a_string_no_number(contrib_shards: Make) -> None:
    made = contrib_shards(1, "CREATE TABLE t (id int PRIMARY KEY, k jsonb, v int)")
    t = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", JSONB), Column("v", Integer))
    with ground(made) as found:
        with_servers(found)
        with found.writer("s0") as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (1, '\"1\"'), (2, '1'), (3, 'null'), (4, NULL)")
        for value, id_ in (("null", 3), ("1", 2), ('"1"', 1)):
            where = t.c.k == literal_column(f"'{value}'::jsonb")
            assert [row.id for row in found.index.rows(t, where, "strict").rows] == [id_]
        read = "SELECT id FROM roir.strict(NULL::public.t_by_k, %s)"
        for key, id_ in (('{"k": "1"}', 1), ('{"k": 1}', 2), ('{"k": null}', 4)):
            assert made.ask(read, key) == [(id_,)]


class Base(DeclarativeBase):
    """The base of the classes below."""


class Item(Base):
    """An item of any kind; its column v says which."""

    __tablename__ = "t"
    id: Mapped[int] = mapped_column(primary_key=True)
    k: Mapped[str]
    v: Mapped[int]
    __mapper_args__ = {"polymorphic_on": "v", "polymorphic_identity": 0}


class Fifth(Item):
    """One kind of them."""

    __mapper_args__ = {"polymorphic_identity": 5}


def test_a_shard_that_has_none_of_a_subclass_must_be_the_shard_too(shards: Make) -> None:
    with ground(shards(1, *TABLE)) as found:
        assert [row.id for row in found.index.rows(Fifth, Fifth.k == "k2", "strict").rows] == [5]
        assert found.index.rows(Fifth, Fifth.k == "k1", "strict").rows == []
        found.made.ask("UPDATE roir.feed SET tick = tick + 100")
        for key in ("k1", "k2"):
            with pytest.raises(NotStrict, match="it has lost commits"):
                found.index.rows(Fifth, Fifth.k == key, "strict")


def test_a_table_that_took_the_name_of_ours_is_not_asked(contrib_shards: Make) -> None:
    with ground(contrib_shards(1, *TABLE)) as found:
        with_servers(found)
        found.made.run("ALTER TABLE t RENAME TO t_old", TABLE[0], "INSERT INTO t VALUES (3, 'k1', 0)")
        found.write("s0", "UPDATE t_old SET k = 'k1' WHERE id = 3")
        with pytest.raises(Exception, match="another table has its name"):
            found.sql_strict("k1")


def test_a_bounded_reader_follows_a_rebuild_whose_old_capture_is_gone(shards: Make) -> None:
    with ground(shards(1, *TABLE)) as found:
        made, first = found.made, found.scene.generation_id

        def read() -> int:
            return len(found.index.rows(T, T.c.k == "k1", "bounded", max_staleness=600))

        assert read() == 2
        made.ask("UPDATE roir.generation SET status = 'retired', retired_at = now(), drop_after = now()")
        with found.scene.database.transaction() as connection:
            second = announced.add_generation(connection, found.scene.index_id, found.scene.entry)
        made.ask(
            "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid, captured_at, fresh_at) "
            "SELECT %s, shard_id, outbox || 'x', source_oid, captured_at, fresh_at FROM roir.feed",
            second,
        )
        made.run("UPDATE roir_shard.outbox SET name = name || 'x'")
        run_sql(
            made.index,
            f"INSERT INTO roir_data.g{second} SELECT * FROM roir_data.g{first}",
            f"CREATE OR REPLACE VIEW public.t_by_k AS SELECT c1 AS k, c2 AS shard, c3 AS id, c4 AS v "
            f"FROM roir_data.g{second}",
        )
        assert read() == 2


def test_the_trial_of_an_announcing_that_was_killed_names_nothing(contrib_shards: Make) -> None:
    with ground(contrib_shards(1, *TABLE)) as found:
        with_servers(found)
        found.made.ask(f"INSERT INTO {intents.table(found.scene.generation_id)} (xid) VALUES ('3')")
        assert found.strict(None) == set()
        asked = "SELECT count(*) FROM roir.strict(NULL::public.t_by_k, '{\"k\": null}')"
        assert found.made.ask(asked) == [(0,)]
        announced.announce.announce(found.scene.database, announced.INDEX, "server")
        assert found.scene.intents() == []


def test_an_index_server_that_was_renamed_is_announced_to_again(shards: Make) -> None:
    with ground(shards(1, *TABLE)) as found:
        found.made.run("UPDATE roir_shard.outbox SET server = 'as it was called'")
        with pytest.raises(Exception, match="was not announced to the index server"):
            found.write("s0", "UPDATE t SET v = 9")
        announced.announce.announce(found.scene.database, announced.INDEX, "client")
        found.write("s0", "UPDATE t SET v = 9")


def test_statistics_tell_no_intents_to_who_may_not_read_them(shards: Make) -> None:
    with ground(shards(1, *TABLE)) as found:
        made, intent = found.made, intents.table(found.scene.generation_id)
        [(role,)] = made.ask("SELECT 'spy_' || current_database()")
        run_sql(
            made.index,
            f"INSERT INTO {intent} (c1, c2, c3, xid) SELECT 'secret', 's0', i, '3' FROM generate_series(1, 1000) i",
            f"ANALYZE {intent}",
            f"CREATE ROLE {role} LOGIN",
            f"GRANT USAGE ON SCHEMA roir, roir_data TO {role}",
            f"CREATE SCHEMA AUTHORIZATION {role}",
        )
        try:
            spy = psycopg2.connect(made.index.replace("//postgres:@", f"//{role}:@"))
            with closing(spy), spy.cursor() as cursor:
                cursor.execute(
                    "CREATE FUNCTION tell(text, text) RETURNS bool LANGUAGE plpgsql AS "
                    "$$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
                )
                cursor.execute(
                    "CREATE OPERATOR === (FUNCTION = tell, LEFTARG = text, RIGHTARG = text, RESTRICT = eqsel)"
                )
                view = intents.readers_view(found.scene.generation_id)
                cursor.execute(f"EXPLAIN SELECT FROM {view} WHERE k === 'x'")
                assert spy.notices == []
        finally:
            run_sql(made.index, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")
