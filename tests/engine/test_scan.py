"""Scans by blocks, of the source or of the index that is rebuilt: no row is lost or doubled, wherever it moves."""

from __future__ import annotations

from dataclasses import replace

import psycopg2
import pytest

from airflow_roir.engine import abort, clean_up, revert
from airflow_roir.engine.build import BuildWorker, Claim
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import SourceChanged
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import changed

pytestmark = pytest.mark.sample(1)

# Three rows in a block, all blocks full, and nothing is stored elsewhere.
TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k int, v int, pad text)",
    "ALTER TABLE t ALTER pad SET STORAGE PLAIN",
    "INSERT INTO t SELECT i, i % 7, i, repeat('x', 2000) FROM generate_series(1, 42) i",
)
IX = {"index": "ix", "table": "t", "keys": "k", "include": "v, pad"}
OLD = {"index": "ix", "table": None, "keys": None}
SMALL = {"ranges": 3, "segments": 2, "batch_rows": 1, "covering": "none"}


@pytest.fixture
def table(dsn: str) -> str:
    run_sql(dsn, *TABLE)
    return dsn


def begun(database: Database, scan: str, batches: int) -> tuple[steps.Run, BuildWorker, Claim | None]:
    """An operation with this many copied batches; for `index` it is a rebuild of a published index."""
    if scan == "index":
        _, run = steps.begin(database, **IX, **SMALL)  # type: ignore[arg-type]
        steps.finish_all(database, run)
    _, run = steps.begin(database, **(OLD if scan == "index" else IX), scan=scan, **SMALL)  # type: ignore[arg-type]
    worker, claim = steps.claimed(database, run)
    held: Claim | None = claim
    for _ in range(batches):
        assert held is not None
        outcome = worker.step(held)
        assert isinstance(outcome, Step)
        held = outcome.rest
        if held is None:
            found = worker.claim()
            held = found if isinstance(found, Claim) else None
    return run, worker, held


def finish(database: Database, run: steps.Run) -> None:
    run = start_run(database, "ix", "test", take_over=True)
    steps.finish_all(database, run)
    steps.assert_exact(database)


def block(dsn: str, row: int) -> int:
    ((found,),) = steps.sql(psycopg2.connect(dsn), "SELECT (ctid::text::point)[0]::int FROM t WHERE id = %s", row)
    return int(found)


def moved_back(dsn: str) -> None:
    """Moves a row of the last block to the first one, which is scanned already, and changes nothing else of it."""
    run_sql(dsn, "DELETE FROM t WHERE id <= 3", "VACUUM t")
    was = block(dsn, 42)
    run_sql(dsn, "UPDATE t SET v = v WHERE id = 42")
    assert block(dsn, 42) == 0 < was


def moved_on(dsn: str) -> None:
    """Moves a row of the first block, which is scanned already, to the last one."""
    run_sql(dsn, "DELETE FROM t WHERE id IN (37, 38)", "VACUUM t")
    run_sql(dsn, "UPDATE t SET v = v WHERE id = 2")
    assert block(dsn, 2) > 0


@pytest.mark.parametrize("scan", ["block", "index"])
@pytest.mark.parametrize("move", [moved_back, moved_on, None])
def test_a_row_that_moves_is_neither_lost_nor_doubled(table: str, database: Database, scan: str, move: object) -> None:
    run, worker, _ = begun(database, scan, 1)
    worker.connection.close()
    if move is not None:
        move(table)  # type: ignore[operator]
    finish(database, run)


@pytest.mark.parametrize("move", [moved_back, moved_on])
def test_that_needs_the_capture_of_moves(table: str, database: Database, move: object) -> None:
    with changed(database, r"\((old|new)_place::text::point\)\[0\]", "0::float8"):
        run, worker, _ = begun(database, "block", 1)
    worker.connection.close()
    move(table)  # type: ignore[operator]
    with pytest.raises((AssertionError, Exception), match=r"missing=1|unique index|differ"):
        finish(database, run)


@pytest.mark.parametrize("scan", ["block", "index"])
def test_an_entry_that_was_copied_twice_is_there_once(table: str, database: Database, scan: str) -> None:
    """The scan met it before and after updates that moved it to a later block."""
    run, worker, _ = begun(database, scan, 2)
    worker.connection.close()
    # This makes room for them in blocks that are still to be scanned.
    run_sql(table, "DELETE FROM t WHERE id > 20 AND id % 2 = 0", "VACUUM")
    run_sql(table, "UPDATE t SET v = v + 1 WHERE id <= 6")
    finish(database, run)


