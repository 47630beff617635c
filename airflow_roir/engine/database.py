"""The one place that opens connections, takes drain locks and retries."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg2
from psycopg2 import errors as pg_errors
from psycopg2.extensions import encodings
from sqlalchemy import Connection, CursorResult, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from airflow_roir.errors import InvalidInput, LockNotAcquired

T = TypeVar("T")

# Defaults of the role or the database must not reach into our work: text output of a value must mean the same value
# whenever and wherever it is read back (DESIGN section 6), no name may be found through a schema that somebody else can
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
    # The role's own choice, unless it names what is the default anyway: a partitioned table may not be told that.
    "SELECT pg_catalog.set_config('default_tablespace', '', false) "
    "FROM pg_catalog.pg_database d JOIN pg_catalog.pg_tablespace t ON t.oid = d.dattablespace "
    "WHERE d.datname = current_database() AND t.spcname = pg_catalog.current_setting('default_tablespace')"
)
# Signs of our own texts, for databases whose encoding has none of them.
PLAIN = str.maketrans({"…": "...", "→": "->", "–": "-", "’": "'"})

# A server that restarts or fails over is back within this; a longer outage pauses the operation.
OUTAGE_PATIENCE_S = 60.0
LONGEST_WAIT_S = 5.0
# For an attempt at a lock outside an operation, which has its own `lock_timeout_ms`. Below the default
# deadlock_timeout of a second, so that it is always we who give way.
LOCK_TIMEOUT_MS = 500

_QUOTED = re.compile(r'"(?:[^"]|"")*"')


class Database:
    """A PostgreSQL database, by DSN (`postgresql://…` or `host=… dbname=…`).

    Every connection is a session of its own with pinned settings; none is kept after use, so that a paused
    operation holds none. A pooler in front must be in session mode. The DSN never appears in `repr`.
    """

    def __init__(self, dsn: str, application_name: str = "roir") -> None:
        self.dsn = dsn
        self.application_name = application_name
        self._engine: Engine = create_engine(
            "postgresql+psycopg2://",
            creator=self._open,
            poolclass=NullPool,
            use_native_hstore=False,
            json_serializer=to_json,
        )
        event.listen(self._engine, "before_cursor_execute", _keep_to_encoding, retval=True)

    def __repr__(self) -> str:
        return f"Database(application_name={self.application_name!r})"

    def __reduce__(self) -> tuple[type[Database], tuple[str, str]]:
        return (Database, (self.dsn, self.application_name))

    def _open(self) -> Any:
        connection = self._connect()
        try:
            if connection.get_parameter_status("standard_conforming_strings") == "off":
                # psycopg2 decides at the start of a session how it quotes, so it must be so from there on. Not always:
                # poolers refuse options that they don't know.
                connection.close()
                given = psycopg2.extensions.parse_dsn(self.dsn).get("options", os.environ.get("PGOPTIONS", ""))
                connection = self._connect(options=f"{given} -c standard_conforming_strings=on".strip())
            _pin_settings(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, **options: str) -> Any:
        # TCP keepalives: a worker whose server vanished behind a dropped route must notice within a minute.
        return psycopg2.connect(
            self.dsn,
            application_name=self.application_name[:63],
            connect_timeout=10,
            keepalives_idle=20,
            keepalives_interval=10,
            keepalives_count=4,
            # Keepalives are not sent while an answer is owed: this bounds that, where the kernel would try for hours.
            tcp_user_timeout=60_000,
            **options,
        )

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A session; the caller begins and ends its transactions."""
        with self._engine.connect() as connection:
            yield connection

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A session for one transaction, committed at the end of the block, rolled back on an error."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[Connection]:
        """A session outside any transaction block, for VACUUM."""
        with self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")


