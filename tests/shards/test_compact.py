"""An index apart from its source is compacted like others; what shards write meanwhile is shipped to what is there."""

from __future__ import annotations

import pytest

from airflow_roir.engine.compact import compaction, worker
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.control.run import start_run
from airflow_roir.options import CompactOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.shards import apart
from tests.shards.conftest import Make

pytestmark = pytest.mark.sample(1)


@pytest.mark.sample(0)
def test_an_index_over_shards_is_compacted_while_it_is_shipped_to(shards: Make) -> None:
    rows = "INSERT INTO t SELECT i, i::text, i * 10 + {number} FROM generate_series(1, 500) i"
    made = apart.add_all(shards(2, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)", rows, "ANALYZE t"))
    prepared, run = apart.begin(made)
    apart.finish_all(made, run)
    actions = [
        Action(Kind.REWRITE, (one,), 1, 8192, 8192, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked") for one in (1, 2)
    ]
    begun = compaction.begin(made.database, run.index, actions, CompactOptions(), "test")
    run = start_run(made.database, run.index, "test")
    for step, _ in enumerate(steps.step_by_step(made.database, run, worker.PHASE)):
        for dsn in made.dsns.values():
            run_sql(
                dsn,
                f"UPDATE t SET k = 'u' || k WHERE id % 7 = {step % 7}",
                f"DELETE FROM t WHERE id = {step + 1}",
                f"INSERT INTO t VALUES ({1000 + step}, '{step}', 0)",
            )
        apart.ship_all(made, prepared.generation_id)
    worker.finish(made.database, run)
    report = compaction.report_of(made.database, begun.operation_id)
    assert {unit["status"] for unit in report.units} == {"done"}
    apart.ship_all(made, prepared.generation_id)
    assert apart.assert_exact(made, prepared.generation_id) > 0
