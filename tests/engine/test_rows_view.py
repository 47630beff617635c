"""The rows view of an index has the rows of its table, with the reader's rights, whatever becomes of both."""

from __future__ import annotations

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.cli.overview import index_notes
from airflow_roir.engine import clean_up, drop, fold, revert, whole_rows
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach, detach
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.errors import InvalidInput, InvariantViolated, NotFound
from tests.conftest import run_sql
from tests.engine import rows_ground, steps
from tests.engine.steps import session, sql
from tests.engine.test_locks import in_thread, wait_until, watching

CONDITIONS = [
    "true",
    "k = '7'",
    "k IS NULL",
    "k > '15' AND d < 5",
    "k IN ('1', '2', NULL)",
    "k = '7' AND note <> 'kept' AND n > 20",
    "id = 7",
    "v ->> 'a' = '1' AND d = 3",
    "upper(k) = '7' OR n % 7 = 0",
]
LOCKED = """
SELECT count(*) FILTER (WHERE c.relispartition AND c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'),
       count(*) FILTER (WHERE c.relnamespace <> 'pg_catalog'::regnamespace AND c.relnamespace <> 'roir'::regnamespace)
  FROM (SELECT DISTINCT relation FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation') l
  JOIN pg_class c ON c.oid = l.relation
"""


@pytest.fixture
def ground(dsn: str) -> str:
    rows_ground.make(dsn)
    return dsn


def same(dsn: str, condition: str = "true", isolation: str = "READ COMMITTED") -> int:
    """Compares view and table; returns how many rows there are."""
    user = session(dsn, isolation)
    columns = [name for (name,) in sql(user, "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass "
                                             "AND attnum > 0 AND NOT attisdropped ORDER BY attnum")]  # fmt: skip
    listed = ", ".join(columns)
    expected = sql(user, f"SELECT x::text FROM (SELECT {listed} FROM t WHERE {condition}) x ORDER BY 1")
    assert sql(user, f"SELECT x::text FROM ix_rows x WHERE {condition} ORDER BY 1") == expected
    assert sql(user, f"SELECT count(*) FROM ix_rows WHERE {condition}") == [(len(expected),)]
    user.close()
    return len(expected)


@pytest.mark.sample(3)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_view_has_the_rows_of_the_table(ground: str, condition: str) -> None:
    assert same(ground, condition) > 0


def test_it_uses_the_index_also_for_an_order_by_the_key(ground: str) -> None:
    user = session(ground)
    sql(user, "SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off")
    plan = "\n".join(
        line for (line,) in sql(user, "EXPLAIN SELECT * FROM ix_rows WHERE k = '7' ORDER BY k, id LIMIT 2")
    )
    assert ("Index" in plan, "Sort" in plan) == (True, False), plan
    prepared = "PREPARE q AS SELECT n FROM ix_rows WHERE k = $1 ORDER BY id; SET plan_cache_mode = force_generic_plan"
    sql(user, prepared)
    assert sql(user, "EXECUTE q ('7')") == sql(user, "SELECT n FROM t WHERE k = '7' ORDER BY id")


@pytest.mark.parametrize(
    ("statement", "most"),
    [
        ("SELECT * FROM ix_rows WHERE k = '7' AND id = 7", 12),
        ("UPDATE ix_rows SET note = 'y' WHERE k = '7' AND id = 7 RETURNING *", 16),
        ("DELETE FROM ix_rows WHERE k = '7' AND id = 7 RETURNING *", 16),
        ("INSERT INTO ix_rows (id, d, k) VALUES (1000, 5, 'new') RETURNING *", 9),
    ],
    ids=lambda part: part.split()[0] if isinstance(part, str) else "",
)
def test_a_statement_locks_one_partition_of_many(dsn: str, statement: str, most: int) -> None:
    rows_ground.make(dsn, parts=60)
    clean_up.clean_up(Database(dsn, "roir tests"))
    user = session(dsn)
    assert len(sql(user, statement)) == 1
    [(leaves, relations)] = sql(user, LOCKED)
    assert leaves == 1
    assert relations <= most


