"""Our sessions that wait for a lock, and the sessions that block them: for `roir status`, with and without operations.

Attempts at a lock last half a second, with rests of two, and each is a session of its own. So a look at the server's
sessions would mostly find none: `Attempts` writes a row after each failed attempt, and deletes it at the end. A process
that was killed leaves its row, which soon no longer counts. Workers, whose statements wait for longer, are found among
the sessions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.as_json import plain_fields
from airflow_roir.definition import QualifiedName, parse_name
from airflow_roir.engine.database import Database, execute

# As long as a heartbeat is fresh: enough for an attempt, with its work before the lock, and the rest after it.
FRESH_S = 30

BEGIN = """
INSERT INTO roir.lock_wait (command, index_name, wanted, blocked_by, waiter)
VALUES (%(command)s, %(index)s, %(wanted)s, %(blocked_by)s, %(waiter)s) RETURNING id
"""
GO_ON = "UPDATE roir.lock_wait SET blocked_by = %(blocked_by)s, seen_at = clock_timestamp() WHERE id = %(id)s"
END = """
DELETE FROM roir.lock_wait
 WHERE id = %(id)s OR seen_at < clock_timestamp() - make_interval(secs => %(fresh)s)
"""
WAITS = """
SELECT w.command, w.index_name, w.wanted, w.blocked_by, w.waiter, w.since FROM roir.lock_wait w
 WHERE w.seen_at > clock_timestamp() - make_interval(secs => %(fresh)s)
 ORDER BY w.since, w.id
"""
# The name of a worker's session has its operation, and its index as far as it fits.
WORKERS = r"""
SELECT CASE WHEN o.kind IN ('create', 'rebuild') THEN o.phase ELSE o.kind END AS command,
       quote_ident(i.schema_name) || '.' || quote_ident(i.name) AS index_name,
       coalesce(l.relation::regclass::text, l.locktype) AS wanted,
       string_agg(CASE WHEN b.pid IS NULL THEN 'a prepared transaction'
                       ELSE format('pid %s (%s, transaction open for %s s, %s)', b.pid,
                                   coalesce(nullif(concat_ws(' of ', nullif(b.application_name, ''), b.usename), ''),
                                            b.backend_type, 'unknown'),
                                   coalesce(extract(epoch FROM clock_timestamp() - b.xact_start), 0)::int,
                                   coalesce(b.state, 'active')) END, '; ' ORDER BY b.pid) AS blocked_by,
       a.application_name || ' pid ' || a.pid AS waiter,
       l.waitstart AS since
  FROM pg_stat_activity a
  JOIN roir.operation o ON o.id = substring(a.application_name FROM '^roir (\d{1,18})\.\d+ worker ')::bigint
  JOIN roir.index i ON i.id = o.index_id
  JOIN pg_locks l ON l.pid = a.pid AND NOT l.granted
 CROSS JOIN LATERAL (SELECT DISTINCT p FROM unnest(pg_blocking_pids(a.pid)) p) blocking
  LEFT JOIN pg_stat_activity b ON b.pid = blocking.p
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
 GROUP BY o.kind, o.phase, i.schema_name, i.name, l.relation, l.locktype, a.application_name, a.pid, l.waitstart
 ORDER BY l.waitstart
"""


@dataclass(frozen=True)
class LockWait:
    """A process of roir that waits for a lock. index: None if the command is for several; wanted: the relation."""

    command: str
    index: str | None
    wanted: str
    blocked_by: str
    waiter: str
    since: datetime | None

    def is_for(self, name: QualifiedName) -> bool:
        """True if the wait is for the index of that name; a name without schema fits any schema."""
        if self.index is None:
            return False
        own = parse_name(self.index, "index")
        return own.name == name.name and name.schema in (None, own.schema)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON shows them."""
        return plain_fields(self)

    def __str__(self) -> str:
        """One line for users."""
        what = self.command if self.index is None else f"{self.command} of index {self.index}"
        since = "" if self.since is None else f" since {self.since:%H:%M:%S} UTC"
        return f"{what} waits{since} for a lock on {self.wanted}, blocked by {self.blocked_by}"


def lock_waits(connection: Connection) -> list[LockWait]:
    """All processes of roir that wait for a lock, as of their last attempt, the longest wait first."""
    rows = [*execute(connection, WAITS, {"fresh": FRESH_S}), *execute(connection, WORKERS)]
    return [LockWait(*row) for row in rows]


@dataclass(frozen=True)
class Waiter:
    """The command that attempts a lock, and its index, if it is for a single one."""

    command: str
    index: str | None = None


class ShownWait:
    """The row that shows a waiter: written after its first failed attempt, deleted at the end."""

    def __init__(self, database: Database, waiter: Waiter, wanted: str) -> None:
        self._database = database
        self._waiter = waiter
        self._wanted = wanted
        self._id: int | None = None

    def show(self, connection: Connection, blocked_by: str) -> None:
        """Write down the sessions for which it waits."""
        if self._id is not None and execute(connection, GO_ON, {"id": self._id, "blocked_by": blocked_by}).rowcount:
            return
        values = {
            "command": self._waiter.command,
            "index": self._waiter.index,
            "wanted": self._wanted,
            "blocked_by": blocked_by,
            "waiter": self._database.application_name,
        }
        self._id = int(execute(connection, BEGIN, values).scalar_one())

    def end(self) -> None:
        """Delete the row, and the rows that killed processes left. If the server is out of reach, the row ages."""
        if self._id is not None:
            with suppress(DBAPIError), self._database.transaction() as connection:
                execute(connection, END, {"id": self._id, "fresh": FRESH_S})
