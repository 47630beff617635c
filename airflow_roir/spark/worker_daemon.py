"""Spark's Python daemon with the engine in memory: each worker is a fork of it, and begins at once.

Spark starts it as `python -m airflow_roir.spark.worker_daemon pyspark.worker`, and talks with it over its standard
output: nothing here may print. It is for local mode alone, where this package is installed.

Spark's own daemon imports nothing before it forks, since some packages start threads at their import, which a fork
loses. The packages imported here start none (`tests/spark/test_start.py`).
"""

from __future__ import annotations

import gc
import importlib

# The modules that a worker's function and its first statement need.
PRELOADED = (
    "pyspark.worker",
    "airflow_roir.spark.task",
    "psycopg2",
    "sqlalchemy.dialects.postgresql.psycopg2",
)


def main() -> None:
    """Imports the modules that workers need, then runs Spark's daemon; ends when Spark does."""
    for name in PRELOADED:
        importlib.import_module(name)
    # A collection in a fork would write to all of these pages, and so copy them.
    gc.collect()
    gc.freeze()
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
