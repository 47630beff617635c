"""`roir compact`: what it chooses, does, prints, and leaves to a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_roir.engine import lifecycle, revert
from airflow_roir.engine.compact import compaction, worker
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.details import progress
from airflow_roir.errors import Fenced, OperationFailed
from airflow_roir.options import CompactOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.test_cli import as_json, here, operation, roir

ROWS = 60_000
SEGMENTS = """
SELECT c.oid::regclass::text, pg_total_relation_size(c.oid) FROM pg_class c WHERE c.relname ~ '^g[0-9]+_s[0-9]+$'
"""

pytestmark = pytest.mark.sample(1)


@pytest.fixture
def index(dsn: str, database: Database) -> None:
    """A published one of three segments."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, md5(i::text), i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    steps.make_index(database, include="v", ranges=2, segments=3)


@pytest.fixture
def aged(dsn: str, index: None) -> None:
    """Nine of ten entries are gone, their room isn't."""
    run_sql(dsn, "DELETE FROM t WHERE id % 10 <> 0", "VACUUM ANALYZE t")
    for name, _ in segments(dsn):
        run_sql(dsn, f"VACUUM ANALYZE {name}")


def segments(dsn: str) -> list[tuple[str, int]]:
    return [(name, size) for name, size in sql(steps.session(dsn), SEGMENTS)]


def begun(database: Database, ordinals: tuple[int, ...] = (1, 2, 3), **options: Any) -> BegunOperation:
    """A rewrite of these segments, whatever it is worth."""
    actions = [
        Action(Kind.REWRITE, (one,), 1, 8192, 8192, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked") for one in ordinals
    ]
    return compaction.begin(database, "ix", actions, CompactOptions(**options), "test")


@pytest.mark.by_hand("sweeps")
def test_what_is_chosen_is_done_on_spark_and_then_nothing_is_worth_it(dsn: str, aged: None, database: Database) -> None:
    before = segments(dsn)
    chosen: Any = as_json(dsn, "compact", "ix", "--dry-run")
    assert {ordinal for one in chosen["actions"] for ordinal in one["ordinals"]} == {1, 2, 3}
    assert segments(dsn) == before
    done = roir(dsn, "compact", "ix", "--master", "local[2]", "--json")
    assert "a rebuild would cost no more" in done.stderr
    assert "compact: 2 workers" in done.stderr
    assert "compact: done, worked" in done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "completed"
    assert {unit["status"] for unit in found["units"]} == {"done"}
    assert sum(unit["rows"] for unit in found["units"]) == ROWS / 10
    assert all(unit["seconds"] > 0 for unit in found["units"])
    assert found["bytes_after"] < found["bytes_before"] / 4
    assert sum(size for _, size in segments(dsn)) < sum(size for _, size in before) / 4
    again = here(dsn, "compact", "ix", "--budget", "20GB")
    assert "none is worth a compaction within the budget of 20 GB" in again.stdout
    shown = here(dsn, "status").stdout
    assert "compaction 2" in shown
    assert f"{len(found['units'])} of {len(found['units'])} units swapped in, " in shown
    assert operation(dsn)["compaction"]["done"] == len(found["units"])
    assert as_json(dsn, "verify", "ix", "--without-spark")["rows"] == ROWS / 10


@pytest.mark.sample(0)
def test_by_threads_it_tells_what_each_unit_was(dsn: str, aged: None) -> None:
    done = here(dsn, "compact", "ix", "--without-spark", "--segment-size", "1GB")
    first, *units = done.stdout.splitlines()
    assert first.startswith("public.ix: 1 unit of 1 swapped in, ")
    (unit,) = units
    assert unit.startswith("  merge of segments 1, 2, 3: "), unit
    assert ", 6,000 rows in " in unit
    assert "it must be a size" in here(dsn, "compact", "ix", "--segment-size", "2h", code=2).stderr
    assert "--budget is '7'" in here(dsn, "compact", "ix", "--budget", "7", code=2).stderr


@pytest.mark.by_hand("sweeps")
def test_a_paused_compaction_is_shown_and_resumed(dsn: str, index: None, database: Database) -> None:
    found = begun(database, parallelism=1)
    run = start_run(database, "ix", "test")
    step = steps.step_by_step(database, run, worker.PHASE)
    seen = [0.0]
    for metrics in step:
        seen.append(operation(dsn)["percent_complete"])
        if metrics.rest is None:
            break
    next(step)
    now = here(dsn, "status", "ix").stdout
    assert "1 of 3 units swapped in, " in now
    assert "at hand: rewrite of segment 2: copying" in now
    assert "paused at " in here(dsn, "pause", "ix", "--reason", "a look").stdout
    assert list(step) == []
    assert seen == sorted(seen)
    assert 0 < seen[-1] <= operation(dsn)["percent_complete"] < 100
    looked = progress(database, "ix")
    assert (looked.kind, looked.phase, looked.bars.of, looked.bars.count, looked.bars.done) == (
        "compact",
        "compact",
        "compactions",
        3,
        1,
    )
    assert [phase.name for phase in looked.phases] == ["compact"]
    assert (
        "--batch-rows: a compaction has no such option"
        in here(dsn, "change", "ix", "--batch-rows", "5000", code=2).stderr
    )
    assert "parallelism 1 -> 2" in here(dsn, "change", "ix", "--parallelism", "2").stdout
    resumed = here(dsn, "resume", "ix", "--take-over", "--master", "local[2]")
    assert "3 units of 3 swapped in" in resumed.stdout
    assert (operation(dsn)["operation_id"], operation(dsn)["status"]) == (found.operation_id, "completed")
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_an_unfinished_one_is_continued_and_others_wait_for_it(dsn: str, index: None, database: Database) -> None:
    found = begun(database)
    refused = here(dsn, "verify", "ix", "--without-spark", code=4).stderr
    assert "compact" in refused
    done = here(dsn, "compact", "ix", "--without-spark")
    assert f"continuing unfinished compaction {found.operation_id}" in done.stderr
    assert "3 units of 3 swapped in" in done.stdout


@pytest.mark.sample(0)
def test_what_was_swapped_in_stays_after_an_abort(dsn: str, index: None, database: Database) -> None:
    before = segments(dsn)
    begun(database, parallelism=1)
    run = start_run(database, "ix", "test")
    step = steps.step_by_step(database, run, worker.PHASE)
    for metrics in step:
        if metrics.rest is None:
            break
    next(step)
    assert "is aborted" in here(dsn, "abort", "ix").stdout
    with pytest.raises(Fenced):
        list(step)
    shown = here(dsn, "status", "ix").stdout
    assert "1 of 3 units swapped in" in shown
    assert "which stays" in shown
    assert len(segments(dsn)) == len(before)
    assert segments(dsn) != before
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_it_fails_where_readers_see_another_generation(dsn: str, index: None, database: Database) -> None:
    steps.make_index(database, include="v", ranges=2, segments=3)
    begun(database)
    revert.revert(database, "ix", "somebody")
    with pytest.raises(OperationFailed, match="readers see another generation"):
        lifecycle.compact(database, "ix")
    assert operations.find_operation(database, "ix").status == "failed"
    assert "failed (" in here(dsn, "compact", "ix", "--without-spark", code=1).stderr
    here(dsn, "abort", "ix")
    steps.assert_exact(database)
