"""A worker of a compaction dies between any two statements. The next run continues: nothing is lost or left over."""

from __future__ import annotations

import pytest

from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.control.run import start_run
from tests.engine import steps
from tests.engine.compacting import act, begin, is_right, left_over, scene, small, stages, worker, writes
from tests.engine.interposed import Killed, killed
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)

# A rewrite of one segment and a split of another one send fewer statements than this.
STATEMENTS = 420


@pytest.mark.sample(0)
@pytest.mark.parametrize("at", range(1, STATEMENTS, 9))
def test_killed_at_a_statement(dsn: str, at: int) -> None:
    """The worker dies at statement number `at`; then another run continues."""
    database = scene(dsn)
    run = begin(database, act("rewrite", 1), act("split", 2, parts=2))
    doomed = small(dsn)
    one = worker(doomed, run)
    try:
        with killed(doomed.engine, at) as sent:
            for stage in stages(doomed, run, one):
                if stage.endswith("folding"):
                    writes(dsn)
    except Killed:
        one.connection.invalidate()
    else:
        assert len(sent) < at
    writes(dsn)
    steps.assert_exact(database)
    [(status,)] = sql(session(dsn), "SELECT status FROM roir.operation WHERE kind = 'compact'")
    if status != "completed":
        for _ in stages(database, start_run(database, "ix", "next", take_over=True)):
            writes(dsn)
            steps.assert_exact(database)
    is_right(database)


@pytest.mark.sample(0)
def test_two_workers_of_one_run(dsn: str) -> None:
    """Each of two workers has a unit, and swaps it; a third worker finds none."""
    database = scene(dsn)
    run = begin(database, act("rewrite", 1), act("split", 2, parts=2), parallelism=3)
    workers = [worker(database, run, number) for number in range(3)]
    claims = [one.claim() for one in workers]
    assert not isinstance(claims.pop(), UnitClaim)
    held: dict[int, UnitClaim] = {n: one for n, one in enumerate(claims) if isinstance(one, UnitClaim)}
    while held:
        for number in list(held):
            writes(dsn)
            now, _ = workers[number].advance(held.pop(number))
            if now is not None:
                held[number] = now
            steps.assert_exact(database)
    for one in workers:
        one.connection.close()
    for _ in stages(database, run):
        pass
    assert left_over(dsn) == []
