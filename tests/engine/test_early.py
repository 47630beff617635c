"""Duplicates of a unique index are reported while it is built: those of the copied rows, and none that isn't real."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import psycopg2
import pytest

from airflow_roir.engine import abort, build
from airflow_roir.engine.build import Claim
from airflow_roir.engine.control import operations
from airflow_roir.engine.control.job import load_job
from airflow_roir.engine.control.run import Run, start_run
from airflow_roir.engine.database import Database
from airflow_roir.engine.early import detector as early
from airflow_roir.engine.early import hashing, store
from airflow_roir.engine.early.detecting import detecting
from airflow_roir.engine.early.detector import Detector
from airflow_roir.engine.sessions.limits import Limits
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import DuplicatesFound
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.steps import sql

pytestmark = pytest.mark.sample(5)

TABLE = "CREATE TABLE t (id int PRIMARY KEY, k {}, v int)"
ROWS = 400


@contextmanager
def detector(database: Database, run: Run, **how: Any) -> Iterator[Detector]:
    """A detector on a session of its own, to be stepped."""
    with database.connect() as connection:
        with connection.begin():
            job = load_job(connection, run)
        yield Detector(database, connection, job, **how)


def look(database: Database, run: Run) -> int:
    """The number of rows that a new detector finds to share a key, of all that is committed."""
    with detector(database, run) as one:
        return one.step(everything=True)


def found(dsn: str) -> set[tuple[str, int]]:
    """The keys and ids that are recorded and not healed."""
    with closing(steps.session(dsn)) as user:
        rows = sql(user, "SELECT key ->> 0, (primary_key ->> 0)::int FROM roir.duplicate WHERE healed_at IS NULL")
        return set(rows)


def kept(dsn: str) -> tuple[int, int]:
    """The number of hashes that are kept, and of parts whose duplicates aren't recorded yet."""
    with closing(steps.session(dsn)) as user:
        [row] = sql(
            user, "SELECT coalesce(sum(rows), 0)::int, count(*) FILTER (WHERE NOT looked) FROM roir.early_hashes"
        )
        return row


def fill(dsn: str, key: str = "int", value: str = "i") -> None:
    run_sql(
        dsn, TABLE.format(key), f"INSERT INTO t SELECT i, {value}, i FROM generate_series(1, {ROWS}) i", "ANALYZE t"
    )


def begin(database: Database, **options: Any) -> Run:
    given = {"ranges": 8, "segments": 3, "batch_rows": 20, "scan": "key", "unique": True}
    return steps.begin(database, **{**given, **options})[1]


def build_ranges(database: Database, run: Run, count: int) -> None:
    """Copies the first `count` ranges."""
    worker = steps.worker(database, run)
    with worker.connection:
        for _ in range(count):
            held = worker.claim()
            while isinstance(held, Claim):
                outcome = worker.step(held)
                assert isinstance(outcome, Step)
                held = outcome.rest


@pytest.mark.parametrize("early_bytes", [1 << 20, 600, 0])
def test_at_half_of_the_build_the_pairs_of_that_half_are_known_and_no_others(dsn: str, early_bytes: int) -> None:
    """With all, some or none of the hashes in memory."""
    database = Database(dsn, "roir tests", limits=Limits(early_bytes=early_bytes))
    fill(dsn)
    # Within the first half, within the second, one in each.
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 150)", "UPDATE t SET k = 300 WHERE id = 350")
    run_sql(dsn, "UPDATE t SET k = 20 WHERE id = 399")
    run = begin(database)
    build_ranges(database, run, 4)
    with detector(database, run) as one:
        assert one.step(everything=True) == 3
        assert found(dsn) == {("1", 1), ("1", 90), ("1", 150)}
        assert one.step(everything=True) == 0
        build_ranges(database, run, 4)
        assert one.step(everything=True) == 4
    assert found(dsn) == {*((("1", n)) for n in (1, 90, 150)), ("300", 300), ("300", 350), ("20", 20), ("20", 399)}
    assert kept(dsn) == (ROWS, 0)
    build.finish(database, run)
    assert kept(dsn) == (0, 0)


