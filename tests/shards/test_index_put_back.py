"""An index server that an older copy of itself replaces, on the same timeline: a snapshot of its storage."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from airflow_roir.errors import NotStrict
from airflow_roir.shards.ship.feed import FeedShipper
from servers.killable import Server
from servers.shards import shard_servers
from tests.shards.reading import Ground, ground

STARTED = "this server was started since shard"

pytestmark = pytest.mark.sample(1)

TABLE = ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", "INSERT INTO t VALUES (1, 'a', 1)")


@contextmanager
def put_back(server: Server, folder: Path) -> Iterator[None]:
    """Puts the server's data back after the block as they were before it."""
    data = server.log_file.parent
    server.close()
    subprocess.run(["cp", "-a", data, folder / "copy"], check=True)
    server.start()
    yield
    server.close()
    subprocess.run(["rm", "-r", data], check=True)
    subprocess.run(["cp", "-a", folder / "copy", data], check=True)
    server.start()


def ship(made: Ground) -> None:
    for feed in made.scene.feeds:
        shipper = FeedShipper(made.made.database, feed.id, "test")
        assert shipper.claim(take_over=True)
        for _ in range(5):
            shipper.ship_pass()
        shipper.release()


def strict(made: Ground) -> set[tuple[int, str | None, int | None, str]] | str:
    """The rows that a strict read finds, or the reason that it is refused."""
    try:
        return made.strict()
    except NotStrict as error:
        return str(error)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("shipped", [False, True])
def test_no_strict_read_misses_what_an_older_copy_does_not_know(pg: int, tmp_path: Path, shipped: bool) -> None:
    """After the copy is put back, announcements are lost; if they were shipped, so are the shipped entries."""
    with shard_servers(1, pg) as servers:
        servers.run(*TABLE)
        with ground(servers) as made:
            ship(made)
            made.refresh()
            with put_back(servers.servers["index"], tmp_path):
                # A start alone is one after which it might be an older copy.
                assert STARTED in strict(made)
                if shipped:
                    ship(made)
                    assert strict(made) == {(1, "a", 1, "s0")}
                made.write("s0", "INSERT INTO t VALUES (2, 'a', 2)")
                if shipped:
                    assert strict(made) == {(1, "a", 1, "s0"), (2, "a", 2, "s0")}
                    ship(made)
            assert STARTED in strict(made)
            ship(made)
            [(doubt,)] = servers.ask("SELECT doubt FROM roir.feed")
            if shipped:
                assert "this server has lost its last commits" in doubt
                return
            assert doubt is None
            assert strict(made) == {(1, "a", 1, "s0"), (2, "a", 2, "s0")}


@pytest.mark.by_hand("sweeps")
def test_what_was_announced_to_the_lost_history_is_waited_for(pg: int, tmp_path: Path) -> None:
    """It is in no outbox before it commits, and no intent names it any more."""
    with shard_servers(1, pg) as servers:
        servers.run(*TABLE)
        with ground(servers) as made:
            with made.engines["s0"].connect() as writer:
                with put_back(servers.servers["index"], tmp_path):
                    writer.execute(text("INSERT INTO t VALUES (2, 'a', 2)"))
                    made.announce(writer)
                ship(made)
                assert STARTED in strict(made)
                writer.commit()
            assert STARTED in strict(made)
            ship(made)
            assert strict(made) == {(1, "a", 1, "s0"), (2, "a", 2, "s0")}
