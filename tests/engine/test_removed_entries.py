"""Snapshots older than a removal of entries: for them, too, the table and the view are without the partition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_roir.engine import clean_up, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.operation import status
from airflow_roir.errors import LockNotAcquired
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_detach import hidden, published, viewed
from tests.engine.test_partitions import one

pytestmark = pytest.mark.sample(1)

TABLE, VIEW = ("SELECT d, id, k, v FROM public." + name for name in ("t", "ix"))
DIFFERENCE = f"SELECT count(*) FROM (({TABLE} EXCEPT ALL {VIEW}) UNION ALL ({VIEW} EXCEPT ALL {TABLE})) x"
LEFT = "SELECT count(*) FROM roir.source_partition WHERE status <> 'present'"


def detach_it(database: Database) -> None:
    detach.detach_partition(database, "t2", "test")


def detach_and_drop(database: Database) -> None:
    detach.detach_partition(database, "t2", "test", drop=True)


def detach_by_sql(database: Database) -> None:
    hidden(database.dsn, "t2")
    clean_up.clean_up(database)


def drop_without_roir(database: Database) -> None:
    run_sql(database.dsn, "DROP TABLE t2")
    sync.sync_partitions(database, "t", "test")


def take_out_and_in_again(database: Database) -> None:
    detach_by_sql(database)
    run_sql(database.dsn, "DELETE FROM t2", "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (20) TO (30)")
    clean_up.clean_up(database)


def delete_and_detach(database: Database) -> None:
    """No entry is left to remove, but the older snapshot still has the rows' entries."""
    run_sql(database.dsn, "DELETE FROM t2")
    detach.detach_partition(database, "t2", "test")


def go_back(database: Database) -> None:
    """Reverts to a generation whose entries are removed while another one is shown."""
    detach_by_sql(database)
    revert.revert(database, "ix", "test")


def give_up_an_attach(database: Database) -> None:
    """Cancels the attach of `begun`, whose copies are older than the snapshot."""
    run_sql(database.dsn, "SELECT roir.cancel_attach('n3')")
    clean_up.clean_up(database)


WAYS: list[Callable[[Database], None]] = [
    detach_it,
    detach_and_drop,
    detach_by_sql,
    drop_without_roir,
    take_out_and_in_again,
    delete_and_detach,
    go_back,
    give_up_an_attach,
]


def reading(dsn: str, isolation: str) -> Iterator[int]:
    user = steps.old_session(dsn, isolation)
    yield 0
    yield sql(user, DIFFERENCE)[0][0]
    user.rollback()


def by_a_function(dsn: str, _: str) -> Iterator[int]:
    """A cursor's query has one snapshot, and STABLE functions read with it."""
    body = f"$$ BEGIN RETURN ({DIFFERENCE}); END $$"
    run_sql(dsn, f"CREATE FUNCTION differs() RETURNS bigint LANGUAGE plpgsql STABLE AS {body}")
    user = steps.session(dsn)
    sql(user, "DECLARE c CURSOR FOR SELECT CASE WHEN i = 1 THEN 0 ELSE differs() END FROM generate_series(1, 2) i")
    yield sql(user, "FETCH 1 FROM c")[0][0]
    yield sql(user, "FETCH 1 FROM c")[0][0]
    user.rollback()


