"""Foreign tables beside a source: none can be a partition of a table that has a primary key."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.errors import InvalidInput
from tests.conftest import run_sql
from tests.engine import steps

pytestmark = pytest.mark.sample(1)

# A server of contrib's postgres_fdw if it is installed, else one without a handler: the refusals are the same.
WRAPPER = """
DO $$ BEGIN
  IF EXISTS (SELECT FROM pg_available_extensions WHERE name = 'postgres_fdw') THEN
    CREATE EXTENSION postgres_fdw;
    CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw;
  ELSE
    CREATE FOREIGN DATA WRAPPER none;
    CREATE SERVER far FOREIGN DATA WRAPPER none;
  END IF;
END $$
"""
PARTITIONED = (
    "CREATE TABLE t (id int NOT NULL, k text) PARTITION BY RANGE (id)",
    "CREATE TABLE t0 PARTITION OF t FOR VALUES FROM (0) TO (100)",
)
FOREIGN = "CREATE FOREIGN TABLE t1 PARTITION OF t FOR VALUES FROM (100) TO (200) SERVER far"
LOOSE = "CREATE FOREIGN TABLE f (id int NOT NULL, k text) SERVER far"
ROWS = "INSERT INTO t SELECT i, i % 5 FROM generate_series(1, 60) i"


@pytest.fixture(autouse=True)
def wrapper(dsn: str) -> None:
    run_sql(dsn, WRAPPER)


def test_a_source_with_a_foreign_leaf_is_refused(database: Database, dsn: str) -> None:
    """Its primary key is the reason: it can have none, or one that isn't valid."""
    run_sql(dsn, *PARTITIONED, FOREIGN)
    with pytest.raises(psycopg2.errors.WrongObjectType):
        run_sql(dsn, "ALTER TABLE t ADD PRIMARY KEY (id)")
    with pytest.raises(InvalidInput, match="primary key"):
        steps.begin(database)
    run_sql(dsn, "ALTER TABLE ONLY t ADD PRIMARY KEY (id)")
    with pytest.raises(InvalidInput, match=r"primary key .*valid"):
        steps.begin(database)
    with pytest.raises(InvalidInput, match="foreign table"):
        steps.begin(database, table="t1")


@pytest.mark.sample(0)
@pytest.mark.parametrize("guarded", [False, True], ids=["", "guarded"])
def test_no_foreign_leaf_comes_to_a_source(database: Database, dsn: str, guarded: bool) -> None:
    """At any level, while building and afterwards, with the guard and without."""
    run_sql(dsn, *PARTITIONED, "ALTER TABLE t ADD PRIMARY KEY (id)", ROWS, LOOSE)
    run_sql(dsn, "CREATE TABLE tx (id int NOT NULL, k text) PARTITION BY RANGE (id)")
    run_sql(dsn, "CREATE FOREIGN TABLE tx1 PARTITION OF tx FOR VALUES FROM (300) TO (310) SERVER far")
    if guarded:
        run_sql(dsn, "SELECT roir.guard()")

    def come() -> None:
        for statement in (
            FOREIGN,
            "ALTER TABLE t ATTACH PARTITION f FOR VALUES FROM (200) TO (300)",
            "ALTER TABLE t ATTACH PARTITION tx FOR VALUES FROM (300) TO (400)",
        ):
            with pytest.raises(psycopg2.errors.Error, match="foreign"):
                run_sql(dsn, statement)
        with pytest.raises(InvalidInput, match="f is a foreign table"):
            attach.attach_partition(database, "t", "f", "FOR VALUES FROM (200) TO (300)", "test")

    _, run = steps.begin(database)
    come()
    steps.finish_all(database, run)
    come()
    run_sql(dsn, "UPDATE t SET k = k || 'x' WHERE id % 2 = 0", "DELETE FROM t WHERE id % 7 = 0")
    steps.assert_exact(database)


def test_a_foreign_child_by_inheritance_stops_a_build(database: Database, dsn: str) -> None:
    """A plain query reads it with its parent, and no trigger sees its rows."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text)", ROWS)
    run = steps.built(database)
    run_sql(dsn, "CREATE FOREIGN TABLE child () INHERITS (t) SERVER far")
    with pytest.raises(InvalidInput, match="inheritance children"):
        steps.seal_all(database, run)
    with pytest.raises(InvalidInput, match="inheritance children"):
        steps.begin(database, "other")
