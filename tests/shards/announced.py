"""An index apart whose writes are announced: how these tests set it up, ship it step by step, and read it strictly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg2
from sqlalchemy import Connection

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.cut import Plan
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.sessions.limits import DEFAULT
from airflow_roir.engine.source import catalog
from airflow_roir.shards import home
from airflow_roir.shards.announce import announce, intents
from airflow_roir.shards.announce.intents import Look
from airflow_roir.shards.capture import outbox
from airflow_roir.shards.copy import shape_table
from airflow_roir.shards.shard import Feed, Shard, feeds_of
from servers.shards import Shards

INDEX = "public.t_by_k"
Found = tuple[str, int, str | None, int | None]


@dataclass
class Polled:
    """The answer of a poll. rows: (version or None, identity texts, entry texts or None if it isn't there)."""

    rows: list[tuple[int | None, tuple[str | None, ...], tuple[str | None, ...] | None]]
    looked: Look
    snapshot: str
    own: str


@dataclass
class Scene:
    """made: the databases; generation_id: of the only generation, which is published."""

    made: Shards
    definition: IndexDefinition
    index_id: int
    generation_id: int
    entry: Entry

    @property
    def database(self) -> Database:
        return self.made.database

    @property
    def feeds(self) -> list[Feed]:
        with self.database.transaction() as connection:
            return feeds_of(connection, self.generation_id)

    def feed(self, shard: str) -> Feed:
        return next(feed for feed in self.feeds if feed.shard.name == shard)

    def intents(self, what: str = "*") -> list[tuple[Any, ...]]:
        return self.made.ask(f"SELECT {what} FROM {intents.table(self.generation_id)} ORDER BY 1")

    # Shipping, in steps.

    def look(self, feed: Feed, limit: int = 100) -> Look:
        with self.database.transaction() as connection:
            return intents.look(connection, feed, limit, old_s=0)

    def poll(self, feed: Feed, looked: Look, limit: int = 100) -> Polled:
        """Outbox rows and named ones, with their truth in one snapshot."""
        with self.made.shard(feed.shard.name).connect() as connection:
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
            found = outbox.read_entry(connection, feed.outbox)
            assert found is not None
            own = execute(connection, "SELECT pg_current_xact_id()::text").scalar_one()
            snapshot = execute(connection, "SELECT pg_current_snapshot()::text").scalar_one()
            identity = found.physical(found.identity_positions)
            texts = ", ".join(f"{name}::text" for name in identity)
            pending = execute(
                connection,
                f"SELECT version, {texts} FROM {outbox.table(feed.outbox)} WHERE version > 0 "
                f"ORDER BY version LIMIT {limit}",
            ).all()
            asked: list[tuple[int | None, tuple[str | None, ...]]] = [(row[0], tuple(row[1:])) for row in pending]
            asked += [(None, one.identity) for one in looked.named]
            rows = []
            for version, texts_of in asked:
                same = " AND ".join(
                    f"s.{name} IS NOT DISTINCT FROM CAST(%({name})s AS {found.columns[i].cast})"
                    for i, name in enumerate(identity)
                )
                entry = ", ".join(f"s.{name}::text" for name in found.physical())
                row = execute(
                    connection,
                    f"SELECT {entry} FROM {outbox.view(feed.outbox)} s WHERE {same}",
                    dict(zip(identity, texts_of, strict=True)),
                ).first()
                rows.append((version, texts_of, None if row is None else tuple(row)))
            connection.rollback()
        return Polled(rows, looked, snapshot, own)

    def apply(self, feed: Feed, polled: Polled) -> int:
        """Returns how many intents are settled."""
        base = physical.base(self.generation_id)
        with self.database.transaction() as connection:
            shape = intents.shape_of(connection, self.generation_id)
            rest = [i for i in range(len(shape.entry.columns)) if i != shape.shard]
            for _, identity, entry in polled.rows:
                values: dict[str, Any] = {f"c{i + 1}": value for i, value in zip(rest, identity, strict=False)}
                values[shape.column] = feed.shard.name
                same = " AND ".join(
                    f"c{i + 1} IS NOT DISTINCT FROM CAST(%(c{i + 1})s AS {shape.entry.columns[i].cast})"
                    for i in shape.entry.identity_positions
                )
                execute(connection, f"DELETE FROM {base} WHERE {same}", values)
                if entry is not None:
                    values = {f"c{i + 1}": value for i, value in zip(rest, entry, strict=True)}
                    values[shape.column] = feed.shard.name
                    names = shape.entry.physical()
                    bound = ", ".join(f"%({name})s" for name in names)
                    execute(connection, f"INSERT INTO {base} ({', '.join(names)}) VALUES ({bound})", values)
            identities = [identity for _, identity, _ in polled.rows]
            return intents.settle(connection, feed, identities, polled.looked, polled.snapshot, polled.own)

    def clear(self, feed: Feed, polled: Polled) -> None:
        versions = [version for version, _, _ in polled.rows if version is not None]
        with self.made.shard(feed.shard.name).transaction() as connection:
            execute(
                connection,
                "DELETE FROM {table} WHERE version IN (SELECT version FROM {table} "
                "WHERE version = ANY (%(versions)s::bigint[]) FOR UPDATE SKIP LOCKED)".replace(
                    "{table}", outbox.table(feed.outbox)
                ),
                {"versions": versions},
            )

    def ship(self, feed: Feed, limit: int = 100) -> int:
        """All of it at once; returns how many rows were polled, and settled."""
        polled = self.poll(feed, self.look(feed, limit), limit)
        settled = self.apply(feed, polled)
        self.clear(feed, polled)
        return len(polled.rows) + settled

    def rest(self) -> None:
        """Ship until nothing is left to ship."""
        for feed in self.feeds:
            while self.ship(feed):
                pass

    # Reading.

    def candidates(self, connection: Connection, key: str) -> tuple[set[Found], list[tuple[str, int]]]:
        """Entries that no intent names, and what intents name, in one snapshot."""
        base, named = physical.base(self.generation_id), intents.table(self.generation_id)
        found = execute(
            connection,
            f"SELECT 'entry' AS kind, b.c2 AS shard, b.c3 AS id, b.c1 AS k, b.c4 AS v FROM {base} b "
            "WHERE b.c1 = %(key)s "
            f"AND NOT EXISTS (SELECT FROM {named} i WHERE i.c1 = b.c1 AND i.c2 = b.c2 AND i.c3 = b.c3) "
            f"UNION ALL SELECT DISTINCT 'intent', i.c2, i.c3, i.c1, NULL::int FROM {named} i WHERE i.c1 = %(key)s",
            {"key": key},
        ).all()
        entries = {(row.shard, row.id, row.k, row.v) for row in found if row.kind == "entry"}
        return entries, [(row.shard, row.id) for row in found if row.kind == "intent"]

    def repaired(self, connections: dict[str, Connection], asked: Sequence[tuple[str, int]], key: str) -> set[Found]:
        """The rows of these shards and ids that have the key now, as their shards say."""
        found: set[Found] = set()
        for shard, id_ in asked:
            rows = execute(connections[shard], "SELECT k, v FROM t WHERE id = %(id)s", {"id": id_}).all()
            connections[shard].rollback()
            found |= {(shard, id_, row.k, row.v) for row in rows if row.k == key}
        return found

    def truth(self) -> set[Found]:
        return {(name, *row) for name in self.made.names for row in self.made.ask("SELECT id, k, v FROM t", shard=name)}

    def stored(self) -> set[Found]:
        return set(self.made.ask(f"SELECT c2, c3, c1, c4 FROM {physical.base(self.generation_id)}"))


def of_shard(made: Shards, name: str) -> Database:
    """The shard's database as the engine opens it."""
    return Shard(0, name, made.dsns[name]).database("roir tests", DEFAULT)


def index_dsn(made: Shards) -> str:
    """The index server's DSN as a shard's server can reach it."""
    given = psycopg2.extensions.parse_dsn(made.index)
    return " ".join(f"{name}={value}" for name, value in given.items())


def scene(made: Shards, by: str | None = None, key: tuple[str, ...] = ("k",)) -> Scene:
    """An index on t (k), including v, over all shards of `made`, that is published; their rows have been shipped."""
    definition = IndexDefinition(QualifiedName("public", "t_by_k"), QualifiedName("public", "t"), key, ("v",))
    database = made.database
    tokens = {name: home.install(made.shard(name)) for name in made.names}
    with of_shard(made, made.names[0]).transaction() as connection:
        source = catalog.read_source(connection, QualifiedName("public", "t"))
    with database.transaction() as connection:
        name = shape_table.create(connection, source, definition, "shard")
        on_face = replace(definition, source=name)
        faced = catalog.read_source(connection, name)
        # As a shape table's key columns are ordered: key, then the primary key, whose first column is the shard.
        entry = Entry.of(faced, on_face, "none", 1)
        index_id = execute(
            connection,
            "INSERT INTO roir.index (schema_name, name, source_oid, key_columns, included_columns, shard_table, "
            "shard_column) VALUES ('public', 't_by_k', %(oid)s, %(key)s::jsonb, '[\"v\"]', 'public.t', 'shard') "
            "RETURNING id",
            {"oid": faced.oid, "key": json.dumps(list(key))},
        ).scalar_one()
        generation_id = add_generation(connection, index_id, entry)
        for shard, dsn in made.dsns.items():
            execute(
                connection,
                "INSERT INTO roir.shard (name, dsn, index_dsn, home) VALUES (%(name)s, %(dsn)s, %(index)s, %(home)s)",
                {"name": shard, "dsn": dsn, "index": index_dsn(made), "home": tokens[shard]},
            )
    found = Scene(made, definition, index_id, generation_id, entry)
    add_feeds(found, generation_id)
    made.run("UPDATE t SET k = k")
    for shard in made.names:
        for id_, k, v in made.ask("SELECT id, k, v FROM t", shard=shard):
            made.ask(
                f"INSERT INTO {physical.base(generation_id)} (c1, c2, c3, c4) VALUES (%s, %s, %s, %s)",
                k,
                shard,
                id_,
                v,
            )
    if by is not None:
        announce.announce(database, INDEX, by)
        fresh(found)
    return found


def add_generation(connection: Connection, index_id: int, entry: Entry, status: str = "active") -> int:
    mode = "active" if status == "active" else "capture"
    generation_id = execute(
        connection,
        "INSERT INTO roir.generation (index_id, status, capture_mode, entry) "
        "VALUES (%(index)s, %(status)s, %(mode)s, '{}') RETURNING id",
        {"index": index_id, "status": status, "mode": mode},
    ).scalar_one()
    entry = physical.create(connection, generation_id, entry, Plan(0, 0, (), (), 1))
    execute(
        connection,
        "UPDATE roir.generation SET entry = %(entry)s::jsonb WHERE id = %(id)s",
        {"id": generation_id, "entry": json.dumps(entry.as_json())},
    )
    for ordinal in (0, 1):
        physical.seal_segment(connection, generation_id, ordinal, entry)
    intents.create(connection, generation_id, entry)
    assert isinstance(generation_id, int)
    return generation_id


def add_feeds(scene: Scene, generation_id: int) -> None:
    """The shards' capture."""
    for shard in scene.made.names:
        [(oid,)] = scene.made.ask("SELECT 't'::regclass::oid::bigint", shard=shard)
        scene.made.ask(
            "INSERT INTO roir.feed (generation_id, shard_id, outbox, source_oid, captured_at) "
            "SELECT %s, id, 'o_' || left(md5(%s || name), 16), %s, now() FROM roir.shard WHERE name = %s",
            generation_id,
            str(generation_id),
            oid,
            shard,
        )
    with scene.database.transaction() as connection:
        feeds = feeds_of(connection, generation_id)
        server = home.server_of(connection)
    for feed in feeds:
        outbox.install(of_shard(scene.made, feed.shard.name), feed, scene.definition, server, 500, 30)


def fresh(scene: Scene) -> None:
    """Makes the feeds as fresh as after a pass of each that began now."""
    scene.made.ask("UPDATE roir.feed SET fresh_at = clock_timestamp()")
