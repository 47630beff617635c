"""A unique index that is wrong: findings of a verification, repairs, and duplicates that are left to the users."""

from __future__ import annotations

from contextlib import closing

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.cli import overview
from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot import index
from airflow_roir.engine.verify.report import described
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.steps import sql
from tests.engine.test_verify_damage import broken
from tests.engine.verifying import build_index, found

pytestmark = pytest.mark.sample(1)

MENDED = VerifyOptions(repair=True)
EVERY_ROW = VerifyOptions(sample=100)
TABLE = (
    "CREATE TABLE t (id int, day int, k int, v int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(4)),
    "INSERT INTO t SELECT i, i % 4, nullif(i, 9), i FROM generate_series(1, 60) i",
)
# k is c1, id c2, day c3, v c4.
WRONG = {
    "no entry": (("DELETE FROM {base} WHERE c2 = 5",), [("missing", "5")]),
    "no entry of a NULL": (("DELETE FROM {base} WHERE c2 = 9",), [("missing", "9")]),
    "another value": (("UPDATE {base} SET c4 = -1 WHERE c2 IN (5, 9)",), [("different", "5"), ("different", "9")]),
    "an entry of no row": (("INSERT INTO {base} VALUES (77, 77, 1)",), [("extra", "77")]),
    "a NULL's entry of no row": (("UPDATE {base} SET c2 = 78 WHERE c2 = 9",), [("extra", "78"), ("missing", "9")]),
    "another row's primary key": (
        ("UPDATE {base} SET c2 = 99 WHERE c2 = 5",),
        [("extra", "99"), ("missing", "5")],
    ),
    "two have swapped their primary keys": (
        ("UPDATE {base} SET c2 = CASE c2 WHEN 5 THEN 25 ELSE 5 END, c3 = 1 WHERE c2 IN (5, 25)",),
        [("extra", "25"), ("extra", "5"), ("missing", "25"), ("missing", "5")],
    ),
    "a former key, and the key's by another": (
        ("DELETE FROM {base} WHERE c2 = 6", "UPDATE {base} SET c1 = 6 WHERE c2 = 5"),
        [("extra", "5"), ("missing", "5"), ("missing", "6")],
    ),
    "a NULL instead of the key": (
        ("DELETE FROM {base} WHERE c2 = 9", "UPDATE {base} SET c1 = NULL WHERE c2 = 5"),
        [("extra", "5"), ("missing", "5"), ("missing", "9")],
    ),
    "the key instead of a NULL": (
        ("DELETE FROM {base} WHERE c2 = 6", "UPDATE {base} SET c1 = 6 WHERE c2 = 9"),
        [("extra", "9"), ("missing", "6"), ("missing", "9")],
    ),
    "everything": (("TRUNCATE {base}",), None),
}  # fmt: skip


