"""The driver reports duplicates of a unique index while its workers copy."""

from __future__ import annotations

import os
import signal

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.control import operations
from airflow_roir.engine.database import Database
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.spark.driving import ROWS, Running, finish_and_check, lift_rate, one

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.slow]
FOUND = "SELECT count(*) FROM roir.duplicate WHERE phase = 'build' AND healed_at IS NULL"


def prepared(database: Database, dsn: str, on_duplicate: str) -> None:
    """Slow enough that it can't be through before the first look; the pairs are in the first ranges."""
    run_sql(dsn, "UPDATE t SET k = id::text", "UPDATE t SET k = '1' WHERE id IN (2, 1500)")
    options = BuildOptions(
        parallelism=2, batch_rows=200, ranges=8, segments=3, max_rows_per_second=1000, on_duplicate=on_duplicate
    )
    prepare.prepare(database, IndexDefinition.parse("ix", "t", "k", "v", unique=True), options, "test")


@pytest.mark.by_hand("sweeps")
def test_a_driver_that_is_killed_has_told_and_its_next_one_reads_on(database: Database, dsn: str) -> None:
    prepared(database, dsn, "pause")
    with Running(database) as driver:
        driver.wait_for(lambda: one(database, FOUND) == 3)
        assert "roir: build: " in driver.said
        read = one(database, "SELECT sum(rows) FROM roir.early_hashes")
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    run_sql(dsn, "UPDATE t SET k = 'other ' || id WHERE id IN (2, 1500)")
    with Running(database, take_over=True) as driver:
        # The driver continues behind the rows that were read, and sees that the groups are healed.
        driver.wait_for(lambda: one(database, "SELECT sum(rows) FROM roir.early_hashes") > read)
        read = one(database, "SELECT sum(rows) FROM roir.early_hashes")
        assert read <= one(database, "SELECT sum(rows) FROM roir.scan_range") < ROWS
        driver.wait_for(lambda: one(database, FOUND) == 0)
        lift_rate(database)
        assert driver.wait() == 0, driver.said
    assert one(database, "SELECT count(*) FROM roir.early_hashes") == 0
    finish_and_check(database)


@pytest.mark.by_hand("sweeps")
def test_a_build_that_is_to_stop_stops_at_the_first_pair(database: Database, dsn: str) -> None:
    prepared(database, dsn, "stop")
    with Running(database) as driver:
        assert driver.wait() == 3, driver.said
        assert "rows share 1 key" in driver.last_told
    row = operations.find_operation(database, "ix")
    assert (row.status, row.phase) == ("paused", "build")
    assert one(database, "SELECT sum(rows) FROM roir.scan_range") < ROWS
