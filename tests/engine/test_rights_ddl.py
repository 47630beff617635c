"""Statements of ours that alter an owner's tables, or read what he has written into the catalogs: his code gains nothing."""

from __future__ import annotations

from contextlib import suppress

import psycopg2
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import attach, cleanup, detach, joining, sync
from airflow_roir.errors import InvalidInput, RoirError
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.hostile import Scene
from tests.engine.steps import sql

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
    """A published index of a partitioned table of his, and what he does then."""
    scene.as_owner(*PARTED)
    _, run = steps.begin(scene.database, "evil.ix", "evil.t", include="v", parallelism=2, segments=3, ranges=3)
    steps.finish_all(scene.database, run)
    scene.as_owner(*more)


def attach_t3(scene: Scene) -> None:
    attach.attach_partition(scene.database, "evil.t", "evil.t3", BOUNDS, "test", patience_s=5)


# What he has put into the table that is attached, or into those that it is attached to.
ATTACHED = {
    "check": ("ALTER TABLE evil.t3 ADD CHECK (evil.constant(2))",),
    "condition of an index": ("CREATE INDEX ON evil.t3 (k) WHERE evil.constant(2)",),
    "the source's index": ("CREATE INDEX ON evil.t (k) WHERE evil.constant(2)",),
    "the default partition's check": (
        "CREATE TABLE evil.t0 PARTITION OF evil.t DEFAULT",
        "ALTER TABLE evil.t0 ADD CHECK (evil.constant(2))",
    ),
    "a foreign key to a table of his": (
        "CREATE TABLE evil.f (v text PRIMARY KEY)",
        "INSERT INTO evil.f VALUES ('v'), ('new')",
        "ALTER TABLE evil.t ADD FOREIGN KEY (v) REFERENCES evil.f",
        "CREATE INDEX ON evil.f (v) WHERE evil.constant(2)",
    ),
    "an operator of his": (
        "CREATE FUNCTION evil.same(text, int) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS "
        "$$ BEGIN RETURN evil.try(); END $$",
        "CREATE OPERATOR evil.=== (LEFTARG = text, RIGHTARG = int, FUNCTION = evil.same)",
        "ALTER TABLE evil.t3 ADD CHECK ('a' OPERATOR(evil.===) 1)",
    ),
    "nothing": (),
}


@pytest.mark.parametrize("door", ATTACHED)
def test_attach(scene: Scene, door: str) -> None:
    published(scene, *LOADED, *ATTACHED[door])
    scene.tried()
    try:
        attach_t3(scene)
    except (InvalidInput, DBAPIError) as e:
        print("ERR", e)
    assert not scene.gains()


def test_attach_constraint_replaced(scene: Scene, monkeypatch) -> None:
    """Between its two steps."""
    published(scene, *LOADED)

    def hold(*a, **k):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(joining, "bring_in", hold)
        with suppress(KeyboardInterrupt):
            attach_t3(scene)
    scene.as_owner(
        "ALTER TABLE evil.t3 DROP CONSTRAINT roir_bounds",
        "ALTER TABLE evil.t3 ADD CONSTRAINT roir_bounds CHECK (evil.any(k)) NOT VALID",
    )
    try:
        attach_t3(scene)
    except (InvalidInput, DBAPIError) as e:
        print("ERR", e)
    assert not scene.gains()


def test_truncate_expr(scene: Scene) -> None:
    published(
        scene,
        "ALTER TABLE evil.t DROP CONSTRAINT t_pkey",
        "CREATE FUNCTION evil.part(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN PERFORM evil.try(); RETURN 1; END $$",
        "CREATE TABLE evil.s PARTITION OF evil.t FOR VALUES FROM (50) TO (100) PARTITION BY LIST (evil.part(id))",
        "CREATE TABLE evil.s1 PARTITION OF evil.s FOR VALUES IN (1)",
    )
    scene.tried()
    try:
        r = cleanup.clean_up(scene.database)
        print(r)
        sync.sync_partitions(scene.database, "evil.t", "test")
    except (RoirError, DBAPIError) as e:
        print("ERR", e)
    assert not scene.gains(), "clean-up"
    scene.as_owner("INSERT INTO evil.s SELECT 60, 'a', 'b'")
    try:
        run_sql(scene.dsn, "TRUNCATE evil.s1")
    except psycopg2.Error as e:
        print("ERR", e)
    assert not [g for g in scene.gains()], "truncate"


def test_altered(scene: Scene) -> None:
    """A table that can't be indexed any more is still his."""
    published(
        scene,
        "CREATE TABLE evil.t2 PARTITION OF evil.t FOR VALUES FROM (50) TO (60)",
    )
    sync.sync_partitions(scene.database, "evil.t", "test")
    scene.as_owner(
        "ALTER TABLE evil.t DETACH PARTITION evil.t1",
        "CREATE INDEX ON evil.t2 (k) WHERE evil.constant(2)",
        "ALTER TABLE evil.t ADD CHECK (evil.constant(1))",
    )
    import airflow_roir.engine.sync as s

    try:
        with pytest.MonkeyPatch.context() as m:
            m.setattr(s.removal, "remove", lambda *a: 0)
            sync.sync_partitions(scene.database, "evil.t", "test")
        scene.as_owner("ALTER TABLE evil.t DROP CONSTRAINT t_pkey")
        print(cleanup.clean_up(scene.database))
    except (RoirError, DBAPIError) as e:
        print("ERR", e)
    assert not scene.gains(), "clean-up"
