"""All that the page of an index build shows, in one cheap look: what is done, by whom, how long it will take.

A look is a handful of statements, whose size doesn't grow with the ranges: PostgreSQL puts neighbours together. It
takes no lock that a write waits for, and waits for none itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.as_json import number, plain_fields
from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.remedies import remedy
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.generation.lanes import TABLE_OF
from airflow_roir.engine.governor.report import Throttle, read_throttle
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.snapshot.bars import Bars, bars
from airflow_roir.engine.snapshot.bottleneck import AtWork, HeldUp, Workers, at_work, cut, held_up, is_fresh
from airflow_roir.engine.snapshot.shards import ShardStanding, standing
from airflow_roir.errors import NotFound
from airflow_roir.operation import BUILDS, Kind, Phase, Status
from airflow_roir.options import LIVE_OPTIONS

MOST_SAMPLES = 240
MOST_EVENTS = 20
# Of pauses, and of errors: the last ones.
MOST_SHOWN = 50
# A delta up to this is counted, a greater one by a sample of so many blocks: a few milliseconds.
DELTA_BLOCKS = 128
# A look never waits for long, not for who holds the delta either.
LOOK_LOCK_MS = 20
LOOK_MS = 5_000

OPERATION = f"""
SELECT r.*, o.generation_id, o.epoch, o.ticked_at, o.options, o.spark_ui, i.source_oid,
       coalesce({TABLE_OF}, i.source_oid::oid::regclass::text) AS source,
       extract(epoch FROM clock_timestamp() - o.heartbeat_at)::float8 AS heartbeat_age,
       clock_timestamp() AS now,
       EXISTS (SELECT FROM roir.duplicate d WHERE d.operation_id = o.id) AS has_duplicates,
       (SELECT bool_and(v.finished_at IS NOT NULL) FROM roir.verification v WHERE v.operation_id = o.id) AS is_compared,
       (SELECT max(v.id) FROM roir.verification v WHERE v.operation_id = o.id) AS verification_id,
       (SELECT count(*) FROM roir.verification_unit u WHERE u.verification_id = (
               SELECT max(v.id) FROM roir.verification v WHERE v.operation_id = o.id)) AS units,
       (SELECT sum(extract(epoch FROM coalesce(v.finished_at, clock_timestamp()) - v.started_at))::float8
          FROM roir.verification v WHERE v.operation_id = o.id) AS comparing,
       (SELECT count(*) FROM roir.compaction_unit u WHERE u.operation_id = o.id) AS compactions
  FROM roir.resumable_operations r
  JOIN roir.operation o ON o.id = r.operation_id
  JOIN roir.index i ON i.id = o.index_id
 WHERE r.operation_id = %(operation)s
"""
SAMPLES = """
SELECT extract(epoch FROM s.at)::float8 AS at, s.rows, s.percent::float8, s.worked FROM roir.progress_sample s
 WHERE s.operation_id = %(operation)s ORDER BY s.percent DESC, s.rows DESC, s.worked DESC, s.at DESC LIMIT %(most)s
"""
EVENTS = """
SELECT e.at, left(e.actor, 501) AS actor, e.action, left(e.detail, 501) AS detail FROM roir.event e
 WHERE e.operation_id = %(operation)s ORDER BY e.id DESC LIMIT %(most)s
"""
STOPS = """
SELECT e.at, left(e.actor, 501) AS actor, e.action, left(coalesce(e.detail, ''), 501) AS detail, e.until
  FROM (SELECT x.*, (SELECT min(n.at) FROM roir.event n
                      WHERE n.operation_id = x.operation_id AND n.id > x.id
                        AND n.action IN ('resume', 'start', 'abort', 'aborted')) AS until
          FROM roir.event x
         WHERE x.operation_id = %(operation)s AND x.action IN ('pause', 'error', 'fail')
         ORDER BY x.id DESC LIMIT %(most)s) e ORDER BY e.at
"""
DELTA_SIZE = """
SELECT to_regclass(%(delta)s) IS NOT NULL AS exists, pg_relation_size(to_regclass(%(delta)s))::bigint AS bytes,
       current_setting('block_size')::int AS block_bytes
"""
DELTA = "SELECT state::text AS state, count(*) AS rows FROM {delta} {sample} GROUP BY state"


# Of a build they are another matter.
PHASES = {Kind.VERIFY: ["sum", "check"], Kind.COMPACT: ["compact"]}
# What a pause on request begins with; one that a run took upon itself has only the error.
HOW_FAR = re.compile(r"at [0-9.]+ %: ")


@dataclass(frozen=True)
class Delta:
    """What writers left for the fold. sampled: the numbers of rows are estimates."""

    rows: int
    regular: int
    antimatter: int
    ghosts: int
    bytes: int
    sampled: bool


@dataclass(frozen=True)
class PhaseOf:
    """state: done, now or ahead. seconds: of work, None if it hasn't begun."""

    name: str
    state: str
    seconds: float | None


