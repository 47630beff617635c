"""Each race that docs/architecture.md#touched-wins names, by steps: one side's step, then the other side's."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest
from sqlalchemy.exc import OperationalError

from airflow_roir.engine import fold, switch
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.errors import LockNotAcquired
from tests.comparison import compare
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

READERS = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def without_checks(database: Database) -> None:
    """Breaks the installed capture function: it no longer checks removals that removed nothing, nor the mode's row."""
    with database.transaction() as connection:
        body = execute(
            connection,
            "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.proname ~ '^capture_row_[0-9]'",
        ).scalar_one()
        broken = body.replace("IF found_entries = 0 AND", "IF false AND")
        broken = broken.replace("AND NOT roir.is_in_mode(", "AND false AND NOT roir.is_in_mode(")
        assert broken != body
        execute(connection, broken)
        # Without this the build would report that a function was altered.
        execute(connection, "UPDATE roir.generation SET shape = shape - 'marks'")


@pytest.mark.parametrize("isolation", READERS)
@pytest.mark.parametrize("stage", ["switch", "fold", "publish"])
def test_delete_by_a_snapshot_older_than_the_batch_gets_40001(
    database: Database, dsn: str, isolation: str, stage: str
) -> None:
    _, run = steps.begin(database)
    user = steps.old_session(dsn, isolation)
    reach(database, run, stage)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "DELETE FROM t WHERE id = 42")
    user.rollback()
    finish_from(database, run, stage)
    steps.assert_exact(database)


@pytest.mark.parametrize("stage", ["switch", "publish"])
def test_without_the_checks_that_delete_leaves_a_stale_entry(database: Database, dsn: str, stage: str) -> None:
    """The negative of the test above: these checks make the difference."""
    _, run = steps.begin(database)
    user = steps.old_session(dsn, "REPEATABLE READ")
    reach(database, run, stage)
    without_checks(database)
    sql(user, "DELETE FROM t WHERE id = 42")
    user.commit()
    finish_from(database, run, stage)
    assert compare(database, "ix").extra == 1


@pytest.mark.sample(0)
@pytest.mark.parametrize("isolation", READERS)
@pytest.mark.parametrize("write", ["DELETE FROM t", "UPDATE t SET k = 'new'", "UPDATE t SET id = 4200"])
def test_a_removal_that_misses_an_entry_younger_than_its_snapshot_gets_40001(
    database: Database, dsn: str, isolation: str, write: str
) -> None:
    """An entry can be written without its row in any way, for example by a repair."""
    steps.make_index(database)
    user = steps.old_session(dsn, isolation)
    entry = "DELETE FROM roir_data.g1 WHERE c2 = 42 RETURNING *"
    run_sql(dsn, f"WITH again AS ({entry}) SELECT * INTO again FROM again", "INSERT INTO roir_data.g1 TABLE again")
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, f"{write} WHERE id = 42")
    user.rollback()
    sql(user, f"{write} WHERE id = 42")
    user.commit()
    steps.assert_exact(database)


def test_fold_leaves_rows_that_a_writer_holds(database: Database, dsn: str) -> None:
    """SKIP LOCKED: the fold passes an open transaction's rows, and publish's drain waits for it."""
    _, run = steps.begin(database, include="v", lock_timeout_ms=50, lock_patience_s=0)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = v + 1 WHERE id <= 20")
    user.commit()
    steps.switch_all(database, run)
    sql(user, "UPDATE t SET v = v + 1 WHERE id <= 3")  # open: holds the delta rows of ids 1 to 3
    folded = fold.fold_here(database, run)
    assert folded.upserted == 17
    fold.finish(database, run)
    with pytest.raises(LockNotAcquired):
        steps.publish_all(database, run)
    user.rollback()
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_seal_and_fold_give_up_soon_behind_an_open_truncate(dsn: str) -> None:
    """The TRUNCATE holds base and delta. A worker that waited for it without end would see no pause."""
    database = Database(dsn, limits=Limits(table_lock_ms=20, outage_s=1.0))
    _, run = steps.begin(database)
    user = steps.session(dsn)
    steps.build_all(database, run)
    sql(user, "TRUNCATE t")
    with pytest.raises(OperationalError, match="lock timeout"):
        steps.seal_all(database, run)
    user.rollback()
    steps.seal_all(database, run)
    switch.switch(database, run)
    sql(user, "TRUNCATE t")
    with pytest.raises(OperationalError, match="lock timeout"):
        fold.fold_here(database, run)
    user.rollback()
    finish_from(database, run, "switch")
    steps.assert_exact(database)


def test_a_reader_of_the_view_who_holds_up_publish_is_named(database: Database, dsn: str) -> None:
    steps.make_index(database)
    _, run = steps.begin(database, table=None, keys=None, lock_timeout_ms=50, lock_patience_s=0)
    reach(database, run, "fold")
    reader = steps.session(dsn)
    ((pid,),) = sql(reader, "SELECT pg_backend_pid() FROM ix LIMIT 1")
    with pytest.raises(LockNotAcquired, match=f"pid {pid} "):
        steps.publish_all(database, run)
    steps.assert_exact(database)  # the old generation is still read and maintained
    reader.rollback()
    steps.publish_all(database, run)
    steps.assert_exact(database)


def reach(database: Database, run: Run, stage: str) -> None:
    """Carries the operation to a stage: the capture switched, the delta folded, or published."""
    steps.switch_all(database, run)
    if stage in ("fold", "publish"):
        steps.fold_delta(database, run)
    if stage == "publish":
        steps.publish_all(database, run)


def finish_from(database: Database, run: Run, stage: str) -> None:
    """Carries the operation to its end."""
    if stage == "switch":
        steps.fold_delta(database, run)
    if stage != "publish":
        steps.publish_all(database, run)
