"""A hostile writer, who may write to a table, and has a schema, sessions and temporary objects.

Here the scene's owner is the writer, and another role owns the table. One test is about an owner: the operations
between build and drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, clean_up, drop, lifecycle, revert
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.errors import RoirError
from airflow_roir.options import VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.hostile import Scene
from tests.engine.interposed import changed
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

SHAPES = {
    "plain": "CREATE TABLE app.t (id int PRIMARY KEY, k text, v numeric)",
    "deferrable": "CREATE TABLE app.t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, k text, v numeric)",
    "partitioned": (
        "CREATE TABLE app.t (id int PRIMARY KEY, k text, v numeric) PARTITION BY RANGE (id); "
        "CREATE TABLE app.t1 PARTITION OF app.t FOR VALUES FROM (0) TO (500); "
        "CREATE TABLE app.t2 PARTITION OF app.t DEFAULT"
    ),
}
# The functions that our functions call. The writer has a function of each name, with another body.
FUNCTIONS = (
    "current_setting(text) RETURNS text",
    "current_setting(text, boolean) RETURNS text",
    "pg_has_role(oid, name, text) RETURNS boolean",
    "has_table_privilege(oid, text) RETURNS boolean",
    "pg_get_userbyid(oid) RETURNS name",
    "format(text, VARIADIC text[]) RETURNS text",
    "to_regclass(text) RETURNS regclass",
    "is_mine(xid) RETURNS boolean",
    "is_in_mode(bigint, text) RETURNS boolean",
    "pg_current_xact_id() RETURNS xid8",
    "pg_xact_status(xid8) RETURNS text",
    "mod(numeric, numeric) RETURNS numeric",
    "concat(VARIADIC text[]) RETURNS text",
    "pg_get_partition_constraintdef(oid) RETURNS text",
    "pg_partition_ancestors(regclass) RETURNS SETOF regclass",
)
OPERATORS = [
    (name, left, right)
    for name in ("=", "<>", "<", "*<>", "||", "+", "-")
    for left, right in (
        ("text", "text"),
        ("int", "int"),
        ("numeric", "numeric"),
        ("record", "record"),
        ("xid", "text"),
        ("oid", "oid"),
        ("name", "name"),
        ("text", "regclass"),
        ("float8", "float8"),
    )
]
RELATIONS = (
    "pg_class",
    "pg_namespace",
    "generation",
    "g1",
    "g1_delta",
    "g1_source",
    "source_partition",
    "emptied",
    "t",
)
TYPES = ("text", "record", "xid", "regclass", "point", "name", "numeric", "int4", "tid")


def shadows() -> Iterator[str]:
    """Statements of a session that create another meaning for every name."""
    body = "LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.try(); RETURN NULL; END $$"
    for function in FUNCTIONS:
        anything = body.replace("RETURN NULL; ", "RETURN; ") if "SETOF" in function else body
        yield f"CREATE OR REPLACE FUNCTION evil.{function} {anything}"
        yield f"CREATE OR REPLACE FUNCTION pg_temp.{function} {anything}"
    for number, (name, left, right) in enumerate(OPERATORS):
        yield f"CREATE OR REPLACE FUNCTION evil.op{number}({left}, {right}) RETURNS boolean {body}"
        yield f"CREATE OPERATOR evil.{name} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = evil.op{number})"
    for relation in RELATIONS:
        yield f"CREATE TEMP TABLE {relation} (id int, k text, v numeric, oid oid, c1 text, c2 int)"
        yield f"CREATE TABLE evil.{relation} (id int, k text, v numeric, oid oid, c1 text, c2 int)"
    for kind in TYPES:
        yield f"CREATE DOMAIN pg_temp.{kind} AS pg_catalog.text CHECK (evil.any(VALUE::pg_catalog.text))"


SETTINGS = (
    "search_path = evil, pg_temp, pg_catalog",
    "search_path = pg_temp, evil",
    "row_security = off",
    "row_security = on",
    "session_replication_role = replica",
    "check_function_bodies = off",
    "transform_null_equals = on",
    "quote_all_identifiers = on",
    "standard_conforming_strings = off",
    "constraint_exclusion = on",
    "plan_cache_mode = force_generic_plan",
    "roir.own_ddl = 'on'",
    "default_transaction_isolation = 'serializable'",
    "role = none",
    "restrict_nonsystem_relation_kind = 'view,foreign-table'",
    "DateStyle = 'German'",
    "IntervalStyle = 'sql_standard'",
    "plpgsql.variable_conflict = use_column",
    "plpgsql.extra_errors = 'all'",
    "local_preload_libraries = 'evil'",
    "event_triggers = off",
)
WRITES = (
    "INSERT INTO app.t VALUES ({n}, 'w', 1), ({next}, NULL, 2)",
    "INSERT INTO app.t VALUES ({n}, 'x', 3)",
    "UPDATE app.t SET k = 'y' WHERE id OPERATOR(pg_catalog.=) {n}",
    "UPDATE app.t SET id = {last} WHERE id OPERATOR(pg_catalog.=) {next}",
    "DELETE FROM app.t WHERE id OPERATOR(pg_catalog.=) {n}",
    "BEGIN; INSERT INTO app.t VALUES ({n}, 'q', 1); UPDATE app.t SET v = 2 WHERE id OPERATOR(pg_catalog.=) {n}; "
    "SELECT * FROM app.t WHERE id OPERATOR(pg_catalog.=) {n} FOR UPDATE; "
    "DELETE FROM app.t WHERE id OPERATOR(pg_catalog.=) {n}; COMMIT",
    # The writer's own functions, by the writer's search_path.
    "SELECT current_setting('role'), 1 = 2",
    "MERGE INTO app.t USING (SELECT {n} AS id) s ON app.t.id OPERATOR(pg_catalog.=) s.id "
    "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'm', 0)",
)
# Statements that are refused to the writer.
REFUSED = (
    "SELECT * FROM roir_data.g1",
    "SELECT * FROM roir_data.g1_source",
    "DELETE FROM roir_data.g1",
    "SELECT * FROM app.ix",
    "SELECT * FROM roir.generation",
    "UPDATE roir.operation SET status = 'aborting'",
    "SELECT roir_data.capture_{oid}()",
    "SELECT roir_data.capture_row_{oid}('INSERT', 0, 'x', false, NULL, NULL, NULL, NULL)",
    "SELECT * FROM roir_data.read_{oid}('SELECT 1') AS r (a int)",
    "CREATE TRIGGER mine AFTER INSERT ON evil.g1 FOR EACH ROW EXECUTE FUNCTION roir_data.capture_{oid}()",
    "CREATE TRIGGER mine AFTER TRUNCATE ON evil.g1 EXECUTE FUNCTION roir_data.truncate_{oid}()",
    "SELECT roir.abort('app.ix')",
    "SELECT roir.release_table('app.t')",
    "SELECT roir.detach_partition('app.t1')",
    "SELECT roir.forget_leaf(1, 'roir_data.g1', 'app.t'::regclass)",
    "ALTER TABLE app.t DISABLE TRIGGER ALL",
    "CREATE FUNCTION roir_data.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE VIEW app.ix2 AS SELECT 1",
)


def writes(scene: Scene, number: int, oid: int, settings: Sequence[str]) -> int:
    """Runs all of the writer's statements under each of the settings; returns how many were accepted."""
    accepted = 0
    dsn = make_dsn(**{**parse_dsn(scene.dsn), "user": scene.owner})
    for position, setting in enumerate(settings):
        one = psycopg2.connect(dsn)
        one.autocommit = True
        cursor = one.cursor()
        for statement in shadows() if position == 0 else [s for s in shadows() if " TEMP " in s or "pg_temp." in s]:
            with suppress(psycopg2.Error):
                cursor.execute(statement)
        with suppress(psycopg2.Error):
            cursor.execute(f"SET {setting}")
        for write in WRITES:
            try:
                first = number + position * 20
                cursor.execute(write.format(n=first, next=first + 1, last=first + 2))
                accepted += 1
            except psycopg2.Error:
                with suppress(psycopg2.Error):
                    cursor.execute("ROLLBACK")
        for statement in REFUSED if position < 2 else ():
            try:
                cursor.execute(statement.format(oid=oid))
            except psycopg2.Error:
                continue
            pytest.fail(f"not refused: {statement}")
        one.close()
    return accepted


