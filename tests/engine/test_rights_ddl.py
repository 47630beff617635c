"""Statements of ours that alter an owner's tables, or read the owner's texts in catalogs, run no code of the owner."""

from __future__ import annotations

from contextlib import closing, suppress

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up
from airflow_roir.engine.health import faults
from airflow_roir.engine.partitions import attach, detach, sync
from airflow_roir.errors import InvalidInput, RoirError
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.hostile import Scene
from tests.engine.interposed import before
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

PARTED = (
    "CREATE TABLE evil.t (id int PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE evil.t1 PARTITION OF evil.t FOR VALUES FROM (1) TO (50)",
    "INSERT INTO evil.t (id, k, v) SELECT i, i::text, 'v' FROM generate_series(1, 40) i",
)
LOADED = (
    "CREATE TABLE evil.t3 (LIKE evil.t INCLUDING ALL)",
    "INSERT INTO evil.t3 SELECT i, i::text, 'new' FROM generate_series(101, 140) i",
)
BOUNDS = "FOR VALUES FROM (101) TO (200)"


def published(scene: Scene, *more: str) -> None:
    """A published index of a partitioned table of the owner, and the owner's statements after that."""
    scene.as_owner(*PARTED)
    steps.make_index(scene.database, "evil.ix", "evil.t", include="v", parallelism=2, segments=3, ranges=3)
    scene.as_owner(*more)


def attach_t3(scene: Scene) -> None:
    attach.attach_partition(scene.database, "evil.t", "evil.t3", BOUNDS, "test", patience_s=20)


# Code that the owner has put into the table that is attached, or into tables that it is attached to or refers to.
CODE = {
    "a check": ("ALTER TABLE evil.t3 ADD CHECK (evil.constant(2))",),
    "an index's condition": ("CREATE INDEX ON evil.t3 (k) WHERE evil.constant(2)",),
    "an index of the table": ("CREATE INDEX ON evil.t (k) WHERE evil.constant(2)",),
    "a check of the default partition": (
        "CREATE TABLE evil.t0 PARTITION OF evil.t DEFAULT",
        "ALTER TABLE evil.t0 ADD CHECK (evil.constant(2))",
    ),
    "a foreign key": (
        "CREATE TABLE evil.f (v text PRIMARY KEY)",
        "INSERT INTO evil.f VALUES ('v'), ('new')",
        "ALTER TABLE evil.t ADD FOREIGN KEY (v) REFERENCES evil.f",
        "CREATE INDEX ON evil.f (v) WHERE evil.constant(2)",
    ),
    "an operator": (
        "CREATE FUNCTION evil.same(text, int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN evil.try(); END $$",
        "CREATE OPERATOR evil.=== (LEFTARG = text, RIGHTARG = int, FUNCTION = evil.same)",
        "ALTER TABLE evil.t3 ADD CHECK ('a' OPERATOR(evil.===) 1)",
    ),
    "a domain in a check": ("ALTER TABLE evil.t3 ADD CHECK (k IS NULL OR ARRAY['a']::evil.word[] IS NOT NULL)",),
    "an expression of statistics": (
        "CREATE STATISTICS evil.s ON (evil.number('constant')), k FROM evil.t3",
        "ANALYZE evil.t3",
    ),
}


@pytest.mark.parametrize(
    "door",
    [
        pytest.param(d, marks=[] if d in ("a check", "a foreign key", "an operator") else pytest.mark.sample(0))
        for d in CODE
    ],
)
def test_what_an_attach_would_run_is_refused_and_named(scene: Scene, door: str) -> None:
    """Found: an attach ran as roir's role what is constant in a CHECK, an index's condition (also of the parent), the
    default partition's CHECK, an operator's function, and the conditions of a foreign key's other table. It holds:
    refused, with the code and its owner.
    """
    published(scene, *LOADED, *CODE[door])
    scene.tried()
    with pytest.raises(InvalidInput, match=f"of {scene.owner}; attaching evil.t3"):
        attach_t3(scene)
    assert not scene.tried()
    assert not scene.gains()
    # The table is no worse off than before.
    scene.as_owner("INSERT INTO evil.t3 VALUES (150, 'a', 'b')")


def test_what_runs_nothing_of_his_is_attached_and_detached(scene: Scene) -> None:
    """Conditions and expressions of the server's own functions are no obstacle."""
    published(
        scene,
        *LOADED,
        "ALTER TABLE evil.t3 ADD CHECK (length(k) < 100)",
        "CREATE INDEX ON evil.t (lower(k)) WHERE id > 5",
        "CREATE TABLE evil.f (v text PRIMARY KEY)",
        "INSERT INTO evil.f VALUES ('v'), ('new')",
        "ALTER TABLE evil.t ADD FOREIGN KEY (v) REFERENCES evil.f",
        "CREATE TABLE evil.r (id int REFERENCES evil.t)",
    )
    attach_t3(scene)
    one = steps.session(scene.dsn)
    assert sql(one, "SELECT count(*), count(DISTINCT v) FROM evil.ix") == [(80, 2)]
    one.commit()
    detach.detach_partition(scene.database, "evil.t3", "test")
    assert sql(one, "SELECT count(*) FROM evil.ix") == [(40,)]
    assert not scene.gains()


