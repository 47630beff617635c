"""The rows that `roir.on_conflict = 'nothing'` skips, and those that it must not skip, statement by statement."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up, drop
from airflow_roir.engine.database import Database
from airflow_roir.engine.unique.on_conflict import set_on_conflict
from airflow_roir.errors import InvalidInput
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(4)

DUPLICATE = psycopg2.errors.UniqueViolation
# Two levels: partition 1 has partitions by v. Rows (1, 0, 'a', 0) and (2, 1, 'b', 0) are there.
TABLE = (
    "CREATE TABLE t (id int, part int, v int, k text, PRIMARY KEY (id, part, v)) PARTITION BY LIST (part)",
    "CREATE TABLE t0 PARTITION OF t FOR VALUES IN (0)",
    "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1) PARTITION BY LIST (v)",
    "CREATE TABLE t10 PARTITION OF t1 FOR VALUES IN (0)",
    "CREATE TABLE t11 PARTITION OF t1 FOR VALUES IN (1)",
    "INSERT INTO t VALUES (1, 0, 0, 'a'), (2, 1, 0, 'b')",
)
KEPT = [(1, 0, 0, "a"), (2, 1, 0, "b")]


@pytest.fixture
def user(database: Database, dsn: str) -> Iterator[psycopg2.extensions.connection]:
    """A session that has the setting, of a table that lets it work."""
    run_sql(dsn, *TABLE)
    steps.make_index(database, "ix", "t", "k", unique=True)
    set_on_conflict(database, "t", "test")
    with closing(steps.session(dsn)) as session:
        sql(session, "SET roir.on_conflict = 'nothing'")
        session.commit()
        yield session
        session.commit()
    steps.assert_exact(database, "ix")


def done(user: psycopg2.extensions.connection, statement: str) -> int:
    with user.cursor() as cursor:
        cursor.execute(statement)
        return cursor.rowcount


def rows(user: psycopg2.extensions.connection) -> list[tuple[Any, ...]]:
    return sql(user, "SELECT id, part, v, k FROM t ORDER BY 1, 2, 3")


# Statements, and how many rows they insert.
SKIPPED: dict[str, int] = {
    "INSERT INTO t VALUES (3, 0, 0, 'a')": 0,
    "INSERT INTO t VALUES (3, 1, 0, 'a') RETURNING id": 0,
    "INSERT INTO t VALUES (3, 0, 0, 'a') ON CONFLICT DO NOTHING": 0,
    "INSERT INTO t VALUES (1, 0, 0, 'c') ON CONFLICT DO NOTHING": 0,
    # The primary key is another row's: as with ON CONFLICT DO NOTHING.
    "INSERT INTO t VALUES (1, 0, 0, 'c')": 0,
    "INSERT INTO t VALUES (3, 0, 0, 'a'), (4, 1, 0, 'c'), (5, 1, 1, 'b'), (6, 1, 1, 'd')": 2,
    "INSERT INTO t VALUES (3, 0, 0, 'c'), (4, 1, 0, 'c'), (5, 1, 1, 'c')": 1,
    # The first of these isn't inserted, so its key is free.
    "INSERT INTO t VALUES (1, 0, 0, 'c'), (4, 1, 0, 'c'), (5, 1, 0, 'c') ON CONFLICT DO NOTHING": 1,
    "INSERT INTO t VALUES (3, 0, 0, NULL), (4, 0, 0, NULL)": 2,
    "INSERT INTO t SELECT i, i % 2, 0, i % 700 FROM generate_series(100, 999) i": 700,
    "WITH gone AS (DELETE FROM t WHERE id = 1 RETURNING k) INSERT INTO t SELECT 3, 1, 1, 'b' FROM gone": 0,
    "MERGE INTO t USING (VALUES (3, 'a'), (4, 'c')) n (id, k) ON t.id = n.id "
    "WHEN NOT MATCHED THEN INSERT VALUES (n.id, 0, 0, n.k)": 1,
}


@pytest.mark.parametrize("statement", SKIPPED)
def test_rows_whose_key_is_taken_are_skipped(user: psycopg2.extensions.connection, statement: str) -> None:
    before = rows(user)
    assert done(user, statement) == SKIPPED[statement]
    assert len(rows(user)) == len(before) + SKIPPED[statement] - statement.startswith("WITH gone")


# These aren't skipped: the outcome is that without the setting.
REFUSED = (
    # A row that moves would be lost.
    "UPDATE t SET part = 1, k = 'b' WHERE id = 1",
    "UPDATE t SET v = 1, k = 'a' WHERE id = 2",
    "UPDATE t1 SET v = 1, k = 'a' WHERE id = 2",
    "UPDATE t SET k = 'b' WHERE id = 1",
    "WITH m AS (UPDATE t SET part = 1, k = 'b' WHERE id = 1 RETURNING *) INSERT INTO t SELECT 9, 0, 0, 'x' FROM m",
    "WITH m AS (UPDATE t1 SET v = 1, k = 'a' WHERE id = 2 RETURNING *) INSERT INTO t SELECT 9, 0, 0, 'x' FROM m",
    "WITH new AS (INSERT INTO t VALUES (9, 0, 0, 'x')) UPDATE t SET part = 1, k = 'b' WHERE id = 1",
    "INSERT INTO t SELECT 9, 0, 0, moved()",
    "INSERT INTO t VALUES (9, 0, 0, moves_in_trigger())",
    "MERGE INTO t USING (VALUES (1), (9)) n (id) ON t.id = n.id WHEN MATCHED THEN UPDATE SET part = 1, k = 'b' "
    "WHEN NOT MATCHED THEN INSERT VALUES (9, 0, 0, 'x')",
    # PostgreSQL's own ON CONFLICT names one constraint, too.
    "INSERT INTO t VALUES (1, 0, 0, 'b') ON CONFLICT (id, part, v) DO UPDATE SET k = excluded.k",
    "INSERT INTO t VALUES (3, 0, 0, 'b') ON CONFLICT (id, part, v) DO UPDATE SET k = excluded.k",
    "INSERT INTO t0 VALUES (3, 0, 0, 'b')",
    "SET LOCAL session_replication_role = replica; INSERT INTO t VALUES (3, 0, 0, 'b')",
    "SET LOCAL roir.on_conflict = 'error'; INSERT INTO t VALUES (3, 0, 0, 'b')",
    "SET LOCAL roir.on_conflict = ''; INSERT INTO t VALUES (3, 0, 0, 'b')",
)
MOVING = (
    "CREATE FUNCTION moved() RETURNS text LANGUAGE plpgsql AS $$ BEGIN "
    "UPDATE t SET part = 1, k = 'b' WHERE id = 1; RETURN 'x'; END $$",
    "CREATE FUNCTION moves_in_trigger() RETURNS text LANGUAGE sql AS $$ SELECT 'move' $$",
    "CREATE FUNCTION of_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM moved(); RETURN NEW; END $$",
    "CREATE TRIGGER moving BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.k = 'move') EXECUTE FUNCTION of_trigger()",
)


@pytest.mark.parametrize("statement", REFUSED)
def test_what_isnt_skipped_is_refused(user: psycopg2.extensions.connection, dsn: str, statement: str) -> None:
    run_sql(dsn, *MOVING)
    with pytest.raises(DUPLICATE):
        done(user, statement)
    user.rollback()
    assert rows(user) == KEPT


def test_without_the_triggers_a_partition_below_another_skips_nothing(
    user: psycopg2.extensions.connection, database: Database, dsn: str
) -> None:
    """An UPDATE of a level that isn't watched could move a row, which would be lost."""
    run_sql(
        dsn,
        "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2) PARTITION BY LIST (v)",
        "CREATE TABLE t20 PARTITION OF t2 FOR VALUES IN (0)",
        "CREATE TABLE t21 PARTITION OF t2 FOR VALUES IN (1)",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES IN (3)",
    )
    assert done(user, "INSERT INTO t VALUES (3, 3, 0, 'b')") == 0
    for statement in ("INSERT INTO t VALUES (3, 2, 0, 'b')", "UPDATE t2 SET v = 1, k = 'b' WHERE id = 4"):
        done(user, "INSERT INTO t VALUES (4, 2, 0, 'c')")
        with pytest.raises(DUPLICATE):
            done(user, statement)
        user.rollback()
    set_on_conflict(database, "t", "test")
    assert done(user, "INSERT INTO t VALUES (3, 2, 0, 'b')") == 0


