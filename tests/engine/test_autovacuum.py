"""A real autovacuum worker that stays on a table doesn't starve a drain, and is reported as autovacuum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg2.extensions
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import install, prepare
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.readers import old_snapshots
from airflow_roir.errors import LockNotAcquired
from airflow_roir.options import BuildOptions
from servers.postgres import embedded_postgres
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql
from tests.engine.test_locks import watching

# A worker comes every second, and reads our table slowly: a tenth of a second for each page.
SETTINGS = """
autovacuum_naptime = 1s
autovacuum_max_workers = 1
"""
SLOWLY = (
    "fillfactor = 10, autovacuum_vacuum_threshold = 1, autovacuum_vacuum_scale_factor = 0, "
    "autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1"
)
WORKER = (
    "SELECT l.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.backend_type = 'autovacuum worker' "
    "AND l.relation = 't'::regclass AND l.granted AND l.mode = 'ShareUpdateExclusiveLock'"
)


@pytest.fixture(scope="module")
def slow(pg: int) -> Iterator[str]:
    """A server whose autovacuum takes its time."""
    with embedded_postgres(pg, settings=SETTINGS) as dsn:
        yield dsn


@pytest.fixture
def vacuumed(slow: str, request: pytest.FixtureRequest) -> Iterator[tuple[str, psycopg2.extensions.connection]]:
    """The DSN of a database in which a worker is at table `t`."""
    name = f"autovacuum_{abs(hash(request.node.name))}"
    run_sql(slow, f"CREATE DATABASE {name}")
    dsn = database_dsn(slow, name)
    install.init(Database(dsn, "roir tests"))
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY, k text, v int) WITH ({SLOWLY})",
        "INSERT INTO t SELECT i, repeat('x', 700), i FROM generate_series(1, 4000) i",
        "UPDATE t SET v = v + 1",
    )
    watch = watching(dsn)
    while not sql(watch, WORKER):
        pass
    yield dsn, watch
    watch.close()
    run_sql(slow, f"DROP DATABASE {name} WITH (FORCE)")


def attempt(database: Database, patience_s: int = 30) -> list[str]:
    reports: list[str] = []
    options = BuildOptions(lock_patience_s=patience_s)
    prepare.prepare(database, IndexDefinition.parse("ix", "t", "v"), options, "test", reports.append)
    return [line for line in reports if not line.startswith("expected")]


@pytest.mark.by_hand("sweeps")
def test_a_drain_cancels_an_autovacuum_and_names_it(vacuumed: tuple[str, Any]) -> None:
    """Found: autovacuum starved drains, as "unknown". It holds: cancelled, and named."""
    dsn, _ = vacuumed
    reports = attempt(Database(dsn, "roir tests"))
    assert "autovacuum: VACUUM" in reports[0]
    assert "public.t" in reports[0]
    assert "unknown" not in reports[0]
    steps.finish_all(Database(dsn, "roir tests"), steps.begin(Database(dsn, "roir tests"), "ix", "t", "v")[1])
    steps.assert_exact(Database(dsn, "roir tests"))


@pytest.mark.slow
def test_who_may_not_cancel_one_waits_until_the_server_does(vacuumed: tuple[str, Any]) -> None:
    """Found: autovacuum starved drains, as "unknown". It holds: cancelled, and named."""
    dsn, watch = vacuumed
    role = f"owner_{abs(hash(dsn))}"
    run_sql(
        dsn,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT CREATE ON SCHEMA public TO {role}",
        f"GRANT USAGE, CREATE ON SCHEMA roir, roir_data TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA roir TO {role}",
        f"GRANT USAGE ON TYPE roir.entry_state TO {role}",
    )
    # The role owns everything, but is no superuser.
    for (statement,) in sql(
        watch,
        "SELECT format('ALTER SCHEMA %%I OWNER TO %%I', n, %s::text) FROM unnest(ARRAY['roir', 'roir_data']) n "
        "UNION ALL "
        "SELECT format('ALTER TABLE %%s OWNER TO %%I', oid::regclass, %s::text) FROM pg_class "
        "WHERE relnamespace = 'roir'::regnamespace AND relkind = 'r' UNION ALL "
        "SELECT format('ALTER FUNCTION %%s OWNER TO %%I', oid::regprocedure, %s::text) FROM pg_proc "
        "WHERE pronamespace = 'roir'::regnamespace",
        role,
        role,
        role,
    ):
        sql(watch, statement)
    # The ACCESS EXCLUSIVE lock cancels the worker, which comes again.
    sql(watch, f"ALTER TABLE t OWNER TO {role}")
    sql(watch, "UPDATE t SET v = v + 1")
    while not sql(watch, WORKER):
        pass
    reports = attempt(Database(dsn.replace("//postgres:", f"//{role}:"), "roir tests"))
    assert "autovacuum" in reports[0]
    assert sql(watch, "SELECT count(*) FROM roir.operation")[0][0] == 1


@pytest.mark.slow
def test_one_that_prevents_a_wraparound_is_left_alone_and_named(vacuumed: tuple[str, Any]) -> None:
    dsn, watch = vacuumed
    run_sql(dsn, "ALTER TABLE t SET (autovacuum_freeze_max_age = 100000)")
    connection = watching(dsn)
    # PL/pgSQL's exception blocks are subtransactions, each with an id of its own.
    sql(connection, "CREATE TEMP TABLE spent (n int)")
    sql(
        connection,
        "DO $$ BEGIN FOR n IN 1..110000 LOOP BEGIN INSERT INTO spent VALUES (n); EXCEPTION WHEN OTHERS THEN NULL; END; "
        "END LOOP; END $$",
    )
    connection.close()
    # The present worker came for another reason.
    while not sql(watch, f"{WORKER} AND a.query LIKE '%%wraparound%%'"):
        sql(watch, f"SELECT pg_cancel_backend(w.pid) FROM ({WORKER} AND a.query NOT LIKE '%%wraparound%%') w")
    with pytest.raises(LockNotAcquired, match=r"autovacuum: VACUUM (ANALYZE )?public.t \(to prevent wraparound\)"):
        attempt(Database(dsn, "roir tests"), patience_s=0)
    assert sql(watch, WORKER), "it goes on"


@pytest.mark.sample(0)
def test_an_attach_waits_for_no_autovacuum_of_another_table(vacuumed: tuple[str, Any]) -> None:
    """A vacuum's snapshot is old, but sees no view; one of a big table takes hours."""
    dsn, watch = vacuumed
    database = Database(dsn, "roir tests")
    run_sql(
        dsn,
        "CREATE TABLE p (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)",
    )
    steps.make_index(database, "ip", "p", "k")
    run_sql(
        dsn,
        "CREATE TABLE p2 (LIKE p INCLUDING ALL) WITH (autovacuum_enabled = off)",
        "INSERT INTO p2 SELECT i, 'k' FROM generate_series(10, 19) i",
    )
    [(worker,)] = sql(watch, WORKER)
    said: list[str] = []
    attach.attach_partition(database, "p", "p2", "FOR VALUES FROM (10) TO (20)", "test", said.append)
    [(since,)] = sql(watch, "SELECT pg_current_xact_id()::text")
    with database.transaction() as connection:
        assert old_snapshots.holders(connection, since) == []
        # This role sees of another session only its id, its user and its snapshot.
        connection.exec_driver_sql("SET LOCAL ROLE pg_read_server_files")
        assert old_snapshots.holders(connection, since) == []
    assert sql(watch, WORKER) == [(worker,)], "the worker has ended too early to show anything"
    assert not any("snapshot" in line for line in said)
    steps.assert_exact(database, "ip")
