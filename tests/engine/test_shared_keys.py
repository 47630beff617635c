"""Rows that share a `DEFERRABLE` primary key for a while, in one transaction or in two that are open at once."""

from __future__ import annotations

import threading

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import changed
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

GATE = 77


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, k text, v int)",
        "INSERT INTO t VALUES (2, 'b', 0), (3, 'c', 0)",
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_entry_that_our_own_row_leaves_stays_another_rows(database: Database, dsn: str, mode: str) -> None:
    run_sql(dsn, "INSERT INTO t VALUES (1, 'a', 0)")
    stage = Stage(database, mode, include="v")
    run_sql(
        dsn,
        "BEGIN; INSERT INTO t VALUES (1, 'a', 1); UPDATE t SET k = 'x' WHERE v = 1; DELETE FROM t WHERE v = 1; COMMIT",
        "BEGIN; INSERT INTO t VALUES (2, 'y', 1); UPDATE t SET v = 9 WHERE id = 2; DELETE FROM t WHERE k = 'b'; COMMIT",
    )
    stage.assert_exact("own rows beside another's, and two of one's own")
    stage.finish()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_row_that_an_old_snapshot_does_not_see_keeps_its_entry(database: Database, dsn: str, isolation: str) -> None:
    """The snapshot is older than prepare: the mode's row is checked in capture mode too."""
    user = steps.old_session(dsn, isolation)
    run_sql(dsn, "INSERT INTO t VALUES (1, 'a', 0)")
    run = steps.built(database, include="v")
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(user, "INSERT INTO t VALUES (1, 'a', 1)")
    user.rollback()
    steps.seal_all(database, run)
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("mode", ["direct", "active"])
def test_an_entry_whose_row_is_committed_between_look_and_removal_stays(
    database: Database, dsn: str, mode: str
) -> None:
    """The gate is before the removal of the last event: the moment lasts as long as the gate is closed."""
    run_sql(
        dsn,
        "CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN DELETE FROM t WHERE id = NEW.id AND v = NEW.v; RETURN NULL; END $$",
        "CREATE TRIGGER a_lose AFTER INSERT ON t FOR EACH ROW WHEN (NEW.v = 9) EXECUTE FUNCTION lose()",
    )
    wait = f"IF TG_OP = 'INSERT' AND NEW.v = 9 THEN PERFORM pg_advisory_xact_lock({GATE}); END IF;"
    space = r"(?:\s|--.*\n)*"
    told = rf"{space}IF one_snapshot THEN\s[^;]*;\s*END IF;"
    with changed(database, rf"(?<=IF here\.belongs IS NULL THEN\n)(?={told}{space}IF new_null THEN)", wait):
        stage = Stage(database, mode, include="v")
    gate, keeper, loser = (steps.session(dsn) for _ in range(3))
    sql(gate, f"SELECT pg_advisory_lock({GATE})")
    sql(keeper, "INSERT INTO t VALUES (1, 'a', 1)")
    met: list[BaseException] = []

    def lose() -> None:
        try:
            sql(loser, "INSERT INTO t VALUES (1, 'a', 9)")
            loser.commit()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    watch = steps.session(dsn)
    watch.autocommit = True
    waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    while thread.is_alive() and sql(watch, waits) == [(0,)]:
        thread.join(0.01)
    assert thread.is_alive(), "it stands at the gate"
    keeper.commit()
    sql(gate, f"SELECT pg_advisory_unlock({GATE})")
    thread.join()
    assert not met
    stage.assert_exact("the other's row and its entry")
    stage.finish()