def test_copy_skips_rows(user: psycopg2.extensions.connection) -> None:
    with user.cursor() as cursor:
        cursor.copy_expert("COPY t FROM STDIN", io.StringIO("3\t0\t0\ta\n4\t1\t1\tc\n5\t0\t0\tc\n"))
        assert cursor.rowcount == 1
    assert rows(user) == [*KEPT, (4, 1, 1, "c")]


def test_statements_of_one_transaction_and_savepoints(user: psycopg2.extensions.connection) -> None:
    assert done(user, "INSERT INTO t VALUES (3, 0, 0, 'c')") == 1
    assert done(user, "INSERT INTO t VALUES (4, 1, 0, 'c')") == 0
    sql(user, "SAVEPOINT s")
    assert done(user, "INSERT INTO t VALUES (5, 0, 0, 'd'), (6, 0, 0, 'd')") == 1
    sql(user, "ROLLBACK TO s")
    assert done(user, "INSERT INTO t VALUES (6, 1, 0, 'd'), (7, 1, 0, 'd')") == 1
    sql(user, "DELETE FROM t WHERE id = 3; UPDATE t SET k = 'e' WHERE id = 1")
    assert done(user, "INSERT INTO t VALUES (8, 1, 0, 'c'), (9, 1, 0, 'a')") == 2
    with pytest.raises(DUPLICATE):
        sql(user, "SAVEPOINT s; UPDATE t SET part = 1, k = 'd' WHERE id = 1")
    sql(user, "ROLLBACK TO s")
    assert done(user, "INSERT INTO t VALUES (5, 0, 0, 'd'), (6, 0, 0, 'f')") == 1