def test_it_is_kept_over_all_that_becomes_of_the_index(ground: str, database: Database) -> None:
    run_sql(ground, "CREATE VIEW theirs AS SELECT * FROM ix_rows")
    before = sql(session(ground), "SELECT 'ix_rows'::regclass::oid")
    steps.make_index(database, "ix", None, None)
    assert same(ground, "k = '7'")
    revert.revert(database, "ix", "test")
    assert same(ground, "k = '7'")
    detach.detach_partition(database, "t7", "test")
    assert same(ground)
    attach.attach_partition(database, "t", "t7", "FOR VALUES FROM (7) TO (8)", "test")
    assert same(ground)
    clean_up.clean_up(database)
    assert same(ground)
    assert sql(session(ground), "SELECT 'ix_rows'::regclass::oid") == before
    with pytest.raises(InvalidInput, match="theirs depends on view"):
        drop.drop_index(database, "ix", "test")
    run_sql(ground, "DROP VIEW theirs")
    drop.drop_index(database, "ix", "test")
    assert sql(session(ground), "SELECT to_regclass('ix_rows'), to_regclass('ix')") == [(None, None)]


def test_it_is_made_again_only_if_the_table_has_changed_and_dropped(ground: str, database: Database) -> None:
    oid = sql(session(ground), "SELECT 'ix_rows'::regclass::oid, (SELECT xmin FROM pg_class WHERE relname = 'ix_rows')")
    assert whole_rows.make_rows_view(database, "ix", "test") == "public.ix_rows"
    now = "SELECT 'ix_rows'::regclass::oid, (SELECT xmin FROM pg_class WHERE relname = 'ix_rows')"
    assert sql(session(ground), now) == oid
    assert "whole rows: view public.ix_rows" in index_notes(indexes(database, "ix")[0])
    run_sql(ground, "CREATE VIEW theirs AS SELECT * FROM ix_rows")
    with pytest.raises(InvalidInput, match=r"theirs depends on view.*Nothing was changed"):
        whole_rows.drop_rows_view(database, "ix", "test")
    run_sql(ground, "DROP VIEW theirs")
    assert whole_rows.drop_rows_view(database, "ix", "test") == "public.ix_rows"
    assert indexes(database, "ix")[0].rows_view is None
    with pytest.raises(NotFound, match="has no rows view"):
        whole_rows.drop_rows_view(database, "ix", "test")
    run_sql(ground, "CREATE TABLE ix_rows ()")
    with pytest.raises(InvalidInput, match=r"ix_rows exists already.*Rename that relation"):
        whole_rows.make_rows_view(database, "ix", "test")


def test_a_name_that_is_too_long_is_refused(dsn: str, database: Database) -> None:
    steps.make_table(dsn)
    steps.make_index(database, "i" * 60)
    with pytest.raises(InvalidInput, match=r"too long for a view; nothing was changed"):
        whole_rows.make_rows_view(database, "i" * 60, "test")


def test_an_unpublished_index_is_refused(dsn: str, database: Database) -> None:
    steps.make_table(dsn)
    steps.begin(database)
    with pytest.raises(InvalidInput, match=r"isn't published.*Build the index first"):
        whole_rows.make_rows_view(database, "ix", "test")


@pytest.mark.parametrize("guarded", [True, False], ids=["event triggers", "none"])
def test_migrations_of_the_table_work_and_the_view_follows(ground: str, database: Database, guarded: bool) -> None:
    """A view of ours may not block a migration. Without event triggers reads go on, until a clean-up remakes it."""
    run_sql(
        ground, "CREATE ROLE rows_app; GRANT SELECT, INSERT (id, d, k, n) ON ix_rows TO rows_app WITH GRANT OPTION; "
        "GRANT SELECT (n) ON ix_rows TO PUBLIC", "CREATE ROLE rows_owner", "ALTER VIEW ix_rows OWNER TO rows_owner",
        "COMMENT ON VIEW ix_rows IS 'it''s ours'; COMMENT ON COLUMN ix_rows.n IS 'a number'",
        *(["SELECT roir.guard()"] if guarded else []),
    )  # fmt: skip
    try:
        _migrate(ground, database, guarded)
    finally:
        run_sql(ground, "DROP OWNED BY rows_app, rows_owner", "DROP ROLE rows_app, rows_owner")


