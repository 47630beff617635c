"""Bad input: the error names the thing and the remedy, and nothing in the database has changed."""

from __future__ import annotations

from typing import Any

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import prepare
from airflow_roir.engine.database import Database
from airflow_roir.errors import InvalidInput, NotFound, OperationRunning, RoirError
from airflow_roir.options import BuildOptions
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

CATALOG = """
SELECT relnamespace::regnamespace || '.' || relname || ' ' || relkind::text FROM pg_class WHERE relpersistence <> 't'
 UNION ALL SELECT tgname::text FROM pg_trigger UNION ALL SELECT proname::text FROM pg_proc
 UNION ALL SELECT typname::text FROM pg_type WHERE typnamespace::regnamespace::text !~ 'temp'
 UNION ALL SELECT o::text FROM roir.operation o UNION ALL SELECT i::text FROM roir.index i
 UNION ALL SELECT g::text FROM roir.generation g UNION ALL SELECT e::text FROM roir.event e
 ORDER BY 1
"""

TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int, j json, p point, js json[], x xid)",
    "INSERT INTO t SELECT i, i::text, i FROM generate_series(1, 10) i",
    "CREATE TABLE bare (k int)",
    "CREATE VIEW a_view AS SELECT * FROM t",
    "CREATE MATERIALIZED VIEW a_matview AS SELECT * FROM t",
    "CREATE SEQUENCE a_sequence",
    "CREATE TYPE a_type AS ENUM ('a')",
    "CREATE TYPE a_composite AS (id int)",
    "CREATE INDEX an_index ON t (k)",
    "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, k int)",
    "CREATE TABLE parent (id int PRIMARY KEY, k int)",
    "CREATE TABLE child () INHERITS (parent)",
    "CREATE TABLE secret (id int PRIMARY KEY, k int)",
    "ALTER TABLE secret ENABLE ROW LEVEL SECURITY",
    "CREATE FOREIGN DATA WRAPPER w",
    "CREATE SERVER s FOREIGN DATA WRAPPER w",
    "CREATE FOREIGN TABLE a_foreign_table (id int, k int) SERVER s",
    "CREATE TABLE wide (" + ", ".join(f"c{i} int" for i in range(40)) + ", PRIMARY KEY (c0))",
    "CREATE SCHEMA closed",
)


@pytest.fixture(autouse=True)
def tables(dsn: str) -> None:
    run_sql(dsn, *TABLES)


def refuse(dsn: str, error: type[RoirError], *words: str, **definition: Any) -> None:
    """Checks that prepare raises `error`, with all words in its message, and leaves the catalog as it was."""
    given = {"index": "ix", "table": "t", "keys": "k", "include": None, **definition}
    options = given.pop("options", {})
    user = steps.session(definition.pop("watch", given.pop("watch", dsn)))
    before = sql(user, CATALOG)
    user.rollback()
    with pytest.raises(error) as caught:
        prepare.prepare(
            Database(dsn), IndexDefinition.parse(**given), BuildOptions(**{"lock_patience_s": 0, **options}), "test"
        )
    for word in words:
        assert word in str(caught.value), caught.value
    assert sql(user, CATALOG) == before
    user.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("error", "words", "definition"),
    [
        (NotFound, ("nowhere.t", "doesn't exist"), {"table": "nowhere.t"}),
        (NotFound, ("missing", "quote it"), {"table": "Missing"}),
        (NotFound, ('"K"', '"k"'), {"keys": '"K"'}),
        (NotFound, ('"gone"',), {"include": "gone"}),
        (NotFound, ('"ctid"',), {"keys": "ctid"}),
        (NotFound, ("no index", "give the table"), {"table": None, "keys": None}),
        (NotFound, ("no schema", '"nowhere"'), {"index": "nowhere.ix"}),
        (InvalidInput, ("no primary key", "ADD PRIMARY KEY"), {"table": "bare"}),
        (InvalidInput, ('"j"', "json", "include it"), {"keys": "k, j"}),
        (InvalidInput, ('"p"', "point"), {"keys": "p"}),
        (InvalidInput, ('"js"', "json[]"), {"keys": "js"}),
        (InvalidInput, ('"x"', "xid"), {"keys": "x"}),
        (InvalidInput, ('"id"', "primary key"), {"include": "id"}),
        (InvalidInput, ("a_view", "a view"), {"table": "a_view"}),
        (InvalidInput, ("a_matview", "materialized view"), {"table": "a_matview"}),
        (InvalidInput, ("a_sequence", "a sequence"), {"table": "a_sequence"}),
        (InvalidInput, ("an_index", "an index"), {"table": "an_index"}),
        (InvalidInput, ("a_composite", "composite type"), {"table": "a_composite"}),
        (InvalidInput, ("a_foreign_table", "foreign table"), {"table": "a_foreign_table"}),
        (InvalidInput, ("unlogged", "SET LOGGED"), {"table": "unlogged"}),
        (InvalidInput, ("parent", "inheritance"), {"table": "parent"}),
        (InvalidInput, ("secret", "row-level security"), {"table": "secret"}),
        (InvalidInput, ("pg_catalog.pg_class", "system table"), {"table": "pg_catalog.pg_class", "keys": "relname"}),
        (InvalidInput, ("roir.operation", "system table"), {"table": "roir.operation", "keys": "status"}),
        (
            InvalidInput,
            ("key and primary key together", "32"),
            {"table": "wide", "keys": ", ".join(f"c{i}" for i in range(1, 33))},
        ),
        *(
            (InvalidInput, (f"public.{name}", "has that name", "choose another"), {"index": name})
            for name in ("t", "a_view", "a_matview", "a_sequence", "an_index", "a_type", "a_composite", "t_pkey")
        ),
        (InvalidInput, ("lock_timeout_ms", "deadlock_timeout"), {"options": {"lock_timeout_ms": 1000}}),
    ],
)  # fmt: skip
def test_what_cannot_be_indexed_is_refused(
    dsn: str, error: type[RoirError], words: tuple[str, ...], definition: dict[str, Any]
) -> None:
    refuse(dsn, error, *words, **definition)


