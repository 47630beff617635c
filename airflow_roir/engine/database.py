"""Opens all connections, and retries transactions that are safe to retry."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import psycopg2
import psycopg2.extensions
from sqlalchemy import Connection, CursorResult, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from airflow_roir.engine.retry.patience import Patience
from airflow_roir.engine.retry.trouble import first_line as first_line
from airflow_roir.engine.retry.trouble import is_transient as is_transient
from airflow_roir.engine.retry.trouble import said as said
from airflow_roir.engine.retry.trouble import sqlstate as sqlstate
from airflow_roir.engine.sessions import own_session
from airflow_roir.engine.sessions.limits import DEFAULT, Limits, execution_options
from airflow_roir.engine.sessions.session import SESSION_SETTINGS as SESSION_SETTINGS
from airflow_roir.engine.sessions.session import keep_to_encoding, pin, refuse_no_text
from airflow_roir.engine.sessions.session import to_json as to_json
from airflow_roir.errors import InvalidInput

T = TypeVar("T")

# The parameters of a DSN that are secret.
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")

# For a server that doesn't answer at all.
CONNECT_TIMEOUT_S = 10

_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Kept(Protocol):
    """Gives transactions one session after another that it keeps meanwhile."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """A session for one transaction, committed at the end of the block, rolled back on an error."""

    def close(self) -> None:
        """End the idle sessions."""


class Database:
    """A PostgreSQL database, by DSN (`postgresql://…` or `host=… dbname=…`).

    Every connection is a session of its own with pinned settings; none is kept after use, so that a paused operation
    holds none. Only the transactions of a run share one (`kept_sessions`). A pooler in front must be in session mode;
    others are refused, by InvalidInput.
    The DSN never appears in `repr`.
    limits: how long its sessions wait and how much they take at once. pool: arguments of SQLAlchemy's `create_engine`,
    to keep sessions after all. engine: SQLAlchemy's, to listen to its events.
    """

    def __init__(self, dsn: str, application_name: str = "roir", limits: Limits = DEFAULT, **pool: Any) -> None:
        self.dsn = dsn
        self.application_name = application_name
        self.limits = limits
        # Called with each new session before its first use: `server_timeline.one_history`.
        self.look: Callable[[Any], None] | None = None
        # Opens the transactions of a run: `kept_session.kept_sessions`.
        self.kept: Kept | None = None
        self.engine: Engine = create_engine(
            "postgresql+psycopg2://",
            creator=self._open,
            use_native_hstore=False,
            json_serializer=to_json,
            execution_options=execution_options(limits),
            **({"poolclass": NullPool} | pool),
        )
        event.listen(self.engine, "before_cursor_execute", keep_to_encoding, retval=True)
        event.listen(self.engine, "handle_error", refuse_no_text, retval=True)

    def __repr__(self) -> str:
        return f"Database(application_name={self.application_name!r})"

    def __reduce__(self) -> tuple[type[Database], tuple[str, str, Limits]]:
        return (Database, (self.dsn, self.application_name, self.limits))

    def named(self, application_name: str) -> Database:
        """The same database and limits, under another name."""
        return Database(self.dsn, application_name, self.limits)

    def _open(self) -> Any:
        check_dsn(self.dsn)
        try:
            connection = self._connect()
        except psycopg2.OperationalError as error:
            if "conversion between UTF8 and" in str(error):
                said = str(error).strip().rsplit("FATAL:", 1)[-1].strip()
                raise InvalidInput(f"{said}: tables of a database in that encoding can't be indexed") from error
            raise
        try:
            if connection.get_parameter_status("standard_conforming_strings") == "off":
                # psycopg2 decides at the start of a session how it quotes, so the setting must be right from there on.
                # It isn't always sent, since poolers refuse options that they don't know.
                connection.close()
                given = psycopg2.extensions.parse_dsn(self.dsn).get("options", os.environ.get("PGOPTIONS", ""))
                connection = self._connect(options=f"{given} -c standard_conforming_strings=on".strip())
            connection.autocommit = True
            with own_session.answering(connection, self.limits.first_answer_s):
                # Before any setting is sent.
                own_session.check(self.dsn, connection, partial(self._connect, async_=1))
                pin(connection)
            if self.look is not None:
                self.look(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, **options: Any) -> Any:
        # TCP keepalives: a worker whose server vanished behind a dropped route must notice within a minute.
        return psycopg2.connect(
            self.dsn,
            application_name=self.application_name[:63],
            connect_timeout=CONNECT_TIMEOUT_S,
            keepalives_idle=20,
            keepalives_interval=10,
            keepalives_count=4,
            # No keepalives are sent while data isn't acknowledged: this bounds that time, the kernel would take hours.
            tcp_user_timeout=60_000,
            # From the start: psycopg2 opens no session in an encoding that Python doesn't know.
            client_encoding="UTF8",
            **options,
        )

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A session; the caller begins and ends its transactions."""
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A session for one transaction, committed at the end of the block, rolled back on an error."""
        # Read once: another thread may end the block that set it.
        kept = self.kept
        with self.engine.begin() if kept is None else kept.transaction() as connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """A session outside any transaction block, for VACUUM."""
        with self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def retry(self, work: Callable[[], T], patience: Patience | None = None) -> T:
        """As `retry`, by default for as long as the limits allow an outage or a shortage to last."""
        return retry(work, patience or Patience(self.limits))


def check_dsn(dsn: str) -> None:
    """Raise InvalidInput for a DSN that libpq can't read: its error would quote a part, maybe of the password."""
    try:
        given = psycopg2.extensions.parse_dsn(dsn)
    except (psycopg2.ProgrammingError, ValueError):
        given = None
    # An unescaped @, / or : in a password ends up in host or port. A host that begins with @ is a socket.
    hosts, ports = (str((given or {}).get(name, "")).split(",") for name in ("host", "port"))
    if given is None or any("@" in host[1:] for host in hosts) or any(port and not port.isdigit() for port in ports):
        raise InvalidInput(
            "the DSN can't be read. Write postgresql://user:password@host/database, with %40 for @ in the password and "
            "the like, or host=… dbname=… with values in quotes"
        ) from None


