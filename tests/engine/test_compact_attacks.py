"""A compaction beside other changes to its index: errors that were found or feared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg2
import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, clean_up, revert
from airflow_roir.engine.compact import applying
from airflow_roir.engine.control import requests
from airflow_roir.engine.database import Database
from airflow_roir.engine.lifecycle import verify
from airflow_roir.engine.partitions import attach, remove_entries
from airflow_roir.engine.verify.record import VerifyOptions
from airflow_roir.errors import Fenced, InvariantViolated, OperationFailed
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.compacting import (
    act,
    begin,
    compact,
    is_right,
    scene,
    segments,
    small,
    stages,
    worker,
    writes,
)
from tests.engine.interposed import before, changed
from tests.engine.steps import session, sql

pytestmark = pytest.mark.sample(2)


def until(stages_: object, wanted: str) -> str:
    """Goes on until `wanted` is the next step."""
    for stage in stages_:  # type: ignore[attr-defined]
        if stage.endswith(wanted):
            return str(stage)
    raise AssertionError(f"it is never {wanted}")


# -- TRUNCATE


def test_a_truncate_between_the_look_at_the_files_and_the_comparison_is_no_difference(dsn: str) -> None:
    """The comparison has one snapshot, and a table that was truncated after it is empty in every snapshot."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, "folding")
    with before(database, "SELECT count(*), coalesce(sum(", lambda: truncate(dsn)):
        for _ in going:
            pass
    is_right(database)


def truncate(dsn: str) -> None:
    """Truncates as a user does who gives up soon."""
    user = session(dsn)
    sql(user, "SET lock_timeout = '50ms'")
    try:
        sql(user, "TRUNCATE t")
        user.commit()
    except psycopg2.errors.LockNotAvailable:
        user.rollback()
    user.close()


@pytest.mark.parametrize("commit", [True, False])
def test_a_truncate_at_every_stage(dsn: str, commit: bool) -> None:
    """The unit begins again; if the TRUNCATE is rolled back, it continues."""
    database = scene(dsn, 3, 300)

    def between(stage: str) -> None:
        user = session(dsn)
        sql(user, "TRUNCATE t")
        sql(user, "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 100) i")
        if commit and stage not in seen:
            user.commit()
            seen.add(stage)
        user.close()
        run_sql(dsn, "INSERT INTO t SELECT max(id) + 1, '3', 1 FROM t", "DELETE FROM t WHERE id % 50 = 7")

    seen: set[str] = set()
    compact(database, act("merge", 1, 2), between=between)
    is_right(database)


@pytest.mark.sample(0)
def test_a_long_comparison_gives_way_to_who_truncates(dsn: str) -> None:
    """Without this, writers would queue behind the TRUNCATE for as long as the comparison reads."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    one = worker(database, run)
    going = stages(database, run, one)
    until(going, "folding")
    users = [threading.Thread(target=run_sql, args=(dsn, "TRUNCATE t"))]
    summed = r"^SELECT count\(\*\), coalesce\(sum\("
    for_long = "SELECT (SELECT count(*) FROM (SELECT pg_sleep(20) OFFSET 0) s) - 1 + count(*), coalesce(sum("
    with changed(database, summed, for_long), before(database, "SELECT (SELECT", users[0].start):
        next(going)
    users[0].join()
    assert one._retreats == 1
    for _ in going:
        pass
    is_right(database)


@pytest.mark.usefixtures("deadlocks_meant")
def test_a_truncate_meets_the_segments_in_one_order(dsn: str) -> None:
    """After a rewrite the order of keys isn't that of oids, in which a TRUNCATE locks the segments."""
    database = scene(dsn, 3, 300)
    compact(database, act("rewrite", 1))
    run = begin(database, act("merge", 4, 2))
    going = stages(database, run)
    until(going, "folding")
    locked: list[str] = []
    with session(dsn) as user:
        sql(user, "LOCK TABLE roir_data.g1_s002 IN ACCESS EXCLUSIVE MODE")
        with before(database, "LOCK TABLE", lambda: None) as seen, pytest.raises(DBAPIError):
            next(going)
        locked += seen
        # The segments that come after g1_s002 aren't locked while the swap waits for it.
        assert locked[0].index("g1_s002") < locked[0].index("g1_s004")


# -- the compaction's own state


