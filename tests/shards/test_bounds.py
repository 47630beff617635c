"""The bounds of a shard's partitions as values: they say what the shard's server says, and are no SQL."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_roir.definition import IndexDefinition, parse_name
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry, equality_operators
from airflow_roir.engine.source import catalog
from airflow_roir.shards import home
from airflow_roir.shards.copy.bounds import Unreadable, within
from tests.conftest import run_sql

pytestmark = pytest.mark.sample(6)

LEVELS = """
SELECT l.relation::regclass::text AS leaf, roir_shard.levels('public.t'::regclass, l.relation) AS levels
  FROM roir_shard.parts('public.t'::regclass) l
"""
# A table's columns and partition key, its partitions, and rows at their ends.
CUT = {
    "integers": (
        "id int",
        "RANGE (id)",
        ("FROM (MINVALUE) TO (-10)", "FROM (-10) TO (0)", "FROM (0) TO (MAXVALUE)"),
        "VALUES (-11), (-10), (-9), (-1), (0), (1)",
    ),
    "numbers": (
        "id numeric",
        "RANGE (id)",
        ("FROM (-1.5) TO (1e3)", "FROM (1e3) TO ('NaN')", "DEFAULT"),
        "VALUES (-1.6), (-1.5), (-1.4), (999.9), (1000), (1000.0001), ('NaN'), ('Infinity')",
    ),
    "moments": (
        "id timestamptz",
        "RANGE (id)",
        ("FROM ('2024-01-01 00:00+02') TO ('infinity')", "FROM ('-infinity') TO ('2024-01-01 00:00+02')"),
        "VALUES ('2023-12-31 21:59+00'), ('2023-12-31 22:00+00'), ('2026-01-01'), ('-infinity')",
    ),
    "a list": (
        "id text",
        "LIST (id)",
        ("IN ('a', 'b''c', NULL)", "IN ('MAXVALUE')", "DEFAULT"),
        "VALUES ('a'), ('b''c'), ('x')",
    ),
    "booleans": ("id bool", "LIST (id)", ("IN (true)", "IN (false)"), "VALUES (true), (false)"),
    "two columns": (
        "a int, b bytea",
        "RANGE (a, b)",
        (
            "FROM (MINVALUE, MINVALUE) TO (1, 'k')",
            "FROM (1, 'k') TO (1, MAXVALUE)",
            "FROM (2, MINVALUE) TO (3, 'a')",
            "DEFAULT",
        ),
        "VALUES (0, 'z'), (1, 'a'), (1, 'k'), (1, 'z'), (2, ''), (2, 'z'), (3, ''), (3, 'a'), (4, 'a')",
    ),
}


def entry_of(database: Database, table: str) -> Entry:
    """An entry as the index server has it: the same columns, in a table `e` with the columns c1, c2, …"""
    with database.transaction() as connection:
        source = catalog.read_source(connection, parse_name(table, "table"))
        definition = IndexDefinition(parse_name("public.ix", "index"), source.name, source.primary_key)
        entry = Entry.of(source, definition, "none", 1)
        execute(connection, f"CREATE TABLE public.e ({entry.definitions()}, leaf text)")
        execute(connection, f"CREATE INDEX e_key ON public.e ({', '.join(entry.physical())})")
        names = ", ".join(entry.source_columns("s"))
        execute(connection, f"INSERT INTO public.e SELECT {names}, tableoid::regclass::text FROM {source.sql} s")
        return entry.comparing_by(equality_operators(connection, "public.e_key"))


def levels(database: Database) -> dict[str, object]:
    """The levels of each leaf, as the shard reports them."""
    with database.transaction() as connection:
        rows = execute(connection, LEVELS).all()
    return {row.leaf: row.levels for row in rows}


def had(database: Database, entry: Entry, leaf: str) -> list[tuple[str, ...]]:
    """The entries of a leaf's rows."""
    columns = ", ".join(f"c{i + 1}::text" for i in entry.identity_positions)
    with database.transaction() as connection:
        rows = execute(connection, f"SELECT {columns} FROM public.e WHERE leaf = %(leaf)s", {"leaf": leaf})
        return sorted(tuple(row) for row in rows)


def told(database: Database, entry: Entry, found: object) -> list[tuple[str, ...]]:
    """The entries that are within bounds."""
    values: dict[str, Any] = {"x": 1}
    with database.transaction() as connection:
        condition = within(entry, entry, found, "b", values)
        columns = ", ".join(f"b.c{i + 1}::text" for i in entry.identity_positions)
        rows = execute(connection, f"SELECT {columns} FROM public.e b WHERE %(x)s = 1 AND {condition}", values)
        return sorted(tuple(row) for row in rows)


@pytest.fixture
def shard(database: Database) -> Database:
    """A shard and an index server in one."""
    run_sql(database.dsn, "CREATE TYPE mood AS ENUM ('ok', 'so so', 'sad')")
    home.install(database)
    return database


