"""The details of an operation for a page or a live view: pieces, workers, the cause that holds it up, its history.

A look takes a handful of statements, whose results don't grow with the ranges: PostgreSQL puts neighbours together. It
takes no lock that a write waits for, and hardly waits for locks itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from airflow_roir.actor import Way, way_of
from airflow_roir.definition import argument, parse_name
from airflow_roir.engine.compact.progress import standings
from airflow_roir.engine.control import operations, remedies
from airflow_roir.engine.control.remedies import remedy
from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.generation import physical
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.engine.sessions.side_by_side import AT_ONCE, side_by_side
from airflow_roir.engine.snapshot.bars import bars
from airflow_roir.engine.snapshot.bottleneck import at_work, held_up
from airflow_roir.engine.snapshot.operation import ABANDONED, PAUSING, OperationStatus, cut, rows
from airflow_roir.engine.snapshot.parts import Delta, Error, Event, NextTask, Pause, PhaseOf
from airflow_roir.engine.snapshot.querying import queries
from airflow_roir.engine.snapshot.shards import standing
from airflow_roir.engine.snapshot.throttle import read_throttle
from airflow_roir.engine.snapshot.words import way_on
from airflow_roir.engine.source.relation_size import LOCK_TIMEOUT
from airflow_roir.errors import NotFound
from airflow_roir.operation import BUILDS, PHASES_OF, PLACED, Kind, Phase, Status

MOST_SAMPLES = 240
MOST_EVENTS = 20
# The most pauses and errors that are shown, the last ones.
MOST_SHOWN = 50
# A delta of up to this many blocks is counted, a larger one by a sample of this many: a few milliseconds.
DELTA_BLOCKS = 128
# A look never waits for long, also not for a session that locks the delta.
PATIENCE = "SET LOCAL statement_timeout = 5000; SET LOCAL lock_timeout = 20"
CANCELLED = "57014"

SAMPLES = """
SELECT extract(epoch FROM s.at)::float8 AS at, s.rows, s.percent::float8, s.worked FROM roir.progress_sample s
 WHERE s.operation_id = %(operation)s ORDER BY s.percent DESC, s.rows DESC, s.worked DESC, s.at DESC LIMIT %(most)s
"""
EVENTS = """
SELECT e.at, left(e.actor, 501) AS actor, e.action, left(e.detail, 501) AS detail FROM roir.event e
 WHERE e.operation_id = %(operation)s ORDER BY e.id DESC LIMIT %(most)s
"""
STOPS = """
SELECT e.at, left(e.actor, 501) AS actor, e.action, left(coalesce(e.detail, ''), 501) AS detail, e.until,
       left(e.until_by, 501) AS until_by, e.continued
  FROM (SELECT x.*, n.at AS until, n.actor AS until_by, n.action IN ('resume', 'start') AS continued
          FROM roir.event x
          LEFT JOIN LATERAL (SELECT y.at, y.actor, y.action FROM roir.event y
                              WHERE y.operation_id = x.operation_id AND y.id > x.id
                                AND y.action IN ('resume', 'start', 'abort', 'aborted')
                              ORDER BY y.id LIMIT 1) n ON true
         WHERE x.operation_id = %(operation)s AND x.action IN ('pause', 'error', 'fail')
         ORDER BY x.id DESC LIMIT %(most)s) e ORDER BY e.at
"""
DELTA_SIZE = """
SELECT to_regclass(%(delta)s) IS NOT NULL AS exists, pg_relation_size(to_regclass(%(delta)s))::bigint AS bytes,
       current_setting('block_size')::int AS block_bytes
