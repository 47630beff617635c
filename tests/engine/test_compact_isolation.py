"""Transactions of one snapshot beside a swap: each sees an exact index, or is refused by 40001."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg2
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import clean_up
from airflow_roir.engine.compact import applying, capture, swap
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation.entry import Entry
from airflow_roir.engine.readers import view
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.compacting import act, begin, compact, left_over, scene, stages
from tests.engine.steps import old_session, session, sql

pytestmark = pytest.mark.sample(2)

Variant = Callable[[pytest.MonkeyPatch], None]
LEVELS = ("REPEATABLE READ", "SERIALIZABLE")
WRITES = {
    "insert": "INSERT INTO t VALUES (9001, '1', 1)",
    "update": "UPDATE t SET k = '2' WHERE id = 11",
    "delete": "DELETE FROM t WHERE id = 12",
}


@pytest.mark.sample(0)
@pytest.mark.parametrize("level", LEVELS)
def test_a_snapshot_that_is_older_than_a_swap(dsn: str, level: str) -> None:
    """Its reads and writes are refused, even once the publish's own guard is gone; a younger snapshot's aren't."""
    database = scene(dsn)
    clean_up.clean_up(database)
    old = [old_session(dsn, level) for _ in range(1 + len(WRITES))]
    compact(database, act("rewrite", 1))
    for user, statement in zip(old, ["SELECT count(*) FROM ix", *WRITES.values()], strict=True):
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(user, statement)
        user.close()
    young = old_session(dsn, level)
    assert sql(young, "SELECT count(*) FROM ix") == [(200,)]
    for statement in WRITES.values():
        sql(young, statement)
    young.commit()
    steps.assert_exact(database)
    clean_up.clean_up(database)
    [(definition,)] = sql(session(dsn), "SELECT pg_get_viewdef('ix'::regclass)")
    assert "published" not in definition


@pytest.mark.sample(0)
def test_an_exported_snapshot_outlives_its_session(dsn: str) -> None:
    """The snapshot is handed on before the swap, and refused after it."""
    database = scene(dsn)
    giver = old_session(dsn)
    [(name,)] = sql(giver, "SELECT pg_export_snapshot()")
    taker = session(dsn, "REPEATABLE READ")
    sql(taker, f"SET TRANSACTION SNAPSHOT '{name}'")
    giver.close()
    compact(database, act("merge", 1, 2))
    clean_up.clean_up(database)
    with pytest.raises(psycopg2.errors.SerializationFailure):
        sql(taker, "SELECT count(*) FROM ix")


@pytest.mark.sample(0)
def test_a_cursor_holds_up_a_swap_alone(dsn: str) -> None:
    """Only the swap waits for the cursor; the segments stay until it is closed."""
    database = scene(dsn)
    reader = session(dsn, "REPEATABLE READ")
    sql(reader, "DECLARE c CURSOR FOR SELECT id FROM ix ORDER BY k, v")
    assert len(sql(reader, "FETCH 50 FROM c")) == 50
    run = begin(database, act("merge", 1, 2))
    passed = []
    for stage in stages(database, run):
        passed.append(stage)
        if stage == "0 folding" and passed.count(stage) == 3:
            assert len(sql(reader, "FETCH ALL FROM c")) == 150
            reader.commit()
    steps.assert_exact(database)
    assert left_over(dsn) == []


@pytest.mark.sample(0)
def test_a_swap_beside_a_look_alters_nothing(dsn: str) -> None:
    """A look for objects that users added to segments sees all or nothing of a unit that ends meanwhile."""
    database = scene(dsn)
    run = begin(database, act("rewrite", 1))
    looks = []
    for _ in stages(database, run):
        looks.append(session(dsn, "REPEATABLE READ"))
        sql(looks[-1], "SELECT 1")
    for look in looks:
        assert sql(look, "SELECT roir.table_additions(id) FROM roir.generation") == [(0,)]
        look.close()


# -- each mistake is found


