"""An index apart is dropped: nothing of it is left, on the index server and in the shards."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from airflow_roir.announcing import announce as announce_by_client
from airflow_roir.engine import drop
from airflow_roir.errors import InvalidInput
from airflow_roir.shards import remove
from airflow_roir.shards.announce import announce
from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.reading import engine

pytestmark = pytest.mark.sample(1)

SHAPES = "SELECT count(*) FROM pg_class WHERE relname LIKE 'shape%'"
OUTBOXES = "SELECT count(*) FROM roir_shard.outbox"


@pytest.fixture
def made(shards: Make) -> Shards:
    made = apart.add_all(shards(2))
    made.run("INSERT INTO t SELECT i, i % 5, {number} FROM generate_series(1, 20) i")
    return made


@pytest.mark.by_hand("sweeps")
def test_a_published_index_is_dropped_with_its_shape_table_and_its_captures(made: Shards) -> None:
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    assert made.ask("SELECT count(*) FROM public.ix") == [(40,)]
    drop.drop_index(made.database, "public.ix", "test")
    assert made.ask(SHAPES) == [(0,)]
    assert [made.ask(OUTBOXES, shard=name) for name in made.names] == [[(0,)], [(0,)]]
    made.run("DELETE FROM t")
    _, again = apart.begin(made)
    apart.finish_all(made, again)
    assert made.ask("SELECT count(*) FROM public.ix") == [(0,)]


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("by", ["server", "client"])
def test_writers_that_announce_go_on_until_their_shard_is_released(
    contrib_shards: Make, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard may be out of reach for the command that drops, and not for its own writers."""
    made = apart.add_all(contrib_shards(1))
    made.run("INSERT INTO t VALUES (1, 1, 1)")
    made.ask("UPDATE roir.shard SET index_dsn = %s", made.index)
    _, run = apart.begin(made)
    apart.finish_all(made, run)
    announce.announce(made.database, "public.ix", by)

    def write() -> None:
        with engine(made.dsns["s0"]).begin() as here, engine(made.index).connect() as there:
            here.execute(text("UPDATE t SET v = v + 1"))
            announce_by_client(here, there)

    def away(*_: Any) -> None:
        raise InvalidInput("away")

    with monkeypatch.context() as patch:
        patch.setattr(remove.home, "check", away)
        drop.drop_index(made.database, "public.ix", "test")
    write()
    assert remove.release(made.database, None, 5.0) == []
    write()
    assert made.ask("SELECT count(*) FROM pg_class WHERE relname ~ '_(intent|announced)$'") == [(0,)]
