"""The life of an index over shards: created, rebuilt over others, reverted, aborted, dropped; nothing stays behind."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, drop, revert
from airflow_roir.engine.snapshot import details, index
from airflow_roir.engine.snapshot.operation import status
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 7)::text, i * 10 + {number} FROM generate_series(1, 100) i"


def outboxes(made: Shards) -> list[int]:
    """How many captures each shard has: rows in its registry, triggers, tables and functions agree."""
    counts = []
    for name in made.names:
        [found] = made.ask(
            "SELECT (SELECT count(*) FROM roir_shard.outbox), "
            "(SELECT count(*) FROM pg_trigger WHERE tgname ~ '^roir_o_[0-9a-f]{16}$'), "
            "(SELECT count(*) FROM pg_class WHERE relnamespace = 'roir_shard'::regnamespace "
            "  AND relkind = 'r' AND relname ~ '^o_[0-9a-f]{16}$'), "
            "(SELECT count(*) FROM pg_proc WHERE proname ~ '^o_[0-9a-f]{16}_touch')",
            shard=name,
        )
        assert len(set(found)) == 1, found
        counts.append(found[0])
    return counts


def left_behind(made: Shards) -> list[str]:
    """The relations in roir_data."""
    return [name for (name,) in made.ask("SELECT relname FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace")]


def published(made: Shards) -> int:
    [(generation,)] = made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
    return int(generation)


@pytest.mark.by_hand("sweeps")
def test_from_the_build_to_the_drop(shards: Make) -> None:
    made = apart.add_all(shards(3, TABLE, ROWS))
    prepared, run = apart.begin(made, shards="s0,s1")
    made.run(
        "UPDATE t SET k = 'new' WHERE id < 10", "DELETE FROM t WHERE id > 95", "INSERT INTO t VALUES (999, 'x', 1)"
    )
    apart.finish_all(made, run)
    apart.assert_exact(made, prepared.generation_id)
    assert outboxes(made) == [1, 1, 0]
    assert made.ask("SELECT count(*), count(DISTINCT shard) FROM public.ix WHERE k = 'new'") == [(18, 2)]

    # The status neither shows the shape table nor reports it as missing.
    [told] = status(made.database)
    assert told.warnings == ()
    [facts] = index.indexes(made.database)
    assert (facts.source, facts.apart, facts.state) == ("public.t in s0, s1", True, "published")
    assert not [line for line in facts.warnings if "ships" not in line]
    assert details.progress(made.database, "public.ix").source == "public.t in s0, s1"

    second, run = apart.begin(made, shards="s1,s2", keys=None, include=None, table=None)
    assert second.kind == "rebuild"
    assert outboxes(made) == [1, 2, 1]
    apart.finish_all(made, run)
    apart.assert_exact(made, second.generation_id)
    assert made.ask("SELECT DISTINCT shard FROM public.ix ORDER BY 1") == [("s1",), ("s2",)]
    # Settings that aren't given stay as they are.
    apart.begin(made, shards=None, keys=None, include=None, table=None)
    abort.abort(made.database, "public.ix", "test")
    assert outboxes(made) == [1, 2, 1]

    revert.revert(made.database, "public.ix", "test")
    assert published(made) == prepared.generation_id
    assert made.ask("SELECT DISTINCT shard FROM public.ix ORDER BY 1") == [("s0",), ("s1",)]

    drop.drop_index(made.database, "public.ix", "test")
    assert outboxes(made) == [0, 0, 0]
    assert left_behind(made) == []
    assert made.ask("SELECT count(*) FROM roir.feed WHERE removed_at IS NULL") == [(0,)]
