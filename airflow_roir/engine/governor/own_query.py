"""Runs the user's own query in a separate session: its settings, locks and leftovers can't reach the governor's."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import psycopg2

from airflow_roir.engine.database import Database
from airflow_roir.engine.governor.in_time import InTime
from airflow_roir.engine.sessions.session import pin
from airflow_roir.one_line import one_line

TIMEOUT_MS = 3_000
# A query can lift its own statement_timeout.
PATIENCE_S = 6.0
MOST_SAID = 200
SETTINGS = f"""
SET statement_timeout = {TIMEOUT_MS}; SET lock_timeout = 500; SET default_transaction_read_only = on;
SET idle_in_transaction_session_timeout = {TIMEOUT_MS}
"""


class NoValue(Exception):
    """The reason why the query has no value."""


class OwnQuery:
    """Runs the query in a transaction that is rolled back, then resets the session."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._query = ""
        self._connection: Any = None
        self._in_time = InTime(self._answer, "roir-query")

    def ask(self, query: str) -> float:
        """The query's number. Raises NoValue."""
        if not self._in_time.is_owed:
            self._query = query
        try:
            return _number(self._in_time.ask(PATIENCE_S))
        except TimeoutError:
            self._cancel()
            raise NoValue("the query hasn't answered yet") from None
        except psycopg2.Error as error:
            raise NoValue(one_line(str(error).strip().split("\n", 1)[0] or type(error).__name__, MOST_SAID)) from None
        except NoValue:
            raise
        except Exception as error:  # any error of the driver with the query's result
            raise NoValue(one_line(f"{type(error).__name__}: {error}", MOST_SAID)) from None

    def close(self) -> None:
        """End the query's session."""
        if self._in_time.is_owed:
            self._cancel()
        else:
            self._drop()

    def _answer(self) -> Any:
        try:
            if self._connection is None:
                self._connection = self._database.engine.raw_connection()
            session = self._connection.driver_connection
            self._pin(session)
            with session.cursor() as cursor:
                cursor.execute(self._query)
                row = cursor.fetchone() if cursor.description else None
            # Advisory locks and temporary tables of a session outlive its transaction.
            session.rollback()
            session.autocommit = True
            with session.cursor() as cursor:
                cursor.execute("DISCARD ALL")
        except BaseException:
            self._drop()
            raise
        return None if row is None else row[0]

    def _pin(self, session: Any) -> None:
        pin(session)
        session.autocommit = True
        with session.cursor() as cursor:
            cursor.execute(SETTINGS)
        session.autocommit = False

    def _cancel(self) -> None:
        with suppress(Exception):
            self._connection.driver_connection.cancel()

    def _drop(self) -> None:
        held, self._connection = self._connection, None
        if held is not None:
            with suppress(Exception):
                held.driver_connection.rollback()
            with suppress(Exception):
                held.close()


def _number(value: Any) -> float:
    if value is None:
        raise NoValue("the query returned no value")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise NoValue(f"the query returned {one_line(repr(value), MOST_SAID)}, neither a number nor a truth value")
    return number