RIGHTS = """
SELECT array_agg(x::text ORDER BY x::text)
  FROM (SELECT has_table_privilege('rows_app', 'ix_rows', 'SELECT WITH GRANT OPTION'),
               has_column_privilege('rows_app', 'ix_rows', 'd', 'INSERT'),
               has_column_privilege('public', 'ix_rows', 'id', 'SELECT')) x
"""
# Found: they were lost when the view was created again.
COMMENTS = """
SELECT a.attname, d.description
  FROM pg_description d LEFT JOIN pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid AND a.attnum > 0
 WHERE d.classoid = 'pg_class'::regclass AND d.objoid = 'ix_rows'::regclass ORDER BY d.objsubid
"""


def _migrate(dsn: str, database: Database, guarded: bool) -> None:
    run_sql(dsn, "DROP TRIGGER stamp ON t")
    before = sql(session(dsn), RIGHTS)
    for migration, then in {
        "ALTER TABLE t ADD COLUMN extra int DEFAULT 5": "UPDATE t SET extra = id",
        "ALTER TABLE t RENAME COLUMN note TO remark": "UPDATE ix_rows SET n = n + 1 WHERE k = '7'",
        "ALTER TABLE t DROP COLUMN at": "DELETE FROM ix_rows WHERE k = '8'",
        "ALTER TABLE t ALTER COLUMN remark TYPE varchar(30)": "UPDATE t SET remark = remark || '-'",
        "ALTER TABLE t ALTER COLUMN n TYPE bigint": "UPDATE ix_rows SET n = n + 1 WHERE k = '9'",
        "ALTER TABLE t RENAME TO t_then": "ALTER TABLE t_then RENAME TO t",
        "ALTER TABLE t ALTER COLUMN extra SET DEFAULT 7": "INSERT INTO ix_rows (id, d, k) VALUES (500, 1, 'z')",
    }.items():
        if "n TYPE" in migration:
            run_sql(dsn, "ALTER TABLE t DROP COLUMN g")
        run_sql(dsn, migration)
        if not guarded:
            user = session(dsn)
            if "RENAME TO" in migration:
                assert sql(user, "SELECT count(*) FROM ix_rows") == sql(user, "SELECT count(*) FROM t_then")
            elif "TYPE" not in migration:
                assert sql(user, "SELECT count(*) FROM ix_rows") == sql(user, "SELECT count(*) FROM t")
            else:
                with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="Run roir rows-view"):
                    sql(user, "SELECT * FROM ix_rows")
            if "DEFAULT 7" in migration:
                user.rollback()
                with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState, match="default of extra"):
                    sql(user, then)
            user.close()
            clean_up.clean_up(database)
        run_sql(dsn, then)
        assert same(dsn), migration
    assert sql(session(dsn), RIGHTS) == before
    assert sql(session(dsn), COMMENTS) == [(None, "it's ours"), ("n", "a number")]
    # Found: our own role became the owner.
    assert sql(session(dsn), "SELECT relowner::regrole::text FROM pg_class WHERE relname = 'ix_rows'") == [
        ("rows_owner",)
    ]
    assert sql(session(dsn), "SELECT extra FROM t WHERE id = 500") == [(7,)]


def test_a_dropped_column_stays_as_long_as_other_objects_need_it(ground: str, database: Database) -> None:
    run_sql(ground, "SELECT roir.guard()", "CREATE VIEW theirs AS SELECT id, note FROM ix_rows")
    run_sql(ground, "ALTER TABLE t DROP COLUMN note", "ALTER TABLE t ADD COLUMN more int DEFAULT 3")
    user = session(ground)
    assert sql(user, "SELECT DISTINCT note, more FROM ix_rows") == [(None, 3)]
    assert sql(user, "SELECT DISTINCT note FROM theirs") == [(None,)]
    with pytest.raises(psycopg2.errors.UndefinedColumn, match="has no column note any more"):
        sql(user, "UPDATE ix_rows SET note = 'x' WHERE id = 1")
    user.close()
    run_sql(ground, "DROP VIEW theirs")
    whole_rows.make_rows_view(database, "ix", "test")
    assert same(ground)