# Values that an index takes for equal though they look different; then one that differs.
ALIKE = {
    "int": ("7", "7", "8"),
    "bigint": ("7", "7", "8"),
    "numeric": ("1.0", "1.00", "1.01"),
    "float8": ("'-0'", "0", "1"),
    "real": ("'NaN'", "'NaN'", "0"),
    "text": ("'a'", "'a'", "'A'"),
    'text COLLATE "C"': ("'a'", "'a'", "'A'"),
    "varchar(9)": ("'a'", "'a'", "'A'"),
    "char(5)": ("'a'", "'a  '", "'b'"),
    '"char"': ("'a'", "'a'", "'b'"),
    "name": ("'a'", "'a'", "'b'"),
    "bytea": (r"'\x01'", r"'\x01'", r"'\x02'"),
    "bool": ("true", "true", "false"),
    "uuid": ("md5('a')::uuid", "md5('a')::uuid", "md5('b')::uuid"),
    "date": ("'2020-01-01'", "'2020-01-01'", "'2020-01-02'"),
    "time": ("'24:00'", "'24:00'", "'00:00'"),
    "timestamptz": ("'2020-01-01 12:00Z'", "'2020-01-01 13:00+01'", "'2020-01-01'"),
    "timetz": ("'12:00+00'", "'12:00+00'", "'13:00+01'"),
    "interval": ("'1 day'", "'24 hours'", "'25 hours'"),
    "inet": ("'10.0.0.1'", "'10.0.0.1/32'", "'10.0.0.1/24'"),
    "cidr": ("'10.0.0.0/8'", "'10.0.0.0/8'", "'10.0.0.0/9'"),
    "macaddr": ("'08:00:2b:01:02:03'", "'08002b:010203'", "'08:00:2b:01:02:04'"),
    "jsonb": ('\'{"a":1,"b":2}\'', '\'{"b":2,"a":1.0}\'', "'1'"),
    "int[]": ("'{1,NULL}'", "'{1,NULL}'", "'{NULL,1}'"),
    "numeric[]": ("'{1.0}'", "'{1.00}'", "'{1.01}'"),
    "int4range": ("'[1,3)'", "'[1,2]'", "'[1,4)'"),
    "oid": ("7", "7", "8"),
    "regclass": ("'pg_class'", "'pg_class'::regclass::oid", "'pg_type'"),
    "pg_lsn": ("'0/1'", "'00/01'", "'0/2'"),
    "mood": ("'sad'", "'sad'", "'ok'"),
    "few": ("1", "1", "2"),
    "pair": ("ROW(1, 2.0)", "ROW(1, 2.00)", "ROW(2, 1)"),
    'text COLLATE "loose"': ("'a'", "'A'", "'b'"),
    "bit(4)": None,
    "bit varying": None,
    "money": None,
    "tsvector": None,
    "bit(4)[]": None,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("type_", ALIKE)
def test_what_the_index_takes_for_equal_has_one_hash(database: Database, dsn: str, type_: str) -> None:
    run_sql(
        dsn,
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN few AS int",
        "CREATE TYPE pair AS (a int, b numeric)",
    )
    if "loose" in type_:
        try:
            run_sql(dsn, "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level2', deterministic = false)")
        except psycopg2.Error:
            pytest.skip("this server is built without ICU")
    run_sql(dsn, TABLE.format(type_))
    values = ALIKE[type_]
    if values is not None:
        listed = ", ".join(f"({n}, {value}, 0)" for n, value in enumerate((*values, "NULL", "NULL")))
        run_sql(dsn, f"INSERT INTO t VALUES {listed}")
    run = begin(database, ranges=1, segments=1)
    build_ranges(database, run, 1)
    with database.transaction() as connection:
        untold = hashing.untold(connection, load_job(connection, run).entry)
    if values is None:
        assert untold is not None
        assert "once all is copied" in untold
        with pytest.raises(early.NoHash):
            look(database, run)
        return
    assert untold is None
    assert look(database, run) == 2
    assert {n for _, n in found(dsn)} == {0, 1}


def test_citexts_that_differ_in_case_are_one(database: Database, dsn: str) -> None:
    try:
        run_sql(dsn, "CREATE EXTENSION citext")
    except psycopg2.Error:
        pytest.skip("this server has no citext")
    run_sql(dsn, TABLE.format("citext"), "INSERT INTO t VALUES (1, 'a', 1), (2, 'A', 2), (3, 'b', 3)")
    run = begin(database, ranges=1, segments=1)
    build_ranges(database, run, 1)
    assert look(database, run) == 2


@pytest.mark.parametrize("same", [False, True], ids=["distinct", "not distinct"])
def test_nulls_count_where_the_index_takes_them_for_equal(database: Database, dsn: str, same: bool) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k int, v int)",
        "INSERT INTO t VALUES (1, NULL, 1), (2, NULL, 1), (3, 1, NULL), (4, 1, NULL), (5, 1, 2), (6, 2, 1), (7, 5, 5), "
        "(8, 5, 5), (9, NULL, 2), (10, NULL, NULL)",
    )
    run = begin(database, ranges=1, segments=2, keys="k,v", nulls_not_distinct=same)
    build_ranges(database, run, 1)
    assert look(database, run) == (6 if same else 2)
    assert {n for _, n in found(dsn)} == ({1, 2, 3, 4} if same else set()) | {7, 8}