@dataclass(frozen=True)
class Pause:
    """until: None while it lasts."""

    at: datetime
    by: str
    why: str
    until: datetime | None


@dataclass(frozen=True)
class Error:
    """What went wrong, and what to do next."""

    at: datetime
    text: str
    remedy: str


@dataclass(frozen=True)
class Event:
    """Who did what."""

    at: datetime
    actor: str
    action: str
    detail: str | None


@dataclass(frozen=True)
class Progress:
    """One operation. Durations in seconds, sizes in bytes; None if there is nothing to derive a value from.

    status: as `roir status` has it, and `pausing` while a run or its workers haven't left yet. percent, rows and
    seconds_worked never fall. seconds_left_low, seconds_left_high: between these in most builds, no promise.
    has_duplicates: also healed ones. throttle: None if it has no limits and has lost no time. samples: unix seconds,
    rows, percent. phases: `verify` is the comparison before a publish. shards: of an index over shards.
    """

    now: datetime
    index: str
    source: str
    operation_id: int
    kind: str
    status: str
    phase: str
    phases: tuple[PhaseOf, ...]
    percent: float
    rows: int
    rows_estimate: int
    rows_per_second: float | None
    rows_per_second_now: float | None
    seconds_worked: float
    seconds_left: float | None
    seconds_left_low: float | None
    seconds_left_high: float | None
    bars: Bars
    workers: Workers
    delta: Delta | None
    held_up: HeldUp
    throttle: Throttle | None
    samples: tuple[tuple[float, int, float], ...]
    pauses: tuple[Pause, ...]
    errors: tuple[Error, ...]
    options: dict[str, Any]
    owner: str | None
    heartbeat_age: float | None
    spark_ui: str | None
    notice: str | None
    unique: bool
    census: bool
    has_duplicates: bool
    duplicate_keys: int
    duplicate_rows: int
    events: tuple[Event, ...]
    shards: tuple[ShardStanding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: moments in ISO 8601."""
        return plain_fields(self)


def progress(database: Database, index: str | None = None, operation_id: int | None = None) -> Progress:
    """How far the latest operation of an index is, or the operation of that id; with neither, the newest of all.

    One look, in one short transaction that changes nothing. Raises NotFound, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        execute(connection, f"SET LOCAL statement_timeout = {LOOK_MS}; SET LOCAL lock_timeout = {LOOK_LOCK_MS}")
        if operation_id is None:
            operation_id = _operation(connection, index)
        row = execute(connection, OPERATION, {"operation": operation_id}).first()
        if row is None:
            raise NotFound(f"there is no operation {operation_id}")
        return _look(connection, row)


def _operation(connection: Connection, index: str | None) -> int:
    if index is not None:
        return int(operations.live_or_last(connection, parse_name(index, "index")).id)
    newest = execute(connection, "SELECT max(id) FROM roir.operation").scalar_one()
    if newest is None:
        raise NotFound("there is no operation yet; roir build makes an index")
    return int(newest)


def _look(connection: Connection, row: Row[Any]) -> Progress:
    of, count = _pieces(row)
    values = {
        "operation": row.operation_id,
        "generation": row.generation_id,
        "verification": row.verification_id,
        "epoch": row.epoch,
        "estimate": row.rows_estimate,
    }
    found = bars(connection, of, count, values)
    work = at_work(connection, row, found)
    pauses, errors = _stops(connection, row)
    return Progress(
        now=row.now,
        index=row.name,
        source=row.source,
        operation_id=row.operation_id,
        kind=row.kind,
        status=_status(row, work),
        phase=row.phase,
        phases=_phases(row),
        percent=float(row.percent_complete),
        rows=row.rows,
        rows_estimate=row.rows_estimate,
        rows_per_second=number(row.rows_per_second),
        rows_per_second_now=number(row.rows_per_second_now),
        seconds_worked=float(row.total_execution_time),
        seconds_left=number(row.seconds_left),
        seconds_left_low=number(row.seconds_left_low),
        seconds_left_high=number(row.seconds_left_high),
        bars=found,
        workers=work.workers,
        delta=_delta(connection, row),
        held_up=held_up(connection, row, work),
        throttle=read_throttle(connection, row),
        samples=_samples(connection, row),
        pauses=pauses,
        errors=errors,
        options={name: row.live_options[name] for name in LIVE_OPTIONS},
        owner=_text(row.owner),
        heartbeat_age=number(row.heartbeat_age),
        spark_ui=_text(row.spark_ui),
        notice=_text(row.notice),
        unique=row.is_unique,
        census=row.census,
        has_duplicates=row.has_duplicates,
        duplicate_keys=row.duplicate_keys,
        duplicate_rows=row.duplicate_rows,
        events=_events(connection, row),
        shards=standing(connection, row.operation_id, row.generation_id, row.epoch),
    )


def _pieces(row: Row[Any]) -> tuple[str, int]:
    """What is worked on, piece by piece, and how many pieces there are."""
    if row.kind == Kind.COMPACT:
        return "compactions", row.compactions
    if row.kind == Kind.VERIFY or (row.phase == Phase.PUBLISH and row.verification_id is not None):
        return "units", row.units
    return ("ranges", row.ranges) if row.phase in (Phase.BUILD, Phase.DONE) else ("segments", row.segments)


def _status(row: Row[Any], work: AtWork) -> str:
    # A run forgets its heartbeat when it has left; one that was killed is believed for as long as its heart counts.
    if row.state == Status.PAUSED and (is_fresh(row) or work.sessions):
        return "pausing"
    return str(row.state)


def _phases(row: Row[Any]) -> tuple[PhaseOf, ...]:
    seconds = {name: float(value) for name, value in row.phase_seconds.items()}
    names = PHASES.get(row.kind, ["prepare", "build", "seal", "fold", "verify", "publish"])
    now = row.phase
    if row.kind in BUILDS:
        in_publish = seconds.pop("publish", None)
        compares = row.options.get("verify", "after") in ("after", "both")
        if not compares:
            names.remove("verify")
        elif in_publish is not None:
            seconds["verify"] = round(min(row.comparing or 0.0, in_publish), 3)
        if in_publish is not None:
            seconds["publish"] = round(in_publish - seconds.get("verify", 0.0), 3)
        if now == Phase.PUBLISH and compares and row.is_compared is not True:
            now = "verify"
    at = len(names) if now == Phase.DONE else names.index(now)
    states = ["done" if n < at else "now" if n == at else "ahead" for n in range(len(names))]
    return tuple(
        PhaseOf(name, state, None if state == "ahead" else seconds.get(name))
        for name, state in zip(names, states, strict=True)
    )


def _samples(connection: Connection, row: Row[Any]) -> tuple[tuple[float, int, float], ...]:
    found = execute(connection, SAMPLES, {"operation": row.operation_id, "most": MOST_SAMPLES}).all()
    samples: list[tuple[float, int, float]] = []
    # Where the server's clock was set back, what was before is moved back too: work has an order, a clock has none.
    back = 0.0
    for n, one in enumerate(found):
        if n and one.at - back > samples[-1][0]:
            back = one.at - samples[-1][0] + max(0.0, found[n - 1].worked - one.worked)
        samples.append((one.at - back, int(one.rows), one.percent))
    return tuple(reversed(samples))


def _events(connection: Connection, row: Row[Any]) -> tuple[Event, ...]:
    found = execute(connection, EVENTS, {"operation": row.operation_id, "most": MOST_EVENTS})
    return tuple(Event(one.at, cut(one.actor), one.action, _text(one.detail)) for one in found)


def _stops(connection: Connection, row: Row[Any]) -> tuple[tuple[Pause, ...], tuple[Error, ...]]:
    """The pauses, and the errors: a run that stops by itself pauses the operation, with the error as the reason."""
    found: Sequence[Row[Any]] = execute(connection, STOPS, {"operation": row.operation_id, "most": MOST_SHOWN}).all()
    pauses, errors = [], []
    for one in found:
        if one.action == "pause":
            pauses.append(Pause(one.at, cut(one.actor), cut(HOW_FAR.sub("", one.detail)), one.until))
        if one.action != "pause" or not HOW_FAR.match(one.detail):
            failed = one.action == "fail"
            errors.append(Error(one.at, cut(one.detail), remedy(one.detail, row.name, failed)))
    return tuple(pauses), tuple(errors)


def _delta(connection: Connection, row: Row[Any]) -> Delta | None:
    """What the delta consists of; None if there is none, or if somebody holds it."""
    if row.kind not in BUILDS or row.phase == Phase.DONE:
        return None
    name = physical.delta(row.generation_id)
    try:
        with connection.begin_nested():
            size = execute(connection, DELTA_SIZE, {"delta": name}).one()
            if not size.exists or size.bytes is None:
                return None
            blocks = size.bytes / size.block_bytes
            sampled = blocks > DELTA_BLOCKS
            sample = f"TABLESAMPLE SYSTEM ({100 * DELTA_BLOCKS / blocks:.6f})" if sampled else ""
            counts = {one.state: one.rows for one in execute(connection, DELTA.format(delta=name, sample=sample))}
    except DBAPIError:
        return None
    factor = blocks / DELTA_BLOCKS if sampled else 1
    regular, antimatter, ghosts = (round(counts.get(s, 0) * factor) for s in ("regular", "antimatter", "ghost"))
    return Delta(regular + antimatter + ghosts, regular, antimatter, ghosts, size.bytes, sampled)


def _text(value: str | None) -> str | None:
    return None if value is None else cut(value)
