"""Servers that compare values by rules of their own: a condition has one outcome on all of them, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Column, ColumnElement, Integer, MetaData, Table, Text, and_, func, not_, or_, tuple_

from airflow_roir.errors import InvalidInput, RoirError
from airflow_roir.reading import ShardedIndex
from airflow_roir.shards import rules
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.reading import engine

pytestmark = pytest.mark.sample(3)

T = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", Text), Column("v", Integer))
K: Any = T.c.k
BYTES = 'CREATE DOMAIN own AS text COLLATE "C"'
# The type of the key: in the shards, on the index server, its values, and what it needs.
TYPES: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "an enum in another order": (
        "CREATE TYPE own AS ENUM ('a', 'b', 'c')",
        "CREATE TYPE own AS ENUM ('c', 'b', 'a')",
        ("a", "b", "c"),
        "",
    ),
    "an array of such": (
        "CREATE TYPE e AS ENUM ('a', 'b', 'c'); CREATE DOMAIN own AS e[]",
        "CREATE TYPE e AS ENUM ('c', 'b', 'a'); CREATE DOMAIN own AS e[]",
        ("{a}", "{b}", "{c}"),
        "",
    ),
    "texts of another collation": (
        "CREATE COLLATION ord (provider = icu, locale = 'und'); CREATE DOMAIN own AS text COLLATE ord",
        "CREATE COLLATION ord (provider = icu, locale = 'und-u-kf-upper'); CREATE DOMAIN own AS text COLLATE ord",
        ("a", "A", "b", "B"),
        "icu",
    ),
    "texts by bytes": (
        'CREATE DOMAIN own AS text COLLATE "C"',
        'CREATE DOMAIN own AS text COLLATE "C"',
        ("a", "B"),
        "",
    ),
}
# Conditions with a value `x`; whether servers that order otherwise agree about them.
CONDITIONS: dict[str, tuple[Callable[[str], ColumnElement[bool]], bool]] = {
    "=": (lambda x: x == K, True),
    "<>": (lambda x: x != K, True),
    "IN": (lambda x: K.in_([x, x]), True),
    "a row IN": (lambda x: tuple_(T.c.id, K).in_([(1, x)]), True),
    "IS NULL": (lambda _: K.is_(None), True),
    "IS DISTINCT FROM": (lambda x: K.is_distinct_from(x), True),
    "NOT =": (lambda x: not_(x == K), True),
    "OR": (lambda x: or_(x == K, T.c.id < 0), True),
    "<": (lambda x: x > K, False),
    ">=": (lambda x: x <= K, False),
    "BETWEEN": (lambda x: K.between(x, x), False),
    "NOT <": (lambda x: not_(x > K), False),
    "AND <": (lambda x: and_(x == K, x >= K), False),
    "a row <": (lambda x: tuple_(K, T.c.id) < tuple_(x, 1), False),
    "greatest": (lambda x: func.greatest(K, x) == x, False),
}


def built(made: Shards, case: str) -> None:
    there, here, values, needs = TYPES[case]
    if needs == "icu" and not made.ask("SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"):
        pytest.skip("needs ICU")
    made.ask(here)
    made.run(there, "CREATE TABLE t (id int PRIMARY KEY, k own, v int)")
    for number, value in enumerate(values):
        made.run(f"INSERT INTO t VALUES ({number}, '{value}', {number})")
    _, run = apart.begin(apart.add_all(made))
    apart.finish_all(made, run)


@pytest.mark.sample(0)
@pytest.mark.parametrize("case", TYPES)
def test_a_condition_is_answered_as_the_shards_answer_it_or_refused(shards: Make, case: str) -> None:
    """All of them over one index: at each level, with each value."""
    made = shards(2, "SELECT")
    built(made, case)
    alike = case == "texts by bytes"
    engines = {name: engine(dsn) for name, dsn in made.dsns.items()}
    with ShardedIndex(engine(made.index), "public.ix", engines) as index:
        for name, (condition, same) in CONDITIONS.items():
            for value in TYPES[case][2]:
                if "array" in case and name in ("a row IN", "a row <"):
                    continue
                where = condition(value)
                for level, of in (("eventual", {}), ("bounded", {"max_staleness": 3600})):
                    if not same and not alike:
                        with pytest.raises(InvalidInput, match='compare "k" by other rules'):
                            index.rows(T, where, level, **of)  # type: ignore[arg-type]
                        continue
                    found = {(row.id, shard) for row, shard in index.rows(T, where, level, **of)}  # type: ignore[arg-type]
                    truth = set()
                    for shard, there in engines.items():
                        with there.connect() as connection:
                            truth |= {(row.id, shard) for row in connection.execute(T.select().where(where))}
                    assert found == truth, (name, value, level)


def test_texts_that_two_libraries_order_are_compared_by_their_bytes(shards: Make) -> None:
    made = shards(1, "SELECT")
    built(made, "texts of another collation")
    engines = {name: engine(dsn) for name, dsn in made.dsns.items()}
    with ShardedIndex(engine(made.index), "public.ix", engines) as index:
        found = index.rows(T, K.collate("C") < "a", "eventual")
        assert {row.k for row in found.rows} == {"A", "B"}
        with pytest.raises(InvalidInput, match="compare"):
            index.rows(T, K.collate("ord") < "a", "eventual")


@pytest.mark.parametrize("column", ["k", "id", "v"])
def test_a_build_is_refused_where_two_libraries_equate_values(shards: Make, column: str) -> None:
    """In the key or the primary key: if two rows are one to the index server, it has no room for both."""
    made = shards(1, "SELECT")
    if not made.ask("SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"):
        pytest.skip("needs ICU")
    loose = "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level{}', deterministic = false)"
    made.ask(loose.format(1))
    made.run(loose.format(2))
    columns = {one: "text COLLATE loose" if one == column else "text" for one in ("id", "k", "v")}
    made.run(
        f"CREATE TABLE t (id {columns['id']} PRIMARY KEY, k {columns['k']}, v {columns['v']})",
        "INSERT INTO t VALUES ('e', 'e', 'e'), ('é', 'é', 'é')",
    )
    apart.add_all(made)
    if column == "v":
        prepared, run = apart.begin(made)
        apart.finish_all(made, run)
        assert apart.assert_exact(made, prepared.generation_id) == 2
        return
    with pytest.raises(RoirError, match=r"compare values of column .+ by different rules"):
        apart.begin(made)
    assert made.ask("SELECT FROM roir.index") == []


def test_rules_of_two_servers() -> None:
    assert rules.unlike(["C", "encoding UTF8"], ["C", "encoding UTF8"]) == []
    assert rules.unlike(["ICU en 1"], ["ICU en 2"]) == ["ICU en 1", "ICU en 2"]
    mine, yours = 'enum public.m ["a", "b"]', 'enum public.m ["a", "x", "b"]'
    assert rules.unlike([mine], [yours]) == rules.unlike([yours], [mine]) == []
    assert rules.unlike([mine], [yours], growing=True) == []
    assert rules.unlike([yours], [mine], growing=True) == [yours]
    other = 'enum public.m ["b", "a"]'
    assert rules.unlike([mine], [other]) == [mine, other]
