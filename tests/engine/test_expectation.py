"""The forecast of a build's duration, shown before it begins: from earlier builds, or from the plan's sample."""

from __future__ import annotations

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import lifecycle
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import forecast
from airflow_roir.engine.forecast.expectation import Expectation
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(2)

SIZES = (100, 20_000, 200_000)
TABLE = """
CREATE TABLE s{0} (id int PRIMARY KEY, k int);
INSERT INTO s{0} SELECT i, i % 100 FROM generate_series(1, {0}) i
"""


def table(dsn: str, rows: int) -> None:
    run_sql(dsn, TABLE.format(rows), f"ANALYZE s{rows}")


def expected(database: Database, rows: int, **options: object) -> Expectation:
    definition = IndexDefinition.parse(f"s{rows}_by_k", f"s{rows}", "k")
    return forecast.run(database, definition, BuildOptions.asked(**options)).expectation


def build(database: Database, rows: int, beside_s: float, seconds: float) -> None:
    """A build in one run, whose clock is set: the seconds of its work, and those beside it."""
    steps.make_index(database, index=f"s{rows}_by_k", table=f"s{rows}", keys="k")
    phases = f'{{"prepare": 1, "build": {seconds - 1}}}'
    run_sql(
        database.dsn,
        f"""UPDATE roir.operation SET rows_estimate = {rows},
                   finished_at = started_at + interval '{seconds + beside_s} s', phase_seconds = '{phases}'
             WHERE id = (SELECT max(id) FROM roir.operation)""",
    )


def test_without_history_the_work_grows_with_the_rows(database: Database, dsn: str) -> None:
    found = []
    for rows in SIZES:
        table(dsn, rows)
        found.append(expected(database, rows))
    for one in found:
        assert 0 < one.work.low < one.work.high
        assert 0 < one.start.low < one.start.high
    # The sample's pace is measured, and varies by less than the sizes do.
    assert found[0].work.by == "what is usual"
    assert found[2].work.by == "the plan's sample"
    assert found[0].work.low <= found[1].work.low <= found[2].work.low
    assert found[0].work.high <= found[1].work.high <= found[2].work.high


def test_a_small_table_is_told_what_to_do_and_a_limited_build_is_not(database: Database, dsn: str) -> None:
    table(dsn, 100)
    said = str(expected(database, 100, parallelism=2))
    assert "a few seconds of work, 4 s to 15 s of start on Spark" in said
    assert "The start takes longer than the work: one worker does (--parallelism 1)" in said
    assert "--without-spark" in said
    assert "CREATE INDEX CONCURRENTLY" in said
    assert "one worker does" not in str(expected(database, 100, parallelism=1))
    table(dsn, 20_000)
    limited = expected(database, 20_000, max_rows_per_second=100)
    assert limited.work.low >= 200
    assert limited.advice is None


def test_a_partitioned_table_is_not_sent_to_a_native_index(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE s1 (id int PRIMARY KEY, k int) PARTITION BY RANGE (id)",
        "CREATE TABLE s1_a PARTITION OF s1 FOR VALUES FROM (0) TO (9)",
    )
    advice = expected(database, 1).advice
    assert advice is not None
    assert "--without-spark" in advice
    assert "CREATE INDEX" not in advice


@pytest.mark.by_hand("sweeps")
def test_the_last_build_of_the_index_is_believed_first(database: Database, dsn: str) -> None:
    for rows in SIZES[:2]:
        table(dsn, rows)
    build(database, 20_000, beside_s=9, seconds=41)
    again, other = expected(database, 20_000), expected(database, 100)
    assert again.work.by == "the last build of this index"
    assert again.work.low < 41 < again.work.high
    assert again.start.low < 9 < again.start.high
    assert again.start.by == "the start by the last build"
    # A build of this few rows says nothing about another table.
    assert other.work.by == "what is usual"
    run_sql(dsn, "INSERT INTO s20000 SELECT i, i FROM generate_series(20001, 40000) i", "ANALYZE s20000")
    grown = expected(database, 20_000)
    assert grown.work.low < 81 < grown.work.high
    build(database, 20_000, beside_s=9, seconds=41)
    assert expected(database, 20_000).work.by == "the last 2 builds of this index"


@pytest.mark.sample(0)
def test_a_build_with_very_many_workers_leaves_the_next_an_estimate(database: Database, dsn: str) -> None:
    """Found: `1 min 10 s to 5 h 10 min`, `3 min to 1 d 2 h` after a build with 256 workers."""
    for rows in SIZES[1:]:
        table(dsn, rows)
    build(database, 200_000, beside_s=9, seconds=41)
    run_sql(dsn, "UPDATE roir.operation SET parallelism = 256")
    for found in (expected(database, 200_000), expected(database, 20_000)):
        assert "build" in found.work.by
        assert found.work.high < 50 * found.work.low


@pytest.mark.sample(0)
def test_builds_of_other_tables_tell_what_a_row_takes(database: Database, dsn: str) -> None:
    for rows in SIZES:
        table(dsn, rows)
    build(database, 200_000, beside_s=9, seconds=401)
    found = expected(database, 20_000)
    assert found.work.by == "1 build of other indexes"
    assert found.work.low < 40 < found.work.high
    assert expected(database, 100).work.high < found.work.low


@pytest.mark.sample(0)
@pytest.mark.parametrize("action", ["pause", "change parallelism", "change throttle"])
def test_a_build_that_was_paused_or_changed_tells_nothing(database: Database, dsn: str, action: str) -> None:
    table(dsn, 20_000)
    build(database, 20_000, beside_s=9, seconds=41)
    run_sql(
        dsn,
        "INSERT INTO roir.event (index_id, operation_id, actor, action, detail) "
        f"SELECT index_id, id, 'me', '{action}', '' FROM roir.operation",
    )
    assert expected(database, 20_000).work.by == "the plan's sample"


@pytest.mark.sample(0)
@pytest.mark.parametrize(("lost", "tells"), [(4, True), (30, False)])
def test_a_build_that_was_throttled_for_long_tells_nothing(
    database: Database, dsn: str, lost: int, tells: bool
) -> None:
    table(dsn, 20_000)
    build(database, 20_000, beside_s=9, seconds=41)
    run_sql(
        dsn,
        "INSERT INTO roir.throttle_time (operation_id, cause, seconds) "
        f"SELECT id, 'replica_lag', {lost} FROM roir.operation",
    )
    assert expected(database, 20_000).work.by == ("the last build of this index" if tells else "the plan's sample")


def test_prepare_tells_the_same_first(database: Database, dsn: str) -> None:
    table(dsn, 100)
    lines: list[str] = []
    lifecycle.prepare(database, IndexDefinition.parse("s100_by_k", "s100", "k"), BuildOptions(), report=lines.append)
    assert lines[0].startswith("expected: a few seconds of work, 4 s to 15 s of start on Spark (by ")


def test_threads_of_the_command_start_no_spark(database: Database, dsn: str) -> None:
    """Found: `roir build --without-spark` forecast Spark's start, and advised `--without-spark`."""
    table(dsn, 100)
    definition = IndexDefinition.parse("s100_by_k", "s100", "k")
    lines: list[str] = []
    lifecycle.prepare(database, definition, BuildOptions(), report=lines.append, on_spark=False)
    assert lines[0].startswith("expected: a few seconds of work (by ")
    assert "park" not in lines[0]
