"""A verification, and a unit of it, as its workers know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from airflow_roir.engine.control.job import Job
from airflow_roir.options import VerifyOptions


@dataclass(frozen=True)
class VerifyJob:
    """The facts of a verification that a worker needs; none of them changes in a stage."""

    job: Job
    verification_id: int
    buckets: int
    suspicious: tuple[int, ...] | None
    with_delta: bool
    options: VerifyOptions
    # Only for an index over shards: the column of its entries that names the shard.
    shard_column: str | None = None


@dataclass(frozen=True)
class UnitClaim:
    """A worker's hold on a unit. compared: True if only the repair of its discrepancies is left."""

    id: int
    ordinal: int
    token: int
    stage: str
    side: str
    relation: int
    lower: list[Any] | None
    upper: list[Any] | None
    compared: bool
    feed_id: int | None = None

    @property
    def of_source(self) -> bool:
        """True if it reads the source, False if the index."""
        return self.side in ("source", "heap")


@dataclass(frozen=True)
class UnitMetrics:
    """A worker's results for one unit. rows: the rows that it read; found: the discrepancies."""

    worker: int
    ordinal: int
    rows: int
    seconds: float
    found: int = 0