def test_the_key_that_other_triggers_leave_counts(user: psycopg2.extensions.connection, dsn: str) -> None:
    """Ours fires last, unless a name begins with a letter beyond ASCII: then the key isn't skipped, but refused."""
    run_sql(
        dsn,
        "CREATE FUNCTION lower_it() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.k := lower(NEW.k); RETURN NEW; END'",
        "CREATE FUNCTION upper_it() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.k := ''b''; RETURN NEW; END'",
        "CREATE TRIGGER zzz BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION lower_it()",
    )
    assert done(user, "INSERT INTO t VALUES (3, 0, 0, 'A'), (4, 0, 0, 'C')") == 1
    user.commit()
    run_sql(dsn, 'CREATE TRIGGER "ö" BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.id = 5) EXECUTE FUNCTION upper_it()')
    with pytest.raises(DUPLICATE):
        done(user, "INSERT INTO t VALUES (5, 0, 0, 'e')")
    user.rollback()
    # The key that didn't come is free.
    assert done(user, "INSERT INTO t VALUES (6, 0, 0, 'e')") == 1


def test_a_row_that_doesnt_come_after_all_leaves_no_entry(user: psycopg2.extensions.connection, dsn: str) -> None:
    """A constraint of the partition, or a trigger that fires later, keeps the row out: its key is free."""
    run_sql(
        dsn,
        "CREATE UNIQUE INDEX ON t0 (v)",
        "CREATE FUNCTION skip_it() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        'CREATE TRIGGER "ö" BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.id = 5) EXECUTE FUNCTION skip_it()',
    )
    assert done(user, "INSERT INTO t VALUES (3, 0, 0, 'c'), (4, 0, 7, 'd') ON CONFLICT DO NOTHING") == 1
    assert done(user, "INSERT INTO t VALUES (5, 0, 5, 'e')") == 0
    # An entry without a row would be here, too.
    assert sql(user, "SELECT id, k FROM ix ORDER BY 1") == [(1, "a"), (2, "b"), (4, "d")]
    user.commit()
    assert done(user, "INSERT INTO t VALUES (6, 0, 6, 'c'), (7, 1, 0, 'e')") == 2


@pytest.mark.parametrize("nulls_not_distinct", [False, True])
def test_several_indexes_and_nulls(database: Database, dsn: str, nulls_not_distinct: bool) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, a int, b int, g int GENERATED ALWAYS AS (a * 10) STORED)",
        "INSERT INTO t VALUES (1, 1, 1), (2, 2, NULL)",
    )
    for name in ("a", "b"):
        steps.make_index(
            database, f"by_{name}", "t", name, unique=True, nulls_not_distinct=nulls_not_distinct and name == "b"
        )
    set_on_conflict(database, "t", "test")
    with closing(steps.session(dsn)) as user:
        sql(user, "SET roir.on_conflict = 'nothing'")
        assert done(user, "INSERT INTO t VALUES (3, 3, 1), (4, 1, 4), (5, 1, 1), (6, 6, 6)") == 1
        assert done(user, "INSERT INTO t VALUES (7, 7, NULL), (8, 8, NULL)") == (0 if nulls_not_distinct else 2)
        # Row 9 was skipped for its other key: its own is free.
        assert done(user, "INSERT INTO t VALUES (9, 9, 1), (10, 9, 10)") == 1
        user.commit()
    for name in ("a", "b"):
        steps.assert_exact(database, f"by_{name}")


