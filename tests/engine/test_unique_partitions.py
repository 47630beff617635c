"""Partitions come and go under a unique index: no live row loses its entry, every pair is found, none is invented."""

from __future__ import annotations

import psycopg2.errors
import pytest

from airflow_roir.engine import clean_up
from airflow_roir.engine.database import Database
from airflow_roir.engine.partitions import attach
from airflow_roir.engine.partitions.sync import sync_partitions
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.unique import duplicates as duplicates_engine
from airflow_roir.errors import DuplicatesFound, LockNotAcquired, PartitionsChanged
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before
from tests.engine.stages import Stage
from tests.engine.test_attach_disturbed import meanwhile
from tests.engine.test_attacks_free import type_with_operators
from tests.engine.test_partitions import one
from tests.engine.test_unique import PARTITIONED, ROWS, duplicates

pytestmark = pytest.mark.sample(1)

LOADED = (
    "CREATE TABLE t9 (v int, id int, k int, day int, PRIMARY KEY (id, day))",
    "INSERT INTO t9 SELECT i, i, nullif(i, 103), 9 FROM generate_series(101, 140) i",
)
BOUNDS = "FOR VALUES IN (9)"
MODES = ("capture", "direct", "active")


def stage(database: Database, dsn: str, mode: str) -> Stage:
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), *LOADED)
    return Stage(database, mode, keys="k", include="v", segments=4, unique=True)


def attach_it(database: Database) -> int:
    return attach.attach_partition(database, "t", "t9", BOUNDS, "test")


@pytest.mark.sample(0)
@pytest.mark.parametrize("mode", [*MODES, "rebuild", "rebuild mid-fold"])
def test_a_table_is_attached_in_each_mode(database: Database, dsn: str, mode: str) -> None:
    standing = stage(database, dsn, mode)
    assert attach_it(database) == (80 if mode.startswith("rebuild") else 40)
    run_sql(dsn, "UPDATE t SET k = k + 1000 WHERE day = 9 AND id % 3 = 0", "DELETE FROM t9 WHERE id % 7 = 0")
    if mode != "capture":
        with pytest.raises(psycopg2.errors.UniqueViolation):
            run_sql(dsn, "INSERT INTO t VALUES (300, 0, 101, 0)")
    standing.finish()
    with pytest.raises(psycopg2.errors.UniqueViolation):
        run_sql(dsn, "INSERT INTO t VALUES (300, 0, 101, 0)")
    assert clean_up.clean_up(database).waiting == []


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("mode", MODES[1:])
def test_colliding_rows_are_refused_with_their_groups(dsn: str, mode: str) -> None:
    database = Database(dsn, limits=Limits(attach_rows=15))
    standing = stage(database, dsn, mode)
    # These share keys with the source's rows, with each other, and with both. The last batch meets them.
    run_sql(
        dsn,
        "UPDATE t9 SET k = 7 WHERE id = 130",
        "UPDATE t9 SET k = 500 WHERE id IN (131, 132)",
        "UPDATE t9 SET k = 8 WHERE id IN (133, 134)",
    )
    with pytest.raises(DuplicatesFound, match=r"index public\.ix: 7 rows would share 3 keys.*takes writes again"):
        attach_it(database)
    assert duplicates(database) == [
        (["500"], ["131", "9"], "public.t9"),
        (["500"], ["132", "9"], "public.t9"),
        (["7"], ["130", "9"], "public.t9"),
        (["7"], ["7", "3"], "public.t3"),
        (["8"], ["133", "9"], "public.t9"),
        (["8"], ["134", "9"], "public.t9"),
        (["8"], ["8", "0"], "public.t0"),
    ]
    assert one(database, "SELECT count(*) FROM roir_data.g1") == 60
    assert one(database, "SELECT count(*) FROM roir.source_partition WHERE status <> 'present'") == 0
    standing.assert_exact("after the refusal")
    run_sql(dsn, "UPDATE t9 SET k = id WHERE id BETWEEN 130 AND 134")
    assert attach_it(database) == 40
    assert duplicates(database) == []
    standing.finish()