def execute(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> CursorResult[Any]:
    """Send one statement; `values` are bound as `%(name)s`.

    A `%` inside a quoted identifier is doubled: psycopg2 would take it for a placeholder if a value is bound.
    """
    if not values:
        return connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
    return connection.exec_driver_sql(_to_bind(sql), dict(values))


def _to_bind(sql: str) -> str:
    return _QUOTED.sub(lambda quoted: quoted[0].replace("%", "%%"), sql)


def as_it_is(sql: str) -> str:
    """SQL to be a part of a statement that binds values: each `%` in it stays a `%`."""
    parts = _QUOTED.split(sql)
    quoted = _QUOTED.findall(sql)
    return "".join(a + b for a, b in zip((part.replace("%", "%%") for part in parts), [*quoted, ""], strict=True))


def bound(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> str:
    """The text that `execute` would send."""
    if not values:
        return sql
    cursor: Any = connection.connection.cursor()
    text: bytes = cursor.mogrify(_to_bind(sql), dict(values))
    codec: str = psycopg2.extensions.encodings[cursor.connection.encoding]
    cursor.close()
    return text.decode(codec)


def retry(work: Callable[[], T], patience: Patience) -> T:
    """Run `work`, one whole transaction, again after an error that may pass, with jittered exponential back-off.

    When the patience is over, raises the last error. Safe only for work that is idempotent or compare-and-set, since a
    commit's answer can be lost.
    """
    while True:
        try:
            done = work()
        except DBAPIError as error:
            if not patience.waits(error):
                raise
            continue
        patience.renew()
        return done


# Undefined table, object, function, column, schema.
VANISHED = ("42P01", "42704", "42883", "42703", "3F000")
# Words of the server's errors, always in English, about an object that it had looked up before.
OVERTAKEN = ("concurrently", "could not open relation with OID", "cache lookup failed")


def has_vanished(error: DBAPIError) -> bool:
    """True if an object that existed a moment ago is gone, or another session has changed it at the same time."""
    internal = sqlstate(error) == "XX000" and any(text in str(error.orig) for text in OVERTAKEN)
    return internal or sqlstate(error) in VANISHED
