"""An index apart that is verified: built, shipped by hand or all the while, and corrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from airflow_roir.engine.database import execute
from airflow_roir.shards.shard import Feed, feeds_of
from airflow_roir.shards.ship.feed import FeedShipper
from servers.shards import Shards
from tests.shards import apart

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
FILL = "INSERT INTO t SELECT n + {number} * 1000, nullif(n % 7, 3)::text, n FROM generate_series(0, 400) n"


@dataclass
class Verified:
    """Index `ix` over `t` of all shards, published."""

    made: Shards
    generation: int
    feeds: dict[str, Feed]

    @property
    def base(self) -> str:
        return f"roir_data.g{self.generation}"

    def run(self, *statements: str) -> None:
        """Runs statements on the index server; `{base}` is the base."""
        for one in statements:
            self.made.ask(one.replace("{base}", self.base))

    def shipper(self, name: str) -> FeedShipper:
        return FeedShipper(self.made.database, self.feeds[name].id, "test", most=100)

    def ship(self) -> None:
        """Ship to rest."""
        for name in self.feeds:
            one = self.shipper(name)
            assert one.claim(take_over=True)
            one.ship_pass()
            one.release()

    @contextmanager
    def shipping(self) -> Iterator[None]:
        """Ship all feeds all the while."""
        stop, errors = threading.Event(), list[BaseException]()

        def work(name: str) -> None:
            try:
                one = self.shipper(name)
                assert one.claim(take_over=True)
                while not stop.is_set():
                    one.ship_pass(stop.is_set)
                    stop.wait(0.01)
                one.release()
            except BaseException as error:  # it is raised again below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in self.feeds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors, errors

    def feed(self, column: str, name: str) -> Any:
        [(value,)] = self.made.ask(f"SELECT {column} FROM roir.feed WHERE id = %s", self.feeds[name].id)
        return value

    def is_exact(self) -> bool:
        return apart.entries(self.made, self.generation) == apart.projection(self.made, self.generation)


def build(made: Shards, keys: str = "k", include: str | None = "v", **options: Any) -> Verified:
    """Builds an index, with nothing left to ship."""
    made.run("ANALYZE t")
    apart.add_all(made)
    prepared, run = apart.begin(made, keys, include, **{"verify": "none", **options})
    apart.finish_all(made, run)
    with made.database.transaction() as connection:
        feeds = {feed.shard.name: feed for feed in feeds_of(connection, prepared.generation_id)}
    one = Verified(made, prepared.generation_id, feeds)
    one.ship()
    assert one.is_exact()
    return one


def found(made: Shards) -> list[tuple[Any, ...]]:
    """The discrepancies of the last verification: kind, shard, primary key, outcome."""
    with made.database.transaction() as connection:
        rows = execute(
            connection,
            "SELECT kind, primary_key ->> 0, primary_key ->> 1, outcome FROM roir.discrepancy WHERE verification_id = "
            "(SELECT max(id) FROM roir.verification) ORDER BY 1, 2, 3",
        )
        return [tuple(row) for row in rows]
