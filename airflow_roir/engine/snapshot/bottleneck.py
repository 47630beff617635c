"""The workers of an operation, the activity of each, and the cause that holds the operation up.

Any role can give its session a name like ours. So only sessions of our own role count, and of roles that have all
rights of the control schema's owner. Other sessions are read only for the locks that they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import execute
from airflow_roir.engine.locks.lock_waits import FRESH_S
from airflow_roir.engine.locks.locks import WAITING
from airflow_roir.engine.snapshot.bars import Bars
from airflow_roir.engine.snapshot.operation import ABANDONED, OperationStatus, cut
from airflow_roir.engine.snapshot.parts import HeldUp, Worker, Workers
from airflow_roir.engine.snapshot.words import paused_by, state_of
from airflow_roir.operation import Phase, Status

# A rate limit that is this many times the recent rate isn't the cause of slowness.
OUT_OF_REACH = 10

SESSIONS = r"""
SELECT s.worker, s.state, s.kind, s.event, s.pid,
       CASE WHEN s.kind = 'Lock' THEN (
            SELECT string_agg(CASE WHEN b.pid IS NULL THEN 'a prepared transaction'
                                   ELSE format('pid %%s (%%s)', b.pid, coalesce(nullif(concat_ws(' of ',
                                        nullif(b.application_name, ''), b.usename), ''), b.backend_type, 'unknown'))
                              END, '; ' ORDER BY b.pid)
              FROM (SELECT DISTINCT unnest(pg_blocking_pids(s.pid)) AS pid) p
              LEFT JOIN pg_stat_activity b ON b.pid = p.pid) END AS blocked_by,
       CASE WHEN s.kind = 'Lock' THEN (
            SELECT bool_or(b.application_name LIKE 'roir %%' AND NOT starts_with(b.application_name, %(prefix)s)
                           AND (b.usesysid = u.mine OR pg_has_role(b.usesysid, u.owner, 'MEMBER')))
              FROM unnest(pg_blocking_pids(s.pid)) AS p (pid) JOIN pg_stat_activity b ON b.pid = p.pid) END AS by_us
  FROM (SELECT n.nspowner AS owner, r.oid AS mine FROM pg_namespace n, pg_roles r
         WHERE n.nspname = 'roir' AND r.rolname = current_user) u
 CROSS JOIN LATERAL (
       SELECT DISTINCT ON (1) substring(a.application_name FROM ' worker (\d{1,5}) ')::int AS worker, a.state,
              a.wait_event_type AS kind, a.wait_event AS event, a.pid
         FROM pg_stat_activity a
        WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
          AND starts_with(a.application_name, %(prefix)s)
          AND (a.usesysid = u.mine OR pg_has_role(a.usesysid, u.owner, 'MEMBER'))
        -- A worker vacuums in a second session.
        ORDER BY 1, a.state = 'active' DESC, a.pid) s
 WHERE s.worker IS NOT NULL
"""
LOCK_WAITS = """
SELECT w.wanted, w.blocked_by FROM roir.lock_wait w
 WHERE w.index_name = %(index)s AND w.seen_at > clock_timestamp() - make_interval(secs => %(fresh)s)
 ORDER BY w.since LIMIT 1