def tells(dsn: str, database: Database) -> None:
    """Does a compaction beside writes of each kind. Then transactions that are older than its swaps read and write."""
    reader, writer = old_session(dsn), old_session(dsn)
    run = begin(database, act("rewrite", 1), act("merge", 2, 3), verify=False)
    for n, _ in enumerate(stages(database, run), 1):
        run_sql(
            dsn,
            f"UPDATE t SET k = ((k::int + 1) % 5)::text WHERE id % 7 = {n % 7}",
            f"UPDATE t SET v = v + 1000 WHERE id % 4 = {n % 4}",
            f"DELETE FROM t WHERE id % 50 = {n}",
            f"INSERT INTO t VALUES ({1000 + n}, '{n % 5}', {n})",
        )
        steps.assert_exact(database)
    for user, statement in ((reader, "SELECT count(*) FROM ix"), (writer, "DELETE FROM t WHERE id = 1")):
        with pytest.raises(psycopg2.errors.SerializationFailure):
            sql(user, statement)
        user.close()
    assert left_over(dsn) == []


def no_trigger(patch: pytest.MonkeyPatch) -> None:
    """The trigger records no row."""
    _text(patch, capture, "AFTER INSERT OR UPDATE OR DELETE", "AFTER TRUNCATE")
    _text(patch, capture, "FOR EACH ROW", "FOR EACH STATEMENT")


def no_trigger_on_delete(patch: pytest.MonkeyPatch) -> None:
    """Deletions aren't recorded."""
    _text(patch, capture, "AFTER INSERT OR UPDATE OR DELETE", "AFTER INSERT OR UPDATE")


def list_cleared_first(patch: pytest.MonkeyPatch) -> None:
    """The list is emptied before it is applied."""
    apply = applying.apply

    def broken(connection: Connection, entry: Entry, claim: UnitClaim, first: int, end: int) -> int:
        execute(connection, f"DELETE FROM {claim.touched}")
        return apply(connection, entry, claim, first, end)

    patch.setattr(applying, "apply", broken)


def layout_not_raised(patch: pytest.MonkeyPatch) -> None:
    """Readers and writers with an older snapshot find new segments."""
    patch.setattr(swap, "LAID_OUT", swap.LAID_OUT.replace("layout = layout + 1", "layout = layout"))


def readers_not_refused(patch: pytest.MonkeyPatch) -> None:
    """The view doesn't refuse readers with an older snapshot."""
    made = view.STATEMENT.removeprefix("SELECT ")
    patch.setattr(view, "STATEMENT", rf"SELECT regexp_replace({made}, '(published\(\d+), \d+\)', '\1)')")


def swaps_without_the_rest(patch: pytest.MonkeyPatch) -> None:
    """The entries touched since the last step aren't applied under the lock."""
    apply = applying.apply

    def broken(connection: Connection, entry: Entry, claim: UnitClaim, first: int, end: int) -> int:
        return 0 if end - first != applying.BLOCKS_PER_STEP else apply(connection, entry, claim, first, end)

    patch.setattr(applying, "apply", broken)


def _text(patch: pytest.MonkeyPatch, module: Any, old: str, new: str) -> None:
    patch.setattr(
        module, "execute", lambda connection, statement, *rest: execute(connection, statement.replace(old, new), *rest)
    )


VARIANTS = (
    no_trigger,
    no_trigger_on_delete,
    list_cleared_first,
    layout_not_raised,
    readers_not_refused,
    swaps_without_the_rest,
)


@pytest.mark.sample(0)
def test_the_engine_as_it_is_passes(dsn: str) -> None:
    """The tests that find the variants find nothing in it."""
    tells(dsn, scene(dsn, 3))


@pytest.mark.sample(0)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_found(dsn: str, variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant shows by a wrong index, a copy that can't be indexed, or a snapshot that isn't refused."""
    database = scene(dsn, 3)
    variant(monkeypatch)
    with pytest.raises((AssertionError, DBAPIError, pytest.fail.Exception)) as found:
        tells(dsn, database)
    print(found.value)
