"""A worker copies its batch's rows also into the bases of operations that share the scan (`sharing.py`).

Each of them keeps its own watermark, by compare-and-set in the same transaction (I4). If an error comes from one of
them, only that one is affected: the batch is repeated without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.control.job import Job, SourceCheck, load_job
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.scan.reader import Stretch, has_entry, selected
from airflow_roir.engine.scan.sharing import HELD, SAME_PLACE, TOGETHER
from airflow_roir.engine.source import owner
from airflow_roir.errors import InvariantViolated, RoirError

# After a batch failed with an operation, workers don't copy for that one for this long.
LEFT_ALONE_S = 30.0

# A statement of its own, before the one that reads: so the snapshot of the latter is younger than each companion's
# prepare, whose drain has made sure of the capture. The operation's row isn't locked: a pause, an abort or a heartbeat
# writes to it.
LOCK = f"""
SELECT r.id, r.claim_token, x.id AS operation_id, x.epoch, i.schema_name, i.name, x.owner
  FROM roir.scan_range p
  JOIN roir.operation o ON o.id = p.operation_id
  JOIN roir.operation x ON {TOGETHER}
  JOIN roir.index i ON i.id = x.index_id
  JOIN roir.scan_range r ON r.operation_id = x.id AND {SAME_PLACE}
 WHERE p.id = %(range)s AND x.id <> ALL (%(alone)s) AND (r.claim_epoch IS NULL OR r.claim_epoch < x.epoch)
 ORDER BY r.id FOR UPDATE OF r SKIP LOCKED
"""
# If two workers have claimed the same range at the same time, the worker of the older operation copies it for both.
IS_READ_BY_OLDER = f"""
SELECT EXISTS (SELECT FROM roir.scan_range p
                 JOIN roir.operation o ON o.id = p.operation_id
                 JOIN roir.operation x ON {TOGETHER} AND x.id < o.id
                 JOIN roir.scan_range r ON r.operation_id = x.id AND {SAME_PLACE} AND {HELD}
                WHERE p.id = %(range)s)
"""
ADVANCE = """
UPDATE roir.scan_range p SET {changes}
  FROM unnest(%(companions)s::bigint[], %(tokens)s::bigint[]) c (id, token)
 WHERE p.id = c.id AND p.claim_token = c.token AND {stands}
"""
TYPES = """
SELECT attname::text AS name, format_type(atttypid, -1) AS type FROM pg_attribute
 WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND NOT attisdropped
"""


@dataclass(frozen=True)
class Companion:
    """Another operation for which a batch's rows are copied. range_id, token: its range, as it was locked."""

    job: Job
    check: SourceCheck
    range_id: int
    token: int


