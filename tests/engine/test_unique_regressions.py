"""Mistakes that others have made with UNIQUE, each by its name in their project: docs/regressions.md lists them."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import psycopg2.errors
import pytest

from airflow_roir.engine import abort, switch
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.errors import DuplicatesFound, Fenced, LockNotAcquired
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.isolation import READ_COMMITTED, Play, Schedule, Session, Transaction, Watcher
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

ROWS = 90


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    """Creates table t of three partitions, whose key k doesn't contain the partition key."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int, day int, k int, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(3)),
        f"INSERT INTO t SELECT i, i % 3, i, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )


def told(database: Database) -> Counter[str]:
    """The number of rows that are recorded for each key."""
    with database.transaction() as connection:
        query = "SELECT key ->> 0 FROM roir.duplicate WHERE healed_at IS NULL"
        return Counter(execute(connection, query).scalars())


def rows(dsn: str) -> list[tuple[int, ...]]:
    with closing(steps.session(dsn)) as user:
        return sql(user, "SELECT * FROM t ORDER BY id, day")


@pytest.mark.parametrize("end", ["abort", "heal"])
def test_gh_ost_167_477_825_1526_1636_percona_206_233_no_row_is_deleted(database: Database, dsn: str, end: str) -> None:
    """There `INSERT IGNORE` and `REPLACE` kept one row of each key, without a message."""
    run_sql(dsn, "UPDATE t SET k = 5 WHERE id IN (10, 20, 30)", "UPDATE t SET k = 6 WHERE id IN (40, 41)")
    _, run = steps.begin(database, unique=True, batch_rows=10, ranges=4, segments=3)
    # Keys change rows during the build. There a replay by key removed other rows.
    run_sql(dsn, "UPDATE t SET k = 153 - k WHERE id BETWEEN 70 AND 83", "INSERT INTO t VALUES (101, 0, 7, 0)")
    before = rows(dsn)
    steps.build_all(database, run)
    with pytest.raises(DuplicatesFound, match="9 rows share 3 keys"):
        steps.seal_all(database, run)
    assert rows(dsn) == before
    assert told(database) == {"5": 4, "6": 3, "7": 2}
    if end == "abort":
        abort.abort(database, "ix", "test")
        assert rows(dsn) == before
        return
    run_sql(dsn, "UPDATE t SET k = 1000 + id WHERE id IN (10, 20, 30, 40, 41, 101)")
    before = rows(dsn)
    steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    assert rows(dsn) == before
    steps.assert_exact(database)


def test_tidb_40698_pairs_of_different_ranges_and_beside_a_delete_marker_do_not_escape(
    database: Database, dsn: str
) -> None:
    """There each range was checked alone, and a deleted row's marker hid the pair of its key."""
    run_sql(dsn, f"UPDATE t SET k = 1 WHERE id = {ROWS}")
    run = steps.built(database, unique=True, batch_rows=10, ranges=4, segments=3)
    # Three rows of a key, one of which goes; a pair in the delta alone, one row of which goes and comes back.
    run_sql(
        dsn,
        "INSERT INTO t VALUES (101, 0, 2, 0), (102, 1, 2, 0)",
        "DELETE FROM t WHERE id = 102",
        "INSERT INTO t VALUES (103, 0, 500, 0), (104, 1, 500, 0)",
        "DELETE FROM t WHERE id = 103",
        "INSERT INTO t VALUES (103, 0, 500, 0)",
    )
    with pytest.raises(DuplicatesFound):
        steps.seal_all(database, run)
    assert told(database) == {"1": 2, "2": 2, "500": 2}


