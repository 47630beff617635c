"""What the workers of a verification know of it, and of the unit that they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_roir.engine.control.job import Job
from airflow_roir.options import VerifyOptions


@dataclass(frozen=True)
class VerifyJob:
    """What a worker must know of a verification; none of it changes in a stage."""

    job: Job
    verification_id: int
    buckets: int
    suspicious: tuple[int, ...] | None
    with_delta: bool
    options: VerifyOptions
    # Of an index apart from its source: the column of its entries that tells the shard.
    shard_column: str | None = None


@dataclass(frozen=True)
class UnitClaim:
    """A worker's hold on a unit. compared: only what was found in it is to be mended yet."""

    id: int
    ordinal: int
    token: int
    stage: str
    side: str
    relation: int
    lower: list[Any] | None
    upper: list[Any] | None
    compared: bool
    lane_id: int | None = None

    @property
    def of_source(self) -> bool:
        """True if it reads the source, False if the index."""
        return self.side in ("source", "heap")


@dataclass(frozen=True)
class UnitMetrics:
    """What a worker did on one unit: how many rows it read, how many discrepancies it found."""

    worker: int
    ordinal: int
    rows: int
    seconds: float
    found: int = 0