def die() -> None:
    raise KeyboardInterrupt


def test_a_constraint_that_took_the_name_of_ours_is_not_validated(scene: Scene) -> None:
    """Between two steps of an attach the owner makes a constraint of that name. It would be run for each row."""
    published(scene, *LOADED)
    with before(scene.database, "SELECT watermark FROM roir.source_partition", die), suppress(KeyboardInterrupt):
        attach_t3(scene)
    scene.as_owner(
        "ALTER TABLE evil.t3 DROP CONSTRAINT roir_bounds",
        "ALTER TABLE evil.t3 ADD CONSTRAINT roir_bounds CHECK (evil.any(k)) NOT VALID",
    )
    scene.tried()
    with pytest.raises(InvalidInput, match="constraint roir_bounds on table"):
        attach_t3(scene)
    assert not scene.tried()
    assert not scene.gains()


def test_a_detach_looks_at_a_table_that_refers_to_it_only_where_nothing_of_his_runs(scene: Scene) -> None:
    """Found: a detach queried the tables that refer to the partition, as roir's role. It holds: refused if that runs
    another role's code.
    """
    published(
        scene,
        "CREATE TABLE evil.r (id int REFERENCES evil.t)",
        "INSERT INTO evil.r VALUES (NULL)",
        "CREATE INDEX ON evil.r (id) WHERE evil.constant(2)",
    )
    scene.tried()
    with pytest.raises(InvalidInput, match=r"index evil\.r_id_idx has function"):
        detach.detach_partition(scene.database, "evil.t1", "test")
    assert not scene.tried()
    assert not scene.gains()


def test_a_table_that_can_no_longer_be_indexed_is_still_its_owners(scene: Scene) -> None:
    """Clean-up, that removes the entries of a partition, asks it for rows."""
    published(scene, "CREATE TABLE evil.t2 PARTITION OF evil.t FOR VALUES FROM (50) TO (60)")
    sync.sync_partitions(scene.database, "evil.t", "test")
    scene.as_owner(
        "ALTER TABLE evil.t DETACH PARTITION evil.t1",
        "CREATE INDEX ON evil.t2 (k) WHERE evil.constant(2)",
        "ALTER TABLE evil.t ADD CHECK (evil.constant(1))",
    )
    # At this statement it begins to remove entries.
    with before(scene.database, "SELECT to_regclass(%(delta)s)", die), suppress(KeyboardInterrupt):
        sync.sync_partitions(scene.database, "evil.t", "test")
    scene.as_owner("ALTER TABLE evil.t DROP CONSTRAINT t_pkey")
    scene.tried()
    assert clean_up.clean_up(scene.database).partition_entries == 40
    assert scene.tried()
    assert not scene.gains()


@pytest.mark.sample(0)
def test_the_owner_of_a_partition_gains_nothing_by_the_owner_of_its_table(scene: Scene) -> None:
    """The capture reads the leaf of a deleted row as the table's owner, who can do more than the leaf's."""
    run_sql(scene.dsn, "CREATE TABLE public.t (id int PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)")
    run_sql(scene.dsn, "CREATE TABLE evil.t1 PARTITION OF public.t FOR VALUES FROM (1) TO (50)")
    user = sql(steps.session(scene.database.dsn), "SELECT current_user")[0][0]
    run_sql(
        scene.dsn,
        f"ALTER TABLE public.t OWNER TO {user}",
        f"ALTER TABLE evil.t1 OWNER TO {user}",
        f"GRANT ALL ON SCHEMA public, evil TO {user}",
    )
    run_sql(scene.dsn, "INSERT INTO public.t SELECT i, i::text, 'v' FROM generate_series(1, 40) i")
    steps.make_index(scene.database, "public.ix", "public.t", include="v", parallelism=2, segments=3, ranges=3)
    with scene.database.transaction() as connection:
        assert faults.warnings(connection) == []
    run_sql(scene.dsn, f"ALTER TABLE evil.t1 OWNER TO {scene.owner}")
    scene.as_owner("CREATE INDEX ON evil.t1 (k) WHERE evil.constant(1)")
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match=r"partition evil.t1 belongs to"):
        scene.as_owner("DELETE FROM evil.t1 WHERE id = 3")
    assert not scene.gains()
    with scene.database.transaction() as connection:
        [warning] = faults.warnings(connection)
    assert f'ALTER TABLE evil.t1 OWNER TO "{user}"' in warning


@pytest.mark.sample(0)
def test_a_partition_of_another_owner_is_not_attached(scene: Scene) -> None:
    published(scene, *LOADED)
    run_sql(scene.dsn, f"ALTER TABLE evil.t3 OWNER TO {scene.victim}")
    with pytest.raises(InvalidInput, match=f"evil.t3 belongs to {scene.victim}"):
        attach_t3(scene)


