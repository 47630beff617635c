"""Every write PostgreSQL can make, in each mode of the capture: the index is exact afterwards."""

from __future__ import annotations

import io

import psycopg2.errors
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import MODES, follow, through_modes
from tests.engine.steps import sql

PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int, other int)",
    "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i, i FROM generate_series(1, 60) i",
)

STATEMENTS: dict[str, str] = {
    "insert several": "INSERT INTO t SELECT i, (i % 4)::text, i FROM generate_series(70, 80) i",
    "update all": "UPDATE t SET k = k || 'x', v = v + 1",
    "update all to null": "UPDATE t SET k = NULL",
    "delete some": "DELETE FROM t WHERE id % 3 = 0",
    "key there and back": "UPDATE t SET k = k || 'x'; UPDATE t SET k = rtrim(k, 'x')",
    "key to null and back": "UPDATE t SET k = NULL WHERE k = '1'; UPDATE t SET k = '1' WHERE k IS NULL",
    "nothing changes": "UPDATE t SET k = k, v = v, id = id",
    "only what the index has not": "UPDATE t SET other = other + 1",
    "do nothing on conflict": "INSERT INTO t VALUES (1, 'n', 0), (90, 'n', 0) ON CONFLICT DO NOTHING",
    "update on conflict": (
        "INSERT INTO t SELECT i, 'c', -i FROM generate_series(55, 65) i "
        "ON CONFLICT (id) DO UPDATE SET k = excluded.k, v = t.v + 1 WHERE t.id <> 57"
    ),
    "merge": (
        "MERGE INTO t USING (SELECT i FROM generate_series(50, 70) i) s ON t.id = s.i "
        "WHEN MATCHED AND t.id % 3 = 0 THEN DELETE WHEN MATCHED AND t.id % 3 = 1 THEN DO NOTHING "
        "WHEN MATCHED THEN UPDATE SET k = 'merged', v = 0 WHEN NOT MATCHED THEN INSERT VALUES (s.i, 'new', s.i)"
    ),
    "shift primary keys up": "UPDATE t SET id = id + 1000",
    "rows that take over deleted keys": (
        "WITH gone AS (DELETE FROM t WHERE id <= 10 RETURNING *) INSERT INTO t SELECT id, k || 'y', v FROM gone"
    ),
    "rows that take over moved keys": (
        "WITH moved AS (UPDATE t SET id = id + 500 WHERE id <= 10 RETURNING *) "
        "INSERT INTO t SELECT id - 500, k, v + 1 FROM moved"
    ),
    "delete and move into its place": "DELETE FROM t WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2",
    "insert and delete in one transaction": "INSERT INTO t VALUES (99, 'a', 1); DELETE FROM t WHERE id = 99",
    "delete and insert in one transaction": "DELETE FROM t WHERE id < 9; INSERT INTO t VALUES (5, 'a', 1), (6, '1', 6)",
    "three writes in one statement": (
        "WITH a AS (DELETE FROM t WHERE id < 5 RETURNING id), b AS (UPDATE t SET k = 'b' WHERE id BETWEEN 5 AND 9) "
        "INSERT INTO t SELECT id + 100, 'c', 0 FROM a"
    ),
    "truncate": "TRUNCATE t",
    "truncate and refill": "TRUNCATE t; INSERT INTO t SELECT i, 'r', i FROM generate_series(1, 9) i",
    "write, then truncate": "UPDATE t SET k = 'w'; TRUNCATE t; INSERT INTO t VALUES (1, 'after', 1)",
    "savepoints": (
        "SAVEPOINT a; DELETE FROM t WHERE id = 1; ROLLBACK TO a; UPDATE t SET k = 's' WHERE id = 1; SAVEPOINT b; "
        "UPDATE t SET id = -1 WHERE id = 1; ROLLBACK TO b; SAVEPOINT c; INSERT INTO t VALUES (77, 'k', 1); RELEASE c"
    ),
    "truncate rolled back to a savepoint": "SAVEPOINT a; TRUNCATE t; ROLLBACK TO a; UPDATE t SET v = -v WHERE id < 9",
    "as a replica": (
        "SET LOCAL session_replication_role = replica; UPDATE t SET k = 'r' WHERE id < 9; DELETE FROM t WHERE id = 10"
    ),
    "in a DO block": (
        "DO $$ BEGIN FOR i IN 1..9 LOOP UPDATE t SET k = i WHERE id = i; END LOOP; DELETE FROM t WHERE id = 3; END $$"
    ),
    "with a caught error": (
        "DO $$ BEGIN UPDATE t SET k = 'kept' WHERE id = 4; "
        "BEGIN UPDATE t SET k = 'lost' WHERE id < 9; INSERT INTO t VALUES (20, 'dup', 0); "
        "EXCEPTION WHEN unique_violation THEN UPDATE t SET v = -1 WHERE id = 5; END; END $$"
    ),
    "by a cursor": (
        "DECLARE c CURSOR FOR SELECT * FROM t WHERE id < 4; FETCH c; UPDATE t SET k = 'c' WHERE CURRENT OF c"
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_write_is_followed_in_every_mode(database: Database, dsn: str, mode: str) -> None:
    run_sql(dsn, *PLAIN)
    follow(database, dsn, mode, STATEMENTS, PLAIN[1])


def test_copy_is_followed_in_every_mode(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN)

    def write(mode: str) -> None:
        user = steps.session(dsn)
        first = 100 * (1 + MODES.index(mode))
        rows = "".join("{0}\t{1}\t{0}\n".format(i, "\\N" if i % 3 else "copied") for i in range(first, first + 20))
        with user.cursor() as cursor:
            cursor.copy_expert("COPY t (id, k, v) FROM STDIN", io.StringIO(rows))
        user.commit()

    through_modes(database, write, include="v")


def test_truncate_cascade_is_followed_in_every_mode(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        *PLAIN,
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "INSERT INTO parent VALUES (1)",
        "ALTER TABLE t ADD parent int DEFAULT 1 REFERENCES parent",
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "TRUNCATE parent CASCADE")
        user.rollback()
        sql(user, "TRUNCATE parent CASCADE; INSERT INTO parent VALUES (1); INSERT INTO t VALUES (1, 'k', 1, 1)")
        user.commit()

    through_modes(database, write)


FUNCTIONS: dict[str, str] = {
    "returning, on insert": "INSERT INTO t VALUES (200, 'a', 1) RETURNING touch(id); DELETE FROM t WHERE id = 200",
    "returning, on an update of the key": "UPDATE t SET k = 'outer' WHERE id IN (5, 6) RETURNING touch(id)",
    "returning, on an update of what is included": "UPDATE t SET v = -5 WHERE id IN (7, 8) RETURNING touch(id)",
    "a value of the next row": "UPDATE t SET k = 'outer' || touch(id - 1) WHERE id BETWEEN 20 AND 30",
    "a delete of what was just updated": "UPDATE t SET k = 'outer', v = -1 WHERE id IN (10, 11) RETURNING remove(id)",
    "a delete of what was just inserted": "INSERT INTO t VALUES (300, 'outer', 1) RETURNING remove(id)",
    "a move of what was just updated": "UPDATE t SET k = 'outer' WHERE id = 12 RETURNING move(id)",
    "in a subtransaction that is rolled back": "UPDATE t SET k = 'outer' WHERE id = 14 RETURNING try_in_vain(id)",
}


@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_writes_to_the_table_of_the_statement_that_calls_it(
    database: Database, dsn: str, mode: str
) -> None:
    """Its events come before those of the statement, though no trigger is involved."""
    run_sql(
        dsn,
        *PLAIN,
        "CREATE FUNCTION touch(i int) RETURNS text LANGUAGE plpgsql AS "
        "$$ BEGIN UPDATE t SET k = 'inner', v = v + 100 WHERE id = i; RETURN '!'; END $$",
        "CREATE FUNCTION remove(i int) RETURNS void LANGUAGE sql AS 'DELETE FROM t WHERE id = i'",
        "CREATE FUNCTION move(i int) RETURNS void LANGUAGE sql AS 'UPDATE t SET id = -i, v = 0 WHERE id = i'",
        "CREATE FUNCTION try_in_vain(i int) RETURNS void LANGUAGE plpgsql AS $$ BEGIN "
        "UPDATE t SET k = 'vain' WHERE id = i; RAISE 'no'; EXCEPTION WHEN raise_exception THEN NULL; END $$",
    )
    follow(database, dsn, mode, FUNCTIONS, PLAIN[1])


@pytest.mark.parametrize("deferred", ["IMMEDIATE", "DEFERRED"])
def test_deferrable_primary_keys_are_swapped_and_shared_for_a_while(
    database: Database, dsn: str, deferred: str
) -> None:
    run_sql(
        dsn,
        f"CREATE TABLE t (id int PRIMARY KEY DEFERRABLE INITIALLY {deferred}, k text, v int, other int)",
        PLAIN[1],
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        sql(user, "UPDATE t SET id = 61 - id")
        sql(user, "UPDATE t SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id IN (1, 2)")
        sql(user, "UPDATE t SET k = 'same' WHERE id IN (3, 4)")
        sql(user, "UPDATE t SET id = 7 - id WHERE id IN (3, 4)")  # with equal keys
        sql(user, "UPDATE t SET id = id + 1")
        sql(user, "UPDATE t SET id = id - 1, v = v + 1")
        user.commit()
        if deferred == "DEFERRED":
            sql(user, f"INSERT INTO t VALUES (5, 'twin {mode}', 1), (6, (SELECT k FROM t WHERE id = 6), 2)")
            sql(user, "UPDATE t SET v = v + 1 WHERE id = 6")
            sql(user, f"DELETE FROM t WHERE id = 5 AND k IS DISTINCT FROM 'twin {mode}'")
            sql(user, "DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t WHERE id = 6)")
            user.commit()
        user.close()

    through_modes(database, write, include="v")


def test_an_error_of_the_users_own_leaves_nothing_behind(database: Database, dsn: str) -> None:
    run_sql(dsn, *PLAIN)

    def write(mode: str) -> None:
        user = steps.session(dsn)
        for statement in ("UPDATE t SET id = 1", "INSERT INTO t SELECT * FROM t", "UPDATE t SET v = 1 / (id - 30)"):
            with pytest.raises((psycopg2.errors.UniqueViolation, psycopg2.errors.DivisionByZero)):
                sql(user, statement)
            user.rollback()
        user.close()

    through_modes(database, write, include="v")


def test_a_row_of_nulls_is_not_null(database: Database, dsn: str) -> None:
    """`ROW(NULL, NULL) IS NULL` is true, and yet they are two different entries."""
    run_sql(
        dsn,
        "CREATE TYPE pair AS (a int, b int)",
        "CREATE TABLE t (id int PRIMARY KEY, k pair)",
        "INSERT INTO t SELECT i, CASE i % 3 WHEN 0 THEN NULL WHEN 1 THEN ROW(NULL, NULL)::pair ELSE ROW(i, NULL)::pair "
        "END FROM generate_series(1, 40) i",
    )

    def write(mode: str) -> None:
        user = steps.session(dsn)
        for there, back in (("NULL", "ROW(NULL, NULL)::pair"), ("ROW(NULL, NULL)::pair", "NULL")):
            sql(user, f"UPDATE t SET k = {there} WHERE k IS NOT DISTINCT FROM {back} AND id % 2 = 0")
            sql(user, f"DELETE FROM t WHERE id IN (SELECT min(id) FROM t WHERE k IS NOT DISTINCT FROM {back})")
            user.commit()

    through_modes(database, write)
