"""Whether an operation still runs: what a run that drives it asks between two steps of work."""

from __future__ import annotations

from sqlalchemy import Connection

from airflow_roir.engine.operations import OperationRow
from airflow_roir.engine.run import Run, read_control
from airflow_roir.errors import OperationFailed, OperationPaused
from airflow_roir.operation import Status


def read_running(connection: Connection, run: Run) -> OperationRow:
    """The operation's row. Raises OperationPaused, OperationFailed (a worker of this run found why), Fenced."""
    row = read_control(connection, run)
    if row.status == Status.FAILED:
        raise OperationFailed(f"index {run.index}: {row.error}")
    if row.status != Status.RUNNING:
        raise OperationPaused(f"index {run.index}: operation {row.id} was paused: {row.pause_reason}")
    return row
