"""`roir compact`: what it chooses, does, prints, and leaves to a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_roir.engine import operations
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact.action import Action, Kind
from airflow_roir.engine.compact.compaction import CompactOptions
from airflow_roir.engine.database import Database
from airflow_roir.engine.run import start_run
from tests.conftest import run_sql
from tests.engine import steps
from tests.test_cli import as_json, here, roir

ROWS = 60_000


@pytest.fixture
def aged(dsn: str, database: Database) -> str:
    """The DSN of a database with a published index, most of whose entries are gone and came again."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, md5(i::text), i FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    _, run = steps.begin(database, include="v", ranges=2, segments=3)
    steps.finish_all(database, run)
    run_sql(dsn, "DELETE FROM t WHERE id % 10 <> 0", "VACUUM t")
    for table in segments(dsn):
        run_sql(dsn, f"VACUUM ANALYZE {table}")
    return dsn


def segments(dsn: str) -> list[str]:
    found = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relname ~ '^g[0-9]+_s[0-9]+$' ORDER BY 1"
    return [name for (name,) in steps.sql(steps.session(dsn), found)]


def sizes(dsn: str) -> int:
    [(total,)] = steps.sql(
        steps.session(dsn), "SELECT sum(pg_total_relation_size(c)) FROM unnest(%s::regclass[]) c", segments(dsn)
    )
    return int(total)


def actions(dsn: str) -> list[Action]:
    """A rewrite of each segment, whatever it is worth."""
    query = "SELECT ordinal FROM roir.segment ORDER BY ordinal"
    return [
        Action(Kind.REWRITE, (ordinal,), 1, 8192, 8192, 1, 8192, 8192, 1.0, 0.0, 0.0, 1.0, 0.5, "asked for")
        for (ordinal,) in steps.sql(steps.session(dsn), query)
    ]


def test_what_is_chosen_is_done_and_nothing_is_left_to_choose(aged: str, database: Database) -> None:
    before = sizes(aged)
    chosen: Any = json.loads(roir(aged, "compact", "ix", "--dry-run", "--json").stdout)
    assert chosen["actions"], chosen
    assert sizes(aged) == before
    done = roir(aged, "compact", "ix", "--without-spark")
    print(done.stdout, done.stderr)
    assert False
