"""A compaction replaces segments of a published index while it is read and written (airflow_roir/engine/compact/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import psycopg2
import pytest
from psycopg2 import errors as pg_errors
from sqlalchemy.exc import DBAPIError

from airflow_roir.definition import IndexDefinition
from airflow_roir.engine import abort, clean_up, drop, lifecycle, prepare, revert
from airflow_roir.engine.capture import installation
from airflow_roir.engine.claims import Stop
from airflow_roir.engine.compact import compaction
from airflow_roir.engine.compact.action import Action
from airflow_roir.engine.compact.unit import UnitClaim
from airflow_roir.engine.compact.worker import CompactWorker
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.run import end_run, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.generation import physical
from airflow_roir.engine.health import faults
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.verify import record
from airflow_roir.errors import InvalidInput, NotFound, OperationFailed, OperationRunning
from airflow_roir.options import BuildOptions, CompactOptions, VerifyOptions
from tests.conftest import run_sql
from tests.engine import compacting, steps
from tests.engine.compacting import act
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(2)

ROWS = 800
# One statement of each kind. Each changes the rows that it leaves.
WRITES = (
    "UPDATE t SET k = '9' WHERE id % 50 = 7",
    "UPDATE t SET v = v + 1 WHERE id % 50 = 8",
    "UPDATE t SET id = id + 100000 WHERE id % 50 = 9 AND id < 100000",
    "UPDATE t SET k = NULL WHERE id % 50 = 10",
    "DELETE FROM t WHERE id % 50 = 11",
    "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(200001, 200100) i ON CONFLICT DO NOTHING",
    "INSERT INTO t SELECT i, NULL, i FROM generate_series(300001, 300050) i ON CONFLICT (id) DO UPDATE SET v = 0",
)


def action(kind: str, ordinals: Sequence[int], parts: int = 1) -> Action:
    return act(kind, *ordinals, parts=parts)


def compact(database: Database, *actions: Action, between: Callable[[str], object] = lambda status: None) -> list[str]:
    """Does a whole compaction; returns the statuses in which its steps began. between: called before each step."""
    seen: list[str] = []

    def told(stage: str) -> None:
        status = stage.rpartition(" ")[2]
        if status != "done":
            seen.append(status)
            between(status)

    compacting.compact(database, *actions, between=told)
    return seen


def claim(one: CompactWorker) -> UnitClaim:
    found = one.claim()
    assert isinstance(found, UnitClaim), found
    return found


def segments(dsn: str) -> set[int]:
    return set(compacting.segments(dsn))


@pytest.fixture(name="index")
def an_index(database: Database, dsn: str) -> None:
    steps.make_table(dsn, ROWS)
    steps.make_index(database, keys="k", include="v", segments=4, parallelism=1)


def check(database: Database, dsn: str) -> None:
    """Checks that the index is exact, no unit has left anything, and no warning is given."""
    assert verify(database, "ix").is_exact
    assert compacting.left_over(dsn) == []
    with database.transaction() as connection:
        assert faults.warnings(connection) == []


def write(dsn: str) -> None:
    run_sql(dsn, *WRITES)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("actions", "after"),
    [
        ((action("rewrite", [2]),), {0, 1, 3, 4, 5}),
        ((action("merge", [1, 2, 3]),), {0, 4, 5}),
        ((action("split", [4], 3),), {0, 1, 2, 3, 5, 6, 7}),
        ((action("rewrite", [0]),), {0, 1, 2, 3, 4}),
        ((action("merge", [1, 2]), action("split", [3], 2), action("rewrite", [0])), {0, 4, 5, 6, 7}),
    ],
    ids=["rewrite", "merge", "split", "default", "all"],
)
def test_writers_at_every_step_are_in_the_new_segments(
    database: Database, dsn: str, actions: tuple[Action, ...], after: set[int]
) -> None:
    seen = compact(database, *actions, between=lambda status: write(dsn))
    assert {"waiting", "copying", "indexing", "folding"} == set(seen)
    assert segments(dsn) == after
    check(database, dsn)
    # The capture knows the new segments.
    write(dsn)
    check(database, dsn)


@pytest.mark.usefixtures("index")
def test_segments_that_were_compacted_can_be_compacted_again(database: Database, dsn: str) -> None:
    compact(database, action("split", [2], 3))
    compact(database, action("merge", [7, 3]), action("rewrite", [5]))
    assert segments(dsn) == {0, 1, 4, 6, 8, 9}
    write(dsn)
    check(database, dsn)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("unique", [{"unique": True}, {"unique": True, "nulls_not_distinct": True}], ids=["", "nulls"])
def test_keys_of_a_unique_index_are_taken_over_at_every_step(
    database: Database, dsn: str, unique: dict[str, bool]
) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
        f"INSERT INTO t SELECT i, i, i FROM generate_series(1, {ROWS}) i",
        "INSERT INTO t SELECT 90000, NULL, 1",
        "ANALYZE t",
    )
    steps.make_index(database, keys="k", segments=4, parallelism=1, **unique)

    turns = 0

    def shift(status: str) -> None:
        nonlocal turns
        turns += 1
        run_sql(
            dsn,
            # In some turns all rows, in the others few enough to be applied under the lock.
            f"UPDATE t SET k = k + 1 WHERE k > {0 if turns in (2, 5, 8, 11) else ROWS - 50}",
            "UPDATE t a SET k = b.k FROM t b WHERE (a.id, b.id) IN ((10, 11), (11, 10))",
            "UPDATE t SET id = id + 100000 WHERE id % 997 = 5 AND id < 100000",
        )

    actions = (action("merge", [1, 2]), action("rewrite", [0]), action("split", [4], 2))
    compact(database, *actions, between=shift)
    check(database, dsn)
    user = steps.session(dsn)
    with pytest.raises(pg_errors.UniqueViolation):
        sql(user, "INSERT INTO t SELECT 800000, k, v FROM t WHERE id = 20")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    "statement", ["TRUNCATE t", "VACUUM FULL roir_data.g1_s002", "CLUSTER roir_data.g1_s002 USING g1_s002_key"]
)
def test_a_segment_with_another_file_is_begun_again(database: Database, dsn: str, statement: str) -> None:
    done: set[str] = set()

    def once(status: str) -> None:
        if status == "folding" and not done:
            done.add(status)
            run_sql(dsn, statement)
            write(dsn)

    seen = compact(database, action("rewrite", [2]), between=once)
    assert seen.count("waiting") == 2
    check(database, dsn)


@pytest.mark.usefixtures("index")
def test_who_rewrites_a_segment_again_and_again_keeps_it(database: Database, dsn: str) -> None:
    def always(status: str) -> None:
        if status == "indexing":
            run_sql(dsn, "VACUUM FULL roir_data.g1_s002")

    compact(database, action("rewrite", [2]), between=always)
    report = compaction.report_of(database, operations.find_operation(database, "ix").id)
    assert [(unit["status"], unit["note"]) for unit in report.units] == [
        ("left", "a segment was emptied or rewritten meanwhile, 3 times")
    ]
    assert segments(dsn) == {0, 1, 2, 3, 4}
    check(database, dsn)


@pytest.mark.usefixtures("index")
def test_what_is_not_swapped_in_is_taken_back_by_an_abort(database: Database, dsn: str) -> None:
    run = compacting.begin(database, action("rewrite", [1]), action("merge", [2, 3]))
    one = compacting.worker(database, run)
    first: UnitClaim | None = claim(one)
    while first is not None:
        first, _ = one.advance(first)
    second = claim(one)
    begun, _ = one.advance(second)
    assert begun is not None
    assert begun.status == "copying"
    assert compacting.left_over(dsn)
    write(dsn)
    ended = abort.abort(database, "ix", "me")
    one.connection.close()
    assert ended.status == "aborted"
    assert segments(dsn) == {0, 2, 3, 4, 5}
    check(database, dsn)
    write(dsn)
    check(database, dsn)


@pytest.mark.usefixtures("index")
def test_a_paused_one_continues_where_it_stood(database: Database, dsn: str) -> None:
    run = compacting.begin(database, action("merge", [2, 3]))
    one = compacting.worker(database, run)
    begun, _ = one.advance(claim(one))
    assert begun is not None
    requests.pause(database, "ix", "me", "lunch")
    assert one.claim() == Stop("paused")
    one.connection.close()
    write(dsn)
    run = start_run(database, "ix", "test", take_over=True)
    one = compacting.worker(database, run)
    assert claim(one).status == "copying"
    begun, rows = one.advance(claim(one))
    assert begun is not None
    assert rows > 0
    one.connection.close()
    end_run(database, run)
    done = lifecycle.compact(database, "ix")
    assert done is not None
    assert done.status == "completed"
    check(database, dsn)


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_snapshot_older_than_the_swap_reads_no_empty_segment(database: Database, dsn: str, isolation: str) -> None:
    reader, writer = (steps.old_session(dsn, isolation) for _ in range(2))
    compact(database, action("merge", [1, 2, 3, 4]))
    with pytest.raises(pg_errors.SerializationFailure):
        sql(reader, "SELECT count(*) FROM ix")
    with pytest.raises(pg_errors.SerializationFailure):
        sql(writer, "UPDATE t SET k = '7' WHERE id = 17")
    for user in (reader, writer):
        user.rollback()
        assert sql(user, "SELECT count(*) FROM ix") == [(ROWS,)]
        user.close()
    # Once these transactions have ended the guard goes.
    assert clean_up.clean_up(database).guards_removed == 1
    check(database, dsn)


def copied_twice(dsn: str) -> list[str]:
    """A unit whose copy meets an entry in its old place and in the new one; the statuses of its steps."""
    database = compacting.small(dsn)
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int)",
        f"INSERT INTO t SELECT i, 'k', 0 FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    steps.make_index(database, keys="k", include="v", segments=1)
    # Room in the last block that the copy knows, and none in the first.
    run_sql(dsn, f"DELETE FROM t WHERE id BETWEEN {ROWS - 50} AND {ROWS - 10}", "VACUUM roir_data.g1_s001")
    [(blocks,)] = sql(steps.session(dsn), "SELECT pg_relation_size('roir_data.g1_s001') / 8192")
    assert blocks > 2
    seen: list[str] = []

    def move(stage: str) -> None:
        seen.append(stage)
        if [one.rpartition(" ")[2] for one in seen].count("copying") == 2 and seen[-1].endswith("copying"):
            run_sql(dsn, "UPDATE t SET v = 1 WHERE id = 1")
            user = steps.session(dsn)
            [(at,)] = sql(user, "SELECT (ctid::text::point)[0]::int FROM roir_data.g1_s001 WHERE c2 = 1")
            user.close()
            assert at > 0

    compacting.compact(database, act("rewrite", 1), between=move)
    assert verify(database, "ix").is_exact
    return seen


def test_an_entry_that_is_copied_twice_is_in_the_new_segment_once(dsn: str) -> None:
    assert copied_twice(dsn)[-1] == "done"


def test_that_is_seen_without_the_removal_of_touched_entries(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(physical, "remove_touched", lambda *arguments: 0)
    with pytest.raises(DBAPIError, match="could not create unique index"):
        copied_twice(dsn)


def skew(database: Database, dsn: str) -> None:
    """Two serializable transactions, each of which reads what the other writes; a swap comes between."""
    older, younger = (steps.session(dsn, "SERIALIZABLE") for _ in range(2))
    sql(older, "SELECT v FROM other")
    assert sql(younger, "SELECT count(*) FROM ix WHERE k = '3' AND id > 900000") == [(0,)]
    sql(younger, "UPDATE other SET v = 1")
    younger.commit()
    compact(database, action("merge", [1, 2, 3, 4]))
    sql(older, "INSERT INTO t VALUES (900001, '3', 0)")
    older.commit()


@pytest.mark.usefixtures("index")
def test_a_swap_hides_no_conflict_of_serializable_transactions(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE TABLE other (v int)", "INSERT INTO other VALUES (0)")
    with pytest.raises(pg_errors.SerializationFailure):
        skew(database, dsn)


@pytest.mark.usefixtures("index")
def test_that_is_seen_of_a_capture_that_does_not_ask_for_the_layout(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_sql(dsn, "CREATE TABLE other (v int)", "INSERT INTO other VALUES (0)")
    original = installation.targets
    monkeypatch.setattr(
        installation, "targets", lambda *given, **more: [replace(one, layout=0) for one in original(*given, **more)]
    )
    skew(database, dsn)


@pytest.mark.sample(0)
@pytest.mark.usefixtures("index")
def test_nothing_is_read_under_the_lock_of_the_swap(database: Database, dsn: str) -> None:
    run_sql(dsn, "UPDATE t SET k = NULL WHERE id % 3 = 0")
    run = compacting.begin(database, action("split", [2], 2), action("rewrite", [0]), action("merge", [3, 4]))
    one = compacting.worker(database, run)
    notices: list[str] = []
    original = one.database._open

    def listening() -> psycopg2.extensions.connection:
        connection = original()
        with connection.cursor() as cursor:
            cursor.execute("SET client_min_messages = debug1")
        connection.commit()
        connection.notices = Noted(notices)
        return connection

    one.database.engine.pool._creator = listening  # every session from now on
    of_status: dict[str, list[str]] = {}
    last = ""

    def sort_out(status: str) -> None:
        nonlocal last
        of_status.setdefault(last, []).extend(notices)
        notices.clear()
        last = status

    for stage in compacting.stages(database, run, one):
        sort_out(stage.rpartition(" ")[2])
    # In the last steps of a unit. Checks on tables that are still empty come earlier.
    assert [line for line in of_status["folding"] if "partition constraint" in line]
    assert not [line for line in of_status["folding"] if "verifying table" in line]
    check(database, dsn)


class Noted(list[str]):
    """The notices of all sessions in one list."""

    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def append(self, line: str) -> None:
        self.into.append(line)


@pytest.mark.usefixtures("index")
def test_other_operations_are_told_of_it(database: Database, dsn: str) -> None:
    compacting.begin(database, action("rewrite", [2]))
    with pytest.raises(OperationRunning, match="compacts the index"):
        prepare.prepare(database, IndexDefinition.parse("ix"), BuildOptions(), "me")
    with pytest.raises(OperationRunning, match="compacts the index"):
        record.begin(database, "ix", VerifyOptions(), "me")
    with pytest.raises(OperationRunning, match=r"can't be dropped: operation \d+ \(compaction\) is running"):
        drop.drop_index(database, "ix", "me")
    with pytest.raises(OperationRunning, match="is being driven by test"):
        compaction.begin(database, "ix", [action("rewrite", [3])], CompactOptions(), "me")
    abort.abort(database, "ix", "me")
    begun = compaction.begin(database, "ix", [action("rewrite", [3])], CompactOptions(), "me")
    again = compaction.begin(database, "ix", [], CompactOptions(parallelism=3), "me")
    assert (again.operation_id, again.adopted) == (begun.operation_id, True)
    assert len(compaction.report_of(database, begun.operation_id).units) == 1
    abort.abort(database, "ix", "me")
    drop.drop_index(database, "ix", "me")


@pytest.mark.usefixtures("index")
def test_the_server_counts_each_entry_once(database: Database, dsn: str) -> None:
    """Found: the statistics counted each entry of a new segment twice, so that it never seemed to be bloated. It holds:
    what was inserted is counted before the `ANALYZE`.
    """
    compact(database, action("merge", [1, 2, 3, 4]))
    user = steps.session(dsn)
    assert sql(user, "SELECT pg_stat_get_live_tuples('roir_data.g1_s005'::regclass)") == [(ROWS,)]
    user.close()


@pytest.mark.usefixtures("index")
def test_what_can_not_be_compacted_is_said(database: Database) -> None:
    with pytest.raises(InvalidInput, match="nothing was chosen"):
        compaction.begin(database, "ix", [], CompactOptions(), "me")
    with pytest.raises(InvalidInput, match="in two actions"):
        compaction.begin(database, "ix", [action("merge", [1, 2]), action("rewrite", [2])], CompactOptions(), "me")
    with pytest.raises(NotFound, match="nothing_here"):
        compaction.begin(database, "nothing_here", [action("rewrite", [1])], CompactOptions(), "me")
    compact(database, action("rewrite", [77]))
    report = compaction.report_of(database, operations.find_operation(database, "ix").id)
    assert [unit["status"] for unit in report.units] == ["left"]


@pytest.mark.usefixtures("index")
def test_new_segments_are_not_published_unless_the_build_said_so(database: Database, dsn: str) -> None:
    run_sql(dsn, "CREATE PUBLICATION everything FOR ALL TABLES")
    with pytest.raises(InvalidInput, match='publication "everything"'):
        compaction.begin(database, "ix", [action("rewrite", [1])], CompactOptions(), "me")
    steps.make_index(database, table=None, keys=None, ignore_publications=True)
    compact(database, action("rewrite", [1]))


@pytest.mark.by_hand("sweeps")
@pytest.mark.usefixtures("index")
def test_a_revert_ends_a_compaction_of_what_was_shown(database: Database, dsn: str) -> None:
    steps.make_index(database, table=None, keys=None)
    run = compacting.begin(database, action("rewrite", [1]))
    one = compacting.worker(database, run)
    begun, _ = one.advance(claim(one))
    assert begun is not None
    revert.revert(database, "ix", "me")
    with pytest.raises(OperationFailed, match="readers see another generation"):
        one.claim()
    one.connection.close()
    abort.abort(database, "ix", "me")
    assert compacting.left_over(dsn) == []
    assert verify(database, "ix").is_exact
    revert.revert(database, "ix", "me")
    assert verify(database, "ix").is_exact


@pytest.mark.usefixtures("index")
def test_an_invalid_index_of_a_killed_command_is_dropped_by_a_clean_up(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE INDEX roir_left_ccnew ON roir_data.g1_s002 (c1)",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'roir_data.roir_left_ccnew'::regclass",
    )
    assert clean_up.clean_up(database).invalid_indexes == 1
    assert clean_up.clean_up(database).invalid_indexes == 0
    check(database, dsn)


@pytest.mark.usefixtures("index")
def test_threads_carry_it_to_its_end(database: Database, dsn: str) -> None:
    compaction.begin(database, "ix", [action("rewrite", [n]) for n in (1, 2, 3, 4)], CompactOptions(), "me")
    report = lifecycle.compact(database, "ix", parallelism=2)
    assert report is not None
    assert [unit["status"] for unit in report.units] == ["done"] * 4
    assert report.bytes_after > 0
    with database.transaction() as connection:
        found = execute(connection, "SELECT percent_complete, state FROM roir.resumable_operations ORDER BY 1").all()
    assert all(row.percent_complete == 100 and row.state == "completed" for row in found)
    check(database, dsn)
