"""Revert: the replaced generation is shown again, exact, whatever was written meanwhile."""

from __future__ import annotations

import pytest

from airflow_roir.engine import clean_up, revert
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import LockNotAcquired, NotFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

WRITES = (
    "UPDATE t SET k = k || 'x' WHERE id % 7 = 0",
    "DELETE FROM t WHERE id % 11 = 0",
    "UPDATE t SET id = id + 100000 WHERE id % 13 = 0",
    "INSERT INTO t SELECT i, NULL, i FROM generate_series(2001, 2020) i",
)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 1000)


def rebuild(database: Database, **options: int) -> int:
    """Builds the index, or rebuilds it; returns the id of the generation that is then active."""
    given = {} if not generations(database) else {"table": None, "keys": None}
    steps.make_index(database, **given, **options)
    return max(generations(database))


def generations(database: Database) -> dict[int, str]:
    """The generations' ids and statuses."""
    with database.transaction() as connection:
        return {row.id: row.status for row in execute(connection, "SELECT id, status FROM roir.generation")}


def test_there_and_back_again_under_writes(database: Database, dsn: str) -> None:
    first, second = rebuild(database), rebuild(database, revert_window_s=60)
    run_sql(dsn, "CREATE ROLE reader_of_reverts", "GRANT SELECT ON ix TO reader_of_reverts")
    try:
        for write, (shown, retired) in zip(WRITES, ((first, second), (second, first), (first, second)), strict=False):
            run_sql(dsn, write)
            done = revert.revert(database, "ix", "me", "slower")
            assert (done.index, done.shown, done.retired) == ("public.ix", shown, retired)
            assert generations(database) == {shown: "active", retired: "retired"}
            steps.assert_exact(database)
            run_sql(dsn, "INSERT INTO t SELECT max(id) + 1, NULL, 0 FROM t", "DELETE FROM t WHERE k = '3'")
            steps.assert_exact(database)
        with database.transaction() as connection:
            may_read = "SELECT has_table_privilege('reader_of_reverts', 'public.ix', 'SELECT')"
            assert execute(connection, may_read).scalar()
            window = "SELECT extract(epoch FROM drop_after - retired_at)::int FROM roir.generation WHERE id = %(id)s"
            assert execute(connection, window, {"id": second}).scalar() == 60
    finally:
        run_sql(dsn, "DROP OWNED BY reader_of_reverts", "DROP ROLE reader_of_reverts")
    said = [(event.actor, event.detail) for event in operations.events(database, "ix") if event.action == "revert"]
    assert said[0] == ("me", "the replaced generation is shown again: slower")
    assert len(said) == 3


def test_what_was_reverted_is_cleaned_up_after_its_window(database: Database, dsn: str) -> None:
    first, second = rebuild(database), rebuild(database, revert_window_s=0)
    revert.revert(database, "ix", "me")
    clean_up.clean_up(database)
    assert generations(database) == {first: "active", second: "dropped"}
    run_sql(dsn, *WRITES)
    steps.assert_exact(database)
    with pytest.raises(NotFound, match="no replaced generation to show"):
        revert.revert(database, "ix", "me")


@pytest.mark.sample(0)
def test_a_rebuild_that_is_under_way_goes_on(database: Database, dsn: str) -> None:
    first, second = rebuild(database), rebuild(database)
    run = steps.built(database, table=None, keys=None)
    revert.revert(database, "ix", "me")
    run_sql(dsn, *WRITES)
    steps.assert_exact(database)
    steps.seal_all(database, run)
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)
    third = max(generations(database))
    assert generations(database) == {first: "retired", second: "retired", third: "active"}
    # The generation that was shown last, not the one that was built last.
    assert revert.revert(database, "ix", "me").shown == first


@pytest.mark.sample(0)
def test_nothing_to_go_back_to(database: Database) -> None:
    with pytest.raises(NotFound):
        revert.revert(database, "ix", "me")
    rebuild(database)
    with pytest.raises(NotFound, match="no replaced generation to show"):
        revert.revert(database, "ix", "me")


@pytest.mark.sample(0)
def test_a_long_writer_is_named_and_nothing_changes(database: Database, dsn: str) -> None:
    first, second = rebuild(database), rebuild(database)
    writer = steps.session(dsn)
    sql(writer, "UPDATE t SET v = 0 WHERE id = 1")
    with pytest.raises(LockNotAcquired, match="pid"):
        revert.revert(database, "ix", "me", patience_s=0)
    assert generations(database) == {first: "retired", second: "active"}
    writer.commit()
    assert revert.revert(database, "ix", "me").shown == first
    steps.assert_exact(database)


def test_an_old_snapshot_reads_on(database: Database, dsn: str) -> None:
    """The generation that is shown again was maintained before the reader's snapshot, and ever since."""
    rebuild(database)
    rebuild(database)
    reader = steps.session(dsn, "REPEATABLE READ")
    before = sql(reader, "SELECT k, id FROM t ORDER BY id")
    run_sql(dsn, *WRITES)
    revert.revert(database, "ix", "me")
    assert sql(reader, "SELECT k, id FROM ix ORDER BY id") == before
    reader.rollback()


def test_the_entries_of_a_partition_that_left_stay_hidden(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "DROP TABLE t CASCADE",
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (500)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (500) TO (5000)",
        "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 1000) i",
    )
    rebuild(database)
    rebuild(database)
    # The first part of the detach command: the entries are still there.
    run_sql(dsn, "SELECT roir.detach_partition('t1')")
    revert.revert(database, "ix", "me")
    reader = steps.session(dsn)
    assert sql(reader, "SELECT count(*) FROM ix") == sql(reader, "SELECT count(*) FROM t") == [(501,)]
    reader.rollback()
    clean_up.clean_up(database)
    steps.assert_exact(database)
    revert.revert(database, "ix", "me")
    steps.assert_exact(database)
