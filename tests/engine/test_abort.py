"""Abort: from any phase, twice, against a resume and against long locks; nothing of ours is left."""

from __future__ import annotations

import pytest

from airflow_roir.engine import abort, build, clean_up, drop
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.snapshot.operation import operation_status, status
from airflow_roir.errors import Fenced, IllegalTransition, InvalidInput, OperationFailed
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn, 1000)


def catalog(database: Database) -> list[tuple[str, ...]]:
    """All objects that an operation could leave behind, with triggers' and functions' texts."""
    with database.transaction() as connection:
        return [
            tuple(row)
            for row in execute(
                connection,
                "SELECT 'relation', relname::text, relkind::text FROM pg_class "
                " WHERE relnamespace NOT IN ('pg_toast'::regnamespace, 'pg_catalog'::regnamespace) "
                "UNION ALL SELECT 'trigger', tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger "
                "UNION ALL SELECT 'function', proname, prosrc FROM pg_proc "
                " WHERE pronamespace = 'roir_data'::regnamespace "
                "UNION ALL SELECT 'row', 't', md5(string_agg(t::text, ',' ORDER BY id)) FROM public.t "
                "ORDER BY 1, 2, 3",
            )
        ]


def begin(database: Database, stage: str) -> operations.OperationRow:
    """Begins an operation that has reached a stage; a `rebuild` is beside an active generation."""
    if stage.startswith("rebuild"):
        _, run = steps.begin(database, table=None, keys=None, batch_rows=100)
    else:
        _, run = steps.begin(database, batch_rows=100, ranges=3)
    worker, claim = steps.claimed(database, run)
    worker.step(claim)
    worker.connection.close()
    if stage.endswith("paused"):
        requests.pause(database, "ix", "me")
    if stage.split()[-1] in ("sealing", "folding", "switched", "publishing"):
        steps.build_all(database, start_run(database, "ix", "test", take_over=True))
    if stage.split()[-1] in ("folding", "switched", "publishing"):
        run = start_run(database, "ix", "test", take_over=True)
        steps.seal_all(database, run)
        if stage.endswith("switched"):
            steps.switch.switch(database, run)
        if stage.endswith("publishing"):
            steps.fold_all(database, run)
    return operations.find_operation(database, "ix")


STAGES = ["building", "paused", "sealing", "folding", "switched", "publishing"]


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", [*STAGES, *(f"rebuild {stage}" for stage in STAGES)])
def test_from_any_phase_source_and_active_generation_are_as_they_were(database: Database, dsn: str, stage: str) -> None:
    if stage.startswith("rebuild"):
        steps.make_index(database)
        clean_up.clean_up(database)
    before = catalog(database)
    operation = begin(database, stage)
    assert catalog(database) != before
    assert abort.abort(database, "ix", "me", "changed my mind").status == "aborted"
    assert catalog(database) == before
    ended = operation_status(database, operation.id)
    assert (ended.status, ended.finished_at is not None) == ("aborted", True)
    user = steps.session(dsn)
    sql(user, "UPDATE t SET k = 'z' WHERE id < 50")
    user.commit()
    if stage.startswith("rebuild"):
        steps.assert_exact(database)
        _, again = steps.begin(database, table=None, keys=None)
    else:
        assert status(database) == []
        _, again = steps.begin(database)
    steps.finish_all(database, again)
    steps.assert_exact(database)


def test_a_second_abort_finds_nothing_to_do(database: Database) -> None:
    begin(database, "building")
    operation = requests.request_abort(database, "ix", "first")
    assert requests.request_abort(database, "ix", "second").status == "aborting"
    abort.finish_abort(database, operation.id, "first")
    abort.finish_abort(database, operation.id, "second")
    assert operation_status(database, operation.id).status == "aborted"


