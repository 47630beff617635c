"""A compaction, step by step: its units advance by one transaction at a time, so that tests can act in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.compact.worker import CompactWorker, finish
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import LockNotAcquired
from airflow_roir.options import CompactOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# Attempts at locks end at once, so that a test decides who gives way.
AT_ONCE = {"lock_timeout_ms": 20, "lock_patience_s": 0}
# A unit of a table that fits into a few blocks takes some ten steps.
MOST_STEPS = 60
# The tables, functions and triggers that a unit has created and that still exist.
LEFT_OVER = """
SELECT c.oid::regclass::text FROM pg_class c
 WHERE c.relnamespace = 'roir_data'::regnamespace AND c.relkind IN ('r', 'p')
   AND (c.relname ~ '_u\\d+' OR c.relname ~ '^g\\d+_s\\d+$'
        AND NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid))
UNION ALL
SELECT p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'roir_data'::regnamespace AND p.proname ~ '_touch$'
UNION ALL
SELECT t.tgname || ' on ' || t.tgrelid::regclass FROM pg_trigger t WHERE t.tgname = 'roir_touch'
UNION ALL
SELECT 'constraint of ' || c.conrelid::regclass FROM pg_constraint c WHERE c.conname = 'roir_bounds'
   AND c.connamespace = 'roir_data'::regnamespace
"""


def small(dsn: str, blocks: int = 1) -> Database:
    """A database whose workers copy this many blocks at once."""
    return Database(dsn, "roir tests", limits=Limits(compaction_blocks=blocks, table_lock_ms=20))


def act(kind: str, *ordinals: int, parts: int = 1) -> Action:
    """An action whose figures don't matter."""
    return Action(Kind(kind), ordinals, parts, 1000, 500, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, "asked for")


def begin(database: Database, *actions: Action, index: str = "ix", **options: object) -> Run:
    """Begins a compaction of these actions; returns a run of it."""
    given = {**AT_ONCE, "parallelism": 1, **options}
    compaction.begin(database, index, actions, CompactOptions(**given), "test")  # type: ignore[arg-type]
    return start_run(database, index, "test", take_over=True)


def worker(database: Database, run: Run, number: int = 0) -> CompactWorker:
    """A worker to be stepped, in a session of its own. The session ends with the process."""
    connection = database.engine.connect()
    with connection.begin():
        job = load_job(connection, run)
    return CompactWorker(database, connection, job, number)


def stages(database: Database, run: Run, one: CompactWorker | None = None) -> Iterator[str]:
    """Goes through all units of a run with one worker. Yields the next step before each step, and once more at the end.

    A step that gets no lock is yielded again, so that the session that holds the lock has its turn first.
    """
    one = one or worker(database, run)
    claim = one.claim()
    taken = 0
    while isinstance(claim, UnitClaim):
        at: UnitClaim | None = claim
        while at is not None:
            yield f"{at.ordinal} {at.status.value}"
            taken += 1
            assert taken < MOST_STEPS, "it doesn't end"
            try:
                at, _ = one.advance(at)
            except LockNotAcquired:
                continue
        claim = one.claim()
    finish(database, run)
    one.connection.close()
    yield "done"


def compact(database: Database, *actions: Action, between: Callable[[str], object] = lambda stage: None) -> None:
    """Does a whole compaction. between: called before each step."""
    run = begin(database, *actions)
    for stage in stages(database, run):
        between(stage)


def writes(dsn: str, every: int = 10) -> None:
    """Writes of each kind, each time to other rows. every: at most one row in this many is deleted."""
    run_sql(
        dsn,
        "UPDATE t SET v = v + 1000 WHERE id % 40 = 1",
        "UPDATE t SET k = ((k::int + 1) % 5)::text WHERE id % 40 = 2",
        f"DELETE FROM t WHERE id IN (SELECT id FROM t WHERE id % {every} = 3 ORDER BY id LIMIT 2)",
        "INSERT INTO t SELECT max(id) + 1, '3', 1 FROM t",
    )


def segments(dsn: str) -> list[int]:
    """The ordinals of all segments, in the order of keys, the default one first."""
    rows = sql(steps.session(dsn), "SELECT ordinal, lower, upper FROM roir.segment")
    following = {(tuple(lower) if lower else None): (ordinal, upper) for ordinal, lower, upper in rows if ordinal}
    found, at = [0], None
    while at in following:
        ordinal, upper = following.pop(at)
        found.append(ordinal)
        at = tuple(upper) if upper else None
        if at is None:
            break
    return found


def left_over(dsn: str) -> list[str]:
    """The objects that remain of units that have ended."""
    with steps.session(dsn) as user:
        return [name for (name,) in sql(user, LEFT_OVER)]


def scene(dsn: str, segments: int = 2, rows: int = 200, **options: Any) -> Database:
    """Creates table `t` with its index `ix`; returns a database whose workers take small steps."""
    steps.make_table(dsn, rows)
    database = small(dsn)
    steps.make_index(database, keys="k,v", segments=segments, **options)
    return database


def is_right(database: Database) -> None:
    """Checks that the index is exact, nothing is left over, and no warning is given."""
    steps.assert_exact(database)
    assert left_over(database.dsn) == []
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
