"""Who announces writes: the shard's server, or its clients; what is refused, and what is told."""

from __future__ import annotations

from tests.shards.announced import scene
from tests.shards.conftest import Make

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i")


def test_a_server_announces_before_the_commit(contrib_shards: Make) -> None:
    found = scene(contrib_shards(2, *TABLE), "server")
    assert found.intents() == []
    found.made.run("UPDATE t SET k = 'new' WHERE id = 1", only="s0")
    assert [row[1:4] for row in found.intents()] == [("k1", "s0", 1), ("new", "s0", 1)]
    found.rest()
    assert found.intents() == []
    assert found.stored() == found.truth()
