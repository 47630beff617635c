"""Opens the databases that the pages show: one per Airflow connection. No secret of a connection leaves this module."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from airflow.exceptions import AirflowNotFoundException
from airflow.models.connection import Connection
from airflow.models.dagrun import DagRun
from airflow.utils.session import create_session
from sqlalchemy import event, select
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, is_transient, said, sqlstate
from airflow_roir.errors import InvalidInput, NotFound
from airflow_roir.hooks.allowed import allowed_connections
from airflow_roir.hooks.roir import dsn_of
from airflow_roir.one_line import one_line
from airflow_roir.page.sessions import Sessions
from airflow_roir.page.settings import DEFAULT_CONNECTION, our_dags

log = logging.getLogger(__name__)

# The most runs whose forms are read for the connections that they name.
RUNS = 300
MOST_CONNECTIONS = 16
# Parts of the messages of a refused login; an attempt to connect has no SQLSTATE.
REFUSALS = ("authentication failed", "no password supplied", "not permitted to log in", "no pg_hba.conf entry")
# Where Airflow keeps a connection's fields.
WHERE_KEPT = "in Airflow's Admin → Connections or your secrets backend"
# A look is short; a long one must not go on when no request waits for it any more.
STATEMENT_MS, LOCK_MS = 6_000, 1_000


class NoConnection(NotFound):
    """Airflow has no such connection, or the pages may not use it."""


class NotPostgres(InvalidInput):
    """A connection of another type."""


def connection_ids() -> list[str]:
    """The connections that `[roir] connections` names; if it names none, those that runs of our DAGs have named."""
    if named := allowed_connections():
        return list(named)
    with create_session() as session:
        forms = session.scalars(
            select(DagRun.conf).where(DagRun.dag_id.in_(our_dags())).order_by(DagRun.id.desc()).limit(RUNS)
        ).all()
    ids = [connection_of(form) for form in forms]
    return list(dict.fromkeys([DEFAULT_CONNECTION, *ids]))[:MOST_CONNECTIONS]


def connection_of(form: Any) -> str:
    """The connection that a run's form names."""
    given = form.get("postgres_conn_id") if isinstance(form, dict) else None
    return given.strip() if isinstance(given, str) and given.strip() else DEFAULT_CONNECTION


def open_database(connection_id: str, user: str) -> Database:
    """The engine's handle of a connection, for a change. Opens no session yet.

    user: the user of the change, for `pg_stat_activity`. Raises as `_dsn`.
    """
    database = Database(_dsn(connection_id), f"roir page {user}")
    event.listen(database.engine, "connect", _in_time)
    return database


def reading(connection_id: str) -> AbstractContextManager[Database]:
    """Yields the engine's handle of a connection, for some seconds and for reads only; its session is kept.

    Raises as `_dsn`.
    """
    return _sessions.database(connection_id, _dsn(connection_id))


def _dsn(connection_id: str) -> str:
    """The DSN of a connection. Raises NoConnection if it isn't defined, or isn't one of `[roir] connections`;
    NotPostgres if it isn't of PostgreSQL.
    """
    named = allowed_connections()
    if named and connection_id not in named:
        raise NoConnection(f"connection {connection_id!r} isn't among those that [roir] connections names")
    try:
        connection = Connection.get_connection_from_secrets(connection_id)
    except AirflowNotFoundException:
        raise NoConnection(f"there is no connection {connection_id!r}") from None
    if connection.conn_type != "postgres":
        raise NotPostgres(f"connection {connection_id!r} isn't of type postgres")
    return dsn_of(connection)


def open_reader(dsn: str, **pool: Any) -> Database:
    """A handle whose sessions can only read. pool: as `Database` takes it."""
    database = Database(dsn, "roir page", **pool)
    event.listen(database.engine, "connect", _only_read)
    return database


_sessions = Sessions(open_reader)


def _in_time(session: Any, _record: Any) -> None:
    _set(session, statement_timeout=STATEMENT_MS, lock_timeout=LOCK_MS * 5)


def _only_read(session: Any, _record: Any) -> None:
    _set(session, statement_timeout=STATEMENT_MS, lock_timeout=LOCK_MS, default_transaction_read_only="on")


def _set(session: Any, **settings: object) -> None:
    session.autocommit = True
    with session.cursor() as cursor:
        for name, value in settings.items():
            cursor.execute("SELECT pg_catalog.set_config(%s, %s, false)", (name, str(value)))
    session.autocommit = False


def trouble(connection_id: str, error: DBAPIError) -> str:
    """A message for a database's error. libpq's own texts contain host, user and database, so they aren't shown."""
    state, text = sqlstate(error), str(error.orig)
    log.warning("The database of connection %s: %s %s", one_line(connection_id), state, one_line(text))
    of = f"the database of connection {connection_id}"
    if state in ("57014", "55P03"):
        return f"{of} didn't answer within {STATEMENT_MS // 1000} s"
    if state == "42501":
        return f"the role of connection {connection_id} lacks a right: {said(error)}"
    if state[:2] in ("42", "3F"):
        return f"the control schema in {of} isn't this version's: run roir init"
    if state[:2] == "28" or any(said_so in text for said_so in REFUSALS):
        return f"{of} refuses the login"
    if "does not exist" in text and not state:
        return f"{of} refuses the login: its role or database doesn't exist"
    if not state and "FATAL:" in text and "starting up" not in text and "shutting down" not in text:
        return f"{of} refuses the session; the API server's log has the reason"
    if is_transient(error):
        return f"{of} can't be reached"
    return f"{of} reports an error{f' ({state})' if state else ''}; the API server's log has it"


def remedy(error: DBAPIError) -> str:
    """The remedy if a connection's database opens no session; '' if one was open."""
    state, text = sqlstate(error), str(error.orig)
    if state[:2] == "28" or any(said_so in text for said_so in REFUSALS) or ("does not exist" in text and not state):
        return f"Correct the connection's login, password and database {WHERE_KEPT}"
    return "" if state else f"Start the server, or correct the connection's host and port {WHERE_KEPT}"
