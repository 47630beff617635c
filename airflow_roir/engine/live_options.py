"""The options of an operation that can change while it lives."""

from __future__ import annotations

from sqlalchemy import Connection, update

from airflow_roir.definition import BuildOptions, parse_name
from airflow_roir.engine import operations, tables
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema import check_schema
from airflow_roir.errors import IllegalTransition
from airflow_roir.operation import Status


def set_options(
    database: Database,
    index: str,
    actor: str,
    parallelism: int | None = None,
    batch_rows: int | None = None,
) -> operations.OperationRow:
    """Change a live operation's parallelism or batch rows; workers follow at their next batch boundary.

    Raises InvalidInput for a bad value (the old one stays), NotFound, IllegalTransition (nothing is live).
    """
    with database.transaction() as connection:
        check_schema(connection)
        row = operations.live_or_last(connection, parse_name(index, "index"))
        if row.status not in (Status.RUNNING, Status.PAUSED):
            raise IllegalTransition(f"index {index} has no operation to change: its last one is {row.status}")
        change_options(connection, row, actor, parallelism, batch_rows)
        return operations.read_operation(connection, row.id)


def change_options(
    connection: Connection,
    row: operations.OperationRow,
    actor: str,
    parallelism: int | None,
    batch_rows: int | None,
) -> None:
    """As `set_options`, inside a transaction. Writes an event for each value that really changes."""
    wanted = {"parallelism": parallelism, "batch_rows": batch_rows}
    changes = {name: value for name, value in wanted.items() if value is not None and value != getattr(row, name)}
    if not changes:
        return
    BuildOptions(**changes)  # type: ignore[arg-type]  # validates; raises before anything is written
    values = {**wanted, "operation": row.id, "actor": actor}
    call = "SELECT roir.change_options(%(operation)s, %(parallelism)s::int, %(batch_rows)s::int, %(actor)s)"
    execute(connection, call, values)


def refuse_option(database: Database, index: str, actor: str, refusal: str) -> None:
    """Show in the status, and keep as an event, that an option was refused. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        row = operations.live_or_last(connection, parse_name(index, "index"))
        connection.execute(update(tables.operation).where(tables.operation.c.id == row.id).values(notice=refusal))
        operations.record_event(connection, row.index_id, row.id, actor, "refuse", refusal)
