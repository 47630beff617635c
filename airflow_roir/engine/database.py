"""The one place that opens connections, takes drain locks and retries."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg2
import psycopg2.extensions
from psycopg2 import errors as pg_errors
from sqlalchemy import Connection, CursorResult, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from airflow_roir.engine.session import SESSION_SETTINGS as SESSION_SETTINGS
from airflow_roir.engine.session import keep_to_encoding, pin
from airflow_roir.engine.session import to_json as to_json
from airflow_roir.errors import InvalidInput, LockNotAcquired

T = TypeVar("T")

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
        event.listen(self._engine, "before_cursor_execute", keep_to_encoding, retval=True)

    def __repr__(self) -> str:
        return f"Database(application_name={self.application_name!r})"

    def __reduce__(self) -> tuple[type[Database], tuple[str, str]]:
        return (Database, (self.dsn, self.application_name))

    def _open(self) -> Any:
        try:
            connection = self._connect()
        except psycopg2.OperationalError as error:
            if "conversion between UTF8 and" in str(error):
                said = str(error).strip().rsplit("FATAL:", 1)[-1].strip()
                raise InvalidInput(f"{said}: tables of a database in that encoding can't be indexed") from error
            raise
        try:
            if connection.get_parameter_status("standard_conforming_strings") == "off":
                # psycopg2 decides at the start of a session how it quotes, so it must be so from there on. Not always:
                # poolers refuse options that they don't know.
                connection.close()
                given = psycopg2.extensions.parse_dsn(self.dsn).get("options", os.environ.get("PGOPTIONS", ""))
                connection = self._connect(options=f"{given} -c standard_conforming_strings=on".strip())
            pin(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, **options: Any) -> Any:
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
            # From the start on: psycopg2 opens no session in an encoding that Python doesn't know.
            client_encoding="UTF8",
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


def execute(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> CursorResult[Any]:
    """Send one statement; `values` are bound as `%(name)s`.

    A `%` inside a quoted identifier is only that: psycopg2 would take it for a placeholder as soon as a value is
    bound.
    """
    if not values:
        return connection.exec_driver_sql(sql, execution_options={"no_parameters": True})
    return connection.exec_driver_sql(_to_bind(sql), dict(values))


def _to_bind(sql: str) -> str:
    return _QUOTED.sub(lambda quoted: quoted[0].replace("%", "%%"), sql)


def bound(connection: Connection, sql: str, values: Mapping[str, Any] | None = None) -> str:
    """The text that `execute` would send."""
    if not values:
        return sql
    cursor: Any = connection.connection.cursor()
    text: bytes = cursor.mogrify(_to_bind(sql), dict(values))
    codec: str = psycopg2.extensions.encodings[cursor.connection.encoding]
    cursor.close()
    return text.decode(codec)


def sqlstate(error: DBAPIError) -> str:
    """The SQLSTATE of a database error, '' where the connection failed before there was one."""
    return getattr(error.orig, "pgcode", None) or ""


def said(error: DBAPIError) -> str:
    """What the server said, in one line: its message and, where it has one, its hint, which is the remedy."""
    diagnostics = getattr(error.orig, "diag", None)
    message = str(error.orig).strip().split("\n", 1)[0]
    hint = getattr(diagnostics, "message_hint", None)
    return f"{message}. {hint}" if hint else message


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
    """A session or prepared transaction that holds a lock that a drain must wait for.

    autovacuum: it is an autovacuum worker, which gives way when it is cancelled and comes again later.
    """

    pid: int | None
    who: str
    transaction_age_s: int
    activity: str
    autovacuum: bool = False

    def __str__(self) -> str:
        name = f"pid {self.pid}" if self.pid is not None else "prepared transaction"
        return f"{name} ({self.who}, transaction open for {self.transaction_age_s} s, {self.activity})"


# What a role may not see of others' sessions is NULL. Only an autovacuum worker has no user and holds such a lock.
BLOCKERS = """
SELECT held.pid,
       CASE WHEN held.kind = 'autovacuum worker'
            THEN coalesce(nullif(a.query, '<insufficient privilege>'), 'autovacuum: ' || held.relation)
            WHEN held.kind = 'parallel worker'
            THEN concat_ws(' ', 'parallel worker of pid', a.leader_pid, nullif(a.application_name, ''))
            WHEN held.kind <> 'client backend' THEN concat_ws(' ', held.kind, nullif(a.application_name, ''))
            ELSE coalesce(nullif(a.application_name, ''), a.usename::text, p.gid) END AS who,
       coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)), 0)::int AS age,
       coalesce(a.state, CASE WHEN held.pid IS NULL THEN 'prepared' ELSE 'active' END) AS activity,
       -- The server doesn't cancel one that is to prevent a wraparound; neither do we.
       held.kind = 'autovacuum worker' AND a.query NOT LIKE '%%(to prevent wraparound)%%' AS autovacuum
  FROM (SELECT l.pid, l.virtualtransaction, min(l.relation::regclass::text) AS relation,
               min(coalesce(b.backend_type, CASE WHEN b.pid IS NOT NULL AND b.usesysid IS NULL
                                                  AND l.mode = 'ShareUpdateExclusiveLock'
                                                 THEN 'autovacuum worker' ELSE 'client backend' END)) AS kind
          FROM pg_locks l
          LEFT JOIN pg_stat_activity b ON b.pid = l.pid
         WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND (l.relation = ANY (%(relations)s) AND l.mode = ANY (%(modes)s)
                OR l.relation IN (SELECT to_regclass(n)::oid FROM unnest(%(exclusive)s::text[]) n
                                  UNION SELECT t.relid FROM unnest(%(exclusive)s::text[]) n,
                                                    pg_partition_tree(to_regclass(n)) t))
         GROUP BY l.pid, l.virtualtransaction) held
  LEFT JOIN pg_stat_activity a ON a.pid = held.pid
  LEFT JOIN pg_prepared_xacts p
    ON held.pid IS NULL
   -- It keeps the virtual transaction that it had in its session, and the lock on its own id.
   AND p.transaction IN (SELECT x.transactionid FROM pg_locks x
                          WHERE x.pid IS NULL AND x.locktype = 'transactionid'
                            AND x.virtualtransaction = held.virtualtransaction)
 ORDER BY age DESC, held.pid
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
    return [Blocker(row.pid, row.who or "unknown", row.age, row.activity, bool(row.autovacuum)) for row in rows]


