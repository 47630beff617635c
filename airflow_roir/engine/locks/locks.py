"""Locks on users' relations: attempts that give way, and the drain of a source's writers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from psycopg2 import errors as pg_errors
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, has_vanished, sqlstate
from airflow_roir.engine.locks import table_lock
from airflow_roir.engine.locks.lock_waits import ShownWait, Waiter
from airflow_roir.errors import LockNotAcquired

T = TypeVar("T")


@dataclass(frozen=True)
class Blocker:
    """A session or prepared transaction with a lock for which a drain must wait.

    autovacuum: it is an autovacuum worker, which gives way when it is cancelled, and runs again later.
    """

    pid: int | None
    who: str
    transaction_age_s: int
    activity: str
    autovacuum: bool = False

    def __str__(self) -> str:
        name = f"pid {self.pid}" if self.pid is not None else "prepared transaction"
        return f"{name} ({self.who}, transaction open for {self.transaction_age_s} s, {self.activity})"


# Fields that our role may not see in other sessions are NULL. A session without a user that has a
# ShareUpdateExclusiveLock can only be an autovacuum worker.
BLOCKERS = """
SELECT held.pid,
       CASE WHEN held.kind = 'autovacuum worker'
            THEN coalesce(nullif(a.query, '<insufficient privilege>'), 'autovacuum: ' || held.relation)
            WHEN held.kind = 'parallel worker'
            THEN concat_ws(' ', 'parallel worker of pid', a.leader_pid, nullif(a.application_name, ''))
            WHEN held.kind <> 'client backend' THEN concat_ws(' ', held.kind, nullif(a.application_name, ''))
            ELSE coalesce(nullif(concat_ws(' of ', nullif(a.application_name, ''), a.usename), ''), p.gid) END AS who,
       coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)), 0)::int AS age,
       coalesce(a.state, CASE WHEN held.pid IS NULL THEN 'prepared' ELSE 'active' END) AS activity,
       -- The server doesn't cancel an autovacuum that prevents a wraparound; neither does roir.
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
                -- Not by pg_partition_tree(), which would wait for the sessions that it should find.
                OR l.relation IN (WITH RECURSIVE tree (oid) AS (
                                      SELECT to_regclass(n)::oid FROM unnest(%(exclusive)s::text[]) n
                                      UNION SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid)
                                  SELECT oid FROM tree))
         GROUP BY l.pid, l.virtualtransaction) held
  LEFT JOIN pg_stat_activity a ON a.pid = held.pid
  LEFT JOIN pg_prepared_xacts p
    ON held.pid IS NULL
   -- A prepared transaction keeps the virtual transaction of its session, and the lock on its own id.
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
# The mode that also keeps readers out.
EXCLUSIVE = ["AccessExclusiveLock"]


def find_blockers(
    connection: Connection,
    relations: Sequence[int],
    exclusive: Sequence[str] = (),
    modes: Sequence[str] = tuple(DRAIN_CONFLICTS),
) -> list[Blocker]:
    """The holders of locks on these relations (oids) that conflict with a drain, longest transaction first.

    exclusive: names of relations to lock in ACCESS EXCLUSIVE mode, which readers block, too.
    """
    values = {"relations": list(relations), "modes": list(modes), "exclusive": list(exclusive)}
    rows = execute(connection, BLOCKERS, values)
    return [Blocker(row.pid, row.who or "unknown", row.age, row.activity, bool(row.autovacuum)) for row in rows]


# How much longer than deadlock_timeout an attempt waits for the server to cancel an autovacuum.
LONGER_MS = 100
# Only if it is still an autovacuum worker: that one may have ended, and another process may have its pid now.
CANCEL = """
SELECT pg_cancel_backend(a.pid) FROM pg_stat_activity a
 WHERE a.pid = ANY (%(pids)s) AND (a.backend_type = 'autovacuum worker' OR a.usesysid IS NULL)
"""
# The beginning of an attempt's report.
WAITING = "waiting for a lock"
# With two seconds between attempts, writers are undisturbed for most of the time.
LONGEST_REST_S = 2.0
# How often an attempt is repeated at once because an object was dropped after it had been found.
MOST_VANISHED = 5
# QueryCanceled: the LOCK statement's own limit, see `Drain`.
GIVEN_UP_BY_LOCK = (pg_errors.LockNotAvailable, pg_errors.DeadlockDetected)
GIVEN_UP = (*GIVEN_UP_BY_LOCK, pg_errors.QueryCanceled)


