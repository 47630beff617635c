"""Several indexes of one source by one scan: each is exact, and what happens to one of them doesn't hurt the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import psycopg2
import pytest

from airflow_roir.engine import abort, build, operations
from airflow_roir.engine.build import Batch, BuildWorker, Claim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.run import Run, end_run, settle, start_run
from airflow_roir.engine.status import operation_status
from airflow_roir.errors import Fenced, SourceChanged
from airflow_roir.operation import Phase, Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(3)

ROWS = 60
SMALL = {"segments": 2, "batch_rows": 5}
INDEXES = {"a": ("k", "v"), "b": ("v", None), "c": ("v, k", None)}


@pytest.fixture
def table(dsn: str) -> str:
    steps.make_table(dsn, ROWS)
    return dsn


def begin(database: Database, index: str, **options: object) -> Run:
    """An operation with a run that is alive; of several the later ones take the first one's ranges."""
    keys, include = INDEXES[index]
    return steps.begin(database, index, keys=keys, include=include, **{**SMALL, **options})[1]


def ranges(database: Database, run: Run) -> list[tuple[object, ...]]:
    with database.transaction() as connection:
        found = execute(
            connection,
            "SELECT ordinal, relation, lower, upper, filenode, watermark, done, rows FROM roir.scan_range "
            "WHERE operation_id = %(id)s ORDER BY ordinal",
            {"id": run.operation_id},
        )
        return [tuple(row) for row in found]


def copied(database: Database, run: Run) -> int:
    return sum(int(str(row[-1])) for row in ranges(database, run))


def claimed(worker: BuildWorker) -> Claim:
    claim = worker.claim()
    assert isinstance(claim, Claim)
    return claim


def batch(worker: BuildWorker, claim: Claim) -> Batch:
    outcome = worker.batch(claim)
    assert isinstance(outcome, Batch)
    return outcome


def finish(database: Database, index: str) -> None:
    """By a run of its own, to the end."""
    steps.finish_all(database, start_run(database, index, "test", take_over=True))
    steps.assert_exact(database, index)


def test_one_scan_builds_three_indexes(database: Database, table: str) -> None:
    runs = [begin(database, index) for index in INDEXES]
    rows = steps.batches(database, runs[0])
    assert sum(rows) == ROWS
    assert ranges(database, runs[0]) == ranges(database, runs[1]) == ranges(database, runs[2])
    for run in runs:
        assert copied(database, run) == ROWS
        assert isinstance(steps.worker(database, run).claim(), build.Stop)
        steps.finish_all(database, run)
    for index in INDEXES:
        steps.assert_exact(database, index)
