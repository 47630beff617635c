"""The interface of a Spark session that a run needs, classic or through Spark Connect."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from airflow_roir.engine.work.phase_work import WorkerMetrics

# A function of workers' numbers that Spark ships.
WorkerJob = Callable[[Iterator[int]], Iterator[WorkerMetrics]]


class Session(ABC):
    """An open session. A worker is one Spark job with one task, so that workers come, leave and fail one by one."""

    @abstractmethod
    def run(self, number: int, tag: str, description: str, work: WorkerJob) -> list[WorkerMetrics]:
        """Runs a worker, in a thread of its own, to its end. Raises whatever PySpark raises, see `why`.

        tag: by which `interrupt` finds it; description: its name on Spark's pages.
        """

    @abstractmethod
    def interrupt(self, tag: str) -> None:
        """Ends the jobs of a tag; their open transactions are rolled back. Silent if Spark is gone."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once the session can run no more jobs: its JVM, its application or its server is gone."""

    @abstractmethod
    def close(self) -> None:
        """Ends the session. Silent if Spark is gone."""

    @property
    def pages(self) -> str | None:
        """The address of Spark's own pages; None without any, or if a Spark Connect server has them."""
        return None

    @property
    def tasks_without_slot(self) -> int | None:
        """The number of workers that wait for a slot; None through Spark Connect, which doesn't report it."""
        return None

    @property
    def shared_cores(self) -> int | None:
        """The cores of the one machine that all workers share; None on a cluster, which may grow."""
        return None


def tag_of(text: str) -> str:
    """The text as a tag, which has no comma."""
    return text.replace(",", ";")


def why(error: BaseException) -> str:
    """One line of Spark's message: a Python worker's own error, the reason of a lost executor, or the first line."""
    said = _said(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    raised = [line for line in said.splitlines() if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit)\b", line)]
    if is_python_error(error) and raised:
        return raised[-1].strip()
    reasons = [line for line in lines if "most recent failure:" in line or "Reason:" in line]
    told = [line for line in lines if not line.startswith("An error occurred while calling")]
    return ([*reasons, *told] or [type(error).__name__])[0].removeprefix(": ")


def is_python_error(error: BaseException) -> bool:
    """True if a worker's own Python code raised it: a missing module, a wrong version. It would do so again."""
    return "Traceback (most recent call last)" in _said(error)


def _said(error: BaseException) -> str:
    """The error's text. Py4J asks the JVM for it, which may be gone: then only what this process knows."""
    try:
        return str(error)
    except Exception:
        return str(getattr(error, "errmsg", "")) or type(error).__name__
