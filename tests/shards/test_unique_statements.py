"""A unique index over shards: every statement that can bring a key, take it away, or move it about."""

from __future__ import annotations

import io
from contextlib import closing

import psycopg2
import pytest
from psycopg2 import errors

from servers.shards import Shards
from tests.shards import apart
from tests.shards.conftest import Make
from tests.shards.test_unique_attacks import enforced, holders_of, settle

# Row 5 has the key e in s0, and row 50 the key e1 in s1, and so on.
TABLE = (
    "CREATE TABLE p (k text PRIMARY KEY)",
    "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE REFERENCES p ON UPDATE CASCADE ON DELETE CASCADE, v int)",
    "INSERT INTO p SELECT chr(i) FROM generate_series(97, 122) i",
    "INSERT INTO p SELECT chr(i) || 1 FROM generate_series(97, 122) i",
    "CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF NEW.v = 77 THEN NEW.k := 'e'; END IF; RETURN NEW; END $$",
    "CREATE TRIGGER other BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION other()",
    "CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN IF NEW.v = 78 THEN UPDATE t SET k = 'e', v = 0 WHERE id = 50; END IF; RETURN NULL; END $$",
    "CREATE TRIGGER more AFTER INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION more()",
)
ROWS = "INSERT INTO t SELECT i - 96, chr(i), 0 FROM generate_series(97, 106) i"
OTHERS = "INSERT INTO t SELECT (i - 96) * 10, chr(i) || 1, 0 FROM generate_series(97, 106) i"
# Each gives a row of s1 the key e of s0.
PUT = {
    "insert": "INSERT INTO t VALUES (5, 'e', 0)",
    "insert or nothing": "INSERT INTO t VALUES (5, 'e', 0) ON CONFLICT (k) DO NOTHING",
    "insert or update": "INSERT INTO t VALUES (5, 'e', 0) ON CONFLICT (k) DO UPDATE SET v = 1",
    "update on a conflict": "INSERT INTO t VALUES (50, 'z', 0) ON CONFLICT (id) DO UPDATE SET k = 'e'",
    "update": "UPDATE t SET k = 'e' WHERE id = 50",
    "update of the primary key, too": "UPDATE t SET id = 5, k = 'e' WHERE id = 50",
    "merge": "MERGE INTO t USING (SELECT 50 AS id) s ON t.id = s.id WHEN MATCHED THEN UPDATE SET k = 'e'",
    "merge that inserts": "MERGE INTO t USING (SELECT 5 AS id) s ON t.id = s.id "
    "WHEN NOT MATCHED THEN INSERT VALUES (5, 'e', 0)",
    "with": "WITH d AS (DELETE FROM t WHERE id = 50 RETURNING id) INSERT INTO t SELECT id + 1, 'e', 0 FROM d",
    "delete, insert": "DELETE FROM t WHERE id = 50; INSERT INTO t VALUES (50, 'e', 0)",
    "a savepoint that is released": "SAVEPOINT a; INSERT INTO t VALUES (5, 'e', 0); RELEASE a",
    "beside one that isn't": "INSERT INTO t VALUES (5, 'e', 0); SAVEPOINT a; DELETE FROM t; ROLLBACK TO a",
    "only in between": "INSERT INTO t VALUES (5, 'e', 0); DELETE FROM t WHERE id = 5",
    "and many others": "INSERT INTO t SELECT i, CASE i WHEN 2500 THEN 'e' END, 0 FROM generate_series(1001, 4000) i",
    "a trigger before": "UPDATE t SET v = 77 WHERE id = 50",
    "a trigger after": "UPDATE t SET v = 78 WHERE id = 60",
    "a cascade": "DELETE FROM p WHERE k = 'e'; UPDATE p SET k = 'e' WHERE k = 'e1'",
    "a block": "DO $$ BEGIN BEGIN UPDATE t SET k = 'f' WHERE id = 50; RAISE 'x'; EXCEPTION WHEN raise_exception THEN "
    "UPDATE t SET k = 'e' WHERE id = 50; END; END $$",
    "at once": "SET CONSTRAINTS ALL IMMEDIATE; INSERT INTO t VALUES (5, 'e', 0)",
    "at once, and another": "INSERT INTO t VALUES (70000, NULL, 0); SET CONSTRAINTS ALL IMMEDIATE; "
    "INSERT INTO t VALUES (5, 'e', 0)",
    "as a replica": "SET LOCAL session_replication_role = replica; INSERT INTO t VALUES (5, 'e', 0)",
    "copy": "COPY",
}
# Each takes keys of s1 away, or moves them about there, or brings none; it is never refused.
FREE = {
    "delete": ("DELETE FROM t WHERE id = 10", "a1"),
    "update": ("UPDATE t SET k = 'q' WHERE id = 20", "b1"),
    "update to NULL": ("UPDATE t SET k = NULL WHERE id = 30", "c1"),
    "a cascade": ("DELETE FROM p WHERE k = 'd1'", "d1"),
    "a cascade of an update": ("UPDATE p SET k = 'e2' WHERE k = 'e1'", "e1"),
    "merge": ("MERGE INTO t USING (SELECT 60 AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE", "f1"),
    "in between": ("INSERT INTO t VALUES (1, 'x', 0); DELETE FROM t WHERE id = 1", "x"),
    "moved on": ("UPDATE t SET k = 'y' WHERE id = 70; UPDATE t SET k = 'z' WHERE id = 70", "y"),
    "rolled back to": ("SAVEPOINT a; INSERT INTO t VALUES (5, 'e', 0); ROLLBACK TO a; UPDATE t SET v = 3", None),
    "rolled back to, at once": (
        "SAVEPOINT a; INSERT INTO t VALUES (5, 'w', 0); SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK TO a; "
        "UPDATE t SET v = 4",
        "w",
    ),
    "rolled back": ("INSERT INTO t VALUES (5, 'v', 0); SET CONSTRAINTS ALL IMMEDIATE; ROLLBACK", "v"),
    "moved to another row": ("UPDATE t SET k = NULL WHERE id = 80; INSERT INTO t VALUES (81, 'h1', 0)", None),
    "the same key": ("UPDATE t SET k = k || '' WHERE id = 90; DELETE FROM t WHERE id = 100", "j1"),
}  # fmt: skip
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