def test_what_writers_made_of_a_pair_decides(database: Database, dsn: str) -> None:
    fill(dsn)
    run_sql(dsn, *(f"UPDATE t SET k = {n} WHERE id = {n + 100}" for n in (1, 2, 3, 4, 5)))
    run = begin(database)
    build_ranges(database, run, 8)
    run_sql(
        dsn,
        "DELETE FROM t WHERE id = 1",  # healed
        "UPDATE t SET k = 1002 WHERE id = 102",  # healed
        "UPDATE t SET v = 0 WHERE id = 103",  # touched, and still a pair
        "DELETE FROM t WHERE id = 4",
        "INSERT INTO t VALUES (4, 4, 0)",  # the same again
    )
    assert look(database, run) == 6
    assert found(dsn) == {("3", 3), ("3", 103), ("4", 4), ("4", 104), ("5", 5), ("5", 105)}


def test_entries_of_a_partition_that_leaves_make_no_pair(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int, day int, k int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
        *(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES IN ({n})" for n in range(3)),
        "INSERT INTO t SELECT i, i % 3, i / 2 FROM generate_series(1, 30) i",
        "ANALYZE t",
    )
    run = begin(database)
    build_ranges(database, run, 99)
    with closing(steps.session(dsn)) as user:
        pairs = sql(user, "SELECT k::text FROM t WHERE day <> 1 GROUP BY k HAVING count(*) > 1")
    # The partition's entries are still there.
    run_sql(dsn, "SELECT roir.detach_partition('public.t1')")
    assert look(database, run) == 2 * len(pairs)
    assert {key for key, _ in found(dsn)} == {key for (key,) in pairs}


@pytest.mark.sample(0)
def test_a_resume_reads_no_row_twice_and_forgets_none(database: Database, dsn: str) -> None:
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 390)", "UPDATE t SET k = 30 WHERE id = 60")
    run = begin(database)
    for done in range(1, 9):
        # Each look is in a new process, which doesn't have the earlier one's memory.
        build_ranges(database, run, 1)
        look(database, run)
        assert kept(dsn) == (done * ROWS // 8, 0)
        run = start_run(database, "ix", "test", take_over=True)
    assert found(dsn) == {("1", 1), ("1", 90), ("1", 390), ("30", 30), ("30", 60)}


def test_rows_of_a_batch_that_was_open_are_read_once_it_is_committed(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has written many blocks behind them meanwhile, so that those blocks have no room left."""
    monkeypatch.setattr(store, "MARGIN_BLOCKS", 1)
    run_sql(
        dsn, TABLE.format("text"), "INSERT INTO t SELECT i, repeat('x', 900) || i, i FROM generate_series(1, 1600) i"
    )
    run_sql(dsn, "ANALYZE t", "UPDATE t SET k = 'a' WHERE id IN (10, 1000)")
    run = begin(database, segments=1, batch_rows=50)
    with detector(database, run) as one:
        slow, other = steps.worker(database, run, 0), steps.worker(database, run, 1)
        held = slow.claim()
        assert isinstance(held, Claim)
        with slow.connection.begin():
            copied = steps.half_a_batch(slow, held)
            claim = other.claim()
            for _ in range(7):
                while isinstance(claim, Claim):
                    outcome = other.step(claim)
                    assert isinstance(outcome, Step)
                    claim = outcome.rest
                    one.step(everything=True)
                claim = other.claim()
            assert kept(dsn) == (1600 - copied, 0)
        # The rows of the slow batch, which is committed, are read too.
        batch = "UPDATE roir.scan_range SET batches = batches + 1 WHERE ordinal = 0"
        run_sql(dsn, batch)
        assert one.step(everything=True) == 2
        assert kept(dsn) == (1600, 0)
        # No worker writes there any more, so these blocks aren't read again.
        run_sql(dsn, batch)
        one.step(everything=True)
        state = one._read[1]
        assert state.settled == state.end - 1
        assert kept(dsn) == (1600, 0)
        for worker in (slow, other):
            worker.connection.close()


def test_look_ups_wait_for_their_share_of_the_time(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id = 2")
    run = begin(database, segments=1)
    build_ranges(database, run, 4)
    now = 0.0
    monkeypatch.setattr(early, "FIRST_S", 0.0)
    with detector(database, run, clock=lambda: now) as one:
        one._reading.spent_s, one._looking.spent_s = -1.0, 1.0
        one.step()
        one.step()
        # The part in which no hash came twice is done at once.
        assert kept(dsn)[0] == ROWS // 2
        assert found(dsn) == set()
        now = 1.0 / database.limits.early_looking_share
        assert one.step() == 2


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("moment", ["read", "join", "_look_up_in", "mark_looked"])
def test_killed_at_any_moment_the_next_one_knows_all(
    database: Database, dsn: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 150)")
    run = begin(database)
    build_ranges(database, run, 4)

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with detector(database, run) as one, monkeypatch.context() as patch:
        target = {"read": one._store, "_look_up_in": one}.get(moment, early)
        patch.setattr(target, moment, kill)
        with pytest.raises(Killed):
            one.step(everything=True)
    run = start_run(database, "ix", "test", take_over=True)
    look(database, run)
    assert found(dsn) == {("1", 1), ("1", 90), ("1", 150)}
    assert kept(dsn) == (ROWS // 2, 0)


def test_of_two_detectors_one_gives_way(database: Database, dsn: str) -> None:
    fill(dsn)
    run = begin(database)
    build_ranges(database, run, 2)
    with detector(database, run) as older, detector(database, run) as newer:
        assert newer.step(everything=True) == 0
        with pytest.raises(Exception, match="early_hashes_generation_id_segment_number"):
            older.step(everything=True)
    assert kept(dsn) == (ROWS // 4, 0)


def test_a_segment_that_was_emptied_is_read_anew(database: Database, dsn: str) -> None:
    fill(dsn)
    run = begin(database)
    build_ranges(database, run, 2)
    with detector(database, run) as one:
        one.step(everything=True)
        run_sql(dsn, "TRUNCATE t", f"INSERT INTO t SELECT i, i, i FROM generate_series(1, {ROWS}) i")
        build_ranges(database, run, 6)
        assert one.step(everything=True) == 0
        assert kept(dsn) == (ROWS * 3 // 4, 0)
        assert not one._waiting
        # A new detector, as after a resume, notices a new file of the base too.
        run_sql(dsn, "TRUNCATE t")
    assert look(database, run) == 0
    assert kept(dsn) == (0, 0)
    assert found(dsn) == set()


def test_the_first_group_stops_an_operation_that_is_to_stop(database: Database, dsn: str) -> None:
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id = 2")
    run = begin(database, on_duplicate="stop")
    build_ranges(database, run, 2)
    with pytest.raises(DuplicatesFound, match="2 rows share 1 key"):
        look(database, run)
    row = operations.find_operation(database, "ix")
    assert (row.status, row.phase) == ("paused", "build")
    assert "2 rows share 1 key" in row.pause_reason
    # Without a healed pair it stops again at once. With one it continues.
    run = start_run(database, "ix", "test")
    with pytest.raises(DuplicatesFound):
        look(database, run)
    run_sql(dsn, "UPDATE t SET k = 1000 WHERE id = 2")
    run = start_run(database, "ix", "test")
    assert look(database, run) == 0
    steps.finish_all(database, run)
    steps.assert_exact(database)


@pytest.mark.sample(0)
@pytest.mark.parametrize("rebuild", [False, True], ids=["create", "rebuild"])
def test_an_abort_leaves_no_hashes(database: Database, dsn: str, rebuild: bool) -> None:
    fill(dsn)
    if rebuild:
        steps.make_index(database, unique=True)
    run = begin(database, **({"table": None, "keys": None, "unique": False} if rebuild else {}))
    build_ranges(database, run, 4)
    look(database, run)
    assert kept(dsn)[0] == ROWS // 2
    abort.abort(database, "ix", "test")
    assert kept(dsn) == (0, 0)


def test_a_plain_index_has_no_detector(database: Database, dsn: str) -> None:
    fill(dsn)
    run = begin(database, unique=False)
    with detecting(database, run):
        build_ranges(database, run, 8)
    assert kept(dsn) == (0, 0)


# Beside other tests a look may take a while, so each look may do everything.
EAGER = Limits(early_every_s=0.01, early_reading_share=1.0, early_looking_share=1.0)


def test_a_build_that_stands_at_half_is_told_of(dsn: str) -> None:
    """The thread itself looks, without waiting for a budget, and without being asked."""
    database = Database(dsn, "roir tests", limits=EAGER)
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 150)", "UPDATE t SET k = 300 WHERE id = 350")
    run = begin(database)
    with detecting(database, run):
        build_ranges(database, run, 4)
        with closing(steps.session(dsn)) as user:
            all_of_it = "SELECT 1 FROM roir.early_hashes HAVING bool_and(looked) AND sum(rows) = %s"
            while not sql(user, all_of_it, ROWS // 2):
                user.rollback()
        build_ranges(database, run, 4)
    assert {("1", 1), ("1", 90), ("1", 150)} <= found(dsn)


@pytest.mark.parametrize("ends", ["by itself", "by an error"])
def test_when_all_is_copied_it_looks_a_last_time(dsn: str, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector's next look wasn't due yet. A build that fails isn't held up."""
    database = Database(dsn, "roir tests", limits=Limits(early_every_s=600, early_last_share=600))
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 350)")
    run = begin(database)
    ready = threading.Event()
    made = Detector.__init__

    def make(self: Detector, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        ready.set()

    monkeypatch.setattr(Detector, "__init__", make)
    with suppress(ZeroDivisionError), detecting(database, run):
        build_ranges(database, run, 8)
        assert ready.wait(60)
        assert found(dsn) == set()
        if ends == "by an error":
            raise ZeroDivisionError
    assert found(dsn) == ({("1", 1), ("1", 90), ("1", 350)} if ends == "by itself" else set())


def test_keys_that_only_have_one_hash_are_no_pair(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(dsn)
    run_sql(dsn, "UPDATE t SET k = 1 WHERE id IN (90, 350)")
    run = begin(database)
    monkeypatch.setattr(early, "key_hash", lambda *args: f"({hashing.key_hash(*args)}) & 7")
    build_ranges(database, run, 8)
    assert look(database, run) == 3
    assert found(dsn) == {("1", 1), ("1", 90), ("1", 350)}


def test_pairs_over_many_blocks_are_found_where_they_are(database: Database, dsn: str) -> None:
    run_sql(
        dsn, TABLE.format("text"), "INSERT INTO t SELECT i, repeat('x', 900) || i, i FROM generate_series(1, 900) i"
    )
    run_sql(dsn, "ANALYZE t", *(f"UPDATE t SET k = 'pair {n}' WHERE id IN ({n}, {n + 450})" for n in range(1, 450, 40)))
    run = begin(database, segments=1, batch_rows=100)
    with detector(database, run) as one:
        build_ranges(database, run, 4)
        assert one.step(everything=True) == 0
        build_ranges(database, run, 9)
        assert one.step(everything=True) == 24
        assert one.step(everything=True) == 0
    assert len(found(dsn)) == 24


def test_a_detector_that_fails_is_told_of_and_hurts_no_build(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(dsn, "roir tests", limits=EAGER)
    fill(dsn)
    run = begin(database)
    failed = threading.Event()

    def step(self: Detector) -> int:
        failed.set()
        raise TypeError("a bug")

    monkeypatch.setattr(Detector, "step", step)
    with detecting(database, run):
        assert failed.wait(60)
    steps.finish_all(database, run)
    with closing(steps.session(dsn)) as user:
        told = sql(user, "SELECT detail FROM roir.event WHERE action = 'early'")
    assert told == [("duplicates are told by the seal alone: TypeError: a bug",)]


@pytest.mark.sample(0)
@pytest.mark.parametrize("scan", ["key", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_beside_workers_and_writers_nothing_is_missed_and_nothing_invented(dsn: str, seed: int, scan: str) -> None:
    """One snapshot decides each finding; the writers' pairs come and go meanwhile."""
    database = Database(dsn, "roir tests", limits=EAGER)
    fill(dsn)
    chance = random.Random(seed)
    always = {n: chance.randrange(1, ROWS) for n in chance.sample(range(1, ROWS), 20)}
    run_sql(dsn, *(f"UPDATE t SET k = 10000 + {n % 5} WHERE id = {n}" for n in always))
    run = begin(database, ranges=16, scan=scan)
    with closing(steps.session(dsn)) as user, detector(database, run) as one:
        new = 1000

        def between() -> None:
            nonlocal new
            for _ in range(3):
                new += 1
                row = chance.randrange(1, ROWS)
                if row in always:
                    continue
                write = chance.choice(
                    (
                        f"UPDATE t SET k = {new} WHERE id = {row}",
                        f"UPDATE t SET k = {row} WHERE id = {row}",
                        f"UPDATE t SET v = v + 1 WHERE id = {row}",
                        f"DELETE FROM t WHERE id = {row}",
                        f"INSERT INTO t VALUES ({row}, {row}, 0) ON CONFLICT (id) DO UPDATE SET k = {-new}",
                    )
                )
                sql(user, write)
                # Keys move from row to row, and no two rows ever share one.
                if chance.random() < 0.5:
                    user.commit()
            user.commit()
            if chance.random() < 0.3:
                one.step()

        steps.copy_by_chance(database, run, chance, between)
        one.step(everything=True)
        user.commit()
        shared = "SELECT k, id, count(*) OVER (PARTITION BY k) AS sharing FROM t WHERE id = ANY (%s)"
        real = set(sql(user, f"SELECT k::text, id FROM ({shared}) s WHERE sharing > 1", list(always)))
    assert found(dsn) == real
    with closing(steps.session(dsn)) as user:
        [(copied,)] = sql(user, "SELECT sum(rows)::int FROM roir.scan_range")
    assert kept(dsn) == (copied, 0)