class Attempts:
    """Attempts at a transaction that needs locks, each for a bounded time, until one gets all locks.

    name: the relation, as messages name it; relations: the oids on which to look for blockers; modes: the lock modes
    that block. waiter: shown by `roir status`; None if an operation's notice shows the wait, or nothing may be written.
    then: the remedy in the error once the patience is over. limit_ms: the `lock_timeout` of the attempt that runs.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        relations: Sequence[int],
        timeout_ms: int,
        patience_s: float,
        modes: Sequence[str] = tuple(DRAIN_CONFLICTS),
        waiter: Waiter | None = None,
        then: str = "End that transaction, or try again later",
    ) -> None:
        self.database = database
        self.name = name
        self.waiter = waiter
        self.then = then
        self.relations = relations
        self.timeout_ms = self.limit_ms = int(timeout_ms)
        self.patience_s = patience_s
        self.modes = modes
        # True while a statement's own time is limited, as that of a drain's LOCK is.
        self.has_limit = False

    def run(self, body: Callable[[Connection], T], report: Callable[[str], None], exclusive: Sequence[str] = ()) -> T:
        """Run `body(connection)` in one transaction.

        After a lock time-out anywhere in the body, rolls it back, gives the blockers to `report`, and tries again with
        back-off until the patience ends; then raises LockNotAcquired. A failed attempt leaves nothing.
        exclusive: names of the relations that the body locks in ACCESS EXCLUSIVE mode, which readers block, too.
        """
        shown = None if self.waiter is None else ShownWait(self.database, self.waiter, self.name)
        try:
            return self._run(body, report, exclusive, shown)
        finally:
            if shown is not None:
                shown.end()

    def _run(
        self,
        body: Callable[[Connection], T],
        report: Callable[[str], None],
        exclusive: Sequence[str],
        shown: ShownWait | None,
    ) -> T:
        deadline = time.monotonic() + self.patience_s
        rest_s = 0.05
        vanished = 0
        self.limit_ms = self.timeout_ms
        while True:
            self.has_limit = False
            try:
                with self.database.transaction() as connection:
                    execute(connection, f"SET LOCAL lock_timeout = {self.limit_ms}")
                    return body(connection)
            except DBAPIError as error:
                if vanished < MOST_VANISHED and has_vanished(error):
                    # Another session has dropped an object after we found it: the next attempt sees that.
                    vanished += 1
                    continue
                # A cancel without a limit of our own comes from another session.
                given_up = GIVEN_UP if self.has_limit else GIVEN_UP_BY_LOCK
                if not isinstance(error.orig, given_up):
                    raise
            with self.database.transaction() as connection:
                blockers = find_blockers(connection, self.relations, exclusive, self.modes)
                named = "; ".join(map(str, blockers)) or "a transaction that has ended since"
                if shown is not None:
                    shown.show(connection, named)
            report(f"{WAITING} on {self.name}, blocked by {named}")
            if time.monotonic() + rest_s > deadline:
                raise LockNotAcquired(
                    f"no lock on {self.name} within {self.patience_s:g} s, blocked by {named}. {self.then}"
                )
            self.limit_ms = self.timeout_ms
            if blockers and all(blocker.autovacuum for blocker in blockers):
                if self._cancel(blockers):
                    continue
                self.limit_ms = self._longer()
            time.sleep(rest_s * random.uniform(0.5, 1.0))
            rest_s = min(rest_s * 2, LONGEST_REST_S)

    def lock(self, connection: Connection, names: Sequence[str], mode: str) -> None:
        """Call it in the body: locks these tables, all of them within the attempt's limit.

        lock_timeout starts over with each table. So without a common limit we could hold the first one until a writer
        that waits for it checks for a deadlock, and fails in our place.
        """
        if not names:
            return
        self.has_limit = True
        execute(connection, f"SET LOCAL statement_timeout = {self.limit_ms}")
        execute(connection, f"LOCK TABLE {', '.join(names)} IN {mode} MODE")
        execute(connection, "SET LOCAL statement_timeout = 0")
        self.has_limit = False

    def outlast(self, connection: Connection, relations: Sequence[int]) -> None:
        """Call it in the body before a function that limits its own waits: lets the server cancel an autovacuum."""
        if self.limit_ms > self.timeout_ms:
            names = "SELECT unnest(%(oids)s::oid[])::regclass::text"
            for name in execute(connection, names, {"oids": list(relations)}).scalars().all():
                if not table_lock.is_number(name):
                    execute(connection, f"LOCK TABLE ONLY {name} IN SHARE UPDATE EXCLUSIVE MODE")

    def _cancel(self, workers: Sequence[Blocker]) -> bool:
        """Cancel autovacuum workers, which run again later. False if our role may not."""
        try:
            with self.database.transaction() as connection:
                execute(connection, CANCEL, {"pids": [worker.pid for worker in workers]})
        except DBAPIError as error:
            if sqlstate(error) == "42501":
                return False
            raise
        return True

    def _longer(self) -> int:
        """The limit of an attempt that outlasts deadlock_timeout: then the server cancels an autovacuum that blocks it.

        No writer's own check for a deadlock falls into that time: a writer that queues behind us in the first tenth of
        a second is part of our check, and for a later one we are gone before its check.
        """
        with self.database.transaction() as connection:
            query = "SELECT setting::int FROM pg_settings WHERE name = 'deadlock_timeout'"
            return int(execute(connection, query).scalar_one()) + LONGER_MS


class Drain:
    """The drain lock of one source: waits for the writers in flight, for a bounded time (docs/architecture.md#phases).

    sql: the source's quoted name; relations: its oid, then those of its leaves. If another table has that name, that is
    an error.
    """

    def __init__(
        self,
        database: Database,
        sql: str,
        relations: Sequence[int],
        timeout_ms: int,
        patience_s: float,
        waiter: Waiter | None = None,
    ) -> None:
        self.sql = sql
        self.relations = relations
        self.attempts = Attempts(database, sql, relations, timeout_ms, patience_s, waiter=waiter)
        self._locked = False

    def run(
        self,
        body: Callable[[Connection, Callable[[], None]], T],
        report: Callable[[str], None],
        exclusive: Sequence[str] = (),
    ) -> T:
        """As `Attempts.run`; the body calls `lock()`, its second argument, after all work that needs no lock."""

        def attempt(connection: Connection) -> T:
            self._locked = self.attempts.has_limit = False
            done = body(connection, lambda: self.lock(connection))
            if self._locked:
                # A lock keeps a table's name, but not that of its schema.
                table_lock.check_name(connection, self.sql, self.relations[0])
            return done

        return self.attempts.run(attempt, report, exclusive)

    def lock(self, connection: Connection) -> None:
        """Lock the source, with one limit for all waits: writers queue behind us from the first relation's lock on."""
        begun, limit = time.monotonic(), self.attempts.limit_ms
        # lock_timeout starts over with each lock, and a partitioned source has one per leaf.
        self.attempts.has_limit = True
        execute(connection, f"SET LOCAL lock_timeout = {limit}; SET LOCAL statement_timeout = {limit}")
        if self.relations:
            table_lock.lock_table(connection, self.sql, self.relations[0], "SHARE ROW EXCLUSIVE")
            self._locked = True
        else:
            execute(connection, f"LOCK TABLE {self.sql} IN SHARE ROW EXCLUSIVE MODE")
        left = max(1, int(limit - (time.monotonic() - begun) * 1000))
        # Further locks of the body (the view's) have the rest of the time.
        execute(connection, f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {left}")
        self.attempts.has_limit = False
