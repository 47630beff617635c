"""How often a source is written to: by the server's statistics, or counted for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.source.source import Source
from airflow_roir.quantity import duration

# Statistics that are younger tell of a load, or of a quiet hour.
FEWEST_S = 3_600.0

# What a session has written is counted a second or more after its commit. Without a reset nobody knows since when the
# server counts, but it does since its start.
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
    """Rows a second, and what that stands on."""

    inserts: float
    updates: float
    deletes: float
    by: str

    @property
    def rows(self) -> float:
        """All writes."""
        return self.inserts + self.updates + self.deletes

    @property
    def most_entries(self) -> float:
        """Rows of a delta a second, at the most: an update of a key leaves two, one of any other column none."""
        return self.inserts + 2 * self.updates + self.deletes


def by_statistics(connection: Connection, source: Source, least_s: float = FEWEST_S) -> WriteRate | None:
    """As the server counted until now, loads included; None if it hasn't counted for long."""
    row = _counted(connection, source)
    if row.seconds < least_s:
        return None
    return _rate(row.inserts, row.updates, row.deletes, row.seconds, f"the statistics of {duration(row.seconds)}")


def counted(
    database: Database, source: Source, seconds: float, wait: Callable[[float], object] = time.sleep
) -> WriteRate:
    """As the server counts it from now on, for `seconds`."""
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
