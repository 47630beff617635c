"""Every way in which PostgreSQL writes rows, by kind of table `t (id, k, v)`. `test_dml.py` plays them."""

from __future__ import annotations

import io

import psycopg2
import psycopg2.extensions

from tests.engine.stages import Write
from tests.engine.steps import sql


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


def since(version: int, statement: str) -> Write:
    """A write that older servers don't have."""

    def write(user: psycopg2.extensions.connection) -> None:
        if user.server_version // 10_000 >= version:
            sql(user, statement)

    return write


def copy_binary(user: psycopg2.extensions.connection) -> None:
    """Copies rows out, changes them in the table, and copies them in again as they were."""
    rows = io.BytesIO()
    with user.cursor() as cursor:
        cursor.copy_expert("COPY (SELECT id, k, v FROM t WHERE id < 20) TO STDOUT (FORMAT binary)", rows)
        cursor.execute("DELETE FROM t WHERE id < 20; UPDATE t SET k = 'other' WHERE id < 30")
        rows.seek(0)
        cursor.copy_expert("COPY t (id, k, v) FROM STDIN (FORMAT binary)", rows)


def copied(table: str, first: int, last: int, options: str = "") -> str:
    """A COPY of rows from a program's output."""
    lines = f"'seq -f \"%.0f,copied,1\" {first} {last}'"
    return f"COPY {table} (id, k, v) FROM PROGRAM {lines} (FORMAT csv{options})"


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
    "copy, binary": copy_binary,
    "copy, frozen": f"UPDATE t SET k = 'w'; TRUNCATE t; {copied('t', 1, 70, ', FREEZE')}; DELETE FROM t WHERE id = 3",
    "copy, frozen, and written again": (
        f"TRUNCATE t; {copied('t', 1, 70, ', FREEZE')}; UPDATE t SET k = 'after' WHERE id < 9; "
        "UPDATE t SET id = id + 500 WHERE id < 5; SELECT FROM t WHERE id = 9 FOR UPDATE; UPDATE t SET v = 0"
    ),
    "copy that ignores errors": since(
        17,
        "COPY t (id, k, v) FROM PROGRAM 'printf \"201,a,1\\\\n202,b,x\\\\n203,c,3\\\\n\"' "
        "(FORMAT csv, ON_ERROR ignore)",
    ),
    "merge by source": since(
        17,
        "MERGE INTO t USING (SELECT i FROM generate_series(50, 70) i) s ON t.id = s.i "
        "WHEN NOT MATCHED BY SOURCE AND t.id % 2 = 0 THEN DELETE "
        "WHEN NOT MATCHED BY SOURCE THEN UPDATE SET k = 'alone', v = -1 "
        "WHEN NOT MATCHED THEN INSERT VALUES (s.i, 'n', 0) RETURNING merge_action(), t.id",
    ),
    "what a merge returns is written again": since(
        17,
        "WITH m AS (MERGE INTO t USING (SELECT i FROM generate_series(50, 70) i) s ON t.id = s.i "
        "WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.i, 'n', 0) RETURNING t.id, t.k, t.v) "
        "INSERT INTO t SELECT id + 700, k, v FROM m",
    ),
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
# Functions whose events come before those of the statement that calls them, though no trigger is involved.
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

# Writes to a partitioned table, whose leaves t1 and t2 meet at 30.
ROUTED: dict[str, Write] = {
    "copy into the root": copied("t", 61, 90),
    "copy into a leaf": "DELETE FROM t2; " + copied("t2", 40, 80),
    "copy into a leaf, frozen": "TRUNCATE t2; " + copied("t2", 40, 80, ", FREEZE"),
    "copy into both leaves, frozen, and written again": (
        f"TRUNCATE t; {copied('t1', 1, 20, ', FREEZE')}; {copied('t2', 31, 55, ', FREEZE')}; "
        "UPDATE t SET id = 61 - id WHERE id < 5; DELETE FROM t WHERE id = 7"
    ),
    "move between leaves": "UPDATE t SET id = id + 100 WHERE id < 10; UPDATE t SET id = -id WHERE id BETWEEN 40 AND 50",
    "move by a merge": (
        "MERGE INTO t USING (SELECT i FROM generate_series(1, 70) i) s ON t.id = s.i "
        "WHEN MATCHED AND t.id < 10 THEN UPDATE SET id = t.id + 200, k = 'm' WHEN MATCHED AND t.id < 15 THEN DELETE "
        "WHEN MATCHED AND t.id > 50 THEN UPDATE SET id = t.id - 100 WHEN NOT MATCHED THEN INSERT VALUES (s.i, 'new', 0)"
    ),
    "merge into a leaf": (
        "MERGE INTO t1 USING (SELECT i FROM generate_series(20, 29) i) s ON t1.id = s.i "
        "WHEN MATCHED AND t1.id < 25 THEN DELETE WHEN MATCHED THEN UPDATE SET k = 'leaf' "
        "WHEN NOT MATCHED THEN INSERT VALUES (s.i, 'new', 0)"
    ),
    "update on conflict in a leaf": (
        "INSERT INTO t2 (id, k, v) VALUES (31, 'c', 0), (131, 'n', 0) "
        "ON CONFLICT (id) DO UPDATE SET k = excluded.k, v = t2.v + 1"
    ),
    "update on conflict, and move": (
        "INSERT INTO t VALUES (5, 'c', 0), (55, 'c', 0) ON CONFLICT (id) DO UPDATE SET k = 'c'; "
        "UPDATE t SET id = id + 300 WHERE k = 'c'"
    ),
    "a row that leaves and one that takes its place": (
        "WITH gone AS (UPDATE t SET id = id + 400 WHERE id < 9 RETURNING *) "
        "INSERT INTO t SELECT id - 400, 'in', 0 FROM gone"
    ),
    "by a cursor over the root": (
        "DECLARE c CURSOR FOR SELECT * FROM t WHERE id % 30 = 3 ORDER BY id FOR UPDATE; FETCH c; "
        "UPDATE t SET k = 'c' WHERE CURRENT OF c; FETCH c; UPDATE t SET id = id + 990 WHERE CURRENT OF c"
    ),
    "locked first, then moved": "SELECT FROM t WHERE id < 9 FOR UPDATE; UPDATE t SET id = id + 600 WHERE id < 5",
    "truncate a leaf": "UPDATE t SET k = 'w'; TRUNCATE t1; INSERT INTO t VALUES (1, 'after', 1)",
    "truncate a leaf, in vain": "SAVEPOINT s; TRUNCATE t1; ROLLBACK TO s; UPDATE t SET id = id + 800 WHERE id < 5",
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
