"""The design's own experiment: random writers at every isolation level against a whole operation, by seeds."""

from __future__ import annotations

import random

import psycopg2.errors
import pytest

from airflow_roir.engine import build, fold, publish, seal
from airflow_roir.engine.build import Batch, Claim
from airflow_roir.engine.database import Database, execute
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.writers import Writer

ROWS = 800


@pytest.mark.parametrize("seed", range(30))
def test_index_equals_source_in_every_snapshot_after_publish(database: Database, dsn: str, seed: int) -> None:
    print(f"seed {seed}")
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, nullif(i % 20, 7)::text, i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    writers = [Writer(dsn, seed, number, ROWS * 2) for number in range(4)]
    for writer in writers:
        writer.start()
    try:
        chance = random.Random(seed)
        for _ in range(2):  # a create and a rebuild
            _, run = steps.begin(database, include="v", batch_rows=chance.choice((7, 40, 150)), ranges=5, segments=3)
            workers = [steps.worker(database, run, number) for number in range(2)]
            held: dict[int, Claim] = {}
            while True:
                number = chance.randrange(2)
                if number in held:
                    outcome = workers[number].batch(held.pop(number))
                    assert isinstance(outcome, Batch)
                    if outcome.claim is not None:
                        held[number] = outcome.claim
                else:
                    claim = workers[number].claim()
                    if isinstance(claim, Claim):
                        held[number] = claim
                    elif not held:
                        break
            for worker in workers:
                worker.connection.close()
            build.finish(database, run)
            for _ in seal.work(database, run, 0):
                pass
            seal.finish(database, run)
            fold.switch(database, run)
            with database.transaction() as connection:
                before = fold.left_in_delta(connection, _generation(database, run.operation_id))
            folded = fold.work(database, run)
            assert folded.rows <= before, "the delta may only shrink (I5)"
            fold.finish(database, run, folded)
            publish.publish(database, run)
            for _ in range(5):
                steps.assert_exact(database)
    finally:
        for writer in writers:
            try:
                writer.finish()
            except psycopg2.errors.DeadlockDetected:
                pytest.fail("the build and a writer deadlocked (I6)")
    assert sum(writer.commits for writer in writers) > 0
    steps.assert_exact(database)


def _generation(database: Database, operation_id: int) -> int:
    with database.transaction() as connection:
        return int(
            execute(
                connection, "SELECT generation_id FROM roir.operation WHERE id = %(id)s", {"id": operation_id}
            ).scalar_one()
        )
