"""`COPY … FREEZE`: every snapshot sees such rows at once. An older snapshot doesn't see their entries."""

from __future__ import annotations

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.verify.job import UnitClaim
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.statements import copied
from tests.engine.steps import sql
from tests.engine.test_locks import in_thread, wait_until, watching

OLD = ["REPEATABLE READ", "SERIALIZABLE"]
WRITES = {
    "delete": "DELETE FROM t WHERE id = 42",
    "insert": "INSERT INTO t VALUES (142, '2', 1)",
    "key": "UPDATE t SET k = 'new' WHERE id = 42",
    "included": "UPDATE t SET v = -1 WHERE id = 42",
    "primary key": "UPDATE t SET id = 4200 WHERE id = 42",
    "key and back": "UPDATE t SET k = 'new' WHERE id = 42; UPDATE t SET k = 'copied' WHERE id = 42",
    "upsert": "INSERT INTO t VALUES (42, '3', 4) ON CONFLICT (id) DO UPDATE SET v = -1",
    "lock and delete": "SELECT FROM t WHERE id = 42 FOR UPDATE; DELETE FROM t WHERE id = 42",
}
FROZEN = f"TRUNCATE t; {copied('t', 1, 60, ', FREEZE')}"


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def refill(dsn: str) -> None:
    """Refills the table in one transaction, as FREEZE needs it."""
    user = steps.session(dsn)
    sql(user, FROZEN)
    user.commit()
    user.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("write", WRITES)
def test_a_writer_that_sees_frozen_rows_and_not_their_entries_is_exact_or_refused(
    database: Database, dsn: str, write: str, isolation: str
) -> None:
    """Writers that see frozen rows and not their entries: exact, or 40001."""
    refused = []

    def older(mode: str) -> None:
        user = steps.old_session(dsn, isolation)
        refill(dsn)
        try:
            sql(user, WRITES[write])
            user.commit()
        except (psycopg2.errors.SerializationFailure, psycopg2.errors.UniqueViolation):
            refused.append(mode)
            user.rollback()
        user.close()

    _, run = steps.begin(database, include="v", ranges=3, segments=2)
    older("capture")
    steps.switch_all(database, run)
    older("direct")
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)
    older("active")
    steps.assert_exact(database)
    assert refused == ([] if write == "insert" else ["capture", "direct", "active"])


@pytest.mark.sample(0)
def test_a_verification_calls_no_frozen_row_damaged(database: Database, dsn: str) -> None:
    """The last look at both sides waits for such a COPY, and must see the rows as they are after it."""
    verifying.build_index(dsn, database, include="v")
    # This makes the totals of one snapshot differ, so that the verification looks for the reason.
    run_sql(dsn, "CREATE TABLE kept AS TABLE roir_data.g1 LIMIT 1")
    run_sql(dsn, "DELETE FROM roir_data.g1 b USING kept WHERE b.c2 = kept.c2")
    run = verifying.begin(database)
    one = verifying.worker(database, run)
    while isinstance(claim := one.claim(), UnitClaim):
        one.unit(claim)
    one.close()
    one.connection.close()
    verifying.to_check(database, run)
    run_sql(dsn, "INSERT INTO roir_data.g1 TABLE kept")
    copier, watch = steps.session(dsn), watching(dsn)
    verifying.go_through(database, run)
    one = verifying.worker(database, run)
    claim = verifying.claim(one)
    assert (claim.stage, claim.side) == ("whole", "both")
    sql(copier, FROZEN)
    looking, errors = in_thread(lambda: one.unit(claim))
    wait_until(watch, "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    copier.commit()
    looking.join()
    assert errors == []
    assert verifying.found(dsn) == []
    for session in (watch, copier):
        session.close()
