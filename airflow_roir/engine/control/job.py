"""A job: what a worker knows of the operation that it works for, and whether the source still fits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import Scan
from airflow_roir.engine.capture import alterations, partition_changes
from airflow_roir.engine.control.run import Run, read_control
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.schema import tamper
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import catalog
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import LabelsRenamed, RightMissing, SourceChanged

GENERATION = """
SELECT g.entry, g.scan, i.source_oid FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE g.id = %(generation)s
"""
# Asked of primary keys with an enum only: the question takes milliseconds.
RENAMED = """
SELECT s.name, s.was, s.is_now FROM roir.generation g CROSS JOIN LATERAL roir.shape_changes(g.id) s
 WHERE g.id = %(generation)s AND g.shape -> 'labels' <> '{}' AND s.kind = 'label' LIMIT 1
"""


@dataclass(frozen=True)
class Job:
    """What a worker must know of an operation; read once, since it doesn't change during a run."""

    run: Run
    index_id: int
    generation_id: int
    source: Source
    entry: Entry
    options: dict[str, Any]
    fingerprint: str
    scan: Scan = Scan.KEY
    # Of the catalogs, before the source was found as it should be.
    stamp: str | None = None

    @property
    def columns(self) -> list[str]:
        """The source's columns that the fingerprint covers."""
        return self.entry.fingerprinted(self.source)


def load_job(connection: Connection, run: Run) -> Job:
    """Read what the workers of a run need. Raises Fenced, SourceChanged if the source isn't as it was."""
    row = read_control(connection, run)
    # A leaf that is new is read.
    execute(connection, f"SET LOCAL lock_timeout = {limits_of(connection).table_lock_ms}")
    generation = execute(connection, GENERATION, {"generation": row.generation_id}).one()
    entry = physical.followed(connection, row.generation_id, Entry.from_json(generation.entry))
    source = catalog.read_source_by_oid(connection, generation.source_oid)
    job = Job(
        run,
        row.index_id,
        row.generation_id,
        source,
        entry,
        dict(row.options),
        row.fingerprint,
        Scan(generation.scan),
        catalog.stamp(connection, source.oid),
    )
    try:
        check_fingerprint(connection, job)
    except SourceChanged:
        # An abort may have removed all that the run had: then the run is fenced.
        read_control(connection, run)
        raise
    # Here only, not in each batch: a library is exchanged by a restart of the server, which ends this session.
    resorted = entry.resorted(source)
    if resorted:
        raise SourceChanged(
            f"index {run.index}: the library of collation {resorted[0]} was exchanged since the operation was "
            "prepared, so ranges and entries may be in another order now. Abort the operation and start again"
        )
    check_partitions(connection, job)
    return job


def check_fingerprint(connection: Connection, job: Job) -> None:
    """Raise SourceChanged if the source's shape isn't the one that the operation was prepared for.

    Raises LabelsRenamed if only labels of an enum are others, which can be undone: nothing was copied meanwhile; and
    RightMissing if the capture belongs to a former owner of the source, until a clean-up has run.
    """
    label = execute(connection, RENAMED, {"generation": job.generation_id}).first()
    if label is not None:
        raise LabelsRenamed(
            f"index {job.run.index}: label {label.was} of type {label.name}, which is in the primary key, is "
            f"called {label.is_now} now, but bounds and watermarks contain its old name. Rename it back until the "
            "operation is done, or abort the operation and start again"
        )
    if catalog.fingerprint(connection, job.source.oid, job.columns) != job.fingerprint:
        # A clean-up mends that. What else was altered is told by the next look.
        if alterations.is_of_another(connection, job.source):
            raise RightMissing(f"index {job.run.index}: {alterations.of_another(job.source)}")
        found = tamper.changes(connection, job.generation_id, job.source.sql)
        unseen = f": {'; '.join(found.values())}" if found else ""
        raise SourceChanged(
            f"index {job.run.index}: table {job.source.sql} was altered since the operation was prepared (columns, "
            "their types or expressions, the primary key, row security, or the capture: its triggers, function or "
            f"tables){unseen}. Abort the operation and start again"
        )


def check_partitions(
    connection: Connection, job: Job, known: set[partition_changes.Change] | None = None, adopt: bool = False
) -> None:
    """Raise PartitionsChanged if partitions brought or took rows that no capture saw (`partition_changes.check`).

    adopt: also register the new ones, under the drain lock that the caller holds.
    """
    known = set() if known is None else known
    found = partition_changes.check(connection, job.run.index, job.source, job.generation_id, job.entry, known)
    if adopt:
        partition_changes.adopt(connection, job.source, job.generation_id, found)


class SourceCheck:
    """Whether the source still fits a worker's job, asked in each of its transactions.

    A full look takes milliseconds, more so with many partitions. So it is taken only if the stamp of what it reads
    isn't the one of before the last look that found nothing.
    """

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self._stamp = job.stamp
        self._known: set[partition_changes.Change] = set()

    def look(self, stamp: str | None = None, partitions: bool = True) -> None:
        """Raise SourceChanged, LabelsRenamed or PartitionsChanged, as `check_fingerprint` and `check_partitions` do.

        stamp: `roir.stamp` as the caller's own statement has just read it. partitions: whether they matter.
        """
        if stamp is None:
            stamp = catalog.stamp(self.connection, self.job.source.oid)
        if stamp == self._stamp:
            return
        check_fingerprint(self.connection, self.job)
        if partitions:
            check_partitions(self.connection, self.job, self._known)
        self._stamp = stamp
