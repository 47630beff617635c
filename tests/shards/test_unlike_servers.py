"""Index server and shards that aren't alike: types of the table's own, encodings, tokens. Exact, or refused by name."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from airflow_roir.engine import build
from airflow_roir.errors import RoirError
from servers.shards import Shards, on_server, run_sql
from tests.shards import apart
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)

ENUM = "CREATE TYPE own AS ENUM ('a', 'b', 'c')"
# The type in the shards, that on the index server, values; and what is said if it can't be.
UNLIKE: dict[str, tuple[str, str | None, tuple[str, ...], str | None]] = {
    "no such type": (
        ENUM,
        None,
        ("a", "b"),
        "the index server can't hold column",
    ),
    "fewer labels, of no row": (ENUM, "CREATE TYPE own AS ENUM ('a', 'b')", ("a", "b"), None),
    "fewer labels, of a row": (ENUM, "CREATE TYPE own AS ENUM ('a', 'b')", ("a", "c"), 'of shard "s0": .*input value'),
    "more labels": (ENUM, "CREATE TYPE own AS ENUM ('a', 'b', 'c', 'd')", ("a", "c"), None),
    "labels in another order": (ENUM, "CREATE TYPE own AS ENUM ('c', 'b', 'a')", ("a", "b", "c"), None),
    # Entries are of the base type.
    "a stricter domain": ("CREATE DOMAIN own AS int", "CREATE DOMAIN own AS int CHECK (VALUE < 5)", ("1", "9"), None),
    "a laxer domain": ("CREATE DOMAIN own AS int CHECK (VALUE < 5)", "CREATE DOMAIN own AS int", ("1", "4"), None),
    "a domain over another type": ("CREATE DOMAIN own AS int", "CREATE DOMAIN own AS text", ("1", "10", "9"), None),
    "a composite with more": (
        "CREATE TYPE own AS (x int)",
        "CREATE TYPE own AS (x int, y int)",
        ("(1)", "(2)"),
        'of shard "s0": .*malformed record literal',
    ),
}


def finished(made: Shards) -> int:
    """Builds, then writes and ships; returns the number of entries."""
    prepared, run = apart.begin(made, verify="after")
    apart.finish_all(made, run)
    made.run("UPDATE t SET v = v + 1", "DELETE FROM t WHERE id = 1")
    apart.ship_all(made, prepared.generation_id)
    return apart.assert_exact(made, prepared.generation_id)


# The plan's sample leaves out values that no B-tree can hold: the build's first batch reports an included composite.
@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("case", "where"),
    [
        (case, at)
        for case in UNLIKE
        for at in ("key", "included")
        if (case, at) != ("a composite with more", "included")
    ],
)
def test_a_type_that_differs_on_the_index_server_is_refused_or_exact(shards: Make, case: str, where: str) -> None:
    there, here, values, refused = UNLIKE[case]
    columns = "k own, v int" if where == "key" else "k int, v int, w own"
    column = "k" if where == "key" else "w"
    made = apart.add_all(shards(2, there, f"CREATE TABLE t (id int PRIMARY KEY, {columns})"))
    for number, value in enumerate(values):
        made.run(f"INSERT INTO t (id, {column}, v) VALUES ({number}, '{value}', 0)")
    made.run("ANALYZE t")
    if here is not None:
        made.ask(here)
    include = "v" if where == "key" else "v,w"
    if refused is not None:
        with pytest.raises(RoirError, match=refused):
            apart.begin(made, include=include)
        assert made.ask("SELECT FROM roir.index") == []
        return
    prepared, run = apart.begin(made, include=include, verify="after")
    apart.finish_all(made, run)
    made.run("UPDATE t SET v = v + 1", "DELETE FROM t WHERE id = 1")
    apart.ship_all(made, prepared.generation_id)
    assert apart.assert_exact(made, prepared.generation_id) == 2 * (len(values) - 1)


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_a_shard_of_another_encoding(shards: Make, encoding: str) -> None:
    """Text crosses as text: what both have is exact."""
    made = shards(2)
    server, name = on_server(made.index, "postgres"), urlsplit(made.dsns["s1"]).path[1:]
    run_sql(
        server,
        f"DROP DATABASE {name}",
        f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
    )
    made.run("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", only="s1")
    text = "é" if encoding == "LATIN1" else "日本"
    made.run(f"INSERT INTO t VALUES (1, 'x', 1), (2, '{text}', 2)", "ANALYZE t")
    apart.add_all(made)
    assert finished(made) == 2
    assert made.ask("SELECT count(*) FROM public.ix WHERE k = %s", text) == [(2,)]


@pytest.mark.parametrize("when", ["plan", "build"])
def test_a_database_with_another_token_is_not_read(shards: Make, when: str) -> None:
    made = apart.add_all(shards(2))
    made.run("INSERT INTO t VALUES (1, 'a', 1)", "ANALYZE t")
    change = "UPDATE roir_shard.home SET token = gen_random_uuid()"
    if when == "plan":
        made.run(change, only="s1")
        with pytest.raises(RoirError, match='shard "s1": another database answers'):
            apart.begin(made)
        return
    _, run = apart.begin(made)
    made.run(change, only="s1")
    for _ in build.PHASE.work(made.database, run, 0):
        pass
    [(problem,)] = made.ask("SELECT problem FROM roir.shard WHERE name = 's1'")
    assert "another database answers under its DSN" in problem
    assert made.ask("SELECT count(*) FROM roir.scan_range WHERE NOT done AND shard_id = 2") != [(0,)]
