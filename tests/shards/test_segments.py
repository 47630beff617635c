"""The segments of an index apart from its source are known like those of others."""

from __future__ import annotations

import pytest

from airflow_roir.engine.snapshot.index import indexes
from tests.shards import apart
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)


@pytest.mark.sample(0)
def test_an_index_apart_from_its_source_has_segments_like_others(shards: Make) -> None:
    rows = "INSERT INTO t SELECT i, i::text, i * 10 + {number} FROM generate_series(1, 500) i"
    made = apart.add_all(shards(2, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)", rows, "ANALYZE t"))
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    [facts] = indexes(made.database)
    assert facts.apart
    assert sum(one.rows or 0 for one in facts.segments) == 1_000
    assert all(one.sealed_at is not None and not one.wasted for one in facts.segments)
