"""The plan names every lock on the user's tables: the server shows the locks that a build's sessions hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, lifecycle, prepare, publish, switch
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import forecast, locks
from airflow_roir.engine.forecast.locks import ACCESS_EXCLUSIVE, ACCESS_SHARE, EACH, SHARE_ROW_EXCLUSIVE, Lock
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.hostile import PLAIN, Scene
from tests.engine.hostile import ROWS as ROWS_OF_HIS

pytestmark = pytest.mark.sample(1)

# The modes that each mode contains.
WEAKER = {
    ACCESS_SHARE: {ACCESS_SHARE},
    SHARE_ROW_EXCLUSIVE: {ACCESS_SHARE, "ROW SHARE", "ROW EXCLUSIVE", "SHARE", SHARE_ROW_EXCLUSIVE},
}
HELD = """
SELECT DISTINCT c.oid::bigint, c.relkind::text,
       ltrim(upper(regexp_replace(replace(l.mode, 'Lock', ''), '([A-Z])', ' \\1', 'g')))
  FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE l.pid = %s AND l.granted AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
   AND n.nspname NOT IN ('roir', 'roir_data', 'pg_catalog', 'pg_toast', 'information_schema')
"""
Seen = set[tuple[int, str, str]]


@contextmanager
def watching(database: Database) -> Iterator[Seen]:
    """Collects the locks that a session holds after each of its statements in the block. A lock lasts to the end of its
    transaction.
    """
    seen: Seen = set()
    watch = steps.session(database.dsn)
    watch.autocommit = True

    def look(_connection: Any, cursor: Any, *_: Any) -> None:
        seen.update(steps.sql(watch, HELD, cursor.connection.info.backend_pid))

    event.listen(database.engine, "after_cursor_execute", look)
    try:
        yield seen
    finally:
        event.remove(database.engine, "after_cursor_execute", look)
        watch.close()


def is_named(lock: Lock, relation: int, kind: str, mode: str, leaves: set[int]) -> bool:
    """True if the plan's lock is on that relation, and at least as strong."""
    of = {locks.VIEW: kind == "v", locks.SOURCE: kind != "v", locks.LEAF: relation in leaves}[lock.of]
    return of and (lock.mode == ACCESS_EXCLUSIVE or mode in WEAKER[lock.mode])


def compare_with_plan(foreseen: list[Lock], phases: dict[str, Seen], leaves: set[int]) -> None:
    """Checks that every lock that is taken is named, and every lock that is named is taken."""
    for phase, seen in phases.items():
        # Prepare also does the plan.
        named = {phase, EACH} | ({"plan"} if phase == "prepare" else set())
        mine = [lock for lock in foreseen if lock.phase in named]
        unnamed = [one for one in seen if not any(is_named(lock, *one, leaves) for lock in mine)]
        assert not unnamed, (phase, unnamed)
    for lock in foreseen:
        where = phases.values() if lock.phase == EACH else [phases[lock.phase]]
        taken = {mode for seen in where for relation, of, mode in seen if is_named(lock, relation, of, mode, leaves)}
        assert lock.mode in taken, lock


def watch_build(database: Database, definition: IndexDefinition, options: BuildOptions, table: str) -> None:
    phases: dict[str, Seen] = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        with watching(database) as seen:
            done = work()
        phases[name] = seen
        return done

    planned = phase("plan", partial(forecast.run, database, definition, options, with_trial=True))
    prepared = phase("prepare", partial(prepare.prepare, database, definition, options, "test"))
    run = start_run(database, prepared.index, "test")
    run_sql(database.dsn, f"UPDATE {table} SET k = k || 'x' WHERE id % 3 = 0")
    phase("build", partial(steps.build_all, database, run))
    phase("seal", partial(steps.seal_all, database, run))
    phase("switch", partial(switch.switch, database, run))
    phase("fold", lambda: steps.fold_delta(database, run))
    phase("publish", partial(publish.publish, database, run))
    phase("verify", partial(lifecycle.verify, database, prepared.index, VerifyOptions(), "test"))
    phase("clean-up", partial(clean_up.clean_up, database))
    steps.assert_exact(database, prepared.index)
    foreseen = locks.foresee(planned.source, planned.index, planned.kind, options, database.limits)
    compare_with_plan(foreseen, phases, set(planned.source.leaves))


SHAPES = {
    "plain": ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)",),
    "partitioned": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (50) TO (1000) PARTITION BY RANGE (id)",
        "CREATE TABLE t21 PARTITION OF t2 DEFAULT",
    ),
}
ROWS = "INSERT INTO {} SELECT i, i::text, i FROM generate_series(1, 100) i"


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_build_takes_the_locks_that_its_plan_names(
    database: Database, dsn: str, shape: str, unique: bool, scan: str
) -> None:
    run_sql(dsn, *SHAPES[shape], ROWS.format("t"), "ANALYZE t")
    options = BuildOptions(revert_window_s=0, scan=scan, segments=3, ranges=3)
    watch_build(database, IndexDefinition.parse("ix", "t", "k", "v", unique), options, "t")
    watch_build(database, IndexDefinition.parse("ix"), options, "t")


@pytest.mark.by_hand("sweeps")
def test_of_a_table_of_another_owner_too(scene: Scene) -> None:
    scene.as_owner(PLAIN, ROWS_OF_HIS)
    options = BuildOptions(revert_window_s=0)
    definition = IndexDefinition.parse("evil.ix", "evil.t", "k", "v")
    watch_build(scene.database, definition, options, "evil.t")
    watch_build(scene.database, IndexDefinition.parse("evil.ix"), options, "evil.t")
