"""The state of operations, for people and programs; every number is derived from committed rows (I9)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from airflow_roir.as_json import number, plain_fields
from airflow_roir.definition import parse_name
from airflow_roir.engine.compact.progress import Standing, standings
from airflow_roir.engine.control import long_pause, operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.health import faults
from airflow_roir.engine.locks.lock_waits import LockWait, lock_waits
from airflow_roir.engine.partitions.remove_entries import still_hidden
from airflow_roir.engine.scan import sharing
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.bottleneck import cut
from airflow_roir.engine.snapshot.index import IndexFacts, read_indexes
from airflow_roir.errors import NotFound
from airflow_roir.operation import Phase, Status
from airflow_roir.options import LIVE_OPTIONS


@dataclass(frozen=True)
class OperationStatus:
    """One operation. Durations in seconds: total_execution_time counts neither pauses nor Spark's start-up.

    seconds_left and rows_per_second are None if there is nothing yet to derive them from; rows_per_second_now is of the
    last seconds, and null unless it runs. seconds_left_low, seconds_left_high: between these in most builds. driven: a
    run drives it, and has given a sign of life lately; else none has for silent_seconds. notice: whom it waits for,
    or the last option that was refused. ended_by, end_reason: who aborted it and why. unique: of its index; then
    duplicate_rows share duplicate_keys, as far as that is known, and census: only that is asked. options: those that
    change while it lives, as users write them. throttled: why it may not work as it could, null if it may; granted: how
    many workers may work now, null if all. throttle_seconds: what was lost to each cause, in seconds of all workers'
    work. shares_scan_of: the indexes that the same scan builds now. long_pause: what is to be warned of a pause that
    lasts.
    compaction: how far its units are; None of other kinds.
    warnings: of the published index (`health`), by `status` only.
    """

    index: str
    operation_id: int
    kind: str
    status: str
    phase: str
    percent_complete: float
    rows: int
    rows_estimate: int
    rows_per_second: float | None
    rows_per_second_now: float | None
    seconds_left: float | None
    seconds_left_low: float | None
    seconds_left_high: float | None
    total_execution_time: float
    phase_seconds: dict[str, float]
    options: dict[str, Any]
    ranges_done: int
    ranges: int
    segments_sealed: int
    segments: int
    owner: str | None
    driven: bool
    silent_seconds: float | None
    started_at: datetime
    paused_at: datetime | None
    finished_at: datetime | None
    pause_reason: str | None
    paused_by: str | None
    ended_by: str | None
    end_reason: str | None
    error: str | None
    notice: str | None
    unique: bool
    census: bool
    duplicate_keys: int
    duplicate_rows: int
    throttled: str | None
    throttled_since: datetime | None
    granted: float | None
    throttle_seconds: dict[str, float]
    shares_scan_of: tuple[str, ...] = ()
    long_pause: str | None = None
    compaction: Standing | None = None
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: moments in ISO 8601, and each option by its name."""
        facts = plain_fields(self)
        options: dict[str, Any] = facts.pop("options")
        return facts | options


# silent: since the last heartbeat; a run that has left in order has none, and the last event tells.
QUERY = """
SELECT r.*, extract(epoch FROM clock_timestamp() - coalesce(r.heartbeat_at, (
         SELECT max(e.at) FROM roir.event e WHERE e.operation_id = r.operation_id)))::float8 AS silent,
       r.heartbeat_at IS NOT NULL
       AND abs(extract(epoch FROM clock_timestamp() - r.heartbeat_at)) < %(fresh)s AS beats,
       a.actor AS ended_by, a.detail AS end_reason
  FROM roir.resumable_operations r
  LEFT JOIN LATERAL (
       SELECT e.actor, e.detail FROM roir.event e
        WHERE e.operation_id = r.operation_id AND e.action = 'abort' AND r.state IN ('aborting', 'aborted')
        ORDER BY e.id DESC LIMIT 1) a ON true
 WHERE r.operation_id = ANY (%(ids)s) ORDER BY r.name
"""


# Of an index, or of each.
NEWEST = """
SELECT max(o.id) FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
 WHERE i.dropped_at IS NULL AND (%(index)s IS NULL OR i.id = %(index)s) GROUP BY i.id
"""


