"""The sides that `make bench-shards` compares are comparable: peers copy every row, writers write, every side is in a
table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks import apart_lag, apart_peers
from benchmarks.apart import apart, email, emails, value
from benchmarks.apart_lookups import Shards
from benchmarks.shards import tables
from servers import contrib

ROWS = 3000


@pytest.mark.slow
def test_every_peer_copies_all_rows_and_leaves_nothing() -> None:
    with apart(1, contrib.ensure(contrib.CELERP), "64MB") as scene:
        scene.load(ROWS)
        for side in apart_peers.sides(2, Path("/nowhere")):
            apart_peers.clear(scene)
            if side.lacking() is None:
                # It counts the rows itself.
                taken = side.run(scene)
                assert taken["all"] == pytest.approx(taken["copy"] + taken["index"] + taken["vacuum"])
        apart_peers.clear(scene)
        assert value(scene.index, "SELECT count(*) FROM pg_class WHERE relname IN ('orders', 'entries')") == 0
        assert value(scene.dsns["s0"], "SELECT count(*) FROM pg_replication_slots") == 0


@pytest.mark.slow
def test_the_load_writes_to_every_shard_and_all_are_asked() -> None:
    version = contrib.ensure(contrib.CELERP)
    with apart(2, version, "64MB", of_one_server=True) as scene:
        scene.load(ROWS)
        ask = Shards(scene)
        before = {n: len(ask(email(n))) for n in range(0, emails(ROWS), 50)}
        assert set(before.values()) == {3}
        told: dict[str, float] = {}
        with apart_lag.writing(scene, version, 200, told):
            time.sleep(4)
        assert told["written_per_second"] > 0
        assert any(len(ask(email(n))) != 3 for n in range(emails(ROWS)))
        ask.close()


def test_all_that_was_measured_is_in_the_tables() -> None:
    side = {"side": "x", "title": "the x", "rows_per_second": 12345, "all": 2.5, "ratio": 1.25}
    ms = {"p50_ms": 0.5, "p99_ms": 2.25}
    printed = "\n".join(
        tables(
            {
                "build": {"rows": 1000, "left_out": {"y": "no y here"}, "sides": [side]},
                "lag": [{"shards": 1, "every_s": 1.0, "wanted_per_second": 1000, "written_per_second": 998, **ms}],
                "commits": [{"way": "no index", "ratio": 1.0, "added_ms": 0.0, **ms}],
                "lookups": [{"shards": n, "way": way, **ms} for n in (1, 16) for way in ("eventual", "strict")],
            }
        )
    )
    assert "| the x | 12,345 | 2.5 | 1.25 |" in printed
    assert "| y | – | – | left out: no y here |" in printed
    assert "| 1 | 1 s | 1,000 | 998 | 0.5 | 2.25 |" in printed
    assert "| no index | 0.50 | 2.25 | 1.00 | 0.00 |" in printed
    assert "| shards | eventual | strict |" in printed
    assert "| 16 | 0.50 / 2.25 | 0.50 / 2.25 |" in printed
    assert list(tables({})) == []
