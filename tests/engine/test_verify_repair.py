"""Mending undoes no concurrent write, waits for none, and survives kills and pauses."""

from __future__ import annotations

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.verify import repair
from airflow_roir.errors import Fenced
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.steps import sql
from tests.engine.verifying import begin, build_index, claim, found, ids, mender, to_check

pytestmark = pytest.mark.sample(1)

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
    "INSERT INTO t SELECT i, nullif(i % 5, 2)::text, i FROM generate_series(1, 40) i",
)
LEVELS = ("READ COMMITTED", "REPEATABLE READ")
# Row 1 lacks its entry, row 2 has another one; there is an entry for row 101, which isn't there.
CORRUPT = (
    "DELETE FROM {base} WHERE c2 = 1",
    "UPDATE {base} SET c3 = -1 WHERE c2 = 2",
    "INSERT INTO {base} VALUES ('1', 101, 0)",
)
WRITES = {
    "update": "UPDATE t SET v = v + 100 WHERE id IN (1, 2)",
    "another key": "UPDATE t SET k = 'other' WHERE id IN (1, 2)",
    "delete": "DELETE FROM t WHERE id IN (1, 2)",
    "delete and insert": "DELETE FROM t WHERE id IN (1, 2); INSERT INTO t VALUES (1, '1', 7), (2, NULL, 7)",
    "insert": "INSERT INTO t VALUES (101, '1', 5)",
    "swap": "UPDATE t SET id = -id WHERE id IN (1, 2); UPDATE t SET id = 3 + id WHERE id IN (-1, -2)",
    "another primary key": "UPDATE t SET id = id + 100 WHERE id = 1",
    "nothing": "UPDATE t SET v = v WHERE id IN (1, 2)",
}


@pytest.fixture
def base(dsn: str, database: Database) -> str:
    """The base of an index that is wrong in three rows, which a verification has found."""
    name = build_index(dsn, database, *SETUP, include="v")
    run_sql(dsn, *(one.format(base=name) for one in CORRUPT))
    return name


@pytest.fixture
def one(dsn: str, database: Database, base: str) -> repair.Mender:
    """It has all three to mend."""
    return _found_by_another(database)


def _found_by_another(database: Database) -> repair.Mender:
    verifying.go_through(database, begin(database), 4)
    return mender(database, begin(database))


def _mend(one: repair.Mender, dsn: str) -> None:
    absent, extra = ids(dsn, ("missing", "different")), ids(dsn, ("extra",))
    if left := repair.tried(one.put, absent):
        repair.tried(one.take_out, left)
    repair.tried(one.take_out, extra)


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("write", WRITES)
def test_a_writer_and_a_repair_meet_in_each_order(
    database: Database, dsn: str, base: str, one: repair.Mender, write: str, level: str
) -> None:
    """Uncommitted while the repair runs, then committed; and rolled back, and committed after it and before it."""
    user = steps.session(dsn, level)
    sql(user, "SELECT count(*) FROM t")  # its snapshot is older than any repair
    sql(user, WRITES[write])
    _mend(one, dsn)
    user.commit()
    _mend(one, dsn)
    steps.assert_exact(database)
    sql(user, "SELECT 1")
    try:
        sql(user, WRITES["update"])
        user.commit()
    except psycopg2.extensions.TransactionRollbackError:
        user.rollback()
    steps.assert_exact(database)
    assert ids(dsn) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("write", WRITES)
def test_a_writer_that_began_before_the_repair_writes_after_it(
    database: Database, dsn: str, base: str, one: repair.Mender, write: str
) -> None:
    for level in LEVELS:
        user = steps.session(dsn, level)
        sql(user, "SELECT count(*) FROM t")
        _mend(one, dsn)
        try:
            sql(user, WRITES[write])
            user.rollback()
            sql(user, WRITES[write])
            user.commit()
        except psycopg2.extensions.TransactionRollbackError:
            user.rollback()
        except psycopg2.errors.UniqueViolation:
            user.rollback()
    steps.assert_exact(database)


def test_what_a_writer_holds_is_left_and_the_rest_is_mended(dsn: str, base: str) -> None:
    database = Database(dsn, limits=Limits(repair_rest_s=0.01))
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = 0 WHERE id = 2")
    sql(user, "INSERT INTO t VALUES (101, '1', 5)")
    report = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    user.rollback()
    assert (report.found, report.mended, report.is_exact) == (3, 1, False)
    assert found(dsn) == [("different", "2", None), ("extra", "101", None), ("missing", "1", "mended")]
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).is_exact
    steps.assert_exact(database)


def test_a_repair_waits_for_no_row_so_it_is_in_nobodys_way(database: Database, dsn: str) -> None:
    """It holds the first of a hundred rows when it comes to the one that a writer holds."""
    base = build_index(dsn, database, *SETUP)
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 < 30")
    one = _found_by_another(database)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = 1 WHERE id = 20")
    assert one.put(ids(dsn)) == []
    [(left,)] = sql(user, "SELECT array_agg(primary_key ->> 0) FROM roir.discrepancy WHERE outcome IS NULL")
    assert left == ["20"]
    user.commit()
    assert one.put(ids(dsn)) == []
    steps.assert_exact(database)


def test_a_worker_that_dies_before_it_mends_leaves_that_to_the_next(database: Database, dsn: str, base: str) -> None:
    run = begin(database, repair=True)
    to_check(database, run)
    dead = verifying.worker(database, run)
    kept = []
    while not kept:
        held = claim(dead)
        kept = [held] if dead.unit(held).found else []
    newer = steps.start_with(database, 1, owner="another", take_over=True)
    with pytest.raises(Fenced):
        dead.mend(kept[0])
    verifying.go_through(database, newer)
    assert {outcome for _, _, outcome in found(dsn)} == {"mended"}
    assert len(found(dsn)) == 3
    steps.assert_exact(database)


def test_a_pause_stops_a_repair_and_a_resume_goes_on_with_it(database: Database, dsn: str, base: str) -> None:
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 < 20")
    run = begin(database, repair=True)
    to_check(database, run)
    one = verifying.worker(database, run)
    held = claim(one)
    while not one.unit(held).found:
        held = claim(one)
    operations.pause(database, "ix", "user", "later")
    assert one.mend(held) is False
    verifying.go_through(database, steps.start_with(database, 3, owner="another"))
    assert {outcome for _, _, outcome in found(dsn)} == {"mended"}
    steps.assert_exact(database)


def test_an_entry_that_is_about_to_join_is_left_alone(database: Database, dsn: str) -> None:
    """It was extra; then its partition began to be attached, and brought the row's entry in: hidden, and right."""
    base = build_index(
        dsn,
        database,
        "CREATE TABLE t (id int, k text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 50) i",
        "CREATE TABLE p2 (LIKE t INCLUDING ALL)",
        "INSERT INTO p2 VALUES (150, 'x')",
    )
    run_sql(dsn, f"INSERT INTO {base} VALUES ('x', 150)")
    one = _found_by_another(database)
    run_sql(dsn, "SELECT roir.begin_attach('t', 'p2', 'FOR VALUES FROM (100) TO (200)')")
    assert one.take_out(ids(dsn)) == []
    assert sql(steps.session(dsn), f"SELECT count(*) FROM {base} WHERE c2 = 150") == [(1,)]
    assert sql(steps.session(dsn), "SELECT outcome FROM roir.discrepancy") == [("gone",)]