"""
DELTA = "SELECT state::text AS state, count(*) AS rows FROM {delta} {sample} GROUP BY state"


# The beginning of a requested pause's text. If a run pauses the operation itself, the text is the error alone.
HOW_FAR = re.compile(r"asked for at [0-9.]+ %: ")
# A run that was ended on purpose, by a mark or a signal: no error.
BY_USER = re.compile(r"interrupted$|its task .+ was (marked|cleared)|its run was deleted|its run .+, or was marked$")


def progress(
    database: Database, index: str | None = None, operation_id: int | None = None, next_task: NextTask | None = None
) -> OperationStatus:
    """The status of an index's latest operation, or of the operation with that id; with neither, of the newest of all.

    next_task: what Airflow knows of the task that will drive it.
    It has all details, but not those of a list of operations: warnings, long pauses, and the indexes that share its
    scan. One short transaction, which changes nothing. Raises NotFound, SchemaVersionMismatch.
    """
    with database.transaction() as connection:
        check_schema(connection)
        execute(connection, PATIENCE)
        if operation_id is None:
            operation_id = _newest(connection, index)
        found = rows(connection, [operation_id])
        if not found:
            raise operations.no_operation(connection, operation_id)
        swapped = standings(connection, [operation_id]) if found[0].kind == Kind.COMPACT else {}
        one = replace(found[0], compaction=swapped.get(operation_id))
        return look(connection, one if next_task is None else with_task(one, next_task))


def with_task(one: OperationStatus, task: NextTask) -> OperationStatus:
    """The operation with the task that will drive it, and the time that Airflow knows; as it is if a run drives it."""
    waits = not one.driven and one.status in (Status.RUNNING, Status.PAUSED)
    if not waits or (task.runs and one.heartbeat_age is not None):
        # A task whose process has died runs for a while, as Airflow sees it.
        return one
    return replace(one, next_task=task, expected_at=task.at)


def _newest(connection: Connection, index: str | None) -> int:
    if index is not None:
        return int(operations.live_or_last(connection, parse_name(index, "index")).id)
    newest = execute(connection, "SELECT max(id) FROM roir.operation").scalar_one()
    if newest is None:
        raise NotFound("there is no operation yet; roir build makes an index")
    return int(newest)


def look_in_passing(
    connection: Connection, ones: Sequence[OperationStatus], deltas: bool = False
) -> list[OperationStatus]:
    """The operations with the details of a list: phases, pieces, workers, the cause that holds each up.

    They take as many statements for many operations as for two, but for deltas: whether their rows are counted, too. An
    operation has no details if the server is too busy for them, or if a session locks a table that they need.
    """
    found: list[OperationStatus] = []
    for first in range(0, len(ones), AT_ONCE):
        found += _in_passing(connection, ones[first : first + AT_ONCE])
    if deltas:
        execute(connection, PATIENCE)
        found = [one if one.bars is None else replace(one, delta=_delta(connection, one)) for one in found]
    return found


def _in_passing(connection: Connection, ones: Sequence[OperationStatus]) -> list[OperationStatus]:
    try:
        with connection.begin_nested():
            execute(connection, PATIENCE)
            return side_by_side(connection, [partial(_at_work, one=one) for one in ones])
    except DBAPIError as error:
        if sqlstate(error) not in (CANCELLED, LOCK_TIMEOUT):
            raise
        if len(ones) == 1 or sqlstate(error) == CANCELLED:
            return list(ones)
    half = len(ones) // 2
    return _in_passing(connection, ones[:half]) + _in_passing(connection, ones[half:])


def look(connection: Connection, one: OperationStatus) -> OperationStatus:
    """The operation with its details; a paused one is `pausing` until its run and its workers have left."""
    pauses, errors = _stops(connection, one)
    return replace(
        _at_work(connection, one),
        delta=_delta(connection, one),
        governor=read_throttle(connection, one),
        samples=_samples(connection, one.operation_id),
        pauses=pauses,
        errors=errors,
        events=_events(connection, one.operation_id),
        queries=queries(connection, one.operation_id) if one.kind in BUILDS and one.status == Status.COMPLETED else (),
        shards=standing(connection, one.operation_id, one.generation_id, one.epoch),
    )


def _at_work(connection: Connection, one: OperationStatus) -> OperationStatus:
    """The operation with its phases, pieces and workers, and the cause that holds it up."""
    of, count = _pieces(one)
    values = {
        "operation": one.operation_id,
        "generation": one.generation_id,
        "verification": one.verification_id,
        "epoch": one.epoch,
        "estimate": one.rows_estimate,
    }
    found = bars(connection, of, count, values)
    work = at_work(connection, one, found)
    # A run that leaves clears its heartbeat; a run that was killed counts as present until its heartbeat is too old.
    leaves = one.status == Status.PAUSED and (one.is_fresh or work.sessions)
    return replace(
        one,
        status=PAUSING if leaves else one.status,
        phases=_phases(one),
        bars=found,
        workers=work.workers,
        held_up=held_up(connection, one, work),
    )


def _pieces(one: OperationStatus) -> tuple[str, int]:
    """The kind of pieces that the operation works on now, and their number."""
    phase = PHASES_OF[Kind(one.kind)][0] if one.phase == Phase.DONE else Phase(one.phase)
    of = PLACED[phase].pieces
    if phase == Phase.PUBLISH and one.verification_id is None:
        of = PLACED[Phase.SEAL].pieces
    return of, getattr(one, of)


def _phases(one: OperationStatus) -> tuple[PhaseOf, ...]:
    seconds = {name: float(value) for name, value in one.phase_seconds.items()}
    names = [phase.value for phase in PHASES_OF[Kind(one.kind)]]
    now = one.phase
    if one.kind in BUILDS:
        # `prepare` comes before the first phase; publish begins with `verify`.
        names = ["prepare", *names[:-1], "verify", names[-1]]
        in_publish = seconds.pop("publish", None)
        if not one.compares:
            names.remove("verify")
        elif in_publish is not None:
            seconds["verify"] = round(min(one.comparing or 0.0, in_publish), 3)
        if in_publish is not None:
            seconds["publish"] = round(in_publish - seconds.get("verify", 0.0), 3)
        if now == Phase.PUBLISH and one.compares and one.is_compared is not True:
            now = "verify"
    at = len(names) if now == Phase.DONE else names.index(now)
    states = ["done" if n < at else "now" if n == at else "ahead" for n in range(len(names))]
    return tuple(
        PhaseOf(_shown(name), state, None if state == "ahead" else seconds.get(name))
        for name, state in zip(names, states, strict=True)
    )


def _shown(name: str) -> str:
    return Phase(name).shown if name in PLACED else name


def _samples(connection: Connection, operation_id: int) -> tuple[tuple[float, int, float], ...]:
    found = execute(connection, SAMPLES, {"operation": operation_id, "most": MOST_SAMPLES}).all()
    samples: list[tuple[float, int, float]] = []
    # If the server's clock was set back, earlier samples are moved back, too: their order is that of the work done.
    back = 0.0
    for n, one in enumerate(found):
        if n and one.at - back > samples[-1][0]:
            back = one.at - samples[-1][0] + max(0.0, found[n - 1].worked - one.worked)
        samples.append((one.at - back, int(one.rows), one.percent))
    return tuple(reversed(samples))


def _events(connection: Connection, operation_id: int) -> tuple[Event, ...]:
    found = execute(connection, EVENTS, {"operation": operation_id, "most": MOST_EVENTS})
    return tuple(Event(e.at, cut(e.actor), e.action, None if e.detail is None else cut(e.detail)) for e in found)


def _stops(connection: Connection, of: OperationStatus) -> tuple[tuple[Pause, ...], tuple[Error, ...]]:
    """The pauses, and the errors. A run that meets an error pauses the operation, with the error as the reason."""
    found = execute(connection, STOPS, {"operation": of.operation_id, "most": MOST_SHOWN})
    pauses, errors = [], []
    for one in found:
        if one.action == "pause":
            pauses.append(Pause(one.at, cut(one.actor), cut(HOW_FAR.sub("", one.detail)), one.until))
        if one.action != "pause" or not (HOW_FAR.match(one.detail) or BY_USER.match(one.detail)):
            way = _remedy(of, one) if one.until is None else ""
            errors.append(
                Error(one.at, cut(one.detail), way, *((one.until, cut(one.until_by)) if one.continued else ()))
            )
    return tuple(pauses), tuple(errors)


def _remedy(of: OperationStatus, stop: Row[Any]) -> str:
    """The remedy for an error that nothing has followed; '' if the operation has ended otherwise, or if another error
    or a user's wish has paused it: that pause has a remedy of its own."""
    if stop.action == "fail":
        return remedy(stop.detail, of.index, failed=True) if of.status == Status.FAILED else ""
    if stop.action != "pause" or of.status not in (Status.PAUSED, ABANDONED):
        return ""
    found = remedy(stop.detail, of.index, failed=False)
    of_run = way_of(of.paused_by or "", of.owner) is Way.RUN and (of.next_task or of.expected_at)
    if of_run and found == remedies.OTHERWISE.format(index=argument(of.index)):
        way = way_on(of)
        return f"{way[0].upper()}{way[1:]}"
    return found


def _delta(connection: Connection, of: OperationStatus) -> Delta | None:
    """The rows of the delta by state; None if there is no delta, or if a session locks it."""
    if of.kind not in BUILDS or of.phase == Phase.DONE:
        return None
    name = physical.delta(of.generation_id)
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
