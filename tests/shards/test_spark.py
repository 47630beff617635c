"""The command line builds over shards on a real Spark, while applications write in each of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.spark.cluster import EXECUTOR_SETTINGS, standalone_cluster
from tests.spark.conftest import python_without_us as python_without_us

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
ROWS = "INSERT INTO t SELECT i, (i % 500)::text, i FROM generate_series(1, 20000) i"


def roir(made: Shards, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ROIR_DSN": made.index, "XDG_STATE_HOME": str(home)}
    command = [sys.executable, "-m", "airflow_roir.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)


@contextmanager
def writers(made: Shards) -> Iterator[list[int]]:
    """One in each shard, until the block ends; how many transactions each has committed."""
    stop = threading.Event()
    done = [0] * len(made.names)

    def write(number: int, dsn: str) -> None:
        chance = random.Random(number)
        connection = psycopg2.connect(dsn)
        while not stop.wait(0.002):
            row = chance.randrange(1, 25000)
            with connection, connection.cursor() as cursor:
                cursor.execute(
                    chance.choice(
                        (
                            "UPDATE t SET k = %(key)s WHERE id = %(row)s",
                            "UPDATE t SET v = v + 1 WHERE id = %(row)s",
                            "DELETE FROM t WHERE id = %(row)s",
                            "INSERT INTO t VALUES (%(row)s, %(key)s, 0) ON CONFLICT DO NOTHING",
                        )
                    ),
                    {"row": row, "key": str(chance.randrange(600))},
                )
            done[number] += 1
        connection.close()

    threads = [threading.Thread(target=write, args=(n, dsn)) for n, dsn in enumerate(made.dsns.values())]
    for thread in threads:
        thread.start()
    try:
        yield done
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.by_hand("sweeps")
def test_from_the_command_to_the_index(shards: Make, tmp_path: Path) -> None:
    made = shards(3, TABLE, ROWS, "ANALYZE t")
    for name, dsn in made.dsns.items():
        added = roir(made, tmp_path, "shard", "add", name, "--dsn", dsn)
        assert added.returncode == 0, added.stderr
    what = ("public.ix", "--table", "t", "--keys", "k", "--include", "v", "--shards", ",".join(made.names))
    planned = roir(made, tmp_path, "plan", *what, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["rows_estimate"] == 60_000
    with writers(made) as done:
        built = roir(made, tmp_path, "build", *what, "--master", "local[2]", "--ranges", "12", "--batch-rows", "1000")
        assert built.returncode == 0, built.stderr
        assert min(done) > 0
    [(generation,)] = made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
    apart.ship_all(made, generation)
    assert apart.assert_exact(made, generation) == made.ask("SELECT count(*) FROM public.ix")[0][0]
    # Both workers have read, and all shards.
    assert made.ask("SELECT count(DISTINCT shard) FROM public.ix") == [(3,)]
    told = roir(made, tmp_path, "status")
    assert "roir_data" not in told.stdout


@pytest.mark.by_hand("sweeps")
def test_a_driver_that_is_killed_and_resumed(shards: Make, tmp_path: Path) -> None:
    """SIGKILL ends the driver and all its processes: the ranges continue after their last committed batches."""
    made = apart.add_all(shards(2, TABLE, ROWS, "ANALYZE t"))
    what = ("public.ix", "--table", "t", "--keys", "k", "--include", "v", "--shards", ",".join(made.names))
    command = [sys.executable, "-m", "airflow_roir.cli", "build", *what, "--master", "local[2]", "--batch-rows", "1000"]
    environment = os.environ | {"ROIR_DSN": made.index, "XDG_STATE_HOME": str(tmp_path)}
    with writers(made):
        with subprocess.Popen(
            [*command, "--max-rows-per-second", "4000"],
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            while made.ask("SELECT coalesce(sum(rows), 0) < 5000 FROM roir.scan_range")[0][0]:
                assert process.poll() is None
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
        [(before,)] = made.ask("SELECT sum(batches)::int FROM roir.scan_range")
        resumed = roir(
            made, tmp_path, "resume", "public.ix", "--take-over", "--max-rows-per-second", "0", "--parallelism", "3"
        )
        assert resumed.returncode == 0, resumed.stderr
    [(after,)] = made.ask("SELECT sum(batches)::int FROM roir.scan_range")
    assert after > before
    [(generation,)] = made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
    apart.ship_all(made, generation)
    apart.assert_exact(made, generation)


@pytest.mark.by_hand("test-cluster")
def test_executors_of_a_cluster_read_the_shards(shards: Make, tmp_path: Path, python_without_us: str) -> None:
    """They have neither this package nor a DSN of a shard: both come with the work, and from the index server."""
    made = apart.add_all(shards(2, TABLE, ROWS, "ANALYZE t"))
    what = ("public.ix", "--table", "t", "--keys", "k", "--include", "v", "--shards", ",".join(made.names))
    conf = {**EXECUTOR_SETTINGS, "spark.pyspark.python": python_without_us}
    with standalone_cluster(tmp_path / "cluster") as cluster:
        given = [f"--conf={name}={value}" for name, value in conf.items()]
        built = roir(made, tmp_path, "build", *what, "--master", cluster.url, *given)
        assert built.returncode == 0, built.stderr
    [(generation,)] = made.ask("SELECT id FROM roir.generation WHERE status = 'active'")
    assert apart.assert_exact(made, generation) == 40_000
