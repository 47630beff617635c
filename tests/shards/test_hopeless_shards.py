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
    copier: Any = SimpleNamespace(close=lambda: None, job=SimpleNamespace(run=SimpleNamespace(index="public.i")))
    feed = Feed(1, 1, Shard(1, "west", None), "outbox", 1)
    error = copy_ranges.ShardCopier._failed(copier, feed, met.value)
    assert isinstance(error, WorkerFailed)
    told = worker_failed(0, error)
    assert is_permanent(told) is permanent
    assert str(told) == 'worker 0: shard "west": permission denied for table t'
