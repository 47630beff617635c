"""Keys that are expressions, and partial indexes, against PostgreSQL's own over a table without partitions."""

from __future__ import annotations

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

KEYS, WHERE = "lower(email) AS address", "deleted_at IS NULL"


def make_users(dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE users (id int, joined date, email text, deleted_at timestamptz, v int, PRIMARY KEY (id, joined)) "
        "PARTITION BY RANGE (joined)",
        "CREATE TABLE users_1 PARTITION OF users FOR VALUES FROM ('2025-01-01') TO ('2025-07-01')",
        "CREATE TABLE users_2 (v int, deleted_at timestamptz, email text, joined date NOT NULL, id int NOT NULL)",
        "ALTER TABLE users ATTACH PARTITION users_2 FOR VALUES FROM ('2025-07-01') TO ('2026-01-01')",
        "INSERT INTO users SELECT i, date '2025-01-01' + i, format('User%s@x', i), "
        "CASE WHEN i % 3 = 0 THEN now() END, i FROM generate_series(1, 200) i",
        "CREATE TABLE twin (LIKE users)",
        "INSERT INTO twin SELECT * FROM users",
        "CREATE UNIQUE INDEX twin_key ON twin (lower(email)) WHERE deleted_at IS NULL",
        "ANALYZE users",
    )


def entries(dsn: str) -> tuple[list, list]:
    user = steps.session(dsn)
    ours = sql(user, "SELECT address, id, joined FROM ix ORDER BY 1, 2")
    theirs = sql(user, "SELECT lower(email), id, joined FROM users WHERE deleted_at IS NULL ORDER BY 1, 2")
    return ours, theirs


@pytest.mark.parametrize("unique", [False, True])
def test_a_partial_index_of_an_expression_is_exact(database: Database, dsn: str, unique: bool) -> None:
    make_users(dsn)
    writes = [
        "UPDATE users SET deleted_at = now() WHERE id = {n}",
        "UPDATE users SET deleted_at = NULL WHERE id = {n} + 2",
        "UPDATE users SET email = upper(email) || '{n}' WHERE id = {n} + 4",
        "DELETE FROM users WHERE id = {n} + 5",
        "INSERT INTO users SELECT 1000 + {n}, '2025-03-01', 'New{n}@x', NULL, 1",
        "INSERT INTO users SELECT 2000 + {n}, '2025-09-01', 'New{n}@x', now(), 1",
        "UPDATE users SET joined = joined + 150, email = 'moved' || id WHERE id = {n} + 7 AND joined < '2025-06-01'",
        "UPDATE users SET v = v + 1",
        "UPDATE users SET joined = joined - 100 WHERE id = {n} + 9 AND joined > '2025-06-01'",
    ]
    moments = steps.moments(database, "ix", "users", KEYS, "v", where=WHERE, unique=unique)
    for n, _moment in enumerate(moments):
        for write in writes:
            run_sql(dsn, write.format(n=n * 11 + 1))
    ours, theirs = entries(dsn)
    assert ours == theirs
    steps.make_index(database, "ix", None, None)
    ours, theirs = entries(dsn)
    assert ours == theirs
