"""Two commands that change the entries that readers see. The first is held before its commit until the second waits for
it.

Afterwards the view shows the active generation, hides the recorded partitions, and has the table's rows for every
snapshot. Seen to fail if the facts for the view are read before its lock.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2.errors
import pytest
from sqlalchemy import event

from airflow_roir.engine import clean_up, publish, revert
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, remove_entries, sync
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import InvalidInput, LockNotAcquired, OperationFailed, PartitionsChanged
from tests.conftest import database_dsn, run_sql
from tests.engine import compacting, steps
from tests.engine.compacting import act
from tests.engine.interposed import before
from tests.engine.steps import sql
from tests.engine.test_locks import in_thread, wait_until, watching

pytestmark = pytest.mark.sample(1)

PATIENT = Limits(attempt_ms=5000, clean_up_s=60)
WAITS = (
    "SELECT count(*) > 0 FROM pg_stat_activity WHERE application_name = 'second' AND wait_event_type = 'Lock' "
    "AND datname = current_database()"
)
# Statements that change the view or its parts.
CHANGES = re.compile(
    r"CREATE (OR REPLACE )?VIEW|SELECT roir\.(refresh_view|detach_partition|begin_attach|finish_attach|forget_gone)\("
)
TABLE, VIEW = ("SELECT d, id, k, v FROM public." + name for name in ("t", "ix"))
DIFFERENCE = f"SELECT count(*) FROM (({TABLE} EXCEPT ALL {VIEW}) UNION ALL ({VIEW} EXCEPT ALL {TABLE})) x"
SHOWN = """
SELECT DISTINCT g.status, pg_get_viewdef('public.ix'::regclass) LIKE '%NOT %', EXISTS (
         SELECT FROM roir.source_partition p WHERE p.generation_id = g.id AND p.status <> 'present')
  FROM roir.generation g JOIN pg_depend d ON d.refobjid = to_regclass('roir_data.g' || g.id)
  JOIN pg_rewrite r ON r.oid = d.objid WHERE r.ev_class = 'public.ix'::regclass
"""
# True if a partition went without roir, which is the sync's task.
GONE = """
SELECT EXISTS (SELECT FROM roir.generation g, roir.partition_changes(g.id, 't'::regclass) c
                WHERE g.status = 'active' AND c.gone)
"""
SOURCE = (
    "CREATE TABLE t (d int, id int, k text, v int, PRIMARY KEY (d, id)) PARTITION BY RANGE (d)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}0) TO ({n + 1}0)" for n in range(7)),
    "INSERT INTO t SELECT i % 70, i, nullif(i % 7, 3)::text, i FROM generate_series(1, 350) i",
    *(f"CREATE TABLE n{n} (LIKE t INCLUDING ALL)" for n in (7, 8)),
    *(f"INSERT INTO n{n} SELECT {n}0 + i % 10, i, 'n', i FROM generate_series(1, 40) i" for n in (7, 8)),
    "ANALYZE t",
)


def scene(dsn: str, compacted: bool) -> None:
    """A generation to revert to, one that is shown, and one to publish, or a compaction; t6 has left."""
    database = Database(dsn, "roir tests")
    run_sql(dsn, *SOURCE)
    steps.make_index(database, include="v", segments=2)
    steps.make_index(database, table=None, keys=None, segments=2)
    if compacted:
        compacting.begin(database, act("rewrite", 1), lock_patience_s=60, lock_timeout_ms=900)
    else:
        steps.folded(database, table=None, keys=None, lock_patience_s=60, lock_timeout_ms=900)
        run_sql(dsn, "SELECT roir.detach_partition('t6')")
    database.engine.dispose()


@pytest.fixture(scope="module")
def template(server: str) -> Iterator[Callable[[bool], str]]:
    """A function that gives the name of a scene's database, made at the first call."""
    made: dict[bool, str] = {}

    def make(compacted: bool) -> str:
        if compacted not in made:
            made[compacted] = f"view_races_{int(compacted)}"
            run_sql(server, f"CREATE DATABASE {made[compacted]} TEMPLATE roir_template")
            scene(database_dsn(server, made[compacted]), compacted)
        return made[compacted]

    yield make
    for name in made.values():
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


