"""Decides, for all of roir, whether an error of the database may pass, so that the caller should try again."""

from __future__ import annotations

import re
from enum import Enum

import psycopg2
from sqlalchemy.exc import ArgumentError, CompileError, DBAPIError, InvalidRequestError

from airflow_roir.errors import (
    HistoryChanged,
    IllegalTransition,
    InvalidInput,
    NotFound,
    OperationFailed,
    RowRefused,
    SchemaVersionMismatch,
    SourceChanged,
    VerificationFailed,
    WorkerFailed,
)


class Trouble(str, Enum):
    """Errors that may pass: the same transaction may succeed when it is tried again."""

    # The session, the server, or a race: a restart, a failover, a deadlock, a lock time-out, a serialization failure.
    LOST = "lost"
    # The server lacks disk, memory or connections, or has reached a limit of its settings.
    EXHAUSTED = "exhausted"
    # Another session, or a setting that isn't roir's, ended the statement.
    CANCELLED = "cancelled"


CANCELED = "57014"
# During a failover, the address may lead to a standby.
READ_ONLY = "25006"
# A lock time-out; a shutdown by an administrator, a crash, a start; a time-out that ends the session: idle, idle in a
# transaction, or of the transaction.
LOST = ("55P03", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", READ_ONLY)
# If no session can be opened, the error has no SQLSTATE, only text. If the server writes another language, it counts as
# an outage like any other, with a shorter patience.
NO_SESSION = re.compile(r"too many (clients|connections)|connection slots are reserved|out of memory|out of shared mem")
SHORT_OF = {
    "53100": "no room",
    "53200": "no memory",
    "53300": "no connection left",
    "53400": "a limit that is reached",
}
# The causes under which the time of such waits is counted.
LACKS = {"53100": "disk", "53200": "memory", "53300": "connections", "53400": "limit"}
# Errors of ours that the same work would meet again.
HOPELESS = (
    InvalidInput,
    NotFound,
    SchemaVersionMismatch,
    SourceChanged,
    RowRefused,
    OperationFailed,
    IllegalTransition,
    VerificationFailed,
)
# Classes of SQLSTATE: a value that can't be used; a feature that the server lacks; a schema, table, column, function or
# right that is missing.
HOPELESS_CLASSES = ("0A", "22", "3F", "42")
# The same from the driver and SQLAlchemy themselves, without an SQLSTATE.
MISUSED = (ArgumentError, CompileError, InvalidRequestError)
MISUSED_DRIVER = (psycopg2.ProgrammingError, psycopg2.DataError, psycopg2.NotSupportedError)


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a database error, '' if the connection failed before there was one."""
    return getattr(error.orig, "pgcode", None) or ""


def said(error: DBAPIError) -> str:
    """The server's error in one line: its message and, if there is one, its hint, which is the remedy."""
    diagnostics = getattr(error.orig, "diag", None)
    message = first_line(error)
    if re.fullmatch(r"\d+ errors:", message):
        # A list of roir.refuse.
        return str(getattr(diagnostics, "message_primary", None) or message)
    hint = getattr(diagnostics, "message_hint", None)
    if not hint:
        return message
    # PostgreSQL's hints are sentences; those of roir's SQL functions continue the message.
    return f"{message}; {hint}" if hint[0].islower() else f"{message}. {hint}"


def first_line(error: DBAPIError) -> str:
    """The server's message without its hint; says that the server is a standby, if that is the cause."""
    message = str(error.orig).strip().split("\n", 1)[0]
    return f"the server is a standby: {message}" if sqlstate(error) == READ_ONLY else message


def trouble_of(error: BaseException) -> Trouble | None:
    """The kind of trouble of an error; None if it won't pass."""
    if isinstance(error, HistoryChanged):
        return Trouble.LOST
    if not isinstance(error, DBAPIError):
        return None
    state = sqlstate(error)
    if state[:2] == "53" or (not state and _no_session(error)):
        return Trouble.EXHAUSTED
    if error.connection_invalidated or state[:2] in ("08", "40") or state in LOST:
        return Trouble.LOST
    if state == CANCELED:
        return Trouble.CANCELLED
    # Without an SQLSTATE, the server didn't answer at all.
    lost = state == "" and isinstance(error.orig, psycopg2.OperationalError | psycopg2.InterfaceError)
    return Trouble.LOST if lost else None


def cause_of(error: BaseException) -> str | None:
    """The cause under which the time of a wait is counted: what the server lacks, or `cancelled`; None for no wait."""
    trouble = trouble_of(error)
    if trouble is Trouble.EXHAUSTED and isinstance(error, DBAPIError):
        return LACKS.get(_lack(error), Trouble.EXHAUSTED.value)
    return Trouble.CANCELLED.value if trouble is Trouble.CANCELLED else None


def _lack(error: DBAPIError) -> str:
    """The SQLSTATE of a shortage. If no session can be opened, by the text."""
    return sqlstate(error) or ("53200" if "out of" in str(error.orig) else "53300")


def is_transient(error: DBAPIError) -> bool:
    """True if the same transaction may succeed when it is tried again, sooner or later."""
    return trouble_of(error) is not None


def is_out_of_reach(error: BaseException) -> bool:
    """True if the server can't be reached: it is down, starts or stops, or the network is."""
    if not isinstance(error, DBAPIError) or trouble_of(error) is not Trouble.LOST:
        return False
    state = sqlstate(error)
    return state == "" or state[:2] == "08" or state in ("57P01", "57P02", "57P03")


def is_permanent(error: BaseException) -> bool:
    """True if the same work would meet the error again, until a user has repaired its cause."""
    if isinstance(error, WorkerFailed):
        return error.permanent
    if isinstance(error, DBAPIError):
        if is_transient(error):
            return False
        state = sqlstate(error)
        return state[:2] in HOPELESS_CLASSES or (not state and isinstance(error.orig, MISUSED_DRIVER))
    if isinstance(error, psycopg2.Error):
        # A driver's own, as from a hook in a user's task.
        return is_permanent(DBAPIError(None, None, error))
    return isinstance(error, (*HOPELESS, *MISUSED))


def reason_of(error: BaseException) -> str:
    """The reason why work stops or waits, in one line; for a database error the server's message.

    Without the statement and its values, which no status may show.
    """
    if isinstance(error, BrokenPipeError):
        return "the reader of the command's output has gone (roir … | head, for example)"
    if not isinstance(error, DBAPIError):
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    match trouble_of(error):
        case Trouble.EXHAUSTED:
            return (
                f"the server has {SHORT_OF.get(_lack(error), 'no more')}: {said(error).rsplit('FATAL:', 1)[-1].strip()}"
            )
        case Trouble.CANCELLED:
            return f"somebody cancels statements of ours: {said(error)}"
    return first_line(error) or type(error).__name__


# SQL, true if `throttled` in an operation's row is the reason of a wait; any other text there is the governor's.
OURS = "throttled ~ '^throttled: (the server has|somebody cancels) '"


def _no_session(error: DBAPIError) -> bool:
    return isinstance(error.orig, psycopg2.OperationalError) and NO_SESSION.search(str(error.orig)) is not None
