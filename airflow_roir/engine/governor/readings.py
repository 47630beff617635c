"""Reads the signals that have limits. If a signal can't be read, its reading says why."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute, sqlstate
from airflow_roir.engine.governor.own_query import NoValue, OwnQuery
from airflow_roir.engine.governor.probe import Probe
from airflow_roir.engine.governor.replicas import Replicas, ReplicaState
from airflow_roir.engine.governor.surroundings import Surroundings
from airflow_roir.signals import SIGNALS, Reading

# The time-out of the governor's own queries.
TIMEOUT_MS = 3_000
RATE_S = 5.0
CHECKPOINT_RATE_S = 60.0

POSITION = "SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint"
SLOTS = """
SELECT slot_name AS name, greatest(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::float8 AS kept,
       safe_wal_size::float8 AS room
  FROM pg_replication_slots WHERE restart_lsn IS NOT NULL
"""
# roir's sessions, known by their names, don't count: their transactions end within seconds.
OLDEST = """
SELECT extract(epoch FROM clock_timestamp() - t.since)::float8 AS age, t.who, h.hidden
  FROM (SELECT count(*) AS hidden FROM pg_stat_activity
         WHERE backend_type IS NULL AND application_name NOT LIKE 'roir %' AND usesysid IS NOT NULL) h
  LEFT JOIN LATERAL (
        SELECT x.since, x.who
          FROM (SELECT xact_start AS since, concat_ws(' ', 'pid', pid, 'of', quote_ident(usename)) AS who
                  FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name NOT LIKE 'roir %'
                UNION ALL SELECT prepared, 'prepared ' || quote_literal(gid) FROM pg_prepared_xacts) x
         WHERE x.since IS NOT NULL ORDER BY x.since LIMIT 1) t ON true
"""
ACTIVE = """
SELECT count(*) FILTER (WHERE state IN ('active', 'fastpath function call'))::float8 AS active,
       count(*) FILTER (WHERE backend_type IS NULL AND usesysid IS NOT NULL) AS hidden
  FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND (backend_type = 'client backend' OR backend_type IS NULL)
"""
WAITING = """
SELECT count(DISTINCT l.pid)::float8 FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE NOT l.granted AND a.application_name NOT LIKE 'roir %'
"""
# The WAL written in one checkpoint_timeout at this rate, in percent of the amount that starts a checkpoint early.
CHECKPOINT = """
SELECT 100 * %(rate)s * extract(epoch FROM current_setting('checkpoint_timeout')::interval)::float8
  / (pg_size_bytes(current_setting('max_wal_size')) / (1 + current_setting('checkpoint_completion_target')::float8))
"""
# The feeds of active generations. If a feed has never caught up yet, its lag is the time since its capture began.
OUTBOXES = """
SELECT s.name, extract(epoch FROM clock_timestamp() - coalesce(l.fresh_at, l.captured_at))::float8 AS lag,
       coalesce(l.pending_bytes, 0)::float8 AS bytes
  FROM roir.feed l JOIN roir.generation g ON g.id = l.generation_id JOIN roir.shard s ON s.id = l.shard_id
 WHERE g.status = 'active' AND l.removed_at IS NULL AND l.captured_at IS NOT NULL
"""
PLACES = """
SELECT inet_server_addr() IS NULL AS local, current_setting('data_directory') AS data,
       array(SELECT pg_tablespace_location(oid) FROM pg_tablespace WHERE pg_tablespace_location(oid) <> '') AS others
"""


NO_POSITION = "this server is itself a standby, or doesn't report its WAL position"


class Unreadable(Exception):
    """The reason why a signal has no value."""


class SignalReader:
    """Reads signals for one run; rates need two looks. clock: seconds that never go back."""

    def __init__(
        self, database: Database, surroundings: Surroundings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._surroundings = surroundings
        self._clock = clock
        self._probe = Probe(database.named("roir governor"))
        self._own_query = OwnQuery(database.named("roir governor"))
        self._replicas = Replicas(surroundings.replicas, clock)
        self._positions: deque[tuple[float, int]] = deque()
        self._states: list[ReplicaState] | None = None

    def close(self) -> None:
        """End the probe, and the sessions of replicas and of the query."""
        self._probe.close()
        self._own_query.close()
        self._replicas.close()

    def limits(self, throttle: Mapping[str, Any]) -> dict[str, Any]:
        """The limits that count. A query that the run was given has the limit 0, unless another one is set."""
        return {"query": 0, **throttle} if self._surroundings.query else dict(throttle)

    def read(self, connection: Connection, throttle: Mapping[str, Any]) -> list[Reading]:
        """A reading for each limit, and for each replica, in separate transactions.

        Raises DBAPIError if the session is lost.
        """
        limits = self.limits(throttle)
        replicas = limits.pop("replicas", None)
        self._states = None
        position = self._position(connection)
        found: list[Reading] = []
        for name, limit in limits.items():
            signal = SIGNALS.get(name)
            if signal is None:
                continue
            try:
                with connection.begin():
                    execute(connection, f"SET LOCAL statement_timeout = {TIMEOUT_MS}; SET LOCAL lock_timeout = 500")
                    if name in ("replica_lag", "replica_delay"):
                        found += self._of_replicas(connection, name, limit, position, replicas)
                    else:
                        value, of = getattr(self, f"_{name}")(connection)
                        if value is not None:
                            found.append(Reading(signal, limit, float(value), of))
            except Unreadable as why:
                found.append(Reading(signal, limit, None, problem=str(why)))
            except DBAPIError as error:
                if error.connection_invalidated or connection.invalidated:
                    raise
                said = str(error.orig).strip().split("\n", 1)[0]
                hint = ""
                if sqlstate(error) == "42501":
                    with connection.begin():
                        hint = f": GRANT pg_monitor TO {_role(connection)}"
                found.append(Reading(signal, limit, None, problem=f"{said}{hint}"))
            except Exception as error:  # a defect: an unreadable signal holds the work, whatever the reason
                found.append(Reading(signal, limit, None, problem=f"{type(error).__name__}: {error}"))
        return found

    def _position(self, connection: Connection) -> int | None:
        try:
            with connection.begin():
                position = int(execute(connection, POSITION).scalar_one())
        except DBAPIError as error:
            if error.connection_invalidated or connection.invalidated:
                raise
            return None
        now = self._clock()
        self._positions.append((now, position))
        while now - self._positions[0][0] > CHECKPOINT_RATE_S:
            self._positions.popleft()
        return position

    def _of_replicas(
        self, connection: Connection, name: str, limit: float, position: int | None, named: list[str] | None
    ) -> list[Reading]:
        if position is None:
            raise Unreadable(NO_POSITION)
        if self._states is None:
            self._states = self._replicas.read(connection, position, named)
        signal = SIGNALS[name]
        values = [(state, state.bytes if name == "replica_lag" else state.seconds) for state in self._states]
        return [Reading(signal, limit, value, state.name, state.problem) for state, value in values]

    def _rate(self, seconds: float) -> float:
        """Bytes of WAL a second, over the last `seconds`."""
        if not self._positions:
            raise Unreadable(NO_POSITION)
        now, position = self._positions[-1]
        then, before = next(one for one in self._positions if now - one[0] <= seconds)
        if now <= then:
            raise Unreadable("a rate needs a second reading")
        return (position - before) / (now - then)

    def _slot_wal(self, connection: Connection) -> tuple[float, str]:
        worst = max(execute(connection, SLOTS).all(), key=lambda row: row.kept, default=None)
        return (0.0, "") if worst is None else (worst.kept, worst.name)

    def _slot_room(self, connection: Connection) -> tuple[float | None, str]:
        # NULL if max_slot_wal_keep_size sets no limit.
        rows = [row for row in execute(connection, SLOTS) if row.room is not None]
        worst = min(rows, key=lambda row: row.room, default=None)
        return (None, "") if worst is None else (max(0.0, worst.room), worst.name)

    def _shard_lag(self, connection: Connection) -> tuple[float | None, str]:
        worst = max(execute(connection, OUTBOXES).all(), key=lambda row: row.lag, default=None)
        return (None, "") if worst is None else (max(0.0, worst.lag), worst.name)

    def _outbox(self, connection: Connection) -> tuple[float | None, str]:
        worst = max(execute(connection, OUTBOXES).all(), key=lambda row: row.bytes, default=None)
        return (None, "") if worst is None else (worst.bytes, worst.name)

    def _oldest_transaction(self, connection: Connection) -> tuple[float, str]:
        row = execute(connection, OLDEST).one()
        if row.hidden:
            raise Unreadable(_hidden(connection, "transactions of others"))
        return max(0.0, row.age or 0.0), row.who or ""

    def _active_sessions(self, connection: Connection) -> tuple[float, str]:
        row = execute(connection, ACTIVE).one()
        if row.hidden:
            raise Unreadable(_hidden(connection, "what sessions of others do"))
        return row.active, ""

    def _lock_waits(self, connection: Connection) -> tuple[float, str]:
        return execute(connection, WAITING).scalar_one(), ""

    def _commit_latency(self, _connection: Connection) -> tuple[float, str]:
        seconds, problem = self._probe.read()
        if seconds is None:
            raise Unreadable(problem)
        return seconds, ""

    def _wal_rate(self, _connection: Connection) -> tuple[float, str]:
        return self._rate(RATE_S), ""

    def _checkpoints(self, connection: Connection) -> tuple[float, str]:
        return execute(connection, CHECKPOINT, {"rate": self._rate(CHECKPOINT_RATE_S)}).scalar_one(), ""

    def _free_space(self, connection: Connection) -> tuple[float, str]:
        row = execute(connection, PLACES).one()
        if not row.local:
            raise Unreadable(
                "PostgreSQL doesn't report free space. Connect by a Unix socket, so that roir can ask the file system, "
                "or give your own query (ROIR_THROTTLE_QUERY)"
            )
        rooms: dict[str, int] = {}
        for place in (row.data, f"{row.data}/pg_wal", *row.others):
            try:
                here = os.statvfs(place)
            except OSError as error:
                if place.endswith("/pg_wal"):
                    # Only the server may look into its folder; mostly WAL is on the same file system.
                    continue
                raise Unreadable(f"{place}: {error.strerror}") from None
            rooms[place] = here.f_bavail * here.f_frsize
        place = min(rooms, key=lambda name: rooms[name])
        return float(rooms[place]), place

    def _query(self, _connection: Connection) -> tuple[float, str]:
        query = self._surroundings.query
        if not query:
            raise Unreadable("the run has no query: set ROIR_THROTTLE_QUERY, or the operator's throttle_query")
        try:
            return self._own_query.ask(query), ""
        except NoValue as why:
            raise Unreadable(str(why)) from None


def _role(connection: Connection) -> str:
    return str(execute(connection, "SELECT quote_ident(current_user)").scalar_one())


def _hidden(connection: Connection, what: str) -> str:
    role = _role(connection)
    return f"role {role} may not see {what}: GRANT pg_read_all_stats TO {role}"
