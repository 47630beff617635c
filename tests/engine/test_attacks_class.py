"""What an attack by class has found: triggers that write beside a TRUNCATE, rights that come and go, dependents."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

ROWS = "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 30) i"
PLAIN = "CREATE TABLE t (id int PRIMARY KEY, k text, v int)"
PARTITIONED = (
    f"{PLAIN} PARTITION BY RANGE (id)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (15)",
    "CREATE TABLE t2 PARTITION OF t DEFAULT",
)
SEED = (
    "CREATE FUNCTION seed() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN INSERT INTO t VALUES (1000, 'seed', 0); RETURN NULL; END $$"
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["a", "z"])
@pytest.mark.parametrize("on", ["t", "other", "t partitioned", "leaf"])
def test_what_a_trigger_writes_after_a_truncate_is_not_lost(
    database: Database, dsn: str, on: str, name: str, mode: str
) -> None:
    """Its events come before the capture's, or between those of the table and of its leaves."""
    run_sql(dsn, *(PARTITIONED if on in ("t partitioned", "leaf") else (PLAIN,)), ROWS, SEED)
    table = {"t partitioned": "t", "leaf": "t1"}.get(on, on)
    truncated = "other, t" if on == "other" else "t"
    if on == "other":
        run_sql(dsn, "CREATE TABLE other (x int)")
    run_sql(dsn, f"CREATE TRIGGER {name} AFTER TRUNCATE ON {table} EXECUTE FUNCTION seed()")
    stage = Stage(database, mode)
    if (on, name) != ("t", "z"):
        with pytest.raises(psycopg2.errors.FeatureNotSupported, match="a trigger has written"):
            run_sql(dsn, f"TRUNCATE {truncated}")
    else:  # the capture's trigger comes first
        run_sql(dsn, f"TRUNCATE {truncated}")
    stage.assert_exact("truncate")
    stage.finish()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_partitioned_table_is_truncated_in_an_old_snapshot(
    database: Database, dsn: str, isolation: str, mode: str
) -> None:
    """All entries go with their files; only a leaf's TRUNCATE would have to see them."""
    run_sql(dsn, *PARTITIONED, ROWS)
    stage = Stage(database, mode)
    user = steps.session(dsn, isolation)
    sql(user, "SELECT 1")
    run_sql(dsn, "INSERT INTO t VALUES (77, 'later', 1)")
    sql(user, "TRUNCATE t")
    user.commit()
    sql(user, "INSERT INTO t VALUES (1, 'new', 1)")
    user.commit()
    stage.assert_exact("truncate")
    with pytest.raises(psycopg2.errors.FeatureNotSupported):
        sql(user, "TRUNCATE t1")
    user.close()
    stage.finish()
