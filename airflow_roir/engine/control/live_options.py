"""The live options of an operation, which can change while it lives: how the engine stores, changes and refuses them.

Users change them by `requests.change_options` and `requests.resume`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import parse_name
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute, said, sqlstate, to_json
from airflow_roir.engine.schema.schema import check_schema
from airflow_roir.errors import InvalidInput
from airflow_roir.option import Kind, Option
from airflow_roir.options import LIVE, WorkOptions, check_live_options
from airflow_roir.signals import throttle_text, with_nearest_signals
from airflow_roir.windows import parse_windows

SHOW_REFUSAL = "UPDATE roir.operation SET notice = %(refusal)s WHERE id = %(operation)s"


def adopt_options(connection: Connection, row: operations.OperationRow, actor: str, options: WorkOptions) -> None:
    """Gives an unfinished operation the live options of the caller that adopts it, in the caller's transaction.

    None keeps the operation's own value. Raises InvalidInput for a new value that can't be used.
    """
    given = options.live()
    changes = {name: value for name, value in given.items() if value is not None and value != getattr(row, name)}
    check_live_options(changes)
    with refused():
        call = "SELECT roir.change_options(%(operation)s, %(wishes)s::jsonb, %(actor)s)"
        execute(connection, call, {"operation": row.id, "wishes": to_json(changes), "actor": actor})


@contextmanager
def refused() -> Iterator[None]:
    """Around a statement that reads an option: turns the server's refusal into InvalidInput, with its hint."""
    try:
        yield
    except DBAPIError as error:
        # 22P05: a character 0 in JSON.
        if sqlstate(error) not in ("22023", "22P05"):
            raise
        raise InvalidInput(with_nearest_signals(said(error))) from None


def check_throttle(database: Database, throttle: Any) -> None:
    """Raises InvalidInput for limits that the server can't read: for a command that starts Spark before it begins."""
    if throttle is None:
        return
    with database.transaction() as connection:
        check_schema(connection)
        _throttle_of(connection, throttle)


def _throttle_of(connection: Connection, throttle: str | None) -> Any:
    with refused():
        return execute(connection, "SELECT roir.throttle_of(%(throttle)s)", {"throttle": throttle}).scalar()


def columns(connection: Connection, options: WorkOptions) -> dict[str, Any]:
    """The columns of a new operation's row for its live options. Raises InvalidInput."""
    given = options.live()
    return {name: _column(connection, option, given[name]) for name, option in LIVE.items() if name in given}


def _column(connection: Connection, option: Option, value: Any) -> Any:
    if option.kind is Kind.LIMITS:
        return to_json(_throttle_of(connection, value))
    if option.kind is Kind.WINDOWS:
        return parse_windows(value).text or None
    if value is None:
        value = option.begins
    return value or None if option.zero else value


def told(
    before: operations.OperationRow,
    after: operations.OperationRow,
    called: Callable[[Option], str] = lambda option: option.name,
) -> str:
    """The changed options in words. before, after: two rows of the same operation. called: an option's name."""
    changes = [
        f"{called(option)} {_shown(option, getattr(before, name))} -> {_shown(option, getattr(after, name))}"
        for name, option in LIVE.items()
        if getattr(before, name) != getattr(after, name)
    ]
    return f"changed: {', '.join(changes)}" if changes else "nothing changes: these values are in effect already"


def _shown(option: Option, value: Any) -> str:
    if option.kind is Kind.LIMITS:
        value = throttle_text(value) or None
    return str(option.none if value is None else value)


def refuse_option(database: Database, index: str, actor: str, refusal: str) -> None:
    """Shows a refused option in the status, and records it as an event. Raises NotFound."""
    with database.transaction() as connection:
        check_schema(connection, writes=True)
        row = operations.live_or_last(connection, parse_name(index, "index"))
        execute(connection, SHOW_REFUSAL, {"operation": row.id, "refusal": refusal})
        operations.record_event(connection, row.index_id, row.id, actor, "refuse", refusal)
