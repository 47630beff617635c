"""A reference as an operation: prepare, fill, check; pause, abort, remove; what happens to its tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import psycopg2
import psycopg2.errors
import pytest

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, lifecycle
from airflow_roir.engine.clean_up import clean_up
from airflow_roir.engine.control import requests
from airflow_roir.engine.control.run import start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.drop import drop_index
from airflow_roir.engine.reference import filling, prepare, removal
from airflow_roir.engine.snapshot.index import indexes
from airflow_roir.errors import IllegalTransition, InvalidInput, NotFound, OrphansFound, RoirError
from airflow_roir.options import BuildOptions, ReferenceOptions
from tests.conftest import run_sql
from tests.engine import referring, steps
from tests.engine.interposed import Killed, before
from tests.engine.referring import INDEX
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(6)

LEFT = """
SELECT count(*) FROM (
    SELECT proname::text FROM pg_proc WHERE pronamespace = 'roir_data'::regnamespace AND proname ~ '^r[0-9]+_'
    UNION ALL SELECT tgname::text FROM pg_trigger WHERE tgname ~ 'roir_reference'
    UNION ALL SELECT relname::text FROM pg_class WHERE relname ~ '^r[0-9]+_(index|parent)$'
    UNION ALL SELECT conname::text FROM pg_constraint WHERE conrelid = to_regclass('payments') AND contype = 'f'
    UNION ALL SELECT attname::text FROM pg_attribute
               WHERE attrelid = to_regclass('payments') AND attname = 'order_created' AND NOT attisdropped
    UNION ALL SELECT name FROM roir.reference) x
