"""Whether an operation may begin or continue to work: inside its window, within its time, while few others run.

Otherwise the operation is paused, or waits in the queue, and its run asks again. A run that looks for a place locks the
row of `roir.setting`, so that two runs can't both take the last place. The server's clock counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine.control import operations, sign_of_life
from airflow_roir.engine.control.operations import OperationRow
from airflow_roir.engine.control.sign_of_life import HEARTBEAT_FRESH_S
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import InvalidInput
from airflow_roir.operation import BY_MAX_DURATION, BY_WINDOW, LONG, QUEUED, Phase, Status
from airflow_roir.quantity import duration
from airflow_roir.windows import parse_windows

# A waiting run asks every half minute, and loses its place if it doesn't ask for this long: it may wait for Airflow's
# scheduler, or for the start of Spark.
WAITS_S = 120


@dataclass(frozen=True)
class Wait:
    """Why an operation doesn't begin. by: `window`, `max_duration` or `queue`. until: None if unknown.

    seconds: until then, by the server's clock.
    """

    by: str
    why: str
    until: datetime | None = None
    seconds: float | None = None

    @property
    def is_queued(self) -> bool:
        """True if it waits for other operations to end."""
        return self.by == "queue"

    @property
    def passes(self) -> bool:
        """True if the operation will continue without a resume."""
        return self.by in ("queue", BY_WINDOW)


@dataclass(frozen=True)
class Queued:
    """An operation that runs or waits. since: the beginning of that. place: in the queue, from 1; None if it runs."""

    operation_id: int
    index: str
    kind: str
    phase: str
    priority: int
    owner: str | None
    since: datetime | None
    seconds: float | None
    place: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**self.__dict__, "since": self.since and self.since.isoformat()}


@dataclass(frozen=True)
class Queue:
    """The operations that run or wait. most: None is no limit. waiting: in the order in which they will start."""

    most: int | None
    running: tuple[Queued, ...]
    waiting: tuple[Queued, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "max_running_operations": self.most,
            "running": [one.as_dict() for one in self.running],
            "waiting": [one.as_dict() for one in self.waiting],
        }


# The greatest priority first, then the longest wait.
ALL = """
SELECT * FROM (
  SELECT o.id AS operation_id, i.schema_name, i.name, o.kind, o.phase, o.priority, o.owner, o.queued_at,
         o.working_since,
         coalesce(o.status = 'running'
                  AND abs(extract(epoch FROM clock_timestamp() - o.heartbeat_at)) < %(fresh)s, false) AS runs,
         o.queued_at IS NOT NULL AND o.status IN ('running', 'paused')
         AND coalesce(abs(extract(epoch FROM clock_timestamp() - o.queued_seen_at)) < %(waits)s, false) AS waits,
         clock_timestamp() AS now
    FROM roir.operation o JOIN roir.index i ON i.id = o.index_id
   WHERE o.status IN ('running', 'paused')) x
 WHERE x.runs OR x.waits ORDER BY x.runs DESC, x.priority DESC, x.queued_at, x.operation_id
"""
PAUSE_BY = """
UPDATE roir.operation
   SET paused_by = %(by)s, pause_reason = %(reason)s, queued_at = NULL, queued_seen_at = NULL,
       notice = CASE WHEN queued_at IS NULL THEN notice END
 WHERE id = %(operation)s AND status = 'paused'
"""
ASK_FOR_PLACE = """
UPDATE roir.operation
   SET queued_at = coalesce(queued_at, clock_timestamp()), queued_seen_at = clock_timestamp()
 WHERE id = %(operation)s
