"""What the build of an index apart is compared with: `postgres_fdw`, native logical replication, Spark by JDBC.

Each copies the same columns of one table to another server, and ends with an index there, vacuumed, as ours does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks import peers
from benchmarks.apart import COLUMNS, INCLUDE, KEY, PK, Apart, connect, parsed, run, value

Result = dict[str, float]
SHARD = "s0"
ENTRIES = f"CREATE TABLE peer.entries AS SELECT ''::text AS shard, {COLUMNS} FROM peer.orders WITH NO DATA"
# As many rows at once as a batch of ours has.
FETCH_ROWS = 20_000
MEMORY_PER_WORKER_MB = 256
LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Side:
    """One that is measured. run: the seconds of `copy`, other parts, and `all`. lacking: why it can't run here."""

    name: str
    title: str
    run: Callable[[Apart], Result]
    lacking: Callable[[], str | None] = lambda: None


def sides(width: int, jar: Path) -> list[Side]:
    """All of them, with as many sessions as we have workers where they can have more than one."""
    return [
        Side("postgres_fdw", "`postgres_fdw`, one `INSERT … SELECT`", partial(_by_fdw, width=1)),
        Side(f"postgres_fdw, {width} sessions", f"`postgres_fdw`, {width} sessions, each `INSERT … SELECT` of a range",
             partial(_by_fdw, width=width)),
        Side("logical replication", "a subscription's initial copy, then a native index", _by_subscription),
        Side("spark jdbc", f"Spark `read.jdbc` and `write.jdbc`, local[{width}], without Spark's start",
             partial(_by_jdbc, width=width, jar=jar), partial(_lacks_jdbc, jar)),
    ]  # fmt: skip


def clear(scene: Apart) -> None:
    """Nothing of a side is left, and everything is written out."""
    if value(scene.index, "SELECT count(*) FROM pg_subscription"):
        run(scene.index, "DROP SUBSCRIPTION copy")
    run(scene.index, "DROP SCHEMA IF EXISTS peer CASCADE", "DROP EXTENSION IF EXISTS postgres_fdw CASCADE")
    run(scene.index, "DROP TABLE IF EXISTS public.orders", "CREATE SCHEMA peer", "CHECKPOINT")
    run(scene.dsns[SHARD], "DROP PUBLICATION IF EXISTS copy", "CHECKPOINT")


def ranges(scene: Apart, pieces: int) -> list[str]:
    """Conditions that cut the ids into about equal pieces."""
    bounds = [scene.rows * n // pieces for n in range(pieces + 1)]
    return [f"{PK} > {low} AND {PK} <= {high}" for low, high in pairwise(bounds)]


def _by_fdw(scene: Apart, width: int) -> Result:
    options = ", ".join(f"{name} '{found}'" for name, found in parsed(scene.dsns[SHARD]).items())
    run(
        scene.index,
        "CREATE EXTENSION postgres_fdw",
        f"CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({options}, fetch_size '{FETCH_ROWS}')",
        "CREATE USER MAPPING FOR CURRENT_USER SERVER far OPTIONS (user 'postgres')",
        "IMPORT FOREIGN SCHEMA public LIMIT TO (orders) FROM SERVER far INTO peer",
        ENTRIES,
    )
    begun = time.perf_counter()
    copy = f"INSERT INTO peer.entries SELECT '{SHARD}', {COLUMNS} FROM peer.orders WHERE "
    with ThreadPoolExecutor(width) as pool:
        list(pool.map(lambda piece: run(scene.index, copy + piece), ranges(scene, width) if width > 1 else ["true"]))
    return _indexed(scene, begun, width)


def _by_subscription(scene: Apart) -> Result:
    """Its target has a primary key, by which it applies changes later. The index is made after the copy."""
    [(host, port, name)] = [tuple(parsed(scene.dsns[SHARD]).values())]
    run(scene.dsns[SHARD], f"CREATE PUBLICATION copy FOR TABLE orders ({PK}, {KEY}, {INCLUDE})")
    run(
        scene.index, f"CREATE TABLE public.orders ({PK} bigint PRIMARY KEY, {KEY} text, {INCLUDE} timestamptz NOT NULL)"
    )
    begun = time.perf_counter()
    source = f"host={host} port={port} dbname={name} user=postgres"
    run(scene.index, f"CREATE SUBSCRIPTION copy CONNECTION '{source}' PUBLICATION copy")
    session = connect(scene.index)
    with session.cursor() as cursor:
        while True:
            cursor.execute("SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel")
            if (cursor.fetchone() or (False,))[0]:
                break
            time.sleep(LOOK_EVERY_S)
    session.close()
    return _indexed(scene, begun, 1, "public.orders", "")


def _by_jdbc(scene: Apart, width: int, jar: Path) -> Result:
    run(scene.index, f"CREATE TABLE peer.entries (shard text, {KEY} text, {PK} bigint, {INCLUDE} timestamptz)")
    tail = "user=postgres&stringtype=unspecified&reWriteBatchedInserts=true"
    urls = [
        f"jdbc:postgresql://{at['host']}:{at['port']}/{at['dbname']}?{tail}"
        for at in (parsed(scene.dsns[SHARD]), parsed(scene.index))
    ]
    job = {
        "jar": str(jar),
        "cores": width,
        "url": urls[0],
        "target_url": urls[1],
        "source": f"(SELECT '{SHARD}' AS shard, {COLUMNS} FROM orders) entry",
        "target": "peer.entries",
        "predicates": ranges(scene, width),
    }
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jdbc", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Spark ended with {done.returncode}: {done.stderr[-3000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return {"startup": told["ready_at"] - begun} | _indexed(scene, time.perf_counter() - told["copy"], width)


def _lacks_jdbc(jar: Path) -> str | None:
    return peers.lacks_java() or (
        None if jar.exists() else f"no {jar} (`apt-get install libpostgresql-jdbc-java` on Debian and Ubuntu)"
    )


def _indexed(scene: Apart, begun: float, width: int, table: str = "peer.entries", shard: str = "shard, ") -> Result:
    """The index on what was copied; the seconds of the parts."""
    copied = time.perf_counter()
    session = connect(scene.index)
    with session.cursor() as cursor:
        cursor.execute(f"SET max_parallel_maintenance_workers = {width}")
        cursor.execute(f"SET maintenance_work_mem = '{width * MEMORY_PER_WORKER_MB}MB'")
        cursor.execute(f"CREATE UNIQUE INDEX ON {table} ({KEY}, {shard}{PK}) INCLUDE ({INCLUDE}) NULLS NOT DISTINCT")
        indexed = time.perf_counter()
        cursor.execute(f"VACUUM (ANALYZE) {table}")
    session.close()
    ended = time.perf_counter()
    if (found := value(scene.index, f"SELECT count(*) FROM {table}")) != scene.rows:
        raise RuntimeError(f"{found} of {scene.rows} rows were copied")
    return {"copy": copied - begun, "index": indexed - copied, "vacuum": ended - indexed, "all": ended - begun}
