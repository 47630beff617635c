"""Partitions of a shard's table that come and go, with rows, while their entries are shipped."""

from __future__ import annotations

import random

import psycopg2
import pytest

from airflow_roir.definition import parse_name
from airflow_roir.engine.readers import view
from airflow_roir.shards.shard import feeds_of
from airflow_roir.shards.ship.feed import FeedShipper
from servers.shards import Shards
from tests.shards.apart import add_all, assert_exact, begin, build_all, seal_all, ship_all
from tests.shards.conftest import Make
from tests.shards.laid import lay

pytestmark = pytest.mark.sample(3)

TABLE = (
    "CREATE TABLE t (id int, k text, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
    "CREATE TABLE t_0 PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (100) TO (200)",
    "CREATE TABLE t_rest PARTITION OF t DEFAULT",
    "INSERT INTO t SELECT i, '{shard}' || i % 7, i FROM generate_series(0, 299) i",
)


def ready(shards: Make) -> tuple[Shards, int, list[FeedShipper]]:
    """Two shards whose index is built, and may be shipped to."""
    made = add_all(shards(2, *TABLE))
    prepared, run = begin(made)
    build_all(made, run)
    seal_all(made, run)
    feeds = made.ask("SELECT id FROM roir.feed ORDER BY id")
    shippers = [FeedShipper(made.database, feed, "test") for (feed,) in feeds]
    for one in shippers:
        assert one.claim()
    return made, prepared.generation_id, shippers


def ship(shippers: list[FeedShipper]) -> None:
    for one in shippers:
        one.ship_pass()