def test_a_resume_after_the_abort_is_refused_and_one_before_it_is_fenced(database: Database) -> None:
    begin(database, "paused")
    run = start_run(database, "ix", "resumer")
    worker, claim = steps.claimed(database, run)
    operation = requests.request_abort(database, "ix", "me")
    with pytest.raises(Fenced):
        worker.step(claim)
    with pytest.raises(Fenced):
        build.finish(database, run)
    for refused in (
        lambda: start_run(database, "ix", "too late", take_over=True),
        lambda: requests.resume(database, "ix", "too late"),
        lambda: requests.pause(database, "ix", "too late"),
    ):
        with pytest.raises(IllegalTransition, match="abort"):
            refused()
    with pytest.raises(OperationFailed, match="aborted; finish that first"):
        steps.begin(database)
    worker.connection.close()
    abort.finish_abort(database, operation.id, "me")
    with pytest.raises(Fenced):
        steps.worker(database, run)
    assert status(database) == []


def test_while_a_writer_holds_its_lock_it_stays_aborting_and_the_clean_up_finishes_it(
    database: Database, dsn: str
) -> None:
    before = catalog(database)
    operation = begin(database, "building")
    user = steps.session(dsn)
    sql(user, "UPDATE t SET v = v WHERE id = 1")
    said: list[str] = []
    assert abort.abort(database, "ix", "me", report=said.append, patience_s=0).status == "aborting"
    assert "stays aborting" in said[-1]
    assert "pid" in said[-1]
    report = clean_up.clean_up(database)
    assert report.operations_aborted == 0
    assert "pid" in report.waiting[0]
    user.rollback()
    assert clean_up.clean_up(database).operations_aborted == 1
    assert operation_status(database, operation.id).status == "aborted"
    assert catalog(database) == before


def test_a_reader_only_holds_up_the_removal_of_the_triggers(database: Database, dsn: str) -> None:
    before = catalog(database)
    operation = begin(database, "building")
    reader = steps.session(dsn)
    sql(reader, "SELECT count(*) FROM t")
    assert abort.abort(database, "ix", "me", patience_s=0).status == "aborting"
    with database.transaction() as connection:
        assert execute(connection, "SELECT to_regclass('roir_data.g1')").scalar() is None
    writer = steps.session(dsn)
    sql(writer, "UPDATE t SET v = v WHERE id = 1")  # the triggers still exist, and do nothing
    writer.rollback()
    reader.rollback()
    clean_up.clean_up(database)
    assert operation_status(database, operation.id).status == "aborted"
    assert catalog(database) == before


def test_a_failed_operation_can_be_aborted(database: Database, dsn: str) -> None:
    begin(database, "building")
    run_sql(dsn, "UPDATE roir.operation SET status = 'failed', error = 'by hand'")
    with pytest.raises(OperationFailed, match="abort it first"):
        steps.begin(database)
    assert abort.abort(database, "ix", "me").status == "aborted"


def test_of_two_indexes_on_one_source_only_the_aborted_one_goes(database: Database, dsn: str) -> None:
    steps.make_index(database)
    begin_other, run = steps.begin(database, "other", "t", "v")
    abort.abort(database, "other", "me")
    user = steps.session(dsn)
    sql(user, "DELETE FROM t WHERE id < 10")
    user.commit()
    steps.assert_exact(database)
    assert begin_other.operation_id == run.operation_id


def test_a_drop_names_what_depends_on_the_view_and_changes_nothing(database: Database, dsn: str) -> None:
    steps.make_index(database)
    run_sql(dsn, "CREATE VIEW mine AS TABLE ix")
    with pytest.raises(InvalidInput, match=r"index ix can't be dropped: view public.mine depends on view public.ix"):
        drop.drop_index(database, "ix", "me")
    steps.assert_exact(database)
    run_sql(dsn, "DROP VIEW mine")
    drop.drop_index(database, "ix", "me")


def test_dropping_the_index_of_a_dropped_table_leaves_nothing(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE gone (id int PRIMARY KEY)")
    steps.make_index(database, "ix", "gone", "id")
    run_sql(dsn, "DROP TABLE gone CASCADE")
    drop.drop_index(database, "ix", "me")
    with database.transaction() as connection:
        left = execute(
            connection,
            "SELECT relname::text FROM pg_class WHERE relnamespace = 'roir_data'::regnamespace "
            "UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace",
        ).all()
    assert left == []
