"""A build over shards: rows of all of them, read by COPY, committed with their watermarks on the index server."""

from __future__ import annotations

from tests.shards import apart
from tests.shards.conftest import Make

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 7)::text, i * 10 + {number} FROM generate_series(1, 300) i"


def test_the_base_is_the_union_of_all_shards(shards: Make) -> None:
    made = apart.add_all(shards(3, TABLE, ROWS, "ANALYZE t"))
    prepared, run = apart.begin(made, parallelism=2)
    assert apart.build_all(made, run) == 900
    assert apart.assert_exact(made, prepared.generation_id) == 900
    # Dealt in turns, so that workers spread over the shards.
    dealt = made.ask("SELECT shard_id FROM roir.scan_range ORDER BY ordinal LIMIT 3")
    assert len(set(dealt)) == 3
