"""Locks a user's table by its name, which another table may have got meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import execute, has_vanished, sqlstate
from airflow_roir.errors import LockNotAcquired

WHOSE = "SELECT to_regclass(%(name)s)::oid::bigint"
# The name belongs to no relation, its schema is gone, or it belongs to a relation that can't be locked.
NO_TABLE = ("42P01", "3F000", "42809")
# The name belongs to a table of another role, or its schema does.
DENIED = "42501"
NAMED = """
SELECT concat('"', replace(n.nspname, '"', '""'), '"."', replace(c.relname, '"', '""'), '"') = %(name)s
       OR c.oid::regclass::text = %(name)s
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %(oid)s
"""


def lock_table(connection: Connection, sql: str, oid: int, mode: str, only: bool = False) -> None:
    """Lock a table (oid) by its name, which it then keeps. Use it for all that is read or altered by name.

    The name may be stale, and after a wait the lock is on the relation that has the name by then. The schema can still
    be renamed: call `check_name` once more at the end. Raises LockNotAcquired if another relation, or none, has the
    name, or if the table was dropped before its name was read (`is_number`).
    """
    if is_number(sql):
        raise LockNotAcquired(f"the table of oid {oid} was dropped meanwhile. Try again")
    lock = f"LOCK TABLE {'ONLY ' if only else ''}{sql} IN {mode} MODE"
    try:
        found = execute(connection, f"{lock}; {WHOSE}", {"name": sql}).scalar()
    except DBAPIError as error:
        if sqlstate(error) not in NO_TABLE and not (sqlstate(error) == DENIED and is_renamed(connection, sql, oid)):
            raise
        raise _renamed(sql) from error
    if found != oid:
        raise _renamed(sql)


def is_number(name: str) -> bool:
    """True for a number, which `regclass` shows for a relation that is gone. A name of digits would have quotes."""
    return name.isdigit()


def check_name(connection: Connection, sql: str, oid: int) -> None:
    """Raise LockNotAcquired if the name no longer belongs to that table."""
    if execute(connection, WHOSE, {"name": sql}).scalar() != oid:
        raise _renamed(sql)


def is_renamed(connection: Connection, sql: str, oid: int) -> bool:
    """True if the table has another name by now. Asks in another session: an error has ended the transaction."""
    with connection.engine.connect() as other:
        return not execute(other, NAMED, {"name": sql, "oid": oid}).scalar()


def _renamed(sql: str) -> LockNotAcquired:
    return LockNotAcquired(f"table {sql} was renamed meanwhile. Try again")


@contextmanager
def telling_of_names() -> Iterator[None]:
    """Wraps statements that name a source's objects: raises LockNotAcquired if a name no longer exists."""
    try:
        yield
    except DBAPIError as error:
        if not has_vanished(error):
            raise
        said = str(error.orig).split("\n", 1)[0]
        raise LockNotAcquired(f"{said}: something was renamed meanwhile. Try again") from error
