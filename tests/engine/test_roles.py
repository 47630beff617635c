"""Roles: an application can only write, users can't run code in the capture, and policies are undone only knowingly."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import pytest
from psycopg2.extensions import make_dsn

from airflow_roir.engine import abort, clean_up, drop, install, revert
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.engine.schema import schema
from airflow_roir.errors import InvalidInput, SourceChanged
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)


@pytest.fixture(autouse=True)
def table(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 10) i",
    )


@pytest.fixture
def role(stranger: str) -> str:
    """The name of the stranger's role."""
    return str(sql(steps.session(stranger), "SELECT current_user")[0][0])


def test_a_role_that_may_only_write_the_table_writes_it_and_reads_nothing_of_ours(
    database: Database, dsn: str, stranger: str
) -> None:
    [(role,)] = sql(steps.session(stranger), "SELECT current_user")
    run_sql(dsn, f"GRANT INSERT, UPDATE, DELETE, SELECT, TRUNCATE ON t TO {role}")
    _, run = steps.begin(database, include="v")
    app = steps.session(stranger)

    def write() -> None:
        for statement in (
            "UPDATE t SET k = 'x' WHERE id < 5",
            "UPDATE t SET id = id + 100 WHERE id = (SELECT max(id) FROM t)",
            "DELETE FROM t WHERE id = (SELECT min(id) FROM t)",
            "INSERT INTO t SELECT max(id) + 1, NULL FROM t",
        ):
            sql(app, statement)
        app.commit()
        sql(app, "TRUNCATE t")
        app.rollback()

    write()
    steps.finish_all(database, run)
    write()
    steps.assert_exact(database)
    for forbidden in (
        "SELECT * FROM ix",
        "SELECT * FROM roir_data.g1",
        "DELETE FROM roir_data.g1",
        "SELECT * FROM roir.operation",
        "CREATE TEMP TABLE mine (id int, k text, v int); CREATE TRIGGER mine AFTER INSERT ON mine "
        "FOR EACH ROW EXECUTE FUNCTION roir_data." + _capture_function(dsn) + "()",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            sql(app, forbidden)
        app.rollback()
    run_sql(dsn, f"GRANT SELECT ON ix TO {role}")
    assert sql(app, "SELECT count(*) FROM ix") == sql(app, "SELECT count(*) FROM t")
    app.close()


def test_a_writers_search_path_and_temporary_objects_run_nothing_in_the_capture(
    database: Database, dsn: str, stranger: str
) -> None:
    """The writer has functions and operators before pg_catalog in its path, and temporary tables named as ours."""
    [(role,)] = sql(steps.session(stranger), "SELECT current_user")
    run_sql(
        dsn,
        f"CREATE SCHEMA evil AUTHORIZATION {role}",
        f"GRANT INSERT, UPDATE, DELETE, SELECT ON t TO {role}",
    )
    _, run = steps.begin(database, include="v")
    app = steps.session(stranger)
    trap = "LANGUAGE plpgsql AS $$ BEGIN RAISE 'trapped as %', current_user; END $$"
    for function in ("current_setting(text, boolean) RETURNS text", "set_config(text, text, boolean) RETURNS text",
                     "strpos(text, text) RETURNS int", "pg_current_snapshot() RETURNS pg_snapshot",
                     "eq(int, int) RETURNS boolean", "ne(record, record) RETURNS boolean"):  # fmt: skip
        sql(app, f"CREATE FUNCTION evil.{function} {trap}" if "record" not in function else "SELECT 1")
    sql(app, "CREATE OPERATOR evil.= (LEFTARG = int, RIGHTARG = int, FUNCTION = evil.eq)")
    sql(app, "CREATE TEMP TABLE g1 (c1 int); CREATE TEMP TABLE g1_delta (c1 int); CREATE TEMP TABLE pg_class (x int)")
    app.commit()

    def write() -> None:
        sql(app, "SET search_path = evil, pg_temp, pg_catalog, public")
        sql(app, "UPDATE public.t SET k = 'x'")
        sql(app, "UPDATE public.t SET id = - id")
        sql(app, "INSERT INTO public.t SELECT id + 1000, k, v FROM public.t")
        app.commit()
        sql(app, "DELETE FROM public.t")
        app.rollback()

    write()
    steps.finish_all(database, run)
    sql(app, "SET search_path = public; DELETE FROM t WHERE id > 0")
    app.commit()
    write()
    steps.assert_exact(database)
    app.close()


HOSTILE = (
    "RESET ALL",
    "SET LOCAL search_path = evil",
    "SET LOCAL row_security = on",
    "SET LOCAL transform_null_equals = on; SET LOCAL standard_conforming_strings = off; SET LOCAL DateStyle = 'SQL'",
    "PERFORM set_config('roir.careful', 'off', true); PERFORM set_config('roir.careful', '', false)",
)


@pytest.mark.parametrize("setting", HOSTILE)
def test_settings_that_a_users_trigger_changes_change_nothing_for_the_capture(
    database: Database, dsn: str, setting: str
) -> None:
    """The trigger writes to rows whose events are still queued, and then changes a setting."""
    run_sql(
        dsn,
        "CREATE FUNCTION a() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() < 2 THEN "
        "UPDATE public.t SET k = 'inner' WHERE id = coalesce(NEW.id, OLD.id) + 1; "
        "DELETE FROM public.t WHERE id = 7; INSERT INTO public.t VALUES (7, '7', 7); "
        f"{setting}; END IF; RETURN NULL; END $$",
        "CREATE TRIGGER a AFTER UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION a()",
    )
    _, run = steps.begin(database, include="v")
    user = steps.session(dsn)

    def write() -> None:
        for statement in ("UPDATE public.t SET k = 'outer' WHERE id < 6", "DELETE FROM public.t WHERE id IN (7, 8)"):
            sql(user, statement)
            user.commit()
        sql(user, "INSERT INTO public.t VALUES (8, 'eight', 8) ON CONFLICT DO NOTHING")
        user.commit()

    write()
    steps.switch_all(database, run)
    write()
    steps.fold_all(database, run)
    steps.publish_all(database, run)
    write()
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_the_public_has_no_right_to_anything_of_ours(database: Database, dsn: str, stranger: str) -> None:
    steps.make_index(database, include="v")
    user = steps.session(stranger)
    ours = "n.nspname IN ('roir', 'roir_data')"
    assert (
        sql(
            user,
            "SELECT nspname FROM pg_namespace n "
            f"WHERE {ours} AND has_schema_privilege(n.oid, 'CREATE') ORDER BY nspname",
        )
        == []
    )
    rights = "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"
    assert (
        sql(
            user,
            f"SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE {ours} "
            f"AND CASE WHEN relkind = 'S' THEN has_sequence_privilege(c.oid, 'USAGE, SELECT, UPDATE') "
            f"WHEN relkind IN ('r', 'p', 'v') THEN has_table_privilege(c.oid, '{rights}') END",
        )
        == []
    )
    definers = sql(
        user,
        f"SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE {ours} "
        "AND prosecdef AND has_function_privilege(p.oid, 'EXECUTE') "
        # Functions of event triggers can't be called.
        "AND prorettype <> 'event_trigger'::regtype",
    )
    telling = ["apart", "fresh", "is_doubtful", "is_in_mode", "is_strict", "published", "ticks"]
    assert sorted(definers) == [(name,) for name in telling], "only what tells how a generation stands"
    assert sql(
        user,
        "SELECT DISTINCT p.proconfig::text FROM pg_proc p WHERE prosecdef AND proname IN ('published', 'is_in_mode')",
    ) == [('{"search_path=pg_catalog, pg_temp"}',)]


@pytest.mark.sample(0)
def test_a_function_whose_owner_lost_his_rights_fails_the_write_and_never_the_index(
    database: Database, dsn: str, stranger: str, role: str
) -> None:
    run_sql(dsn, f"GRANT USAGE, CREATE ON SCHEMA public, roir_data TO {role}", f"GRANT USAGE ON SCHEMA roir TO {role}")
    run_sql(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA roir TO {role}", f"ALTER TABLE t OWNER TO {role}")
    run_sql(dsn, f"GRANT USAGE ON TYPE roir.entry_state TO {role}")
    steps.make_index(Database(stranger), include="v")
    run_sql(dsn, "ALTER TABLE t OWNER TO postgres", f"REVOKE ALL ON t FROM {role}")
    user = steps.session(dsn)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="table t"):
        sql(user, "DELETE FROM t WHERE id = 1")
    user.rollback()
    sql(user, f"GRANT SELECT ON t TO {role}")
    sql(user, "DELETE FROM t WHERE id = 1")
    user.commit()
    steps.assert_exact(database)


POLICY = (
    "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY odd ON t USING (id % 2 = 1) WITH CHECK (true)",
)


def test_row_level_security_is_refused_unless_it_is_knowingly_ignored(
    database: Database, dsn: str, stranger: str, role: str
) -> None:
    run_sql(dsn, *POLICY, f"GRANT SELECT, INSERT, UPDATE, DELETE ON t TO {role}")
    with pytest.raises(InvalidInput, match=r"row-level security.*ignore_row_security"):
        steps.begin(database)
    _, run = steps.begin(database, include="v", ignore_row_security=True)
    app = steps.session(stranger)
    sql(app, "UPDATE t SET k = 'mine'")
    sql(app, "INSERT INTO t VALUES (20, 'hidden', 0), (21, 'seen', 0)")
    sql(app, "DELETE FROM t WHERE id < 4")
    app.commit()
    steps.finish_all(database, run)
    assert steps.assert_exact(database).rows == 10, "rows that are hidden from the writer too"
    sql(app, "UPDATE t SET k = 'again', v = id")
    sql(app, "UPDATE t SET id = id + 100 WHERE id = 21")
    app.commit()
    steps.assert_exact(database)
    assert clean_up.clean_up(database).warnings == []


def test_row_level_security_that_comes_later_is_told(database: Database, dsn: str) -> None:
    steps.make_index(database)
    run_sql(dsn, *POLICY)
    (warning,) = clean_up.clean_up(database).warnings
    assert "public.ix" in warning
    assert "row-level security" in warning
    with pytest.raises(InvalidInput, match="row-level security"):
        steps.begin(database, table=None, keys=None)
    steps.assert_exact(database)
    drop.drop_index(database, "ix", "test")


def test_row_level_security_that_comes_during_a_build_ends_it(database: Database, dsn: str) -> None:
    _, run = steps.begin(database)
    run_sql(dsn, *POLICY)
    with pytest.raises(SourceChanged):
        steps.build_all(database, run)
    abort.abort(database, "ix", "test")
    assert sql(steps.session(dsn), "SELECT tgname FROM pg_trigger WHERE tgname LIKE 'roir%'") == []


def test_forced_row_level_security_hides_no_rows_from_the_build(
    database: Database, dsn: str, stranger: str, role: str
) -> None:
    """A build is refused if the owner doesn't see all rows. If row-level security is forced later, writes fail rather
    than lose entries.
    """
    run_sql(dsn, f"GRANT USAGE, CREATE ON SCHEMA public, roir_data TO {role}", f"GRANT USAGE ON SCHEMA roir TO {role}")
    run_sql(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA roir TO {role}", f"ALTER TABLE t OWNER TO {role}")
    run_sql(dsn, f"GRANT USAGE ON TYPE roir.entry_state TO {role}")
    run_sql(dsn, *POLICY, "ALTER TABLE t FORCE ROW LEVEL SECURITY")
    owner = Database(stranger)
    options = {"ignore_row_security": True}
    with pytest.raises(InvalidInput, match=r"a build would miss rows.*BYPASSRLS"):
        steps.begin(owner, **options)
    run_sql(dsn, "ALTER TABLE t NO FORCE ROW LEVEL SECURITY")
    steps.make_index(owner, **options)
    assert steps.assert_exact(database).rows == 10
    run_sql(dsn, "ALTER TABLE t FORCE ROW LEVEL SECURITY")
    user = steps.session(dsn)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security"):
        sql(user, "DELETE FROM t WHERE id = 1")
    user.rollback()
    run_sql(dsn, f"ALTER ROLE {role} BYPASSRLS")
    sql(user, "DELETE FROM t WHERE id = 1")
    user.commit()
    steps.assert_exact(database)


def _capture_function(dsn: str) -> str:
    return str(sql(steps.session(dsn), "SELECT proname FROM pg_proc WHERE proname ~ '^capture_[0-9]'")[0][0])


def test_an_owner_who_is_no_superuser_can_do_everything(server: str) -> None:
    """The control schema, builds, partitions out and in, plain DDL that is repaired, revert, clean-up, drop."""
    run_sql(server, "CREATE ROLE keeper LOGIN", "CREATE DATABASE kept OWNER keeper")
    kept = make_dsn(database_dsn(server, "kept"), user="keeper")
    database = Database(kept, "roir tests")
    try:
        run_sql(database_dsn(server, "kept"), "GRANT CREATE ON SCHEMA public TO keeper")
        install.init(database)
        with database.transaction() as connection:
            assert not schema.is_guarded(connection)
        run_sql(
            kept,
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
            "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (500)",
            "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (500) TO (5000)",
            "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 1000) i",
        )
        for new in ({}, {"table": None, "keys": None}):
            steps.make_index(database, **new)
        twice = 2  # once for each generation
        assert detach.detach_partition(database, "t1", "me") == 499 * twice
        run_sql(kept, "UPDATE t1 SET k = 'old' WHERE id < 50")
        assert attach.attach_partition(database, "t", "t1", "FOR VALUES FROM (0) TO (500)", "me") == 499 * twice
        steps.assert_exact(database)
        run_sql(kept, "TRUNCATE t1", "INSERT INTO t SELECT i, 'new', i FROM generate_series(1, 10) i", "DROP TABLE t1")
        assert sync.sync_partitions(database, "t", "me").entries_removed == 10 * twice
        revert.revert(database, "ix", "me")
        assert not clean_up.clean_up(database).warnings
        assert steps.assert_exact(database).rows == 501
        drop.drop_index(database, "ix", "me")
    finally:
        run_sql(server, "DROP DATABASE kept", "DROP ROLE keeper")


def test_a_session_that_may_read_no_views_writes_all_the_same(database: Database, dsn: str) -> None:
    """The careful path reads the source by a view of ours."""
    user = steps.session(dsn)
    if not sql(user, "SELECT 1 FROM pg_settings WHERE name = 'restrict_nonsystem_relation_kind'"):
        pytest.skip("this server has no such setting")
    steps.make_index(database, include="v")
    sql(user, "SET restrict_nonsystem_relation_kind = 'view'")
    sql(user, "DELETE FROM t WHERE id = 1")
    sql(user, "UPDATE t SET id = 100 WHERE id = 2")
    user.commit()
    steps.assert_exact(database)