def test_a_temporary_table_is_refused(dsn: str) -> None:
    user = steps.session(dsn)
    sql(user, "CREATE TEMP TABLE mine (id int PRIMARY KEY, k int)")
    user.commit()
    [(schema,)] = sql(user, "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = 'mine'")
    refuse(dsn, InvalidInput, "temporary", table=f"{schema}.mine")
    refuse(dsn, NotFound, "mine", table="mine")


def test_a_virtual_generated_column_is_refused(dsn: str) -> None:
    try:
        run_sql(dsn, "ALTER TABLE t ADD w int GENERATED ALWAYS AS (v + 1) VIRTUAL")
    except psycopg2.errors.SyntaxError:
        pytest.skip("virtual columns came with PostgreSQL 18")
    refuse(dsn, InvalidInput, '"w"', "STORED", keys="w")
    refuse(dsn, InvalidInput, '"w"', "STORED", include="w")


def test_an_operation_that_runs_is_named_and_another_definition_refused(database: Database, dsn: str) -> None:
    _, run = steps.begin(database)
    refuse(dsn, OperationRunning, "public.ix", run.owner, "--take-over")
    refuse(dsn, InvalidInput, "another definition", "key k", "leave out", keys="v")
    refuse(dsn, InvalidInput, "another definition", include="v")


def test_a_role_without_rights_is_told_what_it_lacks(database: Database, dsn: str, stranger: str) -> None:
    refuse(stranger, InvalidInput, "control schema", "right", watch=dsn)
    [(role,)] = sql(steps.session(stranger), "SELECT current_user")
    run_sql(dsn, f"GRANT USAGE ON SCHEMA roir TO {role}", f"GRANT ALL ON ALL TABLES IN SCHEMA roir TO {role}")
    refuse(stranger, InvalidInput, "control schema", watch=dsn)  # it couldn't create its tables
    run_sql(dsn, f"GRANT USAGE, CREATE ON SCHEMA roir_data TO {role}")
    refuse(stranger, InvalidInput, "public.t", "belongs to", "only a member of that role", watch=dsn)
    run_sql(
        dsn,
        f"CREATE TABLE own (id int PRIMARY KEY, k int); ALTER TABLE own OWNER TO {role}",
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
    )
    refuse(
        stranger, InvalidInput, "no right to create", 'GRANT USAGE, CREATE ON SCHEMA "public"', watch=dsn, table="own"
    )
    refuse(stranger, InvalidInput, "no right to create", "closed", watch=dsn, table="own", index="closed.ix")


def test_a_key_column_may_lose_its_not_null_after_publish(database: Database, dsn: str) -> None:
    run_sql(dsn, "ALTER TABLE t ALTER v SET NOT NULL")
    steps.make_index(database, keys="v, k")
    run_sql(
        dsn,
        "ALTER TABLE t ALTER v DROP NOT NULL",
        "UPDATE t SET v = NULL WHERE id < 5",
        "UPDATE t SET k = NULL WHERE id < 4",
        "UPDATE t SET v = 7 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
    )
    steps.assert_exact(database)


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://u:hunter%ZZ2@h/db",
        "host=h password=my hunter2",
        "host=h password='hunter2",
        "postgresql://u:my@hunter2@h.invalid/db",
        "postgresql://u:hunter2/x@h.invalid/db",
        "postgresql://u:my@h:hunter2@h.invalid/db",
    ],
)
def test_a_dsn_that_can_not_be_read_is_not_shown(given: str) -> None:
    """libpq quotes the part that it can't read, which may be the password."""
    with pytest.raises(InvalidInput) as refused, Database(given).connect():
        pass
    assert "hunter" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
