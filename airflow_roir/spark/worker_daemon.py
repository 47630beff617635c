"""Spark's Python daemon with the engine in memory: each worker is a fork of it, and begins at once.

Spark starts it as `python -m airflow_roir.spark.worker_daemon pyspark.worker`, and talks with it over its standard
output: nothing here may print. It is for local mode alone, where this package is installed.

Spark's own daemon imports nothing before it forks, since some packages start threads at their import, which a fork
loses. What is imported here starts none (`tests/spark/test_worker_daemon.py`).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

# What a worker's function and its first statement need.
PRELOADED = (
    "pyspark.worker",
    "airflow_roir.spark.task",
    "psycopg2",
    "sqlalchemy.dialects.postgresql.psycopg2",
)


def main() -> None:
    """Import what workers need, then be Spark's daemon; ends when Spark does."""
    leave_zip_files()
    for name in PRELOADED:
        importlib.import_module(name)
    # A collection in a fork would write to all of these pages, and so copy them.
    gc.collect()
    gc.freeze()
    from pyspark.daemon import manager

    manager()


def leave_zip_files() -> None:
    """Take PySpark from the installed package, where it is compiled, and not from the zip file that holds the same.

    Spark puts the zip files of its home on the path. Where that home is the installed package, they are its own.
    """
    home = Path(os.environ.get("SPARK_HOME", ""))
    path = [entry for entry in sys.path if Path(entry).suffix != ".zip" or Path(entry).parent != home / "python/lib"]
    before, sys.path[:] = sys.path[:], path
    importlib.invalidate_caches()
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None or Path(found.origin).parent != home or not _has_py4j():
        sys.path[:] = before


def _has_py4j() -> bool:
    return importlib.util.find_spec("py4j") is not None


if __name__ == "__main__":
    main()
