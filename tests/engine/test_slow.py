"""The causes of a slow build are shown where the options are given, and by the status."""

from __future__ import annotations

from airflow_roir.engine.control import requests
from airflow_roir.engine.control.slow_options import slow, slow_operation
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.options import BuildOptions
from tests.engine import steps


def test_each_option_that_makes_a_build_slow_is_told() -> None:
    assert slow(BuildOptions(), 10**9, 1024, 2) == []
    told = slow(BuildOptions(parallelism=99, batch_rows=1000, max_rows_per_second=500), 36_000_000, 1, 2)
    assert [line.split(";")[0] for line in told] == [
        "slow: batches of 1,000 rows make 36,000 commits",
        "slow: at 500 rows per second the copy of 36,000,000 rows takes 20.0 hours",
        "99 workers are asked for, but 1 range is left: the other workers aren't started",
        "slow: 99 workers share 2 cores",
    ]
    # All this is harmless for a small table.
    assert slow(BuildOptions(batch_rows=1000, max_rows_per_second=500), 100_000, 8, 2) == []


def test_an_operation_begins_with_what_makes_it_slow_as_its_notice(dsn: str, database: Database) -> None:
    steps.make_table(dsn, 1000)
    prepared, _ = steps.begin(database, ranges=3, parallelism=9)
    notice = operation_status(database, prepared.operation_id).notice
    assert notice is not None
    assert notice.startswith("9 workers are asked for, but 3 ranges are left")
    row = requests.change_options(database, "ix", actor="me", parallelism=8)
    assert slow_operation(database, row) == [
        "8 workers are asked for, but 3 ranges are left: the other workers aren't started"
    ]
    row = requests.change_options(database, "ix", actor="me", parallelism=2)
    assert (slow_operation(database, row), operation_status(database, prepared.operation_id).notice) == ([], None)