"""


@pytest.fixture
def parent(database: Database, dsn: str) -> Database:
    referring.make_parent(dsn)
    referring.make_child(dsn, 300)
    steps.make_index(database, INDEX, "orders", "id", unique=True)
    return database


def one(dsn: str, query: str) -> object:
    with closing(steps.session(dsn)) as session:
        return sql(session, query)[0][0]


def refused(dsn: str, *statements: str) -> str | None:
    """The constraint that refuses these statements; None if none does."""
    with closing(steps.session(dsn)) as session:
        try:
            for statement in statements:
                sql(session, statement)
            session.commit()
        except psycopg2.errors.ForeignKeyViolation as error:
            return error.diag.constraint_name
    return None


def test_it_checks_rows_that_were_there_and_new_ones(parent: Database, dsn: str) -> None:
    ended = referring.refer(parent, on_delete="cascade")
    assert (ended.status, ended.rows, ended.percent_complete) == ("completed", 300, 100)
    assert referring.wrong(dsn) == (0, 0)
    assert one(dsn, "SELECT bool_and(convalidated) FROM pg_constraint WHERE contype = 'f' AND conparentid = 0")
    [index] = indexes(parent)
    assert index.references == ("public.payments (order_id), on delete cascade",)
    assert index.warnings == ()
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 77)") == "payments_order_id_fkey"
    assert refused(dsn, "DELETE FROM orders WHERE id = 1") is None
    assert one(dsn, "SELECT count(*) FROM payments WHERE order_id = 1") == 0


def test_writes_are_checked_from_the_beginning(parent: Database, dsn: str) -> None:
    """Also a delete of a parent whose children have no place yet."""
    referring.begin(parent)
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 77)") == "payments_order_id_fkey"
    assert refused(dsn, "UPDATE orders SET id = 50 WHERE id = 1") == "payments_order_id_fkey"
    assert refused(dsn, "DELETE FROM orders WHERE id = 1") is not None
    assert refused(dsn, "UPDATE payments SET v = v + 1") is None
    assert lifecycle.drive(parent, INDEX, "test").status == "completed"
    assert referring.wrong(dsn) == (0, 0)


def test_a_delete_reaches_rows_that_are_not_filled_yet(parent: Database, dsn: str) -> None:
    referring.begin(parent, on_delete="set-null")
    assert refused(dsn, "DELETE FROM orders WHERE id = 1") is None
    assert one(dsn, "SELECT count(*) FROM payments WHERE order_id = 1") == 0
    assert lifecycle.drive(parent, INDEX, "test").status == "completed"
    assert referring.wrong(dsn) == (0, 0)


def test_orphans_pause_it_until_they_are_repaired(parent: Database, dsn: str) -> None:
    run_sql(dsn, "INSERT INTO payments VALUES (500, 70, 0), (501, 71, 0)")
    operation = referring.begin(parent)
    with pytest.raises(OrphansFound, match=r"\(70\), \(71\)") as found:
        lifecycle.drive(parent, INDEX, "test", operation=operation)
    query = str(found.value).partition("List them: ")[2].partition(". Change")[0]
    with closing(steps.session(dsn)) as session:
        assert sql(session, query) == [(500, 70), (501, 71)]
    # An orphan may be written to, unless it gets another key.
    run_sql(dsn, "UPDATE payments SET v = 1 WHERE id = 500", "DELETE FROM payments WHERE id = 500")
    run_sql(dsn, "INSERT INTO orders VALUES (71, '2024-01-01', 0)")
    assert lifecycle.drive(parent, INDEX, "test").status == "completed"
    assert referring.wrong(dsn) == (0, 0)


def test_rows_that_others_hold_are_filled_at_the_end(parent: Database, dsn: str) -> None:
    """A worker waits for no row lock."""
    referring.begin(parent, options={"parallelism": 1})
    run = start_run(parent, INDEX, "test")
    with closing(steps.session(dsn)) as user:
        sql(user, "UPDATE payments SET v = 0 WHERE id = 1")
        sql(user, "SELECT FROM orders WHERE id = 2 FOR UPDATE")
        for _ in filling.PHASE.work(parent, run, 0):
            pass
        assert one(dsn, "SELECT array_agg(DISTINCT order_id) FROM payments WHERE order_created IS NULL") == [1, 2, None]
        user.commit()
    filling.finish(parent, run)
    assert referring.wrong(dsn) == (0, 0)


def fill_all(database: Database) -> None:
    """Fills every range by one worker, in a run of its own."""
    run = start_run(database, INDEX, "test", take_over=True)
    for _ in filling.PHASE.work(database, run, 0):
        pass


@pytest.mark.parametrize("at", range(1, 3))
def test_a_killed_worker_loses_nothing(parent: Database, dsn: str, at: int) -> None:
    operation = referring.begin(parent, options={"parallelism": 1})

    def kill() -> None:
        raise Killed

    with pytest.raises(Killed), before(parent, "UPDATE roir.scan_range", kill, at):
        fill_all(parent)
    ended = lifecycle.drive(parent, INDEX, "other", take_over=True, operation=operation)
    assert ended.status == "completed"
    assert referring.wrong(dsn) == (0, 0)


ENDS: dict[str, Callable[[Database], object]] = {
    "before the check": lambda database: before(database, "ALTER TABLE", _raise),
    "before the end": lambda database: before(database, "UPDATE roir.reference", _raise),
}


def _raise() -> None:
    raise Killed


@pytest.mark.parametrize("moment", ENDS)
def test_a_death_in_the_last_step_loses_nothing(parent: Database, dsn: str, moment: str) -> None:
    referring.begin(parent)
    with pytest.raises(Killed), ENDS[moment](parent):  # type: ignore[attr-defined]
        lifecycle.drive(parent, INDEX, "test")
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 77)") is not None
    assert lifecycle.drive(parent, INDEX, "test").status == "completed"
    assert indexes(parent)[0].references == ("public.payments (order_id), on delete no action",)


def test_it_pauses_and_goes_on_with_more_workers(parent: Database, dsn: str) -> None:
    referring.begin(parent, options={"parallelism": 1})
    requests.pause(parent, INDEX, "user", "later")
    requests.change_options(parent, INDEX, actor="user", parallelism=3)
    requests.resume(parent, INDEX, "user")
    assert lifecycle.drive(parent, INDEX, "test").status == "completed"
    assert one(dsn, "SELECT parallelism FROM roir.operation ORDER BY id DESC LIMIT 1") == 3
    assert referring.wrong(dsn) == (0, 0)


@pytest.mark.parametrize("moment", ["begun", "orphans"])
def test_an_abort_leaves_nothing(parent: Database, dsn: str, moment: str) -> None:
    if moment == "orphans":
        run_sql(dsn, "INSERT INTO payments VALUES (500, 70, 0)")
    referring.begin(parent)
    if moment == "orphans":
        with pytest.raises(OrphansFound):
            lifecycle.drive(parent, INDEX, "test")
    assert abort.abort(parent, INDEX, "user").status == "aborted"
    assert one(dsn, LEFT) == 0
    assert one(dsn, "SELECT count(*) FROM payments") == 300 + (moment == "orphans")
    drop_index(parent, INDEX, "user")


def test_it_is_removed_and_made_again(parent: Database, dsn: str) -> None:
    referring.refer(parent)
    assert removal.remove_named(parent, INDEX, "payments(order_id)", "user") == ["payments_order_id_fkey"]
    assert one(dsn, LEFT) == 0
    with pytest.raises(NotFound, match="has no foreign key"):
        removal.remove_named(parent, INDEX, "payments", "user")
    referring.refer(parent, added=["order_day"], name="other")
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 77)") == "other"
    assert one(dsn, "SELECT count(order_day) > 0 FROM payments")


def test_an_unfinished_one_is_aborted_not_removed(parent: Database) -> None:
    referring.begin(parent)
    with pytest.raises(IllegalTransition, match="roir abort"):
        removal.remove_named(parent, INDEX, "payments", "user")


def test_an_index_that_a_key_needs_is_not_dropped(parent: Database, dsn: str) -> None:
    referring.refer(parent)
    with pytest.raises(InvalidInput, match="roir reference --remove"):
        drop_index(parent, INDEX, "user")
    steps.make_index(parent, INDEX, None, None)
    clean_up(parent)
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 77)") is not None
    assert refused(dsn, "INSERT INTO payments (id, order_id) VALUES (1000, 6)") is None
    removal.remove_named(parent, INDEX, "payments", "user")
    drop_index(parent, INDEX, "user")


def test_a_dropped_child_leaves_nothing_after_a_clean_up(parent: Database, dsn: str) -> None:
    referring.refer(parent)
    run_sql(dsn, "DROP TABLE payments")
    assert "was dropped" in indexes(parent)[0].warnings[0]
    assert refused(dsn, "DELETE FROM orders WHERE id = 1") is None
    assert clean_up(parent).warnings == []
    assert one(dsn, LEFT) == 0
    drop_index(parent, INDEX, "user")


def test_the_clean_up_follows_renamed_columns(parent: Database, dsn: str) -> None:
    referring.refer(parent)
    run_sql(
        dsn,
        "ALTER TABLE payments RENAME order_id TO bought",
        "ALTER TABLE payments RENAME order_created TO on_day",
        "ALTER TABLE payments RENAME TO paid",
        "ALTER TABLE orders RENAME TO purchases",
    )
    assert clean_up(parent).warnings == []
    assert refused(dsn, "INSERT INTO paid (id, bought) VALUES (1000, 77)") == "payments_order_id_fkey"
    assert refused(dsn, "INSERT INTO paid (id, bought) VALUES (1000, 6)") is None
    assert refused(dsn, "UPDATE purchases SET id = 9 WHERE id = 6") == "payments_order_id_fkey"
    assert one(dsn, "SELECT on_day FROM paid WHERE id = 1000") is not None
    removal.remove_named(parent, INDEX, "paid", "user")


@pytest.mark.parametrize(
    "harm",
    [
        'ALTER TABLE payments DISABLE TRIGGER "~roir_reference_1_i"',
        "DROP TRIGGER roir_reference_1_i ON payments",
        "ALTER TABLE payments DROP CONSTRAINT payments_order_id_fkey",
    ],
)
def test_lost_triggers_are_noticed(parent: Database, dsn: str, harm: str) -> None:
    referring.refer(parent)
    run_sql(dsn, harm)
    [warning] = indexes(parent)[0].warnings
    assert "rows come in unchecked" in warning
    assert warning in clean_up(parent).warnings
    removal.remove_named(parent, INDEX, "payments", "user")
    assert one(dsn, LEFT) == 0


def test_partitions_of_the_parent_come_and_go(parent: Database, dsn: str) -> None:
    referring.refer(parent, on_delete="cascade")
    run_sql(
        dsn,
        "CREATE TABLE orders_2026 PARTITION OF orders FOR VALUES FROM ('2026-01-01') TO ('2027-01-01')",
        "INSERT INTO orders VALUES (100, '2026-05-05', 0)",
        "INSERT INTO payments (id, order_id) VALUES (1000, 100)",
        "UPDATE orders SET created = '2023-03-03' WHERE id = 100",
        "ALTER TABLE orders DETACH PARTITION orders_2026",
    )
    assert referring.wrong(dsn) == (0, 0)
    with closing(steps.session(dsn)) as user, pytest.raises(psycopg2.errors.ForeignKeyViolation):
        sql(user, "ALTER TABLE orders DETACH PARTITION orders_2023")


def test_a_writer_of_the_child_needs_no_right_on_the_parent(parent: Database, dsn: str, stranger: str) -> None:
    """Nor on the index. The detail has the key only for those who may read it."""
    referring.refer(parent, on_delete="cascade")
    role = stranger.partition("//")[2].partition("@")[0].partition(":")[0]
    run_sql(dsn, f"GRANT INSERT, UPDATE, SELECT ON payments TO {role}")
    insert = "INSERT INTO payments (id, order_id) VALUES (1000, {})"
    assert refused(stranger, insert.format(6), "UPDATE payments SET order_id = 5 WHERE id = 1") is None
    details = []
    for grant in ("SELECT 1", f"GRANT SELECT (id) ON orders TO {role}"):
        run_sql(dsn, grant)
        with closing(steps.session(stranger)) as user:
            with pytest.raises(psycopg2.errors.ForeignKeyViolation) as found:
                sql(user, "INSERT INTO payments (id, order_id) VALUES (1001, 77)")
            details.append(found.value.diag.message_detail)
    assert details == [
        'Key is not present in table "orders".',
        'Key (order_id)=(77) is not present in table "orders".',
    ]
    with closing(steps.session(stranger)) as user, pytest.raises(psycopg2.errors.InsufficientPrivilege):
        sql(user, "SELECT roir_data.r1_find(1, 'search')")


REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "has no column": ("payments(other)", ()),
    "write the table with its columns": ("payments", ()),
    "doesn't exist": ("nowhere(order_id)", ()),
    "must be of the same type": ("payments(order_id)", ("ALTER TABLE payments ALTER order_id TYPE int",)),
    "is generated": (
        "payments(double)",
        ("ALTER TABLE payments ADD double bigint GENERATED ALWAYS AS (id * 2) STORED",),
    ),
    "name as many of the child": ("payments(order_id, v)", ()),
    "belongs to role": ("payments(order_id)", ("ALTER TABLE payments OWNER TO {stranger}",)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_is_refused(parent: Database, dsn: str, stranger: str, why: str) -> None:
    child, before_ = REFUSED[why]
    role = stranger.partition("//")[2].partition("@")[0].partition(":")[0]
    run_sql(dsn, *(statement.format(stranger=role) for statement in before_))
    with pytest.raises(RoirError, match=why):
        prepare.begin(parent, child, INDEX, ReferenceOptions(), "test")
    assert one(dsn, LEFT) == 0


def test_a_key_outside_the_primary_key_is_refused(database: Database, dsn: str) -> None:
    referring.make_parent(dsn)
    referring.make_child(dsn)
    steps.make_index(database, INDEX, "orders", "v", unique=True)
    run_sql(dsn, "ALTER TABLE payments ALTER v TYPE bigint")
    with pytest.raises(InvalidInput, match="isn't in the primary key"):
        referring.begin(database)


def test_an_index_that_is_not_unique_is_refused(database: Database, dsn: str) -> None:
    referring.make_parent(dsn)
    referring.make_child(dsn)
    steps.make_index(database, INDEX, "orders", "id")
    with pytest.raises(InvalidInput, match="needs a unique index"):
        referring.begin(database)


def test_an_index_with_a_condition_is_refused(database: Database, dsn: str) -> None:
    referring.make_parent(dsn)
    referring.make_child(dsn)
    definition = IndexDefinition.parse(INDEX, "orders", "id", unique=True, where="v > 2")
    begun = lifecycle.prepare(database, definition, BuildOptions(), "test")
    lifecycle.drive(database, begun.index, "test")
    with pytest.raises(InvalidInput, match="has a condition"):
        referring.begin(database)


def test_a_partitioned_child(database: Database, dsn: str, pg: int) -> None:
    referring.make_parent(dsn)
    run_sql(
        dsn,
        "CREATE TABLE payments (id bigint, day int, order_id bigint, v int, PRIMARY KEY (id, day)) "
        "PARTITION BY LIST (day)",
        *(f"CREATE TABLE payments_{day} PARTITION OF payments FOR VALUES IN ({day})" for day in (1, 2)),
        "INSERT INTO payments SELECT i, i % 2 + 1, i % 6 + 1, i FROM generate_series(1, 50) i",
    )
    steps.make_index(database, INDEX, "orders", "id", unique=True)
    if pg < 18:
        with pytest.raises(InvalidInput, match="is partitioned"):
            referring.begin(database)
        return
    referring.refer(database, on_delete="cascade")
    assert referring.wrong(dsn) == (0, 0)
    assert refused(dsn, "INSERT INTO payments VALUES (100, 1, 77)") is not None
    assert refused(dsn, "UPDATE payments SET order_id = 2, day = 3 - day") is None
    assert (
        refused(
            dsn, "WITH p AS (INSERT INTO payments VALUES (100, 1, 20)) INSERT INTO orders VALUES (20, '2023-02-02')"
        )
        is None
    )
    assert referring.wrong(dsn) == (0, 0)
    assert refused(dsn, "DELETE FROM orders WHERE id = 2") is None
    assert one(dsn, "SELECT count(*) FROM payments") == 1


def test_many_rows_come_with_their_parents_in_one_statement(parent: Database, dsn: str) -> None:
    """Entries come at the end of the statement: a row that the index doesn't have yet is found in the table."""
    referring.refer(parent)
    both = "WITH p AS (INSERT INTO payments (id, order_id) SELECT i, i FROM generate_series(1001, 1005) i) "
    parents = "INSERT INTO orders SELECT i, '2023-01-01'::date + 300 * (i % 3)::int FROM generate_series(1001, {}) i"
    assert refused(dsn, both + parents.format(1004)) is not None
    assert refused(dsn, both + parents.format(1005)) is None
    assert referring.wrong(dsn) == (0, 0)


def test_a_table_that_refers_to_itself(database: Database, dsn: str, pg: int) -> None:
    if pg < 18:
        pytest.skip("a partitioned child needs PostgreSQL 18")
    referring.make_parent(dsn)
    run_sql(dsn, "ALTER TABLE orders RENAME v TO whole", "ALTER TABLE orders ALTER whole TYPE bigint")
    run_sql(dsn, "UPDATE orders SET whole = 7 - id")
    steps.make_index(database, INDEX, "orders", "id", unique=True)
    begun = prepare.begin(database, "orders(whole)", INDEX, ReferenceOptions(), "test")
    assert lifecycle.drive(database, INDEX, "test", operation=begun.operation_id).status == "completed"
    assert refused(dsn, "INSERT INTO orders VALUES (8, '2023-01-01', 9), (9, '2024-01-01', 8)") is None
    assert refused(dsn, "INSERT INTO orders VALUES (10, '2023-01-01', 11)") is not None
    assert refused(dsn, "UPDATE orders SET created = '2025-01-01' WHERE id = 8") is None
    joined = "SELECT count(*) FROM orders c JOIN orders p ON (p.id, p.created) = (c.whole, c.orders_created)"
    assert one(dsn, joined) == 8
