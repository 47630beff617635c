"""Finds the partitions that have rows, by their primary keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute
from airflow_roir.engine.locks.table_lock import lock_table
from airflow_roir.engine.sessions.limits import limits_of
from airflow_roir.engine.source import owner
from airflow_roir.engine.source.source import Source
from airflow_roir.errors import RoirError

# A primary key, by its texts.
Key = tuple[str | None, ...]
# The rows that one query asks for.
AT_ONCE = 500


def partitions_of(connection: Connection, source: Source, keys: Collection[Key]) -> dict[Key, str]:
    """The partitions of the rows that are there, by primary key. Locks the source in ACCESS SHARE mode.

    Sets lock_timeout and search_path of the transaction.
    """
    path = ", ".join(["pg_catalog", *map(quote, source.operator_schemas), "pg_temp"])
    wait = limits_of(connection).table_lock_ms
    execute(connection, f"SET LOCAL lock_timeout = {wait}; SET LOCAL search_path = {path}")
    lock_table(connection, source.sql, source.oid, "ACCESS SHARE")
    found: dict[Key, str] = {}
    left = iter(keys)
    while some := list(islice(left, AT_ONCE)):
        found |= _some(connection, source, some)
    return found


def look(connection: Connection, source: Source, keys: Collection[Key]) -> dict[Key, str]:
    """As `partitions_of`, but leaves no lock or setting. Returns nothing if the table can't be read."""
    savepoint = connection.begin_nested()
    try:
        return partitions_of(connection, source, keys)
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        return {}
    except RoirError:
        return {}
    finally:
        if not connection.invalidated:
            savepoint.rollback()


def _some(connection: Connection, source: Source, keys: Sequence[Key]) -> dict[Key, str]:
    names = source.primary_key
    shown = ", ".join(source.columns[name].text("s") for name in names)
    compared = " AND ".join(f"s.{quote(name)} = v.k{i}" for i, name in enumerate(names))
    given = ", ".join(f"k{i}" for i in range(len(names)))
    values: dict[str, Any] = {}
    listed = []
    for n, key in enumerate(keys):
        values |= {f"v{n}_{i}": value for i, value in enumerate(key)}
        listed.append(f"({', '.join(f'%(v{n}_{i})s::{type_}' for i, type_ in enumerate(source.comparands))})")
    # A subquery for each row reads only the row's partition; one condition for all rows would read all partitions.
    query = (
        f"SELECT s.* FROM (VALUES {', '.join(listed)}) v ({given}), LATERAL "
        f"(SELECT s.tableoid::regclass::text, {shown} FROM {source.sql} s WHERE {compared} OFFSET 0) s"
    )
    columns = ", ".join(["part text", *(f"k{i} text" for i in range(len(names)))])
    return {tuple(row)[1:]: row[0] for row in owner.rows(connection, source, query, columns, values)}