def handed_on(dsn: str, _: str) -> Iterator[int]:
    exporter = steps.old_session(dsn)
    ((snapshot,),) = sql(exporter, "SELECT pg_export_snapshot()")
    yield 0
    user = steps.session(dsn, "REPEATABLE READ")
    sql(user, f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    exporter.rollback()
    yield sql(user, DIFFERENCE)[0][0]
    user.rollback()


READERS = {
    "REPEATABLE READ": reading,
    "SERIALIZABLE": reading,
    "a STABLE function": by_a_function,
    "a snapshot handed on": handed_on,
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", WAYS)
def test_an_older_snapshot_sees_no_entry_that_no_row_has(
    database: Database, dsn: str, way: Callable[[Database], None], reader: str
) -> None:
    """Found: after the removal of a partition's entries, or of the copies of a cancelled attach, an older snapshot saw
    entries that no row has. It holds: the view hides them until no older snapshot can exist.
    """
    published(database, dsn)
    if way is go_back:
        steps.make_index(database, table=None, keys=None)
    if way is give_up_an_attach:
        begun(database, dsn)
    clean_up.clean_up(database)
    seen = READERS[reader](dsn, reader)
    assert next(seen) == 0
    way(database)
    assert one(database, LEFT)
    report = clean_up.clean_up(database)
    assert report.partition_entries == 0
    assert any("has ended, whose snapshot is older" in line for line in report.waiting), report
    if way is not go_back:
        # Seen to be reported by the clean-up alone.
        [told] = status(database, "ix")
        assert any("has ended, whose snapshot is older" in line for line in told.warnings), told
    assert next(seen) == 0
    assert next(seen, None) is None
    clean_up.clean_up(database)
    assert not one(database, LEFT)
    assert "NOT" not in viewed(database)
    steps.assert_exact(database)


def begun(database: Database, dsn: str) -> None:
    """An attach whose rows are copied, and which hasn't ended."""
    rows = "INSERT INTO n3 SELECT 30, i, 'n', i FROM generate_series(1, 50) i"
    run_sql(dsn, "CREATE TABLE n3 (LIKE t INCLUDING ALL)", rows)
    older = steps.old_session(dsn)
    with pytest.raises(LockNotAcquired, match="older than the copied entries"):
        attach.attach_partition(database, "t", "n3", "FOR VALUES FROM (30) TO (40)", "test", patience_s=0)
    older.rollback()
    older.close()


def test_a_clean_up_gives_way_to_who_holds_the_entries(database: Database, dsn: str) -> None:
    """An uncommitted TRUNCATE holds them like this: even the look at a segment's size waits for it."""
    published(database, dsn)
    hidden(dsn, "t2")
    holder = steps.session(dsn)
    # If the clean-up waited without a limit, the timeout would end this session, and nothing would be left to do.
    sql(holder, "SET idle_in_transaction_session_timeout = '60s'; LOCK TABLE roir_data.g1 IN ACCESS EXCLUSIVE MODE")
    report = clean_up.clean_up(Database(dsn, "impatient", limits=Limits(clean_up_s=0, attempt_ms=50)))
    assert any(
        re.match("no lock on the entries of .*The next roir clean-up continues", line) for line in report.waiting
    )
    assert report.warnings == []
    holder.close()
    clean_up.clean_up(database)
    assert one(database, LEFT) == 0
    steps.assert_exact(database)


def test_nothing_is_read_again_while_the_view_waits(database: Database, dsn: str) -> None:
    published(database, dsn)
    user = steps.old_session(dsn)
    detach.detach_partition(database, "t2", "test")
    removed = one(database, "SELECT removed_xid FROM roir.source_partition WHERE status = 'leaving'")
    assert removed is not None
    clean_up.clean_up(database)
    assert one(database, "SELECT removed_xid FROM roir.source_partition WHERE status = 'leaving'") == removed
    user.rollback()
    assert clean_up.clean_up(database).partition_entries == 0
    assert not one(database, LEFT)


CALLS = [
    "detach_partition('t2')",
    "begin_attach('t', 't2', 'DEFAULT')",
    "finish_attach('t', 't2')",
    "cancel_attach('t2')",
]


@pytest.mark.sample(0)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_who_decides_by_an_old_snapshot_is_refused(database: Database, dsn: str, call: str, isolation: str) -> None:
    """Found: begin, end and cancel of an attach in a `REPEATABLE READ` transaction decided by its snapshot. It holds:
    refused, as a detach was.
    """
    published(database, dsn)
    user: Any = steps.session(dsn, isolation)
    with pytest.raises(steps.psycopg2.errors.FeatureNotSupported, match="needs a READ COMMITTED transaction"):
        sql(user, f"SELECT roir.{call}")