def test_without_that_removal_the_seal_fails(table: str, database: Database) -> None:
    run, worker, _ = begun(database, "block", 1)
    worker.connection.close()
    # From the first block, which was copied, to free room in the last one, which is still to be copied.
    moved_on(table)
    removal = changed(database, r"^DELETE FROM roir_data\.\w+ s USING .*", "SELECT 0")
    with removal, pytest.raises(Exception, match="could not create unique index"):
        finish(database, run)


@pytest.mark.parametrize("scan", ["block", "index"])
def test_a_truncate_empties_it_and_what_comes_then_is_captured(table: str, database: Database, scan: str) -> None:
    run, worker, claim = begun(database, scan, 1)
    assert claim is not None
    run_sql(table, "TRUNCATE t", "INSERT INTO t SELECT i, i, i, 'new' FROM generate_series(1, 30) i")
    outcome = worker.step(claim)
    assert isinstance(outcome, Step)
    assert (outcome.rows, outcome.rest) == (0, None)
    worker.connection.close()
    finish(database, run)


@pytest.mark.sample(0)
@pytest.mark.parametrize("rewrite", ["VACUUM FULL t", "CLUSTER t USING t_pkey", "VACUUM FULL"])
def test_a_rewritten_table_stops_a_scan_by_blocks(table: str, database: Database, rewrite: str) -> None:
    """No capture sees the rewrite. Nothing wrong may be published, and a new operation works."""
    _, worker, claim = begun(database, "block", 1)
    run_sql(table, "DELETE FROM t WHERE id < 10", rewrite)
    assert claim is not None
    with pytest.raises(SourceChanged, match=r"was rewritten since .* --scan key"):
        worker.step(claim)
    worker.connection.close()
    abort.abort(database, "ix", "test")
    _, run = steps.begin(database, **IX, **SMALL)  # type: ignore[arg-type]
    finish(database, run)


@pytest.mark.sample(0)
def test_a_rewritten_index_stops_a_scan_of_it(table: str, database: Database) -> None:
    _, worker, claim = begun(database, "index", 1)
    assert claim is not None
    run_sql(table, "VACUUM FULL")
    with pytest.raises(SourceChanged, match="was rewritten"):
        worker.step(claim)
    worker.connection.close()


def test_a_scan_by_key_goes_on_over_a_rewritten_table(table: str, database: Database) -> None:
    run, worker, _ = begun(database, "key", 1)
    run_sql(table, "DELETE FROM t WHERE id < 10", "VACUUM FULL t")
    worker.connection.close()
    finish(database, run)


def test_a_truncated_and_then_rewritten_table_has_nothing_left_to_scan(table: str, database: Database) -> None:
    run, worker, _ = begun(database, "block", 1)
    run_sql(table, "TRUNCATE t", "INSERT INTO t VALUES (1, 1, 1, '')", "VACUUM FULL t")
    worker.connection.close()
    finish(database, run)


def test_rows_behind_the_blocks_of_the_plan_are_captured(table: str, database: Database) -> None:
    run, worker, _ = begun(database, "block", 1)
    run_sql(table, "INSERT INTO t SELECT i, i, i, repeat('y', 2000) FROM generate_series(43, 80) i")
    worker.connection.close()
    finish(database, run)
    with database.transaction() as connection:
        scanned = execute(connection, "SELECT sum(rows) FROM roir.scan_range").scalar_one()
    assert scanned == 42


def test_it_goes_on_after_the_last_block_that_was_done(table: str, database: Database) -> None:
    _, worker, claim = begun(database, "block", 2)
    worker.connection.close()
    assert claim is not None
    assert claim.scan.watermark == ["1"]
    again = start_run(database, "ix", "test", take_over=True)
    worker, found = steps.claimed(database, again)
    assert found.scan.watermark == ["1"]
    worker.connection.close()
    finish(database, again)


