"""`ShardedIndex`: which tables, conditions and shards it takes, and what it says of those that it doesn't."""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import (
    CHAR,
    REAL,
    Column,
    Integer,
    MetaData,
    Numeric,
    Table,
    Text,
    create_engine,
    literal_column,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP

from airflow_roir.errors import InvalidInput, NotFound, NotStrict, RightMissing, RoirError, ShardUnreachable
from airflow_roir.reading import ShardedIndex, truth
from airflow_roir.shards.announce import announce
from servers.shards import run_sql
from tests.shards import announced, apart
from tests.shards.conftest import Make
from tests.shards.reading import Ground, Item, T, create_servers, engine, ground

pytestmark = pytest.mark.sample(2)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)
LEVELS: dict[str, dict[str, Any]] = {"eventual": {}, "bounded": {"max_staleness": 60}, "strict": {}}


@pytest.fixture
def two(shards: Make) -> Iterator[Ground]:
    with ground(shards(2, *TABLE)) as made:
        yield made


@pytest.mark.parametrize("level", LEVELS)
def test_rows_and_instances_come_with_their_shard(two: Ground, level: Any) -> None:
    rows = two.index.rows(T, T.c.k == "k1", level, **LEVELS[level])
    assert sorted((row.id, row[1], row._mapping[T.c.v], shard) for row, shard in rows) == [
        (1, "k1", 1, "s0"),
        (1, "k1", 1, "s1"),
        (4, "k1", 4, "s0"),
        (4, "k1", 4, "s1"),
    ]
    items = two.index.rows(Item, (Item.key == "k1") & (Item.id > 1), level, **LEVELS[level])
    assert len(items) == 2
    assert [(item.id, item.key, item.v) for item in items.rows] == [(4, "k1", 4)] * 2
    assert two.index.rows(T, T.c.k == "none", level, **LEVELS[level]).found == []
    # A condition that no index answers with one key.
    many = two.index.rows(Item, Item.key.in_(["k0", "k2"]) | Item.key.is_(None), level, **LEVELS[level])
    assert sorted(item.id for item in many.rows) == [2, 2, 3, 3, 5, 5, 6, 6]


HOSTILE = (
    'CREATE TABLE "we""ird: %s" ("na me" real, "key%" char(4), "at:" timestamptz, "K" numeric[], "select" jsonb, '
    'PRIMARY KEY ("na me", "key%", "at:"))',
    """INSERT INTO "we""ird: %s" SELECT i + 0.1, 'x' || i, '2020-01-02 03:04:05.678901+02', ARRAY[i, NULL, 1.50],
       '{"a": 1}' FROM generate_series(1, 3) i""",
    """INSERT INTO "we""ird: %s" VALUES ('NaN', '', 'epoch', NULL, NULL)""",
)
WEIRD = Table(
    'we"ird: %s',
    MetaData(),
    Column("na me", REAL, primary_key=True),
    Column("key%", CHAR(4), primary_key=True),
    Column("at:", TIMESTAMP(timezone=True), primary_key=True),
    Column("K", ARRAY(Numeric)),
    Column("select", JSONB),
    schema="public",
)


@pytest.mark.by_hand("sweeps")
def test_hostile_names_and_keys_whose_values_python_would_change(contrib_shards: Make) -> None:
    made = contrib_shards(2, *HOSTILE)
    apart.add_all(made)
    _, run = apart.begin(
        made, keys='"K", "select"', include=None, table='public."we""ird: %s"', shard_column='"sh""a:%"'
    )
    apart.finish_all(made, run)
    engines = {name: engine(dsn) for name, dsn in made.dsns.items()}
    at = datetime.datetime(2020, 1, 2, 1, 4, 5, 678901, tzinfo=datetime.timezone.utc)
    with ShardedIndex(engine(made.index), "public.ix", engines) as index:
        c = WEIRD.c
        found = index.rows(WEIRD, (c["K"] == [Decimal(2), None, Decimal("1.5")]) & (c["key%"] == "x2")).found
        assert sorted((shard, row[0], row[1], row[2], row[4]) for row, shard in found) == [
            (shard, 2.1, "x2  ", at, {"a": 1}) for shard in ("s0", "s1")
        ]
        found = index.rows(WEIRD, c["K"].is_(None)).found
        assert sorted((shard, str(row[0])) for row, shard in found) == [("s0", "nan"), ("s1", "nan")]


