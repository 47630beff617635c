"""A write to one leaf of a partitioned source locks the leaves that it locks without an index, and waits for no other.

Each statement runs ten times in one session: from the sixth on PostgreSQL may use a generic plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2.errors
import psycopg2.extensions
import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import stages, steps
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(1)

TIMES = 10
TWIN = "twin"
COLUMNS = "(d int, id int, k text, v int, PRIMARY KEY (d, id))"
LAYOUTS = {
    "ranges": [
        f"CREATE TABLE {{t}} {COLUMNS} PARTITION BY RANGE (d)",
        *(
            f"CREATE TABLE {{t}}_{n} PARTITION OF {{t}} FOR VALUES FROM ({lower}) TO ({lower + 10})"
            for n, lower in enumerate(range(0, 40, 10))
        ),
        "CREATE TABLE {t}_rest PARTITION OF {t} DEFAULT",
    ],
    "hashes": [
        f"CREATE TABLE {{t}} {COLUMNS} PARTITION BY HASH (d)",
        *(f"CREATE TABLE {{t}}_{n} PARTITION OF {{t}} FOR VALUES WITH (MODULUS 4, REMAINDER {n})" for n in range(4)),
    ],
    "two levels": [
        f"CREATE TABLE {{t}} {COLUMNS} PARTITION BY LIST (d)",
        "CREATE TABLE {t}_0 PARTITION OF {t} FOR VALUES IN (0, 1, 2)",
        "CREATE TABLE {t}_branch PARTITION OF {t} DEFAULT PARTITION BY RANGE (id)",
        *(
            f"CREATE TABLE {{t}}_{n} PARTITION OF {{t}}_branch FOR VALUES FROM ({lower}) TO ({upper})"
            for n, (lower, upper) in enumerate([("minvalue", 300), (300, "maxvalue")], 1)
        ),
    ],
}
_OWN = "d = {d} AND id = {id}"
# Statements on one row of one leaf. `new` is the id of a row that isn't there and belongs into the same leaf.
STATEMENTS = {
    "insert": "INSERT INTO {t} VALUES ({d}, {new}, 'new', 1)",
    "insert into the leaf": "INSERT INTO {leaf} VALUES ({d}, {new}, 'new', 1)",
    "delete": f"DELETE FROM {{t}} WHERE {_OWN}",
    "delete from the leaf": f"DELETE FROM {{leaf}} WHERE {_OWN}",
    "update what is included": f"UPDATE {{t}} SET v = v + 1 WHERE {_OWN}",
    "move the key": f"UPDATE {{t}} SET k = 'new' WHERE {_OWN}",
    "move the key, in the leaf": f"UPDATE {{leaf}} SET k = 'new' WHERE {_OWN}",
    "move the primary key": f"UPDATE {{t}} SET id = {{new}} WHERE {_OWN}",
    "move the primary key, in the leaf": f"UPDATE {{leaf}} SET id = {{new}} WHERE {_OWN}",
    "upsert what is there": (
        "INSERT INTO {t} VALUES ({d}, {id}, 'new', 1) ON CONFLICT (d, id) DO UPDATE SET k = excluded.k"
    ),
    "upsert twice": (
        "INSERT INTO {t} VALUES ({d}, {new}, 'new', 1) ON CONFLICT (d, id) DO UPDATE SET k = excluded.k; "
        "INSERT INTO {t} VALUES ({d}, {new}, 'new', 2) ON CONFLICT (d, id) DO UPDATE SET v = excluded.v"
    ),
    "insert or nothing": "INSERT INTO {t} VALUES ({d}, {new}, 'new', 1) ON CONFLICT DO NOTHING",
    "merge": (
        "MERGE INTO {t} USING (SELECT) n ON d = {d} AND id = {id} "
        "WHEN MATCHED THEN UPDATE SET v = -1 WHEN NOT MATCHED THEN INSERT VALUES ({d}, {id}, 'new', 1)"
    ),
    "lock, then update": f"SELECT FROM {{t}} WHERE {_OWN} FOR UPDATE; UPDATE {{t}} SET k = 'new' WHERE {_OWN}",
    "update twice": f"UPDATE {{t}} SET k = 'new' WHERE {_OWN}; UPDATE {{t}} SET k = 'newer' WHERE {_OWN}",
    "delete in vain": f"SAVEPOINT s; DELETE FROM {{t}} WHERE {_OWN}; ROLLBACK TO s; DELETE FROM {{t}} WHERE {_OWN}",
}
# The locked tables, and the tables whose indexes are locked.
LOCKED = """
SELECT DISTINCT c.relname FROM pg_locks l LEFT JOIN pg_index i ON i.indexrelid = l.relation
  JOIN pg_class c ON c.oid = coalesce(i.indrelid, l.relation)
 WHERE l.pid = pg_backend_pid() AND l.locktype = 'relation' AND c.relkind = 'r' AND c.relname ~ %s