def _pin_settings(connection: Any) -> None:
    """Each statement is its own transaction: it counts from the next one on, whatever becomes of that."""
    connection.autocommit = True
    if connection.get_parameter_status("standard_conforming_strings") == "off":
        raise InvalidInput(
            "standard_conforming_strings is off, and what stands between roir and the database keeps it so; "
            "ALTER ROLE … SET standard_conforming_strings = on for the role that roir connects as"
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
    try:
        connection.set_client_encoding("LATIN1" if server == "SQL_ASCII" else "UTF8")
    except psycopg2.Error as error:
        raise InvalidInput(
            f"the database's encoding is {server}, which PostgreSQL can't convert to UTF8: {str(error).strip()}. "
            "Its tables can't be indexed"
        ) from error


def _keep_to_encoding(
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


def to_json(value: Any) -> str:
    """JSON for a `jsonb`, without escapes: a server translates those into Unicode's encodings alone."""
    return json.dumps(value, ensure_ascii=False)


def execute(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> CursorResult[Any]:
    """Send one statement; `values` are bound as `%(name)s`.

    A `%` inside a quoted identifier is only that: psycopg2 would take it for a placeholder as soon as a value is
    bound.
    """
    if not values:
        return connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
    return connection.exec_driver_sql(_QUOTED.sub(lambda quoted: quoted[0].replace("%", "%%"), sql), dict(values))


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a database error, '' where the connection failed before there was one."""
    return getattr(error.orig, "pgcode", None) or ""


def is_transient(error: DBAPIError) -> bool:
    """True where the same transaction may succeed when it is simply tried again.

    Lost connections, a server that starts or stops, serialization failures, deadlocks and lock time-outs.
    """
    state = sqlstate(error)
    if error.connection_invalidated or state[:2] in ("08", "40"):
        return True
    if state in ("55P03", "57P01", "57P02", "57P03", "53300"):
        return True
    # Without an SQLSTATE the server didn't answer at all.
    return state == "" and isinstance(error.orig, psycopg2.OperationalError | psycopg2.InterfaceError)


def retry(work: Callable[[], T], patience_s: float = OUTAGE_PATIENCE_S, first_wait_s: float = 0.2) -> T:
    """Run `work`, one whole transaction, again after a transient error, with jittered exponential back-off.

    patience_s: how long to go on after the first failure; then its last error is raised. Safe only for work that
    is idempotent or compare-and-set, since a commit's answer can be lost.
    """
    deadline: float | None = None
    wait_s = first_wait_s
    while True:
        try:
            return work()
        except DBAPIError as error:
            if not is_transient(error):
                raise
            # From the failure on: the work itself may have gone well for hours.
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() + wait_s > deadline:
                raise
        time.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(wait_s * 2, LONGEST_WAIT_S)


@dataclass(frozen=True)
class Blocker:
    """A session or prepared transaction that holds a lock that a drain must wait for."""

    pid: int | None
    who: str
    transaction_age_s: int
    activity: str

    def __str__(self) -> str:
        name = f"pid {self.pid}" if self.pid is not None else "prepared transaction"
        return f"{name} ({self.who}, transaction open for {self.transaction_age_s} s, {self.activity})"


BLOCKERS = """
SELECT DISTINCT l.pid,
       coalesce(nullif(a.application_name, ''), a.usename::text, p.gid) AS who,
       coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)), 0)::int AS age,
       coalesce(a.state, 'prepared') AS activity
  FROM pg_locks l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN pg_prepared_xacts p
    ON l.pid IS NULL
   -- It keeps the virtual transaction that it had in its session, and the lock on its own id.
   AND p.transaction IN (SELECT x.transactionid FROM pg_locks x
                          WHERE x.pid IS NULL AND x.locktype = 'transactionid'
                            AND x.virtualtransaction = l.virtualtransaction)
 WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (l.relation = ANY (%(relations)s) AND l.mode = ANY (%(modes)s)
        OR l.relation IN (SELECT to_regclass(n)::oid FROM unnest(%(exclusive)s::text[]) n
                          UNION SELECT p.relid FROM unnest(%(exclusive)s::text[]) n,
                                            pg_partition_tree(to_regclass(n)) p))
 ORDER BY age DESC