def test_a_generated_key_is_refused(database: Database, dsn: str) -> None:
    """A BEFORE trigger doesn't see its value: the row isn't skipped, nor taken for one without a key."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 10) STORED)")
    run_sql(dsn, "INSERT INTO t VALUES (1, 1), (2, NULL)")
    steps.make_index(database, "ix", "t", "g", unique=True, nulls_not_distinct=True)
    set_on_conflict(database, "t", "test")
    with closing(steps.session(dsn)) as user:
        sql(user, "SET roir.on_conflict = 'nothing'")
        with pytest.raises(DUPLICATE):
            done(user, "INSERT INTO t VALUES (3, 1)")
        user.rollback()
        assert done(user, "INSERT INTO t VALUES (3, 3)") == 1


def test_at_each_moment_of_a_build(database: Database, dsn: str) -> None:
    """Nothing is skipped before the key is enforced; a rebuild changes nothing."""
    run_sql(dsn, *TABLE)
    number = 10
    enforced = False
    for definition in ({"unique": True}, {}):
        for moment in steps.moments(database, "ix", *(("t", "k") if definition else ()), **definition):
            number += 1
            if moment == "after prepare" and definition:
                set_on_conflict(database, "t", "test")
            enforced = enforced or moment == "after switch"
            with closing(steps.session(dsn)) as user:
                sql(user, "SET roir.on_conflict = 'nothing'")
                user.commit()
                assert done(user, f"INSERT INTO t VALUES ({number}, 0, 0, 'a'), ({number}, 1, 0, 'new{number}')") == (
                    1 if enforced else 2
                ), moment
                user.commit() if enforced else user.rollback()
    steps.assert_exact(database, "ix")


def test_it_comes_and_goes(user: psycopg2.extensions.connection, database: Database, dsn: str) -> None:
    made = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~roir%' AND tgparentid = 0"
    # The row's, and two for each of the table and its partition with partitions.
    assert sql(user, made) == [(5,)]
    user.commit()
    for _ in range(2):
        set_on_conflict(database, "t", "test", remove=True)
        assert sql(user, made) == [(0,)]
        with pytest.raises(DUPLICATE):
            done(user, "INSERT INTO t VALUES (3, 0, 0, 'a')")
        user.rollback()
    for _ in range(2):
        set_on_conflict(database, "t", "test")
    assert sql(user, made) == [(5,)]
    assert done(user, "INSERT INTO t VALUES (3, 0, 0, 'a')") == 0
    user.rollback()


def test_the_last_drop_takes_it_along(database: Database, dsn: str) -> None:
    run_sql(dsn, *TABLE)
    with pytest.raises(InvalidInput, match="has no unique index"):
        set_on_conflict(database, "t", "test")
    steps.make_index(database, "ix", "t", "k", unique=True)
    set_on_conflict(database, "t", "test")
    drop.drop_index(database, "ix", "test")
    with closing(steps.session(dsn)) as user:
        assert sql(user, "SELECT count(*) FROM pg_trigger WHERE tgname LIKE '~roir%'") == [(0,)]
        assert sql(user, "SELECT count(*) FROM pg_proc WHERE proname LIKE 'conflict_%'") == [(0,)]


def test_writers_need_no_right_but_insert(database: Database, dsn: str, stranger: str) -> None:
    """The function runs as the table's owner, who is no superuser; after a clean-up as the new owner."""
    run_sql(dsn, *TABLE, "CREATE ROLE first_owner", "CREATE ROLE next_owner", "ALTER TABLE t OWNER TO first_owner")
    try:
        for name in ("t0", "t1", "t10", "t11"):
            run_sql(dsn, f"ALTER TABLE {name} OWNER TO first_owner")
        steps.make_index(database, "ix", "t", "k", unique=True)
        set_on_conflict(database, "t", "test")
        with closing(steps.session(stranger)) as writer:
            [(role,)] = sql(writer, "SELECT quote_ident(current_user)")
            writer.commit()
            run_sql(dsn, f"GRANT INSERT ON t TO {role}")
            for owner in ("first_owner", "next_owner"):
                for name in ("t", "t0", "t1", "t10", "t11"):
                    run_sql(dsn, f"ALTER TABLE {name} OWNER TO {owner}")
                clean_up.clean_up(database)
                sql(writer, "SET roir.on_conflict = 'nothing'")
                assert done(writer, "INSERT INTO t VALUES (3, 0, 0, 'a'), (4, 1, 0, 'c'), (5, 1, 0, 'c')") == 1
                writer.rollback()
        called = "SELECT DISTINCT proowner::regrole::text FROM pg_proc WHERE proname LIKE 'conflict_%'"
        with closing(steps.session(dsn)) as user:
            assert sql(user, called) == [("next_owner",)]
    finally:
        drop.drop_index(database, "ix", "test")
        run_sql(dsn, "DROP OWNED BY first_owner, next_owner CASCADE", "DROP ROLE first_owner, next_owner")
