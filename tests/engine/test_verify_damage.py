"""Heap and index of the table, or of the entries, disagree: verify says so, and a repair makes nothing worse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.options import VerifyOptions
from tests.comparison import compare
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.verifying import build_index

pytestmark = pytest.mark.sample(1)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
FILL = "INSERT INTO t SELECT i, nullif(i % 5, 2)::text, i FROM generate_series(1, 400) i"
TRIGGER = "DO $$ BEGIN EXECUTE format('ALTER TABLE t %s TRIGGER roir_capture_%s', '{0}', 't'::regclass::oid); END $$"
UNWATCHED, WATCHED = TRIGGER.format("DISABLE"), TRIGGER.format("ENABLE ALWAYS")
NOT_READY, READY = "indisready = false, indisvalid = false", "indisready = true, indisvalid = true"
NOT_UNIQUE, UNIQUE = "indisunique = false, indimmediate = false", "indisunique = true, indimmediate = true"

# Statements that run while the table's primary key misses rows (`key lost`) or takes duplicates (`key twice`), while
# the entries' B-tree does (`tree lost`, `tree twice`), and afterwards as usual (`then`). Row 7 has a NULL key.
Damage = dict[str, list[str]]
DAMAGES: dict[str, Damage] = {
    "a row that the key has lost": {"key lost": [UNWATCHED, "INSERT INTO t VALUES (1000, 'a', 1)", WATCHED]},
    "a row that the key has lost, NULL": {"key lost": [UNWATCHED, "INSERT INTO t VALUES (1000, NULL, 1)", WATCHED]},
    "a row that the key has lost, its entry is there": {"key lost": ["INSERT INTO t VALUES (1000, 'a', 1)"]},
    "a row that the key has lost, its entry is other": {
        "key lost": ["INSERT INTO t VALUES (1000, 'a', 1)"],
        "then": ["UPDATE {base} SET c3 = 2 WHERE c2 = 1000"],
    },
    "two rows, one is lost": {"key lost": [UNWATCHED, "INSERT INTO t SELECT * FROM t WHERE id IN (6, 7)", WATCHED]},
    "two rows": {"key twice": [UNWATCHED, "INSERT INTO t SELECT * FROM t WHERE id IN (6, 7)", WATCHED]},
    "two rows of other keys": {"key twice": [UNWATCHED, "INSERT INTO t VALUES (6, 'other', 6)", WATCHED]},
    "two rows and their entries": {"key twice": ["INSERT INTO t VALUES (6, 'other', 6)"]},
    "two rows of other values": {"key twice": [UNWATCHED, "INSERT INTO t VALUES (6, '1', 77)", WATCHED]},
    "an entry that the tree has lost": {"tree lost": ["CREATE TEMP TABLE e AS SELECT * FROM {base} WHERE c2 IN (6, 7)",
        "DELETE FROM {base} WHERE c2 IN (6, 7)", "INSERT INTO {base} SELECT * FROM e"]},
    "two entries, one is lost": {"tree lost": ["INSERT INTO {base} SELECT * FROM {base} WHERE c2 IN (6, 7)"]},
    "two entries": {"tree twice": ["INSERT INTO {base} SELECT * FROM {base} WHERE c2 IN (6, 7)"]},
    "two entries of other values": {"tree lost": ["INSERT INTO {base} SELECT c1, c2, 77 FROM {base} WHERE c2 = 6"]},
    "an entry of no row that the tree has lost": {"tree lost": ["INSERT INTO {base} VALUES ('a', 1000, 1)"]},
    "a row's end whose entry was lost": {
        "tree lost": ["UPDATE {base} SET c3 = c3 WHERE c2 = 6; DELETE FROM {base} WHERE c2 = 8; "
                      "INSERT INTO {base} VALUES ('3', 8, 8)"],
        "then": ["DELETE FROM t WHERE id IN (6, 8)"],
    },
    "a row's change whose entry was lost": {
        "tree lost": ["DELETE FROM {base} WHERE c2 IN (6, 8)", "INSERT INTO {base} VALUES ('1', 6, 6), ('3', 8, 8)"],
        "then": ["UPDATE t SET v = 0 WHERE id = 6", "UPDATE t SET k = 'x' WHERE id = 8"],
    },
    "damage and a plain difference": {
        "tree lost": ["INSERT INTO {base} SELECT * FROM {base} WHERE c2 IN (6, 7)"],
        "then": ["UPDATE {base} SET c3 = -1 WHERE c2 = 20", "DELETE FROM {base} WHERE c2 = 30"],
    },
}  # fmt: skip
# The index is right; it is the table that needs a REINDEX.
RIGHT = ("a row that the key has lost, its entry is there", "two rows and their entries")


@contextmanager
def broken(dsn: str, base: str, where: str) -> Iterator[None]:
    """In the block, the index isn't written to, or takes duplicates."""
    table, how = where.split()
    indexes = "'t_pkey'::regclass"
    if table == "tree":
        # All indexes of a segment: in a unique index the default segment has two.
        segments = f"SELECT inhrelid FROM pg_inherits WHERE inhparent = '{base}'::regclass"
        indexes = f"(SELECT indexrelid FROM pg_index WHERE indrelid IN ({segments}))"
    before, after = (NOT_READY, READY) if how == "lost" else (NOT_UNIQUE, UNIQUE)
    run_sql(dsn, f"UPDATE pg_index SET {before} WHERE indexrelid IN ({indexes})")
    yield
    run_sql(dsn, f"UPDATE pg_index SET {after} WHERE indexrelid IN ({indexes})")