"""


class Leaf:
    """One leaf of the source or its twin, and the rows that statements write."""

    def __init__(self, user: psycopg2.extensions.connection, table: str) -> None:
        self.user = user
        self.table = table
        self.name = f"{table}_1"
        self.rows = sql(user, f"SELECT d, id FROM {self.name} ORDER BY id, d LIMIT {TIMES}")
        assert len(self.rows) == TIMES

    def write(self, statement: str) -> Iterator[None]:
        """Runs the statement for one row after the other."""
        for d, number in self.rows:
            # The ids are still those of the leaf of two levels, below 300.
            sql(self.user, statement.format(t=self.table, leaf=self.name, d=d, id=number, new=-number))
            yield

    def locked(self, statement: str) -> set[str]:
        """The leaves that ten runs of this statement lock, by their names without the table's. Rolls back."""
        for _ in self.write(statement):
            pass
        names = {name.removeprefix(self.table) for (name,) in sql(self.user, LOCKED, f"^{self.table}_")}
        self.user.rollback()
        return names


@pytest.fixture(params=LAYOUTS)
def layout(dsn: str, request: pytest.FixtureRequest) -> None:
    for table in ("t", TWIN):
        run_sql(
            dsn,
            *(statement.format(t=table) for statement in LAYOUTS[request.param]),
            f"INSERT INTO {table} SELECT i % 50, i, (i % 5)::text, i FROM generate_series(1, 500) i",
            f"ANALYZE {table}",
        )


@pytest.mark.sample(0)
@pytest.mark.usefixtures("layout")
def test_a_write_locks_the_leaves_that_it_locks_without_the_index(database: Database, dsn: str) -> None:
    """Found: a write to one leaf locked all leaves, and waited for a rewrite of one. It holds: it locks what it locks
    without the index.
    """
    strange: list[str] = []

    def write(mode: str) -> None:
        for name, statement in STATEMENTS.items():
            users = [session(dsn) for _ in range(2)]
            ours, theirs = (Leaf(user, table) for user, table in zip(users, ("t", TWIN), strict=True))
            here, there = ours.locked(statement), theirs.locked(statement)
            assert there
            if here != there:
                strange.append(f"{name} in {mode} mode: {sorted(here)}, without the index {sorted(there)}")
            for user in users:
                user.close()

    stages.through_modes(database, write, include="v")
    if strange:
        pytest.fail("\n".join(strange))


@pytest.mark.sample(0)
@pytest.mark.usefixtures("layout")
def test_a_write_waits_for_no_sibling_leaf(database: Database, dsn: str) -> None:
    """A rewrite holds all other leaves. A write waits only if it also waits without the index."""
    waited: list[str] = []

    def waits(user: psycopg2.extensions.connection, leaf: Leaf, statement: str) -> bool:
        # This limit measures no wait; without it a failure would hang.
        sql(user, "SET lock_timeout = '1s'")
        try:
            for _ in leaf.write(statement):
                user.commit()
        except psycopg2.errors.LockNotAvailable:
            user.rollback()
            return True
        return False

    def write(mode: str) -> None:
        user, holder = session(dsn), session(dsn)
        leaves = [Leaf(user, table) for table in ("t", TWIN)]
        user.commit()
        siblings = sql(
            holder,
            "SELECT inhrelid::regclass::text FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid "
            "WHERE relname ~ '^(t|twin)_' AND c.relkind = 'r' AND relname !~ '_1$'",
        )
        sql(holder, f"LOCK TABLE {', '.join(name for (name,) in siblings)} IN ACCESS EXCLUSIVE MODE")
        for name in ("move the key", "move the primary key", "upsert twice", "delete", "insert"):
            here, there = (waits(user, leaf, STATEMENTS[name]) for leaf in leaves)
            if here != there:
                waited.append(f"{name} in {mode} mode")
            # Restore the rows for the next statement.
            holder.rollback()
            for leaf in leaves:
                sql(user, f"DELETE FROM {leaf.name} WHERE id < 0")
                for d, number in leaf.rows:
                    sql(user, f"INSERT INTO {leaf.name} VALUES ({d}, {number}, '0', 0) ON CONFLICT DO NOTHING")
            user.commit()
            sql(holder, f"LOCK TABLE {', '.join(name for (name,) in siblings)} IN ACCESS EXCLUSIVE MODE")
        user.close()
        holder.close()

    stages.through_modes(database, write, include="v")
    if waited:
        pytest.fail("waits for a sibling: " + "; ".join(waited))
    steps.assert_exact(database)
