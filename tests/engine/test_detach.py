"""Partitions that leave, in every phase: roir detaches them, hides their entries at once, removes them in batches."""

from __future__ import annotations

import re
import threading
from typing import Any

import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, drop
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.partitions import detach, remove_entries
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import LockNotAcquired, NotFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.stages import through_modes
from tests.engine.test_partitions import make, one, shapes

pytestmark = pytest.mark.sample(1)

SHOWN = "SELECT d, id, k, v FROM public.ix ORDER BY d, id"
ROWS = "SELECT d, id, k, v FROM public.t ORDER BY d, id"


def assert_shown(database: Database, *indexes: str) -> None:
    """Readers see exact entries, whatever the base still holds."""
    with database.transaction() as connection:
        rows = execute(connection, ROWS).all()
        for index in indexes or ("ix",):
            assert execute(connection, SHOWN.replace("public.ix", f"public.{index}")).all() == rows


@shapes
def test_a_partition_is_taken_out_in_each_mode(database: Database, dsn: str, shape: str) -> None:
    make(dsn, shape)
    leaves = iter(("t1", "t2", "t0"))
    user = steps.session(dsn)

    def write(mode: str) -> None:
        steps.sql(user, "UPDATE t SET k = 'touched' WHERE id % 4 = 0; DELETE FROM t WHERE id % 9 = 0")
        user.commit()
        try:
            steps.sql(user, "UPDATE t SET d = 29 - d WHERE id % 10 = 1")
            user.commit()
        except psycopg2.errors.CheckViolation:  # there is no partition for them any more
            user.rollback()
        leaf = next(leaves)
        if mode == "direct":
            # by SQL alone: the rest is for later
            steps.sql(user, "SELECT roir.detach_partition(%s::regclass, 'old')", leaf)
            user.commit()
        else:
            detach.detach_partition(database, leaf, "test", "old", drop=mode == "active")
        if mode == "active":
            assert_shown(database)
            clean_up.clean_up(database)
            assert not one(database, "SELECT count(*) FROM roir.source_partition WHERE status = 'leaving'")

    # The base may hold hidden entries between publish and clean-up.
    through_modes(database, write, compare=assert_shown, include="v")
    steps.assert_exact(database)
    # the tables that left are ordinary ones again
    run_sql(dsn, "INSERT INTO t1 SELECT * FROM t1 WHERE false", "TRUNCATE t1", "DELETE FROM t2", "TRUNCATE t2")
    steps.assert_exact(database)


def published(database: Database, dsn: str, shape: str = "range") -> None:
    make(dsn, shape)
    steps.make_index(database, include="v")


def hidden(dsn: str, partition: str) -> None:
    """Detaches a partition, whose entries are still there."""
    run_sql(dsn, f"SELECT roir.detach_partition('{partition}')")


def leave_on(database: Database) -> list[Any]:
    with database.transaction() as connection:
        return remove_entries.leaving(connection)


@pytest.mark.parametrize("shape", ["range", "range with default", "list", "two levels"])
def test_what_comes_into_the_same_bounds_again_is_shown_and_kept(database: Database, dsn: str, shape: str) -> None:
    """Seen to hide the new rows with bounds alone, and to remove their entries without the second look."""
    published(database, dsn, shape)
    hidden(dsn, "t0")
    assert_shown(database)
    if shape == "range":
        run_sql(dsn, "CREATE TABLE n0 PARTITION OF t FOR VALUES FROM (0) TO (10)")
    elif shape == "two levels":
        run_sql(dsn, "CREATE TABLE n0 PARTITION OF t FOR VALUES FROM (0) TO (10) PARTITION BY HASH (id)")
        run_sql(dsn, "CREATE TABLE n1 PARTITION OF n0 FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    run_sql(
        dsn,
        # another key than before, the same one, NULL, and one that goes again
        "INSERT INTO t VALUES (0, 30, 'new', 1), (1, 31, '3', 1), (2, 32, NULL, 7), (5, 9000, 'x', 2), (5, 5, 'y', 0)",
        "DELETE FROM t WHERE id = 5",
        "UPDATE t SET k = 'newer' WHERE id = 32",
    )
    assert_shown(database)
    clean_up.clean_up(database)
    assert_shown(database)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_row_that_comes_while_its_stale_entry_is_removed_keeps_the_new_one(database: Database, dsn: str) -> None:
    published(database, dsn, "range with default")
    hidden(dsn, "t0")
    writer, late = steps.session(dsn), steps.session(dsn)
    steps.sql(writer, "INSERT INTO t SELECT d, id, k, -1 FROM t0 WHERE id = 30")  # its very entry, uncommitted
    (row,) = leave_on(database)
    with pytest.raises(LockNotAcquired, match="no lock on the entries"):  # it waits for that writer, and gives way
        remove_entries.remove(database, row, print, 0.1)
    writer.commit()
    remove_entries.remove(database, row, print, 5)
    steps.sql(late, "INSERT INTO t SELECT d, id, k, -1 FROM t0 WHERE id = 60")
    late.commit()
    assert steps.assert_exact(database).rows == 202