@pytest.mark.sample(0)
@pytest.mark.parametrize("by", ["client", "server"])
def test_strict_reads_of_a_built_index_of_hostile_names(contrib_shards: Make, by: str) -> None:
    made = contrib_shards(2, *HOSTILE)
    apart.add_all(made)
    made.ask("UPDATE roir.shard SET index_dsn = %s", made.index)
    _, run = apart.begin(
        made, keys='"K", "select"', include=None, table='public."we""ird: %s"', shard_column='"sh""a:%"'
    )
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", "server")
    made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp()")
    made.run("""UPDATE "we""ird: %s" SET "K" = ARRAY[9, 9.0] WHERE "key%" = 'x1' OR "key%" = ''""", only="s1")
    assert made.ask("SELECT count(*) FROM roir_data.g1_intent") == [(4,)]
    if by == "client":
        engines = {name: engine(dsn) for name, dsn in made.dsns.items()}
        with ShardedIndex(engine(made.index), "public.ix", engines) as index:
            found = index.rows(WEIRD, WEIRD.c["K"] == [Decimal(9), Decimal(9)], "strict").found
            assert sorted((str(row[0]), shard) for row, shard in found) == [("1.1", "s1"), ("nan", "s1")]
        return
    create_servers(made)
    read = """SELECT "na me"::text, "key%", "sh""a:%" FROM roir.strict(NULL::public.ix, %s) ORDER BY 1""".replace(
        '%"', '%%"'
    )
    assert made.ask(read, '{"K": [9.00, 9]}') == [("1.1", "x1  ", "s1"), ("NaN", "    ", "s1")]
    assert made.ask(read, '{"K": null}') == [("NaN", "    ", "s0")]
    assert made.ask(read, '{"K": [9, 9], "select": {"a": 1.0}, "na me": 1.1, "key%": "x1"}') == [("1.1", "x1  ", "s1")]
    assert made.ask(read, '{"select": null, "sh\\"a:%": "s1"}') == [("NaN", "    ", "s1")]


