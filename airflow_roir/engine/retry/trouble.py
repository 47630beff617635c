"""What an error of the database means for who works: whether it may pass by itself. The one place that decides that."""

from __future__ import annotations

import re
from enum import Enum

import psycopg2
from sqlalchemy.exc import DBAPIError

from airflow_roir.errors import HistoryChanged


class Trouble(str, Enum):
    """What may pass by itself, so that the same transaction may succeed when it is simply tried again."""

    # The session, the server, or a race: a restart, a failover, a deadlock, a lock time-out, a serialization failure.
    LOST = "lost"
    # The server has no more of something: disk, memory, connections, or what a setting of its own allows.
    EXHAUSTED = "exhausted"
    # Somebody else, or a setting that isn't ours, ended the statement.
    CANCELLED = "cancelled"


CANCELED = "57014"
# An address that leads to a standby for as long as a failover takes.
READ_ONLY = "25006"
# Lock time-out; told to end by an administrator, a crash, a start; a time-out that ends the session: idle, in a
# transaction, or of the transaction.
LOST = ("55P03", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", READ_ONLY)
# A session that isn't opened brings no SQLSTATE, only text. Where the server speaks another language such a session is
# an outage like any other, and is waited for less long.
NO_SESSION = re.compile(r"too many (clients|connections)|connection slots are reserved|out of memory|out of shared mem")
SHORT_OF = {
    "53100": "no room",
    "53200": "no memory",
    "53300": "no connection left",
    "53400": "a limit that is reached",
}


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a database error, '' if the connection failed before there was one."""
    return getattr(error.orig, "pgcode", None) or ""


def said(error: DBAPIError) -> str:
    """What the server said, in one line: its message and, where it has one, its hint, which is the remedy."""
    diagnostics = getattr(error.orig, "diag", None)
    message = first_line(error)
    hint = getattr(diagnostics, "message_hint", None)
    if not hint:
        return message
    # PostgreSQL's hints are sentences, ours go on.
    return f"{message}; {hint}" if hint[0].islower() else f"{message}. {hint}"


def first_line(error: DBAPIError) -> str:
    """What the server said, without its hint; that it is a standby, where that is what it means."""
    message = str(error.orig).strip().split("\n", 1)[0]
    return f"the server is a standby: {message}" if sqlstate(error) == READ_ONLY else message


def trouble_of(error: BaseException) -> Trouble | None:
    """What kind of trouble an error is; None if it won't pass."""
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
    # Without an SQLSTATE the server didn't answer at all.
    lost = state == "" and isinstance(error.orig, psycopg2.OperationalError | psycopg2.InterfaceError)
    return Trouble.LOST if lost else None


def is_transient(error: DBAPIError) -> bool:
    """True if the same transaction may succeed when it is simply tried again, sooner or later."""
    return trouble_of(error) is not None


def reason_of(error: BaseException) -> str:
    """Why something stops or waits, in one line. Of a database error what the server said.

    No status shows the statement and its values.
    """
    if isinstance(error, BrokenPipeError):
        return "the reader of the command's output has gone (roir … | head, for example)"
    if not isinstance(error, DBAPIError):
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    match trouble_of(error):
        case Trouble.EXHAUSTED:
            state = sqlstate(error) or ("53200" if "out of" in str(error.orig) else "53300")
            return f"the server has {SHORT_OF.get(state, 'no more')}: {said(error).rsplit('FATAL:', 1)[-1].strip()}"
        case Trouble.CANCELLED:
            return f"somebody cancels statements of ours: {said(error)}"
    return first_line(error) or type(error).__name__


# How what is told of a wait stands in an operation's row; what else stands there is the governor's.
OURS = "throttled ~ '^throttled: (the server has|somebody cancels) '"


def _no_session(error: DBAPIError) -> bool:
    return isinstance(error.orig, psycopg2.OperationalError) and NO_SESSION.search(str(error.orig)) is not None