def damaged(dsn: str, database: Database, case: str) -> str:
    base = build_index(dsn, database, TABLE, FILL, "ANALYZE t", include="v", covering="none")
    for where, statements in DAMAGES[case].items():
        made = [one.format(base=base) for one in statements]
        if where == "then":
            # By the index, as in a big table.
            run_sql(dsn, "SET enable_seqscan = off", "SET enable_bitmapscan = off", *made)
        else:
            with broken(dsn, base, where):
                run_sql(dsn, *made)
    return base


def is_right(dsn: str, database: Database, base: str) -> bool:
    """Without an index there are as many equal rows as entries; by the tree alone every entry is found once."""
    user = steps.session(dsn)
    sql(user, "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off")
    sides = (f"SELECT c1, c2, c3 FROM {base}", "SELECT k, id, v FROM t")
    differ = sum(len(sql(user, f"{one} EXCEPT ALL {other}")) for one, other in (sides, sides[::-1]))
    heap = [identity for (identity,) in sql(user, f"SELECT ROW(c1, c2)::text FROM {base} ORDER BY 1")]
    sql(user, "RESET ALL")
    sql(user, "SET enable_seqscan = off; SET enable_bitmapscan = off")
    keys = sql(user, "SELECT DISTINCT k FROM t UNION SELECT 'a'")
    found = [row for (key,) in keys for (row,) in sql(user, f"SELECT ROW(c1, c2)::text FROM {base} WHERE c1 " + (
        "IS NULL" if key is None else f"= '{key}'"))]  # fmt: skip
    user.close()
    return differ == 0 and sorted(found) == sorted(heap)


def is_beyond(case: str, by_key: bool, part: bool) -> bool:
    """True if the docs say that it isn't seen: by the source's key, rows lost by the key; in a part, second rows."""
    return (by_key and "key lost" in DAMAGES[case]) or (part and "key twice" in DAMAGES[case])


def every_way(dsn: str, database: Database, case: str) -> None:
    base = damaged(dsn, database, case)
    exact = is_right(dsn, database, base)
    assert exact == (case in RIGHT)
    for options in (VerifyOptions(), VerifyOptions(sample=100), VerifyOptions(repair=True)):
        # By blocks; and by ranges of the primary key, which are read by its index.
        for by_key, limits in ((False, Limits()), (True, Limits(snapshot_rows=0, unit_rows=50))):
            before = is_right(dsn, database, base)
            report = verify(Database(dsn, "roir tests", limits), "ix", options)
            told = (case, options, limits, report, before)
            # A repair may end the damage. A report must not call anything else right.
            right = is_right(dsn, database, base)
            assert before <= right, told
            if not right and not is_beyond(case, by_key=by_key or options.is_partial, part=options.is_partial):
                assert not report.is_exact, told
            if before and case not in RIGHT:
                assert report.found == 0, told
            for one in report.first:
                if one["kind"] == "damaged":
                    assert "REINDEX TABLE public.t" in one["detail"] or "roir build" in one["detail"], told
    if case == RIGHT[0]:
        user = steps.session(dsn)
        assert len(sql(user, f"SELECT 1 FROM {base} WHERE c2 = 1000")) == 1, "the entry of a row that is there"


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("case", DAMAGES)
def test_what_lookups_can_not_tell_is_found_and_never_called_mended(dsn: str, database: Database, case: str) -> None:
    """Found: it said clean though heap and B-tree of the table or the entries disagreed; a repair called it `repaired`.
    It holds: `damaged`, with the remedy; a repair doesn't touch it.
    """
    every_way(dsn, database, case)


@pytest.mark.by_hand("sweeps")
def test_a_rebuild_ends_what_is_damaged_in_the_entries(dsn: str, database: Database) -> None:
    damaged(dsn, database, "an entry that the tree has lost")
    report = verify(database, "ix")
    assert (report.damaged, report.found) == (2, 2)
    assert str(report).endswith("damaged 2")
    steps.make_index(database, table=None, keys=None)
    assert verify(database, "ix").found == 0
    assert compare(database, "ix").rows == 400
