"""A foreign key to a unique index ends each statement as PostgreSQL's own key to an unpartitioned table does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from airflow_roir.engine.database import Database
from tests.conftest import COPIED, database_dsn, run_sql
from tests.engine import referring
from tests.engine.referring import OURS, TWIN, Side

MOVE = "UPDATE {o} SET created = created + 365 WHERE id IN (1, 2, 3) AND created < '2025-01-01'"
STATEMENTS: dict[str, tuple[str, ...]] = {
    "insert": ("INSERT INTO {p} (id, order_id) VALUES (10, 5)",),
    "insert without a key": ("INSERT INTO {p} (id, order_id) VALUES (10, NULL)",),
    "insert an orphan": ("INSERT INTO {p} (id, order_id) VALUES (10, 50)",),
    "insert three, one an orphan": ("INSERT INTO {p} (id, order_id) VALUES (10, 5), (11, 51), (12, 6)",),
    "copy": ("COPY {p} (id, order_id, v) FROM PROGRAM 'echo 10,6,1' (FORMAT csv)",),
    "copy an orphan": ("COPY {p} (id, order_id, v) FROM PROGRAM 'echo 10,60,1' (FORMAT csv)",),
    "merge": (
        "MERGE INTO {p} USING (VALUES (1, 6), (10, 5)) s (i, o) ON id = s.i "
        "WHEN MATCHED THEN UPDATE SET order_id = s.o WHEN NOT MATCHED THEN INSERT (id, order_id) VALUES (s.i, s.o)",
    ),
    "merge an orphan": (
        "MERGE INTO {p} USING (VALUES (1, 60)) s (i, o) ON id = s.i WHEN MATCHED THEN UPDATE SET order_id = s.o",
    ),
    "update": ("UPDATE {p} SET order_id = 5 WHERE id = 1",),
    "update to an orphan": ("UPDATE {p} SET order_id = 50 WHERE id = 1",),
    "update to no key": ("UPDATE {p} SET order_id = NULL WHERE id = 1",),
    "update from no key": ("UPDATE {p} SET order_id = 1 WHERE id = 5",),
    "update another column": ("UPDATE {p} SET v = v + 1",),
    "update the primary key": ("UPDATE {p} SET id = id + 100",),
    "update twice": ("UPDATE {p} SET order_id = 50 WHERE id = 1", "UPDATE {p} SET order_id = 5 WHERE id = 1"),
    "upsert": (
        "INSERT INTO {p} (id, order_id) VALUES (1, 6) ON CONFLICT (id) DO UPDATE SET order_id = excluded.order_id",
    ),
    "upsert an orphan": (
        "INSERT INTO {p} (id, order_id) VALUES (1, 60) ON CONFLICT (id) DO UPDATE SET order_id = excluded.order_id",
    ),
    "parent in the same statement": (
        "WITH o AS (INSERT INTO {o} VALUES (20, '2024-02-02', 0)) INSERT INTO {p} (id, order_id) VALUES (10, 20)",
    ),
    "child in the parent's statement": (
        "WITH p AS (INSERT INTO {p} (id, order_id) VALUES (10, 20)) INSERT INTO {o} VALUES (20, '2024-02-02', 0)",
    ),
    "parent gone in the same statement": (
        "WITH o AS (DELETE FROM {o} WHERE id = 5) INSERT INTO {p} (id, order_id) VALUES (10, 5)",
    ),
    "parent before": ("INSERT INTO {o} VALUES (20, '2024-02-02', 0)", "INSERT INTO {p} (id, order_id) VALUES (10, 20)"),
    "parent after": ("INSERT INTO {p} (id, order_id) VALUES (10, 20)", "INSERT INTO {o} VALUES (20, '2024-02-02', 0)"),
    "parent after, child changed": (
        "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
        "UPDATE {p} SET v = 7 WHERE id = 10",
        "UPDATE {p} SET id = 11 WHERE id = 10",
        "INSERT INTO {o} VALUES (20, '2024-02-02', 0)",
    ),
    "orphan, changed": (
        "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
        "UPDATE {p} SET v = 7 WHERE id = 10",
        "UPDATE {p} SET id = 11 WHERE id = 10",
    ),
    "orphan, deleted": ("INSERT INTO {p} (id, order_id) VALUES (10, 20)", "DELETE FROM {p} WHERE id = 10"),
    "orphan, repaired": (
        "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
        "UPDATE {p} SET order_id = NULL WHERE id = 10",
    ),
    "orphan of a savepoint": (
        "SAVEPOINT s",
        "INSERT INTO {p} (id, order_id) VALUES (10, 5)",
        "ROLLBACK TO s",
        "INSERT INTO {p} (id, order_id) VALUES (10, 6)",
    ),
    "orphan until the constraints are set": (
        "INSERT INTO {p} (id, order_id) VALUES (10, 20)",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "INSERT INTO {o} VALUES (20, '2024-02-02', 0)",
    ),
    "delete a parent": ("DELETE FROM {o} WHERE id = 1",),
    "delete a parent without children": ("DELETE FROM {o} WHERE id = 6",),
    "delete all parents": ("DELETE FROM {o}",),
    "delete a parent, then its children": ("DELETE FROM {o} WHERE id = 1", "DELETE FROM {p} WHERE order_id = 1"),
    "delete the children, then the parent": ("DELETE FROM {p} WHERE order_id = 1", "DELETE FROM {o} WHERE id = 1"),
    "delete both at once": ("WITH p AS (DELETE FROM {p} WHERE order_id = 1) DELETE FROM {o} WHERE id = 1",),
    "delete a parent and put it back": (
        "DELETE FROM {o} WHERE id = 1",
        "INSERT INTO {o} VALUES (1, '2023-06-01', 9)",
    ),
    "move parents": (MOVE,),
    "move parents, then insert": (MOVE, "INSERT INTO {p} (id, order_id) VALUES (10, 1)"),
    "insert, then move the parent": (
        "INSERT INTO {p} (id, order_id) VALUES (10, 1)",
        "UPDATE {o} SET created = '2025-03-03' WHERE id = 1",
    ),
    "insert in the statement that moves": (
        "WITH o AS (UPDATE {o} SET created = '2025-03-03' WHERE id = 5 RETURNING id) "
        "INSERT INTO {p} (id, order_id) SELECT 10, id FROM o",
    ),
    "change a key": ("UPDATE {o} SET id = 30 WHERE id = 1",),
    "change a key of no child": ("UPDATE {o} SET id = 30 WHERE id = 6",),
    "change all keys": ("UPDATE {o} SET id = id + 100",),
    "change a key and move": ("UPDATE {o} SET id = 30, created = '2025-03-03' WHERE id = 1",),
    "change the child, then the key": (
        "UPDATE {p} SET order_id = 5 WHERE order_id = 1",
        "UPDATE {o} SET id = 30 WHERE id = 1",
    ),
    "touch a parent": ("UPDATE {o} SET id = id, created = created, v = 0",),
}
# action on a delete, on an update, deferred, the child's default.
SHAPES = {
    "no action": ("no-action", "no-action", False, "NULL"),
    "restrict": ("restrict", "no-action", False, "NULL"),
    "cascade": ("cascade", "cascade", False, "NULL"),
    "set null": ("set-null", "no-action", False, "NULL"),
    "set default": ("set-default", "no-action", False, "6"),
    "set default of none": ("set-default", "no-action", False, "60"),
    "deferred": ("no-action", "no-action", True, "NULL"),
    "deferred cascade": ("cascade", "cascade", True, "NULL"),
}
# The composite key refuses by all of its columns, and names the partition; or another row is refused first. The code is
# the same.
BY_CODE = ("delete", "parent gone in the same", "change all keys")
# The parent's row is in another partition when it is back, where the composite key doesn't find it.
DIFFERENT = {("deferred", "delete a parent and put it back"), ("deferred cascade", "delete a parent and put it back")}


@pytest.fixture(scope="module")
def shaped(server: str) -> Iterator[dict[str, str]]:
    """A database of each shape, made once."""
    made: dict[str, str] = {}
    yield made
    for number in range(len(made)):
        run_sql(server, f"DROP DATABASE twins_{number}_of_references WITH (FORCE)")


def database_of(server: str, made: dict[str, str], shape: str) -> str:
    if shape not in made:
        name = f"twins_{len(made)}_of_references"
        run_sql(server, f"CREATE DATABASE {name} TEMPLATE roir_template {COPIED}")
        dsn = database_dsn(server, name)
        on_delete, on_update, deferred, default = SHAPES[shape]
        how = {"on_delete": on_delete, "on_update": on_update, "deferred": deferred, "default": default}
        referring.make_pair(Database(dsn, "roir tests"), dsn, **how)
        made[shape] = dsn
    return made[shape]


def fresh(dsn: str) -> None:
    """Restores all rows."""
    run_sql(
        dsn,
        "DELETE FROM payments",
        "DELETE FROM twin_payments",
        "DELETE FROM orders",
        "DELETE FROM twin_orders",
        *(one.format(**names) for names in (OURS, TWIN) for one in referring.FILL),
    )


@pytest.mark.sample(8, 30)
@pytest.mark.parametrize("statements", STATEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_statement_ends_as_on_the_twin(server: str, shaped: dict[str, str], shape: str, statements: str) -> None:
    dsn = database_of(server, shaped, shape)
    fresh(dsn)
    with closing(Side(dsn, OURS)) as ours, closing(Side(dsn, TWIN)) as twin:
        mine, theirs = ours.run(STATEMENTS[statements]), twin.run(STATEMENTS[statements])
    if (shape, statements) in DIFFERENT and mine != theirs:
        assert (mine[0][0], theirs[0]) == ("23503", ())
        return
    if mine[0] and theirs[0] and statements.startswith(BY_CODE):
        mine, theirs = ((mine[0][0],), mine[1]), ((theirs[0][0],), theirs[1])
    assert mine == theirs
    assert referring.wrong(dsn) == (0, 0)
