"""Attacks on objects that are gone or altered for a while, and on what users add to tables of ours."""

from __future__ import annotations

import psycopg2.extensions
import pytest

from airflow_roir.engine import lifecycle
from airflow_roir.engine.build import Claim
from airflow_roir.engine.capture.row_function import function_name
from airflow_roir.engine.control.job import SourceCheck
from airflow_roir.engine.database import Database
from airflow_roir.engine.verify import record
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import SourceChanged
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql
from tests.engine.test_marks import FUNCTION, PLAIN, ROWS, STUB, told, warned

pytestmark = pytest.mark.sample(1)


def stubbed(dsn: str) -> tuple[psycopg2.extensions.connection, psycopg2.extensions.connection]:
    """A user whose write ran a stub and hasn't committed. The capture function is as before again."""
    admin, writer = steps.session(dsn), steps.session(dsn)
    admin.autocommit = True
    [(oid,)] = sql(admin, "SELECT 't'::regclass::oid")
    [(was,)] = sql(admin, "SELECT pg_get_functiondef(to_regproc(%s))", function_name(oid))
    sql(admin, STUB.format(function_name(oid)))
    sql(writer, "UPDATE t SET k = 'missed' WHERE id = 3")
    sql(admin, was)
    return admin, writer


@pytest.mark.by_hand("sweeps")
def test_a_verification_forgives_no_function_whose_writer_is_still_in_flight(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function can be replaced without a lock on its table."""
    run_sql(dsn, *PLAIN, ROWS)
    Stage(database, "active", include="v").connection.close()
    _, writer = stubbed(dsn)
    monkeypatch.setattr(record, "PATIENCE_S", 0.1)
    report = lifecycle.verify(database, "ix", VerifyOptions(), "test")
    assert report.complete
    assert report.found == 0
    writer.commit()
    assert FUNCTION in warned(database)[0]
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True), "test").repaired == 2
    assert warned(database) == []
    steps.assert_exact(database)


@pytest.mark.by_hand("sweeps")
def test_a_verification_that_is_under_way_forgives_no_function_by_the_next_ones_wait(
    database: Database, dsn: str
) -> None:
    run_sql(dsn, *PLAIN, ROWS)
    Stage(database, "active", include="v").connection.close()
    _, writer = stubbed(dsn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "PATIENCE_S", 0.1)
        begun = record.begin(database, "ix", VerifyOptions(), "test")
    writer.commit()
    # It is unknown whether the verification has read the writer's row.
    assert record.begin(database, "ix", VerifyOptions(), "test").operation_id == begun.operation_id
    lifecycle.verify(database, "ix", VerifyOptions(), "test")
    assert FUNCTION in warned(database)[0]
    assert lifecycle.verify(database, "ix", VerifyOptions(repair=True), "test").repaired == 2
    assert warned(database) == []


@pytest.mark.sample(0)
def test_a_child_that_has_gone_is_none(database: Database, dsn: str) -> None:
    """The catalog says that the table has children until an ANALYZE."""
    run_sql(dsn, *PLAIN, ROWS)
    Stage(database, "active", include="v").connection.close()
    run_sql(dsn, "CREATE TABLE child () INHERITS (t)")
    assert "inheritance children" in warned(database)[0]
    run_sql(dsn, "DROP TABLE child")
    assert warned(database) == []
    steps.finish_all(database, steps.begin(database, "other", keys="v")[1])
    steps.assert_exact(database, "other")


@pytest.mark.sample(0)
@pytest.mark.parametrize("looks", [True, False])
def test_a_batch_copies_no_row_of_a_child(
    database: Database, dsn: str, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second child leaves no trace in the table's own row of the catalog. A batch notices it by a look that it
    takes at its end; what it has read by then must not have the child's rows either.
    """
    run_sql(dsn, *PLAIN, ROWS)
    _, run = steps.begin(database, include="v", ranges=1, batch_rows=10, scan="key")
    worker = steps.worker(database, run)
    run_sql(dsn, "CREATE TABLE first () INHERITS (t)", "DROP TABLE first")
    claim = worker.claim()
    assert isinstance(claim, Claim)
    outcome = worker.step(claim)
    assert isinstance(outcome, Step)
    run_sql(dsn, "CREATE TABLE child () INHERITS (t)", "INSERT INTO child VALUES (25, 'child', 1), (99, 'child', 1)")
    claim = outcome.rest
    assert isinstance(claim, Claim)
    if looks:
        with pytest.raises(SourceChanged, match="was altered"):
            worker.step(claim)
    else:
        monkeypatch.setattr(SourceCheck, "look", lambda *_, **__: None)
        while isinstance(claim, Claim):
            outcome = worker.step(claim)
            assert isinstance(outcome, Step)
            claim = outcome.rest or worker.claim()
        monkeypatch.undo()
    worker.connection.close()
    run_sql(dsn, "DROP TABLE child", "ANALYZE t")
    steps.finish_all(database, run)
    steps.assert_exact(database)


TRIGGER = "CREATE TRIGGER r BEFORE INSERT OR DELETE ON {} FOR EACH ROW EXECUTE FUNCTION nothing()"
HUNG = {
    "rule": "CREATE RULE r AS ON DELETE TO {table} DO INSTEAD NOTHING",
    "trigger": TRIGGER.format("{table}"),
    "trigger of a segment": TRIGGER.format("{segment}"),
    "row security": "ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hung", HUNG)
def test_what_is_hung_on_tables_of_ours_is_told(database: Database, dsn: str, hung: str, mode: str) -> None:
    """A trigger or rule swallowed writes to the index, and no command reported it."""
    run_sql(dsn, *PLAIN, ROWS)
    stage = Stage(database, mode, include="v")
    names = {"table": stage.delta if mode == "capture" else stage.base, "segment": f"{stage.base}_s001"}
    run_sql(
        dsn,
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        HUNG[hung].format(**names),
    )
    with stage.connection.begin():
        said = told(stage.connection, stage)
    stage.connection.close()
    assert ("rules, triggers or row-level security" if mode == "active" else "was altered") in said
