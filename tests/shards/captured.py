"""The capture of one shard, and its oracle: every entry that a transaction has changed was touched by it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg2.extensions

from airflow_roir.definition import IndexDefinition, parse_name
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.shards import home, sources
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.shard import Feed, Shard
from servers.shards import Shards
from tests.engine import steps

Projection = dict[tuple[str | None, ...], tuple[str | None, ...]]


@dataclass(frozen=True)
class Since:
    """The state before a transaction: entries by their identities, the last version, the version of the last
    TRUNCATE."""

    entries: Projection
    version: int
    emptied: int


@dataclass(frozen=True)
class Captured:
    """A table that is captured in the only shard."""

    shards: Shards
    feed: Feed
    entry: Entry

    @property
    def database(self) -> Database:
        return self.feed.shard.database("roir tests", self.shards.database.limits)

    def session(self) -> psycopg2.extensions.connection:
        return steps.session(self.shards.dsns["s0"])

    def look(self) -> Since:
        columns = ", ".join(f"{name}::text" for name in self.entry.physical())
        rows = self.shards.ask(f"SELECT {columns} FROM {outbox.view(self.feed.outbox)}", shard="s0")
        ((version, emptied),) = self.shards.ask(
            "SELECT CASE WHEN is_called THEN last_value ELSE 0 END, emptied "
            "FROM roir_shard.version, roir_shard.outbox WHERE name = %s",
            self.feed.outbox,
            shard="s0",
        )
        n = self.entry.identity
        return Since({row[:n]: row[n:] for row in rows}, version, emptied)

    def touched(self, since: int = 0) -> int:
        table = outbox.table(self.feed.outbox)
        return int(self.shards.ask(f"SELECT count(*) FROM {table} WHERE version > %s", since, shard="s0")[0][0])

    def missed(self, before: Since) -> list[tuple[str | None, ...]]:
        """Identities of entries that have changed since and were not touched: none ever, if the capture is right."""
        after = self.look()
        if after.emptied > before.emptied:
            changed = set(after.entries)
        else:
            changed = {
                one
                for one in {*before.entries, *after.entries}
                if before.entries.get(one, "none") != after.entries.get(one, "none")
            }
        same = " AND ".join(
            f"c{i + 1} IS NOT DISTINCT FROM %s::{self.entry.columns[i].type}" for i in self.entry.identity_positions
        )
        seen = f"SELECT 1 FROM {outbox.table(self.feed.outbox)} WHERE version > %s AND {same}"
        return [
            one
            for one in sorted(changed, key=repr)
            if not self.shards.ask(seen, max(before.version, before.emptied), *one, shard="s0")
        ]

    def problem(self) -> str | None:
        found: str | None = self.shards.ask("SELECT roir_shard.capture_problem(%s)", self.feed.outbox, shard="s0")[0][0]
        return found


def capture(
    shards: Shards, keys: Sequence[str] = ("k",), include: Sequence[str] = ("v",), table: str = "public.t"
) -> Captured:
    """Capture a table in shard s0."""
    limits = shards.database.limits
    token = home.install(Shard(0, "s0", shards.dsns["s0"]).database("roir tests", limits))
    shard = Shard(1, "s0", shards.dsns["s0"], home=token)
    definition = IndexDefinition(
        parse_name("public.ix", "index"), parse_name(table, "table"), tuple(keys), tuple(include)
    )
    assert definition.source is not None
    with shard.database("roir tests", limits).transaction() as there:
        source = sources.read(there, definition.source)
    feed = Feed(1, 1, shard, f"o_{secrets.token_hex(8)}", source.oid)
    made = Captured(shards, feed, Entry.of(source, definition, "none", 1))
    outbox.install(made.database, feed, definition, "x", 500, 30.0)
    return made
