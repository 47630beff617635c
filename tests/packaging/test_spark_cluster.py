"""The Spark cluster of docker-compose.yml, started for real: its commands, its health checks, its shared secret."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
SERVICES: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
SCRIPTS = Path(sys.executable).parent
# A JVM is up in a few seconds; the rest is for a machine that is busy.
GIVE_UP_S = 120.0
JOB = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
rows = spark.range(100).mapInArrow(lambda batches: batches, "id long").count()
print("ANSWER", rows, spark.conf.get("spark.authenticate"), spark.conf.get("spark.authenticate.secret"))
spark.stop()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The image's environment: what its Dockerfile writes into spark-defaults.conf, and a secret."""
    settings = re.findall(r"^ +'(spark\.\S+ \S+)' \\$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert settings
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("\n".join(settings) + "\n")
    java = {name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ}
    return java | {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "SPARK_CONF_DIR": str(tmp_path / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "_SPARK_AUTH_SECRET": "correct horse battery staple",
    }


@contextmanager
def role(service: str, changed: dict[str, str], environment: dict[str, str], ready: str) -> Iterator[re.Match[str]]:
    """Runs a service's command, with some arguments changed, until the block ends.

    ready: what it logs once it serves; the match is handed to the block.
    """
    command = [changed.get(word, word) for word in SERVICES[service]["command"]]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    # Should it neither end nor serve, its end is what ends the loop below.
    watchdog = threading.Timer(GIVE_UP_S, process.kill)
    watchdog.start()
    try:
        log = []
        for line in process.stdout:
            log.append(line)
            if found := re.search(ready, "".join(log), re.DOTALL):
                break
        else:
            pytest.fail(f"{service} ended before it was ready: {''.join(log)}")
        watchdog.cancel()
        # It would start anybody's program on the workers, without asking for the secret.
        assert "REST server" not in "".join(log)
        # Read on, or it blocks once the pipe is full.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        yield found
    finally:
        watchdog.cancel()
        process.terminate()
        process.wait()


def assert_healthy(service: str, address: str) -> None:
    """Does what the service's health check does, at another port."""
    path = urlsplit(SERVICES[service]["healthcheck"]["test"][-1]).path
    with urllib.request.urlopen(f"{address}{path}") as answer:
        assert answer.status == 200


@pytest.mark.by_hand("sweeps")
def test_the_cluster_runs_a_job(tmp_path: Path, environment: dict[str, str]) -> None:
    """A driver that knows the secret gets its rows counted; no setting contains the secret itself."""
    master_changes = {"spark-master": "127.0.0.1", "7077": "0", "8080": "0"}
    master_ready = (
        r"Starting Spark master at (spark://127\.0\.0\.1:\d+)\n.*Bound MasterWebUI [^\n]*:(\d+)\n.*elected leader"
    )
    with role("spark-master", master_changes, environment, master_ready) as master:
        assert_healthy("spark-master", f"http://127.0.0.1:{master[2]}")
        worker_changes = {
            "8081": "0",
            "${SPARK_WORKER_CORES:-2}": "1",
            "${SPARK_WORKER_MEMORY:-2g}": "1g",
            "/opt/spark/work": str(tmp_path / "work"),
            "spark://spark-master:7077": master[1],
        }
        worker_ready = r"Bound WorkerWebUI [^\n]*:(\d+)\n.*Successfully registered with master"
        with role("spark-worker", worker_changes, environment, worker_ready) as worker:
            assert_healthy("spark-worker", f"http://127.0.0.1:{worker[1]}")
            settings = ["spark.driver.host=127.0.0.1", "spark.executor.memory=512m", "spark.ui.enabled=false"]
            driver = subprocess.run(
                [sys.executable, "-c", JOB],
                env=environment
                | {"PYSPARK_SUBMIT_ARGS": f"--master {master[1]} --conf {' --conf '.join(settings)} pyspark-shell"},
                capture_output=True,
                text=True,
                check=False,
            )
    answer = [line for line in driver.stdout.splitlines() if line.startswith("ANSWER")]
    assert answer == ["ANSWER 100 true ${env:_SPARK_AUTH_SECRET}"], driver.stderr
    logs = [path.read_text(errors="replace") for path in (tmp_path / "work").rglob("std*")]
    assert logs
    assert not any(environment["_SPARK_AUTH_SECRET"] in log for log in logs)
