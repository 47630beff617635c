"""The error of a build whose expression fails for a row names that row."""

from __future__ import annotations

import psycopg2
import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import remedies
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.errors import RowRefused, WorkerFailed
from airflow_roir.options import VerifyOptions
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


def go_on(database: Database, index: str) -> None:
    run = start_run(database, index, "test", take_over=True)
    steps.build_all(database, run)
    steps.seal_all(database, run)
    lifecycle.run_phases(database, run)


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
    assert remedies.remedy(told, "ix", failed=False) == "Change or delete the row that is named. Then: roir resume ix"
    end_run(database, run)
    run_sql(dsn, "DELETE FROM docs WHERE id = 117")
    go_on(database, "ix")
    assert sql(steps.session(dsn), "SELECT count(*) FROM ix") == [(149,)]


# Statements with rows that no entry can be computed for, and whether PostgreSQL's own index would refuse them.
WRITES = [
    ("UPDATE docs SET n = 5 WHERE id = 40", False),
    ("UPDATE docs SET n = NULL WHERE id = 41", False),
    ("UPDATE docs SET n = 6, id = 1042 WHERE id = 42", False),
    ("UPDATE docs SET n = NULL, created = created + 100 WHERE id = 43", False),
    ("DELETE FROM docs WHERE id = 44", False),
    ("UPDATE docs SET doc = '{}' WHERE id = 45", True),
    ("INSERT INTO docs VALUES (2000, '2026-01-05', '{}', 0)", True),
    ("UPDATE docs SET n = 0 WHERE id = 50", True),
    ("INSERT INTO docs SELECT id, created, doc, 7 FROM docs WHERE id = 46 "
     "ON CONFLICT (id, created) DO UPDATE SET n = EXCLUDED.n", False),
    ("WITH gone AS (DELETE FROM docs WHERE id = 47 RETURNING id + 3000 AS id, created, doc) "
     "INSERT INTO docs SELECT id, created, doc, 8 FROM gone", False),
    ("MERGE INTO docs USING (VALUES (48)) v (id) ON docs.id = v.id WHEN MATCHED THEN DELETE", False),
    ("UPDATE docs SET n = 9 WHERE id IN (49, 51)", False),
    ("UPDATE docs SET n = id WHERE n = 0", False),
]  # fmt: skip
SHAPES = {
    "key": ("created, above(n) AS a", ""),
    "first key": ("above(n) AS a, (n + 1) AS b", ""),
    "condition": ("lower(doc ->> 'n') AS a", "above(n) > -9"),
    "both": ("above(n) AS a", "above(n) > -9 OR n IS NULL"),
}


@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_before", [True, False], ids=["before the scan", "after a part of it"])
def test_users_can_mend_rows_during_a_build(
    database: Database, dsn: str, shape: str, scan: str, is_before: bool
) -> None:
    """Found: while the build was there, a row for which the expression raises couldn't be changed or deleted."""
    keys, where = SHAPES[shape]
    make_docs(dsn, "n = CASE WHEN id = 50 THEN 50 ELSE 0 END WHERE id BETWEEN 40 AND 52")
    # Another index that is built at the same time can have these rows: it must lose their old entries.
    _, other = steps.begin(database, "other", "docs", "(n + 1) AS a", where="n + 1 > 0", scan=scan)
    steps.build_all(database, other)
    _, run = steps.begin(database, "ix", "docs", keys, where=where, scan=scan, ranges=1, segments=2, batch_rows=7)
    run_sql(dsn, "INSERT INTO bound VALUES (0)")
    if not is_before:
        with pytest.raises((RowRefused, WorkerFailed)):
            steps.build_all(database, run)
    end_run(database, run)
    user = steps.session(dsn)
    for write, is_refused in WRITES:
        if is_refused:
            with pytest.raises(psycopg2.Error) as refused:
                sql(user, write)
            assert refused.value.pgcode == "MY001"
            user.rollback()
        else:
            sql(user, write)
            user.commit()
    for index in ("ix", "other"):
        go_on(database, index)
        assert lifecycle.verify(database, index, VerifyOptions()).is_exact
    expressions = ", ".join(part.split(" AS ")[0] for part in keys.split(", "))
    ours = sql(user, f"SELECT {', '.join(part.split(' AS ')[-1] for part in keys.split(', '))}, id FROM ix ORDER BY id")
    assert ours == sql(user, f"SELECT {expressions}, id FROM docs WHERE {where or 'true'} ORDER BY id")
    assert sql(user, "SELECT a, id FROM other ORDER BY id") == sql(
        user, "SELECT n + 1, id FROM docs WHERE n + 1 > 0 ORDER BY id"
    )


def test_of_several_rows_the_first_is_named(database: Database, dsn: str) -> None:
    make_docs(dsn, "n = 0 WHERE id IN (3, 60)")
    _, run = steps.begin(database, "ix", "docs", "created, (100 / n) AS a", scan="key", ranges=1, batch_rows=200)
    with pytest.raises((RowRefused, WorkerFailed)) as failed:
        steps.build_all(database, run)
    assert "row (id, created) = (3, 2026-01-04)" in str(failed.value)
