"""Pins the settings of every session of roir, and an encoding that loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from psycopg2.extensions import encodings
from sqlalchemy import Connection, ExceptionContext

from airflow_roir.errors import InvalidInput

# Defaults of the role or the database must not change roir's work: the text of a value must mean the same value
# whenever and wherever it is read back; no name may be found through a schema that another role can write to; and only
# roir ends its statements. Settings that aren't named here change no outcome; `tests/engine/test_settings.py` checks
# that for each. A setting that the server doesn't know is left out.
SESSION_SETTINGS = {
    # The text of values, and the values of text.
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "xmlbinary": "base64",
    "lc_monetary": "C",
    "array_nulls": "on",
    # The meaning of SQL.
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    "check_function_bodies": "on",
    # The ends of statements and sessions.
    # A worker that hangs between two statements must not hold a snapshot for longer than this (I7).
    "idle_in_transaction_session_timeout": "60s",
    "idle_session_timeout": "0",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "0",
    "exit_on_error": "off",
    # Row-level security must raise rather than hide rows from a build.
    "row_security": "off",
    "restrict_nonsystem_relation_kind": "",
    # Fold and scan go by the blocks and row versions of a heap.
    "default_table_access_method": "heap",
    # The planner's estimates for a batch's queries of the catalogs are wild: compiling took 250 ms each, running 1 ms.
    "jit": "off",
    # Fails with "geqo failed to make a valid plan" if a role's settings use it for few tables with small pools.
    "geqo": "off",
    # At `debug5` the server sends hundreds of lines for each statement, which roir doesn't read.
    "client_min_messages": "warning",
}

# Sent alone, since it needs no snapshot: if transactions are serializable, read only and deferrable by default, the
# first snapshot waits for the end of every serializable writer.
FIRST = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE"
PIN = (
    "SELECT pg_catalog.set_config(s.name, s.value, false) "
    "FROM ROWS FROM (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) AS s (name, value) "
    # Also pins settings that already have the value: a server that reloads its configuration changes all others.
    "WHERE pg_catalog.current_setting(s.name, true) IS NOT NULL"
)
PIN_BY_SERVER = (
    # So the server notices that a worker was killed, even during a long index build, and frees its locks for the next.
    "SELECT pg_catalog.set_config('client_connection_check_interval', '5s', false) "
    # A server on Windows refuses this setting.
    "WHERE pg_catalog.version() !~* 'windows|mingw|visual c' "
    "UNION ALL "
    # Triggers and guards must fire for roir, too. A role that a superuser has set to `replica` may be unable to change
    # that.
    "SELECT pg_catalog.set_config('session_replication_role', 'origin', false) "
    "WHERE pg_catalog.has_parameter_privilege('session_replication_role', 'SET') "
    "UNION ALL "
    # Reported commits (a publish, a pause) must survive a crash. Any level but `off` is the user's choice.
    "SELECT pg_catalog.set_config('synchronous_commit', 'local', false) "
    "WHERE pg_catalog.current_setting('synchronous_commit') = 'off' "
    "UNION ALL "
    # The role's choice stays, unless it is the database's default: that can't be given to a partitioned table.
    "SELECT pg_catalog.set_config('default_tablespace', '', false) "
    "FROM pg_catalog.pg_database d JOIN pg_catalog.pg_tablespace t ON t.oid = d.dattablespace "
    "WHERE d.datname = current_database() AND t.spcname = pg_catalog.current_setting('default_tablespace')"
)
# Characters in roir's own texts, with substitutes for databases whose encoding lacks them.
PLAIN = str.maketrans({"…": "...", "→": "->", "–": "-", "’": "'"})


def pin(connection: Any) -> None:
    """Pin the settings of a psycopg2 session that has just begun. Raises InvalidInput if that is impossible.

    Each statement is its own transaction: its settings hold from the next one on, even if that fails.
    """
    connection.autocommit = True
    if connection.get_parameter_status("standard_conforming_strings") == "off":
        raise InvalidInput(
            "standard_conforming_strings is off, and a pooler or proxy before the database keeps it off: ALTER "
            "ROLE … SET standard_conforming_strings = on for the role that roir connects as"
        )
    with connection.cursor() as cursor:
        cursor.execute(FIRST)
        _pin_encoding(connection)
        cursor.execute(PIN, (list(SESSION_SETTINGS), list(SESSION_SETTINGS.values())))
        cursor.execute(PIN_BY_SERVER)
    connection.autocommit = False


def _pin_encoding(connection: Any) -> None:
    """Makes text arrive as Unicode. An SQL_ASCII database has only bytes: each byte is one character, in and out."""
    server = connection.get_parameter_status("server_encoding")
    connection.set_client_encoding("LATIN1" if server == "SQL_ASCII" else "UTF8")


def keep_to_encoding(
    connection: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
) -> tuple[str, Any]:
    """Replaces characters that the database's encoding lacks, in roir's own texts and in reasons that users give.

    Values of rows contain none, since they come from the same database.
    """
    session: Any = connection.connection.dbapi_connection
    server = session.get_parameter_status("server_encoding")
    if server == "UTF8":
        return statement, parameters
    codec = encodings.get(re.sub(r"\W|_", "", server).upper(), "ascii") if server != "SQL_ASCII" else "latin-1"

    def kept(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value.encode(codec)
            except UnicodeEncodeError:
                return value.translate(PLAIN).encode(codec, "backslashreplace").decode(codec)
        elif isinstance(value, Mapping):
            return {name: kept(one) for name, one in value.items()}
        elif isinstance(value, list | tuple):
            return type(value)(kept(one) for one in value)
        return value

    return kept(statement), kept(parameters)


def refuse_no_text(context: ExceptionContext) -> InvalidInput | None:
    """InvalidInput for a text that no database can hold: with a NUL, or with half of a UTF-16 pair.

    A form or a template may give such a text.
    """
    error = context.original_exception
    if isinstance(error, UnicodeEncodeError) or (isinstance(error, ValueError) and "NUL (0x00)" in str(error)):
        return InvalidInput(
            "a text that was given has a NUL or half a sign in it, which no database holds: leave it out"
        )
    return None


def to_json(value: Any) -> str:
    """JSON for a `jsonb`, without escapes for characters, which an SQL_ASCII server refuses."""
    return json.dumps(value, ensure_ascii=False)
