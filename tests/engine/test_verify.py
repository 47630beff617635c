"""A verification finds every discrepancy, reports none that isn't there, and repairs those that it found."""

from __future__ import annotations

import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.generation import physical
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

ROWS = 2_000


@pytest.fixture
def base(dsn: str, database: Database) -> str:
    """The base of an index over `t`. The capture is switched off after the build."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v numeric, w text)",
        f"INSERT INTO t SELECT i, nullif(i % 50, 7)::text, i / 10.0, 'row ' || i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    prepared, run = steps.begin(database, include="v, w", ranges=4, segments=3)
    steps.finish_all(database, run)
    return physical.base(prepared.generation_id)


def test_an_index_that_is_right_is_found_right(database: Database, base: str) -> None:
    report = lifecycle.verify(database, "ix")
    assert (report.rows, report.entries, report.found, report.complete) == (ROWS, ROWS, 0, True)


def test_each_kind_of_corruption_is_found_and_mended(dsn: str, database: Database, base: str) -> None:
    run_sql(
        dsn,
        f"DELETE FROM {base} WHERE c2 IN (3, 7, 57)",  # 7 and 57 have a NULL key
        f"UPDATE {base} SET c4 = 'wrong' WHERE c2 = 100",
        f"UPDATE {base} SET c3 = 20.00 WHERE c2 = 200",  # equal, yet another value
        f"UPDATE {base} SET c1 = 'stale' WHERE c2 = 300",
        f"INSERT INTO {base} VALUES ('k', {ROWS + 1}, 1, 'no such row'), (NULL, {ROWS + 2}, 1, 'no such row')",
    )
    report = lifecycle.verify(database, "ix")
    assert (report.missing, report.extra, report.different, report.repaired) == (4, 3, 2, 0)
    repaired = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    assert (repaired.found, repaired.repaired, repaired.is_exact) == (9, 9, True)
    steps.assert_exact(database)
    assert lifecycle.verify(database, "ix").found == 0


def test_a_truncated_segment_is_rebuilt(dsn: str, database: Database, base: str) -> None:
    run_sql(dsn, f"TRUNCATE {base}_s001")
    report = lifecycle.verify(database, "ix", VerifyOptions(repair=True))
    assert report.missing > 100
    assert report.is_exact
    steps.assert_exact(database)
