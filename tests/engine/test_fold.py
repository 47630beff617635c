"""The steps of the fold: their reads and their effects."""

from __future__ import annotations

import re

import pytest

from airflow_roir.engine import apply_delta, fold, lifecycle, switch
from airflow_roir.engine.apply_delta import Folded, Folding
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from tests.conftest import run_sql
from tests.engine import steps

ROWS = 10_000
PARTS = "SELECT count(*), count(*) FILTER (WHERE done), sum(next_block) FROM roir.delta_part"
# The sequential scans of the delta by this transaction.
WHOLE_SCANS = "SELECT seq_scan FROM pg_stat_xact_all_tables WHERE relid = %(delta)s::regclass"


def test_a_step_reads_its_own_blocks_of_the_delta(database: Database, dsn: str) -> None:
    """Seen to fail with a list of addresses alone: each step looked for these in the whole delta."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
        f"INSERT INTO t SELECT i, i % 100, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    run = steps.sealed(database, include="v")
    run_sql(dsn, "UPDATE t SET k = k + 1 WHERE id % 3 > 0", "DELETE FROM t WHERE id % 3 = 0")
    switch.switch(database, run)
    with database.transaction() as connection:
        job = load_job(connection, run)
    with database.connect() as connection:
        worker = Folding(connection, job.generation_id, job.entry)
        with connection.begin():
            where = "d.ctid >= %(first)s::tid AND d.ctid < %(end)s::tid"
            folded = worker.fold(where, {"first": 0, "end": fold.BLOCKS_PER_STEP})
            scanned = execute(connection, WHOLE_SCANS, {"delta": worker.delta}).scalar_one()
    assert folded.upserted
    assert folded.annihilated
    assert scanned == 0
    assert folded + fold.fold_here(database, run) == Folded(upserted=6667, annihilated=10_000)
    with database.transaction() as connection:
        assert apply_delta.left_in_delta(connection, job.generation_id) == 0


@pytest.mark.sample(0)
def test_a_fold_that_is_killed_continues_at_the_block_where_it_was(database: Database, dsn: str) -> None:
    """A step folds its blocks and moves its worker's place in one transaction."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
        f"INSERT INTO t SELECT i, i % 100, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    run = steps.sealed(database, include="v", parallelism=2)
    run_sql(dsn, "UPDATE t SET k = k + 1 WHERE id % 3 > 0", "DELETE FROM t WHERE id % 3 = 0")
    switch.switch(database, run)
    fold.begin(database, run)
    fold.begin(database, run)
    [(parts, *_)] = steps.sql(steps.session(dsn), PARTS)
    assert parts > 2
    stepping = steps.step_by_step(database, run, fold.PHASE)
    folded = [next(stepping).rows for _ in range(3)]
    stepping.close()
    before = steps.sql(steps.session(dsn), PARTS)
    run = start_run(database, "ix", "next", take_over=True)
    assert steps.sql(steps.session(dsn), PARTS) == before
    lifecycle.run_phases(database, run)
    [detail] = steps.sql(steps.session(dsn), "SELECT detail FROM roir.event WHERE detail LIKE 'publish; folded%'")
    counts = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+\d|\d", detail[0])]
    assert sum(counts) == 6667 * 2 + 3333 > sum(folded) > 0
    steps.assert_exact(database)
