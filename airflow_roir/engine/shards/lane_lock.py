"""One process at a time installs or removes what a lane has in its shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import LockNotAcquired

# Two processes at once would wait for each other's drain, and one that removes must not come before one that installs.
HOLD = "SELECT pg_try_advisory_lock(hashtext('roir lane'), %(lane)s::int)"
LET_GO = "SELECT pg_advisory_unlock(hashtext('roir lane'), %(lane)s::int)"


@contextmanager
def held(database: Database, lane_id: int) -> Iterator[None]:
    """Keep others from installing or removing it meanwhile. Raises LockNotAcquired."""
    with database.autocommit() as connection:
        if not execute(connection, HOLD, {"lane": lane_id}).scalar_one():
            raise LockNotAcquired(f"another process is about what lane {lane_id} has in its shard. Try again")
        try:
            yield
        finally:
            if not connection.invalidated:
                execute(connection, LET_GO, {"lane": lane_id})
