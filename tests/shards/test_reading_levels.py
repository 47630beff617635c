"""Reads of an index apart: what each level promises, with writer, shipper and reader in steps."""

from __future__ import annotations

import pytest

from tests.shards.conftest import Make
from tests.shards.reading import Item, T, ground, with_servers

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, 'k' || i % 3, i FROM generate_series(1, 6) i",
)


def test_first(contrib_shards: Make) -> None:
    with ground(contrib_shards(2, *TABLE)) as g:
        assert g.strict("k1") == {(1, "k1", 1, "s0"), (4, "k1", 4, "s0"), (1, "k1", 1, "s1"), (4, "k1", 4, "s1")}
        with_servers(g)
        assert g.sql_strict("k1") == g.strict("k1")
        g.write("s0", "UPDATE t SET k = 'a' WHERE id = 1")
        assert g.strict("a") == {(1, "a", 1, "s0")} == g.sql_strict("a")
        assert g.strict("k1") == {(4, "k1", 4, "s0"), (1, "k1", 1, "s1"), (4, "k1", 4, "s1")} == g.sql_strict("k1")
        assert [i.id for i in g.index.rows(Item, Item.key == "a", "strict").rows] == [1]
        assert list(g.index.rows(T, T.c.k == "a")) == []
        g.ship()
        assert g.strict("a") == {(1, "a", 1, "s0")} == g.sql_strict("a")
