"""What every session of ours begins with: pinned settings, and an encoding that loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from psycopg2.extensions import encodings
from sqlalchemy import Connection, ExceptionContext

from airflow_roir.errors import InvalidInput

# Defaults of the role or the database must not reach into our work: text output of a value must mean the same value
# whenever and wherever it is read back, no name may be found through a schema that somebody else can
# write to, and nothing may end a statement but us. What isn't named here changes no outcome, which
# `tests/engine/test_settings.py` holds setting by setting. A setting that the server doesn't know is left out.
SESSION_SETTINGS = {
    # What values look like as text, and what text means as a value.
    "TimeZone": "UTC",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmloption": "content",
    "xmlbinary": "base64",
    "lc_monetary": "C",
    "array_nulls": "on",
    # What SQL means.
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    "quote_all_identifiers": "off",
    "transform_null_equals": "off",
    "check_function_bodies": "on",
    # What ends a statement or a session.
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
    # A batch looks at the catalogs by queries whose estimates are wild: compiling them took 250 ms each, running 1 ms.
    "jit": "off",
    # "geqo failed to make a valid plan", where a role lets it begin with few tables and small pools.
    "geqo": "off",
    # At `debug5` each statement brings hundreds of lines over the network, which nobody reads.
    "client_min_messages": "warning",
}

# Sent alone, since it needs no snapshot: where a transaction is serializable, read only and deferrable by default, the
# very first snapshot waits for the end of every serializable writer.
FIRST = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE, NOT DEFERRABLE"
PIN = (
    "SELECT pg_catalog.set_config(s.name, s.value, false) "
    "FROM ROWS FROM (pg_catalog.unnest(%s::text[]), pg_catalog.unnest(%s::text[])) AS s (name, value) "
    # One that is as we want it too: a server that reads its configuration anew changes what no session has set.
    "WHERE pg_catalog.current_setting(s.name, true) IS NOT NULL"
)
PIN_BY_SERVER = (
    # The server gives up what a killed worker has begun, a long index build too, and frees its locks for the next.
    "SELECT pg_catalog.set_config('client_connection_check_interval', '5s', false) "
    # Refused by a server that runs on Windows.
    "WHERE pg_catalog.version() !~* 'windows|mingw|visual c' "
    "UNION ALL "
    # Triggers and guards fire for us too. Who was made a replica by a superuser may be unable to change that.
    "SELECT pg_catalog.set_config('session_replication_role', 'origin', false) "
    "WHERE pg_catalog.has_parameter_privilege('session_replication_role', 'SET') "
    "UNION ALL "
    # What was told as done (a publish, a pause) must not be gone after a crash. What else it is, is the user's choice.
    "SELECT pg_catalog.set_config('synchronous_commit', 'local', false) "
    "WHERE pg_catalog.current_setting('synchronous_commit') = 'off' "
    "UNION ALL "
    # The role's own choice, unless it names what is the default anyway: a partitioned table may not be told that.
    "SELECT pg_catalog.set_config('default_tablespace', '', false) "
    "FROM pg_catalog.pg_database d JOIN pg_catalog.pg_tablespace t ON t.oid = d.dattablespace "
    "WHERE d.datname = current_database() AND t.spcname = pg_catalog.current_setting('default_tablespace')"
)
# Signs of our own texts, for databases whose encoding has none of them.
PLAIN = str.maketrans({"…": "...", "→": "->", "–": "-", "’": "'"})


def pin(connection: Any) -> None:
    """Pin the settings of a psycopg2 session that has just begun. Raises InvalidInput if that can't be.

    Each statement is its own transaction: it counts from the next one on, whatever becomes of that.
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
    """Text reaches us as Unicode. An SQL_ASCII database has bytes only: each one is a character then, and stays it."""
    server = connection.get_parameter_status("server_encoding")
    connection.set_client_encoding("LATIN1" if server == "SQL_ASCII" else "UTF8")


def keep_to_encoding(
    connection: Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
) -> tuple[str, Any]:
    """What a database's encoding can't hold is written in signs that it can: our own texts, and reasons of users.

    No value of a row is among that, since it came from there.
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
    """What a form or a template gives may be no text for any database: a NUL, or half of a sign in UTF-16."""
    error = context.original_exception
    if isinstance(error, UnicodeEncodeError) or (isinstance(error, ValueError) and "NUL (0x00)" in str(error)):
        return InvalidInput(
            "a text that was given has a NUL or half a sign in it, which no database holds: leave it out"
        )
    return None


def to_json(value: Any) -> str:
    """JSON for a `jsonb`, without escapes: a server translates those into Unicode's encodings alone."""
    return json.dumps(value, ensure_ascii=False)
