"""The peers that ours is compared with: the limit, PostgreSQL's own commands, pg_repack, Spark by JDBC, the paper's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from benchmarks import literal
from benchmarks.scene import NATIVE, Result, Scene, Side, timed

JDBC = Path("/usr/share/java/postgresql.jar")


def sides(scene: Scene) -> list[Side]:
    """All of them; the limit first."""
    width = scene.parallelism
    return [
        Side("limit", "the limit: `CREATE TABLE … AS SELECT … ORDER BY`, covering unique index", limit),
        Side("limit, vacuumed", "the limit and `VACUUM (ANALYZE)`, which ours includes", _limit_vacuumed),
        Side("native", f"native covering index on the source, `CONCURRENTLY`, {width} more processes", _native,
             lacking=_lacks_concurrently),
        Side("native reindex", "`REINDEX INDEX CONCURRENTLY` of that native index", _reindex_native, _native,
             lacking=_lacks_concurrently),
        Side("reindex", "`REINDEX INDEX CONCURRENTLY` on the same entries", _reindex_entries, _make_entries),
        Side("pg_repack", f"`pg_repack -j {width} --order-by` on the same entries", _repack_ordered, _make_entries,
             lacking=_lacks_repack),
        Side("pg_repack, unordered", f"`pg_repack -j {width} --no-order` on the same entries", _repack, _make_entries,
             lacking=_lacks_repack),
        Side("spark jdbc", f"Spark `read.jdbc` and `write.jdbc`, local[{width}], then the index, without Spark's start",
             _jdbc, lacking=_lacks_jdbc),
        Side("literal", f"`INSERT … ON CONFLICT` row by row into an indexed table, {width} workers", literal.build,
             _make_literal),
    ]  # fmt: skip


def _covering(scene: Scene, table: str, head: str = "CREATE UNIQUE INDEX") -> str:
    data = scene.data
    return f"{head} ON {table} ({data.identity}) INCLUDE ({', '.join(data.include)}) NULLS NOT DISTINCT"


def limit(scene: Scene, vacuum: bool = False) -> Result:
    """The fastest that a table of entries can be had: offline, not resumable, ordered."""
    data = scene.data
    session = scene.connect(scene.parallelism)
    marks = [time.perf_counter()]
    with session.cursor() as cursor:
        for statement in [
            f"CREATE TABLE peer.entries AS SELECT {data.columns} FROM {data.table} ORDER BY {data.identity}",
            _covering(scene, "peer.entries"),
            *(["VACUUM (ANALYZE) peer.entries"] if vacuum else []),
        ]:
            cursor.execute(statement)
            marks.append(time.perf_counter())
    session.close()
    parts = [later - earlier for earlier, later in pairwise(marks)]
    return dict(zip(("table", "index", "vacuum"), parts, strict=False)) | {"all": marks[-1] - marks[0]}


def _limit_vacuumed(scene: Scene) -> Result:
    return limit(scene, vacuum=True)


def _alone(scene: Scene, statement: str) -> None:
    session = scene.connect(scene.parallelism)
    with session.cursor() as cursor:
        cursor.execute(statement)
    session.close()


def _native(scene: Scene) -> Result:
    data = scene.data
    name = NATIVE.split(".")[1]
    return timed(
        lambda: _alone(
            scene,
            f"CREATE INDEX CONCURRENTLY {name} ON {data.table} ({data.identity}) INCLUDE ({', '.join(data.include)})",
        )
    )


def _lacks_concurrently(scene: Scene) -> str | None:
    return "a partitioned table has no `CREATE INDEX CONCURRENTLY`" if scene.data.partitioned else None


def _reindex_native(scene: Scene) -> Result:
    return timed(lambda: _alone(scene, f"REINDEX INDEX CONCURRENTLY {NATIVE}"))


def _make_entries(scene: Scene) -> None:
    """A table of entries as a build leaves it: in the source's order, with the unique index as its primary key.

    Kept for all sides and rounds: what they make of it is the same.
    """
    if scene.value("SELECT to_regclass('kept.entries') IS NOT NULL"):
        return
    data = scene.data
    columns = [*data.key, *data.pk, *data.include]
    scene.run(
        "CREATE SCHEMA kept",
        f"CREATE TABLE kept.entries AS SELECT {data.columns} FROM {data.table}",
        # pg_repack needs a key without NULLs, the included columns' too.
        f"ALTER TABLE kept.entries {', '.join(f'ALTER {column} SET NOT NULL' for column in columns)}",
        f"ALTER TABLE kept.entries ADD CONSTRAINT entries_key PRIMARY KEY ({data.identity}) "
        f"INCLUDE ({', '.join(data.include)})",
        "VACUUM (ANALYZE) kept.entries",
    )


def _reindex_entries(scene: Scene) -> Result:
    return timed(lambda: _alone(scene, "REINDEX INDEX CONCURRENTLY kept.entries_key"))


def index_of_entries(scene: Scene, more_processes: int) -> Result:
    """One unique index on a table of entries in the source's order, by the session and `more_processes` more
    processes."""
    session = scene.connect(more_processes + 1)
    with session.cursor() as cursor:
        cursor.execute(f"CREATE TABLE peer.entries AS SELECT {scene.data.columns} FROM {scene.data.table}")
        cursor.execute(f"SET max_parallel_maintenance_workers = {more_processes}")
        cursor.execute("CHECKPOINT")
        index = timed(lambda: cursor.execute(_covering(scene, "peer.entries")))["all"]
        vacuum = timed(lambda: cursor.execute("VACUUM (ANALYZE) peer.entries"))["all"]
    session.close()
    return {"index": index, "vacuum": vacuum, "all": index + vacuum}


def _lacks_repack(scene: Scene) -> str | None:
    if not (scene.server.programs / "pg_repack").exists():
        version = scene.value("SELECT current_setting('server_version_num')::int / 10000")
        return f"no pg_repack for PostgreSQL {version} here; `apt-get install postgresql-15-repack`, `--pg 15`"
    return None


def _repack(scene: Scene, order: str = "--no-order") -> Result:
    scene.run("CREATE EXTENSION IF NOT EXISTS pg_repack")
    settings = " ".join(f"-c {name}={value}" for name, value in scene.memory(scene.parallelism).items())
    command = [
        str(scene.server.programs / "pg_repack"), "-h", scene.server.address, "-p", str(scene.server.port),
        "-U", "postgres", "-d", "bench", "-t", "kept.entries", "-j", str(scene.parallelism), order,
    ]  # fmt: skip

    file = "SELECT pg_relation_filepath('kept.entries_key')"
    before = scene.value(file)
    begun = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, "PGOPTIONS": settings}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begun
    # Where it can't repack a table it says so, and ends with 0 all the same.
    if done.returncode or scene.value(file) == before:
        raise RuntimeError(f"pg_repack ended with {done.returncode}: {done.stderr}")
    return {"all": seconds}


def _repack_ordered(scene: Scene) -> Result:
    return _repack(scene, f"--order-by={scene.data.identity.replace(' ', '')}")


def lacks_java() -> str | None:
    """The reason that Spark can't run here; None if it can."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") or (home and (Path(home) / "bin" / "java").exists()):
        return None
    return "no Java: set JAVA_HOME, or run it by `make bench`"


