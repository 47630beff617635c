"""A clean-up completes: beside what is broken of one index, another clean-up, a drop, an abort, a TRUNCATE."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event

from airflow_roir.engine import abort, clean_up, drop
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import LockNotAcquired, NotFound
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_locks import in_thread, watching

pytestmark = pytest.mark.sample(1)

SOURCE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (50)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (50) TO (200)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 100) i",
    "CREATE TABLE u (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO u SELECT i, (i % 5)::text, i FROM generate_series(1, 100) i",
    "ANALYZE t, u",
)
BROKEN = {
    "view renamed": "ALTER VIEW broken RENAME TO other",
    "view's column renamed": "ALTER VIEW broken RENAME COLUMN k TO other",
    "view dropped": "DROP VIEW broken",
    "view is a table": "ALTER VIEW broken RENAME TO other; CREATE TABLE broken (k text)",
    "view is another view": "ALTER VIEW broken RENAME TO other; CREATE VIEW broken AS SELECT 1 AS k",
    "view moved": "CREATE SCHEMA s; ALTER VIEW broken SET SCHEMA s",
    "view reads more": "DROP VIEW broken; CREATE VIEW broken AS SELECT c1 AS k FROM roir_data.g2",
    "view's owner": "CREATE ROLE {role}; ALTER VIEW broken OWNER TO {role}",
    "delta renamed": "ALTER TABLE roir_data.g2_delta RENAME TO lost",
    "delta dropped": "DROP TABLE roir_data.g2_delta",
    "delta's column renamed": "ALTER TABLE roir_data.g2_delta RENAME state TO other",
    "old base renamed": "ALTER TABLE roir_data.g1 RENAME TO lost",
    "old base dropped": "DROP TABLE roir_data.g1 CASCADE",
    "function dropped": "DROP FUNCTION roir_data.capture_{oid} CASCADE",
    "source renamed": "ALTER TABLE t RENAME TO other",
    "source dropped": "DROP TABLE t CASCADE",
    "source's column dropped": "ALTER TABLE t DROP COLUMN k CASCADE",
    "source's primary key dropped": "ALTER TABLE t DROP CONSTRAINT t_pkey",
}


def two(database: Database, dsn: str) -> None:
    """`broken` on t and `ix` on u, each rebuilt, with a delta, a guard and a retired generation to remove."""
    run_sql(dsn, *SOURCE)
    for index, table in (("broken", "t"), ("ix", "u")):
        steps.finish_all(database, steps.begin(database, index, table)[1])
        steps.finish_all(database, steps.begin(database, index, None, None, revert_window_s=0)[1])


@pytest.fixture(scope="module")
def template(server: str) -> Iterator[str]:
    """Both indexes, made once, to be cloned."""
    name = "clean_up_template"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template")
    two(Database(database_dsn(server, name), "roir tests"), database_dsn(server, name))
    yield name
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def dsn(server: str, template: str) -> Iterator[str]:
    """A database with both indexes."""
    name = f"cleaned_{next(_numbers)}"
    run_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield database_dsn(server, name)
    run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


_numbers = itertools.count(1)


def walked(how: str) -> Any:
    """A parameter of each run if it is in the small sample; the others are in the sweep."""
    small = ("view renamed", "view's column renamed", "view is a table", "delta renamed", "source dropped")
    return pytest.param(how, marks=() if how in small else pytest.mark.sample(0))


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("how", list(map(walked, BROKEN)))
def test_what_is_broken_of_one_index_is_told_and_the_other_is_cleaned_up(
    database: Database, dsn: str, how: str
) -> None:
    """Found: one broken view stopped the whole clean-up. It holds: a warning; all else is cleaned up."""
    session = steps.session(dsn)
    [(oid, role)] = sql(session, "SELECT 't'::regclass::oid, 'owner_' || current_database()")
    session.close()
    run_sql(dsn, *BROKEN[how].format(oid=oid, role=role).split("; "))
    try:
        report = clean_up.clean_up(database)
    finally:
        if "{role}" in BROKEN[how]:
            run_sql(dsn, f"ALTER VIEW broken OWNER TO postgres; DROP ROLE {role}")
    session = steps.session(dsn)
    assert sql(session, "SELECT to_regclass('roir_data.g3'), to_regclass('roir_data.g4_delta')") == [(None, None)], how
    assert "roir.published" not in sql(session, "SELECT pg_get_viewdef('ix'::regclass)")[0][0]
    steps.assert_exact(database)
    named = [line for line in [*report.warnings, *report.waiting] if "broken" in line or "oid" in line or " t" in line]
    harmless = (
        "view's owner",
        "delta dropped",
        "old base dropped",
        "delta renamed",
        "old base renamed",
        "source renamed",
    )
    assert named or how in harmless, (report.warnings, report.waiting)


# A command that waits for the paused clean-up gives up.
IMPATIENT = Limits(attempt_ms=20, clean_up_s=0)


def drop_broken(database: Database) -> None:
    with suppress(LockNotAcquired, NotFound):
        drop.drop_index(database, "broken", "test", patience_s=0)


def truncate(database: Database) -> None:
    session = steps.session(database.dsn)
    sql(session, "SET lock_timeout = '20ms'")
    with suppress(steps.psycopg2.errors.LockNotAvailable):
        sql(session, "TRUNCATE t1")
        session.commit()
    session.close()


def stop(database: Database) -> None:
    """Aborts the build under way."""
    abort.abort(database, "young", "test", patience_s=0)


BESIDE: dict[str, Callable[[Database], object]] = {
    "clean-up": clean_up.clean_up,
    "drop": drop_broken,
    "truncate": truncate,
    "abort": stop,
}


WAITS = (
    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'other' AND wait_event_type = 'Lock' "
    "AND datname = current_database()"
)


def step_beside(database: Database, dsn: str, beside: str, at: int) -> int:
    """Runs one clean-up, and the other command before its statement number `at`; returns the number of statements."""
    if beside == "abort":
        steps.begin(database, "young", "u")
    other = Database(dsn, "other", IMPATIENT)
    seen = [0]
    watch = watching(dsn)
    others: list[tuple[threading.Thread, list[BaseException]]] = []

    def look(*_: Any) -> None:
        seen[0] += 1
        if seen[0] == at:
            # It runs to its end, or until it waits for a lock of the clean-up.
            others.append(in_thread(lambda: BESIDE[beside](other)))
            while others[0][0].is_alive() and not sql(watch, WAITS)[0][0]:
                pass

    event.listen(database.engine, "before_cursor_execute", look)
    event.listen(database.engine, "commit", look)
    try:
        report = clean_up.clean_up(database)
    finally:
        event.remove(database.engine, "before_cursor_execute", look)
        event.remove(database.engine, "commit", look)
    for thread, failed in others:
        thread.join()
        assert not failed, failed
    assert not [line for line in report.warnings if "does not exist" in line or "can't be cleaned up" in line]
    if beside == "drop":
        drop_broken(other)
        with suppress(NotFound):
            drop.drop_index(other, "broken", "test")
    clean_up.clean_up(database)
    for index in ("ix",) if beside == "drop" else ("ix", "broken"):
        steps.assert_exact(database, index)
    session = steps.session(dsn)
    left = sql(session, "SELECT count(*) FROM pg_class WHERE relname IN ('g1', 'g3', 'g2_delta', 'g4_delta')")
    session.close()
    assert left == [(0,)]
    return seen[0]


@pytest.mark.sample(0)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("at", range(1, 180, 3))
def test_at_no_statement_sees_anybody_that_another_one_was_faster(dsn: str, beside: str, at: int) -> None:
    """Found: two clean-ups at once: `UndefinedTable`. It holds: the second one looks again."""
    step_beside(Database(dsn, "roir tests", IMPATIENT), dsn, beside, at)


@pytest.mark.sample(0)
def test_two_commands_give_a_new_partition_its_trigger_once(database: Database, dsn: str) -> None:
    """Seen to fail with a trigger that existed already."""
    run_sql(dsn, "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (200) TO (300)")
    watch, other = watching(dsn), steps.session(dsn)
    sql(other, "SELECT roir.watch_truncate('t'::regclass)")
    reports: list[clean_up.CleanUpReport] = []
    cleaning = Database(dsn, "other", Limits(attempt_ms=20_000))
    thread, errors = in_thread(lambda: reports.append(clean_up.clean_up(cleaning)))
    while thread.is_alive() and not sql(watch, WAITS)[0][0]:
        pass
    other.commit()
    thread.join()
    assert not errors
    assert not [line for line in reports[0].warnings if "already exists" in line]
    steps.assert_exact(database, "broken")


@pytest.mark.sample(0)
def test_who_holds_a_view_for_himself_is_not_waited_for(dsn: str) -> None:
    """An open `roir.begin_attach` or detach holds the view like this. Seen to wait for good, silently."""
    holder = steps.session(dsn)
    [(view, schema)] = sql(
        holder,
        "SELECT format('%I.%I', schema_name, name), quote_ident(schema_name) FROM roir.index ORDER BY id LIMIT 1",
    )
    sql(holder, f"ALTER VIEW {view} SET SCHEMA {schema}")
    report = clean_up.clean_up(Database(dsn, limits=Limits(attempt_ms=50, clean_up_s=0)))
    [line] = [line for line in report.waiting if "can't be checked now" in line]
    assert view in line
    holder.close()


@pytest.mark.sample(0)
def test_who_holds_one_view_hides_no_warning_of_another_index(database: Database, dsn: str) -> None:
    """Seen to lose the warnings of all indexes."""
    run_sql(dsn, "ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    whole = clean_up.clean_up(database).warnings
    assert "row-level security" in "".join(whole)
    holder = steps.session(dsn)
    [(view, schema)] = sql(
        holder,
        "SELECT format('%I.%I', schema_name, name), quote_ident(schema_name) FROM roir.index "
        "WHERE name <> 'broken' AND dropped_at IS NULL ORDER BY id LIMIT 1",
    )
    sql(holder, f"ALTER VIEW {view} SET SCHEMA {schema}")
    report = clean_up.clean_up(Database(dsn, limits=Limits(attempt_ms=50, clean_up_s=0)))
    holder.close()
    assert report.warnings == whole