def life(scene: Scene, shape: str, owner: str, settings: Sequence[str]) -> None:
    """Lets the writer write in each mode of a table that belongs to another role, or to ours."""
    user = sql(steps.session(scene.database.dsn), "SELECT current_user")[0][0]
    role = scene.victim if owner == "another" else user
    run_sql(
        scene.dsn,
        f"CREATE SCHEMA app AUTHORIZATION {role}",
        f"SET ROLE {role}; {SHAPES[shape]}; RESET ROLE",
        f"GRANT ALL ON SCHEMA app TO {user}",
        f"GRANT USAGE ON SCHEMA app TO {scene.owner}",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON app.t TO {scene.owner}",
        "INSERT INTO app.t SELECT i, i::text, i FROM generate_series(1, 200) i",
    )
    # As a default of the role, each of the writer's sessions has it from the start.
    run_sql(scene.dsn, f"ALTER ROLE {scene.owner} SET search_path = evil, pg_temp, pg_catalog")
    [(oid,)] = sql(steps.session(scene.dsn), "SELECT 'app.t'::regclass::oid")
    _, run = steps.begin(scene.database, "app.ix", "app.t", include="v", parallelism=2, segments=2, ranges=2)
    accepted = writes(scene, 1000, oid, settings)
    assert not scene.gains(), "capture"
    steps.switch_all(scene.database, run)
    accepted += writes(scene, 2000, oid, settings)
    assert not scene.gains(), "direct"
    lifecycle.run_phases(scene.database, run)
    accepted += writes(scene, 3000, oid, settings)
    assert not scene.gains(), "active"
    assert accepted > 6 * len(settings)
    # The writer's code was there, and ran as the writer.
    assert scene.tried()
    steps.assert_exact(scene.database, "app.ix")
    found = lifecycle.verify(scene.database, "app.ix", VerifyOptions(repair=True), "test")
    assert found.is_exact, found
    assert not scene.gains()


