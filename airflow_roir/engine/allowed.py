"""Whether an operation may work now: its windows, and how long it may at a stretch. The server's clock counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Connection

from airflow_roir.definition import argument
from airflow_roir.engine import operations
from airflow_roir.engine.database import execute
from airflow_roir.engine.operations import OperationRow
from airflow_roir.errors import InvalidInput
from airflow_roir.operation import BY_MAX_DURATION, BY_WINDOW, Phase, Status
from airflow_roir.quantity import duration
from airflow_roir.windows import parse_windows

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


def look(connection: Connection, row: OperationRow, epoch: int, index: str) -> str | None:
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