# How much longer than deadlock_timeout an attempt waits for the server to cancel an autovacuum.
LONGER_MS = 100
# Still the same worker: it may have ended, and its pid be another one's by now.
CANCEL = """
SELECT pg_cancel_backend(a.pid) FROM pg_stat_activity a
 WHERE a.pid = ANY (%(pids)s) AND (a.backend_type = 'autovacuum worker' OR a.usesysid IS NULL)
"""

# Undefined table, object, function, column, schema; and what an attempt does about an object that went meanwhile.
VANISHED = ("42P01", "42704", "42883", "42703", "3F000")
MOST_VANISHED = 5


def has_vanished(error: DBAPIError) -> bool:
    """True where an object that was there a moment ago is gone, or somebody else has changed it at the same time."""
    return sqlstate(error) in VANISHED or (sqlstate(error) == "XX000" and "concurrently" in str(error.orig))


WHOSE = "SELECT to_regclass(%(name)s)::oid::bigint"
# What a name is that isn't a table's any more: nobody's, in no schema, or of something that can't be locked.
NO_TABLE = ("42P01", "3F000", "42809")


def lock_table(connection: Connection, sql: str, oid: int, mode: str, only: bool = False) -> None:
    """Lock a table (oid) by its name, which it then keeps: the one way to whatever is read, or altered, by name.

    A lock that was waited for is had on whatever has the name by then, and who waits for none may be late, too. Its
    schema can be renamed still: `check_name` once more at the end tells. Raises LockNotAcquired where another relation,
    or none, has the name.
    """
    lock = f"LOCK TABLE {'ONLY ' if only else ''}{sql} IN {mode} MODE"
    try:
        found = execute(connection, f"{lock}; {WHOSE}", {"name": sql}).scalar()
    except DBAPIError as error:
        if sqlstate(error) not in NO_TABLE:
            raise
        raise _renamed(sql) from error
    if found != oid:
        raise _renamed(sql)


