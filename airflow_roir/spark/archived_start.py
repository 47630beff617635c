"""What a driver's JVM does in a build, once, for the archive of its classes: see `class_archive.make_archive`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from airflow_roir.spark.classic import ClassicSession, Java
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.worker_metrics import WorkerMetrics


def main() -> int:
    """Start Spark, run some workers that do nothing, and let the JVM end by itself, as it writes the archive then."""
    with tempfile.TemporaryDirectory(prefix="roir-spark-") as folder:
        return _start(Path(folder))


def _start(folder: Path) -> int:
    java = Java(SparkOptions(), folder)
    session: ClassicSession = java.session("roir spark-archive")
    session.warm_up()
    for number in range(2):
        session.run(number, "roir", "nothing", lambda numbers: (WorkerMetrics(one, "build") for one in numbers))
    _ = session.tasks_without_slot, session.pages, session.is_alive
    session.interrupt("roir")
    return java.end_gently()


if __name__ == "__main__":
    sys.exit(main())
