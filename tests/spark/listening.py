"""A server for orders, in this process, whose workers are threads: for tests of who gets what, without Spark.

It knows nothing of pytest, so that Airflow's tests can use it, too.
"""

from __future__ import annotations

from pathlib import Path

from airflow_roir.spark import server
from airflow_roir.spark.options import SparkOptions
from airflow_roir.spark.server import SparkServer
from airflow_roir.spark.session import Session, WorkerJob
from airflow_roir.spark.worker_metrics import WorkerMetrics


class Threads(Session):
    """What Spark would run on executors runs where it is asked to."""

    def __init__(self) -> None:
        self.interrupted: list[str] = []
        self.is_up = True

    def run(self, number: int, tag: str, description: str, work: WorkerJob) -> list[WorkerMetrics]:
        return list(work(iter([number])))

    def interrupt(self, tag: str) -> None:
        self.interrupted.append(tag)

    @property
    def is_alive(self) -> bool:
        return self.is_up

    def close(self) -> None:
        raise AssertionError("an order closed the Spark of all")


class Listening:
    """A server that takes orders until it is left, as SIGTERM would have it."""

    def __init__(self, options: SparkOptions | None = None) -> None:
        self._server = SparkServer(Threads(), options or SparkOptions(), Path("spark-server.log"))
        self._place = server.place()
        self._listening = self._server.listening(self._place.__enter__())
        self._listening.__enter__()
        self._is_open = True

    def stop(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._listening.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
            except KeyboardInterrupt:
                pass
            finally:
                self._place.__exit__(None, None, None)