def check_name(connection: Connection, sql: str, oid: int) -> None:
    """Raise LockNotAcquired where a name isn't that table's any more."""
    if execute(connection, WHOSE, {"name": sql}).scalar() != oid:
        raise _renamed(sql)


def _renamed(sql: str) -> LockNotAcquired:
    return LockNotAcquired(f"the table that was {sql} has another name since it was looked at. Try again")


@contextmanager
def telling_of_names() -> Iterator[None]:
    """Around what names things of a source: LockNotAcquired where a name in it is nobody's any more."""
    try:
        yield
    except DBAPIError as error:
        if not has_vanished(error):
            raise
        said = str(error.orig).split("\n", 1)[0]
        raise LockNotAcquired(f"{said}: a name was changed since it was looked at. Try again") from error


# How a drain's report begins.
WAITING = "waiting for a lock"


class Drain:
    """The drain lock of one source: waits for the writers in flight, for a bounded time (docs/architecture.md#phases).

    sql: the source's quoted name; relations: the oids to look for blockers on (the source, then its leaves);
    modes: the lock modes that block. Another table of that name is an error.
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
        self._locked = False

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
        vanished = 0
        limit_ms = int(self.timeout_ms)
        while True:
            try:
                with self.database.transaction() as connection:
                    execute(connection, f"SET LOCAL lock_timeout = {limit_ms}")
                    self._locked = False
                    done = body(connection, lambda c=connection, ms=limit_ms: self._lock(c, ms))  # type: ignore[misc]
                    if self._locked:
                        # A lock keeps a table's name; its schema's can be another one since.
                        check_name(connection, self.sql, self.relations[0])
                    return done
            except DBAPIError as error:
                if vanished < MOST_VANISHED and has_vanished(error):
                    # Dropped by somebody else, between our look and our statement: the next look sees that.
                    vanished += 1
                    continue
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
            limit_ms = int(self.timeout_ms)
            if blockers and all(blocker.autovacuum for blocker in blockers):
                if self._cancel(blockers):
                    continue
                limit_ms = self._longer()
            time.sleep(wait_s * random.uniform(0.5, 1.0))
            # Two seconds between attempts leave writers alone for most of the time (PEERS: pgroll, Spirit).
            wait_s = min(wait_s * 2, 2.0)

    def _cancel(self, workers: Sequence[Blocker]) -> bool:
        """Cancel autovacuum workers, which come again by themselves. False where the role may not."""
        try:
            with self.database.transaction() as connection:
                execute(connection, CANCEL, {"pids": [worker.pid for worker in workers]})
        except DBAPIError as error:
            if sqlstate(error) == "42501":
                return False
            raise
        return True

    def _longer(self) -> int:
        """For an attempt that waits until the server itself cancels an autovacuum, which it does for who waits so long.

        No writer's own look for a deadlock falls into that time: who queues behind us in its first tenth of a second is
        seen by ours, and who comes later has us out of his way before.
        """
        with self.database.transaction() as connection:
            query = "SELECT setting::int FROM pg_settings WHERE name = 'deadlock_timeout'"
            return int(execute(connection, query).scalar_one()) + LONGER_MS

    def _lock(self, connection: Connection, limit: int) -> None:
        """Writers queue behind us from the first relation's lock on: one limit for all that is waited for since."""
        begun = time.monotonic()
        # lock_timeout begins anew with each lock, and a partitioned source has one per leaf.
        execute(connection, f"SET LOCAL lock_timeout = {limit}; SET LOCAL statement_timeout = {limit}")
        if self.relations:
            lock_table(connection, self.sql, self.relations[0], "SHARE ROW EXCLUSIVE")
            self._locked = True
        else:
            execute(connection, f"LOCK TABLE {self.sql} IN SHARE ROW EXCLUSIVE MODE")
        left = max(1, int(limit - (time.monotonic() - begun) * 1000))
        # What else the body locks (the view) has what is left.
        execute(connection, f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {left}")