def test_a_migration_never_waits_for_a_reader_of_the_view(ground: str, database: Database) -> None:
    """The reader waits for the table: an ALTER that waited for the view would be a deadlock."""
    run_sql(ground, "SELECT roir.guard()")
    migration, reader = session(ground), session(ground)
    sql(migration, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
    reading, errors = in_thread(lambda: sql(reader, "SELECT DISTINCT note FROM ix_rows"))
    wait_until(watching(ground), "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 't'::regclass")
    # Found: it locked the index's view first. A detach got the table's lock, and then never the view's.
    assert sql(session(ground), "SELECT count(*) FROM pg_locks WHERE relation = 'ix'::regclass") == [(0,)]
    sql(migration, "ALTER TABLE t ADD COLUMN extra int DEFAULT 4")
    migration.commit()
    reading.join()
    assert errors == []
    reader.rollback()
    clean_up.clean_up(database)
    assert same(ground, "extra = 4") == 120


def test_the_view_has_its_readers_rights_and_policies(ground: str, stranger: str) -> None:
    name = sql(session(stranger), "SELECT current_user")[0][0]
    run_sql(ground, f"GRANT SELECT, UPDATE, DELETE, INSERT ON ix_rows TO {name}")
    reads = "SELECT count(*) FROM ix_rows WHERE k = '7'"
    for statement in (reads, "SELECT FROM ix_rows WHERE k = 'no such'", "DELETE FROM ix_rows WHERE k = '7'"):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="view ix"):
            sql(session(stranger), statement)
    run_sql(ground, f"GRANT SELECT ON ix TO {name}")
    for statement in (reads, "SELECT FROM ix_rows WHERE k = 'no such'", "DELETE FROM ix_rows WHERE k = '7'",
                      "INSERT INTO ix_rows (id, d) VALUES (1000, 1)"):  # fmt: skip
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="table t"):
            sql(session(stranger), statement)
    run_sql(ground, f"GRANT SELECT ON t TO {name}")
    assert sql(session(stranger), reads) == [(6,)]
    for statement in ("UPDATE ix_rows SET n = 1 WHERE k = '7'", "DELETE FROM ix_rows WHERE k = '7'",
                      "INSERT INTO ix_rows (id, d) VALUES (1000, 1)"):  # fmt: skip
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="table t"):
            sql(session(stranger), statement)
    run_sql(
        ground,
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY even ON t USING (n % 2 = 0) WITH CHECK (n % 4 = 0)",
        f"GRANT UPDATE (n, d), DELETE, INSERT ON t TO {name}",
    )
    user = session(stranger)
    assert sql(user, "SELECT count(*) FROM ix_rows") == sql(user, "SELECT count(*) FROM t") == [(60,)]
    with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security"):
        sql(user, "UPDATE ix_rows SET n = 2 WHERE k = '8'")
    user.rollback()
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        sql(user, "UPDATE ix_rows SET note = '2' WHERE k = '8'")
    user.rollback()
    assert sql(user, "UPDATE ix_rows SET n = 4 WHERE k = '8' RETURNING n") == [(4,)] * 6


def test_it_can_be_neither_locked_nor_used_to_lock_rows(ground: str, stranger: str) -> None:
    name = sql(session(stranger), "SELECT current_user")[0][0]
    run_sql(ground, f"GRANT ALL ON ix_rows, ix, t TO {name}")
    for statement in ("SELECT * FROM ix_rows FOR UPDATE", "LOCK TABLE ix_rows"):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            sql(session(stranger), statement)