CHANGES = {
    "detach": ("ALTER TABLE t DETACH PARTITION t_1", "DELETE FROM t_1 WHERE id < 150"),
    "drop": ("DROP TABLE t_1",),
    "truncate a leaf": ("TRUNCATE t_1",),
    "truncate all": ("TRUNCATE t", "INSERT INTO t VALUES (5, 'after', 5), (105, 'after', 5)"),
    "attach": (
        "CREATE TABLE t_2 (LIKE t INCLUDING ALL)",
        "INSERT INTO t_2 SELECT i, 'new', i FROM generate_series(300, 350) i",
        "ALTER TABLE t ATTACH PARTITION t_2 FOR VALUES FROM (300) TO (400)",
        "UPDATE t SET k = 'newer' WHERE id = 310",
    ),
    "out and in again": (
        "ALTER TABLE t DETACH PARTITION t_1",
        "DELETE FROM t_1 WHERE id % 2 = 0",
        "UPDATE t_1 SET k = 'outside'",
        "ALTER TABLE t ATTACH PARTITION t_1 FOR VALUES FROM (100) TO (200)",
    ),
    "out, and its bounds go to the default": (
        "ALTER TABLE t DETACH PARTITION t_1",
        "INSERT INTO t VALUES (120, 'in the default', 1)",
    ),
    "a new one": (
        "CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (500) TO (600)",
        "INSERT INTO t VALUES (555, 'x', 1)",
        "TRUNCATE t_3",
        "INSERT INTO t VALUES (556, 'x', 1)",
    ),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_partition_brings_or_takes_is_followed(shards: Make, change: str) -> None:
    made, generation, shippers = ready(shards)
    ship(shippers)
    assert_exact(made, generation)
    made.run(*filter(None, CHANGES[change]), only="s0")
    ship(shippers)
    assert_exact(made, generation)
    # The leaves that exist now capture the writes from here on.
    made.run("UPDATE t SET k = k || '!' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 5 = 0")
    ship(shippers)
    assert_exact(made, generation)
    assert made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


@pytest.mark.sample(0)
def test_a_level_that_was_out_is_followed_to_its_leaves(shards: Make) -> None:
    """Found: an index over shards: a level of a shard's table was detached, its rows changed, and attached again:
    entries stayed as they were, and nothing said so. It holds: its leaves are followed as those that went and came.
    """
    made, generation, shippers = ready(shards)
    made.run(
        "CREATE TABLE s PARTITION OF t FOR VALUES FROM (600) TO (700) PARTITION BY RANGE (id)",
        "CREATE TABLE s_1 PARTITION OF s FOR VALUES FROM (600) TO (650)",
        "INSERT INTO t SELECT i, 'a level', i FROM generate_series(600, 620) i",
        only="s0",
    )
    ship(shippers)
    assert_exact(made, generation)
    made.run(
        "ALTER TABLE t DETACH PARTITION s",
        "UPDATE s_1 SET k = 'outside'",
        "ALTER TABLE t ATTACH PARTITION s FOR VALUES FROM (600) TO (700)",
        only="s0",
    )
    ship(shippers)
    assert_exact(made, generation)
    assert made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


# Made otherwise on the index server; how the primary key is cut; the ends of the leaf `t_1`; keys.
OWN_ORDERS = {
    "labels in another order": (
        "CREATE TYPE own AS ENUM ('a', 'b', 'c', 'd', 'e')",
        "CREATE TYPE own AS ENUM ('e', 'b', 'd', 'a', 'c')",
        "RANGE (id)",
        "FROM ('b') TO ('d')",
    ),
    "labels that the index server calls otherwise": (
        "CREATE TYPE own AS ENUM ('a', 'b', 'c', 'd', 'e')",
        "CREATE TYPE own AS ENUM ('a', 'x', 'b', 'c', 'd', 'e')",
        "RANGE (id)",
        "FROM ('b') TO ('d')",
    ),
    "texts": ("CREATE DOMAIN own AS text", "CREATE DOMAIN own AS text", "RANGE (id)", "FROM ('b') TO ('d')"),
    "texts in another order": (
        """CREATE COLLATION ord (provider = icu, locale = 'und'); CREATE DOMAIN own AS text COLLATE ord""",
        """CREATE COLLATION ord (provider = icu, locale = 'und-u-kf-upper-kr-latn-digit');
           CREATE DOMAIN own AS text COLLATE ord""",
        "RANGE (id)",
        "FROM ('b') TO ('B')",
    ),
    "a hash": (
        "CREATE DOMAIN own AS text",
        "CREATE DOMAIN own AS text",
        "HASH (id)",
        "WITH (MODULUS 2, REMAINDER 0)",
    ),
    "an operator class": (
        'CREATE DOMAIN own AS text COLLATE "C"',
        'CREATE DOMAIN own AS text COLLATE "C"',
        "RANGE (id text_pattern_ops)",
        "FROM ('b') TO ('d')",
    ),
}
OTHERS = {"HASH (id)": "FOR VALUES WITH (MODULUS 2, REMAINDER 1)"}


@pytest.mark.sample(0)
@pytest.mark.parametrize("how", ["DETACH PARTITION t_1", "out and in again"])
@pytest.mark.parametrize("order", OWN_ORDERS)
def test_a_leaf_of_an_order_that_is_the_shards_own_is_followed(shards: Make, order: str, how: str) -> None:
    """The index server would delete entries of other leaves, or leave some: the shard says which they are."""
    there, here, cut, ends = OWN_ORDERS[order]
    made = shards(1, "SELECT")
    if "icu" in there and not made.ask("SELECT 1 FROM pg_collation WHERE collname = 'und-x-icu'"):
        pytest.skip("needs ICU")
    made.ask(here)
    key = "id own" if "pattern" not in cut else 'id text COLLATE "C"'
    made.run(
        there,
        f"CREATE TABLE t ({key} PRIMARY KEY, k text, v int) PARTITION BY {cut}",
        f"CREATE TABLE t_1 PARTITION OF t FOR VALUES {ends}",
        f"CREATE TABLE t_rest PARTITION OF t {OTHERS.get(cut, 'DEFAULT')}",
    )
    add_all(made)
    keys = "abcde" if "labels" in order else "aAbBcCdDeE"
    prepared, run = begin(made)
    build_all(made, run)
    seal_all(made, run)
    for number, one in enumerate(keys):
        made.run(f"INSERT INTO t VALUES ('{one}', 'k', {number})")
    ship_all(made, prepared.generation_id)
    assert assert_exact(made, prepared.generation_id) == len(keys)
    [(inside,)] = made.ask("SELECT count(*) FROM t_1", shard="s0")
    assert 0 < inside < len(keys)
    if how.startswith("DETACH"):
        made.run(f"ALTER TABLE t {how}")
    else:
        made.run(
            "ALTER TABLE t DETACH PARTITION t_1",
            "DELETE FROM t_1 WHERE v % 3 = 1",
            "UPDATE t_1 SET k = 'outside'",
            f"ALTER TABLE t ATTACH PARTITION t_1 FOR VALUES {ends}",
        )
    ship_all(made, prepared.generation_id)
    assert_exact(made, prepared.generation_id)
    assert made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


GENERATED = "k text, v int GENERATED ALWAYS AS (n % 5) STORED, n int"
EXPRESSIONS = {
    "of a table": (("CREATE TABLE t (id int PRIMARY KEY, {})",), "t"),
    "of a partitioned table": (
        ("CREATE TABLE t (id int PRIMARY KEY, {}) PARTITION BY RANGE (id)", *TABLE[1:4]),
        "t",
    ),
    "of a leaf": (("CREATE TABLE t (id int PRIMARY KEY, {}) PARTITION BY RANGE (id)", *TABLE[1:4]), "t_1"),
    "of a default partition alone": (
        ("CREATE TABLE t (id int PRIMARY KEY, {}) PARTITION BY RANGE (id)", TABLE[3]),
        "t_rest",
    ),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("kind", EXPRESSIONS)
def test_values_that_are_generated_anew_are_followed(shards: Make, kind: str, key: bool, pg: int) -> None:
    """No trigger fires for them."""
    if pg < 17:
        pytest.skip("PostgreSQL 17 has SET EXPRESSION")
    table, relation = EXPRESSIONS[kind]
    rows = "INSERT INTO t (id, k, n) SELECT i, '{shard}', i FROM generate_series(0, 299) i"
    made = add_all(shards(2, *(one.replace("{}", GENERATED) for one in table), rows))
    prepared, run = begin(made, keys="v" if key else "k", include="k" if key else "v")
    build_all(made, run)
    seal_all(made, run)
    with made.database.transaction() as connection:
        feeds = [one.id for one in feeds_of(connection, prepared.generation_id)]
    shippers = [FeedShipper(made.database, feed, "test") for feed in feeds]
    assert all(one.claim() for one in shippers)
    ship(shippers)
    made.run(f"ALTER TABLE {relation} ALTER v SET EXPRESSION AS (n % 7)", only="s0")
    made.run("DELETE FROM t WHERE id % 3 = 0", "UPDATE t SET n = n + 1 WHERE id % 4 = 0")
    ship(shippers)
    assert_exact(made, prepared.generation_id)
    made.run("UPDATE t SET n = n + 1 WHERE id % 2 = 0", "TRUNCATE t", "INSERT INTO t (id, k, n) VALUES (1, 'a', 1)")
    ship(shippers)
    assert assert_exact(made, prepared.generation_id) == 2
    assert made.ask("SELECT doubt FROM roir.feed WHERE doubt IS NOT NULL") == []


def test_nothing_is_fresh_while_rows_that_were_generated_anew_are_on_their_way(shards: Make, pg: int) -> None:
    if pg < 17:
        pytest.skip("PostgreSQL 17 has SET EXPRESSION")
    table, _ = EXPRESSIONS["of a table"]
    made = shards(1, *(one.replace("{}", GENERATED) for one in table))
    laid = lay(made, ("k",), ("v",))
    made.run("INSERT INTO t (id, k, n) VALUES (1, 'a', 1)")
    laid.ship()
    asked = "SELECT k FROM public.ix WHERE k = 'a' AND (SELECT roir.fresh('public.ix', '1 h'))"
    with made.database.transaction() as connection:
        view.show(connection, parse_name("public.ix", "index"), 1, laid.generation, guarded=False)
    assert made.ask(asked) == [("a",)]
    made.run("ALTER TABLE t ALTER v SET EXPRESSION AS (n % 7)")
    shipper = laid.shipper("s0")
    assert shipper.claim()
    shipper.apply(shipper.poll())
    assert laid.base() == []
    with pytest.raises(psycopg2.Error, match="has not been shipped to its end"):
        made.ask(asked)
    shipper.ship_pass()
    assert made.ask(asked) == [("a",)]


@pytest.mark.sample(0)
def test_a_default_partition_that_was_alone_is_followed_when_it_goes(shards: Make) -> None:
    """A default partition that is the only one has no bounds."""
    made = add_all(shards(2, TABLE[0], TABLE[3], TABLE[4]))
    prepared, run = begin(made)
    build_all(made, run)
    seal_all(made, run)
    made.run("ALTER TABLE t DETACH PARTITION t_rest", only="s0")
    ship_all(made, prepared.generation_id)
    assert assert_exact(made, prepared.generation_id) == 300


@pytest.mark.sample(0)
def test_a_new_partition_that_is_emptied_between_a_poll_and_what_follows_it(shards: Make) -> None:
    made, generation, shippers = ready(shards)
    ship(shippers)
    made.run("CREATE TABLE t_3 PARTITION OF t FOR VALUES FROM (500) TO (600)", "INSERT INTO t VALUES (555, 'x', 1)")
    found = [one.poll() for one in shippers]
    made.run("TRUNCATE t_3")
    for one, poll in zip(shippers, found, strict=True):
        one.apply(poll)
    ship(shippers)
    assert_exact(made, generation)


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(12))
def test_random_partitions_come_and_go_between_polls_and_shippers_die(shards: Make, seed: int) -> None:
    made, generation, shippers = ready(shards)
    chance = random.Random(seed)
    out: set[str] = set()
    bounds = {"t_0": (0, 100), "t_1": (100, 200)}
    for _ in range(25):
        what = chance.choice(["write", "write", "out", "in", "poll", "poll", "die"])
        shard = "s0"
        if what == "write":
            made.run(
                f"INSERT INTO t SELECT i, 'w', {chance.randrange(9)} "
                f"FROM generate_series({chance.randrange(300)}, 300, 7) i "
                "ON CONFLICT (id) DO UPDATE SET k = excluded.k || excluded.v",
                only=shard,
            )
        elif what == "out" and (there := sorted(set(bounds) - out)):
            leaf = chance.choice(there)
            made.run(f"ALTER TABLE t DETACH PARTITION {leaf}", f"UPDATE {leaf} SET k = 'out'", only=shard)
            out.add(leaf)
        elif what == "in" and out:
            leaf = chance.choice(sorted(out))
            low, high = bounds[leaf]
            made.run(
                f"DELETE FROM t WHERE id >= {low} AND id < {high}",
                f"ALTER TABLE t ATTACH PARTITION {leaf} FOR VALUES FROM ({low}) TO ({high})",
                only=shard,
            )
            out.discard(leaf)
        elif what == "poll":
            for one in shippers:
                one.apply(one.poll())
        elif what == "die":
            for one in shippers:
                one.close()
            feeds = [one.feed_id for one in shippers]
            shippers = [FeedShipper(made.database, feed, "another") for feed in feeds]
            for one in shippers:
                assert one.claim(take_over=True)
    ship(shippers)
    assert_exact(made, generation)
