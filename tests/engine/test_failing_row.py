"""The error of a build whose expression fails for a row names that row."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort
from airflow_roir.engine.control import remedies
from airflow_roir.engine.control.run import end_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.errors import RowRefused, WorkerFailed
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

# It raises once the table `bound` says so, as no immutable function does: after the prepare, which computes samples.
ABOVE = (
    "CREATE FUNCTION above(n int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS "
    "$$BEGIN IF n <= (SELECT least FROM public.bound) THEN RAISE 'too low: %', n USING ERRCODE = 'MY001'; END IF; "
    "RETURN n; END$$"
)
# Expressions, a condition, what makes a row bad, and the server's words.
CASES = {
    "a cast": ("created, (n + 1) AS a, ((doc ->> 'n')::int) AS b", "", "doc = '{\"n\": 2.5}'", "invalid input syntax"),
    "a division": ("created, ((doc ->> 'n')::int) AS a, (100 / n) AS b", "", "n = 0", "division by zero"),
    "an own error": ("created, above(n) AS a, (n + 1) AS b", "", "n = -7", "too low: -7"),
    "a condition": ("lower(doc ->> 'n') AS a", "above(n) > -9", "n = -7", "too low: -7"),
}


def make_docs(dsn: str, bad: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE bound (least int)",
        ABOVE,
        "CREATE TABLE docs (id int, created date, doc jsonb, n int, PRIMARY KEY (id, created)) "
        "PARTITION BY RANGE (created)",
        "CREATE TABLE docs_1 PARTITION OF docs FOR VALUES FROM ('2026-01-01') TO ('2026-03-01')",
        "CREATE TABLE docs_2 PARTITION OF docs DEFAULT",
        "INSERT INTO docs SELECT i, date '2026-01-01' + i, jsonb_build_object('n', i), i "
        "FROM generate_series(1, 150) AS i",
        f"UPDATE docs SET {bad}",
        "ANALYZE docs",
    )


@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_row(database: Database, dsn: str, case: str, scan: str) -> None:
    """Found: the error had only the value, among as many rows as the table has. The remedy is carried out."""
    keys, where, bad, said = CASES[case]
    make_docs(dsn, f"{bad} WHERE id = 117")
    _, run = steps.begin(database, "ix", "docs", keys, where=where, scan=scan, ranges=2, segments=2, batch_rows=60)
    run_sql(dsn, "INSERT INTO bound VALUES (0)")
    with pytest.raises((RowRefused, WorkerFailed)) as failed:
        steps.build_all(database, run)
    told = str(failed.value)
    assert f"index public.ix: row (id, created) = (117, 2026-04-28): {said}" in told
    assert is_permanent(failed.value)
    assert remedies.remedy(told, "ix", failed=False).startswith("roir abort ix, change the row")
    end_run(database, run)
    abort.abort(database, "ix", "test", "a row")
    run_sql(dsn, "DELETE FROM docs WHERE id = 117")
    steps.make_index(database, "ix", "docs", keys, where=where, scan=scan, ranges=2, segments=2, batch_rows=60)
    assert sql(steps.session(dsn), "SELECT count(*) FROM ix") == [(149,)]


def test_of_several_rows_the_first_is_named(database: Database, dsn: str) -> None:
    make_docs(dsn, "n = 0 WHERE id IN (3, 60)")
    _, run = steps.begin(database, "ix", "docs", "created, (100 / n) AS a", scan="key", ranges=1, batch_rows=200)
    with pytest.raises((RowRefused, WorkerFailed)) as failed:
        steps.build_all(database, run)
    assert "row (id, created) = (3, 2026-01-04)" in str(failed.value)