def test_a_writer_gains_nothing_in_any_mode(scene: Scene) -> None:
    """A writer's functions, operators, types, temporary tables and settings, in each mode."""
    life(scene, "plain", "another", SETTINGS[:4])


@pytest.mark.sample(0)
@pytest.mark.parametrize("owner", ["another", "ours"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_writer_gains_nothing_by_any_setting(scene: Scene, shape: str, owner: str) -> None:
    life(scene, shape, owner, SETTINGS)


@pytest.mark.sample(0)
def test_a_writer_would_gain_by_a_capture_that_pins_no_path(scene: Scene) -> None:
    """The tests above can fail."""
    pinned = "SET search_path = pg_catalog, pg_temp SET row_security = off"
    with changed(scene.database, pinned, ""), pytest.raises(AssertionError, match="capture"):
        life(scene, "plain", "another", SETTINGS[:1])


# All kinds of code that an owner can put into one table.
FULL = (
    "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text, g int GENERATED ALWAYS AS (evil.number(k)) STORED, "
    "CHECK (evil.constant(1)))",
    "INSERT INTO evil.t (id, k, v) SELECT i, i::text, 'v' FROM generate_series(1, 40) i",
    "CREATE INDEX ON evil.t (k) WHERE evil.constant(1)",
    "CREATE INDEX ON evil.t ((evil.number('constant')), k)",
    "CREATE STATISTICS evil.s ON (evil.number('constant')), k FROM evil.t",
    "CREATE POLICY p ON evil.t USING (evil.any(k))",
    "CREATE RULE r AS ON INSERT TO evil.t DO ALSO SELECT evil.try()",
    "CREATE RULE d AS ON DELETE TO evil.t DO ALSO SELECT evil.try()",
    "CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON evil.t FOR EACH ROW EXECUTE FUNCTION evil.fire()",
    "CREATE TRIGGER b BEFORE TRUNCATE ON evil.t EXECUTE FUNCTION evil.fire()",
    "ALTER TABLE evil.t ENABLE ALWAYS TRIGGER a, ENABLE ALWAYS TRIGGER b",
    "ANALYZE evil.t",
)


@pytest.mark.by_hand("sweeps")
def test_no_operation_between_build_and_drop_gives_an_owner_rights(scene: Scene) -> None:
    """Pause, resume, abort, rebuild, revert, clean-up, drop; the owner writes and truncates in between."""
    scene.as_owner(*FULL)
    options = {"include": "v", "parallelism": 2, "segments": 2, "ranges": 2}

    def holds(step: str) -> None:
        with suppress(psycopg2.Error):
            scene.as_owner("UPDATE evil.t SET k = k || 'x' WHERE id < 5", "DELETE FROM evil.t WHERE id = 9")
        assert not scene.gains(), step

    _, run = steps.begin(scene.database, "evil.ix", "evil.t", **options)
    holds("prepare")
    requests.pause(scene.database, "evil.ix", "test")
    holds("pause")
    abort.abort(scene.database, "evil.ix", "test")
    holds("abort")
    _, run = steps.begin(scene.database, "evil.ix", "evil.t", **options)
    run = start_run(scene.database, "evil.ix", "test", take_over=True)
    steps.finish_all(scene.database, run)
    holds("publish")
    for scan in ("key", "block", "index"):
        with suppress(RoirError):
            steps.make_index(scene.database, "evil.ix", None, None, **{**options, "include": None, "scan": scan})
        holds(f"rebuild by {scan}")
    with suppress(RoirError):
        revert.revert(scene.database, "evil.ix", "test")
    holds("revert")
    clean_up.clean_up(scene.database)
    holds("clean-up")
    # The generation that is shown has these two segments.
    actions = (compacting.act("split", 1, parts=2), compacting.act("rewrite", 2), compacting.act("rewrite", 0))
    run = compacting.begin(scene.database, *actions, index="evil.ix", lock_patience_s=5)
    for stage in compacting.stages(scene.database, run):
        holds(f"compact, {stage}")
    scene.as_owner("TRUNCATE evil.t")
    holds("truncate")
    for options_of in (VerifyOptions(), VerifyOptions(repair=True), VerifyOptions(sample=10)):
        with suppress(RoirError, DBAPIError):
            lifecycle.verify(scene.database, "evil.ix", options_of, "test")
        holds("verify")
    drop.drop_index(scene.database, "evil.ix", "test")
    holds("drop")
    assert scene.tried()


def test_what_runs_with_our_rights_is_known(scene: Scene) -> None:
    """Functions with their owner's rights: each pins its search_path, or is the one that can't."""
    scene.as_owner(*FULL)
    steps.begin(scene.database, "evil.ix", "evil.t")
    rows = sql(
        steps.session(scene.dsn),
        "SELECT regexp_replace(p.oid::regproc::text, '[0-9]+$', 'N'), pg_get_userbyid(p.proowner) = %s, "
        "EXISTS (SELECT FROM unnest(p.proconfig) c WHERE c LIKE 'search_path=pg_catalog, pg_temp'), "
        "has_function_privilege('public', p.oid, 'EXECUTE') "
        "FROM pg_proc p WHERE p.pronamespace IN ('roir'::regnamespace, 'roir_data'::regnamespace) AND p.prosecdef",
        scene.owner,
    )
    assert {row[0]: row[1:] for row in rows} == {
        "roir.published": (False, True, True),
        "roir.is_doubtful": (False, True, True),
        "roir.is_in_mode": (False, True, True),
        "roir.fresh": (False, True, True),
        "roir.apart": (False, True, True),
        "roir.is_strict": (False, True, True),
        "roir.ticks": (False, True, True),
        "roir.take_sample": (False, True, False),
        "roir.note_arrival": (False, True, False),
        "roir.note_taken": (False, True, False),
        "roir.refuse_ddl": (False, True, True),
        "roir.refuse_drop": (False, True, True),
        "roir.refuse_concurrent_detach": (False, False, True),
        "roir_data.capture_N": (True, True, False),
        "roir_data.truncate_N": (False, True, False),
        "roir_data.read_N": (True, False, False),
    }
