"""`roir plan --sql` prints the statements that a build sends, and psql runs them on an empty copy of the table."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import clean_up, dry_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.forecast import ddl, forecast
from airflow_roir.options import BuildOptions
from servers.postgres import programs
from tests.conftest import database_dsn, run_sql
from tests.engine import steps
from tests.engine.hostile import PLAIN, Scene
from tests.engine.hostile import ROWS as ROWS_OF_HIS
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(1)

SHAPES = {
    "plain": ("CREATE TABLE t (id int PRIMARY KEY, k text, v int)",),
    "partitioned": (
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (50)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (50) TO (1000) PARTITION BY RANGE (id)",
        "CREATE TABLE t21 PARTITION OF t2 DEFAULT",
    ),
    "hostile": (
        'CREATE SCHEMA "S; --"',
        'CREATE TABLE "S; --"."T ""1"" %s" ("i d" int PRIMARY KEY, "line%no" text COLLATE "C", "v\'" numeric(9, 2))',
    ),
}
NAMED = {"hostile": ('"S; --"."T ""1"" %s"', '"line%no"', '"v\'"')}
ROWS = "INSERT INTO {} SELECT i, i::text, i FROM generate_series(1, 100) i"
# A function of ours sends these statements; the engine doesn't.
OF_A_LEAF = re.compile(
    r"CREATE TRIGGER roir_truncate_\d+ AFTER TRUNCATE ON public\.(t\d+) |ALTER TABLE public\.t\d+ .* roir_tr"
)
ON_LEAVES = """
SELECT t.tgrelid::regclass::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE t.tgname ~ '^roir_truncate' AND c.relispartition AND c.relkind = 'r' AND t.tgenabled = 'A'
"""
# Statements on objects that prepare creates for its look and drops again.
PASSING = re.compile(r"roir_data\.(size|trial)_\d|DROP FUNCTION IF EXISTS roir_data\.read_")


def triggers(database: Database) -> set[str]:
    return {name for (name,) in sql(session(database.dsn), ON_LEAVES)}


def compare(
    database: Database, index: str, options: BuildOptions, unique: bool = False, exactly: bool = True, **of: str | None
) -> None:
    """Compares with the statements that a build sends, its clean-up included."""
    definition = IndexDefinition.parse(index, of.get("table"), of.get("keys"), of.get("include"), unique)
    there = triggers(database)
    parts = ddl.foresee(database, dry_run.run(database, definition, options), options)
    foreseen = [one for part in parts for one in part.statements if ddl.is_ddl(one)]
    named = {"table": None, "keys": None, "include": None} | of
    chosen = {"scan": options.scan, "segments": options.segments, "revert_window_s": 0}
    with ddl.recorded(database.engine) as sent:
        steps.make_index(database, index, unique=unique, **named, **chosen)
        clean_up.clean_up(database)
    made = [one for one in sent if not PASSING.search(one)]
    expected = Counter(one for one in foreseen if not OF_A_LEAF.match(one))
    # Functions that read another owner's table are also created for the look before, and undone.
    really = Counter(made) if exactly else Counter({one: expected[one] or 1 for one in made})
    assert (expected - really, really - expected) == (Counter(), Counter())
    told = {leaf[1] for one in foreseen if (leaf := OF_A_LEAF.match(one))} - {None}
    assert triggers(database) == there | told
    steps.assert_exact(database, index)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_build_sends_what_the_plan_prints(database: Database, dsn: str, shape: str, unique: bool, scan: str) -> None:
    table, key, included = NAMED.get(shape, ("t", "k", "v"))
    run_sql(dsn, *SHAPES[shape], ROWS.format(table), f"ANALYZE {table}")
    options = BuildOptions(segments=3, scan=scan)
    compare(database, "public.ix", options, unique, table=table, keys=key, include=included)
    compare(database, "public.ix", options)
    # The capture is there already.
    compare(database, "public.other", options, table=table, keys=included)


def test_of_a_table_of_another_owner_too(scene: Scene) -> None:
    scene.as_owner(PLAIN, ROWS_OF_HIS)
    options = BuildOptions(segments=3)
    compare(scene.database, "evil.ix", options, exactly=False, table="evil.t", keys="k", include="v")
    compare(scene.database, "evil.ix", options)


@pytest.mark.parametrize("shape", SHAPES)
def test_psql_runs_it_on_an_empty_copy_which_then_follows_writes(
    database: Database, server: str, dsn: str, pg: int, shape: str
) -> None:
    """The copy's oids are different: they are only in names."""
    table, key, included = NAMED.get(shape, ("t", "k", "v"))
    run_sql(dsn, *SHAPES[shape], ROWS.format(table), f"ANALYZE {table}")
    definition, options = IndexDefinition.parse("public.ix", table, key, included), BuildOptions(segments=3)
    script = ddl.as_script(ddl.foresee(database, dry_run.run(database, definition, options), options))
    copy = database_dsn(server, "copy_of_a_schema")
    run_sql(server, "CREATE DATABASE copy_of_a_schema TEMPLATE roir_template")
    try:
        run_sql(copy, *SHAPES[shape])
        psql = [str(programs(pg) / "psql"), copy, "-X", "-v", "ON_ERROR_STOP=1", "-q"]
        done = subprocess.run(psql, input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        run_sql(copy, ROWS.format(table))
        assert sql(session(copy), "SELECT count(*) FROM public.ix") == [(100,)]
    finally:
        run_sql(server, "DROP DATABASE copy_of_a_schema WITH (FORCE)")


def test_nothing_of_it_stays(database: Database, dsn: str) -> None:
    steps.make_table(dsn)
    look = "SELECT array_agg(relname ORDER BY 1), (SELECT array_agg(proname ORDER BY 1) FROM pg_proc) FROM pg_class"
    before = sql(session(dsn), look)
    definition, options = IndexDefinition.parse("ix", "t", "k"), BuildOptions()
    dry = forecast.run(database, definition, options, with_trial=True)
    assert ddl.foresee(database, dry, options)
    assert sql(session(dsn), look) == before
