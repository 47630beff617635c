"""The work on an index at night, and its cost: the sides of `make bench-young`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.database import Database
from benchmarks.engine import build_index
from benchmarks.young_tables import Churn

# As the launcher of PostgreSQL 18 decides with its default settings, of the server's own catalogs, too.
DUE = """
WITH settings AS (
  SELECT current_setting('autovacuum_vacuum_threshold')::float8 AS vacuum_base,
         current_setting('autovacuum_vacuum_scale_factor')::float8 AS vacuum_share,
         coalesce(current_setting('autovacuum_vacuum_max_threshold', true)::float8, 'infinity') AS vacuum_most,
         current_setting('autovacuum_vacuum_insert_threshold')::float8 AS insert_base,
         current_setting('autovacuum_vacuum_insert_scale_factor')::float8 AS insert_share,
         current_setting('autovacuum_analyze_threshold')::float8 AS analyze_base,
         current_setting('autovacuum_analyze_scale_factor')::float8 AS analyze_share)
SELECT * FROM (
  SELECT c.oid::regclass::text AS name,
         t.n_dead_tup > least(vacuum_base + vacuum_share * r.rows, vacuum_most)
         OR t.n_ins_since_vacuum > insert_base + insert_share * r.rows * r.unfrozen AS vacuums,
         t.n_mod_since_analyze > analyze_base + analyze_share * r.rows AS analyzes
    FROM settings, pg_stat_all_tables t JOIN pg_class c ON c.oid = t.relid
    CROSS JOIN LATERAL (
      SELECT greatest(c.reltuples, 0) AS rows,
             CASE WHEN c.relpages > 0 THEN 1 - least(1, (to_jsonb(c) ->> 'relallfrozen')::float8 / c.relpages)
                  ELSE 1 END AS unfrozen) r
   WHERE c.relkind IN ('r', 't') AND NOT 'autovacuum_enabled=false' = ANY (coalesce(c.reloptions, '{}'))) found
 WHERE vacuums OR analyzes ORDER BY name
"""
FILES = """
SELECT pg_relation_filenode(c.oid)::bigint, pg_relation_size(c.oid)::bigint
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'roir_data' AND c.relkind IN ('r', 'i')
"""
WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
BASE = """
SELECT format('roir_data.g%%s', g.id) FROM roir.generation g JOIN roir.index i ON i.id = g.index_id
 WHERE format('%%I.%%I', i.schema_name, i.name) = %s AND g.status = 'active'
"""


@dataclass(frozen=True)
class Cost:
    """The cost of some work: seconds, bytes of WAL, and bytes of files that weren't there before and have stayed."""

    seconds: float = 0.0
    wal: int = 0
    files: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.wal + other.wal, self.files + other.files)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.seconds * times, self.wal * times, self.files * times)


def cost_of(cursor: Any, work: Callable[[], object]) -> Cost:
    """Does it on a server that does nothing else; returns its cost."""
    cursor.execute(FILES)
    before = {file for file, _ in cursor.fetchall()}
    cursor.execute(WAL)
    [wal] = cursor.fetchone()
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    cursor.execute(WAL)
    [now] = cursor.fetchone()
    cursor.execute(FILES)
    return Cost(seconds, now - wal, sum(size for file, size in cursor.fetchall() if file not in before))


def autovacuum(cursor: Any, but: str | None = None) -> int:
    """Vacuum and analyze what autovacuum would, now; how many tables that were. The session is in autocommit mode.

    but: a schema that is left out.
    """
    cursor.execute("SELECT pg_stat_force_next_flush()")
    cursor.execute("SELECT pg_stat_clear_snapshot()")
    cursor.execute(DUE)
    due = [row for row in cursor.fetchall() if but is None or not row[0].startswith(f"{but}.")]
    for name, vacuums, analyzes in due:
        if vacuums:
            cursor.execute(f"VACUUM {'(ANALYZE) ' if analyzes else ''}{name}")
        else:
            cursor.execute(f"ANALYZE {name}")
    return len(due)


def base_of(cursor: Any, index: str) -> str:
    """The table of an index's entries, as readers see them."""
    cursor.execute(BASE, (index,))
    [base] = cursor.fetchone()
    return str(base)


# --- what is done at night


Step = Callable[[Database, Any, Churn], object]


def nothing(database: Database, cursor: Any, churn: Churn) -> None:
    """Autovacuum does what it does."""


def vacuum(database: Database, cursor: Any, churn: Churn) -> None:
    """All of the index, whether its thresholds are passed or not."""
    cursor.execute(f"VACUUM {base_of(cursor, churn.index)}")


def reindex(database: Database, cursor: Any, churn: Churn) -> None:
    """PostgreSQL's own rebuild of all B-trees. There are no writes at night here, so it needn't be CONCURRENTLY."""
    cursor.execute(f"REINDEX TABLE {base_of(cursor, churn.index)}")


def rebuild(database: Database, cursor: Any, churn: Churn) -> None:
    """Builds all of the index again; the replaced generation is dropped at once."""
    build_index(database, churn.definition, parallelism=1, segments=churn.segments)


def compact(database: Database, cursor: Any, churn: Churn) -> None:
    """Compacts the segments that the model chooses."""
    lifecycle.compact(database, churn.index, actor="bench", parallelism=1)
    clean_up.clean_up(database)


STEPS: dict[str, Step] = {
    "none": nothing,
    "vacuum": vacuum,
    "reindex": reindex,
    "rebuild": rebuild,
    "compact": compact,
}


@dataclass(frozen=True)
class Arm:
    """One side: what is done one after the other. Each step every night, or every N nights: `vacuum+compact/7`."""

    name: str
    steps: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Raises ValueError for a step that isn't known."""
        steps = []
        for one in name.split("+"):
            what, slash, nights = one.partition("/")
            if what not in STEPS or (slash and not (nights.isdigit() and int(nights) > 0)):
                raise ValueError(f"{name}: choose from {', '.join(STEPS)}, each with /N for every N nights")
            steps.append((what, int(nights or 1)))
        return cls(name, tuple(steps))

    def care(self, day: int) -> list[Step]:
        """The steps of the night after a day, the first one of which is 0."""
        return [STEPS[what] for what, nights in self.steps if (day + 1) % nights == 0 and what != "none"]

    @property
    def forgets(self) -> bool:
        """True if after each night nothing is left of what was before: one need not be done to know the next one."""
        return ("rebuild", 1) in self.steps