def _lacks_jdbc(scene: Scene) -> str | None:
    return lacks_java() or (
        None if JDBC.exists() else f"no {JDBC} (`apt-get install libpostgresql-jdbc-java` on Debian and Ubuntu)"
    )


def _jdbc(scene: Scene) -> Result:
    """Spark in a process of its own. `startup`: until its session has run a first job, and left out of `all`."""
    data = scene.data
    scene.run(f"CREATE TABLE peer.entries AS SELECT {data.columns} FROM {data.table} WITH NO DATA")
    job = {
        "jar": str(JDBC),
        "cores": scene.parallelism,
        # Spark reads a UUID as a text; the server shall find out what it is.
        "url": f"jdbc:postgresql://{scene.server.address}:{scene.server.port}/bench"
        "?user=postgres&stringtype=unspecified&reWriteBatchedInserts=true",
        "source": f"(SELECT {data.columns} FROM {data.table}) entry",
        "target": "peer.entries",
        "predicates": scene.cuts(scene.parallelism),
    }
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jdbc", json.dumps(job)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"Spark ended with {done.returncode}: {done.stderr[-3000:]}")
    ended = time.perf_counter()
    told = json.loads(done.stdout.splitlines()[-1])
    _alone(scene, _covering(scene, "peer.entries"))
    indexed = time.perf_counter() - ended
    if (copied := scene.value("SELECT count(*) FROM peer.entries")) != scene.rows:
        raise RuntimeError(f"Spark copied {copied} of {scene.rows} rows")
    return {
        "startup": told["ready_at"] - begun,
        "copy": told["copy"],
        "index": indexed,
        "all": told["copy"] + indexed,
    }


def _make_literal(scene: Scene) -> None:
    scene.run(
        f"CREATE TABLE peer.entries AS SELECT {scene.data.columns} FROM {scene.data.table} WITH NO DATA",
        _covering(scene, "peer.entries"),
    )
