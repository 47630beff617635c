"""The units of a verification, and the end of its workers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import lifecycle
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.verify import record, units
from airflow_roir.engine.work.phase_log import PhaseLog
from airflow_roir.operation import Phase
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.crash import gate
from tests.engine import steps

ROWS = 5_000


@pytest.mark.sample(0)
def test_a_part_of_a_table_that_was_never_analyzed_has_units_of_many_rows(dsn: str, database: Database) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text) WITH (autovacuum_enabled = false)",
        f"INSERT INTO t SELECT i, i::text FROM generate_series(1, {ROWS}) i",
    )
    steps.make_index(database)
    record.begin(database, "ix", VerifyOptions(slices=2), "test")
    with database.transaction() as connection:
        query = "SELECT count(*) FROM roir.verification_unit WHERE side = 'source'"
        made = execute(connection, query).scalar_one()
    assert ROWS / 10 < made <= units.UNITS_OF_PARTS


@pytest.mark.sample(0)
def test_where_one_worker_fails_the_others_leave_after_their_open_unit(dsn: str) -> None:
    database = Database(dsn, limits=Limits(unit_blocks=2))
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        f"INSERT INTO t SELECT i, i::text FROM generate_series(1, {ROWS}) i",
    )
    steps.make_index(database)
    # The first unit fails once another worker waits at the gate: a later worker would find nothing to do.
    run_sql(
        dsn,
        "CREATE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"WHILE NOT EXISTS ({gate.WAITING % gate.KEYS['compare']}) LOOP PERFORM pg_sleep(0.02); END LOOP; "
        "RAISE 'broken'; END $$",
        "CREATE TRIGGER break BEFORE UPDATE OF done ON roir.verification_unit FOR EACH ROW "
        "WHEN (NEW.ordinal = 0) EXECUTE FUNCTION break()",
    )
    gate.install(dsn)
    run_sql(
        dsn,
        "CREATE TRIGGER early BEFORE UPDATE OF done ON roir.verification_unit FOR EACH ROW "
        "WHEN (NEW.done AND NEW.ordinal > 0) EXECUTE FUNCTION gate_compare()",
    )
    shut = gate.Gate(dsn, "compare")
    with ThreadPoolExecutor(1) as aside:
        verifying = aside.submit(lifecycle.verify, database, "ix", VerifyOptions(parallelism=2))
        shut.reached()
        # Nothing reports this moment, so poll. The limit is long compared with the time that it takes.
        deadline = time.monotonic() + 30
        while operations.find_operation(database, "ix").status == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        shut.open()
        with pytest.raises(DBAPIError, match="broken"):
            verifying.result()
    with database.transaction() as connection:
        done = execute(connection, "SELECT count(*) FROM roir.verification_unit WHERE done").scalar_one()
    assert done == 1
    assert "broken" in operations.find_operation(database, "ix").pause_reason


def test_a_comparison_that_is_resumed_does_not_say_that_anything_differs(dsn: str, database: Database) -> None:
    """Found: `a closer look at what differs adds the others`, before anything was compared."""
    steps.make_table(dsn, 100)
    steps.make_index(database)
    record.begin(database, "ix", VerifyOptions(), "test")
    run = start_run(database, "ix", "test")
    run_sql(dsn, "UPDATE roir.verification_unit SET done = true WHERE ordinal = 0")
    lines: list[str] = []
    PhaseLog(database, run, lifecycle.PHASES[Phase.SUM], lines.append).begin(1)
    told = " units done before; a second pass over what may have changed meanwhile can add to them"
    assert lines[1].startswith("compare sums: 1 of ")
    assert lines[1].endswith(told)


@pytest.mark.parametrize(
    ("seconds", "side"),
    [(None, "heap"), (5, "heap"), (20, "heap"), (25, "source")],
    ids=["never", "soon", "fast", "slow"],
)
def test_a_table_that_no_snapshot_holds_is_read_by_ranges_at_once(
    dsn: str, database: Database, seconds: int | None, side: str
) -> None:
    """Found: both sides were read twice each time: the sums by blocks came from several snapshots, and said nothing.

    24 s are four fifths of the time that a snapshot is shared.
    """
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text)",
        f"INSERT INTO t SELECT i, i::text FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    steps.make_index(database)
    lifecycle.verify(database, "ix")
    if seconds is not None:
        run_sql(
            dsn,
            f"UPDATE roir.verification SET started_at = finished_at - interval '{seconds} s'",
            f"""UPDATE roir.operation SET phase_seconds = phase_seconds || '{{"sum": {seconds}}}', parallelism = 2""",
        )
    record.begin(database, "ix", VerifyOptions(parallelism=2), "test")
    with database.transaction() as connection:
        query = "SELECT DISTINCT side FROM roir.verification_unit WHERE side IN ('heap', 'source')"
        assert execute(connection, query).scalars().all() == [side]
