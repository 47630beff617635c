"""Sends secrets to a server by COPY, so that no statement's text contains them, and no log of statements."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import psycopg2
from psycopg2.extensions import encodings
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import quote
from airflow_roir.engine.database import execute, sqlstate
from airflow_roir.errors import RightMissing

# It has no constraint: the violation of one would write the row to the log.
TABLE = "CREATE TEMP TABLE IF NOT EXISTS roir_handed (name text, value text) ON COMMIT DROP"
COPY = "COPY pg_temp.roir_handed (name, value) FROM STDIN"
# No log shows a nested statement. If it fails it would be in the error's context, so the error is raised again without.
SEND = """
DO $roir$
DECLARE
    head text; options text;
BEGIN
    SELECT min(h.value) FILTER (WHERE h.name = ''),
           string_agg(format('%I %L', h.name, h.value), ', ' ORDER BY h.name) FILTER (WHERE h.name <> '')
      INTO head, options FROM pg_temp.roir_handed h;
    EXECUTE format('%s OPTIONS (%s)', head, options);
EXCEPTION WHEN OTHERS THEN
    RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = SQLERRM;
END $roir$
"""


def hand_over(connection: Connection, values: Mapping[str, str | None]) -> None:
    """Gives the transaction's next statements values to read, in place of those that they had. Raises RightMissing."""
    try:
        with connection.begin_nested():
            execute(connection, TABLE)
    except DBAPIError as error:
        if sqlstate(error) != "42501":
            raise
        row = execute(connection, "SELECT current_database()::text AS database, current_user::text AS role").one()
        raise RightMissing(
            f"roir hands the password to the server in a temporary table, which role {quote(row.role)} may not create. "
            f"The owner of the database can run: GRANT TEMPORARY ON DATABASE {quote(row.database)} TO {quote(row.role)}"
        ) from None
    execute(connection, "TRUNCATE pg_temp.roir_handed")
    raw: Any = connection.connection
    lines = "".join(f"{_escaped(name)}\t{_escaped(value)}\n" for name, value in values.items() if value is not None)
    with raw.cursor() as cursor:
        try:
            cursor.copy_expert(COPY, io.BytesIO(lines.encode(encodings[raw.encoding])))
        except psycopg2.Error as error:
            raise DBAPIError(COPY, None, error, connection_invalidated=bool(raw.closed)) from error


def handed(name: str) -> str:
    """A value that was handed over, as SQL. name: an identifier of ours."""
    return f"(SELECT h.value FROM pg_temp.roir_handed h WHERE h.name = '{name}')"


def send(connection: Connection, head: str, options: Mapping[str, str]) -> None:
    """Sends a statement that ends in OPTIONS whose values are secrets."""
    hand_over(connection, {"": head, **options})
    execute(connection, SEND)


def _escaped(text: str) -> str:
    for sign, instead in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(sign, instead)
    return text
