"""A job: the facts that a worker needs of its operation, and the check whether the source still fits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import Scan, argument
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
# Only for primary keys with an enum, since the query takes milliseconds.
RENAMED = """
SELECT s.name, s.was, s.is_now FROM roir.generation g CROSS JOIN LATERAL roir.shape_changes(g.id) s
 WHERE g.id = %(generation)s AND g.shape -> 'labels' <> '{}' AND s.kind = 'label' LIMIT 1
"""


@dataclass(frozen=True)
class Job:
    """The facts of an operation that a worker needs; read once, since they don't change during a run."""

    run: Run
    index_id: int
    generation_id: int
    source: Source
    entry: Entry
    options: dict[str, Any]
    fingerprint: str
    scan: Scan = Scan.KEY
    # The stamp of the catalogs, read before the source was checked.
    stamp: str | None = None

    @property
    def columns(self) -> list[str]:
        """The source's columns that the fingerprint covers."""
        return self.entry.fingerprinted(self.source)


def load_job(connection: Connection, run: Run) -> Job:
    """Reads the job of a run, for its workers. Raises Fenced, and SourceChanged if the source isn't as it was."""
    row = read_control(connection, run)
    # For the locks on new leaves, which are read.
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
        # An abort may have removed the run's tables: then the run is fenced.
        read_control(connection, run)
        raise
    # Only here, not in each batch: a library changes by a restart of the server, which ends this session.
    resorted = physical.resorted(connection, row.generation_id, entry)
    if resorted:
        raise SourceChanged(
            f"index {run.index}: the library of collation {resorted[0]} was exchanged since the operation was "
            "prepared, so ranges and entries may be in another order now. Abort the operation and start again: "
            f"roir abort {argument(run.index)}"
        )
    check_partitions(connection, job)
    return job


def check_fingerprint(connection: Connection, job: Job) -> None:
    """Raises SourceChanged if the source's shape isn't the one that the operation was prepared for.

    Raises LabelsRenamed if only labels of an enum were renamed, which can be undone: nothing was copied meanwhile.
    Raises RightMissing if the capture belongs to a former owner of the source, until a clean-up has run.
    """
    label = execute(connection, RENAMED, {"generation": job.generation_id}).first()
    if label is not None:
        raise LabelsRenamed(
            f"index {job.run.index}: label {label.was} of type {label.name}, which is in the primary key, is "
            f"called {label.is_now} now, but bounds and watermarks contain its old name. Rename it back until the "
            f"operation is done, or abort the operation and start again: roir abort {argument(job.run.index)}"
        )
    if catalog.fingerprint(connection, job.source.oid, job.columns) != job.fingerprint:
        # A clean-up repairs a former owner's capture. The next check reports other alterations.
        if alterations.is_of_another(connection, job.source):
            raise RightMissing(f"index {job.run.index}: {alterations.of_another(job.source)}")
        found = tamper.changes(connection, job.generation_id, job.source.sql)
        unseen = f": {'; '.join(found.values())}" if found else ""
        raise SourceChanged(
            f"index {job.run.index}: table {job.source.sql} was altered since the operation was prepared (columns, "
            "their types or expressions, the primary key, row security, or the capture: its triggers, function or "
            f"tables){unseen}. Abort the operation and start again: roir abort {argument(job.run.index)}"
        )


def check_partitions(
    connection: Connection, job: Job, known: set[partition_changes.Change] | None = None, adopt: bool = False
) -> None:
    """Raises PartitionsChanged if partitions brought or took rows that no capture saw (`partition_changes.check`).

    adopt: also register the new partitions, under the drain lock that the caller holds.
    """
    known = set() if known is None else known
    found = partition_changes.check(connection, job.run.index, job.source, job.generation_id, job.entry, known)
    if adopt:
        partition_changes.adopt(connection, job.source, job.generation_id, found)


class SourceCheck:
    """The check in each of a worker's transactions whether the source still fits its job.

    A full check takes milliseconds, and more with many partitions. So it runs only if the stamp of the catalogs has
    changed since the last check that found nothing.
    """

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self._stamp = job.stamp
        self._known: set[partition_changes.Change] = set()

    def look(self, stamp: str | None = None, partitions: bool = True) -> None:
        """Raises SourceChanged, LabelsRenamed or PartitionsChanged, as `check_fingerprint` and `check_partitions` do.

        stamp: `roir.stamp`, if the caller's own statement has just read it. partitions: whether they matter.
        """
        if stamp is None:
            stamp = catalog.stamp(self.connection, self.job.source.oid)
        if stamp == self._stamp:
            return
        check_fingerprint(self.connection, self.job)
        if partitions:
            check_partitions(self.connection, self.job, self._known)
        self._stamp = stamp
