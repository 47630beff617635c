"""An index apart, step by step, and the oracle: at rest it is the union of the projections of all shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import build, lifecycle, prepare, seal
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from airflow_roir.shards import registry
from airflow_roir.shards.copy.copy_ranges import ShardCopier
from airflow_roir.shards.shard import feeds_of
from airflow_roir.shards.ship.feed import FeedShipper
from servers.shards import Shards


def add_all(made: Shards) -> Shards:
    """Every database becomes a shard."""
    for name in made.names:
        add(made, name)
    return made


def add(made: Shards, name: str) -> None:
    """Registers one database as a shard."""
    registry.add(made.database, name, made.dsns[name])


def begin(
    made: Shards, keys: str | None = "k", include: str | None = "v", table: str | None = "t", **options: Any
) -> tuple[BegunOperation, Run]:
    """Prepare an operation over all shards, and start a run of it. options: also shards, index, shard_column."""
    of = {name: options.pop(name) for name in ("shard_column", "unique") if name in options}
    shards = options.pop("shards", made.names)
    definition = IndexDefinition.parse(options.pop("index", "public.ix"), table, keys, include, shards=shards, **of)
    prepared = prepare.prepare(made.database, definition, BuildOptions(**options), "test")
    return prepared, start_run(made.database, prepared.index, "test", take_over=True)


def build_all(made: Shards, run: Run) -> int:
    """Every range, by one worker; the rows."""
    rows = sum(one.rows for one in build.PHASE.work(made.database, run, 0))
    build.finish(made.database, run)
    return rows


def seal_all(made: Shards, run: Run) -> None:
    """Every segment, by one worker."""
    for _ in seal.PHASE.work(made.database, run, 0):
        pass
    seal.finish(made.database, run)


def ship_all(made: Shards, generation_id: int) -> None:
    """All that is in the outboxes of a generation."""
    with made.database.transaction() as connection:
        feeds = feeds_of(connection, generation_id)
    for feed in feeds:
        shipper = FeedShipper(made.database, feed.id, "test", feed.shard.database("test", made.database.limits))
        assert shipper.claim(take_over=True)
        shipper.ship_pass()
        shipper.acknowledge()
        shipper.close()


def finish_all(made: Shards, run: Run) -> None:
    """Runs the operation from the build to the published index."""
    build_all(made, run)
    seal_all(made, run)
    lifecycle.run_phases(made.database, run)


@contextmanager
def worker(made: Shards, run: Run, number: int = 0, database: Database | None = None) -> Iterator[build.BuildWorker]:
    """A build worker on sessions of its own, to be stepped."""
    database = database or made.database
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
        shards = ShardCopier.of(database, connection, job)
        assert shards is not None
        try:
            yield build.BuildWorker(connection, job, number, shards)
        finally:
            shards.close()


def entries(made: Shards, generation_id: int) -> Counter[tuple[str | None, ...]]:
    """The base, as texts."""
    columns = _columns(made, generation_id)
    return Counter(made.ask(f"SELECT {columns} FROM roir_data.g{generation_id}"))


def projection(made: Shards, generation_id: int) -> Counter[tuple[str | None, ...]]:
    """The union of what all shards have, as texts in the base's order."""
    found: Counter[tuple[str | None, ...]] = Counter()
    [(entry,)] = made.ask("SELECT entry FROM roir.generation WHERE id = %s", generation_id)
    [(column,)] = made.ask(
        "SELECT shard_column FROM roir.index i JOIN roir.generation g ON g.index_id = i.id WHERE g.id = %s",
        generation_id,
    )
    place = next(i for i, one in enumerate(entry["columns"]) if one["source"] == column)
    feeds = made.ask(
        "SELECT s.name, l.outbox FROM roir.feed l JOIN roir.shard s ON s.id = l.shard_id WHERE l.generation_id = %s",
        generation_id,
    )
    count = len(entry["columns"]) - 1
    for name, outbox in feeds:
        columns = ", ".join(f"c{i + 1}::text" for i in range(count))
        for row in made.ask(f"SELECT {columns} FROM roir_shard.{outbox}_source", shard=name):
            whole = (*row[:place], name, *row[place:])
            found[whole] += 1
    return found


def assert_exact(made: Shards, generation_id: int) -> int:
    """The oracle; the number of entries."""
    there, wanted = entries(made, generation_id), projection(made, generation_id)
    assert not there - wanted, f"extra: {list(there - wanted)[:5]}"
    assert not wanted - there, f"missing: {list(wanted - there)[:5]}"
    return sum(there.values())


def _columns(made: Shards, generation_id: int) -> str:
    [(entry,)] = made.ask("SELECT entry FROM roir.generation WHERE id = %s", generation_id)
    return ", ".join(f"c{i + 1}::text" for i in range(len(entry["columns"])))
