"""The options of an operation that can change while it lives, as the engine itself changes and refuses them.

Users change them by `operations.change_options` and `operations.resume`.
"""

from __future__ import annotations

from sqlalchemy import Connection, update

from airflow_roir.definition import LIVE_OPTIONS, check_live_options, parse_name
from airflow_roir.engine import operations, tables
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.schema import check_schema


def adopt_options(connection: Connection, row: operations.OperationRow, actor: str, **given: int | None) -> None:
    """Give an unfinished operation the options of whoever takes it up, in the caller's transaction.

    given: as in `operations.change_options`; None keeps the operation's own. Raises InvalidInput for a new value that
    can't be used.
    """
    changes = {name: value for name, value in given.items() if value is not None and value != getattr(row, name)}
    check_live_options(changes)
    values = {**dict.fromkeys(LIVE_OPTIONS), **changes, "operation": row.id, "actor": actor}
    call = (
        "SELECT roir.change_options(%(operation)s, %(parallelism)s, %(batch_rows)s, %(max_rows_per_second)s, %(actor)s)"
    )
    execute(connection, call, values)


def told(before: operations.OperationRow, after: operations.OperationRow) -> str:
    """What a change has changed, for people. before, after: the operation's row, one and the same operation's."""
    changes = [
        f"{name} {_shown(getattr(before, name))} -> {_shown(getattr(after, name))}"
        for name in LIVE_OPTIONS
        if getattr(before, name) != getattr(after, name)
    ]
    return f"changed: {', '.join(changes)}" if changes else "nothing changes: these values are in effect already"


def _shown(value: int | None) -> str:
    return "no limit" if value is None else str(value)


def refuse_option(database: Database, index: str, actor: str, refusal: str) -> None:
    """Show in the status, and keep as an event, that an option was refused. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection)
        row = operations.live_or_last(connection, parse_name(index, "index"))
        connection.execute(update(tables.operation).where(tables.operation.c.id == row.id).values(notice=refusal))
        operations.record_event(connection, row.index_id, row.id, actor, "refuse", refusal)
