"""The errors that `ShardedIndex` raises, whatever fails and wherever; and that it reads the right table, under the
current DSNs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.pool import NullPool

from airflow_roir.errors import (
    IndexUnreachable,
    InvalidInput,
    NotStrict,
    RightMissing,
    RoirError,
    ShardUnreachable,
    StaleAnswer,
)
from airflow_roir.reading import ShardedIndex, candidates
from tests.shards.conftest import Make
from tests.shards.reading import Base, Ground, Item, T, engine, ground

pytestmark = pytest.mark.sample(2)

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)
LEVELS: dict[str, dict[str, Any]] = {"eventual": {}, "bounded": {"max_staleness": 3600}, "strict": {}}
NOWHERE = "postgresql+psycopg2://postgres@/nowhere?host=/nowhere"
NUMBERED = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", Integer))


class Other(Base):
    """A class of another table with the same columns."""

    __tablename__ = "other"
    id: Mapped[int] = mapped_column(primary_key=True)
    k: Mapped[str | None]
    v: Mapped[int | None]


@pytest.fixture
def two(shards: Make) -> Iterator[Ground]:
    with ground(shards(2, *TABLE)) as found:
        yield found


def impatient(dsn: str) -> Engine:
    """Whose statements end soon."""
    given = {"options": "-c statement_timeout=200"}
    return create_engine(engine(dsn).url, connect_args=given, poolclass=NullPool)


Case = tuple[type[RoirError], str | None, Callable[[Ground], dict[str, Any]]]
AT_THE_INDEX: dict[str, Case] = {
    "away": (IndexUnreachable, None, lambda one: {"index": create_engine(NOWHERE)}),
    "no rights": (
        RightMissing,
        "42501",
        lambda one: {"sql": "REVOKE ALL ON public.t_by_k FROM {role}", "role": "index"},
    ),
    "too slow": (RoirError, "57014", lambda one: {"index": impatient(one.made.index), "lock": (None, "{base}")}),
    "wrong type": (RoirError, "42883", lambda one: {"table": NUMBERED, "where": NUMBERED.c.k == 1}),
}
AT_A_SHARD: dict[str, Case] = {
    "away": (ShardUnreachable, None, lambda one: {"shards": {"s1": create_engine(NOWHERE)}}),
    "no rights": (RightMissing, "42501", lambda one: {"role": "s1"}),
    "too slow": (
        RoirError,
        "57014",
        lambda one: {"shards": {"s1": impatient(one.made.dsns["s1"])}, "lock": ("s1", "t")},
    ),
    "no table": (RoirError, "42P01", lambda one: {"run": "ALTER TABLE t RENAME TO gone"}),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("case", "at"), [(name, "index") for name in AT_THE_INDEX] + [(name, "shard") for name in AT_A_SHARD]
)
def test_whatever_a_server_says_comes_as_an_error_of_ours_with_its_sqlstate(
    two: Ground, case: str, at: str, level: str
) -> None:
    kind, state, make = (AT_THE_INDEX if at == "index" else AT_A_SHARD)[case]
    given, made = make(two), two.made
    role = f"reader_{at}_{made.ask('SELECT current_database()')[0][0]}"
    index_engine, shards = given.get("index", two.index_engine), two.engines | given.get("shards", {})
    if "role" in given:
        made.ask(f"CREATE ROLE {role} LOGIN")
        dsn = made.index if given["role"] == "index" else made.dsns["s1"]
        mine = create_engine(engine(dsn).url.set(username=role), poolclass=NullPool)
        index_engine = mine if given["role"] == "index" else index_engine
        shards |= {} if given["role"] == "index" else {"s1": mine}
    try:
        if "run" in given:
            made.run(given["run"], only="s1")
        with closing(psycopg2.connect(made.dsns["s1"] if at == "shard" else made.index)) as holder:
            if "lock" in given:
                named = given["lock"][1].format(base=f"roir_data.g{two.scene.generation_id}")
                holder.cursor().execute(f"LOCK TABLE {named}")
            with (
                ShardedIndex(index_engine, "public.t_by_k", shards) as index,
                pytest.raises(RoirError) as raised,
            ):
                index.rows(
                    given.get("table", T),
                    given.get("where", T.c.k == "k1"),
                    level,
                    **LEVELS[level],  # type: ignore[arg-type]
                )
    finally:
        if "role" in given:
            made.ask(f"DROP ROLE {role}")
    error = raised.value
    assert (type(error), error.sqlstate) == (kind, state)
    assert isinstance(error.__cause__, DBAPIError)
    assert ("s1" if at == "shard" else "t_by_k") in str(error)


def test_what_a_level_does_not_allow_has_its_sqlstate_too(two: Ground) -> None:
    two.made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp() - interval '1 hour'")
    with pytest.raises(StaleAnswer) as stale:
        two.index.rows(T, T.c.k == "k1", "bounded", max_staleness=1)
    assert stale.value.sqlstate == "40R01"
    two.made.ask("UPDATE roir.feed SET strict_from = NULL")
    with pytest.raises(NotStrict) as strict:
        two.index.rows(T, T.c.k == "k1", "strict")
    assert strict.value.sqlstate == "55000"
    with pytest.raises(InvalidInput) as invalid:
        two.index.rows(T, T.c.k == "k1", "never")  # type: ignore[arg-type]
    assert invalid.value.sqlstate is None


def test_a_session_of_the_index_server_that_was_lost_in_the_pool_is_replaced(two: Ground) -> None:
    kept = create_engine(two.index_engine.url)
    with ShardedIndex(kept, "public.t_by_k", two.engines) as index:
        for level, values in LEVELS.items():
            assert len(index.rows(T, T.c.k == "k1", level, **values)) == 4  # type: ignore[arg-type]
            end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            two.made.ask(f"{end} AND datname = current_database() AND application_name <> 'x'")
    kept.dispose()


# --- the right table


@pytest.mark.parametrize("level", LEVELS)
def test_a_class_of_another_table_is_refused(two: Ground, level: str) -> None:
    """Though it has the index's columns, and rows with such keys."""
    two.made.run("CREATE TABLE other (LIKE t)", "INSERT INTO other SELECT * FROM t")
    with pytest.raises(InvalidInput, match=r'shard "s[01]": other isn.t the table that is indexed there.* public\.t$'):
        two.index.rows(Other, Other.k == "k1", level, **LEVELS[level])  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