EXPRESSIONS = (
    "ALTER TABLE evil.t DROP CONSTRAINT t_pkey",
    "CREATE FUNCTION evil.part(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM evil.try(); RETURN 1; END $$",
    "CREATE TABLE evil.s PARTITION OF evil.t FOR VALUES FROM (50) TO (100) "
    "PARTITION BY LIST ((evil.part(id) + evil.part(7)))",
    "CREATE TABLE evil.s2 PARTITION OF evil.s FOR VALUES IN (2)",
)


@pytest.mark.parametrize("guarded", [False, True])
def test_partitions_by_an_expression_of_his(scene: Scene, guarded: bool) -> None:
    """Such partitions are possible without a primary key. Reading their bounds would run the expression."""
    published(scene)
    if guarded:
        run_sql(scene.dsn, "SELECT roir.guard()")
    scene.as_owner(*EXPRESSIONS, "INSERT INTO evil.s VALUES (60, 'a', 'b')")
    assert not scene.gains(), "guard"
    for step in (clean_up.clean_up, lambda database: sync.sync_partitions(database, "evil.t", "test")):
        with suppress(RoirError, DBAPIError):
            step(scene.database)
        assert not scene.gains(), step
    with suppress(psycopg2.Error):
        scene.as_owner("TRUNCATE evil.s2")
    with suppress(psycopg2.Error):
        scene.as_owner("TRUNCATE evil.t1")
    with suppress(RoirError, DBAPIError):
        detach.detach_partition(scene.database, "evil.s2", "test")
    assert not scene.gains()


def test_bounds_that_hold_values_of_his_domain_are_refused(scene: Scene) -> None:
    """Found: a leaf's `TRUNCATE` read bounds from text, and ran the checks of a domain inside. It holds: prepare
    refuses such keys, and so does the `TRUNCATE` if the domain was given away since.
    """
    scene.as_owner(
        "CREATE TABLE evil.t (id evil.word[] PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE evil.t1 PARTITION OF evil.t FOR VALUES FROM ('{a}') TO ('{b}')",
    )
    scene.tried()
    with pytest.raises(InvalidInput, match=r"type evil\.word.*Make a superuser the owner"):
        steps.begin(scene.database, "evil.ix", "evil.t")
    assert not scene.gains()


def given_away(scene: Scene, *more: str) -> None:
    """A published index of the owner's table, with bounds of a superuser's domain; then the owner gets the domain."""
    scene.create_word()
    scene.as_owner(
        "CREATE TABLE evil.t (id public.word[] PRIMARY KEY, k text, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE evil.t1 PARTITION OF evil.t FOR VALUES FROM ('{a}') TO ('{b}')",
        "INSERT INTO evil.t VALUES ('{aa}', 'k', 'v')",
    )
    steps.make_index(scene.database, "evil.ix", "evil.t", include="v", parallelism=2, segments=3, ranges=3)
    run_sql(scene.dsn, *more)
    scene.give_word_away()
    scene.tried()


def being_attached(scene: Scene) -> tuple[str, ...]:
    """The statements that begin an attach, beside a default partition of the owner."""
    return (
        "CREATE TABLE evil.t0 PARTITION OF evil.t DEFAULT",
        f"ALTER TABLE evil.t0 OWNER TO {scene.owner}",
        "CREATE TABLE evil.t3 (LIKE evil.t INCLUDING ALL)",
        f"ALTER TABLE evil.t3 OWNER TO {scene.owner}",
        "SELECT roir.begin_attach('evil.t', 'evil.t3', $$FOR VALUES FROM ('{x}') TO ('{z}')$$, 'test')",
    )


def test_an_arrival_during_an_attach_reads_no_bounds_with_values_of_a_domain(scene: Scene) -> None:
    """The function that notes the arrival runs as us, on a default partition that the owner writes to."""
    given_away(scene, *being_attached(scene))
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match=r"owner of type public\.word"):
        scene.as_owner("INSERT INTO evil.t0 VALUES ('{y}', 'k', 'v')")
    assert not scene.gains()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_that_is_older_than_the_gift_of_a_domain_trusts_nobody(scene: Scene, isolation: str) -> None:
    """It shows the former owner, while the checks that run are those of now: they ran as us."""
    given = scene.give_word_away
    scene.give_word_away = lambda: None  # type: ignore[method-assign]
    given_away(scene, *being_attached(scene))
    with closing(steps.old_session(scene.dsn_of_owner, isolation)) as old:
        given()
        with pytest.raises(psycopg2.errors.SerializationFailure, match=r"type public\.word was altered"):
            sql(old, "INSERT INTO evil.t0 VALUES ('{y}', 'k', 'v')")
    assert not scene.gains()


def test_bounds_that_come_to_hold_values_of_a_domain_are_not_read(scene: Scene) -> None:
    """A superuser's type may be given away after the build: then a leaf's TRUNCATE says so."""
    given_away(scene)
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match=r"owner of type public\.word"):
        run_sql(scene.dsn, "TRUNCATE evil.t1")
    assert not scene.gains()
    for step in (clean_up.clean_up, lambda database: detach.detach_partition(database, "evil.t1", "test")):
        with suppress(RoirError, DBAPIError):
            step(scene.database)
        assert not scene.gains(), step
