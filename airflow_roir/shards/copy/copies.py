"""Copies rows from one server to another by COPY, in text, which every type reads back as it was written.

The sessions of both sides have the same pinned settings (`session.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from threading import Thread
from typing import IO, Any

import psycopg2
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import bound
from airflow_roir.errors import WorkerFailed

# The bytes under way at once: a pipe's default, and the writer's buffer, since COPY sends a row at a time.
READ_BYTES = 64 << 10
WRITE_BYTES = 256 << 10


class ReadFailed(Exception):
    """An error of the side that is read. error: SQLAlchemy's."""

    def __init__(self, error: DBAPIError) -> None:
        super().__init__(str(error.orig))
        self.error = error


def copy_out(connection: Connection, query: str, into: IO[bytes], values: Mapping[str, Any] | None = None) -> int:
    """Writes a query's rows to a file; returns their number."""
    return _copy(connection, f"COPY ({bound(connection, query, values)}) TO STDOUT", into)


def copy_in(connection: Connection, table: str, rows: IO[bytes], where: str = "true") -> int:
    """Reads rows from a file into a table, with its columns; returns the number of rows that meet the condition."""
    return _copy(connection, f"COPY {table} FROM STDIN WHERE {where}", rows)


def stream(
    source: Connection,
    query: str,
    values: Mapping[str, Any] | None,
    target: Connection,
    table: str,
    where: str = "true",
) -> int:
    """Copies a query's rows into a table of another server, in the open transactions of both; returns their number.

    where: the condition that each row must meet. Memory holds no more than a pipe. Raises ReadFailed, WorkerFailed
    (some rows don't meet the condition), or DBAPIError of the target; the caller rolls both back. If the copy broke
    off, the source's session is closed.
    """
    out, into = os.pipe()
    failed: list[BaseException] = []
    read: list[int] = []

    def write() -> None:
        try:
            with os.fdopen(into, "wb", buffering=WRITE_BYTES) as file:
                read.append(copy_out(source, query, file, values))
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=write, name="copy", daemon=True)
    with os.fdopen(out, "rb", buffering=0) as file:
        thread.start()
        try:
            written = copy_in(target, table, file, where)
        except BaseException as error:
            file.close()
            thread.join()
            # Otherwise the rest of the answer, which is of no use, would have to be read first.
            source.invalidate()
            # The target fails, too, since its input ends within a row.
            if failed and isinstance(failed[0], DBAPIError):
                raise ReadFailed(failed[0]) from error
            raise
        thread.join()
    if failed:
        source.invalidate()
        if isinstance(failed[0], DBAPIError):
            raise ReadFailed(failed[0])
        raise failed[0]
    if read != [written]:
        raise WorkerFailed(f"a shard returned {read[0]} rows, but {read[0] - written} of them belong to another shard")
    return written


def _copy(connection: Connection, statement: str, file: IO[bytes]) -> int:
    raw: Any = connection.connection
    with raw.cursor() as cursor:
        try:
            cursor.copy_expert(statement, file, READ_BYTES)
        except psycopg2.Error as error:
            lost = bool(raw.closed)
            raise DBAPIError(statement.split("(", 1)[0], None, error, connection_invalidated=lost) from error
        return int(cursor.rowcount)
