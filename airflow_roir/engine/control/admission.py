"""Whether an operation may begin to work, and go on: inside its window, for as long as it may, while few others run.

Who may not is paused by that, or waits in the queue; whoever wants to drive it asks again. The row of `roir.setting` is
locked by those who look for a place, so that two can't both take the last one. The server's clock counts.
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

# A waiting run asks every half a minute, and loses its place after so long without a question: a task that waits for
# Airflow's scheduler isn't dead yet, and Spark takes its time to start.
WAITS_S = 120


@dataclass(frozen=True)
class Wait:
    """Why an operation doesn't begin. by: `window`, `max_duration` or `queue`. until: None if that is unknown.

    seconds: until then, by the server's clock.
    """

    by: str
    why: str
    until: datetime | None = None
    seconds: float | None = None

    @property
    def is_queued(self) -> bool:
        """Whether it waits for others to end."""
        return self.by == "queue"

    @property
    def passes(self) -> bool:
        """Whether it continues without a resume."""
        return self.by in ("queue", BY_WINDOW)


@dataclass(frozen=True)
class Queued:
    """One that runs or waits. since: it began to run, or to wait. place: in the queue, from 1; None if it runs."""

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
    """most: None is no limit. running; waiting: in the order in which they start."""

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


# The greatest priority first, then who has waited for longest.
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
    """Who runs and who waits."""
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
    """As `read_queue`."""
    with database.transaction() as connection:
        check_schema(connection)
        return read_queue(connection)


def set_most(database: Database, most: int) -> Queue:
    """How many operations of the database may run at the same time; 0 is no limit. Who runs already isn't stopped."""
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= 10_000:
        raise InvalidInput(f"max_running_operations is {most!r}; it must be from 1 to 10,000, or 0 for no limit")
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        execute(connection, "UPDATE roir.setting SET max_running_operations = %(most)s", {"most": most or None})
        return read_queue(connection)


def ask(database: Database, operation_id: int) -> Wait | None:
    """Whether an operation may begin, for whoever would start a run of it, and lift its pause, now.

    None: it may, and whoever comes after it in the queue lets it go first for two minutes.
    """
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        return ask_for(connection, operation_id)


def ask_for(connection: Connection, operation_id: int) -> Wait | None:
    """As `ask`, in the caller's transaction. One that has ended needn't wait."""
    row = operations.lock_operation(connection, operation_id)
    return admit(connection, row) if row.status in (Status.RUNNING, Status.PAUSED) else None


def admit(connection: Connection, row: OperationRow) -> Wait | None:
    """Whether an operation may begin, in the transaction that has locked its row; why not is written into it.

    A pause that it has is about to be lifted. Of an operation that runs already only windows and time count.
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
    """Whether its time begins to count: its first run, out of the queue, or out of a pause that isn't a failure's."""
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
    # From here on one after another. In a statement of its own: the next one sees what the one before committed.
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


# The last of an operation: the view is about to show the generation, under short locks and within lock_patience_s.
COMPARED = """
SELECT %(verify)s NOT IN ('after', 'both') OR EXISTS (
  SELECT FROM roir.verification v
   WHERE v.operation_id = %(operation)s AND v.finished_at IS NOT NULL
     AND v.missing + v.extra + v.different + v.corrupt + v.damaged + v.duplicate = 0)
"""
NAME = "SELECT i.schema_name, i.name FROM roir.index i WHERE i.id = %(index)s"


@dataclass(frozen=True)
class Refusal:
    """Why an operation may not work. by: who pauses it. until: when it may again; None if that needs a user."""

    by: str
    reason: str
    until: datetime | None = None


def outside_of_window(row: OperationRow, now: datetime, index: str) -> Refusal | None:
    """A refusal where none of the operation's windows is open, or where they can't be read."""
    try:
        windows = parse_windows(row.windows)
    except InvalidInput as error:
        # By SQL anything can be written. Rather nothing is done than something at noon.
        return Refusal(BY_WINDOW, f"its windows can't be read: {error}. Change them: roir change {index} --windows …")
    if windows.is_open(now):
        return None
    opens = windows.opens_at(now)
    return Refusal(BY_WINDOW, f"outside of its window; opens at {windows.shown(opens)}", opens)


def past_duration(row: OperationRow, now: datetime) -> Refusal | None:
    """A refusal where it has worked since it began, or was resumed, for as long as it may."""
    if row.max_duration_s is None or row.working_since is None:
        return None
    if now < row.working_since + timedelta(seconds=row.max_duration_s):
        return None
    return Refusal(BY_MAX_DURATION, f"it has worked for {duration(row.max_duration_s)}, as long as it may at a stretch")


def name_of(connection: Connection, row: OperationRow) -> str:
    """The operation's index as an argument of a command."""
    return argument(str(operations.index_name(execute(connection, NAME, {"index": row.index_id}).one())))


def is_last(connection: Connection, row: OperationRow) -> bool:
    """True if only the publish is left, which isn't cut."""
    if row.phase != Phase.PUBLISH:
        return False
    values = {"verify": row.options.get("verify", "after"), "operation": row.id}
    return bool(execute(connection, COMPARED, values).scalar_one())


def pause_when_over(connection: Connection, row: OperationRow, epoch: int, index: str) -> str | None:
    """Pause a run's operation where it may not work any more, in the caller's transaction; the reason, or None.

    row: the operation's, just read. epoch: the run's; index: as the run names it. Costs nothing where no option asks
    for it. Raises Fenced, and IllegalTransition where somebody has paused it meanwhile.
    """
    if row.status != Status.RUNNING or row.epoch != epoch or (row.windows is None and row.max_duration_s is None):
        return None
    now = execute(connection, "SELECT clock_timestamp()").scalar_one()
    refusal = past_duration(row, now) or outside_of_window(row, now, argument(index))
    if refusal is None or is_last(connection, row):
        return None
    operations.pause_operation(connection, row, refusal.by, refusal.reason, epoch)
    return refusal.reason
