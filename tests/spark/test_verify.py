"""A verification on Spark: two workers, a pause with another parallelism, a killed driver."""

from __future__ import annotations

import os
import signal
import time

import pytest

from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.verify import comparing, record
from airflow_roir.engine.verify.report import report_of
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.crash import gate
from tests.engine import steps
from tests.engine.verifying import units
from tests.spark.driving import GIVE_UP_S, ROWS, Running, at_work, one

pytestmark = [pytest.mark.usefixtures("source"), pytest.mark.slow]


@pytest.fixture
def database(dsn: str) -> Database:
    """Its verifications have many units."""
    return Database(dsn, "roir tests", Limits(unit_rows=ROWS // 10, unit_blocks=32))


@pytest.fixture
def base(dsn: str, database: Database) -> str:
    """The base of a published index; its verifications write down who compared which unit."""
    prepared, run = steps.begin(database, include="v", ranges=4, segments=3)
    steps.finish_all(database, run)
    run_sql(
        dsn,
        "CREATE TABLE compared (stage text, ordinal int, worker int, epoch bigint)",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.compared "
        "VALUES (OLD.stage, OLD.ordinal, OLD.claim_worker, OLD.claim_epoch); RETURN NULL; END $$",
        "CREATE TRIGGER note AFTER UPDATE OF done ON roir.verification_unit FOR EACH ROW WHEN (NEW.done) "
        "EXECUTE FUNCTION note()",
    )
    gate.install(dsn)
    return physical.base(prepared.generation_id)


def compared(database: Database) -> dict[int, set[tuple[str, int, int]]]:
    """The units that were compared in each epoch, and by which worker."""
    found: dict[int, set[tuple[str, int, int]]] = {}
    with database.transaction() as connection:
        for row in execute(connection, "SELECT * FROM public.compared").all():
            found.setdefault(row.epoch, set()).add((row.stage, row.ordinal, row.worker))
    return found


def twice(database: Database) -> int:
    """Units that were compared more than once."""
    query = "SELECT count(*) - count(DISTINCT (stage, ordinal)) FROM public.compared"
    return int(one(database, query))


@pytest.mark.by_hand("sweeps")
def test_two_workers_are_paused_and_three_go_on(database: Database, dsn: str, base: str) -> None:
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 = 100", f"UPDATE {base} SET c3 = 0 WHERE c2 = 200")
    begun = record.begin(database, "ix", VerifyOptions(), "test")
    shut = gate.Gate(dsn, "compare")
    with Running(database, "local[4]") as driver:
        shut.reached(2)
        requests.pause(database, "ix", "me", "a look")
        shut.open()
        assert driver.wait() == 3, driver.said
    ((first, done),) = compared(database).items()
    # Three had passed the gate, and each worker committed the unit that it held there.
    assert len(done) == 5
    assert {worker for _, _, worker in done} == {0, 1}
    assert one(database, "SELECT count(*) FROM roir.verification_unit WHERE NOT done") > 5
    requests.change_options(database, "ix", actor="me", parallelism=3)
    with Running(database, "local[4]") as driver:
        assert driver.wait() == 0, driver.said
    assert "compare sums: 3 workers" in driver.said
    assert "compare rows: 3 workers" in driver.said
    both = compared(database)
    assert both[first] == done
    assert len(both) == 2
    assert twice(database) == 0
    report = report_of(database, begun.operation_id)
    assert (report.rows, report.missing, report.extra, report.different) == (ROWS, 1, 0, 1)
    assert operation_status(database, begun.operation_id).status == "completed"


def test_a_killed_driver_leaves_the_units_that_are_left_to_the_next(database: Database, dsn: str, base: str) -> None:
    run_sql(dsn, f"DELETE FROM {base} WHERE c2 = 100")
    begun = record.begin(database, "ix", VerifyOptions(repair=True), "test")
    shut = gate.Gate(dsn, "compare")
    with Running(database, "local[2]") as driver:
        shut.reached(2)
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    # Its Python workers have a process group of their own, and outlive it for a moment: it must not be opened to them.
    deadline = time.monotonic() + GIVE_UP_S
    while at_work(database):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shut.open()
    ((first, done),) = compared(database).items()
    assert len(done) == 3
    run = start_run(database, "ix", "the next", take_over=True)
    while operations.find_operation(database, "ix").status == "running":
        list(units(database, run))
        comparing.finish(database, run)
    both = compared(database)
    # A compared unit stays compared; a unit that was open when the driver died was rolled back.
    assert both[first] == done
    assert len(both) == 2
    assert twice(database) == 0
    report = report_of(database, begun.operation_id)
    assert (report.rows, report.missing, report.repaired) == (ROWS, 1, 1)
    steps.assert_exact(database)