def compact(database: Database, _: int) -> None:
    """Does the compaction's one unit, as far as it gets."""
    worker = compacting.worker(database, start_run(database, "ix", "test", take_over=True))
    try:
        at = worker.claim()
        while isinstance(at, UnitClaim):
            done = worker.step(at)
            at = done.rest if isinstance(done, Step) else None
    finally:
        worker.connection.close()


def remove(database: Database, _: int) -> None:
    """Removes the entries of t6 as a clean-up does, without the clean-up's earlier steps, which would wait."""
    with database.transaction() as connection:
        leaving = remove_entries.leaving(connection)
    for row in leaving:
        remove_entries.remove(database, row, print, 60)


# The number, 0 or 1, lets both commands be the same.
COMMANDS: dict[str, Callable[[Database, int], object]] = {
    "detach": lambda database, number: detach.detach_partition(database, f"t{1 + number}", "test"),
    "clean-up": lambda database, _: clean_up.clean_up(database),
    "removal": remove,
    "attach": lambda database, number: attach.attach_partition(
        database, "t", f"n{7 + number}", f"FOR VALUES FROM ({7 + number}0) TO ({8 + number}0)", "test", patience_s=3
    ),
    "publish": lambda database, _: publish.publish(database, start_run(database, "ix", "test", take_over=True)),
    "revert": lambda database, _: revert.revert(database, "ix", "test"),
    "sync": lambda database, _: sync.sync_partitions(database, "t", "test"),
    "compact": compact,
}
# The first command is held before these of its commits that change readers' entries. The last one of all is the end of
# a removal, or of the guard.
MOMENTS = {
    "detach": (1, 3),
    "clean-up": (2, 4),
    "removal": (2,),
    "attach": (1, 2),
    "publish": (1,),
    "revert": (1,),
    "sync": (2, 5),
    "compact": (1,),
}

# Commands that have one thing to do in a scene.
ONCE = ("publish", "compact", "removal")


def members() -> Iterator[Any]:
    for first, second in itertools.product(COMMANDS, repeat=2):
        if {"compact", "publish"} <= {first, second} or (
            first == second and first in ("publish", "compact", "removal")
        ):
            continue
        for at in MOMENTS[first]:
            yield pytest.param(first, at, second, id=f"{first} {at} and {second}")


def right(session: Any) -> bool:
    """True if the view has the table's rows, or refuses the snapshot."""
    try:
        sql(session, "SAVEPOINT s")
        return sql(session, DIFFERENCE) == [(0,)]
    except psycopg2.errors.SerializationFailure:
        return True
    finally:
        sql(session, "ROLLBACK TO s")


@pytest.mark.sample(0)
@pytest.mark.parametrize(("first", "at", "second"), list(members()))
def test_two_who_change_what_readers_see(
    template: Callable[[bool], str], server: str, first: str, at: int, second: str
) -> None:
    """Found: a clean-up, detach, attach or sync made the view again beside another one that held it: the view forgot to
    hide what the other one had written down, and showed entries that no row has. It holds: what a view is made of is
    held, and read under that (`roir.hold_view`). Found: two `roir sync-partitions` of one table: the second one failed
    with a server's error (23502). It holds: what another one has written down is left alone.
    """
    name = f"view_race_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template('compact' in (first, second))}")
    try:
        one_beside_another(database_dsn(server, name), first, at, second)
    finally:
        run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


_numbers = itertools.count(1)


