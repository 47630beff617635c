"""Users' statements between all steps of a compaction: the index is exact at each of them, and no statement fails."""

from __future__ import annotations

import io
import random
from itertools import count
from typing import Any

import psycopg2
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.compacting import act, begin, is_right, small, stages
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)

ROWS = 240
# {n} is the number of the step: each statement finds rows of its own, in every segment.
STATEMENTS = {
    "insert": "INSERT INTO t SELECT 1000 * {n} + i, (i % 6)::text, i, 'new' FROM generate_series(1, 12) i",
    "update of the key": "UPDATE t SET k = ((k::int + 2) % 5)::text WHERE id % 29 = {n}",
    "update of the key to NULL and back": "UPDATE t SET k = CASE WHEN k IS NULL THEN '3' END WHERE id % 23 = {n}",
    "update of the primary key": "UPDATE t SET id = -id WHERE id % 29 = {n}",
    "update of what is included": "UPDATE t SET w = w || '.' WHERE id % 13 = {n} % 13",
    "update of nothing": "UPDATE t SET k = k",
    "delete": "DELETE FROM t WHERE id % 31 = {n}",
    "delete and insert": "WITH d AS (DELETE FROM t WHERE id % 31 = {n} RETURNING *) "
    "INSERT INTO t SELECT -id, k, v, w FROM d",
    "delete, then the same again": "BEGIN; CREATE TEMP TABLE d ON COMMIT DROP AS SELECT * FROM t WHERE id % 19 = {n}; "
    "DELETE FROM t WHERE id % 19 = {n}; INSERT INTO t SELECT * FROM d; COMMIT",
    "upsert": "INSERT INTO t SELECT id, '1', v + 1, 'up' FROM t WHERE id % 17 = {n} "
    "ON CONFLICT (id) DO UPDATE SET k = EXCLUDED.k, w = 'upserted'",
    "merge": "MERGE INTO t USING (SELECT i AS id FROM generate_series({n}, 300, 40) i) s ON s.id = t.id "
    "WHEN MATCHED AND t.id % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET k = '4' "
    "WHEN NOT MATCHED THEN INSERT VALUES (s.id, '0', 1, 'merged')",
    "savepoint": "BEGIN; UPDATE t SET k = '0' WHERE id % 37 = {n}; SAVEPOINT s; DELETE FROM t WHERE id % 7 = 1; "
    "UPDATE t SET k = '9'; ROLLBACK TO s; INSERT INTO t VALUES (5000 + {n}, '2', 2, 's'); COMMIT",
    "rollback": "BEGIN; UPDATE t SET k = '7'; DELETE FROM t; ROLLBACK",
    "truncate that is rolled back": "BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, '1', 1, 'x'); ROLLBACK",
    "swap of keys": "UPDATE t a SET k = b.k, v = b.v FROM t b "
    "WHERE b.id = a.id + (CASE WHEN a.id % 2 = 0 THEN 1 ELSE -1 END) "
    "AND a.id BETWEEN 10 * {n} AND 10 * {n} + 9",
    "replica": "BEGIN; SET LOCAL session_replication_role = replica; UPDATE t SET k = '1' WHERE id % 29 = {n}; "
    "DELETE FROM t WHERE id % 43 = {n}; COMMIT",
    "kept plans": "SELECT kept({n})",
    "copy": "COPY",
}
KEPT = """
CREATE FUNCTION kept(n int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 8 LOOP
        UPDATE t SET k = ((k::int + 1) % 5)::text WHERE id = n + 29 * i;
        DELETE FROM t WHERE id = 31 * i + n;
        INSERT INTO t VALUES (7000 + 100 * n + i, '2', i, 'kept');
    END LOOP;
END $$
"""