"""
SHOW_PLACE = "UPDATE roir.operation SET notice = %(place)s WHERE id = %(operation)s"


def read_queue(connection: Connection) -> Queue:
    """The operations that run, and those that wait."""
    most = execute(connection, "SELECT max_running_operations FROM roir.setting").scalar_one()
    running: list[Queued] = []
    waiting: list[Queued] = []
    for row in execute(connection, ALL, {"fresh": HEARTBEAT_FRESH_S, "waits": WAITS_S}):
        since = row.working_since if row.runs else row.queued_at
        seconds = None if since is None else max(0.0, (row.now - since).total_seconds())
        to = running if row.runs else waiting
        place = None if row.runs else len(waiting) + 1
        name = str(operations.index_name(row))
        to.append(Queued(row.operation_id, name, row.kind, row.phase, row.priority, row.owner, since, seconds, place))
    return Queue(most, tuple(running), tuple(waiting))


def queue(database: Database) -> Queue:
    """As `read_queue`, in a transaction of its own."""
    with database.transaction() as connection:
        check_schema(connection)
        return read_queue(connection)


def set_most(database: Database, most: int) -> Queue:
    """Sets how many operations of the database may run at the same time; 0 is no limit. Doesn't stop running ones."""
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 10_000:
        raise InvalidInput(f"max_running_operations is {most!r}; it must be from 1 to 10,000, or 0 for no limit")
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        execute(connection, "UPDATE roir.setting SET max_running_operations = %(most)s", {"most": most or None})
        return read_queue(connection)


def ask(database: Database, operation_id: int) -> Wait | None:
    """Asks whether an operation may begin, for a caller that would start a run of it now, and lift its pause.

    None: it may, and for two minutes the operations behind it in the queue let it go first.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        return ask_for(connection, operation_id)


def ask_for(connection: Connection, operation_id: int) -> Wait | None:
    """As `ask`, in the caller's transaction. None for an operation that has ended."""
    row = operations.lock_operation(connection, operation_id)
    return admit(connection, row) if row.status in (Status.RUNNING, Status.PAUSED) else None


def admit(connection: Connection, row: OperationRow) -> Wait | None:
    """Decides whether an operation may begin, in the transaction that has locked its row; writes a refusal into it.

    The caller is about to lift its pause, if it has one. An operation that runs already needs no place in the queue.
    """
    now = execute(connection, "SELECT clock_timestamp()").scalar_one()
    refusal = outside_of_window(row, now, name_of(connection, row))
    if refusal is None and not begins_anew(row) and not is_last(connection, row):
        refusal = past_duration(row, now)
    if refusal is not None:
        _pause(connection, row, refusal)
        seconds = None if refusal.until is None else max(0.0, (refusal.until - now).total_seconds())
        return Wait(refusal.by, f"paused by {refusal.by}: {refusal.reason}", refusal.until, seconds)
    if row.phase not in LONG or sign_of_life.heart_beats(row, connection):
        return None
    return _find_place(connection, row)


def begins_anew(row: OperationRow) -> bool:
    """True if its time begins to count again: in its first run, after the queue, or after a pause without a failure."""
    is_resumed = row.status == Status.PAUSED and row.paused_by != row.owner
    return bool(row.epoch == 0 or row.queued_at is not None or is_resumed)


def _pause(connection: Connection, row: OperationRow, refusal: Refusal) -> None:
    if row.status == Status.RUNNING:
        operations.pause_operation(connection, row, refusal.by, refusal.reason)
        return
    if (row.paused_by, row.pause_reason) == (refusal.by, refusal.reason):
        return
    if row.paused_by != refusal.by:
        operations.record_event(connection, row.index_id, row.id, refusal.by, "pause", refusal.reason)
    execute(connection, PAUSE_BY, {"operation": row.id, "by": refusal.by, "reason": refusal.reason})


