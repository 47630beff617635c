"""A repair undoes no concurrent write, waits for none, and survives kills and pauses."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.verify import repair
from airflow_roir.engine.verify.repairer import Repairer
from airflow_roir.errors import Fenced
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.steps import sql
from tests.engine.verifying import begin, build_index, claim, found, ids, repairer, to_check

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
# The same for a unique index: k is c1, id c2, v c3. Rows 1, 2, 4 and 5 lack their entries. The entry with row 2's key
# has the primary key of a row that isn't there; row 5's former entry has row 4's key.
UNIQUE_SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
    "INSERT INTO t SELECT i, i, i FROM generate_series(1, 40) i",
)
UNIQUE_CORRUPT = (
    "DELETE FROM {base} WHERE c2 IN (1, 4)",
    "UPDATE {base} SET c2 = 102 WHERE c2 = 2",
    "UPDATE {base} SET c1 = 4 WHERE c2 = 5",
)
UNIQUE_WRITES = {
    "what is included": "UPDATE t SET v = v + 100 WHERE id IN (1, 2, 4, 5)",
    "other keys": "UPDATE t SET k = k + 1000 WHERE id IN (1, 2, 4, 5)",
    "no keys": "UPDATE t SET k = NULL WHERE id IN (1, 2, 4, 5)",
    "delete": "DELETE FROM t WHERE id IN (1, 2, 4, 5)",
    "delete and insert": "DELETE FROM t WHERE id < 6; INSERT INTO t SELECT i, i, 0 FROM generate_series(1, 5) i",
    "the holder comes": "INSERT INTO t VALUES (102, 1002, 0)",
    "the holder gets the key": "UPDATE t SET k = 1002 WHERE id = 2; INSERT INTO t VALUES (102, 2, 0)",
    "swap": "UPDATE t SET k = 9 - k WHERE id IN (4, 5)",
    "shift": "UPDATE t SET k = k + 1 WHERE id < 6; UPDATE t SET k = 1 WHERE id = 6",
    "primary keys": "UPDATE t SET id = -id WHERE id < 6",
    "another's key": "UPDATE t SET k = 20 WHERE id IN (1, 4)",
}


@dataclass(frozen=True)
class Ground:
    """A table whose index is made wrong, and the writes to it.

    refused: the errors that a write may get beside a repair. again: the write that comes after it.
    """

    setup: tuple[str, ...]
    corrupt: tuple[str, ...]
    writes: dict[str, str]
    levels: tuple[str, ...]
    again: str
    refused: tuple[type[psycopg2.Error], ...]
    unique: bool = False

    def wrong(self, dsn: str, database: Database) -> str:
        """Builds the index and makes it wrong; returns its base."""
        base = build_index(dsn, database, *self.setup, include="v", unique=self.unique)
        run_sql(dsn, *(one.format(base=base) for one in self.corrupt))
        return base


LATER = psycopg2.extensions.TransactionRollbackError
GROUNDS = {
    "plain": Ground(SETUP, CORRUPT, WRITES, LEVELS, "update", ()),
    "unique": Ground(
        UNIQUE_SETUP,
        UNIQUE_CORRUPT,
        UNIQUE_WRITES,
        (*LEVELS, "SERIALIZABLE"),
        "what is included",
        (psycopg2.errors.UniqueViolation, LATER),
        unique=True,
    ),
}
MEETINGS = [(kind, write, level) for kind, one in GROUNDS.items() for write in one.writes for level in one.levels]


@pytest.fixture
def base(dsn: str, database: Database) -> str:
    """The base of an index that is wrong in three rows, found by a verification."""
    return GROUNDS["plain"].wrong(dsn, database)


def _found_by_another(database: Database) -> Repairer:
    verifying.go_through(database, begin(database), 4)
    return repairer(database, begin(database))


def _repair(one: Repairer, dsn: str) -> None:
    absent, extra = ids(dsn, ("missing", "different", "duplicate")), ids(dsn, ("extra",))
    if left := repair.tried(one.put, absent):
        repair.tried(one.take_out, left)
    repair.tried(one.take_out, extra)


def _write(
    user: psycopg2.extensions.connection, statement: str, level: str, refused: tuple[type[psycopg2.Error], ...]
) -> None:
    """Writes. At READ COMMITTED no write needs a retry, and no write waits for a repair for ever."""
    try:
        sql(user, "SET LOCAL lock_timeout = '10s'")
        sql(user, statement)
    except refused as error:
        later = isinstance(error, LATER)
        user.rollback()
        assert not (later and level == "READ COMMITTED")


@pytest.mark.sample(0)
@pytest.mark.parametrize(("kind", "write", "level"), MEETINGS)
def test_a_writer_and_a_repair_meet_in_each_order(
    database: Database, dsn: str, kind: str, write: str, level: str
) -> None:
    """The write is uncommitted while the repair runs, then committed. Another write comes after it."""
    ground = GROUNDS[kind]
    ground.wrong(dsn, database)
    one = _found_by_another(database)
    with closing(steps.session(dsn, level)) as user:
        sql(user, "SELECT count(*) FROM t")  # its snapshot is older than any repair
        _write(user, ground.writes[write], level, ground.refused)
        _repair(one, dsn)
        user.commit()
        _repair(one, dsn)
        steps.assert_exact(database)
        sql(user, "SELECT 1")
        _write(user, ground.writes[ground.again], level, (*ground.refused, LATER))
        user.commit()
        steps.assert_exact(database)
    assert ids(dsn, ("missing", "different", "duplicate", "extra")) == []


@pytest.mark.sample(0)
@pytest.mark.parametrize(("kind", "write", "level"), MEETINGS)
def test_a_writer_that_began_before_the_repair_writes_after_it(
    database: Database, dsn: str, kind: str, write: str, level: str
) -> None:
    """The write is rolled back, then repeated and committed."""
    ground = GROUNDS[kind]
    ground.wrong(dsn, database)
    one = _found_by_another(database)
    refused = (psycopg2.errors.UniqueViolation, LATER)
    with closing(steps.session(dsn, level)) as user:
        sql(user, "SELECT count(*) FROM t")
        _repair(one, dsn)
        _write(user, ground.writes[write], level, refused)
        user.rollback()
        _write(user, ground.writes[write], level, refused)
        user.commit()
    steps.assert_exact(database)


def test_a_key_that_is_taken_while_its_entry_is_missing_is_a_duplicate(database: Database, dsn: str) -> None:
    """The damaged index takes a row that it should refuse. Both rows stay, and the repair waits for no writer."""
    GROUNDS["unique"].wrong(dsn, database)
    one = _found_by_another(database)
    with closing(steps.session(dsn)) as user:
        sql(user, "INSERT INTO t VALUES (201, 1, 0), (202, 2, 0)")
        _repair(one, dsn)
        assert {outcome for _, key, outcome in found_before(dsn) if key in "12"} == {None}
        user.commit()
    _repair(one, dsn)
    assert [row for row in found_before(dsn) if row[2] is None] == [("duplicate", "1", None), ("duplicate", "2", None)]
    run_sql(dsn, "DELETE FROM t WHERE id IN (1, 202)")
    _repair(one, dsn)
    assert [row for row in found_before(dsn) if row[2] is None] == []
    steps.assert_exact(database)


def found_before(dsn: str) -> list[tuple[str, str, str | None]]:
    """All discrepancies of the verifications so far."""
    with closing(steps.session(dsn)) as user:
        return sql(user, "SELECT kind, primary_key ->> 0, outcome FROM roir.discrepancy ORDER BY 1, 2")


@pytest.mark.by_hand("sweeps")
def test_what_a_writer_holds_is_left_and_the_rest_is_mended(dsn: str, base: str) -> None:
    database = Database(dsn, limits=Limits(repair_rest_s=0.01))
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = 0 WHERE id = 2")
    sql(user, "INSERT INTO t VALUES (101, '1', 5)")
    report = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    user.rollback()
    assert (report.found, report.repaired, report.is_exact) == (3, 1, False)
    assert found(dsn) == [("different", "2", None), ("extra", "101", None), ("missing", "1", "repaired")]
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True)).is_exact
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_repair_waits_for_no_row_so_it_is_in_nobodys_way(database: Database, dsn: str) -> None:
    """The repair holds the first of a hundred rows when it comes to the one that a writer holds."""
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
        dead.repair(kept[0])
    verifying.go_through(database, newer)
    assert {outcome for _, _, outcome in found(dsn)} == {"repaired"}
    assert len(found(dsn)) == 3
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_a_pause_stops_a_repair_and_a_resume_goes_on_with_it(database: Database, dsn: str, base: str) -> None:
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 < 20")
    run = begin(database, repair=True)
    to_check(database, run)
    one = verifying.worker(database, run)
    held = claim(one)
    while not one.unit(held).found:
        held = claim(one)
    requests.pause(database, "ix", "user", "later")
    assert one.repair(held) is False
    verifying.go_through(database, steps.start_with(database, 3, owner="another"))
    assert {outcome for _, _, outcome in found(dsn)} == {"repaired"}
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_an_entry_that_is_about_to_join_is_left_alone(database: Database, dsn: str) -> None:
    """The entry was extra. Then its partition's attach began and brought the row's entry: hidden, and right."""
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
