"""The Airflow that is measured: with the DAGs of this repository, and a connection `bench` to the measured server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from servers.airflow import StandaloneAirflow
from servers.killable import Server
from servers.postgres import embedded_postgres

DAG = "rebuild_index"
CONNECTION = "bench"


@contextmanager
def bench_airflow(server: Server, environment: Mapping[str, str] | None = None) -> Iterator[StandaloneAirflow]:
    """A fresh one that is ready; its own database is on another server."""
    with tempfile.TemporaryDirectory(prefix="roir-bench-") as folder:
        dags = Path(folder) / "dags"
        shutil.copytree(Path(__file__).parents[1] / "dags", dags, ignore=shutil.ignore_patterns("__pycache__"))
        home = Path(folder) / "airflow"
        with (
            embedded_postgres(fsync="on") as metadata,
            StandaloneAirflow(home, dags, metadata, environment=environment) as airflow,
        ):
            airflow.wait_until_ready([DAG])
            airflow.add_connection(
                CONNECTION, "postgres", host=server.address, port=server.port, login="postgres", schema="bench"
            )
            yield airflow
