"""Logical replication writes to a partitioned table: by leaf or by root, in streams, filtered, truncated."""

from __future__ import annotations

import itertools

import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput
from servers.killable import Server
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import through_modes
from tests.engine.steps import sql
from tests.engine.test_replication import dsn as dsn
from tests.engine.test_replication import primary as primary
from tests.engine.test_replication import wait_until

TABLE = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (MINVALUE) TO (30)",
    "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (30) TO (MAXVALUE)",
)
ROWS = "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i"


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("root", [True, False], ids=["by its root", "by its leaves"])
def test_a_partitioned_table_that_is_subscribed_to_is_followed_in_every_mode(
    primary: Server, dsn: str, pg: int, root: bool
) -> None:
    """Several workers apply streamed big transactions to leaves; rows move between leaves on both sides."""
    database = Database(dsn)
    here = dsn.rsplit("/", 1)[1]
    there = f"{here}_publisher"
    primary.execute(f"CREATE DATABASE {there}")
    run_sql(dsn, "DROP TABLE t", *TABLE, ROWS)
    run_sql(primary.dsn(there), *TABLE, ROWS)
    publisher, subscriber = steps.session(primary.dsn(there)), steps.session(dsn)
    publisher.autocommit = subscriber.autocommit = True
    # A publication by the root publishes no TRUNCATE of a leaf.
    published = "t WHERE (id <> 7)" if root else "t"
    sql(publisher, f"CREATE PUBLICATION p FOR TABLE {published} WITH (publish_via_partition_root = {root})")
    sql(publisher, f"SELECT pg_create_logical_replication_slot('{here}', 'pgoutput')")
    run_sql(primary.dsn(), "ALTER SYSTEM SET logical_decoding_work_mem = '64kB'", "SELECT pg_reload_conf()")
    # Parallel workers stop for good at any row trigger of a partitioned table, not only at ours.
    streaming = "parallel" if pg >= 16 and not root else "on"
    run_sql(
        dsn,
        f"CREATE SUBSCRIPTION {here} CONNECTION '{primary.dsn(there)}' PUBLICATION p WITH (create_slot = false, "
        f"slot_name = '{here}', copy_data = false, streaming = {streaming}, two_phase = false)",
    )
    times = itertools.count()
    rows = "SELECT id, k, v FROM t WHERE id <> 7 ORDER BY id"

    def write(mode: str) -> None:
        for statement in (
            "INSERT INTO t SELECT i, 'streamed', i FROM generate_series(100, 3000) i",
            "UPDATE t SET k = k || 'x', v = v + 1 WHERE id % 2 = 0",
            "UPDATE t SET id = -id WHERE id BETWEEN 25 AND 40",
            "BEGIN; DELETE FROM t WHERE id > 50; INSERT INTO t SELECT i, 'again', 0 FROM generate_series(55, 2000) i; "
            "UPDATE t SET id = id + 5000 WHERE id > 55; SAVEPOINT s; DELETE FROM t; ROLLBACK TO s; COMMIT",
            "TRUNCATE t" if root else "TRUNCATE t1",
            "DELETE FROM t",
            f"INSERT INTO t SELECT i, nullif(i % 5, 3)::text, {next(times)} FROM generate_series(1, 60) i",
        ):
            sql(publisher, statement)
        wait_until(lambda: sql(publisher, rows) == sql(subscriber, rows), "applying")

    try:
        through_modes(database, write, include="v", ranges=3, batch_rows=50)
        if pg >= 16:
            seen = "SELECT count(*) FROM pg_stat_replication_slots WHERE slot_name = %s AND stream_txns > 0"
            wait_until(lambda: sql(publisher, seen, here) == [(1,)], "streams")
    finally:
        run_sql(primary.dsn(), "ALTER SYSTEM RESET logical_decoding_work_mem", "SELECT pg_reload_conf()")
        run_sql(dsn, f"DROP SUBSCRIPTION {here}")
        publisher.close()
        subscriber.close()
        primary.execute(f"DROP DATABASE {there} WITH (FORCE)")


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("source", ["t", "t2"])
def test_parallel_workers_that_would_stop_at_the_capture_are_refused_and_told(
    primary: Server, dsn: str, pg: int, source: str
) -> None:
    """A trigger on one partition alone stops them too, if the subscription is to the whole table."""
    if pg < 16:
        pytest.skip("streams are applied in parallel from PostgreSQL 16 on")
    database = Database(dsn)
    name = dsn.rsplit("/", 1)[1]
    run_sql(
        dsn,
        "DROP TABLE t",
        *TABLE,
        ROWS,
        # The subscription never runs: only its definition counts here.
        f"CREATE SUBSCRIPTION {name} CONNECTION 'dbname=none' PUBLICATION p WITH (connect = false, slot_name = NONE, "
        "enabled = false, create_slot = false, streaming = parallel)",
        # A refresh would record this.
        f"INSERT INTO pg_subscription_rel SELECT oid, 't'::regclass, 'r' FROM pg_subscription WHERE subname = '{name}'",
    )
    try:
        with pytest.raises(InvalidInput, match=r"hang for good .*streaming = on"):
            steps.begin(database, table=source)
        run_sql(dsn, f"ALTER SUBSCRIPTION {name} SET (streaming = on)")
        steps.make_index(database, table=source)
        assert not any("subscription" in line for line in clean_up.clean_up(database).warnings)
        run_sql(dsn, f"ALTER SUBSCRIPTION {name} SET (streaming = parallel)")
        assert any("subscription" in line for line in clean_up.clean_up(database).warnings)
    finally:
        run_sql(dsn, f"DROP SUBSCRIPTION {name}")