"""
DRAIN_CONFLICTS = [
    "RowExclusiveLock",
    "ShareUpdateExclusiveLock",
    "ShareLock",
    "ShareRowExclusiveLock",
    "ExclusiveLock",
    "AccessExclusiveLock",
]
# What keeps readers out, too.
EXCLUSIVE = ["AccessExclusiveLock"]


def find_blockers(
    connection: Connection,
    relations: Sequence[int],
    exclusive: Sequence[str] = (),
    modes: Sequence[str] = tuple(DRAIN_CONFLICTS),
) -> list[Blocker]:
    """Who holds locks on these relations (oids) that conflict with a drain, longest transaction first.

    exclusive: names of relations that are wanted in ACCESS EXCLUSIVE mode, which readers block too.
    """
    values = {"relations": list(relations), "modes": list(modes), "exclusive": list(exclusive)}
    rows = execute(connection, BLOCKERS, values)
    return [Blocker(row.pid, row.who or "unknown", row.age, row.activity) for row in rows]


# How a drain's report begins.
WAITING = "waiting for a lock"


class Drain:
    """The drain lock of one source: waits for the writers in flight, for a bounded time (DESIGN section 3, I6).

    sql: the source's quoted name; relations: the oids to look for blockers on (the source and its leaves); modes: the
    lock modes that block.
    """

    def __init__(
        self,
        database: Database,
        sql: str,
        relations: Sequence[int],
        timeout_ms: int,
        patience_s: float,
        modes: Sequence[str] = tuple(DRAIN_CONFLICTS),
    ) -> None:
        self.database = database
        self.sql = sql
        self.relations = relations
        self.timeout_ms = timeout_ms
        self.patience_s = patience_s
        self.modes = modes

    def run(
        self,
        body: Callable[[Connection, Callable[[], None]], T],
        report: Callable[[str], None],
        exclusive: Sequence[str] = (),
    ) -> T:
        """Run `body(connection, lock)` in one transaction; it calls `lock()` when all that needs no lock is done.

        A lock time-out anywhere in the body, before `lock()` too, rolls it back, tells `report` who blocks, and tries
        again with back-off until the patience ends; then raises LockNotAcquired. Nothing of a failed attempt stays.
        exclusive: names of the relations that the body locks in ACCESS EXCLUSIVE mode, which readers block too.
        """
        deadline = time.monotonic() + self.patience_s
        wait_s = 0.05
        while True:
            try:
                with self.database.transaction() as connection:
                    execute(connection, f"SET LOCAL lock_timeout = {int(self.timeout_ms)}")
                    return body(connection, lambda c=connection: self._lock(c))  # type: ignore[misc]
            except DBAPIError as error:
                # QueryCanceled: the LOCK statement's own limit, see `_lock`.
                given_up = pg_errors.LockNotAvailable | pg_errors.QueryCanceled | pg_errors.DeadlockDetected
                if not isinstance(error.orig, given_up):
                    raise
            with self.database.transaction() as connection:
                blockers = find_blockers(connection, self.relations, exclusive, self.modes)
            named = "; ".join(map(str, blockers)) or "a lock that is gone by now"
            report(f"{WAITING} on {self.sql}, blocked by {named}")
            if time.monotonic() + wait_s > deadline:
                raise LockNotAcquired(
                    f"no lock on {self.sql} within {self.patience_s:g} s, blocked by {named}. "
                    "End that transaction, or try again later"
                )
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            # Two seconds between attempts leave writers alone for most of the time (PEERS: pgroll, Spirit).
            wait_s = min(wait_s * 2, 2.0)

    def _lock(self, connection: Connection) -> None:
        """Writers queue behind us from the first relation's lock on: one limit for all that is waited for since."""
        begun = time.monotonic()
        limit = int(self.timeout_ms)
        # lock_timeout begins anew with each lock, and a partitioned source has one per leaf.
        execute(connection, f"SET LOCAL lock_timeout = {limit}; SET LOCAL statement_timeout = {limit}")
        execute(connection, f"LOCK TABLE {self.sql} IN SHARE ROW EXCLUSIVE MODE")
        left = max(1, int(limit - (time.monotonic() - begun) * 1000))
        # What else the body locks (the view) has what is left.
        execute(connection, f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {left}")
