"""A worker that was taken for dead comes back beside the worker that has its piece now: it is fenced, whatever it
meets.

Every kind of piece, at every step of the work of the run that took over, and when the index is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from airflow_roir.engine import build, fold, seal, switch
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.drop import drop_index
from airflow_roir.engine.verify import comparing
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import Fenced
from airflow_roir.operation import Status
from tests.conftest import run_sql
from tests.engine import compacting, steps, verifying

pytestmark = pytest.mark.sample(2)

# A zombie's next step, and the work of the run that took over, one piece at a time.
Scene = tuple[Callable[[], object], Callable[[Run], Iterator[object]]]


def of_range(database: Database, begun: int) -> Scene:
    """A range of which `begun` batches are copied."""
    _, run = steps.begin(database, keys="k,v", ranges=2, segments=2, batch_rows=40)
    one = steps.worker(database, run)
    claim = one.claim()
    for _ in range(begun):
        assert isinstance(claim, build.Claim)
        outcome = one.step(claim)
        assert isinstance(outcome, Step)
        claim = outcome.rest
    assert isinstance(claim, build.Claim)

    def later(run: Run) -> Iterator[object]:
        yield from build.PHASE.work(database, run, 0)
        build.finish(database, run)
        yield from seal.PHASE.work(database, run, 0)
        seal.finish(database, run)
        switch.switch(database, run)
        steps.fold_and_publish(database, run)

    return (lambda: one.step(claim)), later


def of_segment(database: Database, indexed: bool, unique: bool = False) -> Scene:
    """A segment before its index, or before its vacuum."""
    run = steps.built(database, keys="id,k" if unique else "k,v", unique=unique, ranges=2, segments=2)
    connection = database.engine.connect()
    with connection.begin():
        job = load_job(connection, run)
    one = seal.SealWorker(database, connection, job, 0)
    claim = one.claim()
    assert isinstance(claim, seal.SegmentClaim)
    next_step: Callable[[], object] = partial(one.index, claim)
    if indexed:
        held = one.index(claim)
        assert held is not None
        next_step = partial(one.vacuum, held)

    def later(run: Run) -> Iterator[object]:
        yield from seal.PHASE.work(database, run, 0)
        seal.finish(database, run)
        switch.switch(database, run)
        steps.fold_and_publish(database, run)

    return next_step, later


def of_verification(database: Database, check: bool) -> Scene:
    """A unit that is to be summed, or one whose rows are to be compared one by one."""
    steps.make_index(database, keys="k,v", segments=2)
    # A partial verification compares its rows at once.
    run = verifying.begin(database, **({"sample": 100} if check else {}))
    one = verifying.worker(database, run)
    claim = verifying.claim(one)

    def later(run: Run) -> Iterator[object]:
        while True:
            with database.transaction() as connection:
                if operations.read_operation(connection, run.operation_id).status != Status.RUNNING:
                    return
            yield from verifying.units(database, run)
            comparing.finish(database, run)

    return (lambda: one.unit(claim)), later


def of_compaction(database: Database, stage: str) -> Scene:
    """A unit at one of its stages."""
    steps.make_index(database, keys="k,v", segments=2)
    run = compacting.begin(database, compacting.act("rewrite", 1), compacting.act("split", 2, parts=2))
    one = compacting.worker(database, run)
    claim = one.claim()
    assert isinstance(claim, UnitClaim)
    while claim.status.value != stage:
        now, _ = one.advance(claim)
        assert now is not None
        claim = now
    return (lambda: one.advance(claim)), lambda run: compacting.stages(database, run)


def of_delta(database: Database) -> Scene:
    """A part of the delta of which some blocks are folded."""
    run = steps.built(database, keys="k,v", ranges=2, segments=2)
    run_sql(database.dsn, "UPDATE t SET k = '7', v = -v", "DELETE FROM t WHERE id % 5 = 0")
    steps.seal_all(database, run)
    switch.switch(database, run)
    fold.begin(database, run)
    connection = database.engine.connect()
    one = fold.make_worker(database, connection, run, 0)
    claim = one.claim()
    assert isinstance(claim, fold.PartClaim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "BLOCKS_PER_STEP", 1)
        done = one.step(claim)
    assert isinstance(done, Step)
    assert done.rest is not None

    def later(run: Run) -> Iterator[object]:
        while operations.find_operation(database, "ix").phase == "fold":
            yield from fold.PHASE.work(database, run, 0)
            fold.finish(database, run)
        steps.publish_all(database, run)

    return (lambda: one.step(done.rest)), later


SCENES: dict[str, Callable[[Database], Scene]] = {
    "a range": partial(of_range, begun=0),
    "a range that is half copied": partial(of_range, begun=1),
    "a segment without its index": partial(of_segment, indexed=False),
    "a segment without its unique index": partial(of_segment, indexed=False, unique=True),
    "a segment without its vacuum": partial(of_segment, indexed=True),
    "a part of the delta": of_delta,
    "a unit that is summed": partial(of_verification, check=False),
    "a unit whose rows are compared": partial(of_verification, check=True),
    **{
        f"a unit of a compaction, {stage}": partial(of_compaction, stage=stage)
        for stage in ("waiting", "copying", "indexing", "folding")
    },
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("scene", SCENES)
def test_it_is_fenced_and_changes_nothing(dsn: str, scene: str) -> None:
    steps.make_table(dsn, 200)
    database = compacting.small(dsn)
    zombie, later = SCENES[scene](database)
    compacting.writes(dsn)
    taken_over = start_run(database, "ix", "next", take_over=True)

    def comes_back() -> None:
        with pytest.raises(Fenced):
            zombie()

    comes_back()
    for _ in later(taken_over):
        compacting.writes(dsn)
        comes_back()
    steps.assert_exact(database)
    assert compacting.left_over(dsn) == []
    drop_index(database, "ix", "test")
    comes_back()