def _find_place(connection: Connection, row: OperationRow) -> Wait | None:
    most = execute(connection, "SELECT max_running_operations FROM roir.setting").scalar_one()
    if most is None:
        return None
    # From here on one run after the other. The next statements see all that the run before has committed.
    most = execute(connection, "SELECT max_running_operations FROM roir.setting FOR UPDATE").scalar_one()
    execute(connection, ASK_FOR_PLACE, {"operation": row.id})
    found = read_queue(connection)
    place = next((one.place for one in found.waiting if one.operation_id == row.id), None) or 1
    if most is None or len(found.running) + place <= most:
        return None
    why = f"{QUEUED}place {place} of {len(found.waiting)}; {_names(found.running)} of at most {most} at the same time"
    if row.notice != why:
        execute(connection, SHOW_PLACE, {"operation": row.id, "place": why})
    return Wait("queue", why)


def _names(running: Sequence[Queued]) -> str:
    if not running:
        return "others start before it"
    named = ", ".join(one.index for one in running[:3]) + (", …" if len(running) > 3 else "")
    return f"{len(running)} running ({named})"


# True if only the last step is left: to point the view to the generation, under short locks, within lock_patience_s.
COMPARED = """
SELECT %(verify)s NOT IN ('after', 'both') OR EXISTS (
  SELECT FROM roir.verification v
   WHERE v.operation_id = %(operation)s AND v.finished_at IS NOT NULL
     AND v.missing + v.extra + v.different + v.corrupt + v.damaged + v.duplicate = 0)
"""
NAME = "SELECT i.schema_name, i.name FROM roir.index i WHERE i.id = %(index)s"


@dataclass(frozen=True)
class Refusal:
    """Why an operation may not work. by: the option that pauses it. until: when it may again; None: a user must act."""

    by: str
    reason: str
    until: datetime | None = None


def outside_of_window(row: OperationRow, now: datetime, index: str) -> Refusal | None:
    """A refusal if none of the operation's windows is open, or if they can't be read."""
    try:
        windows = parse_windows(row.windows)
    except InvalidInput as error:
        # SQL can write any text here. No work is better than work at noon.
        return Refusal(BY_WINDOW, f"its windows can't be read: {error}. Change them: roir change {index} --windows …")
    if windows.is_open(now):
        return None
    opens = windows.opens_at(now)
    return Refusal(BY_WINDOW, f"outside of its window; opens at {windows.shown(opens)}", opens)


def past_duration(row: OperationRow, now: datetime) -> Refusal | None:
    """A refusal if the operation has worked for its `max_duration` since it began or was resumed."""
    if row.max_duration_s is None or row.working_since is None:
        return None
    if now < row.working_since + timedelta(seconds=row.max_duration_s):
        return None
    return Refusal(BY_MAX_DURATION, f"it has worked for {duration(row.max_duration_s)}, as long as it may at a stretch")


def name_of(connection: Connection, row: OperationRow) -> str:
    """The operation's index as an argument of a command."""
    return argument(str(operations.index_name(execute(connection, NAME, {"index": row.index_id}).one())))


def is_last(connection: Connection, row: OperationRow) -> bool:
    """True if only the last step of the publish is left, which isn't interrupted."""
    if row.phase != Phase.PUBLISH:
        return False
    values = {"verify": row.options.get("verify", "after"), "operation": row.id}
    return bool(execute(connection, COMPARED, values).scalar_one())


def pause_when_over(connection: Connection, row: OperationRow, epoch: int, index: str) -> str | None:
    """Pauses a run's operation if it may not work any more, in the caller's transaction; returns the reason, or None.

    row: the operation's, just read. epoch: the run's; index: as the run names it. Costs nothing if the operation has
    neither windows nor `max_duration`. Raises Fenced, and IllegalTransition if the operation was paused meanwhile.
    """
    if row.status != Status.RUNNING or row.epoch != epoch or (row.windows is None and row.max_duration_s is None):
        return None
    now = execute(connection, "SELECT clock_timestamp()").scalar_one()
    refusal = past_duration(row, now) or outside_of_window(row, now, argument(index))
    if refusal is None or is_last(connection, row):
        return None
    operations.pause_operation(connection, row, refusal.by, refusal.reason, epoch)
    return refusal.reason
