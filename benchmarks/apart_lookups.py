"""The cost of a lookup by e-mail over several shards: by the index server at each level, and by asking all shards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from select import select as wait_for
from typing import Any

import psycopg2
import psycopg2.extensions
from sqlalchemy import Engine, MetaData, Table, create_engine, select

from airflow_roir.errors import NotStrict
from airflow_roir.reading.sharded import Level, ShardedIndex
from benchmarks.apart import Apart, connect, email, emails, parsed, run
from benchmarks.apart_index import INDEX
from benchmarks.quantile import quantile

WARM_UP = 20
PATIENCE_S = 60.0
EVENTUAL = f"SELECT shard, id, at FROM {INDEX} WHERE email = %s"
BOUNDED = EVENTUAL + f" AND (SELECT roir.fresh('{INDEX}', interval '10 s'))"
STRICT = f"SELECT shard, id, at FROM roir.strict(NULL::{INDEX}, jsonb_build_object('email', %s))"
ALL = "SELECT id, at FROM orders WHERE email = %s"

Ask = Callable[[str], list[Any]]


class Shards:
    """A session in each shard. All are asked at the same time, without threads."""

    def __init__(self, scene: Apart) -> None:
        self._sessions = [psycopg2.connect(dsn, async_=1) for dsn in scene.dsns.values()]
        for session in self._sessions:
            _wait(session)
        self._cursors = [session.cursor() for session in self._sessions]

    def __call__(self, one: str) -> list[Any]:
        for cursor in self._cursors:
            cursor.execute(ALL, (one,))
        found: list[Any] = []
        for session, cursor in zip(self._sessions, self._cursors, strict=True):
            _wait(session)
            found += cursor.fetchall()
        return found

    def close(self) -> None:
        """Ends the sessions."""
        for session in self._sessions:
            session.close()


class SlowShards:
    """Asks the shards as an application does: by SQLAlchemy, and a thread for each shard."""

    def __init__(self, scene: Apart, table: Table) -> None:
        self._engines = [create_engine(dsn) for dsn in scene.dsns.values()]
        self._threads = ThreadPoolExecutor(len(self._engines))
        self._table = table

    def __call__(self, one: str) -> list[Any]:
        def ask(engine: Engine) -> list[Any]:
            with engine.connect() as connection:
                return list(connection.execute(select(self._table).where(self._table.c.email == one)))

        return [row for found in self._threads.map(ask, self._engines) for row in found]

    def close(self) -> None:
        """Ends the sessions."""
        self._threads.shutdown()
        for engine in self._engines:
            engine.dispose()


def _reachable_from_sql(scene: Apart) -> None:
    """Creates the foreign servers by which `roir.strict` asks the shards."""
    run(scene.index, "CREATE EXTENSION IF NOT EXISTS dblink")
    for name, dsn in scene.dsns.items():
        options = ", ".join(f"{option} '{value}'" for option, value in parsed(dsn).items())
        run(
            scene.index,
            f"CREATE SERVER {name} FOREIGN DATA WRAPPER dblink_fdw OPTIONS ({options})",
            f"CREATE USER MAPPING FOR PUBLIC SERVER {name} OPTIONS (user 'postgres')",
        )


def _wait(session: Any) -> None:
    while (state := session.poll()) != psycopg2.extensions.POLL_OK:
        reading = state == psycopg2.extensions.POLL_READ
        wait_for([session] if reading else [], [] if reading else [session], [])


def _wait_until_strict(ask: Ask) -> None:
    """Waits until the writes from before the announcing are shipped."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            ask(email(0))
        except NotStrict:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


def measure(scene: Apart, lookups: int) -> list[dict[str, Any]]:
    """Median and p99 of each way, in turns, a lookup each. All must find the same number of rows."""
    engine = create_engine(scene.index)
    table = Table("orders", MetaData(), autoload_with=create_engine(next(iter(scene.dsns.values()))))
    _reachable_from_sql(scene)
    with (
        closing(connect(scene.index)) as session,
        closing(Shards(scene)) as shards,
        closing(SlowShards(scene, table)) as slow,
        ShardedIndex(engine, INDEX) as index,
    ):

        def entries(query: str) -> Ask:
            def ask(one: str) -> list[Any]:
                with session.cursor() as cursor:
                    cursor.execute(query, (one,))
                    return list(cursor.fetchall())

            return ask

        def rows(level: Level, **how: Any) -> Ask:
            return lambda one: index.rows(table, table.c.email == one, level, **how).rows

        ways: dict[str, Ask] = {
            "all shards, in parallel": shards,
            "all shards, SQLAlchemy and threads": slow,
            "entries, eventual": entries(EVENTUAL),
            "entries, bounded": entries(BOUNDED),
            "entries, strict": entries(STRICT),
            "rows, eventual": rows("eventual"),
            "rows, bounded": rows("bounded", max_staleness=10),
            "rows, strict": rows("strict"),
        }
        _wait_until_strict(ways["rows, strict"])
        chance = random.Random(len(scene.dsns))
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(lookups + WARM_UP):
            one = email(chance.randrange(emails(scene.rows)))
            found = {}
            for way in chance.sample(list(ways), len(ways)):
                begun = time.perf_counter()
                found[way] = len(ways[way](one))
                if number >= WARM_UP:
                    taken[way].append((time.perf_counter() - begun) * 1000)
            if len(set(found.values())) != 1 or not all(found.values()):
                raise RuntimeError(f"{one}: rows found differ: {found}")
    return [
        {
            "shards": len(scene.dsns),
            "way": way,
            "p50_ms": round(quantile(ms, 0.5), 3),
            "p99_ms": round(quantile(ms, 0.99), 3),
        }
        for way, ms in taken.items()
    ]