REFUSED: dict[str, tuple[Any, str, str]] = {
    "included": (T.c.v == 1, "strict", '"v" isn\'t a column of its key or of the primary key; strict reads'),
    "other table": (Table("o", MetaData(), Column("a", Integer)).c.a == 1, "eventual", "o.a, which is no column of t"),
    "query": (T.c.id.in_(select(T.c.v)), "eventual", "the condition has a subquery"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_conditions_that_the_index_cannot_answer_are_refused(two: Ground, what: str) -> None:
    where, level, message = REFUSED[what]
    with pytest.raises(InvalidInput, match=re.escape(message)):
        two.index.rows(T, where, level)  # type: ignore[arg-type]


def test_columns_that_the_index_has_not_are_refused(two: Ground) -> None:
    more = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", Text), Column("z", Integer))
    with pytest.raises(InvalidInput, match=r'index public.t_by_k: "z" isn\'t a column of it'):
        two.index.rows(more, more.c.z == 1)
    less = Table("t", MetaData(), Column("k", Text))
    with pytest.raises(InvalidInput, match='t is mapped without "id", a part of its primary key'):
        two.index.rows(less, less.c.k == "k1")
    # The shard itself refuses a column that is mapped and isn't in the table; the error has the shard's name.
    with pytest.raises(RoirError, match=r'shard "s[01]": column t\.z does not exist'):
        two.index.rows(more, more.c.k == "k1")
    assert len(two.index.rows(T, literal_column("k") == "k1")) == 4


def test_a_shard_that_cannot_be_reached_is_named(two: Ground) -> None:
    away = create_engine("postgresql+psycopg2://postgres@/nowhere?host=/nowhere")
    with ShardedIndex(two.index_engine, "public.t_by_k", {"s0": two.engines["s0"], "s1": away}) as index:
        for level, values in LEVELS.items():
            with pytest.raises(ShardUnreachable, match=r'shard "s1" can.t be asked') as error:
                index.rows(T, T.c.k == "k1", level, **values)  # type: ignore[arg-type]
            assert error.value.shard == "s1"
            answer = index.rows(T, T.c.k == "k1", level, partial=True, **values)  # type: ignore[arg-type]
            assert sorted((row.id, shard) for row, shard in answer) == [(1, "s0"), (4, "s0")]
            assert list(answer.away) == ["s1"]
        assert index.rows(T, T.c.k == "none").found == []
    with (
        ShardedIndex(two.index_engine, "public.t_by_k", {"s0": two.engines["s0"]}) as index,
        pytest.raises(InvalidInput, match='give an engine of shard "s1", too'),
    ):
        index.rows(T, T.c.k == "k1", partial=True)


def test_a_session_that_was_lost_in_the_pool_is_replaced(two: Ground) -> None:
    kept = create_engine(two.engines["s0"].url)
    with ShardedIndex(two.index_engine, "public.t_by_k", two.engines | {"s0": kept}) as index:
        assert len(index.rows(T, T.c.k == "k1")) == 4
        two.made.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()", shard="s0")
        assert len(index.rows(T, T.c.k == "k1")) == 4
    kept.dispose()


def test_shards_that_were_exchanged_are_found_out(two: Ground) -> None:
    exchanged = {"s0": two.engines["s1"], "s1": two.engines["s0"]}
    with ShardedIndex(two.index_engine, "public.t_by_k", exchanged) as index:
        for level in ("bounded", "strict"):
            with pytest.raises(NotStrict, match=r'shard "s[01]": another database answers'):
                index.rows(T, T.c.k == "k1", level, **LEVELS[level])  # type: ignore[arg-type]


def test_without_engines_the_dsns_of_the_registry_are_taken(two: Ground) -> None:
    with ShardedIndex(two.index_engine, "public.t_by_k") as index:
        assert len(index.rows(T, T.c.k == "k1", "strict")) == 4
    without = "ALTER TABLE roir.shard DROP CONSTRAINT shard_reached; UPDATE roir.shard SET dsn = NULL WHERE name = 's1'"
    run_sql(two.made.index, without)
    with pytest.raises(InvalidInput, match='shard "s1": the index server has no DSN of it'):
        ShardedIndex(two.index_engine, "public.t_by_k")


def test_what_is_no_index_apart_is_named(two: Ground) -> None:
    for name in ("public.nothing", "pg_catalog.pg_class"):
        with pytest.raises(NotFound, match=name.split(".")[1]):
            ShardedIndex(two.index_engine, name, two.engines).rows(T, T.c.k == "k1")


def test_another_generation_is_followed(two: Ground) -> None:
    assert len(two.index.rows(T, T.c.k == "k1", "strict")) == 4
    made = two.made
    run_sql(
        made.index,
        "UPDATE roir.generation SET status = 'retired', retired_at = now(), drop_after = now()",
    )
    with two.scene.database.transaction() as connection:
        second = announced.add_generation(connection, two.scene.index_id, two.scene.entry)
    two.scene.made.ask(
        "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid, captured_at, strict_from, strict_history, "
        "strict_start, fresh_at) SELECT %s, shard_id, outbox || 'x', source_oid, captured_at, strict_from, "
        "strict_history, strict_start, fresh_at FROM roir.feed",
        second,
    )
    made.run(
        "INSERT INTO roir_shard.outbox (name, server, index_name, source, entry) "
        "SELECT name || 'x', server, index_name, source, entry FROM roir_shard.outbox"
    )
    run_sql(
        made.index,
        "CREATE OR REPLACE VIEW public.t_by_k AS "
        f"SELECT c1 AS k, c2 AS shard, c3 AS id, c4 AS v FROM roir_data.g{second}",
        f"INSERT INTO roir_data.g{second} SELECT * FROM roir_data.g1 WHERE c2 = 's0'",
    )
    assert len(two.index.rows(T, T.c.k == "k1", "strict")) == 2
    run_sql(made.index, "DROP VIEW roir_data.g1_announced")
    assert len(two.index.rows(T, T.c.k == "k1", "strict")) == 2


def test_what_a_reader_must_be_granted(two: Ground) -> None:
    made = two.made
    [(role,)] = made.ask("SELECT 'reader_' || current_database()")

    def as_role(dsn: str) -> Any:
        return engine(dsn.replace("//postgres:@", f"//{role}:@"))

    run_sql(made.index, f"CREATE ROLE {role} LOGIN", f"GRANT USAGE ON SCHEMA roir, roir_data TO {role}")
    engines = {name: as_role(dsn) for name, dsn in made.dsns.items()}
    try:
        with ShardedIndex(as_role(made.index), "public.t_by_k", engines) as index:
            with pytest.raises(RightMissing, match="t_by_k"):
                index.rows(T, T.c.k == "k1", "strict")
            run_sql(made.index, f"GRANT SELECT (k, id, shard) ON public.t_by_k TO {role}")
            with pytest.raises(RightMissing, match="SELECT on the whole view"):
                index.rows(T, T.c.k == "k1", "strict")
            run_sql(made.index, f"GRANT SELECT ON public.t_by_k TO {role}")
            with pytest.raises(RightMissing, match=r'shard "s[01]": .*readers need SELECT'):
                index.rows(T, T.c.k == "k1", "strict")
            made.run(f"GRANT SELECT ON t TO {role}")
            assert len(index.rows(T, T.c.k == "k1")) == 4
            made.run(
                f"GRANT USAGE ON SCHEMA roir_shard TO {role}",
                f"GRANT SELECT ON roir_shard.home, roir_shard.outbox TO {role}",
            )
            for level, values in LEVELS.items():
                assert len(index.rows(T, T.c.k == "k1", level, **values)) == 4  # type: ignore[arg-type]
        # A view of somebody who may not read the entries opens nothing.
        run_sql(made.index, f"REVOKE SELECT ON public.t_by_k FROM {role}", f"GRANT CREATE ON SCHEMA public TO {role}")
        with as_role(made.index).begin() as connection:
            connection.exec_driver_sql("CREATE VIEW public.evil AS SELECT * FROM roir_data.g1")
        with (
            as_role(made.index).begin() as connection,
            pytest.raises(Exception, match="strict reads need SELECT on the whole view"),
        ):
            connection.exec_driver_sql("SELECT * FROM roir_data.g1_announced")
    finally:
        made.run(f"DROP OWNED BY {role}")
        run_sql(made.index, f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_shards_are_asked_at_the_same_time(two: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer waits until both were asked."""
    both = threading.Barrier(2, timeout=60)
    ask = truth.ask

    def asked(*values: Any) -> Any:
        both.wait()
        return ask(*values)

    monkeypatch.setattr(truth, "ask", asked)
    assert len(two.index.rows(T, T.c.k == "k1")) == 4
