"""What a worker reports of each range, segment or unit, or of what stopped it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerMetrics:
    """One line of a worker's report.

    ordinal: of the range, segment or unit; None for an error. rows, batches: what this worker did of it. seconds: how
    long that took. error: what stopped the worker, see `task.work`.
    """

    worker: int
    phase: str
    ordinal: int | None = None
    rows: int = 0
    batches: int = 0
    seconds: float = 0.0
    done: bool = False
    error: str | None = None
