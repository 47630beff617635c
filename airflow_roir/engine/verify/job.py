"""What the workers of a verification know of it, and of the unit that they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.engine.control.job import Job, check_fingerprint
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.source import catalog
from airflow_roir.engine.verify import verification
from airflow_roir.generation_state import GenerationStatus
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


def load(connection: Connection, run: Run) -> VerifyJob:
    """Read what the workers of a run need. Raises Fenced, NotFound, SourceChanged."""
    row = read_control(connection, run)
    found = verification.unfinished(connection, row.id)
    generation = execute(
        connection,
        "SELECT g.entry, g.status, i.source_oid, i.shard_column FROM roir.generation g "
        "JOIN roir.index i ON i.id = g.index_id WHERE g.id = %(id)s",
        {"id": found.generation_id},
    ).one()
    source = catalog.read_source_by_oid(connection, generation.source_oid)
    job = Job(
        run,
        row.index_id,
        found.generation_id,
        source,
        Entry.from_json(generation.entry),
        dict(row.options),
        row.fingerprint,
        stamp=catalog.stamp(connection, source.oid),
    )
    check_fingerprint(connection, job)
    suspicious = None if found.suspicious is None else tuple(found.suspicious)
    return VerifyJob(
        job,
        found.id,
        found.buckets,
        suspicious,
        generation.status == GenerationStatus.BUILDING,
        VerifyOptions(**found.options),
        generation.shard_column,
    )