def test_a_table_is_read_by_the_name_that_it_has(two: Ground, level: str) -> None:
    two.made.run("ALTER TABLE t RENAME TO other", "CREATE SCHEMA s", "ALTER TABLE other SET SCHEMA s")
    placed = {name: one.execution_options(schema_translate_map={None: "s"}) for name, one in two.engines.items()}
    with ShardedIndex(two.index_engine, "public.t_by_k", placed) as index:
        assert len(index.rows(Other, Other.k == "k1", level, **LEVELS[level])) == 4  # type: ignore[arg-type]


def test_a_table_that_took_the_name_of_ours_is_not_believed(two: Ground) -> None:
    two.made.run("ALTER TABLE t RENAME TO t_old", "CREATE TABLE t (LIKE t_old)", "INSERT INTO t SELECT * FROM t_old")
    for level in ("bounded", "strict"):
        with pytest.raises(NotStrict, match=r"t is another table there than the one that is indexed"):
            two.index.rows(Item, Item.key == "k1", level, **LEVELS[level])  # type: ignore[arg-type]


# --- the DSNs of now


@pytest.mark.parametrize("partial", [False, True])
def test_a_shard_that_was_given_another_dsn_is_found(two: Ground, partial: bool) -> None:
    made = two.made
    made.ask("UPDATE roir.shard SET dsn = 'host=/nowhere dbname=none' WHERE name = 's1'")
    with ShardedIndex(two.index_engine, "public.t_by_k") as index:
        with pytest.raises(ShardUnreachable):
            index.rows(T, T.c.k == "k1", "strict")
        assert list(index.rows(T, T.c.k == "k1", "strict", partial=True).away) == ["s1"]
        made.ask("UPDATE roir.shard SET dsn = %s WHERE name = 's1'", made.dsns["s1"])
        answer = index.rows(T, T.c.k == "k1", "strict", partial=partial)
        assert (len(answer), answer.away) == (4, {})


def test_a_shard_that_came_is_found(two: Ground) -> None:
    made = two.made
    made.ask("UPDATE roir.shard SET removed_at = now() WHERE name = 's1'")
    with ShardedIndex(two.index_engine, "public.t_by_k") as index:
        with pytest.raises(InvalidInput, match='give an engine of shard "s1", too'):
            index.rows(T, T.c.k == "k1")
        made.ask("UPDATE roir.shard SET removed_at = NULL WHERE name = 's1'")
        assert len(index.rows(T, T.c.k == "k1")) == 4


def test_a_publish_and_its_revert_while_the_index_server_is_asked(two: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time another generation than the one that was looked up."""
    found, looked = candidates.look_up, []

    def look_up(*given: Any) -> candidates.About:
        about = found(*given)
        looked.append(about)
        return about if len(looked) == 3 else replace(about, generation=about.generation + len(looked))

    monkeypatch.setattr(candidates, "look_up", look_up)
    assert {row.id for row in two.index.rows(T, T.c.k == "k1", "strict").rows} == {1, 4}
    assert len(looked) == 3
