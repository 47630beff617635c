"""Reports what a run waits for after a shortage or a cancelled statement: in the operation's row, events and log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import Run, read_running
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.patience import Patience, Saying
from airflow_roir.engine.retry.trouble import OURS, Trouble

T = TypeVar("T")

ROW = f"""
SELECT index_id, throttled, coalesce({OURS}, false) AS ours FROM roir.operation
 WHERE id = %(operation)s AND epoch = %(epoch)s AND status = 'running' FOR UPDATE
"""
BEGIN = """
UPDATE roir.operation
   SET throttled = %(reason)s, throttled_since = coalesce(throttled_since, clock_timestamp())
 WHERE id = %(operation)s
"""
END = f"""
UPDATE roir.operation SET throttled = NULL, throttled_since = NULL
 WHERE id = %(operation)s AND epoch = %(epoch)s AND {OURS}
"""
LOST = """
INSERT INTO roir.throttle_time AS t (operation_id, cause, seconds) VALUES (%(operation)s, %(cause)s, %(seconds)s)
ON CONFLICT (operation_id, cause) DO UPDATE SET seconds = t.seconds + excluded.seconds, last_at = clock_timestamp()
"""


class Shortage(Saying):
    """The reports of one worker of a run. They never stop the work: a report that can't be written is left out.

    report: called with each new reason, and when the trouble has passed.
    """

    def __init__(self, database: Database, run: Run, report: Callable[[str], None] = lambda line: None) -> None:
        super().__init__(report)
        self._database = database
        self._run = run

    def begin(self, trouble: Trouble, reason: str) -> None:
        """Writes the reason into the operation's row, and an event for the first one."""
        super().begin(trouble, reason)
        with suppress(DBAPIError), self._database.transaction() as connection:
            row = execute(connection, ROW, self._values).first()
            if row is None or row.throttled == f"throttled: {reason}":
                return
            execute(connection, BEGIN, {**self._values, "reason": f"throttled: {reason}"})
            if not row.ours:
                # An event may need a new page, for which the disk has no room.
                with suppress(DBAPIError), connection.begin_nested():
                    self._record(connection, row.index_id, trouble.value, reason)

    def look(self) -> None:
        """Raises OperationPaused, OperationFailed or Fenced if the run is over, and so the wait."""
        with suppress(DBAPIError), self._database.transaction() as connection:
            read_running(connection, self._run)

    def end(self, cause: str, seconds: float) -> None:
        """Removes the reason, and counts the lost time."""
        with suppress(DBAPIError), self._database.transaction() as connection:
            execute(connection, END, self._values)
            execute(connection, LOST, {**self._values, "cause": cause, "seconds": round(seconds, 3)})
        super().end(cause, seconds)

    def _record(self, connection: Connection, index_id: int, action: str, detail: str) -> None:
        operations.record_event(connection, index_id, self._run.operation_id, self._run.owner, action, detail)

    @property
    def _values(self) -> dict[str, object]:
        return {"operation": self._run.operation_id, "epoch": self._run.epoch}


def patience_of(
    database: Database,
    run: Run,
    wait: Callable[[float], object] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Patience:
    """The patience of one worker of a run, which reports its waits in the operation."""
    return Patience(database.limits, wait, Shortage(database, run, report))


def persist(
    database: Database, run: Run, work: Callable[[], T], report: Callable[[str], None] = lambda line: None
) -> T:
    """Calls `work` as `Database.retry` does, and reports waits in the run's operation."""
    return database.retry(work, patience_of(database, run, report=report))
