"""The source's tables, or ours, are rewritten under an operation: rows are at other places, and no capture sees it."""

from __future__ import annotations

import shutil
import subprocess
from urllib.parse import urlsplit

import pytest

from airflow_roir.engine import apply_delta
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.database import Database
from airflow_roir.errors import SourceChanged
from servers.postgres import programs
from tests.conftest import run_sql
from tests.engine import steps, verifying
from tests.engine.stages import PHASES, Stage
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(1)

# Three rows in a block, in another order than that of their keys.
ROWS = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int, pad text DEFAULT repeat('x', 2000))",
    "ALTER TABLE t ALTER pad SET STORAGE PLAIN",
    "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i ORDER BY md5(i::text)",
)
CHANGES = (
    "UPDATE t SET k = k || 'x', v = v + 1 WHERE id % 2 = 0",
    "DELETE FROM t WHERE id % 5 = 0",
    "INSERT INTO t SELECT i, 'again', 0 FROM generate_series(1, 70) i ON CONFLICT (id) DO UPDATE SET v = t.v - 1",
)
# These rewrite all tables of the database: the delta, the base and the control tables among them.
REWRITES = {
    "vacuum full": ("VACUUM FULL",),
    "cluster": ("CLUSTER t USING t_pkey", "CLUSTER"),
    "rewriting alter": ("ALTER TABLE t SET UNLOGGED", "ALTER TABLE t SET LOGGED"),
}


def refused(stage: Stage) -> str | None:
    """Carries the operation to its end, and checks that the index is exact; or returns the error."""
    try:
        stage.finish()
    except SourceChanged as error:
        return str(error)
    return None


@pytest.mark.sample(1)
@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rewrite", REWRITES)
def test_everything_is_rewritten_in_each_phase(
    database: Database, dsn: str, rewrite: str, phase: str, scan: str
) -> None:
    """The index is right in the end, or the operation says that the table was rewritten and how to continue."""
    run_sql(dsn, *ROWS)
    stage = Stage(database, phase, include="v", scan=scan)
    run_sql(dsn, *CHANGES, *REWRITES[rewrite], *CHANGES)
    if (said := refused(stage)) is not None:
        assert scan == "block" or rewrite == "rewriting alter"
        assert "was rewritten" in said or "altered" in said


def test_a_delta_that_is_rewritten_between_two_steps_of_the_fold(database: Database, dsn: str) -> None:
    """Rows come into blocks that the fold has passed. The next pass, or the publish, finds them."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, k text, v int)")
    run_sql(dsn, "INSERT INTO t SELECT i, 'k' || i % 5, i FROM generate_series(1, 9000) i")
    _, run = steps.begin(database, include="v")
    run_sql(dsn, "UPDATE t SET v = v + 1", "UPDATE t SET k = k || 'x' WHERE id % 2 = 0")
    steps.switch_all(database, run)
    connection = database.engine.connect()
    with connection.begin():
        job = load_job(connection, run)
    one = apply_delta.Folding(connection, job.generation_id, job.entry)
    assert steps.fold_blocks(connection, one, 0, 16).rows > 0
    run_sql(dsn, f"VACUUM FULL {one.delta}")
    steps.fold_blocks(connection, one, 16, 32)
    connection.close()
    steps.fold_and_publish(database, run)
    steps.assert_exact(database)


@pytest.mark.parametrize("wrong", [False, True], ids=["", "one is wrong"])
def test_a_verification_over_rewritten_tables_says_what_is_wrong_and_no_more(
    database: Database, dsn: str, wrong: bool
) -> None:
    base = verifying.build_index(dsn, database, *ROWS, include="v")
    if wrong:
        run_sql(dsn, f"UPDATE {base} SET c3 = -1 WHERE c2 = 7")
    run = verifying.begin(database)
    one = verifying.worker(database, run)
    with one.connection:
        one.unit(verifying.claim(one))
        one.close()
    run_sql(
        dsn,
        "DELETE FROM t WHERE id % 5 = 0",
        "VACUUM FULL",
        "UPDATE t SET v = 0 WHERE id > 9",
        "CLUSTER t USING t_pkey",
    )
    verifying.to_check(database, run)
    run_sql(dsn, "VACUUM FULL")
    verifying.go_through(database, run)
    assert [(kind, key) for kind, key, _ in verifying.found(dsn)] == ([("different", "7")] if wrong else [])


@pytest.fixture
def repack(dsn: str, pg: int) -> list[str]:
    """The command by which pg_repack rewrites table t online, if Debian's or Ubuntu's package is there."""
    user = steps.session(dsn)
    found = shutil.which("pg_repack", path=f"{programs(pg)}") or shutil.which("pg_repack")
    if found is None or not sql(user, "SELECT 1 FROM pg_available_extensions WHERE name = 'pg_repack'"):
        pytest.skip("this server has no pg_repack")
    user.close()
    run_sql(dsn, "CREATE EXTENSION pg_repack")
    parts = urlsplit(dsn)
    folder = parts.query.removeprefix("host=")
    return [found, "-h", folder, "-U", "postgres", "-d", parts.path[1:], "--no-order", "-t", "t"]


@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("phase", ["mid-build", "built", "mid-fold", "published", "rebuild"])
def test_a_table_that_is_repacked_online(
    database: Database, dsn: str, repack: list[str], phase: str, scan: str
) -> None:
    """pg_repack exchanges the table's file meanwhile, with triggers of its own."""
    run_sql(dsn, *ROWS)
    stage = Stage(database, phase, include="v", scan=scan)
    run_sql(dsn, *CHANGES)
    done = subprocess.run(repack, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run_sql(dsn, *CHANGES)
    if (said := refused(stage)) is not None:
        assert scan == "block"
        assert "was rewritten" in said