@pytest.mark.sample(0)
def test_a_row_that_is_committed_while_the_removal_waits_keeps_its_entry(database: Database, dsn: str) -> None:
    """Seen to lose it without the second look: the first one's snapshot doesn't see that row."""
    published(database, dsn, "range with default")
    hidden(dsn, "t0")
    writer = steps.session(dsn)
    steps.sql(writer, "INSERT INTO t SELECT d, id, k, -1 FROM t0 WHERE id % 60 = 0")
    (row,) = leave_on(database)
    removing = threading.Thread(target=remove_entries.remove, args=(database, row, print, 30))
    removing.start()
    while not one(database, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
        assert removing.is_alive()
    writer.commit()
    removing.join()
    assert steps.assert_exact(database).rows == 205


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("store", ["base", "delta"])
def test_entries_that_are_rewritten_while_they_are_removed_are_all_found(dsn: str, store: str) -> None:
    """`VACUUM FULL` puts entries into blocks that the removal has passed."""
    database = Database(dsn, limits=Limits(removal_blocks=1))
    make(dsn)
    run_sql(dsn, "INSERT INTO t SELECT i % 30, i, 'k', i FROM generate_series(301, 3000) i")
    _, run = steps.begin(database, include="v", segments=1)
    if store == "base":
        steps.finish_all(database, run)
    else:
        run_sql(dsn, "UPDATE t SET v = v + 1")
    hidden(dsn, "t0")
    (row,) = leave_on(database)

    def rewrite() -> None:
        tables = "SELECT oid::regclass FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace AND relkind = 'r'"
        run_sql(dsn, *(f"VACUUM FULL {name}" for (name,) in steps.sql(steps.session(dsn), tables)))

    with before(database, "SET LOCAL lock_timeout", rewrite, at=3) as begun:
        assert remove_entries.remove(database, row, print, 5) == 1000
    assert len(begun) > 3
    if store == "delta":
        steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_level_goes_with_what_left_it_before(database: Database, dsn: str) -> None:
    """The conditions of hash partitions name their parent, which may be dropped."""
    published(database, dsn, "two levels")
    hidden(dsn, "t1")
    run_sql(dsn, "SELECT roir.detach_partition('tx', and_drop => true)")
    assert_shown(database)
    assert one(database, "SELECT count(*) FROM roir.source_partition WHERE status = 'leaving'") == 1
    assert clean_up.clean_up(database).partition_entries == 200
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_every_index_and_generation_of_the_source_is_followed(database: Database, dsn: str) -> None:
    published(database, dsn)
    _, run = steps.begin(database, "ix", None, None)  # a rebuild: one is retired then
    steps.finish_all(database, run)
    steps.make_index(database, "iy", "t", "v", include="k")
    _, run = steps.begin(database, "iy", None, None)  # and one is being built
    assert detach.detach_partition(database, "public.t1", "test") == 300
    assert_shown(database, "ix", "iy")
    steps.assert_exact(database, "ix")
    steps.assert_exact(database, "iy")
    steps.finish_all(database, run)
    steps.assert_exact(database, "iy")
    assert one(database, "SELECT count(*) FROM roir_data.g1") == 200


def test_grants_options_and_the_views_of_users_survive(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(
        dsn,
        "DO $$ BEGIN CREATE ROLE detach_reader; EXCEPTION WHEN duplicate_object THEN NULL; END $$",
        "GRANT SELECT ON ix TO detach_reader",
        "ALTER VIEW ix SET (security_barrier = true)",
        "CREATE VIEW mine AS SELECT * FROM ix",
    )
    detach.detach_partition(database, "t1", "test")
    assert one(database, "SELECT has_table_privilege('detach_reader', 'public.ix', 'SELECT')")
    assert one(database, "SELECT reloptions::text FROM pg_class WHERE relname = 'ix'") == "{security_barrier=true}"
    assert one(database, "SELECT count(*) FROM public.mine") == 200
    run_sql(dsn, "DROP VIEW mine", "DROP OWNED BY detach_reader", "DROP ROLE detach_reader")


def viewed(database: Database) -> str:
    """The view's definition without its relation's name: until PostgreSQL 15 that is before each column."""
    return re.sub(r"\b(b|g1)\.| b(?=;)", "", str(one(database, "SELECT pg_get_viewdef('public.ix'::regclass)")))


@pytest.mark.by_hand("sweeps")
def test_the_plain_view_is_back_after_clean_up(database: Database, dsn: str) -> None:
    published(database, dsn)
    clean_up.clean_up(database)
    before = viewed(database)
    hidden(dsn, "t1")
    assert "EXISTS" in viewed(database)
    assert clean_up.clean_up(database).partition_entries == 100
    assert viewed(database) == before


def test_who_holds_it_up_is_named_and_nothing_is_changed(database: Database, dsn: str) -> None:
    published(database, dsn)
    reader = steps.session(dsn)
    steps.sql(reader, "SET application_name = 'long report'; SELECT count(*) FROM ix")
    with pytest.raises(LockNotAcquired, match="long report"):
        detach.detach_partition(database, "t1", "test", patience_s=0.5)
    reader.rollback()
    steps.assert_exact(database)
    assert leave_on(database) == []


def test_what_is_no_partition_is_refused(database: Database, dsn: str) -> None:
    published(database, dsn)
    run_sql(dsn, "CREATE TABLE other (id int PRIMARY KEY)")
    for name in ("other", "t", "missing"):
        with pytest.raises(NotFound):
            detach.detach_partition(database, name, "test")


def test_a_claimed_range_of_a_partition_that_left_is_done(database: Database, dsn: str) -> None:
    make(dsn)
    _, run = steps.begin(database, ranges=3, batch_rows=20)
    worker, claim = steps.claimed(database, run)
    outcome = worker.step(claim)
    assert isinstance(outcome, Step)
    assert outcome.rest is not None
    detach.detach_partition(database, "t0", "test", drop=True)
    assert worker.step(outcome.rest) == Step(0, 0.0, done=False, rests=False)
    worker.connection.close()
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 200


def test_nothing_is_left_of_a_dropped_index(database: Database, dsn: str) -> None:

    published(database, dsn)
    hidden(dsn, "t1")
    drop.drop_index(database, "ix", "test")
    assert one(database, "SELECT count(*) FROM roir.source_partition") == 0
    assert one(database, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'roir%'") == 0
    clean_up.clean_up(database)


@pytest.mark.parametrize(
    "how", ["SELECT roir.detach_partition('t0')", "SELECT roir.detach_partition('t0', and_drop => true)"]
)
def test_a_detach_that_waited_for_another_one_of_the_same_partition_says_so(
    database: Database, dsn: str, how: str
) -> None:
    """Seen to fail with a syntax error, at the number of the table that was dropped."""
    published(database, dsn)
    first = steps.session(dsn)
    steps.sql(first, how)
    errors: list[BaseException] = []

    def second() -> None:
        try:
            detach.detach_partition(database, "t0", "test", patience_s=30)
        except NotFound as error:
            errors.append(error)

    other = threading.Thread(target=second)
    other.start()
    while not one(database, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
        assert other.is_alive()
    first.commit()
    other.join()
    assert "no partition any more" in str(errors[0])
    clean_up.clean_up(database)
    steps.assert_exact(database)