def status(database: Database, index: str | None = None) -> list[OperationStatus]:
    """The latest operation of one index, or of every live index, with what is wrong with the published indexes.

    Raises NotFound, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        found = None if index is None else operations.find_index(connection, parse_name(index, "index")).id
        return [
            replace(one, warnings=tuple(faults.warnings_at_once(connection, one.operation_id, one.index, still_hidden)))
            for one in _newest(connection, found)
        ]


@dataclass(frozen=True)
class Overview:
    """All indexes, or one, and the newest operation of each; by name. waits: who of us waits for a lock.

    now: by the server's clock, as all other moments.
    """

    now: datetime
    indexes: tuple[IndexFacts, ...]
    operations: tuple[OperationStatus, ...]
    waits: tuple[LockWait, ...]


def overview(database: Database, index: str | None = None, exact: bool = False) -> Overview:
    """Everything that `roir status` shows, in one transaction that changes nothing and waits for no lock.

    An index that is prepared for the first time has no row before it has its locks: then there are only waits.
    exact: as in `indexes`. Raises NotFound, SchemaVersionMismatch.
    """
    name = None if index is None else parse_name(index, "index")
    with database.transaction() as connection:
        check_schema(connection)
        now = execute(connection, "SELECT clock_timestamp()").scalar_one()
        waits = tuple(one for one in lock_waits(connection) if name is None or one.is_for(name))
        try:
            found = None if name is None else operations.find_index(connection, name).id
        except NotFound:
            if not waits:
                raise
            return Overview(now, (), (), waits)
        facts = tuple(read_indexes(connection, found, exact))
        # In the same order: the server sorts names by its own collation.
        order = {one.index: place for place, one in enumerate(facts)}
        read = sorted(_newest(connection, found), key=lambda one: (order.get(one.index, -1), one.index))
        return Overview(now, facts, tuple(read), waits)


def operation_status(database: Database, operation_id: int) -> OperationStatus:
    """The status of one operation. Raises NotFound."""
    with database.transaction() as connection:
        operations.read_operation(connection, operation_id)
        return _read(connection, [operation_id])[0]


def _newest(connection: Connection, index_id: int | None) -> list[OperationStatus]:
    """The newest operation of an index, or of every one."""
    ids = list(execute(connection, NEWEST, {"index": index_id}).scalars())
    return _read(connection, ids) if ids else []


def _read(connection: Connection, ids: list[int]) -> list[OperationStatus]:
    # All of them are read at once, where there is more than one to tell of.
    pauses = long_pause.long_pauses(connection, ids[0] if len(ids) == 1 else None)
    shared = sharing.others(connection, ids)
    compactions = standings(connection, ids)
    return [
        OperationStatus(
            # As everywhere else: the view quotes key words, too.
            index=str(parse_name(row.name, "index")),
            operation_id=row.operation_id,
            kind=row.kind,
            status=row.state,
            phase=Phase(row.phase).value,
            percent_complete=float(row.percent_complete),
            rows=row.rows,
            rows_estimate=row.rows_estimate,
            rows_per_second=number(row.rows_per_second),
            rows_per_second_now=number(row.rows_per_second_now),
            seconds_left=number(row.seconds_left),
            seconds_left_low=number(row.seconds_left_low),
            seconds_left_high=number(row.seconds_left_high),
            total_execution_time=float(row.total_execution_time),
            phase_seconds=dict(row.phase_seconds),
            options={name: row.live_options[name] for name in LIVE_OPTIONS},
            ranges_done=row.ranges_done,
            ranges=row.ranges,
            segments_sealed=row.segments_sealed,
            segments=row.segments,
            owner=row.owner,
            driven=row.state == Status.RUNNING and row.beats,
            silent_seconds=number(row.silent),
            started_at=row.start_time,
            paused_at=row.last_pause_time,
            finished_at=row.finish_time,
            pause_reason=row.pause_reason,
            paused_by=row.paused_by,
            ended_by=row.ended_by,
            end_reason=row.end_reason,
            error=row.error,
            notice=row.notice,
            unique=row.is_unique,
            census=row.census,
            duplicate_keys=row.duplicate_keys,
            duplicate_rows=row.duplicate_rows,
            throttled=None if row.throttled is None else cut(row.throttled),
            throttled_since=row.throttled_since,
            granted=number(row.granted),
            throttle_seconds=dict(row.throttle_seconds),
            shares_scan_of=shared.get(row.operation_id, ()),
            compaction=compactions.get(row.operation_id),
            long_pause=next((one.text for one in pauses if one.operation_id == row.operation_id), None),
        )
        for row in execute(connection, QUERY, {"ids": ids, "fresh": operations.HEARTBEAT_FRESH_S})
    ]
