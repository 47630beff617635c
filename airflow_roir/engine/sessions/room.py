"""The workers that a server has connections for, so that an operation leaves some to the application."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import Connection

from airflow_roir.engine.database import execute
from airflow_roir.options import BuildOptions

# An operation's own sessions beside its workers: its driver, the governor, looks.
BESIDE_WORKERS = 10
# The most sessions of a worker: in the seal, one indexes a segment, one watches it, and one looks at the operation.
OF_WORKER = 3
# The share of a server's connections that stays free for sessions that come later.
SPARE = 0.1
SEEN = """
SELECT current_setting('max_connections')::int AS most, (SELECT sum(numbackends)::int FROM pg_stat_database) AS used,
       current_setting('superuser_reserved_connections')::int
       + coalesce(current_setting('reserved_connections', true)::int, 0) AS reserved
"""


def sessions_of(workers: int) -> int:
    """The most sessions of an operation with that many workers."""
    return OF_WORKER * workers + BESIDE_WORKERS


@dataclass(frozen=True)
class Room:
    """A server's connections. used: by all sessions now; reserved: for superusers and other roles."""

    most: int
    used: int
    reserved: int

    def left(self, workers: int) -> int:
        """The connections that stay free beside an operation with that many workers; negative if some lack."""
        return self.most - self.used - self.reserved - sessions_of(workers)

    @property
    def workers(self) -> int:
        """The most workers that leave a tenth of the connections free; at least the default, who wait for theirs."""
        return max(BuildOptions.parallelism, (self.left(0) - math.ceil(SPARE * self.most)) // OF_WORKER)

    def warning(self, parallelism: int) -> str | None:
        """A sentence if fewer workers than asked for can start."""
        if parallelism <= self.workers:
            return None
        return (
            f"only {self.workers} of {parallelism} workers start: {self.used} of the server's {self.most} connections "
            f"are used, a worker takes up to {OF_WORKER}, and some stay free for your application (max_connections)"
        )


def room_of(connection: Connection) -> Room:
    """The connections of the server now."""
    row = execute(connection, SEEN).one()
    return Room(row.most, row.used, row.reserved)
