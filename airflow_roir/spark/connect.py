"""A session of a Spark Connect server: workers are jobs of DataFrames, since it has no others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import airflow_roir
from airflow_roir.engine.work.phase_work import WorkerMetrics
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.package import write_package
from airflow_roir.spark.session import Session, WorkerJob, tag_of
from airflow_roir.spark.start_timings import mark

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = (
    "worker int, phase string, ordinal int, rows bigint, batches bigint, seconds double, done boolean, error string"
)
# By default Spark Connect's client tries for ten minutes; the server's absence should be known within half a minute.
RETRIES = 8
MAX_BACKOFF_MS = 5_000


class ConnectSession(Session):
    """See `Session`."""

    def __init__(self, options: SparkOptions) -> None:
        """Opens it. Raises whatever PySpark raises."""
        from pyspark.sql import SparkSession
        from pyspark.sql.connect.client.retries import DefaultPolicy

        assert options.master is not None
        builder = SparkSession.builder
        # The other settings belong to the server, which runs already.
        for key, value in options.conf.items():
            builder = builder.config(key, value)
        self._spark: Any = builder.remote(options.master).getOrCreate()
        self._spark.client.set_retry_policies([DefaultPolicy(max_retries=RETRIES, max_backoff=MAX_BACKOFF_MS)])
        mark("session")
        try:
            with tempfile.TemporaryDirectory(prefix="roir-spark-") as folder:
                # Session-wide. It takes precedence over packages that executors have installed.
                archive = write_package(Path(folder) / f"{airflow_roir.__name__}-{airflow_roir.__version__}.zip")
                self._spark.addArtifacts(str(archive), pyfile=True)
        except BaseException:
            self.close()
            raise

    def run(self, number: int, tag: str, description: str, work: WorkerJob) -> list[WorkerMetrics]:
        """See `Session.run`. A server shows the tag, and no description."""
        self._spark.addTag(tag_of(tag))
        rows = self._spark.range(number, number + 1, 1, 1).mapInArrow(_in_arrow(work), SCHEMA).collect()
        return [WorkerMetrics(**row.asDict()) for row in rows]

    def interrupt(self, tag: str) -> None:
        """See `Session.interrupt`."""
        with suppress(Exception):
            self._spark.interruptTag(tag_of(tag))

    @property
    def is_alive(self) -> bool:
        """See `Session.is_alive`."""
        try:
            # A client only learns it by asking; a server that has been restarted has lost the session.
            self._spark.conf.get("spark.app.name", "")
        except Exception:
            # No server answers, or it doesn't know the session.
            return False
        return True

    def close(self) -> None:
        """See `Session.close`."""
        # An error means that its server, or the session there, is gone already.
        with suppress(Exception):
            self._spark.stop()


def _in_arrow(work: WorkerJob) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run_workers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        schema = pyarrow.schema(
            [
                ("worker", pyarrow.int32()),
                ("phase", pyarrow.string()),
                ("ordinal", pyarrow.int32()),
                ("rows", pyarrow.int64()),
                ("batches", pyarrow.int64()),
                ("seconds", pyarrow.float64()),
                ("done", pyarrow.bool_()),
                ("error", pyarrow.string()),
            ]
        )
        for batch in batches:
            metrics = [asdict(one) for one in work(iter(batch.column("id").to_pylist()))]
            yield pyarrow.RecordBatch.from_pylist(metrics, schema=schema)

    return run_workers
