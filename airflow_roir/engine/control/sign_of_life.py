"""The signs of a run at work: its heartbeat, the clock of its phases, and the sessions that it waits for."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.definition import argument
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.locks.locks import WAITING
from airflow_roir.errors import OperationRunning
from airflow_roir.operation import Status
from airflow_roir.quantity import duration

# A run writes its heartbeat every few seconds; after this long without one it counts as dead.
HEARTBEAT_FRESH_S = 30
# The most that one tick adds to the clock, also in SQL: the moment of a kill is not known.
LONGEST_TICK_S = 10
NOTE_WAIT = "UPDATE roir.operation SET notice = %(line)s WHERE id = %(operation)s AND epoch = %(epoch)s"
END_OF_WAIT = """
UPDATE roir.operation SET notice = NULL
 WHERE id = %(operation)s AND epoch = %(epoch)s AND starts_with(notice, %(waiting)s)
"""


def tick(connection: Connection, operation_id: int, epoch: int) -> bool:
    """Adds the time since the last tick to the phase, and writes the run's heartbeat. False if the run is over.

    A longer gap (a run that was killed, a machine that slept) counts as `LONGEST_TICK_S`.
    """
    values = {"operation": operation_id, "epoch": epoch}
    return bool(execute(connection, "SELECT roir.tick(%(operation)s, %(epoch)s)", values).scalar_one())


def start_clock(connection: Connection, operation_id: int, epoch: int) -> None:
    """Begins to count a run's time, unless that has begun. Before, while Spark starts, a run only has heartbeats."""
    execute(
        connection,
        "UPDATE roir.operation SET ticked_at = clock_timestamp(), heartbeat_at = clock_timestamp() "
        "WHERE id = %(operation)s AND epoch = %(epoch)s AND status = 'running' AND ticked_at IS NULL",
        {"operation": operation_id, "epoch": epoch},
    )


def heart_beats(row: Row[Any], connection: Connection) -> bool:
    """True if the run that drives the operation has a recent heartbeat, by the server's clock."""
    if row.heartbeat_at is None or row.status != Status.RUNNING:
        return False
    # A heartbeat from the future doesn't count: the server's clock was set back. A run that lives soon writes another.
    return abs(_age(row, connection)) < HEARTBEAT_FRESH_S


def _age(row: Row[Any], connection: Connection) -> float:
    """The seconds since the last heartbeat, by the server's clock."""
    query = "SELECT extract(epoch FROM clock_timestamp() - %(beat)s)"
    return float(execute(connection, query, {"beat": row.heartbeat_at}).scalar_one())


def note_wait(connection: Connection, operation_id: int, epoch: int, line: str | None) -> None:
    """Shows in the status which sessions a run waits for. line: None ends the wait. Ignores another run's operation."""
    values = {"operation": operation_id, "epoch": epoch, "line": line, "waiting": WAITING}
    execute(connection, END_OF_WAIT if line is None else NOTE_WAIT, values)


def running_elsewhere(row: Row[Any], index: str, connection: Connection) -> OperationRunning:
    """The error that names the run which drives the operation, its last sign of life, and when it counts as dead."""
    age = max(0.0, _age(row, connection))
    return OperationRunning(
        f"index {index}: operation {row.id} is being driven by {row.owner}, whose last sign of life is "
        f"{duration(age)} old; wait for it, pause it (roir pause {argument(index)}), or take over (--take-over). If "
        f"that run is dead, no --take-over is needed in {duration(max(0.0, HEARTBEAT_FRESH_S - age))}",
        by=f"operation {row.id} is being driven by {row.owner}",
    )


def refuse_running(database: Database, row: Row[Any], index: str) -> None:
    """Raises OperationRunning if a run drives the operation."""
    with database.transaction() as connection:
        if heart_beats(row, connection):
            raise running_elsewhere(row, index, connection)
