"""The rows view of an index: whole rows of its table, read and written through the index.

Its SQL is in migrations/sql/rows_view.sql. It reads the index's view, so each publish, revert, attach, detach and
compaction goes on without touching it.
"""

from __future__ import annotations

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, quote
from airflow_roir.engine.database import execute, said, sqlstate
from airflow_roir.errors import InvalidInput

# The longest name of a relation, in bytes.
LONGEST = 63
# An error that the role or the user can settle, with its remedy.
REMEDIES = {
    "42P07": "Rename that relation, then try again",
    "42622": "Build the index under a shorter name",
    "55000": "Build the index first, or restore its view",
    "3F000": "Give the schema its name back, or create it",
    "42501": "Give the role that roir connects as this right",
    "42P16": "Rename the view's columns back, or drop the view: roir rows-view INDEX --drop",
    "42701": "Rename the view's columns back, or drop the view: roir rows-view INDEX --drop",
    "42703": "Rename the view's columns back, or drop the view: roir rows-view INDEX --drop",
}
STALE = """
SELECT i.rows_view IS DISTINCT FROM roir.rows_plan(i.id) AND roir.rows_view_of(i.id) IS NOT NULL
  FROM roir.index i WHERE i.id = %(index)s
"""


def name_of(index: QualifiedName) -> QualifiedName:
    """The name that an index's rows view is made with."""
    return QualifiedName(index.schema, f"{index.name}_rows")


def over_shards(index: QualifiedName) -> InvalidInput:
    """The error that refuses a rows view of an index over shards."""
    return InvalidInput(
        f"index {index} is over shards: a rows view reads tables of one server. Use airflow_roir.reading.ShardedIndex"
    )


def computed(index: QualifiedName) -> InvalidInput:
    """The error that refuses a rows view of an index that has expressions or a condition."""
    return InvalidInput(
        f"index {index} has an expression or a condition, so it has no rows view: a view of the whole table must find "
        "each row by columns. Read rows by roir.rows"
    )


def check_name(connection: Connection, index: QualifiedName) -> None:
    """Raise InvalidInput if a rows view of this index can't have its name: it is taken, or too long."""
    name = name_of(index)
    problem = None
    if len(name.name.encode()) > LONGEST:
        problem, remedy = f"the name {quote(name.name)} is too long for a view", REMEDIES["42622"]
    elif execute(connection, "SELECT to_regclass(%(name)s)", {"name": name.sql}).scalar() is not None:
        problem, remedy = f"relation {name} exists already, and isn't this index's rows view", REMEDIES["42P07"]
    if problem is not None:
        raise InvalidInput(f"index {index}: its rows view can't be made: {problem}; nothing was changed. {remedy}")


def make(connection: Connection, index: QualifiedName, index_id: int) -> None:
    """Make an index's rows view, or make it follow its table, in the caller's transaction.

    Locks an existing rows view in ACCESS EXCLUSIVE mode, the index's row in `roir.index` before it. Raises InvalidInput
    if the view can't be made: its name is taken or too long, or the index isn't published.
    """
    try:
        with connection.begin_nested():
            execute(connection, "SELECT roir.make_rows_view(%(index)s)", {"index": index_id})
    except DBAPIError as error:
        if (remedy := REMEDIES.get(sqlstate(error))) is None:
            raise
        raise InvalidInput(
            f"index {index}: its rows view can't be made: {said(error)}; nothing was changed. {remedy}"
        ) from error


def drop(connection: Connection, index_id: int) -> bool:
    """Drop an index's rows view, in the caller's transaction; False if it has none."""
    return bool(execute(connection, "SELECT roir.drop_rows_view(%(index)s)", {"index": index_id}).scalar_one())


def shown(connection: Connection, index_id: int) -> str | None:
    """The name of an index's rows view as SQL, which its owner may have renamed; None if it has none."""
    found: str | None = execute(
        connection, "SELECT roir.full_name(roir.rows_view_of(%(index)s))", {"index": index_id}
    ).scalar()
    return found


def is_stale(connection: Connection, index_id: int) -> bool:
    """True if an index's rows view doesn't have the columns, types and defaults that its table has now."""
    return bool(execute(connection, STALE, {"index": index_id}).scalar())
