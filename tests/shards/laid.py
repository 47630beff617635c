"""An index over shards as its build leaves it, by hand: shape table, generation, outboxes, feeds; and its oracle."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from airflow_roir.definition import IndexDefinition, parse_name, quote
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source import catalog
from airflow_roir.shards import home, sources
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import shape_table
from airflow_roir.shards.shard import Feed, Shard, feeds_of
from airflow_roir.shards.ship.feed import FeedShipper
from servers.shards import Shards

Entries = list[tuple[str | None, ...]]


@dataclass(frozen=True)
class Laid:
    """An index with one active generation, and a feed for each shard."""

    shards: Shards
    generation: int
    definition: IndexDefinition
    entry: Entry

    @property
    def database(self) -> Database:
        return self.shards.database

    @property
    def feeds(self) -> list[Feed]:
        with self.database.transaction() as connection:
            return feeds_of(connection, self.generation)

    def feed(self, shard: str) -> Feed:
        return next(feed for feed in self.feeds if feed.shard.name == shard)

    def shipper(self, shard: str, owner: str = "a", most: int = 20_000) -> FeedShipper:
        return FeedShipper(self.database, self.feed(shard).id, owner, most=most)

    def ship(self, *names: str) -> None:
        """Ship to rest."""
        for name in names or self.shards.names:
            shipper = self.shipper(name, "rest")
            assert shipper.claim(take_over=True)
            shipper.ship_pass()
            shipper.release()

    def column(self, name: str) -> object:
        """A column of the only feed, or of the first shard's feed."""
        return self.shards.ask(f"SELECT {name} FROM roir.feed WHERE generation_id = %s ORDER BY id", self.generation)[
            0
        ][0]

    def base(self) -> Entries:
        columns = ", ".join(f"{name}::text" for name in self.entry.physical())
        return sorted(self.shards.ask(f"SELECT {columns} FROM {physical.base(self.generation)}"), key=repr)

    def projection(self) -> Entries:
        """The entries that the base must have at rest: the union of the shards' projections."""
        found: Entries = []
        for name in self.shards.names:
            values = ", ".join(
                f"'{name}'" if one.source == "shard" else f"{quote(one.source)}::text" for one in self.entry.columns
            )
            table = self.definition.source
            assert table is not None
            found += self.shards.ask(f"SELECT {values} FROM {table.sql}", shard=name)
        return sorted(found, key=repr)

    def assert_exact(self) -> None:
        assert self.base() == self.projection()


def lay(
    shards: Shards, keys: tuple[str, ...] = ("k",), include: tuple[str, ...] = ("v",), table: str = "public.t"
) -> Laid:
    """Lay an index `public.ix` over the shards' table, without copying a row: what is there must come by writes."""
    database, source_name = shards.database, parse_name(table, "table")
    definition = IndexDefinition(parse_name("public.ix", "index"), source_name, keys, include)
    tokens = {
        name: home.install(Shard(0, name, dsn).database("t", database.limits)) for name, dsn in shards.dsns.items()
    }
    first = Shard(0, shards.names[0], shards.dsns[shards.names[0]])
    with first.database("t", database.limits).transaction() as connection:
        source = sources.read(connection, source_name)
    with database.transaction() as connection:
        shape_name = shape_table.create(connection, source, definition, "shard")
        fronted = catalog.read_source(connection, shape_name)
        entry = Entry.of(fronted, definition, "auto", 1)
        index_id = execute(
            connection,
            "INSERT INTO roir.index (schema_name, name, source_oid, key_columns, included_columns, shard_table, "
            "shard_column) VALUES ('public', 'ix', %(oid)s, %(keys)s::jsonb, %(include)s::jsonb, %(table)s, 'shard') "
            "RETURNING id",
            {
                "oid": fronted.oid,
                "keys": json.dumps(list(keys)),
                "include": json.dumps(list(include)),
                "table": str(source_name),
            },
        ).scalar_one()
        generation = execute(
            connection,
            "INSERT INTO roir.generation (index_id, status, capture_mode, mode_xid, entry, scan) VALUES (%(index)s, "
            "'building', 'capture', '3', '{}', 'key') RETURNING id",
            {"index": index_id},
        ).scalar_one()
        entry = physical.create(connection, generation, entry, Plan(0, 0, (), (), 1))
        execute(connection, "UPDATE roir.generation SET capture_mode = 'direct'")
        execute(
            connection,
            "UPDATE roir.generation SET entry = %(entry)s::jsonb, status = 'active', capture_mode = 'active', "
            "published_at = now() WHERE id = %(id)s",
            {"id": generation, "entry": json.dumps(entry.as_json())},
        )
        for ordinal in (0, 1):
            physical.seal_segment(connection, generation, ordinal, entry)
        for name, dsn in shards.dsns.items():
            shard_id = execute(
                connection,
                "INSERT INTO roir.shard (name, dsn, home) VALUES (%(name)s, %(dsn)s, %(home)s) RETURNING id",
                {"name": name, "dsn": dsn, "home": tokens[name]},
            ).scalar_one()
            with Shard(shard_id, name, dsn).database("t", database.limits).transaction() as there:
                oid = sources.read(there, source_name).oid
            execute(
                connection,
                "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid) "
                "VALUES (%(generation)s, %(shard)s, %(outbox)s, %(oid)s)",
                {
                    "generation": generation,
                    "shard": shard_id,
                    "outbox": f"o_{secrets.token_hex(8)}",
                    "oid": oid,
                },
            )
    laid = Laid(shards, generation, definition, entry)
    for feed in laid.feeds:
        outbox.install(feed.shard.database("t", database.limits), feed, definition, "x", 500, 30.0)
    with database.transaction() as connection:
        execute(connection, "UPDATE roir.feed SET captured_at = clock_timestamp()")
    return laid