def one_beside_another(dsn: str, first: str, at: int, second: str) -> None:
    if "sync" in (first, second):
        run_sql(dsn, "DROP TABLE t5")
    watch = watching(dsn)
    databases = [Database(dsn, name, limits=PATIENT) for name in ("first", "second")]
    held, go, seen = threading.Event(), threading.Event(), [0, 0]

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen[1] |= bool(CHANGES.match(statement.lstrip()))

    def commit(_connection: Any) -> None:
        seen[0] += seen[1]
        if seen[1] and seen[0] == at:
            held.set()
            go.wait(60)
        seen[1] = 0

    event.listen(databases[0].engine, "before_cursor_execute", look)
    event.listen(databases[0].engine, "commit", commit)
    threads = [in_thread(lambda: COMMANDS[first](databases[0], 0))]
    while threads[0][0].is_alive() and not held.wait(0.02):
        pass
    if not held.is_set():
        pytest.skip(f"it has {seen[0]} such commits here")
    old = steps.old_session(dsn)
    threads.append(in_thread(lambda: COMMANDS[second](databases[1], 1)))
    while threads[1][0].is_alive() and not sql(watch, WAITS)[0][0]:
        threads[1][0].join(0.02)
    go.set()
    for thread, failed in threads:
        thread.join(120)
        assert not thread.is_alive()
        for error in failed:
            assert isinstance(error, LockNotAcquired | PartitionsChanged | OperationFailed), error
    for database in databases:
        database.engine.dispose()

    plain = Database(dsn, "third")
    sessions = [steps.session(dsn), old]
    for _ in range(2):
        [(status, hides, told)] = sql(watch, SHOWN)
        assert (status, hides) == ("active", told)
        if not sql(watch, GONE)[0][0]:
            assert [right(session) for session in sessions] == [True, True]
        sessions[0].rollback()
        clean_up.clean_up(plain)
    for session in sessions:
        session.close()
    if "sync" in (first, second):
        sync.sync_partitions(plain, "t", "test")
    clean_up.clean_up(plain)
    wait_until(watch, "SELECT count(*) = 0 FROM roir.source_partition WHERE status = 'leaving'")
    assert steps.assert_exact(plain).extra == 0
    plain.engine.dispose()
    watch.close()


def test_options_that_are_set_meanwhile_stay(database: Database, dsn: str) -> None:
    """Seen to be forgotten if they are read before the view's lock."""
    run_sql(dsn, *SOURCE)
    steps.make_index(database, include="v")
    with before(database, "ALTER VIEW", lambda: run_sql(dsn, "ALTER VIEW ix SET (security_barrier = true)")):
        assert clean_up.clean_up(database).guards_removed == 1
    options = "SELECT reloptions::text FROM pg_class WHERE relname = 'ix'"
    assert sql(steps.session(dsn), options) == [("{security_barrier=true}",)]


@pytest.mark.by_hand("sweeps")
def test_an_attach_that_is_cancelled_before_its_last_step_has_its_lock_does_not_end(
    database: Database, dsn: str
) -> None:
    """Found: an attach that was cancelled while its last step waited was attached all the same, and not registered. It
    holds: asked under the table's lock.
    """
    run_sql(dsn, *SOURCE)
    steps.make_index(database, include="v")
    bounds = "FOR VALUES FROM (70) TO (80)"
    user, watch = steps.session(dsn), watching(dsn)
    other = Database(dsn, "second", limits=PATIENT)
    threads: list[Any] = []

    def cancel() -> None:
        """The cancel doesn't wait; the attach's last step waits for the cancel's commit."""
        if not threads:
            sql(user, "SELECT roir.cancel_attach('n7')")
            threads.append(in_thread(commit))

    def commit() -> None:
        wait_until(watch, WAITS)
        user.commit()

    with before(other, "SELECT roir.finish_attach", cancel), pytest.raises(InvalidInput, match="any more"):
        attach.attach_partition(other, "t", "n7", bounds, "test")
    [(thread, failed)] = threads
    thread.join()
    assert not failed
    clean_up.clean_up(database)
    assert steps.assert_exact(database).rows == 350
    assert sql(watch, "SELECT relispartition FROM pg_class WHERE relname = 'n7'") == [(False,)]
    run_sql(dsn, "INSERT INTO n7 VALUES (75, 900, 'x', 1)")