@pytest.fixture
def made(contrib_shards: Make) -> Shards:
    made = contrib_shards(2, *TABLE)
    made.run(ROWS, only="s0")
    made.run(OTHERS, only="s1")
    return made


def run(made: Shards, shard: str, level: str, statement: str) -> None:
    with closing(psycopg2.connect(made.dsns[shard])) as connection, connection.cursor() as cursor:
        connection.set_session(isolation_level=level)
        if statement == "COPY":
            cursor.copy_expert("COPY t FROM STDIN", io.StringIO("5\te\t0\n"))
        else:
            cursor.execute(statement)
        connection.commit()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("level", LEVELS)
def test_no_statement_brings_a_key_of_another_shard(made: Shards, level: str) -> None:
    generation_id = enforced(made)
    before = made.ask("SELECT * FROM t ORDER BY 1", shard="s1")
    said = {}
    for name, statement in PUT.items():
        try:
            run(made, "s1", level, statement)
        except errors.UniqueViolation as error:
            said[name] = error.diag.message_detail
    assert said == dict.fromkeys(PUT, "Key (k)=(e) already exists in shard s0.")
    assert made.ask("SELECT * FROM t ORDER BY 1", shard="s1") == before
    settle(made, generation_id)
    assert holders_of(made, generation_id) == ["s0"] * 10 + ["s1"] * 10


@pytest.mark.sample(0)
@pytest.mark.parametrize("level", LEVELS)
def test_whatever_frees_a_key_lets_another_shard_take_it(made: Shards, level: str) -> None:
    generation_id = enforced(made)
    for statement, _ in FREE.values():
        run(made, "s1", level, statement)
    settle(made, generation_id)
    made.run("DELETE FROM t", only="s0")
    settle(made, generation_id)
    freed = [key for _, key in FREE.values() if key is not None]
    for number, key in enumerate(freed):
        run(made, "s0", level, f"INSERT INTO t VALUES ({number}, '{key}', 0)")
    settle(made, generation_id)
    apart.assert_exact(made, generation_id)
    keys = [(shard, key) for shard in made.names for (key,) in made.ask("SELECT k FROM t", shard=shard) if key]
    assert holders_of(made, generation_id) == sorted(shard for shard, _ in keys)
    assert len({key for _, key in keys}) == len(keys)
    assert made.ask("SELECT roir.unique_problem(%s)", generation_id) == [(None,)]


MOVES = {
    "swap": "UPDATE t x SET n = y.n FROM t y WHERE (x.id, y.id) IN ((1, 2), (2, 1))",
    "shift": "UPDATE t SET n = n + 1",
    "shift back": "UPDATE t SET n = n - 1",
    "reverse": "UPDATE t SET n = 21 - n",
    "swap by a third": "UPDATE t SET n = -1 WHERE n = 1; UPDATE t SET n = 1 WHERE n = 2; "
    "UPDATE t SET n = 2 WHERE n = -1",
    "rows change places": "UPDATE t SET id = CASE id WHEN 3 THEN 4 ELSE 3 END WHERE id IN (3, 4)",
    "deferred": "SET CONSTRAINTS ALL DEFERRED; UPDATE t SET n = 7 WHERE n = 8; "
    "UPDATE t SET n = 8 WHERE id = (SELECT min(id) FROM t WHERE n = 7)",
}


@pytest.mark.by_hand("sweeps")
def test_keys_move_about_in_their_shard(contrib_shards: Make) -> None:
    """As the shard's own deferrable constraint allows; the key is composite, with a NULL here and there."""
    made = contrib_shards(
        2,
        "CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, s text, n int, v int, "
        "UNIQUE (s, n) DEFERRABLE INITIALLY IMMEDIATE)",
        "INSERT INTO t SELECT i, CASE WHEN i % 5 > 0 THEN '{shard}' END, i, 0 FROM generate_series(1, 20) i",
    )
    generation_id = enforced(made, keys="s,n")
    for level in LEVELS:
        for statement in MOVES.values():
            for shard in made.names:
                run(made, shard, level, statement)
        apart.ship_all(made, generation_id)
    with pytest.raises(errors.UniqueViolation):
        run(made, "s1", LEVELS[0], "UPDATE t SET s = 's0' WHERE id = 1")
    run(made, "s1", LEVELS[0], "UPDATE t SET s = NULL")
    settle(made, generation_id)
    run(made, "s0", LEVELS[0], "UPDATE t SET s = 's1' WHERE s IS NOT NULL")
    settle(made, generation_id)
    apart.assert_exact(made, generation_id)
    assert holders_of(made, generation_id) == ["s0"] * 16


@pytest.mark.by_hand("sweeps")
def test_a_prepared_transaction_is_refused(contrib_shards: Make) -> None:
    made = contrib_shards(2, "CREATE TABLE t (id int PRIMARY KEY, k text UNIQUE, v int)")
    enforced(made)
    with pytest.raises(errors.FeatureNotSupported):
        run(made, "s0", LEVELS[0], "INSERT INTO t VALUES (1, 'a', 1); PREPARE TRANSACTION 'x'")
    run(made, "s1", LEVELS[0], "INSERT INTO t VALUES (1, 'a', 1)")