def test_colliding_keys_of_a_type_in_a_schema_whose_name_ends_with_n(database: Database, dsn: str) -> None:
    """Found: the alias `n.` was replaced also within `OPERATOR(main.=)`, and the list of groups failed."""
    run_sql(dsn, *type_with_operators("main"), *(text.replace("k int", "k main.pair") for text in PARTITIONED))
    run_sql(dsn, "INSERT INTO t SELECT i, i % 4, ROW(i, i)::main.pair, i FROM generate_series(1, 20) i")
    run_sql(dsn, "CREATE TABLE t9 (LIKE t INCLUDING ALL)", "INSERT INTO t9 VALUES (901, 9, (7, 7), 0)")
    standing = Stage(database, "active", keys="k", include="v", segments=4, unique=True)
    with pytest.raises(DuplicatesFound, match=r"2 rows would share 1 key"):
        attach_it(database)
    run_sql(dsn, "UPDATE t9 SET k = (70, 70)")
    assert attach_it(database) == 1
    standing.finish()


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("nulls", [False, True])
def test_nulls(database: Database, dsn: str, mode: str, nulls: bool) -> None:
    """Distinguished by their rows, or one key."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), *LOADED, "UPDATE t9 SET k = NULL WHERE id IN (105, 106)")
    standing = Stage(database, mode, keys="k", include="v", segments=4, unique=True, nulls_not_distinct=nulls)
    if nulls:
        with pytest.raises(DuplicatesFound, match=r"3 rows would share 1 key .*\(null\)"):
            attach_it(database)
        run_sql(dsn, "UPDATE t9 SET k = id WHERE id > 103")
    assert attach_it(database) == 40
    run_sql(dsn, "UPDATE t SET v = 0 WHERE id > 100")
    standing.finish()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_is_written_meanwhile_is_the_users(database: Database, dsn: str, mode: str) -> None:
    """Seen to lose the user's entry, or the joining row's, without the note, the switch's and the fold's care."""
    standing = stage(database, dsn, mode)
    meanwhile(database, "pg_current_xact_id()::text", dsn, ["INSERT INTO t VALUES (300, 0, 101, 0)"])
    if mode == "capture":
        # During the build no writer is refused: the look finds the pair.
        attach_it(database)
        with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
            standing.finish()
        assert [row[1] for row in duplicates(database)] == [["101", "9"], ["300", "0"]]
        run_sql(dsn, "DELETE FROM t WHERE id = 300")
    else:
        with pytest.raises(DuplicatesFound, match="2 rows would share 1 key"):
            attach_it(database)
        standing.assert_exact("after the refusal")
        run_sql(dsn, "DELETE FROM t WHERE id = 300")
        attach_it(database)
    standing.finish()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("first", ["joining", "user"])
def test_the_switch_between_copy_and_attach(database: Database, dsn: str, first: str) -> None:
    """The delta has the key for both rows, of which one is live. Seen to take over that one's entry in the fold."""
    standing = stage(database, dsn, "sealed")
    insert = "INSERT INTO t VALUES (300, 0, 101, 0), (301, 1, 20, 0)"
    delete = "DELETE FROM t WHERE id = 20"
    run_sql(dsn, delete)
    if first == "user":
        run_sql(dsn, insert)

    def go_on() -> None:
        if first == "joining":
            run_sql(dsn, insert)
        standing.finish()

    colliding = pytest.raises(DuplicatesFound, match="2 rows would share 1 key")
    with before(database, "SELECT pg_current_xact_id()::text", go_on, at=1), colliding:
        attach_it(database)
    steps.assert_exact(database)
    run_sql(dsn, "DELETE FROM t WHERE id = 300")
    assert attach_it(database) == 40
    steps.assert_exact(database)


@pytest.mark.sample(0)
def test_a_pair_that_only_the_attach_makes_is_found_after_a_look(database: Database, dsn: str) -> None:
    """The look sees the copied entry while it is hidden. No user writes it again."""
    standing = stage(database, dsn, "sealed")
    run_sql(dsn, "INSERT INTO t VALUES (300, 0, 101, 0)")

    def look() -> None:
        duplicates_engine.look_and_refuse(database, standing.job)

    with before(database, "SELECT pg_current_xact_id()::text", look, at=1):
        attach_it(database)
    assert duplicates(database) == []
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        standing.finish()
    run_sql(dsn, "DELETE FROM t WHERE id = 300")
    standing.finish()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("phase", ["prepared", "mid-build", "built", "sealed", "mid-fold", "published", "rebuild"])
