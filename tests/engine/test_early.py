"""Duplicates of a unique index are told of while it is built: those of what is copied, nothing that isn't real."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg2
import pytest

from airflow_roir.engine import abort, build, operations
from airflow_roir.engine.build import Batch, Claim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.early import detector as early
from airflow_roir.engine.early.detecting import detecting
from airflow_roir.engine.early.detector import Detector
from airflow_roir.engine.job import load_job
from airflow_roir.engine.limits import Limits
from airflow_roir.engine.run import Run, start_run
from airflow_roir.errors import DuplicatesFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k {}, v int)"
ROWS = 400


@contextmanager
def detector(database: Database, run: Run, **how: Any) -> Iterator[Detector]:
    """A detector on a session of its own, to be stepped."""
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
        yield Detector(database, connection, job, **how)


def look(database: Database, run: Run) -> int:
    """What a new detector finds of all that is committed."""
    with detector(database, run) as one:
        return one.step(everything=True)


def found(dsn: str) -> set[tuple[str, int]]:
    """Keys and ids that are recorded and not healed."""
    with closing(steps.session(dsn)) as user:
        rows = sql(user, "SELECT key ->> 0, (primary_key ->> 0)::int FROM roir.duplicate WHERE healed_at IS NULL")
        return set(rows)


def kept(dsn: str) -> tuple[int, int]:
    """How many hashes are kept, and of how many parts the duplicates aren't written down."""
    with closing(steps.session(dsn)) as user:
        [row] = sql(
            user, "SELECT coalesce(sum(rows), 0)::int, count(*) FILTER (WHERE NOT looked) FROM roir.early_hashes"
        )
        return row


def fill(dsn: str, key: str = "int", value: str = "i") -> None:
    run_sql(dsn, TABLE.format(key), f"INSERT INTO t SELECT i, {value}, i FROM generate_series(1, {ROWS}) i", "ANALYZE t")


def begin(database: Database, **options: Any) -> Run:
    given = {"ranges": 8, "segments": 3, "batch_rows": 20, "scan": "key", "unique": True}
    return steps.begin(database, **{**given, **options})[1]


def build_ranges(database: Database, run: Run, count: int) -> None:
    """So many ranges from the first one on."""
    worker = steps.worker(database, run)
    with worker.connection:
        for _ in range(count):
            held = worker.claim()
            while isinstance(held, Claim):
                outcome = worker.batch(held)
                assert isinstance(outcome, Batch)
                held = outcome.claim


def test_at_half_of_the_build_the_pairs_of_that_half_are_known_and_no_others(database: Database, dsn: str) -> None:
    fill(dsn)
    # Within the first half, within the second, one in each.
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 150)", "UPDATE t SET k = 300 WHERE id = 350")
    run_sql(dsn, "UPDATE t SET k = 20 WHERE id = 399")
    run = begin(database)
    build_ranges(database, run, 4)
    with detector(database, run) as one:
        assert one.step(everything=True) == 3
        assert found(dsn) == {("1", 1), ("1", 90), ("1", 150)}
        assert one.step(everything=True) == 0
        build_ranges(database, run, 4)
        assert one.step(everything=True) == 4
    assert found(dsn) == {*((("1", n)) for n in (1, 90, 150)), ("300", 300), ("300", 350), ("20", 20), ("20", 399)}
    assert kept(dsn) == (ROWS, 0)
    build.finish(database, run)
    assert kept(dsn) == (0, 0)