@pytest.mark.parametrize("analyzed", [True, False])
@pytest.mark.parametrize("scan", ["block", "index"])
def test_batches_are_of_about_the_wanted_rows(dsn: str, database: Database, scan: str, analyzed: bool) -> None:
    """A worker's first batch may have no statistics yet."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k int, v int)")
    run_sql(dsn, "INSERT INTO t SELECT i, i, i FROM generate_series(1, 20000) i", *(["ANALYZE t"] if analyzed else []))
    if scan == "index":
        steps.finish_all(database, steps.begin(database, include="v")[1])
    _, run = steps.begin(database, **({} if scan == "block" else OLD), scan=scan, ranges=1, batch_rows=1000)
    rows = steps.batches(database, run)
    assert sum(rows) == 20000
    assert max(rows[1:]) < 1500, rows


def test_partitions_are_scanned_by_blocks(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int, k int, v int, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n * 100}) TO ({n * 100 + 100})" for n in range(6)),
        "INSERT INTO t SELECT i, i % 7, i FROM generate_series(0, 499) i",
    )
    _, run = steps.begin(database, scan="block", ranges=3, segments=2, batch_rows=1)
    run_sql(
        dsn,
        "TRUNCATE t1",
        "SELECT roir.detach_partition('t2', and_drop => true)",
        "INSERT INTO t VALUES (550, 1, 1), (120, 2, 2)",
        "CREATE TABLE t6 PARTITION OF t FOR VALUES FROM (600) TO (700)",
        "INSERT INTO t VALUES (600, 1, 1)",
        "UPDATE t SET id = 310 + 200 WHERE id = 310",
    )
    finish(database, run)


def test_a_leaf_that_was_truncated_under_a_claim_is_out(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int) PARTITION BY RANGE (id)",
        "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (200)",
        "INSERT INTO t SELECT i, i FROM generate_series(0, 199) i",
    )
    _, run = steps.begin(database, scan="block", batch_rows=1)
    worker, claim = steps.claimed(database, run)
    run_sql(dsn, "TRUNCATE t0", "TRUNCATE t1", "INSERT INTO t VALUES (5, 5), (150, 6)")
    outcome = worker.step(claim)
    worker.connection.close()
    assert isinstance(outcome, Step)
    assert outcome.rest is None
    finish(database, run)


# -- by key


@pytest.mark.parametrize("leading", ["1", "i / 1000", "i"])
def test_a_batch_of_a_composite_key_reads_no_more_than_its_rows(dsn: str, database: Database, leading: str) -> None:
    """The planner can't estimate row bounds. Seen to take each batch for a big part, and to read the whole table."""
    run_sql(
        dsn,
        "CREATE TABLE t (a int, b int, k int, PRIMARY KEY (a, b))",
        f"INSERT INTO t SELECT {leading}, i, i % 9 FROM generate_series(1, 30000) i ORDER BY random()",
        "VACUUM ANALYZE t",
    )
    _, run = steps.begin(database, ranges=1, batch_rows=100)
    worker, claim = steps.claimed(database, run)
    middle = replace(claim.scan, watermark=["1" if leading == "1" else "15" if "/" in leading else "15000", "15000"])
    with worker.connection.begin():
        # The planner would choose the same for a big table.
        execute(worker.connection, "SET LOCAL enable_bitmapscan = off")
        worker.standing(claim)
        stretch = worker.source.reader.next("public.t", middle, 100)
        explain = f"{stretch.settings} EXPLAIN (ANALYZE, TIMING OFF) SELECT * FROM public.t WHERE {stretch.where}"
        shown = "\n".join(execute(worker.connection, explain, stretch.values).scalars())
    worker.connection.close()
    assert "Seq Scan" not in shown
    assert "rows=100" in shown
    assert "Rows Removed" not in shown


def test_an_index_that_was_reverted_from_is_not_dropped_while_it_is_read(table: str, database: Database) -> None:
    steps.finish_all(database, steps.begin(database, **IX, **SMALL)[1])  # type: ignore[arg-type]
    steps.finish_all(database, steps.begin(database, **OLD, **SMALL)[1])  # type: ignore[arg-type]
    _, run = steps.begin(database, **OLD, scan="index", **SMALL)  # type: ignore[arg-type]
    revert.revert(database, "ix", "test")
    run_sql(table, "UPDATE roir.generation SET drop_after = now() - interval '1 day' WHERE status = 'retired'")
    assert clean_up.clean_up(database).generations_dropped == 0
    finish(database, run)


@pytest.mark.by_hand("sweeps")
def test_an_index_that_is_only_reverted_from_is_still_right_to_read(table: str, database: Database) -> None:
    steps.finish_all(database, steps.begin(database, **IX, **SMALL)[1])  # type: ignore[arg-type]
    steps.finish_all(database, steps.begin(database, **OLD, **SMALL)[1])  # type: ignore[arg-type]
    _, run = steps.begin(database, **OLD, scan="index", **SMALL)  # type: ignore[arg-type]
    revert.revert(database, "ix", "test")
    run_sql(table, "UPDATE t SET v = v + 1 WHERE id % 2 = 0", "DELETE FROM t WHERE id % 5 = 0")
    finish(database, run)
