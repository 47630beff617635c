"""An error of a shard that no retry can help, as a missing right, ends the work at once and names the shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.retry.trouble import is_permanent
from airflow_roir.engine.work.worker import worker_failed
from airflow_roir.errors import WorkerFailed
from airflow_roir.shards.copy import copy_ranges
from airflow_roir.shards.shard import Feed, Shard

RAISE = "DO $$ BEGIN RAISE SQLSTATE '{}' USING MESSAGE = 'permission denied for table t'; END $$"
COPIER: Any = SimpleNamespace(close=lambda: None, job=SimpleNamespace(run=SimpleNamespace(index="public.i")))
FEED = Feed(1, 1, Shard(1, "west", None), "outbox", 1)


@pytest.mark.parametrize(
    ("state", "permanent"),
    [("42501", True), ("22012", True), ("0A000", True), ("3F001", True), ("XX001", False), ("P0001", False)],
)
def test_an_error_that_no_retry_helps_stays_permanent_up_to_the_task(
    database: Database, state: str, permanent: bool
) -> None:
    """Found: the task was tried six times more, since the shard's error became one of a worker that may pass."""
    with pytest.raises(DBAPIError) as met, database.transaction() as connection:
        execute(connection, RAISE.format(state))
    error = copy_ranges.ShardCopier._failed(COPIER, FEED, met.value)
    assert isinstance(error, WorkerFailed)
    told = worker_failed(0, error)
    assert is_permanent(told) is permanent
    assert str(told) == 'worker 0: shard "west": permission denied for table t'


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("42703", "it answers, but has lost a column: permission denied for table t"),
        ("42P01", "it answers, but has lost a table: permission denied for table t"),
        ("42883", "permission denied for table t"),
        ("57P01", "permission denied for table t"),
    ],
)
def test_a_shard_that_has_lost_a_column_or_a_table_says_so(database: Database, state: str, problem: str) -> None:
    """Found: it was only called away, as if it didn't answer."""
    with pytest.raises(DBAPIError) as met, database.transaction() as connection:
        execute(connection, RAISE.format(state))
    error = copy_ranges.ShardCopier._failed(COPIER, FEED, met.value)
    assert isinstance(error, copy_ranges.ShardAway)
    assert error.problem == problem
