"""An operation from prepare to publish, by steps."""

from __future__ import annotations

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, lifecycle, prepare
from airflow_roir.engine.control.new_operation import BegunOperation
from airflow_roir.engine.database import Database
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.errors import InvalidInput, InvariantViolated
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before

pytestmark = pytest.mark.sample(1)


def make_table(dsn: str, rows: int = 1000) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, CASE WHEN i % 7 > 0 THEN (i % 50)::text END, i FROM generate_series(1, {rows}) i",
        "ANALYZE t",
    )


def test_create_then_rebuild_serves_reads_all_along(database: Database, dsn: str) -> None:
    make_table(dsn)
    prepared, run = steps.begin(database, include="v", batch_rows=100)
    steps.finish_all(database, run)
    steps.assert_exact(database)
    user = steps.session(dsn)
    steps.sql(user, "GRANT SELECT ON ix TO PUBLIC")
    user.commit()
    again, rerun = steps.begin(database, table=None, keys=None)
    assert again.kind == "rebuild"
    assert again.generation_id != prepared.generation_id
    steps.sql(user, "UPDATE t SET k = 'x' WHERE id < 100")
    steps.sql(user, "DELETE FROM t WHERE id BETWEEN 500 AND 600")
    user.commit()
    steps.assert_exact(database)  # the old generation, still maintained and read
    steps.build_all(database, rerun)
    steps.sql(user, "UPDATE t SET v = -1 WHERE id < 10")
    user.commit()
    steps.seal_all(database, rerun)
    steps.fold_all(database, rerun)
    steps.assert_exact(database)
    steps.publish_all(database, rerun)
    report = steps.assert_exact(database)
    assert report.rows == 899
    assert steps.sql(user, "SELECT has_table_privilege('public', 'ix', 'SELECT')") == [(True,)]
    assert operation_status(database, again.operation_id).status == "completed"


def test_clean_up_drops_deltas_and_retired_generations_after_the_window(database: Database, dsn: str) -> None:
    make_table(dsn)
    for _ in range(2):
        _, run = steps.begin(database, table=None if _ else "t", keys=None if _ else "k", revert_window_s=0)
        user = steps.session(dsn)
        steps.sql(user, "DELETE FROM t WHERE id IN (SELECT min(id) FROM t)")
        user.commit()
        steps.finish_all(database, run)
    report = clean_up.clean_up(database)
    assert (report.deltas_dropped, report.generations_dropped, report.ghosts) == (2, 1, 2)
    steps.assert_exact(database)
    tables = steps.sql(user, "SELECT relname FROM pg_class WHERE relname ~ '^g[0-9]+(_delta)?$'")
    assert tables == [("g2",)]


@pytest.mark.parametrize("taken", ["VIEW ix AS SELECT 'a'::text AS k, 1 AS id", "TABLE ix (k text)"])
def test_what_took_the_indexes_name_meanwhile_is_left_alone(database: Database, dsn: str, taken: str) -> None:
    make_table(dsn)
    run = steps.folded(database)
    run_sql(dsn, f"CREATE {taken}")
    with pytest.raises(InvariantViolated, match="another relation has taken its name"):
        steps.publish_all(database, run)
    run_sql(dsn, f"DROP {taken.split()[0]} ix")
    steps.publish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_column_of_the_view_that_somebody_renamed_is_named_before_a_rebuild(database: Database, dsn: str) -> None:
    """PostgreSQL replaces no view by one of other columns. Seen to fail at the end, with another relation's name."""
    make_table(dsn)
    steps.make_index(database)
    rename = "ALTER VIEW ix RENAME COLUMN {} TO {}"
    said = "column k of its view is called kk now.*Rename it back: ALTER VIEW public.ix RENAME COLUMN kk TO k"
    run_sql(dsn, rename.format("k", "kk"))
    with pytest.raises(InvalidInput, match=said):
        steps.begin(database, table=None, keys=None)
    run_sql(dsn, rename.format("kk", "k"))
    run = steps.folded(database, table=None, keys=None)
    run_sql(dsn, rename.format("k", "kk"))
    with pytest.raises(InvariantViolated, match=said):
        steps.publish_all(database, run)
    run_sql(dsn, rename.format("kk", "k"))
    steps.publish_all(database, run)
    steps.assert_exact(database)


def test_a_prepare_that_comes_second_takes_the_firsts_operation_up(dsn: str, database: Database) -> None:
    """Even if it has planned already when the first one commits."""
    run_sql(dsn, "CREATE TABLE u (id int PRIMARY KEY, k text)")
    definition = IndexDefinition.parse("of_u", "u", "k")
    first: list[BegunOperation] = []

    def overtake() -> None:
        first.append(prepare.prepare(database, definition, BuildOptions(), "somebody else"))

    with before(database, "INSERT INTO roir.index", overtake):
        second = prepare.prepare(database, definition, BuildOptions(), "test")
    assert second.adopted
    assert second.operation_id == first[0].operation_id


def test_the_primary_keys_index_may_be_rebuilt_meanwhile(dsn: str, database: Database) -> None:
    make_table(dsn)
    _, run = steps.begin(database)
    run_sql(dsn, "REINDEX INDEX CONCURRENTLY t_pkey")
    steps.finish_all(database, run)
    steps.assert_exact(database)


def test_a_pause_for_a_reader_that_has_gone_says_so(database: Database, dsn: str) -> None:
    """`roir build | head`: seen to pause with "[Errno 32] Broken pipe"."""
    make_table(dsn)
    run = steps.sealed(database)

    def gone(_line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        lifecycle.finalize(database, "ix", "test", gone, take_over=True)
    found = operation_status(database, run.operation_id)
    assert found.status == "paused"
    assert "the reader of the command's output has gone" in str(found.pause_reason)