"""
READS = ("DataFileRead", "DataFilePrefetch", "BufFileRead", "AioIoCompletion", "AioIoUringExecution")


@dataclass(frozen=True)
class AtWork:
    """The workers of an operation, and their sessions with what these wait for."""

    workers: Workers
    sessions: tuple[Row[Any], ...]


def at_work(connection: Connection, one: OperationStatus, bars: Bars) -> AtWork:
    """The workers of an operation, and their sessions. bars: the pieces that they hold."""
    held = bars.held
    prefix = f"roir {one.operation_id}.{one.epoch} worker "
    sessions = tuple(execute(connection, SESSIONS, {"prefix": prefix}))
    by_number = {session.worker: session for session in sessions}
    if not sessions and not one.is_fresh:
        # The claims of a run that is gone have no worker.
        held = {}
    workers = []
    for number in sorted(held.keys() | by_number.keys()):
        session = by_number.get(number)
        if sessions and session is None:
            continue
        holds = f"{bars.of[:-1]} {held[number]}" if number in held else None
        blocked_by = session and session.blocked_by and cut(session.blocked_by)
        workers.append(Worker(number, holds, _state(session, bars.of), blocked_by))
    return AtWork(Workers(one.options["parallelism"], len(workers), tuple(workers)), sessions)


def _state(session: Row[Any] | None, of: str) -> str:
    if session is None:
        # The worker holds a piece, but no session has its name.
        return "reading" if of == "units" else "writing"
    if session.kind == "Lock":
        return "lock"
    if session.state == "idle":
        return "idle"
    return "reading" if of == "units" or session.event in READS else "writing"


def held_up(connection: Connection, one: OperationStatus, work: AtWork) -> HeldUp:
    """The cause that holds an operation up; the most certain cause goes first."""
    if one.status == Status.PAUSED:
        return HeldUp("pause", cut(paused_by(one)))
    state = state_of(one)
    if one.status == ABANDONED:
        return HeldUp("no run", cut(f"no run drives it, and none will; {state.remedy}"))
    if one.status != Status.RUNNING:
        return HeldUp("nothing", "")
    if state.name == "queued":
        return HeldUp("another run", cut(one.notice or ""))
    if state.name == "undriven":
        # Without the seconds of its silence, since the page compares texts to see whether anything has changed.
        is_gone = one.next_task is None and (one.heartbeat_age is not None or one.last_try)
        by = "no run" if is_gone else "starting"
        if one.next_task is not None:
            return HeldUp(by, cut(state.text))
        first = state.note if one.expected_at is not None or one.last_try else "no run drives it"
        return HeldUp(by, cut(f"{first}; {state.remedy}"))
    return _by_lock(connection, one, work) or _by_throttle(one) or _by_work(one, work)


def _by_throttle(one: OperationStatus) -> HeldUp | None:
    return None if one.throttled is None else HeldUp("throttled", one.throttled)


def _by_lock(connection: Connection, one: OperationStatus, work: AtWork) -> HeldUp | None:
    for session in work.sessions:
        if session.kind == "Lock":
            by = "another run" if session.by_us else "lock"
            return HeldUp(
                by, cut(f"worker {session.worker} waits for a lock, blocked by {session.blocked_by or 'unknown'}")
            )
    if one.notice is not None and one.notice.startswith(WAITING):
        return HeldUp("lock", cut(one.notice))
    waits = execute(connection, LOCK_WAITS, {"index": one.index, "fresh": FRESH_S}).first()
    if waits is not None:
        return HeldUp("lock", cut(f"waits for a lock on {waits.wanted}, blocked by {waits.blocked_by}"))
    return None


def _is_near_its_limit(one: OperationStatus) -> bool:
    """False if there is no rate limit, or if it is far above the recent rate."""
    limit, now = one.options["max_rows_per_second"], one.rows_per_second_now
    return limit is not None and (now is None or now * OUT_OF_REACH >= limit)


def _by_work(one: OperationStatus, work: AtWork) -> HeldUp:
    if not one.has_begun:
        return HeldUp("starting", "Spark is starting: no worker has begun yet")
    states = [worker.state for worker in work.workers.list]
    idle = states.count("idle")
    if one.phase == Phase.BUILD and _is_near_its_limit(one) and (not states or 2 * idle >= len(states)):
        return HeldUp("rate limit", f"the limit of {one.options['max_rows_per_second']:,} rows/s")
    if any(session.event == "SyncRep" for session in work.sessions):
        return HeldUp("server", "waits for a synchronous standby")
    if not states:
        return HeldUp("nothing", "")
    by = "reading" if states.count("reading") > states.count("writing") else "writing"
    if by not in states:
        # All workers are between two statements.
        return HeldUp("nothing", "")
    return HeldUp(
        by, f"{states.count(by)} of {len(states)} workers are {by}" if len(states) > 1 else f"the worker is {by}"
    )
