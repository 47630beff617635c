"""Names and values of any kind, and tables that are mapped in part."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, Text, select, update
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from airflow_roir.engine.database import Database
from roir_client.sqlalchemy import use_indexes
from tests.client.shop import DRIVERS, engine_of
from tests.conftest import run_sql
from tests.engine import steps

VALUES = ["%(x)s", "a:b", ":v0_0", "it's", "back\\slash", "{v0_0}", "%%", "$1", 'say "x"', "", "E'\\045'", "é\n"]
STRANGE = Table(
    "%s:;",
    MetaData(),
    Column("$1:x", Text, primary_key=True, key="a"),
    Column('k" %I', Text, key="k"),
    Column("v", Integer),
    schema='S:."x',
)


def make(dsn: str, database: Database) -> None:
    """A partition per value: the partition key is one of the strange values, too."""
    run_sql(
        dsn,
        'CREATE SCHEMA "S:.""x"',
        'CREATE TABLE "S:.""x"."%s:;" ("$1:x" text, "k"" %I" text, v int, "E:" text, PRIMARY KEY ("E:", "$1:x")) '
        'PARTITION BY LIST ("E:")',
        'CREATE TABLE "S:.""x"."d" PARTITION OF "S:.""x"."%s:;" DEFAULT',
    )
    connection = steps.session(dsn)
    for n, value in enumerate(VALUES):
        steps.sql(connection, f'CREATE TABLE "S:.""x".p{n} PARTITION OF "S:.""x"."%%s:;" FOR VALUES IN (%s)', value)
        steps.sql(connection, 'INSERT INTO "S:.""x"."%%s:;" VALUES (%s, %s, %s, %s)', value, value, n, value)
    connection.commit()
    steps.make_index(database, '"S:.""x"."by:%s"', '"S:.""x"."%s:;"', '"k"" %I"')


def look(connection: Connection) -> None:
    """Finds each row by its value, by one and by several, under an alias, and changes it."""
    alias = STRANGE.alias("a:%")
    for n, value in enumerate(VALUES):
        assert connection.execute(select(STRANGE.c.v).where(STRANGE.c.k == value)).scalars().all() == [n]
        assert connection.execute(select(alias.c.v).where(alias.c.k.in_([value, "none"]))).scalars().all() == [n]
        assert connection.execute(update(STRANGE).where(STRANGE.c.k == value).values(v=n)).rowcount == 1


@pytest.mark.parametrize("driver", [*DRIVERS, "asyncpg"])
@pytest.mark.sample(1)
def test_names_and_values_are_only_that(database: Database, dsn: str, driver: str) -> None:
    """The table's partition key isn't mapped."""
    make(dsn, database)

    async def use() -> Any:
        url = dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
        engine = create_async_engine(url, poolclass=NullPool)
        indexes = use_indexes(engine, least_partitions=1)
        async with engine.connect() as connection:
            await connection.run_sync(look)
        await engine.dispose()
        return indexes.counts

    if driver == "asyncpg":
        counts = asyncio.run(use())
    else:
        engine = engine_of(dsn, driver, poolclass=NullPool)
        indexes = use_indexes(engine, least_partitions=1)
        with engine.connect() as connection:
            look(connection)
        counts = indexes.counts
    assert counts == {"rewritten": 3 * len(VALUES)}