class Carrier:
    """One worker's companions, from batch to batch."""

    def __init__(self, connection: Connection, job: Job) -> None:
        self.connection = connection
        self.job = job
        self.companions: tuple[Companion, ...] = ()
        # The other operations for which the open batch, or the last one, copies.
        self._tried: tuple[int, ...] = ()
        self._known: dict[tuple[int, int], tuple[Job, SourceCheck]] = {}
        self._alone_until: dict[int, float] = {}
        # Operations that were in a failed batch together: any of them may be the cause, so they are tried one by one.
        self._suspects: set[int] = set()

    @property
    def share(self) -> int:
        """How many operations a batch copies for."""
        return 1 + len(self.companions)

    def is_read_by_older(self, range_id: int) -> bool:
        """True if a worker of an older operation has claimed the same range, with the same watermark."""
        return bool(execute(self.connection, IS_READ_BY_OLDER, {"range": range_id}).scalar_one())

    def none(self) -> None:
        """Make the next batch copy only for its own operation."""
        self.companions = self._tried = ()

    def take(self, range_id: int) -> None:
        """Lock the same range of all operations that the batch can copy for, in its transaction, before it reads."""
        self.none()
        now = time.monotonic()
        self._alone_until = {one: until for one, until in self._alone_until.items() if until > now}
        rows = execute(self.connection, LOCK, {"range": range_id, "alone": list(self._alone_until)}).all()
        suspect = next((row.operation_id for row in rows if row.operation_id in self._suspects), None)
        if suspect is not None:
            rows = [row for row in rows if row.operation_id == suspect]
        self._tried = tuple(row.operation_id for row in rows)
        taken = []
        for row in rows:
            try:
                job, check = self._job(row)
            except (DBAPIError, RoirError) as error:
                if isinstance(error, DBAPIError) and error.connection_invalidated:
                    raise
                # That operation's own worker meets the same error, and reports it.
                self._leave_alone(row.operation_id)
                continue
            taken.append(Companion(job, check, row.id, row.claim_token))
        self.companions = tuple(taken)
        self._tried = tuple(one.job.run.operation_id for one in taken)

    def _job(self, row: Row[Any]) -> tuple[Job, SourceCheck]:
        known = self._known.get((row.operation_id, row.epoch))
        if known is None:
            run = Run(row.operation_id, row.epoch, f"{quote(row.schema_name)}.{quote(row.name)}", row.owner)
            # A savepoint, since a failed statement would end the transaction.
            with self.connection.begin_nested():
                job = load_job(self.connection, run)
            known = self._known[row.operation_id, row.epoch] = (job, SourceCheck(self.connection, job))
        return known

    def insert(self, relation: str, stretch: Stretch) -> int:
        """Copy a stretch into the base of its own operation and into those of its companions; returns its rows.

        One statement reads the source once, with all columns, in one snapshot.
        """
        jobs = [self.job, *(one.job for one in self.companions)]
        read = dict.fromkeys(c for job in jobs for c in (*selected(job), *([has_entry(job)] * _is_partial(job))))
        names = {column: f"r{n}" for n, column in enumerate(read)}
        columns = ", ".join(f"{column} AS {name}" for column, name in names.items())
        rows = f"SELECT {columns} FROM ONLY {relation} WHERE {stretch.where}"
        values: dict[str, Any] = stretch.values
        if not owner.is_trusted(self.connection, self.job.source, [relation]):
            types = {names[c]: t for job in jobs for c, t in self._types(job)}
            types |= {names[has_entry(job)]: "boolean" for job in jobs if _is_partial(job)}
            listed = ", ".join(f"{name} {types[name]}" for name in names.values())
            item, values = owner.relation(self.connection, self.job.source, rows, listed, values, [relation])
            rows = f"SELECT * FROM {item}"
        puts = [
            f"INSERT INTO {physical.base(job.generation_id)} ({', '.join(job.entry.physical())}) "
            f"SELECT {', '.join(names[column] for column in selected(job))} FROM rows"
            + (f" WHERE {names[has_entry(job)]}" if _is_partial(job) else "")
            for job in jobs
        ]
        others = "".join(f", c{n} AS ({put})" for n, put in enumerate(puts[1:]))
        return execute(self.connection, f"WITH rows AS MATERIALIZED ({rows}){others} {puts[0]}", values).rowcount

    def _types(self, job: Job) -> list[tuple[str, str]]:
        found = execute(self.connection, TYPES, {"base": physical.base(job.generation_id)})
        types = {row.name: row.type for row in found}
        return [(c, types[name]) for c, name in zip(selected(job), job.entry.physical(), strict=True)]

    def advance(self, changes: str, stands: str, values: Mapping[str, Any], stamp: str | None) -> None:
        """Move the companions' watermarks as the batch's own, by compare-and-set, if the source still fits each.

        Raises InvariantViolated if a watermark has moved, SourceChanged, PartitionsChanged.
        """
        if not self.companions:
            return
        bound = {
            **values,
            "companions": [one.range_id for one in self.companions],
            "tokens": [one.token for one in self.companions],
        }
        moved = execute(self.connection, ADVANCE.format(changes=changes, stands=stands), bound).rowcount
        if moved != len(self.companions):
            raise InvariantViolated(f"index {self.job.run.index}: a range that was locked to be copied has moved")
        for one in self.companions:
            one.check.look(stamp)

    def committed(self) -> None:
        """Call it for each committed batch: its companions are no longer suspects."""
        self._suspects.difference_update(self._tried)

    def blame(self) -> bool:
        """Call it for each failed batch. True if the batch had companions, and must be repeated without them."""
        tried, self._tried = self._tried, ()
        self.companions = ()
        if len(tried) == 1:
            self._leave_alone(tried[0])
        self._suspects.update(tried)
        return bool(tried)

    def _leave_alone(self, operation_id: int) -> None:
        self._alone_until[operation_id] = time.monotonic() + LEFT_ALONE_S


def _is_partial(job: Job) -> bool:
    return has_entry(job) != "true"
