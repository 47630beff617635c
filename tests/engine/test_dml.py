"""Every write that PostgreSQL can make, in each phase: the index is exact. The matrix is SHAPES by PHASES."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.stages import PHASES, Write, follow, through_modes
from tests.engine.steps import sql

PLAIN = (
    "CREATE TABLE t (id int PRIMARY KEY, k text, v int, other int)",
    "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i, i FROM generate_series(1, 60) i",
)


def two_phase(statement: str, commit: bool = True) -> Write:
    """A write whose transaction is prepared first."""

    def write(user: psycopg2.extensions.connection) -> None:
        user.commit()
        user.tpc_begin("a transaction")
        try:
            sql(user, statement)
        except psycopg2.Error:
            user.tpc_rollback()
            raise
        user.tpc_prepare()
        (user.tpc_commit if commit else user.tpc_rollback)()

    return write


STATEMENTS: dict[str, Write] = {
    "insert one": "INSERT INTO t VALUES (70, 'one', 1)",
    "update one": "UPDATE t SET k = 'one' WHERE id = 7",
    "delete one": "DELETE FROM t WHERE id = 7",
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
    "copy": "COPY t (id, k, v) FROM PROGRAM 'printf \"101,a,1\\\\n102,,\\\\n103,b,3\\\\n\"' (FORMAT csv)",
    "locked first": (
        "SELECT * FROM t WHERE id < 20 FOR UPDATE; UPDATE t SET k = 'l' WHERE id < 9; DELETE FROM t WHERE id = 10"
    ),
    "update in place, and again": (
        "UPDATE t SET other = -1 WHERE id < 9; UPDATE t SET other = -2, v = 0 WHERE id < 5; DELETE FROM t WHERE id = 3"
    ),
    "in two phases": two_phase("UPDATE t SET k = 'p', v = 0 WHERE id < 9; DELETE FROM t WHERE id = 10"),
    "in two phases, rolled back": two_phase("UPDATE t SET k = 'p'; DELETE FROM t WHERE id < 9", commit=False),
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

WRITING_FUNCTIONS = (
    "CREATE FUNCTION touch(i int) RETURNS text LANGUAGE plpgsql AS "
    "$$ BEGIN UPDATE t SET k = 'inner', v = v + 100 WHERE id = i; RETURN '!'; END $$",
    "CREATE FUNCTION remove(i int) RETURNS void LANGUAGE sql AS 'DELETE FROM t WHERE id = i'",
    "CREATE FUNCTION move(i int) RETURNS void LANGUAGE sql AS 'UPDATE t SET id = -i, v = 0 WHERE id = i'",
    "CREATE FUNCTION try_in_vain(i int) RETURNS void LANGUAGE plpgsql AS $$ BEGIN "
    "UPDATE t SET k = 'vain' WHERE id = i; RAISE 'no'; EXCEPTION WHEN raise_exception THEN NULL; END $$",
)
# Their events come before those of the statement that calls them, though no trigger is involved.
FUNCTIONS: dict[str, Write] = {
    "returning, on insert": "INSERT INTO t VALUES (200, 'a', 1) RETURNING touch(id); DELETE FROM t WHERE id = 200",
    "returning, on an update of the key": "UPDATE t SET k = 'outer' WHERE id IN (5, 6) RETURNING touch(id)",
    "returning, on an update of what is included": "UPDATE t SET v = -5 WHERE id IN (7, 8) RETURNING touch(id)",
    "a value of the next row": "UPDATE t SET k = 'outer' || touch(id - 1) WHERE id BETWEEN 20 AND 30",
    "a delete of what was just updated": "UPDATE t SET k = 'outer', v = -1 WHERE id IN (10, 11) RETURNING remove(id)",
    "a delete of what was just inserted": "INSERT INTO t VALUES (300, 'outer', 1) RETURNING remove(id)",
    "a move of what was just updated": "UPDATE t SET k = 'outer' WHERE id = 12 RETURNING move(id)",
    "in a subtransaction that is rolled back": "UPDATE t SET k = 'outer' WHERE id = 14 RETURNING try_in_vain(id)",
}

CASCADES: dict[str, Write] = {
    "delete on cascade": "DELETE FROM p WHERE id IN (1, 2)",
    "delete that sets null": "DELETE FROM q WHERE id IN (1, 2)",
    "update on cascade": "UPDATE p SET id = id + 100",
    "update on cascade of both": "UPDATE p SET id = id + 100 WHERE id < 4; UPDATE q SET id = id + 100 WHERE id < 4",
    "write to child and parent in one statement": (
        "WITH a AS (UPDATE t SET k = 'both' WHERE id < 30) UPDATE p SET id = id + 200 WHERE id = 5"
    ),
    "truncate cascade": "TRUNCATE p CASCADE",
    "truncate cascade, taken back": "SAVEPOINT s; TRUNCATE p CASCADE; ROLLBACK TO s; DELETE FROM p WHERE id = 3",
}

SWAPS: dict[str, Write] = {
    "swap all": "UPDATE t SET id = 61 - id",
    "swap two": "UPDATE t SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id IN (1, 2)",
    "swap two with equal keys": "UPDATE t SET k = 's' WHERE id IN (3, 4); UPDATE t SET id = 7 - id WHERE id IN (3, 4)",
    "shift by one": "UPDATE t SET id = id + 1, v = -v",
    "shift there and back": "UPDATE t SET id = id + 1; UPDATE t SET id = id - 1",
    "share a key for a while": (
        "SET CONSTRAINTS ALL DEFERRED; INSERT INTO t VALUES (5, 'twin', 1); UPDATE t SET v = v + 1 WHERE id = 5; "
        "DELETE FROM t WHERE id = 5 AND k IS DISTINCT FROM 'twin'"
    ),
}

# `a` fires before the capture trigger, `z` after it; `b` changes the row before it is stored.
OWN_TRIGGERS = (
    "CREATE FUNCTION b() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.id % 7 = 0 THEN RETURN NULL; END IF; "
    "NEW.k = 'b' || NEW.k; NEW.v = NEW.v + 1; RETURN NEW; END $$",
    "CREATE FUNCTION a() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF pg_trigger_depth() < 2 THEN "
    "UPDATE t SET k = TG_NAME || k, v = v + 1 WHERE id = coalesce(NEW.id, OLD.id); "
    "UPDATE t SET k = 'next' WHERE id = coalesce(NEW.id, OLD.id) + 1; END IF; RETURN NULL; END $$",
    "CREATE TRIGGER b BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION b()",
    "CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION a()",
    "CREATE TRIGGER z AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION a()",
)
TRIGGERED: dict[str, Write] = {
    "insert": "INSERT INTO t SELECT i, 'i', i FROM generate_series(70, 75) i",
    "update": "UPDATE t SET k = k || 'x' WHERE id BETWEEN 5 AND 12",
    "update of what is included": "UPDATE t SET v = v + 1 WHERE id BETWEEN 15 AND 22",
    "delete": "DELETE FROM t WHERE id BETWEEN 25 AND 32",
    "update on conflict": "INSERT INTO t VALUES (5, 'c', 1), (6, 'c', 1) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
    "move": "UPDATE t SET id = id + 1000 WHERE id < 9",
}

LARGE = "(SELECT string_agg(md5(i::text || t.id), '') FROM generate_series(1, 3000) i)"
WIDE: dict[str, Write] = {
    "insert with ids of the table's own": "INSERT INTO t (k, v) SELECT 'own', i::text FROM generate_series(1, 5) i",
    "insert a large value": "INSERT INTO t (k, v) VALUES ('l', repeat('large ', 100000))",
    "become large": f"UPDATE t SET v = {LARGE} WHERE id < 5",
    "stay large while others change": f"UPDATE t SET v = {LARGE} WHERE id < 5; UPDATE t SET k = k || '!' WHERE id < 9",
    "stay large while nothing changes": f"UPDATE t SET v = {LARGE} WHERE id = 1; UPDATE t SET v = v, k = k",
    "grow": f"UPDATE t SET v = {LARGE} WHERE id < 3; UPDATE t SET v = v || 'x' WHERE id = 1",
    "the generated column follows": "UPDATE t SET v = v || v WHERE id < 9",
}


@dataclass(frozen=True)
class Shape:
    """A table `t`, what refills it, and the writes that it allows."""

    ddl: tuple[str, ...]
    refill: str
    writes: Mapping[str, Write]
    definition: Mapping[str, str] = field(default_factory=dict)


REFILL = "INSERT INTO t SELECT i, nullif(i % 5, 3)::text, i FROM generate_series(1, 60) i"
SHAPES = {
    "plain": Shape(PLAIN[:1], PLAIN[1], STATEMENTS),
    "functions": Shape((PLAIN[0], *WRITING_FUNCTIONS), PLAIN[1], FUNCTIONS),
    "cascades": Shape(
        (
            "CREATE TABLE p (id int PRIMARY KEY)",
            "CREATE TABLE q (id int PRIMARY KEY)",
            "CREATE TABLE t (id int PRIMARY KEY, k text, v int, "
            "p int REFERENCES p ON DELETE CASCADE ON UPDATE CASCADE, "
            "q int REFERENCES q ON DELETE SET NULL ON UPDATE CASCADE)",
        ),
        "DELETE FROM p; DELETE FROM q; INSERT INTO p SELECT i FROM generate_series(1, 9) i; INSERT INTO q TABLE p; "
        "INSERT INTO t SELECT i, (i % 5)::text, i, 1 + i % 9, 1 + i % 7 FROM generate_series(1, 60) i",
        CASCADES,
        {"keys": "p, k", "include": "q, v"},
    ),
    "deferrable": Shape(("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, k text, v int)",), REFILL, SWAPS),
    "triggers": Shape(("CREATE TABLE t (id int PRIMARY KEY, k text, v int)", *OWN_TRIGGERS), REFILL, TRIGGERED),
    "wide": Shape(
        (
            "CREATE TABLE t (id int GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, k text, v text, "
            "n int GENERATED ALWAYS AS (length(v)) STORED)",
            "ALTER TABLE t ALTER v SET STORAGE EXTERNAL, ALTER id RESTART 1000",
        ),
        "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 60) i",
        WIDE,
        {"keys": "n, k", "include": "v"},
    ),
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_write_is_followed_in_every_phase(database: Database, dsn: str, shape: str, phase: str) -> None:
    of = SHAPES[shape]
    run_sql(dsn, *of.ddl, of.refill)
    follow(database, dsn, phase, of.writes, of.refill, **of.definition)


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