@pytest.mark.parametrize("how", ["roir", "natively"])
def test_entries_of_a_partition_that_left_hold_no_key(database: Database, dsn: str, phase: str, how: str) -> None:
    """They stay until a clean-up. Seen to be reported as duplicates, and to take live entries over in the fold."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"))
    standing = Stage(database, phase, keys="k", include="v", segments=4, unique=True)
    run_sql(dsn, "UPDATE t SET v = 0 WHERE id IN (5, 9)")
    if how == "roir":
        run_sql(dsn, "SELECT roir.detach_partition('t1')")
    else:
        run_sql(dsn, "ALTER TABLE t DETACH PARTITION t1")
    # Keys that the partition's rows had: of an untouched one and a touched one, by insert and by update.
    run_sql(
        dsn,
        "INSERT INTO t VALUES (301, 0, 1, 0), (305, 0, 5, 0)",
        "UPDATE t SET k = 9 WHERE id = 2",
        "UPDATE t SET k = 13 WHERE id = 3",
    )
    if how == "natively":
        if phase != "published":
            with pytest.raises(PartitionsChanged):
                standing.finish()
        sync_partitions(database, "t", "test")
    standing.finish()
    clean_up.clean_up(database)
    steps.assert_exact(database)
    with pytest.raises(psycopg2.errors.UniqueViolation):
        run_sql(dsn, "INSERT INTO t VALUES (302, 0, 13, 0)")


@pytest.mark.parametrize("phase", ["mid-build", "built"])
def test_duplicates_that_were_there_are_healed_by_a_detach(database: Database, dsn: str, phase: str) -> None:
    """The table wasn't written to: both rows are in the base. Seen to leave its segment unsealed for ever."""
    run_sql(dsn, *PARTITIONED, ROWS.format("t"), "UPDATE t SET k = id - 1 WHERE day = 1")
    standing = Stage(database, phase, keys="k", include="v", segments=1, unique=True)
    run_sql(dsn, "SELECT roir.detach_partition('t1')")
    standing.finish()
    assert duplicates(database) == []


@pytest.mark.by_hand("sweeps")
def test_a_collision_is_told_though_a_reader_holds_the_table(database: Database, dsn: str) -> None:
    stage(database, dsn, "active")
    run_sql(dsn, "UPDATE t9 SET k = 7 WHERE id = 130", f"SELECT roir.begin_attach('t', 't9', '{BOUNDS}')")
    reader = steps.session(dsn)
    steps.sql(reader, "SELECT 1 FROM t9 LIMIT 1")
    told = "2 rows would share 1 key.*still refuses writes.*roir.cancel_attach"
    with pytest.raises(LockNotAcquired, match=told):
        attach_it(database)
    reader.close()


@pytest.mark.by_hand("sweeps")
@pytest.mark.parametrize("mode", MODES)
def test_a_partition_that_is_attached_natively(database: Database, dsn: str, mode: str) -> None:
    standing = stage(database, dsn, mode)
    run_sql(
        dsn,
        "UPDATE t9 SET k = 7 WHERE id = 130",
        "UPDATE t9 SET k = 500 WHERE id IN (131, 132)",
        "ALTER TABLE t ATTACH PARTITION t9 FOR VALUES IN (9)",
    )
    if mode == "capture":
        sync_partitions(database, "t", "test")
        with pytest.raises(DuplicatesFound, match="4 rows share 2 keys"):
            standing.finish()
    else:
        with pytest.raises(DuplicatesFound, match=r"4 rows share 2 keys.*roir sync-partitions public\.t"):
            sync_partitions(database, "t", "test")
    assert len(duplicates(database)) == 4
    assert one(database, "SELECT count(*) FROM public.t") == 100
    run_sql(dsn, "UPDATE t SET k = id WHERE id IN (130, 131)")
    sync_partitions(database, "t", "test")
    standing.finish()
    assert duplicates(database) == []


def test_shifts_of_keys_do_not_hold_an_attach_up(database: Database, dsn: str) -> None:
    stage(database, dsn, "active")
    meanwhile(database, "pg_current_xact_id()::text", dsn, ["UPDATE t SET k = k - 1 WHERE k > 0"])
    assert attach_it(database) == 40
    steps.assert_exact(database)


def test_two_tables_that_are_attached_at_once_and_share_keys(database: Database, dsn: str) -> None:
    stage(database, dsn, "active")
    run_sql(dsn, "CREATE TABLE t8 (LIKE t INCLUDING ALL)", "INSERT INTO t8 VALUES (200, 8, 101, 0)")

    def other() -> None:
        with pytest.raises(LockNotAcquired, match=r"share keys with public\.t9, which is being attached, too"):
            attach.attach_partition(database, "t", "t8", "FOR VALUES IN (8)", "test", patience_s=0.1)

    with before(database, "SELECT pg_current_xact_id()::text", other, at=1):
        assert attach_it(database) == 40
    with pytest.raises(DuplicatesFound, match="2 rows would share 1 key"):
        attach.attach_partition(database, "t", "t8", "FOR VALUES IN (8)", "test")
    steps.assert_exact(database)
