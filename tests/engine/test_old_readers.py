"""Readers whose snapshot is older than a publish see the whole index or get 40001; the guard costs nothing for long."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.definition import QualifiedName
from airflow_roir.engine import clean_up, install
from airflow_roir.engine.database import Database
from airflow_roir.engine.readers import view
from airflow_roir.errors import LockNotAcquired
from servers.postgres import programs
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

OLD = ["REPEATABLE READ", "SERIALIZABLE"]
IX = QualifiedName("public", "ix")


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    steps.make_table(dsn)


def publish(database: Database, created: bool = True) -> None:
    """Builds the index, or rebuilds it."""
    steps.make_index(database, **({} if created else {"table": None, "keys": None}))


def is_guarded(database: Database) -> bool:
    with database.transaction() as connection:
        return view.is_guarded(connection, IX)


@pytest.mark.sample(1)
@pytest.mark.parametrize("isolation", OLD)
@pytest.mark.parametrize("kind", ["create", "rebuild"])
@pytest.mark.parametrize("taken", [moment for moment in steps.MOMENTS if moment != "after seal"])
def test_a_reader_with_a_snapshot_older_than_the_publish_is_refused(
    database: Database, dsn: str, isolation: str, kind: str, taken: str
) -> None:
    if kind == "rebuild":
        publish(database)
        assert clean_up.clean_up(database).guards_removed == 1
    for moment in steps.moments(database, **({} if kind == "create" else {"table": None, "keys": None})):
        if moment == taken:
            old = steps.old_session(dsn, isolation)
    with pytest.raises(psycopg2.errors.SerializationFailure, match="published after the transaction's snapshot") as got:
        sql(old, "SELECT count(*) FROM ix")
    assert (got.value.diag.message_hint or "").startswith("Retry the transaction.")
    old.rollback()
    assert sql(old, "SELECT count(*) FROM ix") == [(100,)], "the retry"


def test_without_the_guard_that_reader_sees_an_incomplete_index(database: Database, dsn: str) -> None:
    """The negative of the test above."""
    user = steps.old_session(dsn)
    publish(database)
    run_sql(dsn, "CREATE OR REPLACE VIEW ix AS SELECT c1 AS k, c2 AS id FROM roir_data.g1")
    assert sql(user, "SELECT count(*) FROM ix") == [(0,)]


def test_a_reader_who_has_read_the_old_generation_goes_on_reading_it(database: Database, dsn: str) -> None:
    """The reader's lock on the view holds the publish up, so no transaction ever sees two generations."""
    publish(database)
    run = steps.folded(database, table=None, keys=None, lock_timeout_ms=50, lock_patience_s=0)
    user = steps.session(dsn, "REPEATABLE READ")
    assert sql(user, "SELECT count(*) FROM ix") == [(100,)]
    with pytest.raises(LockNotAcquired):
        steps.publish_all(database, run)
    assert sql(user, "SELECT count(*) FROM ix") == [(100,)]


@pytest.mark.by_hand("sweeps")
def test_prepared_statements_and_views_over_the_view_follow_the_guard(database: Database, dsn: str) -> None:
    publish(database)
    clean_up.clean_up(database)
    run_sql(dsn, "CREATE VIEW over AS SELECT k, count(*) AS n FROM ix GROUP BY k")
    user = steps.session(dsn, "REPEATABLE READ")
    sql(user, "PREPARE p AS SELECT count(*) FROM ix")
    for _ in range(7):  # from the sixth on the plan is a generic one
        sql(user, "EXECUTE p")
    user.commit()
    sql(user, "SELECT count(*) FROM pg_class")
    publish(database, created=False)
    for statement in ("EXECUTE p", "SELECT * FROM over"):
        sql(user, "SAVEPOINT s")
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(user, statement)
        sql(user, "ROLLBACK TO s")
    user.rollback()
    assert sql(user, "EXECUTE p") == [(100,)]


def test_the_guard_goes_when_no_older_snapshot_is_left(database: Database, dsn: str) -> None:
    user = steps.old_session(dsn)
    publish(database)
    report = clean_up.clean_up(database)
    assert (report.guards_removed, is_guarded(database)) == (0, True)
    ((pid,),) = sql(user, "SELECT pg_backend_pid()")
    assert any(f"pid {pid}" in line for line in report.waiting)
    user.rollback()
    sql(user, "SELECT count(*) FROM pg_class")  # a new snapshot that stays open
    assert (clean_up.clean_up(database).guards_removed, is_guarded(database)) == (1, False)
    assert sql(user, "SELECT count(*) FROM ix") == [(100,)]
    assert clean_up.clean_up(database).guards_removed == 0


@pytest.mark.sample(0)
def test_a_snapshot_that_was_handed_on_keeps_the_guard(database: Database, dsn: str) -> None:
    exporter = steps.old_session(dsn)
    ((snapshot,),) = sql(exporter, "SELECT pg_export_snapshot()")
    publish(database)
    importer = steps.session(dsn, "REPEATABLE READ")
    sql(importer, f"SET TRANSACTION SNAPSHOT '{snapshot}'")
    exporter.rollback()
    assert clean_up.clean_up(database).guards_removed == 0
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(importer, "SELECT count(*) FROM ix")
    importer.rollback()
    assert clean_up.clean_up(database).guards_removed == 1


