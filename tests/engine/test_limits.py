"""Limits that would show late are refused at plan where they can be known; types that change under a build."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import pytest
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import BuildOptions, IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.build import Batch, Claim
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import start_run
from airflow_roir.errors import InvalidInput
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, Stage
from tests.engine.steps import sql

RANDOM = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, {0}) i)"


def plan(database: Database, keys: str, include: str | None = None, **options: str) -> str:
    definition = IndexDefinition.parse("ix", "t", keys, include)
    return str(prepare.rehearse(database, definition, BuildOptions(**options)).entry_size)  # type: ignore[arg-type]


def test_an_entry_that_is_too_big_for_a_b_tree_is_refused_at_plan(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v varchar(10), w varchar(900))",
        f"INSERT INTO t SELECT i, {RANDOM.format(60)}, 'v', 'w' FROM generate_series(1, 100) i",
    )
    assert plan(database, "v").startswith("at most ")
    assert "sample; the types allow 3" in plan(database, "w")
    assert "any size" in plan(database, "k")
    run_sql(dsn, f"UPDATE t SET k = {RANDOM.format(100)} WHERE id = 77")
    with pytest.raises(InvalidInput, match=r"public.ix.*public.t.*bytes.*Choose other key columns"):
        plan(database, "k")
    with pytest.raises(InvalidInput, match="bytes"):
        plan(database, "v", "k", covering="all")
    assert plan(database, "v", "k").startswith("at most ")


@pytest.mark.parametrize("mode", MODES)
def test_a_later_write_that_is_too_big_fails_by_itself_and_leaves_the_index_exact(
    database: Database, dsn: str, mode: str
) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 60) i",
    )
    stage = Stage(database, mode)
    user = steps.session(dsn)
    for statement in (
        f"INSERT INTO t VALUES (100, {RANDOM.format(200)})",
        f"UPDATE t SET k = {RANDOM.format(200)} WHERE id = 1",
    ):
        with pytest.raises(psycopg2.errors.ProgramLimitExceeded, match="index row size"):
            sql(user, statement)
        user.rollback()
    stage.assert_exact("after writes that failed")
    stage.finish()


def half_built(database: Database, key: str = "k") -> tuple[steps.Run, int]:
    prepared, run = steps.begin(database, keys=key, batch_rows=10, ranges=3)
    worker = steps.worker(database, run)
    with worker.connection:
        claim = worker.claim()
        assert isinstance(claim, Claim)
        assert isinstance(worker.batch(claim), Batch)
    return run, prepared.operation_id


ENUM = ("CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy')", "CREATE TYPE pair AS (a int, b text)")
MOODS = "(enum_range(NULL::mood))[1 + i % 3]"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
        "ALTER TYPE mood ADD VALUE 'glad' AFTER 'sad'",
        "ALTER TYPE mood RENAME TO humour",
        "ALTER TYPE pair RENAME ATTRIBUTE a TO z",
    ],
)
def test_a_types_change_under_a_build_is_harmless_to_the_key(database: Database, dsn: str, change: str) -> None:
    run_sql(
        dsn,
        *ENUM,
        "CREATE TABLE t (id int PRIMARY KEY, k mood, c pair)",
        f"INSERT INTO t SELECT i, {MOODS}, ROW(i, 'x')::pair FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    run, _ = half_built(database, "k, c")
    run_sql(dsn, change, "UPDATE t SET k = 'ok', c = ROW(0, NULL) WHERE id % 4 = 0", "DELETE FROM t WHERE id % 5 = 0")
    steps.finish_all(database, run)
    run_sql(dsn, "UPDATE t SET k = 'happy' WHERE id % 3 = 0", "DELETE FROM t WHERE id % 7 = 0")
    steps.assert_exact(database)


def test_a_renamed_label_of_the_primary_key_stops_the_build_until_it_is_called_as_before(
    database: Database, dsn: str
) -> None:
    """Bounds and watermarks are texts. No row is missed: the batch fails, and the label is named."""
    run_sql(
        dsn,
        *ENUM,
        "CREATE TABLE t (a mood, id int, k int, PRIMARY KEY (a, id))",
        f"INSERT INTO t SELECT {MOODS}, i, i % 5 FROM generate_series(1, 60) i",
        "ANALYZE t",
    )
    run, _ = half_built(database)
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
    with pytest.raises(DBAPIError, match=r'invalid input value for enum .*: "sad"'):
        steps.build_all(database, run)
    run_sql(dsn, "ALTER TYPE mood RENAME VALUE 'blue' TO 'sad'")
    steps.finish_all(database, start_run(database, "ix", "the next", take_over=True))
    steps.assert_exact(database)
