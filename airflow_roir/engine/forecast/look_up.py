"""The cost of one look-up by the table, by the planned index's view, and by `roir.rows`, timed on this server."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import Database, execute, said
from airflow_roir.engine.forecast.query import LONGEST_MS, TIMES, Asked
from airflow_roir.engine.scan.findings import DryRun
from airflow_roir.quantity import counted

# Planning a query of an index's view takes so much more than one of the table by its primary key (two cores).
# A prepared statement saves it.
VIEW_MS = 0.4


@dataclass(frozen=True)
class LookUp:
    """What one look-up costs. way: `table`, `view` or `roir.rows`; ms: None if unknown; how: where the figure is from.

    measured: the query itself ran; otherwise the figure is an estimate, from other statements on this server.
    """

    way: str
    ms: float | None
    measured: bool
    how: str

    def __str__(self) -> str:
        time = "not known" if self.ms is None else f"{self.ms:,.2f} ms"
        return f"{self.way}: {time}{'' if self.measured or self.ms is None else ' (estimate)'}, {self.how}"


def look_ups(database: Database, dry: DryRun, asked: Asked, serves: bool, covers: bool) -> Iterator[LookUp]:
    """Times each way, read only, as the caller. The planned index doesn't exist: the primary key stands for it."""
    problem = asked.run_problem
    if asked.run_ms is None:
        yield LookUp("table", None, True, problem or "the query wasn't run")
    else:
        yield LookUp(
            "table", asked.run_ms, True, f"the query itself, with planning; {counted(asked.run_rows or 0, 'row')}"
        )
    if not serves:
        return
    rows = max(1, asked.rows if asked.run_rows is None else asked.run_rows)
    try:
        by_key, one_row = _of_a_row(database, dry)
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        by_key = one_row = None
        yield LookUp("view", None, False, f"nothing could be timed: {said(error)}")
    if by_key is not None:
        if covers:
            how = f"by the primary key one row takes {by_key:,.2f} ms; planning the view's query is the rest"
            yield LookUp("view", by_key + VIEW_MS, False, how)
        if one_row is not None:
            yield LookUp(
                "roir.rows",
                by_key + one_row + (rows - 1) * by_key,
                False,
                f"{counted(rows, 'row')}: a row by roir.rows takes {one_row:,.2f} ms, each more {by_key:,.2f} ms",
            )


def _of_a_row(database: Database, dry: DryRun) -> tuple[float | None, float | None]:
    """The milliseconds to read a row by its primary key, and by roir.rows; None if the table has no row to try."""
    source = dry.source
    columns = [source.columns[name] for name in source.primary_key]
    read = ", ".join(f"{column.text('s')} AS c{n}" for n, column in enumerate(columns))
    with database.connect() as connection:
        transaction = connection.begin()
        try:
            execute(connection, "SET TRANSACTION READ ONLY")
            execute(connection, f"SET LOCAL statement_timeout = {LONGEST_MS}")
            row = execute(connection, f"SELECT {read} FROM {source.sql} s LIMIT 1").first()
            if row is None:
                return None, None
            values = {f"c{n}": value for n, value in enumerate(row)}
            where = " AND ".join(
                f"s.{quote(column.name)} = CAST(%(c{n})s AS {column.comparand})" for n, column in enumerate(columns)
            )
            named = ", ".join(f"s.{quote(column.name)}" for column in columns)
            by_key = _timed(connection, f"SELECT {named} FROM {source.sql} s WHERE {where}", values)
            entries = f"ARRAY(SELECT s FROM {source.sql} s WHERE {where})"
            whole = f"SELECT * FROM roir.rows(NULL::{source.sql}, {entries})"
            return by_key, max(0.0, _timed(connection, whole, values) - by_key)
        finally:
            if not connection.invalidated:
                transaction.rollback()


def _timed(connection: Connection, statement: str, values: Mapping[str, Any]) -> float:
    """The milliseconds of one of our own statements, with planning: the median of some."""
    explain = f"EXPLAIN (ANALYZE, TIMING OFF, SUMMARY, FORMAT JSON) {statement}"
    taken = []
    for _ in range(TIMES):
        [told] = execute(connection, explain, values).scalar_one()
        taken.append(float(told["Planning Time"]) + float(told["Execution Time"]))
    return statistics.median(taken)
