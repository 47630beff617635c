"""Debian's pg_partman premakes and retires partitions of an indexed table as it does of any other."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.health import faults
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# Tables with ten ids each. The third one has no index, and comes last.
TABLES = ("a", "t", "u")
RETENTION = {
    "kept": "retention_keep_table = true",
    "kept without indexes": "retention_keep_table = true, retention_keep_index = false",
    "dropped": "retention_keep_table = false",
    "moved": "retention_keep_table = true, retention_schema = 'attic'",
}
MAINTENANCE = {
    "function": "SELECT partman.run_maintenance(p_analyze := false)",
    "procedure": "CALL partman.run_maintenance_proc(p_analyze := false)",
    "of each": "; ".join(f"SELECT partman.run_maintenance('public.{name}', p_analyze := false)" for name in TABLES),
    "by hand": "; ".join(
        [f"SELECT partman.drop_partition_id('public.{name}')" for name in TABLES]
        + ["SELECT partman.run_maintenance(p_analyze := false)"]
    ),
}


@pytest.fixture
def partman(database: Database, dsn: str) -> str:
    user = steps.session(dsn)
    if not sql(user, "SELECT 1 FROM pg_available_extensions WHERE name = 'pg_partman' AND default_version < '5'"):
        pytest.skip("this server has no pg_partman 4")
    user.close()
    run_sql(dsn, "CREATE SCHEMA attic; CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman")
    for name in TABLES:
        run_sql(
            dsn,
            f"CREATE TABLE {name} (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
            f"SELECT partman.create_parent('public.{name}', 'id', 'native', '10', p_premake := 3)",
            f"INSERT INTO {name} SELECT i, (i % 5)::text, i FROM generate_series(0, 35) i",
            "SELECT partman.run_maintenance()",
        )
    run_sql(dsn, "SELECT roir.guard()")
    return dsn


def partitions(dsn: str, table: str) -> set[str]:
    user = steps.session(dsn)
    found = sql(user, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s::regclass", table)
    user.close()
    return {name.removeprefix(table) for (name,) in found}


def assert_shown(dsn: str) -> None:
    """Checks that readers see exact entries."""
    user = steps.session(dsn)
    rows, entries = (sql(user, f"SELECT k, id, v FROM {name} ORDER BY id") for name in ("t", "ix"))
    assert rows == entries
    user.close()


@pytest.mark.parametrize("maintenance", MAINTENANCE)
@pytest.mark.parametrize("retention", RETENTION)
@pytest.mark.parametrize("phase", ["building", "published"])
def test_its_maintenance_runs_as_without_an_index(
    database: Database, partman: str, phase: str, retention: str, maintenance: str
) -> None:
    """Found: the DDL guard refused pg_partman's `DETACH`: its maintenance made no new partitions, for no table, and
    rows fell into the default partition. It holds: the guard takes a plain `DETACH` or `DROP` over.
    """
    _, run = steps.begin(database, include="v")
    if phase == "published":
        steps.finish_all(database, run)
    run_sql(partman, f"UPDATE partman.part_config SET retention = '20', {RETENTION[retention]}")
    for first in (36, 66):
        rows = f"SELECT i, (i % 5)::text, i FROM generate_series({first}, {first + 29}) i"
        run_sql(partman, *(f"INSERT INTO {name} {rows}" for name in TABLES))
        run_sql(partman, MAINTENANCE[maintenance])
        assert partitions(partman, "a") == partitions(partman, "t") == partitions(partman, "u")
        if phase == "published":
            assert_shown(partman)
    assert "_p0" not in partitions(partman, "t")
    assert "_p120" in partitions(partman, "t")
    if phase == "building":
        steps.finish_all(database, run)
        assert_shown(partman)
    clean_up.clean_up(database)
    steps.assert_exact(database)
    with database.transaction() as connection:
        assert faults.warnings(connection) == []


def test_rows_of_the_default_partition_are_moved_out_of_it(database: Database, partman: str) -> None:
    """Found: pg_partman's maintenance of an indexed table had fallen behind, and status was silent. It holds: status
    names the default partition that has rows, and the call that moves them.
    """
    steps.make_index(database, "ix", "t", "k")
    run_sql(
        partman,
        "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(500, 530) i",
    )
    with database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert "are in its default partition public.t_default" in line
    assert line.endswith("""CALL "partman".partition_data_proc('public.t')""")
    run_sql(partman, line.rsplit(": ", 1)[1])
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    assert sql(steps.session(partman), "SELECT count(*) FROM ONLY t_default") == [(0,)]
    steps.assert_exact(database)


def test_rows_of_a_lower_level_s_default_partition_are_moved_too(database: Database, partman: str) -> None:
    """The level has a configuration of its own. An error in its maintenance stops that of all tables."""
    run_sql(
        partman,
        "CREATE TABLE s (id int PRIMARY KEY, k text) PARTITION BY RANGE (id)",
        "SELECT partman.create_parent('public.s', 'id', 'native', '100', p_premake := 2)",
        "SELECT partman.create_sub_parent('public.s', 'id', 'native', '20', p_native_check := 'yes', p_premake := 2)",
    )
    steps.make_index(database, "ix", "s", "k")
    run_sql(partman, "INSERT INTO s SELECT i, (i % 5)::text FROM generate_series(0, 99) i")
    with pytest.raises(psycopg2.errors.RaiseException, match="would be violated"):
        run_sql(partman, "SELECT partman.run_maintenance()")
    with database.transaction() as connection:
        (line,) = faults.warnings(connection)
    assert line.endswith("""CALL "partman".partition_data_proc('public.s_p0')""")
    run_sql(partman, line.rsplit(": ", 1)[1], "SELECT partman.run_maintenance()")
    with database.transaction() as connection:
        assert faults.warnings(connection) == []
    steps.assert_exact(database)


def test_partitioning_is_undone(database: Database, partman: str) -> None:
    """pg_partman detaches each partition once its rows are elsewhere."""
    steps.make_index(database, "ix", "t", "k")
    run_sql(
        partman,
        "CREATE TABLE elsewhere (LIKE t)",
        "CALL partman.undo_partition_proc('public.t', p_target_table := 'public.elsewhere', p_keep_table := false)",
    )
    assert sql(steps.session(partman), "SELECT count(*) FROM elsewhere") == [(36,)]
    clean_up.clean_up(database)
    assert steps.assert_exact(database).rows == 0