def test_no_name_of_a_user_is_used_instead_of_the_servers(ground: str, stranger: str) -> None:
    """The functions run with the reader's rights and path: what another role puts there may not run."""
    name = sql(session(stranger), "SELECT current_user")[0][0]
    run_sql(
        ground,
        "DROP TRIGGER stamp ON t",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ix_rows, ix, t TO {name}",
        "CREATE SCHEMA evil", "GRANT USAGE ON SCHEMA evil TO PUBLIC",
        "CREATE FUNCTION evil.boom() RETURNS int LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$",
        *(f"CREATE FUNCTION evil.{f} LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$"
          for f in ("concat(text, text) RETURNS text", "format(text, text) RETURNS text", "jsonb(text) RETURNS jsonb",
                    "eq(text, text) RETURNS bool", "eq(bigint, int) RETURNS bool", "arrow(jsonb, text) RETURNS text",
                    "format(text, regclass) RETURNS text", "unnest(text[]) RETURNS SETOF text")),
        "CREATE OPERATOR evil.= (FUNCTION = evil.eq, LEFTARG = text, RIGHTARG = text)",
        "CREATE OPERATOR evil.= (FUNCTION = evil.eq, LEFTARG = bigint, RIGHTARG = int)",
        "CREATE OPERATOR evil.->> (FUNCTION = evil.arrow, LEFTARG = jsonb, RIGHTARG = text)",
        "CREATE TABLE evil.t (id int)", "CREATE DOMAIN evil.jsonb AS text", "CREATE DOMAIN evil.text AS int",
        *(f"CREATE DOMAIN evil.{name} AS int" for name in ("record", "varchar", "timestamptz")),
    )  # fmt: skip
    user = session(stranger)
    sql(user, "SET search_path = evil, pg_catalog, public; CREATE TEMP TABLE t (id int)")
    assert sql(user, "SELECT n FROM public.ix_rows WHERE id OPERATOR(pg_catalog.=) 7") == [(7,)]
    # Found: a domain named record took the place of the type of a variable.
    assert len(sql(user, "SELECT * FROM roir.rows(NULL::public.t, 'public.ix', '{\"id\": 7}')")) == 1
    changed = "UPDATE public.ix_rows SET n = 8 WHERE id OPERATOR(pg_catalog.=) 7 RETURNING n"
    assert sql(user, changed) == [(8,)]
    assert sql(user, "DELETE FROM public.ix_rows WHERE id OPERATOR(pg_catalog.=) 7 RETURNING n") == [(8,)]
    assert sql(user, "INSERT INTO public.ix_rows (id, d) VALUES (1000, 1) RETURNING n") == [(1,)]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_reader_sees_one_snapshot(ground: str, database: Database, isolation: str) -> None:
    old = steps.old_session(ground, isolation)
    run_sql(ground, "UPDATE t SET d = (d + 1) % 12, n = n + 1", "DELETE FROM t WHERE k = '8'")
    for query in ("SELECT count(*), sum(n) FROM ix_rows", "SELECT count(*), sum(n) FROM ix_rows WHERE k = '8'"):
        assert sql(old, query) == sql(old, query.replace("ix_rows", "t"))
    old.rollback()
    steps.make_index(database, "ix", None, None)
    assert same(ground, isolation=isolation)


def test_a_row_that_a_rewrite_hides_from_an_old_snapshot_is_an_error(ground: str) -> None:
    old = steps.old_session(ground)
    run_sql(ground, "ALTER TABLE t ALTER COLUMN note TYPE varchar(10) USING note || ''")
    with pytest.raises(psycopg2.errors.SerializationFailure, match="rewritten or detached"):
        sql(old, "SELECT * FROM ix_rows WHERE k = '7'")


def test_a_build_makes_it_with_the_publish(dsn: str, database: Database) -> None:
    steps.make_table(dsn)
    run_sql(dsn, "CREATE TABLE ix_rows ()")
    with pytest.raises(InvalidInput, match=r"ix_rows exists already.*nothing was changed. Rename that relation"):
        steps.begin(database, rows_view=True)
    with pytest.raises(InvalidInput, match="a census keeps nothing"):
        steps.begin(database, "other", unique=True, census=True, rows_view=True)
    run_sql(dsn, "DROP TABLE ix_rows")
    run = steps.folded(database, rows_view=True)
    fold.finish(database, run)
    run_sql(dsn, "CREATE TABLE ix_rows ()")
    with pytest.raises(InvariantViolated, match=r"ix_rows exists already.*and resume; nothing was published"):
        steps.publish_all(database, run)
    run_sql(dsn, "DROP TABLE ix_rows")
    steps.publish_all(database, run)
    assert same(dsn) == 100
    steps.make_index(database, "ix", None, None, rows_view=True)
    assert same(dsn, "k = '3'") == 20