@pytest.mark.sample(0)
def test_sessions_of_other_databases_do_not_keep_the_guard(database: Database, dsn: str, server: str) -> None:
    other = steps.old_session(database_dsn(server, "postgres"))
    publish(database)
    assert clean_up.clean_up(database).guards_removed == 1
    other.rollback()


def test_sessions_of_other_roles_are_seen_by_a_role_without_any_right_to_watch(database: Database, dsn: str) -> None:
    """Otherwise a clean-up by an ordinary owner would remove the guard while they read."""
    user = steps.old_session(dsn)
    publish(database)
    run_sql(dsn, "CREATE ROLE nosy LOGIN", "GRANT USAGE ON SCHEMA roir TO nosy")
    run_sql(dsn, "GRANT SELECT ON roir.generation TO nosy")
    try:
        with database.transaction() as connection:
            connection.exec_driver_sql("SET LOCAL ROLE nosy")
            assert len(view.old_snapshots(connection, 1)) == 1
    finally:
        run_sql(dsn, "DROP OWNED BY nosy", "DROP ROLE nosy")
        user.rollback()


@pytest.mark.by_hand("sweeps")
def test_grants_options_and_dependent_views_outlive_guard_and_rebuild(database: Database, dsn: str) -> None:
    publish(database)
    run_sql(
        dsn,
        "CREATE ROLE reader LOGIN",
        "GRANT SELECT (id) ON ix TO reader",
        "ALTER VIEW ix SET (security_barrier)",
        "COMMENT ON VIEW ix IS 'ours'",
        "CREATE VIEW over AS SELECT * FROM ix",
    )
    try:
        seen = "SELECT relacl::text, reloptions::text, obj_description(oid), (SELECT string_agg(attacl::text, ',') "
        seen += "FROM pg_attribute WHERE attrelid = c.oid) FROM pg_class c WHERE relname = 'ix'"
        user = steps.session(dsn)
        before = sql(user, seen)
        user.commit()
        for step in (lambda: clean_up.clean_up(database), lambda: publish(database, created=False)):
            step()
            assert sql(user, seen) == before
            # The reader has no right to any table of ours, and the guard runs with the reader's rights.
            sql(user, "SET LOCAL ROLE reader")
            assert sql(user, "SELECT count(id) FROM ix") == [(100,)]
            with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                sql(user, "SELECT FROM roir.generation")
            user.rollback()
    finally:
        run_sql(dsn, "DROP OWNED BY reader", "DROP ROLE reader")


def test_the_guard_is_asked_once_and_leaves_plans_as_they_are(database: Database, dsn: str) -> None:
    publish(database)
    user = steps.session(dsn)
    sql(user, "SET track_functions = 'all'; SET enable_seqscan = off; SET enable_bitmapscan = off")
    plan = "\n".join(line for (line,) in sql(user, "EXPLAIN (COSTS OFF) SELECT k, id FROM ix WHERE k = '3'"))
    assert "One-Time Filter" in plan
    assert "Index Only Scan" in plan
    sql(user, "SELECT count(*) FROM ix")
    assert sql(user, "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = 'published'") == [(1,)]
    user.rollback()
    sql(user, "SET LOCAL enable_seqscan = on; SET LOCAL parallel_setup_cost = 0; SET LOCAL parallel_tuple_cost = 0")
    sql(user, "SET LOCAL min_parallel_table_scan_size = 0; SET LOCAL max_parallel_workers_per_gather = 2")
    parallel = "\n".join(line for (line,) in sql(user, "EXPLAIN (COSTS OFF) SELECT count(*) FROM ix"))
    assert "Gather" in parallel
    assert sql(user, "SELECT count(*) FROM ix") == [(100,)]


def test_the_guard_is_right_in_a_database_that_was_restored_from_a_dump(
    database: Database, dsn: str, server: str, pg: int, tmp_path: Path
) -> None:
    """There the ids of transactions mean nothing. The row that says `active` is still right."""
    publish(database)
    dump = programs(pg) / "pg_dump"
    text = subprocess.run([dump, dsn], capture_output=True, text=True, check=True).stdout
    run_sql(server, "CREATE DATABASE restored")
    restored = database_dsn(server, "restored")
    try:
        script = tmp_path / "dump.sql"
        script.write_text(text)
        psql = dump.with_name("psql")
        subprocess.run([psql, "-qX", "-v", "ON_ERROR_STOP=1", "-f", script, restored], check=True, capture_output=True)
        user = steps.session(restored, "REPEATABLE READ")
        assert sql(user, "SELECT count(*) FROM ix") == [(100,)]
        user.rollback()
        run_sql(restored, "UPDATE roir.generation SET mode_xid = (mode_xid::bigint + 1000000000)::text")
        install.init(Database(restored))
        assert clean_up.clean_up(Database(restored)).guards_removed == 1
        user.close()
    finally:
        run_sql(server, "DROP DATABASE restored WITH (FORCE)")
