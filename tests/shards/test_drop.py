"""An index apart is dropped: nothing of it is left, on the index server and in the shards."""

from __future__ import annotations

import pytest

from airflow_roir.engine import drop
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make

FACES = "SELECT count(*) FROM pg_class WHERE relname LIKE 'face%'"
OUTBOXES = "SELECT count(*) FROM roir_shard.outbox"


@pytest.fixture
def made(shards: Make) -> Shards:
    made = apart.add_all(shards(2))
    made.run("INSERT INTO t SELECT i, i % 5, {number} FROM generate_series(1, 20) i")
    return made


def test_a_published_index_is_dropped_with_its_face_and_its_captures(made: Shards) -> None:
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    assert made.ask("SELECT count(*) FROM public.ix") == [(40,)]
    drop.drop_index(made.database, "public.ix", "test")
    assert made.ask(FACES) == [(0,)]
    assert [made.ask(OUTBOXES, shard=name) for name in made.names] == [[(0,)], [(0,)]]
    made.run("DELETE FROM t")
    _, again = apart.begin(made)
    apart.finish_all(made, again)
    assert made.ask("SELECT count(*) FROM public.ix") == [(0,)]
