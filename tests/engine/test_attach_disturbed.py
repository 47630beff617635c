"""While a table is being attached another session writes into its bounds, empties its source, or removes left entries.

The copied entries have no rows in the source yet. A session that asks the source whether an entry belongs therefore
removes them, and a row of the same primary key in the default partition has the same entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg2.errors
import psycopg2.extensions
import pytest
from sqlalchemy import event

from airflow_roir.engine import abort, clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach
from airflow_roir.errors import InvalidInput, LockNotAcquired
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.stages import Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE p1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE p2 PARTITION OF t FOR VALUES FROM (100) TO (200)",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 150) i",
    "CREATE TABLE p3 (LIKE t INCLUDING ALL)",
    "INSERT INTO p3 SELECT i, 'k', -i FROM generate_series(200, 210) i",
)
REST = "CREATE TABLE rest PARTITION OF t DEFAULT"
SPLIT = (
    "CREATE TABLE rest PARTITION OF t DEFAULT PARTITION BY RANGE (id)",
    "CREATE TABLE most PARTITION OF rest DEFAULT",
)
BOUNDS = "FOR VALUES FROM (200) TO (300)"
COMES, GOES = "INSERT INTO t VALUES (205, 'k', 205)", "DELETE FROM t WHERE id = 205"
# The moments of the attach: before the rows are copied, and when all are copied.
BEFORE, AFTER = "roir.validate_attach", "pg_current_xact_id()::text"


def meanwhile(database: Database, where: str, dsn: str, statements: Sequence[str]) -> None:
    """Runs the statements once, when the attach has come to `where`."""
    left = list(statements)

    def look(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if where in statement and left:
            now = left[:]
            left.clear()
            run_sql(dsn, *now)

    event.listen(database.engine, "before_cursor_execute", look)


def published(database: Database) -> None:
    steps.make_index(database, include="v")


CASES: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "comes and goes": ((REST,), AFTER, (COMES, GOES)),
    "comes and goes before": ((REST,), BEFORE, (COMES, GOES)),
    "comes and goes below": (SPLIT, AFTER, (COMES, GOES)),
    "moves in and on": (
        (REST,),
        AFTER,
        ("UPDATE t SET id = 205, k = 'k' WHERE id = 7", "UPDATE t SET id = 7 WHERE id = 205"),
    ),
    "default emptied": ((REST,), AFTER, (COMES, "TRUNCATE rest")),
    "default emptied of nothing": ((REST,), AFTER, ("TRUNCATE rest",)),
    "source emptied": ((), AFTER, ("TRUNCATE t",)),
    "source emptied and filled": ((REST,), AFTER, ("TRUNCATE t", "INSERT INTO t VALUES (1, 'a', 1), (900, 'k', 2)")),
    "default made": ((), AFTER, (REST, COMES, GOES)),
    "default gone": ((REST,), AFTER, (COMES, "SELECT roir.detach_partition('rest')")),
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("phase", ["mid-build", "mid-fold", "published"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_written_into_the_bounds_takes_no_entry_away(
    database: Database, dsn: str, case: str, phase: str
) -> None:
    """Found: attach: a row with the primary key of a copied one came into the default partition and went, or source or
    default partition were truncated: the copied entries went, silently. It holds: noted; they are copied again.
    """
    before, where, statements = CASES[case]
    run_sql(dsn, *TABLES, *before, "SELECT roir.guard()")
    stage = Stage(database, phase, include="v")
    meanwhile(database, where, dsn, statements)
    attach.attach_partition(database, "t", "p3", BOUNDS, "test")
    clean_up.clean_up(database)
    user = steps.session(dsn)
    assert sql(user, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'roir_joining%%'") == [(0,)]
    assert sql(user, "SELECT count(*) FROM roir.emptied WHERE generation_id = 0") == [(0,)]
    user.rollback()
    stage.finish()


@pytest.mark.parametrize("where", [BEFORE, AFTER])
def test_a_row_that_stays_in_the_bounds_keeps_its_entry(database: Database, dsn: str, where: str) -> None:
    """Found: attach: such a row stayed: its entry got the copied row's included values, and kept them when the attach
    was given up. It holds: the batch rolls back.
    """
    run_sql(dsn, *TABLES, REST)
    published(database)
    meanwhile(database, where, dsn, [COMES])
    with pytest.raises(InvalidInput, match=r"default partition.*takes writes again"):
        attach.attach_partition(database, "t", "p3", BOUNDS, "test")
    steps.assert_exact(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)
    run_sql(dsn, "INSERT INTO p3 VALUES (211, 'k', 1)", GOES)
    attach.attach_partition(database, "t", "p3", BOUNDS, "test")
    steps.assert_exact(database)


@pytest.mark.parametrize("where", [BEFORE, AFTER])
def test_a_snapshot_that_is_older_than_the_attach_takes_no_entry_away(database: Database, dsn: str, where: str) -> None:
    """Such a snapshot doesn't see the copied entries. A write to one of them gets 40001."""
    run_sql(dsn, *TABLES, REST)
    published(database)
    user = steps.session(dsn, "REPEATABLE READ")
    sql(user, "SELECT 1 FROM pg_class")
    got: list[str] = []

    def writes(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if where in statement and not got:
            try:
                sql(user, COMES)
                sql(user, GOES)
                got.append("written")
            except psycopg2.errors.SerializationFailure:
                got.append("40001")
            (user.commit if got == ["written"] else user.rollback)()

    event.listen(database.engine, "before_cursor_execute", writes)
    attach.attach_partition(database, "t", "p3", BOUNDS, "test")
    assert got == ["written" if where is BEFORE else "40001"]
    steps.assert_exact(database)


def test_what_left_the_bounds_before_is_removed_after_the_attach(database: Database, dsn: str) -> None:
    """Found: attach: a clean-up that removed what had left the same bounds earlier (a partition that was detached and
    comes back) took the copied entries, too, all of them, silently. It holds: it leaves them alone, and goes on after
    the attach.
    """
    run_sql(dsn, *TABLES)
    published(database)
    run_sql(
        dsn, "SELECT roir.detach_partition('p1')", "DELETE FROM p1 WHERE id = 7", "UPDATE p1 SET v = 0 WHERE id = 8"
    )
    told: list[Any] = []

    def cleans(connection: object, cursor: object, statement: str, *rest: object) -> None:
        if AFTER in statement and not told:
            told.append(None)
            told.append(clean_up.clean_up(Database(dsn, "another")))

    event.listen(database.engine, "before_cursor_execute", cleans)
    attach.attach_partition(database, "t", "p1", "FOR VALUES FROM (0) TO (100)", "test")
    assert "is being attached with the same bounds" in told[1].waiting[0]
    steps.assert_exact(database)
    assert clean_up.clean_up(database).partition_entries == 1
    steps.assert_exact(database)
    steps.assert_exact(database)


def test_another_partition_leaves_while_a_table_is_being_attached(database: Database, dsn: str) -> None:
    """The two bounds don't overlap: nothing waits."""
    run_sql(dsn, *TABLES)
    published(database)
    run_sql(dsn, f"SELECT roir.begin_attach('t', 'p3', '{BOUNDS}')")
    assert detach.detach_partition(database, "p1", "test") == 99
    steps.assert_exact(database)
    assert attach.attach_partition(database, "t", "p3", BOUNDS, "test") == 11
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_the_default_partition_is_attached_while_another_one_is_made(database: Database, dsn: str) -> None:
    """Found: attach: such a row stayed: its entry got the copied row's included values, and kept them when the attach
    was given up. It holds: the batch rolls back.
    """
    run_sql(dsn, *TABLES)
    published(database)
    meanwhile(database, AFTER, dsn, [f"CREATE TABLE p4 PARTITION OF t {BOUNDS}", COMES])
    with pytest.raises(InvalidInput):
        attach.attach_partition(database, "t", "p3", "DEFAULT", "test")
    steps.assert_exact(database)
    clean_up.clean_up(database)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_table_that_is_dropped_while_it_is_being_attached_leaves_no_trigger(database: Database, dsn: str) -> None:
    run_sql(dsn, *TABLES, REST)
    published(database)
    run_sql(dsn, f"SELECT roir.begin_attach('t', 'p3', '{BOUNDS}')", "DROP TABLE p3")
    clean_up.clean_up(database)
    user = steps.session(dsn)
    assert sql(user, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'roir_joining%'") == [(0,)]


def test_nobody_else_can_have_arrivals_noted(database: Database, dsn: str, stranger: str) -> None:
    """The function runs as roir's role: only that role may create triggers with it."""
    user = steps.session(stranger)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        sql(
            user,
            "CREATE TEMP TABLE mine (id int); CREATE TRIGGER x AFTER INSERT ON mine FOR EACH ROW "
            "EXECUTE FUNCTION roir.note_arrival('1')",
        )


@pytest.mark.parametrize("table", ["t", "p3"])
def test_the_validation_waits_for_an_analyze(database: Database, dsn: str, table: str) -> None:
    """It waits as the other steps wait for locks: with patience, naming the holder; nothing is left closed."""
    run_sql(dsn, *TABLES)
    published(database)
    others: list[psycopg2.extensions.connection] = []
    said: list[str] = []

    def hold() -> None:
        others.append(steps.session(dsn))
        sql(others[0], f"ANALYZE {table}")

    def tell(line: str) -> None:
        said.append(line)
        if "waiting for a lock" in line:
            others[0].rollback()

    with before(database, "SELECT roir.validate_attach", hold):
        attach.attach_partition(database, "t", "p3", BOUNDS, "test", tell)
    assert any("waiting for a lock" in line for line in said), said
    steps.assert_exact(database)
    others[0].close()


def test_a_rebuild_that_is_aborted_while_rows_are_copied_to_it_spares_no_wait_for_older_snapshots(
    database: Database, dsn: str
) -> None:
    """They would see the attached rows, and not their entries."""
    run_sql(dsn, *TABLES)
    published(database)
    steps.begin(database, include="v")
    old = steps.old_session(dsn)
    other = Database(dsn, "other")
    first_of_the_second = 3
    with (
        before(database, 'LOCK TABLE ONLY "public"."t"', lambda: abort.abort(other, "ix", "test"), first_of_the_second),
        pytest.raises(LockNotAcquired, match="older than the copied entries"),
    ):
        attach.attach_partition(database, "t", "p3", BOUNDS, "test", patience_s=0)
    assert sql(old, "SELECT count(*) FROM t") == sql(old, "SELECT count(*) FROM ix") == [(150,)]
    old.rollback()
    attach.attach_partition(database, "t", "p3", BOUNDS, "test")
    clean_up.clean_up(database)
    steps.assert_exact(database)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_writer_beside_whom_each_snapshot_is_as_old_as_he_is_named(
    database: Database, dsn: str, server: str, prepared: bool
) -> None:
    """The writer is in another database. Seen to name the reader alone, which began after the copies, in vain."""
    run_sql(dsn, *TABLES)
    published(database)
    writer = steps.session(server)
    sql(writer, "CREATE TABLE written_elsewhere (i int)")
    who = f"pid {writer.info.backend_pid}"
    if prepared:
        sql(writer, "PREPARE TRANSACTION 'of before'")
        who = "prepared transaction 'of before'"
    readers: list[psycopg2.extensions.connection] = []
    with (
        before(database, "WITH moment", lambda: readers.append(steps.old_session(dsn))),
        pytest.raises(LockNotAcquired, match=f"{who}.*, whose open transaction makes the snapshots of others as old"),
    ):
        attach.attach_partition(database, "t", "p3", BOUNDS, "test", patience_s=0)
    if prepared:
        run_sql(server, "ROLLBACK PREPARED 'of before'")
    writer.rollback()
    readers[0].rollback()
    attach.attach_partition(database, "t", "p3", BOUNDS, "test", patience_s=0)
    steps.assert_exact(database)
