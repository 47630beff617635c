"""The rate of writes to a source: by the server's statistics, or counted for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.source.source import Source
from airflow_roir.quantity import duration

# Statistics of a shorter time may be those of a load, or of a quiet hour.
FEWEST_S = 3_600.0

# The server counts a session's writes a second or more after its commit. If the statistics were never reset, the server
# has counted at least since its start.
COUNTED = """
SELECT coalesce(sum(pg_stat_get_tuples_inserted(r)), 0)::bigint AS inserts,
       coalesce(sum(pg_stat_get_tuples_updated(r)), 0)::bigint AS updates,
       coalesce(sum(pg_stat_get_tuples_deleted(r)), 0)::bigint AS deletes,
       (SELECT extract(epoch FROM clock_timestamp() - coalesce(pg_stat_get_db_stat_reset_time(oid),
                                                               pg_postmaster_start_time()))::float8
          FROM pg_database WHERE datname = current_database()) AS seconds
  FROM unnest(%(leaves)s::oid[]) r
"""


@dataclass(frozen=True)
class WriteRate:
    """The writes of each kind, in rows a second. by: the source of the figures."""

    inserts: float
    updates: float
    deletes: float
    by: str

    @property
    def rows(self) -> float:
        """The rate of all writes."""
        return self.inserts + self.updates + self.deletes

    @property
    def most_entries(self) -> float:
        """The most rows of a delta a second: an update of a key leaves two, of a column outside of the index none."""
        return self.inserts + 2 * self.updates + self.deletes


def by_statistics(connection: Connection, source: Source, least_s: float = FEWEST_S) -> WriteRate | None:
    """The rate by the server's counts until now, loads included; None if it hasn't counted for long."""
    row = _counted(connection, source)
    if row.seconds < least_s:
        return None
    return _rate(row.inserts, row.updates, row.deletes, row.seconds, f"the statistics of {duration(row.seconds)}")


def counted(
    database: Database, source: Source, seconds: float, wait: Callable[[float], object] = time.sleep
) -> WriteRate:
    """The rate by the server's counts of the next `seconds`."""
    begun = time.monotonic()
    with database.transaction() as connection:
        first = _counted(connection, source)
    wait(seconds)
    with database.transaction() as connection:
        last = _counted(connection, source)
    took = max(time.monotonic() - begun, seconds)
    inserts, updates, deletes = (max(0, b - a) for a, b in zip(first[:3], last[:3], strict=True))
    return _rate(inserts, updates, deletes, took, f"a count of {duration(took)}")


def _counted(connection: Connection, source: Source) -> Row[Any]:
    return execute(connection, COUNTED, {"leaves": list(source.leaves)}).one()


def _rate(inserts: float, updates: float, deletes: float, seconds: float, by: str) -> WriteRate:
    return WriteRate(inserts / seconds, updates / seconds, deletes / seconds, by)
