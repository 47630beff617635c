"""The design's own experiment: random writers at every isolation level against a whole operation, by seeds."""

from __future__ import annotations

import random

import pytest

from airflow_roir.engine import apply_delta, fold, switch
from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.writers import Writer, at_work

ROWS = 800


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(16))
def test_index_equals_source_in_every_snapshot_after_publish(database: Database, dsn: str, seed: int) -> None:
    print(f"seed {seed}")
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, nullif(i % 20, 7)::text, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    writers = [Writer(dsn, seed, number, ROWS * 2) for number in range(4)]
    chance = random.Random(seed)
    with at_work(writers):  # a deadlock with one of them fails the test too (I6)
        for _ in range(2):  # a create and a rebuild
            batch_rows = chance.choice((7, 40, 150))
            prepared, run = steps.begin(database, include="v", batch_rows=batch_rows, ranges=5, segments=3)
            steps.build_by_chance(database, run, chance)
            steps.seal_all(database, run)
            switch.switch(database, run)
            with database.transaction() as connection:
                before = apply_delta.left_in_delta(connection, prepared.generation_id)
            folded = fold.fold_here(database, run)
            assert folded.rows <= before, "the delta may only shrink (I5)"
            fold.finish(database, run)
            steps.publish_all(database, run)
            for _ in range(5):
                steps.assert_exact(database)
    assert sum(writer.commits for writer in writers) > 0
    steps.assert_exact(database)