def test_tidb_49233_a_batch_that_is_done_again_brings_no_duplicates(database: Database) -> None:
    """There the batch's answer was lost, and the next try found its own rows."""
    _, run = steps.begin(database, unique=True, batch_rows=10)
    worker, claim = steps.claimed(database, run)
    worker.step(claim)
    with pytest.raises(Fenced):
        worker.step(claim)
    with worker.connection.begin() as transaction:
        steps.half_a_batch(worker, claim)
        transaction.rollback()
    worker.connection.close()
    steps.finish_all(database, start_run(database, "ix", "the next", take_over=True))
    assert told(database) == {}
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("when", ["copied", "built", "sealed"])
def test_yugabyte_30312_a_row_that_is_deleted_and_inserted_again_is_no_duplicate(
    database: Database, dsn: str, when: str
) -> None:
    """Nor is another row that gets its key. There the earlier copy counted."""
    _, run = steps.begin(database, unique=True, batch_rows=10, ranges=3, segments=3)
    phases = [lambda: steps.batches(database, run), lambda: steps.build_all(database, run), lambda: None]
    for name, phase in zip(("copied", "built", "sealed"), phases, strict=True):
        phase()
        if name == "sealed":
            steps.seal_all(database, run)
        if name == when:
            run_sql(
                dsn,
                "DELETE FROM t WHERE id BETWEEN 1 AND 9",
                "INSERT INTO t SELECT i, i % 3, i, 0 FROM generate_series(1, 5) i",
                "INSERT INTO t SELECT 100 + i, i % 3, i, 0 FROM generate_series(6, 9) i",
                "UPDATE t SET k = 81 - k WHERE k IN (40, 41)",
            )
    steps.fold_all(database, run)
    assert told(database) == {}
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_tidb_40730_it_is_enforced_from_one_moment_on(database: Database, dsn: str) -> None:
    """There some writers were refused while others weren't yet: duplicates could come, and other rows were refused.

    Here no writer is refused before the switch, which waits for all writers, and each is after it.
    """
    run = steps.sealed(database, unique=True, lock_timeout_ms=50, lock_patience_s=0)
    early = steps.session(dsn)
    sql(early, "INSERT INTO t VALUES (101, 0, 5, 0)")
    with pytest.raises(LockNotAcquired):
        switch.switch(database, run)
    early.commit()
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        switch.switch(database, run)
    sql(early, "UPDATE t SET k = 105 WHERE id = 101")
    early.commit()
    switch.switch(database, run)
    with pytest.raises(psycopg2.errors.UniqueViolation):
        sql(early, "UPDATE t SET k = 5 WHERE id = 101")
    early.close()
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_tidb_13093_44439_53004_cockroach_60491_each_key_and_row_is_named(database: Database, dsn: str) -> None:
    """There the message named no key, or a wrong one, or only the first: each duplicate needed another build."""
    run_sql(dsn, "UPDATE t SET k = id / 2 WHERE id BETWEEN 20 AND 59")
    run = steps.built(database, unique=True, ranges=4, segments=5)
    with pytest.raises(DuplicatesFound, match=r"50 rows share 20 keys.*roir duplicates public.ix"):
        steps.seal_all(database, run)
    real = {str(k): count for k, count in Counter(row[2] for row in rows(dsn)).items() if count > 1}
    assert told(database) == real
    requests.pause(database, "ix", "test", "to heal")
    run_sql(dsn, "UPDATE t SET k = 1000 + id WHERE id BETWEEN 20 AND 59")
    steps.finish_all(database, start_run(database, "ix", "test", take_over=True))
    with closing(steps.session(dsn)) as user, pytest.raises(psycopg2.errors.UniqueViolation) as refused:
        sql(user, "INSERT INTO t VALUES (200, 2, 1020, 0)")
    assert refused.value.diag.message_detail == "Key (k)=(1020) already exists."


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("isolation", [READ_COMMITTED, "REPEATABLE READ", "SERIALIZABLE"])
def test_citus_720_timescaledb_1501_pg_partman_220_two_writers_in_two_partitions(
    database: Database, dsn: str, isolation: str
) -> None:
    """A trigger that looks into all partitions doesn't see uncommitted rows: it lets both rows in."""
    steps.finish_all(database, steps.begin(database, unique=True)[1])
    statements = {"one": "INSERT INTO t VALUES (101, 0, 500, 0)", "other": "INSERT INTO t VALUES (102, 1, 500, 0)"}
    transactions = tuple(Transaction(isolation, (name,)) for name in statements)
    first = (0, 1) if isolation != READ_COMMITTED else ()
    schedule = Schedule(transactions, (*first, 0, 1, 0, 1))
    sessions, watcher = [Session(dsn) for _ in transactions], Watcher(dsn)
    play = Play(schedule, lambda name, who, turn: statements[name], sessions, watcher)
    while not play.over:
        play.go_on()
    turn = len(first) // 2
    assert play.outcomes[1, turn].waited
    assert play.outcomes[1, turn].error in (("23505",) if isolation == READ_COMMITTED else ("23505", "40001"))
    for session in sessions:
        session.close()
    watcher.connection.close()
    steps.assert_exact(database)