@pytest.mark.sample(0)
@pytest.mark.parametrize("nulls", ["distinct", "not distinct"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found_and_mended(database: Database, dsn: str, wrong: str, nulls: str) -> None:
    base = build_index(dsn, database, *TABLE, include="v", unique=True, nulls_not_distinct=nulls == "not distinct")
    statements, expected = WRONG[wrong]
    run_sql(dsn, *(one.format(base=base) for one in statements))
    for options in (VerifyOptions(slices=1), EVERY_ROW, MENDED):
        report = lifecycle.verify(database, "ix", options)
        if options.repair:
            # The entries that took a missing entry's place are gone too.
            assert report.is_exact
            assert report.found
            continue
        assert report.found == len(expected or range(60))
        if expected is not None:
            assert [row[:2] for row in found(dsn)] == expected
    steps.assert_exact(database)
    assert lifecycle.verify(database, "ix", EVERY_ROW).found == 0
    assert_enforced(dsn)


def assert_enforced(dsn: str) -> None:
    """A key that is taken is refused."""
    with closing(steps.session(dsn)) as user, pytest.raises(psycopg2.errors.UniqueViolation):
        sql(user, "INSERT INTO t VALUES (1000, 1, 7, 0)")


def unseen(dsn: str, *statements: str) -> None:
    """Runs statements that no capture sees."""
    [(triggers,)] = sql(
        steps.session(dsn),
        "SELECT string_agg(format('ALTER TABLE %s DISABLE TRIGGER %I', tgrelid::regclass, tgname), ';') "
        "FROM pg_trigger WHERE tgname LIKE 'roir%' AND tgparentid = 0 AND tgrelid = 't'::regclass",
    )
    run_sql(dsn, triggers, *statements, triggers.replace("DISABLE", "ENABLE ALWAYS"))


@pytest.mark.by_hand("sweeps")
def test_a_row_whose_key_another_row_has_is_a_duplicate_and_left_to_its_user(database: Database, dsn: str) -> None:
    build_index(dsn, database, *TABLE, include="v", unique=True)
    unseen(dsn, "INSERT INTO t VALUES (100, 1, 7, 0), (101, 1, 200, 0), (102, 2, 200, 0), (103, 2, 200, 0)")
    report = lifecycle.verify(database, "ix")
    assert (report.duplicate, report.missing, report.found) == (3, 1, 4)
    # Three rows share a key that has no entry at all: one of them could have it.
    assert ("duplicate", "100", None) in found(dsn)
    assert {key for _, key, _ in found(dsn)} == {"100", "101", "102", "103"}
    assert "duplicate 3" in str(report)
    assert report.as_dict()["duplicate"] == 3
    [one] = [one for one in report.first if one["primary_key"]["id"] == "100"]
    assert one["entry"] == {"k": "7", "id": "7", "day": "3", "v": "7"}
    assert described(one) == (
        "duplicate: k 7, id 100, day 1; row id 7, day 3 has this key, too. Change or delete rows until no two "
        "share a key, then: roir verify public.ix --repair"
    )
    report = lifecycle.verify(database, "ix", MENDED)
    assert (report.found, report.repaired, report.duplicate) == (4, 1, 3)
    kinds = {one: (kind, outcome) for kind, one, outcome in found(dsn)}
    assert kinds.pop("100") == ("duplicate", None)
    [repaired] = [one for one, (_, outcome) in kinds.items() if outcome]
    assert kinds.pop(repaired) == ("missing", "repaired")
    assert set(kinds.values()) == {("duplicate", None)}
    assert sql(steps.session(dsn), "SELECT count(*) FROM t") == [(64,)]
    # The first duplicate is healed by a write, the others by deleting the rows that have the entries.
    run_sql(dsn, "UPDATE t SET k = 300 WHERE id = 100", f"DELETE FROM t WHERE id IN ({repaired}, {min(kinds)})")
    report = lifecycle.verify(database, "ix", MENDED)
    assert (report.found, report.repaired, report.missing) == (1, 1, 1)
    steps.assert_exact(database)
    assert_enforced(dsn)


@pytest.mark.sample(0)
def test_a_duplicate_that_was_healed_before_the_repair_came_to_it_is_mended(database: Database, dsn: str) -> None:
    build_index(dsn, database, *TABLE, unique=True)
    unseen(dsn, "INSERT INTO t VALUES (100, 1, 7, 0)")
    run = verifying.begin(database, repair=True)
    verifying.to_check(database, run)
    one = verifying.worker(database, run)
    held = verifying.claim(one)
    while not one.unit(held).found:
        held = verifying.claim(one)
    run_sql(dsn, "DELETE FROM t WHERE id = 7")
    assert one.repair(held)
    assert found(dsn) == [("duplicate", "100", "repaired")]
    steps.assert_exact(database)


# As in test_verify_damage.py, for the damages that only a unique index has. Row 7 has a NULL key.
UNIQUE_FILL = "INSERT INTO t SELECT i, nullif(i, 7)::text, i FROM generate_series(1, 400) i"


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("nulls", ["distinct", "not distinct"])
def test_what_the_tree_of_a_unique_index_has_lost_is_damage_and_left_alone(
    database: Database, dsn: str, nulls: str
) -> None:
    definition = {"include": "v", "unique": True, "nulls_not_distinct": nulls == "not distinct"}
    base = build_index(dsn, database, TABLE_OF_TEXTS, UNIQUE_FILL, "ANALYZE t", **definition)
    with broken(dsn, base, "tree lost"):
        run_sql(
            dsn,
            f"CREATE TEMP TABLE e AS SELECT * FROM {base} WHERE c2 IN (6, 7); DELETE FROM {base} WHERE c2 IN (6, 7); "
            f"INSERT INTO {base} SELECT * FROM e",
        )
    for options in (VerifyOptions(), MENDED, EVERY_ROW):
        report = lifecycle.verify(database, "ix", options)
        assert report.damaged >= 2
        assert report.repaired == 0
    steps.make_index(database, table=None, keys=None)
    assert lifecycle.verify(database, "ix").found == 0
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_two_entries_of_one_key_that_the_tree_lets_in_are_mended(database: Database, dsn: str) -> None:
    base = build_index(dsn, database, TABLE_OF_TEXTS, UNIQUE_FILL, "ANALYZE t", include="v", unique=True)
    with broken(dsn, base, "tree twice"):
        run_sql(
            dsn,
            f"INSERT INTO {base} VALUES ('6', 1000, 1), ('8', 1001, 1), ('8', 1002, 1)",
            f"DELETE FROM {base} WHERE c2 = 8",
        )
    report = lifecycle.verify(database, "ix", MENDED)
    assert (report.missing, report.is_exact) == (1, True)
    steps.assert_exact(database)


TABLE_OF_TEXTS = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"


@pytest.mark.by_hand("sweeps")
def test_the_status_says_what_to_do_about_a_duplicate(database: Database, dsn: str) -> None:
    build_index(dsn, database, *TABLE, include="v", unique=True)
    unseen(dsn, "INSERT INTO t VALUES (100, 1, 7, 0)")
    lifecycle.verify(database, "ix")
    [one] = [one for one in index.indexes(database) if one.index == "public.ix"]
    assert one.verified is not None
    assert (one.verified.duplicate, one.verified.found) == (1, 1)
    lines = list(overview.index_notes(one))
    assert "the verification found duplicate 1; repaired 0: roir verify public.ix --repair" in lines
    assert "duplicate rows are yours to change or delete first: roir.discrepancy has them" in lines