def scene(dsn: str, **options: Any) -> Database:
    """Creates table `t`, with NULLs in its key, and its index."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int, w text)",
        "INSERT INTO t SELECT i, CASE WHEN i % 12 <> 0 THEN (i % 5)::text END, i, 'w' "
        f"FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
        KEPT,
    )
    database = small(dsn)
    steps.make_index(database, keys="k,v", include="w", segments=3, **options)
    return database


@pytest.mark.sample(0)
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_at_every_step(dsn: str, name: str) -> None:
    """One session sends the statements: its plans are of the earlier segments."""
    database = scene(dsn)
    user = session(dsn)
    user.autocommit = True
    run = begin(database, act("merge", 1, 2), act("rewrite", 0), act("split", 3, parts=2))
    for n, _ in enumerate(stages(database, run), 1):
        if name == "copy":
            copy(user, n)
        else:
            sql(user, STATEMENTS[name].replace("{n}", str(n)))
        steps.assert_exact(database)
    is_right(database)


def copy(user: psycopg2.extensions.connection, n: int) -> None:
    """COPY FROM of rows of all segments."""
    rows = io.StringIO("".join(f"{1000 * n + i}\t{i % 6}\t{i}\tcopied\n" for i in range(12)))
    with user.cursor() as cursor:
        cursor.copy_from(rows, "t")


@pytest.mark.parametrize("seed", range(40))
def test_random_transactions_beside_a_compaction(dsn: str, seed: int) -> None:
    """Transactions of each isolation level, open across steps. A transaction that holds a step up is ended.

    A transaction fails with 40001 only if its snapshot is older than a swap.
    """
    chance = random.Random(seed)
    print(f"seed {seed}")
    unique = chance.choice([None, False, True]) if seed % 2 else None
    database = scene(dsn) if unique is None else unique_scene(dsn, nulls_not_distinct=unique)
    everybody = Users(dsn, chance, unique is not None)
    actions = [act("merge", 1, 2), act("rewrite", 0), act("split", 3, parts=2)]
    chance.shuffle(actions)
    run = begin(database, *actions)
    for _ in stages(database, run):
        for _ in range(chance.randrange(3)):
            everybody.do_something()
        if everybody.is_in_the_way():
            everybody.end_one()
        if chance.random() < 0.3:
            steps.assert_exact(database)
    everybody.end()
    is_right(database)


def unique_scene(dsn: str, **options: Any) -> Database:
    """As `scene`, with a unique index on the key `k` alone; NULLs are one key, or not."""
    nulls = "CASE WHEN i % 12 <> 0 THEN i END" if not options["nulls_not_distinct"] else "NULLIF(i, 7)"
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v int, w text)",
        f"INSERT INTO t SELECT i, {nulls}, i, 'w' FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    database = small(dsn)
    steps.make_index(database, keys="k", include="w", segments=3, unique=True, **options)
    return database


class Users:
    """Sessions that write to rows of their own, so that they don't wait for each other."""

    LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")

    def __init__(self, dsn: str, chance: random.Random, unique: bool) -> None:
        self.chance = chance
        self.unique = unique
        self.sessions = [session(dsn, level) for level in self.LEVELS]
        self.open = [False] * len(self.sessions)
        self.new = count(10_000)

    def do_something(self) -> None:
        """Lets one session send a statement, or end its transaction."""
        who = self.chance.randrange(len(self.sessions))
        if self.open[who] and self.chance.random() < 0.4:
            self.finish(who)
            return
        self.open[who] = True
        self.send(who, self.chance.choice([self.read, self.write, self.write])(who))

    def read(self, who: int) -> str:
        """SQL that compares index and table in one snapshot, unless the reader is refused."""
        return (
            "SELECT (SELECT count(*) FROM (SELECT k, id, w FROM ix EXCEPT ALL SELECT k, id, w FROM t) x)"
            " + (SELECT count(*) FROM (SELECT k, id, w FROM t EXCEPT ALL SELECT k, id, w FROM ix) x)"
        )

    def write(self, who: int) -> str:
        """A random write to the session's own rows: every third one."""
        mine = f"id % 3 = {who} AND id % 20 = {self.chance.randrange(20)}"
        new = next(self.new) * 3 + who
        # A unique key gets new values, or a shift or swap among its own.
        key = f"id + 40000 * {new}" if self.unique else "((k::int + 1) % 5)::text"
        value = str(new) if self.unique else f"'{self.chance.randrange(6)}'"
        return self.chance.choice(
            [
                f"UPDATE t SET k = {key} WHERE {mine}",
                f"UPDATE t SET k = NULL WHERE {mine} AND id % 7 = 1"
                if not self.unique
                else f"UPDATE t SET k = -k WHERE {mine}",
                f"UPDATE t SET w = w || '.' WHERE {mine}",
                f"DELETE FROM t WHERE {mine}",
                f"INSERT INTO t VALUES ({new}, {value}, {new}, 'new')",
                f"WITH d AS (DELETE FROM t WHERE {mine} RETURNING *) SELECT count(*) FROM d",
                f"UPDATE t a SET k = b.k FROM t b WHERE a.id % 3 = {who} AND a.id % 20 = {self.chance.randrange(20)} "
                "AND b.id = a.id + 3"
                if not self.unique
                else f"UPDATE t a SET k = CASE a.id WHEN {who + 30} THEN y.k ELSE x.k END FROM t x, t y "
                f"WHERE x.id = {who + 30} AND y.id = {who + 33} AND a.id IN (x.id, y.id)",
            ]
        )

    def send(self, who: int, statement: str) -> None:
        """Sends a statement, which may be refused by 40001."""
        try:
            rows = sql(self.sessions[who], statement)
        except psycopg2.errors.SerializationFailure:
            assert who > 0, statement
            self.sessions[who].rollback()
            self.open[who] = False
            return
        if "EXCEPT ALL" in statement:
            assert rows == [(0,)], (self.LEVELS[who], statement)

    def finish(self, who: int) -> None:
        """Ends a session's transaction, mostly by COMMIT."""
        try:
            (self.sessions[who].commit if self.chance.random() < 0.8 else self.sessions[who].rollback)()
        except psycopg2.errors.SerializationFailure:
            assert who == 2
            self.sessions[who].rollback()
        self.open[who] = False

    def is_in_the_way(self) -> bool:
        """True more often than not if a transaction is open, so that the swap gets its locks."""
        return any(self.open) and self.chance.random() < 0.6

    def end_one(self) -> None:
        """Ends one of the open transactions, chosen by chance."""
        self.finish(self.chance.choice([who for who, is_open in enumerate(self.open) if is_open]))

    def end(self) -> None:
        """Ends all transactions and sessions."""
        for who, is_open in enumerate(self.open):
            if is_open:
                self.finish(who)
            self.sessions[who].close()
