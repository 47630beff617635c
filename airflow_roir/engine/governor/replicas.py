"""Reads how far replicas are behind, in bytes and in seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg2
from sqlalchemy import Connection

from airflow_roir.definition import quote
from airflow_roir.engine.database import check_dsn, execute
from airflow_roir.engine.governor.in_time import InTime
from airflow_roir.errors import InvalidInput

# If our role may not see a session, its row has only a process id and a name. Logical subscribers count if they are
# named.
STREAMING = """
SELECT coalesce(nullif(r.application_name, ''), r.client_addr::text, 'pid ' || r.pid) AS name,
       r.state IS NULL AS hidden, r.state = 'backup' AS backup, coalesce(s.slot_type = 'logical', false) AS logical,
       (coalesce(r.replay_lsn, r.flush_lsn, r.write_lsn, r.sent_lsn) - '0/0')::bigint AS position, current_user AS role
  FROM pg_stat_replication r LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid
"""
OWN = """
SELECT pg_is_in_recovery(), (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() END - '0/0')::bigint,
       CASE WHEN pg_is_in_recovery()
            THEN extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8 END
"""
# A replica that has just stopped streaming may be restarting; after this time it counts as removed.
AWAY_S = 60.0
# A replica with a DSN of its own that didn't answer is asked again after this time.
ASK_AGAIN_S = 5.0
TIMEOUT_S = 2
# Waits no longer for an answer: a server that hangs keeps no other time-out.
PATIENCE_S = 5.0
# How many positions of the past are kept.
REMEMBERED = 1_200


class LagClock:
    """The primary's past positions, which show for how long a replica at some position has lacked WAL.

    `pg_stat_replication.replay_lag` can't: it doesn't grow while a replica is stuck.
    """

    def __init__(self) -> None:
        self._written: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    def wrote(self, now: float, position: int) -> None:
        """Note the primary's present position."""
        if not self._written or position > self._written[-1][1]:
            self._written.append((now, position))

    def behind(self, now: float, position: int) -> float:
        """Seconds since the primary was first beyond a position, as far as that is known."""
        lacking = (at for at, written in self._written if written > position)
        return max(0.0, now - next(lacking, now))


@dataclass(frozen=True)
class ReplicaState:
    """How far a replica is behind, in bytes and in seconds; None if that can't be read, and problem says why."""

    name: str
    bytes: float | None = None
    seconds: float | None = None
    problem: str = ""


class Replicas:
    """Reads the state of the replicas that count. dsns: by name, those of replicas that are asked directly."""

    def __init__(self, dsns: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._dsns = dsns
        self._clock = clock
        self._lags = LagClock()
        self._seen: dict[str, float] = {}
        self._own = {name: _Own(dsn, clock) for name, dsn in dsns.items()}

    def read(self, connection: Connection, position: int, named: Collection[str] | None) -> list[ReplicaState]:
        """The states of the replicas `named`, or of all that stream or have a DSN. position: the primary's now."""
        now = self._clock()
        self._lags.wrote(now, position)
        found: dict[str, ReplicaState] = {}
        for row in execute(connection, STREAMING):
            if row.backup or (row.logical and row.name not in (named or ())):
                continue
            state = self._state(now, position, row)
            # Among several of one name, the one that is furthest behind counts.
            if row.name not in found or _badness(state) > _badness(found[row.name]):
                found[row.name] = state
        streaming = set(found)
        if named is None:
            wanted = set(found) | set(self._dsns) | self._missing(now, found)
        else:
            wanted = set(named)
            self._seen.clear()
        for name in wanted:
            if name in self._own:
                found[name] = self._asked(now, position, name)
            elif name not in found:
                gone = "is no longer connected" if named is None else "isn't connected, and the run has no DSN of it"
                found[name] = ReplicaState(name, problem=f"replica {name} {gone}")
        for name in streaming & wanted:
            self._seen[name] = now
        return [found[name] for name in sorted(wanted)]

    def close(self) -> None:
        """Close the sessions of replicas."""
        for own in self._own.values():
            own.close()

    def _missing(self, now: float, found: Collection[str]) -> set[str]:
        """The replicas that streamed recently, but don't now."""
        self._seen = {name: at for name, at in self._seen.items() if now - at < AWAY_S}
        return set(self._seen) - set(found)

    def _state(self, now: float, position: int, row: Any) -> ReplicaState:
        if row.hidden:
            role = quote(row.role)
            problem = f"role {role} may not see how far replicas are: GRANT pg_read_all_stats TO {role}"
            return ReplicaState(row.name, problem=problem)
        if row.position is None:
            return ReplicaState(row.name, problem=f"replica {row.name} hasn't said yet how far it is")
        return ReplicaState(row.name, max(0.0, position - row.position), self._lags.behind(now, row.position))

    def _asked(self, now: float, position: int, name: str) -> ReplicaState:
        replayed, age, problem = self._own[name].ask()
        if replayed is None:
            return ReplicaState(name, problem=f"replica {name}: {problem}")
        behind = self._lags.behind(now, replayed)
        # The WAL that it lacks may be older than this run: then only its last replayed transaction shows how old.
        seconds = max(behind, age or 0.0) if replayed < position and behind > 0 else behind
        return ReplicaState(name, max(0.0, position - replayed), seconds)


class _Own:
    """A replica with a DSN of its own: one session, opened again when it is lost."""

    def __init__(self, dsn: str, clock: Callable[[], float]) -> None:
        self._dsn = dsn
        self._clock = clock
        self._connection: Any = None
        self._failed: tuple[float, str] | None = None
        self._in_time = InTime(self._answer, "roir-replica")

    def ask(self) -> tuple[int | None, float | None, str]:
        """The replica's position, the age of its last replayed transaction, and why there is no position."""
        if self._failed is not None and self._clock() - self._failed[0] < ASK_AGAIN_S:
            return None, None, self._failed[1]
        try:
            in_recovery, position, age = self._in_time.ask(PATIENCE_S)
        except TimeoutError:
            return None, None, "no answer yet"
        except (psycopg2.Error, InvalidInput) as error:
            self.close()
            said = str(error).strip().split("\n", 1)[0]
            self._failed = (self._clock(), said or "doesn't answer")
            return None, None, self._failed[1]
        self._failed = None
        return position, age, "is no replica: it is not in recovery" if not in_recovery else "has replayed nothing yet"

    def _answer(self) -> tuple[bool, int | None, float | None]:
        if self._connection is None:
            # An error must not quote a DSN that can't be read: that may be a part of the password.
            check_dsn(self._dsn)
            self._connection = psycopg2.connect(
                self._dsn,
                application_name="roir governor",
                connect_timeout=TIMEOUT_S,
                tcp_user_timeout=TIMEOUT_S * 1000,
            )
        with self._connection, self._connection.cursor() as cursor:
            # Only for this transaction: a pooler gives the session to others afterwards.
            cursor.execute(f"SET LOCAL statement_timeout = '{TIMEOUT_S}s'")
            cursor.execute(OWN)
            in_recovery, position, age = cursor.fetchone()
        return in_recovery, position, age

    def close(self) -> None:
        # While an answer is outstanding, only the thread may use the session.
        if self._connection is not None and not self._in_time.is_owed:
            self._connection.close()
            self._connection = None


def _badness(state: ReplicaState) -> float:
    return float("inf") if state.bytes is None else state.bytes
