"""The ground of tests of reading: an announced index with its view, writers that announce, and readers in steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import parse_dsn
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, Text, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool

from airflow_roir.announcing import announce
from airflow_roir.definition import parse_name, quote
from airflow_roir.engine.readers import view
from airflow_roir.reading import ShardedIndex
from servers.shards import Shards, run_sql
from tests.shards import announced
from tests.shards.announced import Scene

T = Table("t", MetaData(), Column("id", Integer, primary_key=True), Column("k", Text), Column("v", Integer))
EXTENSIONS = ("CREATE EXTENSION dblink",)


class Base(DeclarativeBase):
    """The base of the classes below."""


class Item(Base):
    """The table as a class of the ORM, one of whose attributes has another name than its column."""

    __tablename__ = "t"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str | None] = mapped_column("k")
    v: Mapped[int | None]


def engine(dsn: str) -> Engine:
    return create_engine(dsn.replace("postgresql://", "postgresql+psycopg2://"), poolclass=NullPool)


@dataclass
class Ground:
    """scene: with its feeds shipped; index: what is under test."""

    scene: Scene
    index: ShardedIndex
    engines: dict[str, Engine]
    index_engine: Engine

    @property
    def made(self) -> Shards:
        return self.scene.made

    @contextmanager
    def writer(self, shard: str) -> Iterator[Connection]:
        """A transaction that announces before it commits, if that is up to clients."""
        with self.engines[shard].begin() as connection:
            yield connection
            self.announce(connection)

    def announce(self, connection: Connection) -> None:
        with self.index_engine.connect() as other:
            announce(connection, other)

    def write(self, shard: str, *statements: str) -> None:
        with self.writer(shard) as connection:
            for statement in statements:
                connection.execute(text(statement))

    def strict(self, key: str | None = "a", **values: Any) -> set[tuple[int, str | None, int | None, str]]:
        """A strict read by a client: (id, k, v, shard)."""
        found = self.index.rows(T, T.c.k.is_(None) if key is None else T.c.k == key, "strict", **values)
        return {(*row, shard) for row, shard in found}

    def sql_strict(self, key: str = "a") -> set[tuple[int, str | None, int | None, str]]:
        """A strict read by the server, in SQL."""
        return set(
            self.made.ask(
                "SELECT id, k, v, shard FROM roir.strict(NULL::public.t_by_k, jsonb_build_object('k', %s))", key
            )
        )

    def refresh(self) -> None:
        """As after a pass of each feed that has just begun and found nothing."""
        announced.fresh(self.scene)

    def ship(self, shard: str | None = None) -> None:
        for feed in self.scene.feeds:
            if shard in (None, feed.shard.name):
                while self.scene.ship(feed):
                    pass


@contextmanager
def ground(made: Shards, by: str | None = "client") -> Iterator[Ground]:
    """An index public.t_by_k on t (k), including v."""
    scene = announced.scene(made, by)
    with made.database.transaction() as connection:
        view.show(connection, parse_name(announced.INDEX), scene.index_id, scene.generation_id, guarded=False)
    engines = {name: engine(dsn) for name, dsn in made.dsns.items()}
    index_engine = engine(made.index)
    with ShardedIndex(index_engine, announced.INDEX, engines) as index:
        found = Ground(scene, index, engines, index_engine)
        found.ship()
        found.refresh()
        yield found


def with_servers(ground: Ground) -> None:
    """Creates the foreign servers that strict reads in SQL need."""
    create_servers(ground.made)


def create_servers(made: Shards, dsns: dict[str, str] | None = None) -> None:
    """dblink, and a foreign server for each shard. dsns: where they are reached, if not by their own."""
    run_sql(made.index, *EXTENSIONS)
    for name, dsn in (dsns or made.dsns).items():
        given = parse_dsn(dsn)
        user = given.pop("user")
        given.pop("password", None)
        options = ", ".join(f"{key} '{value}'" for key, value in given.items())
        run_sql(
            made.index,
            f"CREATE SERVER {quote(name)} FOREIGN DATA WRAPPER dblink_fdw OPTIONS ({options})",
            f"CREATE USER MAPPING FOR PUBLIC SERVER {quote(name)} OPTIONS (user '{user}')",
        )
