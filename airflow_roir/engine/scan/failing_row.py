"""Finds the row of a batch for which an expression of the index, or its condition, can't be computed.

The server's error names a value, not its row. The rows of the batch are halved, by their primary keys, until one is
left; each half is computed in a savepoint, as the role that the copy reads as.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import QualifiedName, Scan, argument, quote
from airflow_roir.engine.capture.row_function import NOT_OF_ROWS
from airflow_roir.engine.control.job import Job
from airflow_roir.engine.database import execute
from airflow_roir.engine.retry.trouble import first_line, is_transient, sqlstate
from airflow_roir.engine.scan.reader import Stretch, has_entry, selected
from airflow_roir.engine.source import owner
from airflow_roir.errors import RowRefused
from airflow_roir.one_line import one_line
from airflow_roir.scan_range import Key, ScanRange

# The most characters of a key in the message.
MOST_SAID = 200


def refusal(connection: Connection, job: Job, relation: str, stretch: Stretch, error: DBAPIError) -> RowRefused | None:
    """The error of a batch that names the row, if one row alone brings it; None if no row does, or not any more.

    relation: the quoted name of the table that was read. It is locked, and the settings of the batch are in effect.
    Raises DBAPIError if the session, the server or a lock fails meanwhile.
    """
    computes = job.entry.condition is not None or any(column.call for column in job.entry.columns)
    if job.scan is Scan.INDEX or not computes or sqlstate(error)[:2] in NOT_OF_ROWS:
        return None
    if stretch.settings:
        execute(connection, stretch.settings)
    keys = _keys(connection, job, relation, stretch)
    first, end = 0, len(keys)
    while end - first > 1:
        middle = (first + end) // 2
        if _error(connection, job, relation, stretch, keys[first:middle]) is None:
            first = middle
        else:
            end = middle
    found = _error(connection, job, relation, stretch, keys[first:end])
    if found is None:
        return None
    names = ", ".join(str(QualifiedName(None, name)) for name in job.source.primary_key)
    row = f"({names}) = ({one_line(', '.join(keys[first]), MOST_SAID)})"
    return RowRefused(
        f"index {job.run.index}: row {row}: {first_line(found)}. The index can't have this row. Change or delete "
        f"it, then resume: roir resume {argument(job.run.index)}"
    )


def _keys(connection: Connection, job: Job, relation: str, stretch: Stretch) -> list[Key]:
    source = job.source
    texts = ", ".join(source.columns[name].text("s") for name in source.primary_key)
    order = ", ".join(f"s.{quote(name)}" for name in source.primary_key)
    named = ", ".join(f"k{i} text" for i in range(len(source.primary_key)))
    query = f"SELECT {texts} FROM ONLY {relation} s WHERE {stretch.where} ORDER BY {order}"
    return [list(row) for row in owner.rows(connection, source, query, named, stretch.values, [relation])]


def _error(connection: Connection, job: Job, relation: str, stretch: Stretch, keys: list[Key]) -> DBAPIError | None:
    """The error of these neighbours, if their entries can't be computed."""
    if not keys:
        return None
    values: dict[str, Any] = {}
    where = ScanRange(keys[0], None).condition(job.source.primary_key, job.source.comparands, keys[-1], values)
    if job.scan.by_blocks:
        where = f"{stretch.where} AND {where}"
    # A function of the whole entry, so that the server computes all of it.
    query = (
        f"SELECT sum(pg_column_size(ROW({', '.join(selected(job))}))) "
        f"FROM (SELECT * FROM ONLY {relation} WHERE {where} OFFSET 0) s WHERE {has_entry(job)}"
    )
    savepoint = connection.begin_nested()
    try:
        owner.rows(connection, job.source, query, "size bigint", values, [relation]).all()
    except DBAPIError as error:
        if error.connection_invalidated or is_transient(error):
            raise
        savepoint.rollback()
        return error
    savepoint.rollback()
    return None
