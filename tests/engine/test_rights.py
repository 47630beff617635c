"""Code and its roles: at each step an owner's code has no more rights than the owner, whatever role roir has."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition, QualifiedName
from airflow_roir.engine import drop, dry_run, lifecycle
from airflow_roir.engine.control.run import Run
from airflow_roir.engine.database import execute
from airflow_roir.engine.partitions import sync
from airflow_roir.engine.source import catalog, owner
from airflow_roir.errors import InvalidInput, RoirError
from airflow_roir.options import BuildOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.hostile import DOORS, PLAIN, QUIET, ROWS, Scene
from tests.engine.steps import sql
from tests.engine.test_verify_damage import broken

pytestmark = pytest.mark.sample(1)


def build(scene: Scene, **options: Any) -> Run:
    """Begins a build of `evil.ix`, and checks that prepare gave the owner nothing."""
    options = {"include": "v", "parallelism": 2, "segments": 3, "ranges": 3, **options}
    _, run = steps.begin(scene.database, "evil.ix", "evil.t", **options)
    assert not scene.gains(), "prepare"
    return run


@pytest.mark.parametrize("scan", ["key", pytest.param("block", marks=pytest.mark.sample(0))])
@pytest.mark.parametrize("door", DOORS)
def test_no_step_gives_an_owner_rights(scene: Scene, door: str, scan: str) -> None:
    scene.as_owner(*DOORS[door])
    assert not scene.gains()
    scene.tried()
    run = build(scene, scan=scan)
    steps.build_all(scene.database, run)
    assert not scene.gains(), "build"
    steps.seal_all(scene.database, run)
    assert not scene.gains(), "seal"
    steps.fold_all(scene.database, run)
    steps.publish_all(scene.database, run)
    assert not scene.gains(), "publish"
    one = steps.session(scene.dsn)
    assert sql(one, "SELECT count(*) FROM evil.ix") == [(40,)]
    base = sql(one, "SELECT 'roir_data.g' || max(id) FROM roir.generation")[0][0]
    for place, change in enumerate(("DELETE FROM {}", "UPDATE {} SET c3 = NULL", "UPDATE {} SET c1 = NULL")):
        this = f"(tableoid, ctid) = (SELECT tableoid, ctid FROM {base} ORDER BY 1, 2 OFFSET {place} LIMIT 1)"
        sql(one, f"{change.format(base)} WHERE {this}")
    one.commit()
    one.close()
    found = lifecycle.verify(scene.database, "evil.ix", VerifyOptions(repair=True), "test")
    assert not scene.gains(), "repair"
    assert (found.missing, found.different, found.extra) == (2, 1, 1), found
    assert not lifecycle.verify(scene.database, "evil.ix", VerifyOptions(), "test").missing
    assert scene.tried() or door in QUIET
    drop.drop_index(scene.database, "evil.ix", "test")
    assert not scene.gains(), "drop"


ALTERED = (
    "SECURITY INVOKER",
    "SECURITY INVOKER SET role = {owner}",
    "SECURITY INVOKER SET search_path = evil, pg_catalog",
    "SET search_path = evil, pg_catalog",
)


@pytest.mark.parametrize("how", ALTERED)
def test_an_owner_who_alters_the_function_that_reads_as_he_gains_nothing(scene: Scene, how: str) -> None:
    """The function is repaired if the change is seen in time. If not, its body refuses, or runs as the owner."""
    scene.as_owner(*DOORS["condition of an index"])
    run = build(scene)
    one = steps.session(scene.dsn)
    [(oid,)] = sql(one, "SELECT 'evil.t'::regclass::oid")
    function = f"{owner.function_name(oid)}(text)"
    alter = f"ALTER FUNCTION {function} {how.format(owner=scene.owner)}"
    scene.as_owner(
        # Objects that a search_path of the owner would find.
        "CREATE FUNCTION evil.differs(name, name) RETURNS boolean LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM evil.try(); RETURN false; END $$",
        "CREATE OPERATOR evil.<> (LEFTARG = name, RIGHTARG = name, FUNCTION = evil.differs)",
        "CREATE FUNCTION evil.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM evil.try(); RAISE insufficient_privilege; END $$",
        alter,
    )
    for statement in ("SELECT k FROM evil.t", "SELECT evil.try()::text"):
        with scene.database.connect() as connection, connection.begin():
            called = f"SELECT * FROM {owner.function_name(oid)}(%(statement)s) AS r(k text)"
            if "INVOKER" in how:
                with pytest.raises(DBAPIError, match="a source is read"):
                    execute(connection, called, {"statement": statement})
            else:
                execute(connection, called, {"statement": statement})
    assert not scene.gains()
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        scene.as_owner(
            f"CREATE OR REPLACE FUNCTION {owner.function_name(oid)}(statement text) RETURNS SETOF record "
            "LANGUAGE sql AS 'SELECT evil.try()'"
        )
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        scene.as_owner(f"ALTER FUNCTION {function} RENAME TO mine")
    # The owner can move the function to a schema of its own and change the body there, but can't move it back.
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        scene.as_owner(
            f"ALTER FUNCTION {function} SET SCHEMA evil", f"ALTER FUNCTION evil.read_{oid}(text) SET SCHEMA roir_data"
        )
    steps.build_all(scene.database, run)
    assert not scene.gains()


def test_nothing_that_an_owner_does_while_he_is_read_is_left_to_our_commit(scene: Scene) -> None:
    """Deferred triggers, held cursors, settings, temporary tables: TRY would leave each of them if it could."""
    scene.as_owner(*DOORS["condition of an index"])
    build(scene)
    with scene.database.connect() as connection:
        with connection.begin():
            source = catalog.read_source(connection, QualifiedName("evil", "t"))
            read = owner.rows(connection, source, "SELECT id, evil.try() FROM evil.t", "id int, tried boolean")
            assert len(read.all()) == 40
            state = (
                "SELECT current_setting('search_path'), (SELECT count(*) FROM pg_cursors WHERE is_holdable), "
                "(SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema())"
            )
            assert tuple(execute(connection, state).one()) == ("pg_catalog, pg_temp", 0, 0)
        assert not scene.gains()
    assert scene.tried()
    assert sql(steps.session(scene.dsn), "SELECT count(*) FROM evil.later") == [(0,)]


def test_an_error_of_ours_that_an_owner_raises_cuts_no_rows_off(scene: Scene) -> None:
    scene.as_owner(PLAIN, ROWS)
    scene.as_owner(
        "CREATE FUNCTION evil.stop(int) RETURNS int LANGUAGE plpgsql AS "
        "$$ BEGIN IF $1 > 5 THEN RAISE SQLSTATE 'RO002'; END IF; RETURN $1; END $$"
    )
    with scene.database.connect() as connection, connection.begin():
        source = catalog.read_source(connection, QualifiedName("evil", "t"))
        with pytest.raises(DBAPIError):
            owner.rows(connection, source, "SELECT evil.stop(id) FROM evil.t", "id int")


@pytest.mark.parametrize("when", ["prepared", "half built", "published"])
def test_a_view_that_takes_the_tables_name_runs_as_the_owner(scene: Scene, when: str) -> None:
    """Found: a view under the table's name, also read by the capture, ran the owner's functions as roir's role. It
    holds: it runs as the owner.
    """
    scene.as_owner(PLAIN, ROWS)
    run = build(scene, ranges=1)
    if when == "published":
        steps.finish_all(scene.database, run)
    one = steps.worker(scene.database, run) if when == "half built" else None
    claim = one.claim() if one is not None else None
    scene.as_owner(
        "ALTER TABLE evil.t RENAME TO u",
        "CREATE VIEW evil.t AS SELECT id, k, v FROM evil.u WHERE evil.constant(2) AND evil.any(k)",
        "GRANT ALL ON evil.t TO PUBLIC",
    )
    for step in (
        lambda: one.step(claim) if one is not None else steps.build_all(scene.database, run),
        lambda: lifecycle.verify(scene.database, "evil.ix", VerifyOptions(repair=True), "test"),
        lambda: lifecycle.verify(scene.database, "evil.ix", VerifyOptions(sample=100), "test"),
    ):
        with suppress(RoirError, DBAPIError):
            step()
        assert not scene.gains()
    # Writes that look for a row, and find it or don't.
    for write in ("UPDATE evil.u SET id = id + 1000 WHERE id < 5", "DELETE FROM evil.u WHERE id < 9"):
        with suppress(psycopg2.Error):
            scene.as_owner(write)
        assert not scene.gains()


def test_partitions_come_and_go_and_their_owner_gains_nothing(scene: Scene) -> None:
    """Found: a partition that came with rows was read as our role. It holds: as its owner."""
    scene.as_owner(*DOORS["partition's check"])
    run = build(scene)
    steps.finish_all(scene.database, run)
    scene.as_owner(
        "ALTER TABLE evil.t DETACH PARTITION evil.t1",
        "CREATE TABLE evil.t3 (LIKE evil.t INCLUDING ALL, CHECK (evil.any(k)))",
        "CREATE INDEX ON evil.t3 (k) WHERE evil.constant(2)",
        "INSERT INTO evil.t3 SELECT i, i::text, 'new' FROM generate_series(101, 140) i",
        "ALTER TABLE evil.t ATTACH PARTITION evil.t3 FOR VALUES FROM (101) TO (200)",
    )
    scene.tried()
    sync.sync_partitions(scene.database, "evil.t", "test")
    assert scene.tried()
    assert not scene.gains()
    one = steps.session(scene.dsn)
    assert sql(one, "SELECT min(id), count(*), count(DISTINCT v) FROM evil.ix") == [(20, 61, 2)]
    base = sql(one, "SELECT 'roir_data.g' || max(id) FROM roir.generation")[0][0]
    assert sql(one, f"SELECT count(*) FROM {base}") == [(61,)]


def test_a_partition_of_another_owner_is_refused_with_the_remedy(scene: Scene) -> None:
    scene.as_owner(*DOORS["partition's check"])
    run_sql(scene.dsn, f"ALTER TABLE evil.t1 OWNER TO {scene.victim}")
    with pytest.raises(InvalidInput, match=r"evil\.t1 to .*ALTER TABLE evil\.t1 OWNER TO"):
        build(scene)


def test_damage_is_found_as_the_owner(scene: Scene) -> None:
    """The looks past the indexes also read the source: its rows, the entries, and both in one statement."""
    scene.as_owner(PLAIN, ROWS, "CREATE INDEX ON evil.t (k) WHERE evil.constant(1)")
    run = build(scene)
    steps.finish_all(scene.database, run)
    base = sql(steps.session(scene.dsn), "SELECT 'roir_data.g' || max(id) FROM roir.generation")[0][0]
    with broken(scene.dsn, base, "tree lost"):
        run_sql(scene.dsn, f"INSERT INTO {base} SELECT * FROM {base} WHERE c2 IN (6, 7)")
        run_sql(scene.dsn, f"CREATE TABLE e AS SELECT * FROM {base} WHERE c2 = 9", f"DELETE FROM {base} WHERE c2 = 9")
        run_sql(scene.dsn, f"INSERT INTO {base} SELECT * FROM e", "DROP TABLE e")
    lost = "UPDATE pg_index SET indisready = {0}, indisvalid = {0} WHERE indexrelid = 'evil.t_pkey'::regclass"
    run_sql(scene.dsn, lost.format("false"))
    scene.as_owner(
        "ALTER TABLE evil.t DISABLE TRIGGER USER",
        "INSERT INTO evil.t (id, k, v) VALUES (1000, 'a', 'v')",
        "ALTER TABLE evil.t ENABLE TRIGGER USER",
    )
    run_sql(scene.dsn, lost.format("true"))
    for options in (VerifyOptions(), VerifyOptions(sample=100), VerifyOptions(repair=True)):
        scene.tried()
        found = lifecycle.verify(scene.database, "evil.ix", options, "test")
        assert scene.tried()
        assert not scene.gains(), options
        assert found.damaged >= 3, found
        assert not found.is_exact


def test_a_row_that_is_too_big_is_tried_as_the_owner(scene: Scene) -> None:
    big = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 200) i)"
    scene.as_owner(
        PLAIN,
        ROWS,
        "CREATE INDEX ON evil.t (id) WHERE evil.constant(1)",
        f"INSERT INTO evil.t (id, k, v) VALUES (1000, {big}, 'v')",
    )
    scene.tried()
    with pytest.raises(InvalidInput, match="has a row whose key"):
        build(scene)
    assert scene.tried()
    assert not scene.gains()


def test_who_may_only_look_makes_nothing(scene: Scene) -> None:
    """`roir plan` reads the source as its owner, and leaves no function behind."""
    scene.as_owner(PLAIN, ROWS, "CREATE INDEX ON evil.t (k) WHERE evil.constant(1)")
    dry_run.run(scene.database, IndexDefinition.parse("evil.ix", "evil.t", "k", None), BuildOptions())
    assert scene.tried()
    assert not scene.gains()
    assert sql(steps.session(scene.dsn), "SELECT proname FROM pg_proc WHERE proname ~ '^read_[0-9]'") == []
