"""Lets the server plan a query of the caller, with the caller's rights and settings, in a transaction that can't write.

The text is always a bound value. The server takes it as the one query of a cursor, so that a second statement is
refused before the first one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, said, sqlstate
from airflow_roir.engine.sessions.session import SESSION_SETTINGS
from airflow_roir.errors import InvalidInput

LONGEST_MS = 5_000
# Settings that a query of the caller's own application has by default. The others end statements and sessions, or say
# how this session quotes.
OF_THE_CALLER = (
    "TimeZone", "DateStyle", "IntervalStyle", "extra_float_digits", "bytea_output", "xmloption", "xmlbinary",
    "lc_monetary", "array_nulls", "search_path", "transform_null_equals", "row_security", "jit", "geqo",
)  # fmt: skip
GIVE = "SELECT pg_catalog.set_config('roir.statement', %(text)s, true)"
OPEN = """
DO $roir$ DECLARE c pg_catalog.refcursor := 'roir_query';
BEGIN OPEN c FOR EXECUTE pg_catalog.current_setting('roir.statement'); END $roir$
"""
FETCH = "FETCH ALL FROM roir_query"
CLOSE = "CLOSE roir_query"
# By the server's error: no SELECT, no such table, no right to read it. Other errors say what is wrong.
REMEDIES = {
    "42601": "Give one SELECT",
    "42P11": "Give one SELECT",
    "0A000": "Give one SELECT",
    "42P01": "Name a table that exists, with its schema",
    "42501": "Ask as a role that may run the query",
    "57014": "Give a query that is planned faster",
}
NO_PARAMETER, MULTIPLE, TIMED_OUT = "42P02", "42P11", "57014"
GENERIC_SINCE = 160_000

Plan = dict[str, Any]


@contextmanager
def as_caller(database: Database, before: Callable[[Connection], None] | None = None) -> Iterator[Connection]:
    """A transaction with the caller's own settings, which can't write. Always rolled back.

    before: what is made in it first, while it can.
    """
    with database.connect() as connection:
        transaction = connection.begin()
        try:
            execute(connection, f"SET LOCAL statement_timeout = {LONGEST_MS}")
            for name in OF_THE_CALLER:
                assert name in SESSION_SETTINGS
                execute(connection, f"SET LOCAL {name} TO DEFAULT")
            if before is not None:
                before(connection)
            execute(connection, "SET TRANSACTION READ ONLY")
            yield connection
        finally:
            if not connection.invalidated:
                transaction.rollback()


def explain(connection: Connection, query: str) -> Plan:
    """The plan, with `Planning Time` in milliseconds. With parameters, the plan for any values.

    Raises InvalidInput if the server can't explain a query with parameters, or if it is no SELECT.
    """
    version = int(execute(connection, "SELECT pg_catalog.current_setting('server_version_num')").scalar_one())
    options = "VERBOSE, SUMMARY, FORMAT JSON"
    savepoint = connection.begin_nested()
    try:
        plan = explained(connection, f"EXPLAIN ({options}) {query}")
        savepoint.commit()
        return plan
    except DBAPIError as error:
        if sqlstate(error) != NO_PARAMETER:
            raise
        savepoint.rollback()
        if version < GENERIC_SINCE:
            raise InvalidInput(
                "the query has parameters, which EXPLAIN plans since PostgreSQL 16: write values instead of $1"
            ) from error
    return explained(connection, f"EXPLAIN ({options}, GENERIC_PLAN) {query}")


def explained(connection: Connection, statement: str) -> Plan:
    """The plan of an EXPLAIN, with its times in the root."""
    # Each time: a function in the query may have ended the limit for those after it.
    execute(connection, f"SET LOCAL statement_timeout = {LONGEST_MS}")
    execute(connection, GIVE, {"text": statement})
    execute(connection, OPEN)
    rows = execute(connection, FETCH).all()
    execute(connection, CLOSE)
    if len(rows) != 1 or len(rows[0][0]) != 1 or not isinstance(rows[0][0][0], Mapping):
        raise InvalidInput("the query can't be asked about: it isn't a SELECT. Give one SELECT")
    told = dict(rows[0][0][0])
    return {**told.pop("Plan"), **told}


def milliseconds(plan: Plan) -> float:
    """The time of planning and, if it ran, of execution."""
    return float(plan.get("Planning Time", 0)) + float(plan.get("Execution Time", 0))


def nodes(plan: Plan) -> Iterator[Plan]:
    """All nodes of a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@contextmanager
def refusing() -> Iterator[None]:
    """Says the server's error about a query as one about the input."""
    try:
        yield
    except DBAPIError as error:
        if error.connection_invalidated or sqlstate(error) is None:
            raise
        remedy = REMEDIES.get(sqlstate(error))
        raise InvalidInput(
            f"the query can't be asked about: {problem(error)}" + (f". {remedy}" if remedy else "")
        ) from error


def problem(error: DBAPIError) -> str:
    """The server's error about a query."""
    if sqlstate(error) == MULTIPLE:
        return "it isn't one query"
    if sqlstate(error) == TIMED_OUT:
        return f"the server takes longer than {LONGEST_MS // 1000} s"
    return said(error).removesuffix(".")
