"""Shipping: an outbox is brought to the index server, whatever happens between two steps."""

from __future__ import annotations

import pytest

from airflow_roir.errors import Fenced
from tests.shards.conftest import Make
from tests.shards.laid import lay


def test_what_was_written_is_shipped(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    made.run(
        "INSERT INTO t SELECT i, CASE WHEN i % 7 > 0 THEN 'k' || i % 5 END, i FROM generate_series(1, 200) i",
        "UPDATE t SET k = 'other' WHERE id % 11 = 0",
        "UPDATE t SET v = 0 WHERE id % 13 = 0",
        "UPDATE t SET id = -id WHERE id < 5",
        "DELETE FROM t WHERE id % 17 = 0",
    )
    laid.ship()
    laid.assert_exact()
    made.run("UPDATE t SET k = NULL WHERE id % 19 = 0", "DELETE FROM t WHERE k IS NULL AND id % 2 = 0")
    laid.ship()
    laid.assert_exact()
    for feed in laid.feeds:
        assert made.ask(f"SELECT count(*) FROM roir_shard.{feed.outbox} WHERE version > 0", shard=feed.shard.name) == [
            (0,)
        ]
    assert made.ask("SELECT owner, pending, oldest_at, doubt FROM roir.feed") == [(None, 0, None, None)] * 2


def test_a_truncated_shard_loses_all_of_its_entries_and_no_others(shards: Make) -> None:
    made = shards(2)
    laid = lay(made)
    made.run("INSERT INTO t SELECT i, 'k', i FROM generate_series(1, 20) i")
    laid.ship()
    made.run(
        "BEGIN; INSERT INTO t VALUES (99, 'k', 0); TRUNCATE t; INSERT INTO t VALUES (100, 'k', 1); COMMIT", only="s1"
    )
    laid.ship()
    laid.assert_exact()
    assert len(laid.base()) == 21
    made.run("TRUNCATE t", only="s0")
    laid.ship()
    laid.assert_exact()


def test_who_was_overtaken_changes_nothing(shards: Make) -> None:
    made = shards(1)
    laid = lay(made)
    made.run("INSERT INTO t VALUES (1, 'old', 1)")
    first, second = laid.shipper("s0", "first"), laid.shipper("s0", "second")
    assert first.claim()
    assert not second.claim()
    late = first.poll()
    assert second.claim(take_over=True)
    made.run("UPDATE t SET k = 'new'")
    second.ship_pass()
    with pytest.raises(Fenced, match="second has it now"):
        first.apply(late)
    laid.assert_exact()
