"""Logical slots that follow a failover (PostgreSQL 17): no command waits for them, and operations continue."""

from __future__ import annotations

import pytest

from airflow_roir.engine import clean_up, lifecycle
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from servers.killable import Server
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_replication import BOUNDS, PARTITIONED, replayed, standby_of, wait_until
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary

SLOTS = "SELECT synced AND NOT temporary AND invalidation_reason IS NULL FROM pg_replication_slots WHERE slot_name = %s"


@pytest.mark.by_hand("sweeps")
def test_after_a_failover_with_synced_slots_an_operation_and_an_attach_go_on(
    primary: Server, dsn: str, pg: int
) -> None:
    """Their catalog_xmin stays old as long as no consumer reads them; it says nothing about readers' snapshots."""
    if pg < 17:
        pytest.skip("slots follow a failover from PostgreSQL 17 on")
    name = dsn.rsplit("/", 1)[1]
    physical = f"standby_{name}"
    run_sql(dsn, *PARTITIONED)
    run_sql(
        dsn,
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput', failover => true)",
        f"SELECT pg_create_physical_replication_slot('{physical}', true)",
    )
    settings = (
        f"hot_standby_feedback = on\nsync_replication_slots = on\nprimary_slot_name = '{physical}'\n"
        f"primary_conninfo = '{primary.dsn()}'\nwal_receiver_status_interval = 1\n"
    )
    try:
        with standby_of(primary, settings=settings) as standby:
            there = database_dsn(standby, name)
            watch = steps.session(standby)
            watch.autocommit = True

            # The slot becomes persistent once the standby has the positions that it needs.
            def synced() -> bool:
                run_sql(dsn, "SELECT pg_log_standby_snapshot()")
                run_sql(dsn, f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_lsn())")
                return sql(watch, SLOTS, name) == [(True,)]

            wait_until(synced, "the slot's copy")
            database = Database(dsn)
            _, run = steps.begin(database, ranges=2, batch_rows=7)
            worker = steps.worker(database, run)
            claim = worker.claim()
            assert not isinstance(claim, Stop)
            worker.step(claim)
            worker.connection.close()
            # Another table's attach to a published index waits for no logical slot, its own or a copy.
            run_sql(dsn, "CREATE TABLE s (LIKE t INCLUDING ALL) PARTITION BY RANGE (d)")
            steps.make_index(database, "other", "s")
            run_sql(dsn, "CREATE TABLE s1 (LIKE s INCLUDING ALL)", "INSERT INTO s1 TABLE t1")
            said: list[str] = []
            attach.attach_partition(database, "s", "s1", BOUNDS, "test", said.append)
            assert not any(name in line and physical not in line for line in said), said
            replayed(dsn, there)
            watch.close()
            run_sql(there, "SELECT pg_promote()")
            promoted = Database(there)
            run_sql(there, "UPDATE t SET k = 'after' WHERE id % 4 = 0", "DELETE FROM t WHERE id % 9 = 0")
            run = start_run(promoted, "ix", "test", take_over=True)
            steps.build_all(promoted, run)
            steps.seal_all(promoted, run)
            lifecycle.run_phases(promoted, run)
            steps.assert_exact(promoted)
            report = clean_up.clean_up(promoted)
            assert (report.guards_removed, report.waiting, report.warnings) == (2, [], [])
            attach.attach_partition(promoted, "t", "t1", BOUNDS, "test", said.append)
            steps.assert_exact(promoted)
            assert sql(steps.session(there), "SELECT synced FROM pg_replication_slots WHERE catalog_xmin IS NOT NULL")
    finally:
        primary.execute(f"SELECT pg_drop_replication_slot('{name}')")
        wait_until(
            lambda: (
                not sql(
                    steps.session(dsn), "SELECT FROM pg_replication_slots WHERE active AND slot_name = %s", physical
                )
            ),
            "the standby's end",
        )
        primary.execute(f"SELECT pg_drop_replication_slot('{physical}')")
