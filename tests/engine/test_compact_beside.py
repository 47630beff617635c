"""Compactions beside other operations of the same table: another compaction, and a build; with many segments."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from airflow_roir.engine.lifecycle import verify
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.compacting import act

pytestmark = pytest.mark.slow


@pytest.mark.by_hand("sweeps")
def test_two_compactions_and_a_build_over_one_table(database: Database, dsn: str) -> None:
    """There are too many segments for the capture to guess one."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, (i % 500)::text, i FROM generate_series(1, 3000) i",
        "ANALYZE t",
    )
    steps.make_index(database, keys="k,id", include="v", segments=70, parallelism=1)
    steps.make_index(database, index="iy", keys="v", segments=3, unique=True)  # type: ignore[arg-type]
    _, run = steps.begin(database, index="iz", keys="k", ranges=4, segments=3, batch_rows=500)
    build = [steps.build_all, steps.seal_all, steps.fold_all]
    patient = {"lock_patience_s": 3}
    many = (act("merge", *range(3, 19)), act("split", 30, parts=3), act("rewrite", 0), act("rewrite", 70))
    few = (act("merge", 1, 2, 3), act("rewrite", 0))
    going = [
        compacting.stages(database, compacting.begin(database, *many, index="ix", **patient)),
        compacting.stages(database, compacting.begin(database, *few, index="iy", **patient)),
    ]
    turns = 0
    while going:
        turns += 1
        one = going[turns % len(going)]
        if next(one, None) is None:
            going.remove(one)
        run_sql(
            dsn,
            f"UPDATE t SET k = ((k::int + 7) % 500)::text, v = v + 100000 WHERE id % 97 = {turns % 97}",
            f"DELETE FROM t WHERE id = {turns * 3 + 1}",
            f"INSERT INTO t VALUES ({700000 + turns}, '{turns}', {900000 + turns})",
        )
        if turns % 6 == 0 and build:
            build.pop(0)(database, run)
    while build:
        build.pop(0)(database, run)
    steps.publish_all(database, run)
    assert [verify(database, index).is_exact for index in ("ix", "iy", "iz")] == [True] * 3
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    assert compacting.left_over(dsn) == []