@pytest.mark.parametrize("cut", CUT)
def test_an_entry_is_within_the_bounds_of_the_partition_that_has_its_row(shard: Database, cut: str) -> None:
    columns, by, parts, rows = CUT[cut]
    key = ", ".join(one.split()[0] for one in columns.split(", "))
    run_sql(
        shard.dsn,
        f"CREATE TABLE t ({columns}, PRIMARY KEY ({key})) PARTITION BY {by}",
        *(
            f"CREATE TABLE t_{i} PARTITION OF t {one if one == 'DEFAULT' else f'FOR VALUES {one}'}"
            for i, one in enumerate(parts)
        ),
        f"INSERT INTO t {rows}",
    )
    entry = entry_of(shard, "public.t")
    for leaf, found in levels(shard).items():
        assert told(shard, entry, found) == had(shard, entry, leaf), (leaf, found)


def test_bounds_of_several_levels_whose_columns_have_other_places(shard: Database) -> None:
    run_sql(
        shard.dsn,
        "CREATE TABLE t (gone int, b int, a text, PRIMARY KEY (a, b)) PARTITION BY LIST (a)",
        "ALTER TABLE t DROP gone",
        "CREATE TABLE m (x int, a text NOT NULL, b int NOT NULL) PARTITION BY RANGE (b)",
        "ALTER TABLE m DROP x",
        "CREATE TABLE l1 (LIKE m)",
        "CREATE TABLE l2 (b int NOT NULL, a text NOT NULL)",
        "ALTER TABLE m ATTACH PARTITION l1 FOR VALUES FROM (1) TO (5)",
        "ALTER TABLE m ATTACH PARTITION l2 DEFAULT",
        "ALTER TABLE t ATTACH PARTITION m FOR VALUES IN ('m', 'n')",
        "CREATE TABLE rest PARTITION OF t DEFAULT",
        "INSERT INTO t (a, b) SELECT a, b FROM unnest(ARRAY['k', 'm', 'n', 'o']) a, generate_series(0, 6) b",
    )
    entry = entry_of(shard, "public.t")
    for leaf, found in levels(shard).items():
        assert told(shard, entry, found) == had(shard, entry, leaf) != [], (leaf, found)


# By an order that may be another one on each server, or a hash, which is of this server and of this table.
OWN = {
    "hash": ("id int PRIMARY KEY", "HASH (id)", "WITH (MODULUS 2, REMAINDER 0)"),
    "order": ("id text PRIMARY KEY", "RANGE (id text_pattern_ops)", "FROM ('a') TO ('b')"),
    "texts": ('id text COLLATE "C" PRIMARY KEY', "RANGE (id)", "FROM ('a''b\\') TO ('c, ''d'')')"),
    "moods": ("id mood PRIMARY KEY", "LIST (id)", "IN ('sad')"),
    "an order of moods": ("id mood PRIMARY KEY", "RANGE (id)", "FROM ('ok') TO ('sad')"),
}


@pytest.mark.parametrize("cut", OWN)
def test_what_only_the_shard_can_tell_is_refused(shard: Database, cut: str) -> None:
    columns, by, part = OWN[cut]
    run_sql(
        shard.dsn,
        f"CREATE TABLE t ({columns}) PARTITION BY {by}",
        f"CREATE TABLE t_0 PARTITION OF t FOR VALUES {part}",
    )
    entry = entry_of(shard, "public.t")
    with pytest.raises(Unreadable):
        told(shard, entry, levels(shard)["public.t_0"])


HOSTILE = [
    "FOR VALUES IN ('a'); DROP TABLE e; --",
    "FOR VALUES IN ('a' || canary())",
    "FOR VALUES IN (canary())",
    "FOR VALUES FROM (1) TO (2) OR canary()",
    "FOR VALUES IN ('a'')",
    "FOR VALUES IN ('a''')\n",
    "FOR VALUES IN ('a'::text)",
    "FOR VALUES IN (E'a\\'); canary(); --')",
    "FOR VALUES IN ()",
    "FOR VALUES FROM (1, 2) TO (3, 4)",
    "FOR VALUES FROM (NULL) TO (MAXVALUE)",
    "FOR VALUES IN (MAXVALUE)",
    "true",
    "",
]


@pytest.mark.parametrize("bound", [*HOSTILE, None, 1, {"a": "b"}])
def test_what_is_no_bound_is_no_condition(database: Database, bound: object) -> None:
    run_sql(
        database.dsn, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE FUNCTION public.canary() RETURNS bool RETURN true"
    )
    entry = entry_of(database, "public.t")
    level = {"bound": bound, "columns": [1], "plain": True, "others": []}
    for found in ([level], [level | {"bound": "DEFAULT", "others": [bound]}]):
        with pytest.raises(Unreadable):
            told(database, entry, found)


@pytest.mark.parametrize(
    "level",
    [
        {"columns": ["1; canary()"]},
        {"columns": [2]},
        {"columns": []},
        {"columns": None},
        {"plain": "yes"},
        {"others": None, "bound": "DEFAULT"},
        {"others": "FOR VALUES IN (1)", "bound": "DEFAULT"},
    ],
)
def test_what_is_no_level_is_no_condition(database: Database, level: dict[str, object]) -> None:
    run_sql(database.dsn, "CREATE TABLE t (id int PRIMARY KEY)")
    entry = entry_of(database, "public.t")
    whole = {"bound": "FOR VALUES IN (1)", "columns": [1], "plain": True, "others": []}
    assert told(database, entry, [whole]) == []
    with pytest.raises(Unreadable):
        told(database, entry, [whole | level])
    with pytest.raises(Unreadable):
        told(database, entry, whole)