@pytest.mark.sample(0)
def test_a_unit_that_begins_anew_is_compared_again(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier comparison was of another copy."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    compared: list[str] = []
    differs = applying.differs
    monkeypatch.setattr(applying, "differs", lambda *given: compared.append("") or differs(*given))
    with session(dsn) as reader:
        # The swap finds a reader, and is tried again.
        sql(reader, "SELECT count(*) FROM ix")
        until(going, "folding")
        until(going, "folding")
        assert len(compared) == 1
    run_sql(dsn, "VACUUM FULL roir_data.g1_s001")
    for _ in going:
        pass
    assert len(compared) == 2
    is_right(database)


@pytest.mark.sample(0)
def test_a_unit_that_is_rewritten_again_and_again_is_left_out(dsn: str) -> None:
    """A user may have reasons for the rewrites; the operation ends nevertheless."""
    database = scene(dsn, 3, 300)
    compact(database, act("rewrite", 1), between=lambda stage: run_sql(dsn, "VACUUM FULL roir_data.g1_s001"))
    [(status, note)] = sql(session(dsn), "SELECT status, note FROM roir.compaction_unit")
    assert (status, segments(dsn)) == ("left", [0, 1, 2, 3])
    assert "3 times" in note
    is_right(database)


def test_a_copy_that_is_wrong_is_not_swapped_in(dsn: str) -> None:
    """The comparison finds the error, and the whole unit is taken back."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, "indexing")
    run_sql(dsn, "DELETE FROM roir_data.g1_s004 WHERE c1 = '0' AND c2 = 5")
    with pytest.raises(InvariantViolated, match="copy differs"):
        for _ in going:
            pass
    requests.request_abort(database, "ix", "test")
    clean_up.clean_up(database)
    is_right(database)


# -- aborts


def waits_for_a_lock(dsn: str, thread: threading.Thread) -> None:
    """Waits until the thread waits for another session, or has ended."""
    watcher = session(dsn)
    watcher.autocommit = True
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    while thread.is_alive() and sql(watcher, waiting) == [(0,)]:
        pass
    watcher.close()


@contextmanager
def before_commit(database: Database, part: str, act: Callable[[], object]) -> Iterator[None]:
    """In the block, calls `act` once: before the commit of the transaction that has sent a statement with `part`."""
    sent: list[object] = []

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if part in statement:
            sent.append(connection)

    def look(connection: Connection) -> None:
        if connection in sent:
            sent.clear()
            act()

    event.listen(database.engine, "before_cursor_execute", note)
    event.listen(database.engine, "commit", look)
    try:
        yield
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
        event.remove(database.engine, "commit", look)


@pytest.mark.parametrize("stage", ["waiting", "copying", "indexing", "folding"])
def test_an_abort_beside_a_step_that_is_about_to_commit(dsn: str, stage: str) -> None:
    """The abort waits for the step, and takes its effects back."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, stage)
    aborting = threading.Thread(target=abort.abort, args=(small(dsn), "ix", "test"))

    def come() -> None:
        aborting.start()
        waits_for_a_lock(dsn, aborting)

    with before_commit(database, "UPDATE roir.compaction_unit p", come), suppress(Fenced):
        next(going)
    aborting.join()
    [(status,)] = sql(session(dsn), "SELECT status FROM roir.operation WHERE kind = 'compact'")
    assert status == "aborted"
    is_right(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("stage", ["waiting", "copying", "indexing", "folding", "done"])
def test_an_abort_at_every_stage_and_then_the_same_again(dsn: str, stage: str) -> None:
    """Nothing is left, swapped segments stay, and the next compaction isn't disturbed by the last one's traces."""
    database = scene(dsn, 3, 300)
    run = begin(database, act("rewrite", 1), act("split", 2, parts=2))
    going = stages(database, run)
    until(going, f"1 {stage}" if stage != "done" else "1 folding")
    writes(dsn, 40)
    abort.abort(database, "ix", "test")
    if stage != "done":
        with pytest.raises(Fenced):
            next(going)
    is_right(database)
    assert segments(dsn) == [0, 4, 2, 3]
    compact(database, act("split", 2, parts=2), between=lambda stage: writes(dsn, 40))
    is_right(database)


# -- partitions


def partitioned(dsn: str, **options: object) -> Database:
    """As `scene`, with a partitioned table."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (200)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (200) TO (1000)",
        "INSERT INTO t SELECT i, (i % 5)::text, i FROM generate_series(1, 400) i",
        "ANALYZE t",
    )
    database = small(dsn)
    steps.make_index(database, keys="k,v", segments=3, **options)
    return database


@pytest.mark.sample(0)
def test_a_partition_leaves_while_a_swap_waits_for_its_lock(dsn: str) -> None:
    """The removal would look for the partition's entries in segments that are gone."""
    database = partitioned(dsn)
    run = begin(database, act("merge", 1, 2))
    going = stages(database, run)
    until(going, "folding")
    leave = lambda: run_sql(dsn, "SELECT roir.detach_partition('t1')")  # noqa: E731
    with before(database, 'LOCK TABLE "public"."t" IN SHARE', leave):
        next(going)
    assert segments(dsn) == [0, 1, 2, 3]
    steps.assert_exact(database)
    with database.transaction() as connection:
        [row] = remove_entries.leaving(connection)
    remove_entries.remove(database, row, lambda line: None, 1.0)
    for _ in going:
        pass
    is_right(database)


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("unique", [False, True])
def test_partitions_come_and_go_at_every_stage(dsn: str, unique: bool) -> None:
    """Partitions are empty, full or dropped; their entries are removed between the steps."""
    database = partitioned(dsn) if not unique else partitioned(dsn, unique=True)
    number = iter(range(1, 100))
    ends = []

    def between(stage: str) -> None:
        n = next(number)
        first = 1000 * n
        run_sql(
            dsn,
            f"CREATE TABLE p{n} (LIKE t INCLUDING ALL)",
            f"INSERT INTO p{n} SELECT i, 'p', i FROM generate_series({first}, {first + 20}) i",
        )
        attach.attach_partition(database, "t", f"p{n}", f"FOR VALUES FROM ({first}) TO ({first + 1000})", "test")
        steps.assert_exact(database)
        if n > 2:
            run_sql(dsn, f"SELECT roir.detach_partition('p{n - 2}')")
            ends.append(n)
        if n % 2:
            clean_up.clean_up(database)

    run = begin(database, act("merge", 1, 2), act("rewrite", 0))
    for stage in stages(database, run):
        between(stage)
        clean_up.clean_up(database)
    is_right(database)


# -- generations


@pytest.mark.sample(0)
def test_a_revert_ends_a_compaction(dsn: str) -> None:
    """Readers see another generation: nothing more is swapped, and open units are taken back."""
    database = scene(dsn, 3, 300, revert_window_s=3600)
    steps.make_index(database, keys="k,v", segments=3)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, "folding")
    revert.revert(database, "ix", "test")
    writes(dsn, 40)
    with pytest.raises(OperationFailed, match="readers see another generation"):
        until(going, "done")
    steps.assert_exact(database)
    abort.abort(database, "ix", "test")
    is_right(database)
    # After another revert the earlier swaps of the compaction are as they were.
    revert.revert(database, "ix", "test")
    compact(database, act("merge", 1, 2), between=lambda stage: writes(dsn, 40))
    revert.revert(database, "ix", "test")
    writes(dsn, 40)
    revert.revert(database, "ix", "test")
    is_right(database)


@pytest.mark.sample(0)
def test_a_generation_is_dropped_under_a_compaction_that_a_revert_has_ended(dsn: str) -> None:
    """The abort finds the rest of the compaction."""
    database = scene(dsn, 3, 300, revert_window_s=3600)
    steps.make_index(database, keys="k,v", segments=3, revert_window_s=0)
    run = begin(database, act("rewrite", 1))
    going = stages(database, run)
    until(going, "folding")
    revert.revert(database, "ix", "test")
    run_sql(dsn, "UPDATE roir.generation SET drop_after = now() WHERE status = 'retired'")
    clean_up.clean_up(database)
    writes(dsn, 40)
    steps.assert_exact(database)
    with pytest.raises(OperationFailed):
        until(going, "done")
    abort.abort(database, "ix", "test")
    is_right(database)


@pytest.mark.by_hand("sweeps")
def test_a_walk_of_a_verification_goes_on_after_a_compaction(dsn: str) -> None:
    """An earlier slice left units of segments that are gone."""
    database = scene(dsn, 3, 2000)
    verified = [verify(database, "ix", VerifyOptions(slices=4))]
    compact(database, act("merge", 1, 2), act("split", 3, parts=2))
    verified += [verify(database, "ix", VerifyOptions(slices=4)) for _ in range(4)]
    verified.append(verify(database, "ix"))
    for report in verified:
        assert (report.missing, report.extra, report.different, report.damaged) == (0, 0, 0, 0), report
    assert verified[-1].complete
    is_right(database)


# -- the guard against users' DDL


def test_the_guard_lets_a_compaction_be(dsn: str) -> None:
    """Event triggers look at each statement of ours, too."""
    run_sql(dsn, "SELECT roir.guard()")
    database = partitioned(dsn)
    compact(database, act("merge", 1, 2), act("split", 3, parts=2), act("rewrite", 0))
    is_right(database)
    run_sql(dsn, "SELECT roir.unguard()")


# -- locks


def test_segments_are_locked_within_one_limit(dsn: str) -> None:
    """lock_timeout begins again with each lock: a session that waits for the first segment would look for a deadlock,
    and be its victim.
    """
    database = scene(dsn, 4, 300)
    run = begin(database, act("merge", 1, 2, 3), lock_timeout_ms=300)
    going = stages(database, run)
    next(going)
    with (
        before(database, "SET LOCAL statement_timeout = 300", lambda: None),
        before(database, "LOCK TABLE", lambda: None) as locks,
    ):
        next(going)
    assert len(locks) == 1
    assert locks[0].count("roir_data") == 3
    for _ in going:
        pass
    is_right(database)
