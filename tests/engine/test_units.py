"""How a verification is cut into units."""

from __future__ import annotations

from airflow_roir.definition import VerifyOptions
from airflow_roir.engine import verification, verify_plan
from airflow_roir.engine.database import Database, execute
from tests.conftest import run_sql
from tests.engine import steps

ROWS = 5_000


def test_a_part_of_a_table_that_was_never_analyzed_has_units_of_many_rows(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text) WITH (autovacuum_enabled = false)",
        f"INSERT INTO t SELECT i, i::text FROM generate_series(1, {ROWS}) i",
    )
    _, run = steps.begin(database)
    steps.finish_all(database, run)
    verification.begin(database, "ix", VerifyOptions(slices=2), "test")
    with database.transaction() as connection:
        query = "SELECT count(*) FROM roir.verification_unit WHERE side = 'source'"
        units = execute(connection, query).scalar_one()
    assert ROWS / 10 < units <= verify_plan.UNITS_OF_PARTS
