"""Several indexes of one source by one scan: each is exact, and what happens to one of them doesn't hurt the others."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg2
import psycopg2.errors
import psycopg2.extensions
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from airflow_roir.engine import abort, build
from airflow_roir.engine.build import BuildWorker, Claim
from airflow_roir.engine.claims import WorkLeft
from airflow_roir.engine.control import operations, requests
from airflow_roir.engine.control.job import Job, load_job
from airflow_roir.engine.control.run import Run, end_run, settle, start_run
from airflow_roir.engine.database import Database, execute
from airflow_roir.engine.partitions import detach
from airflow_roir.engine.scan import carrying
from airflow_roir.engine.snapshot.operation import operation_status
from airflow_roir.engine.work.phase_work import Step
from airflow_roir.errors import DuplicatesFound, Fenced, LockNotAcquired, SourceChanged
from airflow_roir.operation import Phase, Status
from tests.conftest import run_sql
from tests.engine import steps
from tests.engine.interposed import before, changed

pytestmark = pytest.mark.sample(1)

ROWS = 60
SMALL = {"segments": 2, "batch_rows": 5}
INDEXES = {"a": ("k", "v"), "b": ("v", None), "c": ("v, k", None)}


@pytest.fixture
def table(dsn: str) -> str:
    steps.make_table(dsn, ROWS)
    return dsn


def begin(database: Database, index: str, **options: object) -> Run:
    """An operation with a run that is alive. If there are several, the later ones take the first one's ranges."""
    keys, include = INDEXES[index]
    return steps.begin(database, index, keys=keys, include=include, **{**SMALL, **options})[1]


def ranges(database: Database, run: Run) -> list[tuple[object, ...]]:
    with database.transaction() as connection:
        found = execute(
            connection,
            "SELECT ordinal, relation, lower, upper, filenode, watermark, done, rows FROM roir.scan_range "
            "WHERE operation_id = %(id)s ORDER BY ordinal",
            {"id": run.operation_id},
        )
        return [tuple(row) for row in found]


def copied(database: Database, run: Run) -> int:
    return sum(int(str(row[-1])) for row in ranges(database, run))


def batch(worker: BuildWorker, claim: Claim) -> Step:
    outcome = worker.step(claim)
    assert isinstance(outcome, Step)
    return outcome


def finish(database: Database, index: str) -> None:
    """Finishes an operation by a run of its own. The others' claims are free: their runs have no heartbeat."""
    run_sql(database.dsn, "UPDATE roir.operation SET heartbeat_at = NULL WHERE status = 'running'")
    steps.finish_all(database, start_run(database, index, "test", take_over=True))
    steps.assert_exact(database, index)


def test_one_scan_builds_three_indexes(database: Database, table: str) -> None:
    runs = [begin(database, index) for index in INDEXES]
    rows = steps.batches(database, runs[0])
    assert sum(rows) == ROWS
    assert ranges(database, runs[0]) == ranges(database, runs[1]) == ranges(database, runs[2])
    for run in runs:
        assert copied(database, run) == ROWS
        assert isinstance(steps.worker(database, run).claim(), build.Stop)
        steps.finish_all(database, run)
    for index in INDEXES:
        steps.assert_exact(database, index)


def test_a_batch_in_the_middle_is_for_all_that_stand_there(database: Database, table: str) -> None:
    """The last operation comes later, and copies alone the rows that the others have already."""
    a, b = begin(database, "a"), begin(database, "b")
    first = steps.worker(database, a)
    claim = steps.claim_of(first)
    held = batch(first, claim).rest
    c = begin(database, "c")
    assert held is not None
    while held is not None:
        held = batch(first, held).rest
    assert copied(database, a) == copied(database, b) > copied(database, c) == 0
    # The range of the first worker is free for the last operation, and done for the others.
    assert steps.claim_of(steps.worker(database, c)).ordinal == claim.ordinal
    for index in INDEXES:
        finish(database, index)


def test_no_two_workers_read_the_same_range(database: Database, table: str) -> None:
    """Each operation's workers copy for the others: no worker waits for another."""
    a, b = begin(database, "a"), begin(database, "b")
    one, two = steps.worker(database, a), steps.worker(database, b)
    claims = steps.claim_of(one), steps.claim_of(two)
    assert claims[0].ordinal != claims[1].ordinal
    for worker, claim in zip((one, two), claims, strict=True):
        batch(worker, claim)
    assert copied(database, a) == copied(database, b) == 10
    with database.transaction() as connection:
        left = build.PHASE.left(connection, b, busy=[0])
    # The range of the other operation's worker is undone, but isn't free.
    assert left == WorkLeft(free=len(ranges(database, b)) - 2, undone=len(ranges(database, b)))


def test_two_claims_at_the_same_time(database: Database, table: str) -> None:
    """Neither claim has seen the other one: the younger operation's worker gives its range back."""
    a, b = begin(database, "a"), begin(database, "b")
    one, two = steps.worker(database, a), steps.worker(database, b)
    with changed(database, r"AND NOT \(\s*id = ANY", "AND (true OR id = ANY"):
        claims = steps.claim_of(one), steps.claim_of(two)
    assert claims[0].ordinal == claims[1].ordinal
    assert batch(two, claims[1]) == Step(0, 0.0, done=False, rests=False)
    batch(one, claims[0])
    assert copied(database, a) == copied(database, b) == 5
    assert steps.claim_of(two).ordinal != claims[0].ordinal


def test_a_worker_that_is_stuck_holds_no_other_operation_up(database: Database, table: str) -> None:
    """The stuck worker's run is alive, and waits for it."""
    a, b = begin(database, "a"), begin(database, "b")
    stuck, worker = steps.worker(database, a), steps.worker(database, b)
    claims = steps.claim_of(stuck)
    run_sql(table, "UPDATE roir.scan_range SET moved_at = moved_at - interval '61 seconds' WHERE moved_at IS NOT NULL")
    own = steps.claim_of(worker)
    assert own.ordinal == claims.ordinal
    assert batch(worker, own).rows == 5
    assert copied(database, a) == 0
    batch(stuck, claims)
    for index in ("a", "b"):
        finish(database, index)


def test_a_worker_that_fails_again_and_again_holds_no_other_operation_up(database: Database, table: str) -> None:
    """The worker claims its range again after each error that may pass: that isn't progress."""
    a, b = begin(database, "a"), begin(database, "b")
    failing, worker = steps.worker(database, a), steps.worker(database, b)
    claim = steps.claim_of(failing)
    run_sql(table, "UPDATE roir.scan_range SET moved_at = moved_at - interval '61 seconds' WHERE moved_at IS NOT NULL")
    assert steps.claim_of(failing).ordinal == claim.ordinal
    own = steps.claim_of(worker)
    assert own.ordinal == claim.ordinal
    assert batch(worker, own).rows == 5


@pytest.mark.parametrize("dead", ["a", "b"])
def test_nobody_waits_for_whom_nobody_drives(database: Database, table: str, dead: str) -> None:
    """A claim of a run whose heart has stopped holds no other operation up."""
    runs = {index: begin(database, index) for index in ("a", "b")}
    claim = steps.claim_of(steps.worker(database, runs[dead]))
    run_sql(
        table,
        "UPDATE roir.operation SET heartbeat_at = heartbeat_at - interval '31 seconds' "
        f"WHERE id = {runs[dead].operation_id}",
    )
    alive = "ab".replace(dead, "")
    worker = steps.worker(database, runs[alive])
    found = steps.claim_of(worker)
    assert found.ordinal == claim.ordinal
    batch(worker, found)
    assert copied(database, runs[alive]) == 5
    assert copied(database, runs[dead]) == 0


def test_a_paused_one_gets_nothing_more_and_goes_on_where_it_stood(database: Database, table: str) -> None:
    a, b = begin(database, "a"), begin(database, "b")
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    requests.pause(database, "b", "test", "for lunch")
    assert held is not None
    while held is not None:
        held = batch(worker, held).rest
    assert copied(database, b) == 5
    b = start_run(database, "b", "test", take_over=True)
    # The range goes on from this operation's own watermark, alone; the next ranges are copied together again.
    own = steps.worker(database, b)
    assert steps.claim_of(own).scan.watermark == ["5"]
    claim = steps.claim_of(worker)
    before_it = copied(database, b)
    batch(worker, claim)
    assert copied(database, b) == before_it + 5
    for index in ("a", "b"):
        finish(database, index)


def test_one_with_another_rate_limit_is_left_alone(database: Database, table: str) -> None:
    a, b = begin(database, "a"), begin(database, "b", max_rows_per_second=1000)
    c = begin(database, "c", max_rows_per_second=1000)
    worker = steps.worker(database, a)
    batch(worker, steps.claim_of(worker))
    assert [copied(database, run) for run in (a, b, c)] == [5, 0, 0]
    limited = steps.worker(database, b)
    batch(limited, steps.claim_of(limited))
    assert [copied(database, run) for run in (a, b, c)] == [5, 5, 5]
    # Both operations may copy for each other, each at half of the rate.
    assert limited.source.carrier.share == 2


@pytest.mark.parametrize("scan", ["key", "block"])
def test_rows_that_came_between_the_prepares(database: Database, dsn: str, scan: str) -> None:
    """The first operation's capture has them, the second one's doesn't: the second operation gets ranges for them."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int, k text, v int, pad text DEFAULT repeat('x', 3000), PRIMARY KEY (id)) "
        "PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE t3 PARTITION OF t FOR VALUES FROM (200) TO (300)",
        "ALTER TABLE t1 ALTER pad SET STORAGE PLAIN; ALTER TABLE t3 ALTER pad SET STORAGE PLAIN",
        "INSERT INTO t (id, k, v) SELECT i, i % 5, i FROM generate_series(1, 40) i",
    )
    a = begin(database, "a", scan=scan)
    run_sql(
        dsn,
        "INSERT INTO t (id, k, v) SELECT i, i % 5, i FROM generate_series(41, 60) i",
        "INSERT INTO t (id, k, v) SELECT i, i % 5, i FROM generate_series(201, 210) i",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (100) TO (200)",
        "INSERT INTO t (id, k, v) SELECT i, i % 5, i FROM generate_series(101, 130) i",
        "DROP TABLE t3",
    )
    b = begin(database, "b", scan=scan)
    assert [row[1:5] for row in ranges(database, b)] != [row[1:5] for row in ranges(database, a)]
    settle(database, a, SourceChanged("t3 is gone"), fatal=True)
    c = begin(database, "c", scan=scan)
    for run in (b, c):
        steps.finish_all(database, run)
    for index in ("b", "c"):
        steps.assert_exact(database, index)
    assert copied(database, b) == copied(database, c) == 90


@pytest.mark.parametrize(
    "altered",
    [
        "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)",
        "VACUUM FULL t",
        "TRUNCATE t; INSERT INTO t SELECT i, i % 5, i FROM generate_series(1, 60) i",
    ],
)
@pytest.mark.parametrize("scan", ["key", "block"])
def test_a_cut_that_fits_no_more_is_not_taken(database: Database, table: str, altered: str, scan: str) -> None:
    """The other build may not have noticed the change yet."""
    a = begin(database, "a", scan=scan)
    for statement in altered.split("; "):
        run_sql(table, statement)
    b = begin(database, "b", scan=scan)
    with database.transaction() as connection:
        shares = operations.read_operation(connection, b.operation_id).scan_of == a.operation_id
    assert shares == (scan == "key" and not altered.startswith("ALTER"))
    steps.finish_all(database, b)
    steps.assert_exact(database, "b")


def test_a_build_whose_labels_were_renamed_is_no_obstacle(database: Database, dsn: str) -> None:
    """The other build's bounds contain a label that is gone. The new build plans alone."""
    run_sql(
        dsn,
        "CREATE TYPE level AS ENUM ('low', 'mid', 'high')",
        "CREATE TABLE t (l level, id int, k text, v int, PRIMARY KEY (l, id))",
        f"INSERT INTO t SELECT (ARRAY['low', 'mid', 'high'])[i % 3 + 1]::level, i, i % 5, i "
        f"FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    begin(database, "a")
    run_sql(dsn, "ALTER TYPE level RENAME VALUE 'mid' TO 'middle'")
    b = begin(database, "b")
    with database.transaction() as connection:
        assert operations.read_operation(connection, b.operation_id).scan_of is None
    finish(database, "b")


def test_ranges_that_were_asked_for_are_its_own(database: Database, table: str) -> None:
    begin(database, "a")
    b = begin(database, "b", ranges=3)
    c = begin(database, "c", parallelism=200)
    assert len(ranges(database, b)) == 3
    with database.transaction() as connection:
        for run in (b, c):
            assert operations.read_operation(connection, run.operation_id).scan_of is None


# Events for one of three operations while a worker of another one is in the middle of a batch. MOMENTS: the statements
# before which they come.
FAULTS = {
    "it is aborted": lambda database, run: requests.request_abort(database, "b", "test"),
    "it is aborted and gone": lambda database, run: abort.abort(database, "b", "test"),
    "it is paused": lambda database, run: requests.pause(database, "b", "test"),
    "it fails": lambda database, run: settle(database, run, SourceChanged("a fault"), fatal=True),
    "another run takes it over": lambda database, run: start_run(database, "b", "next", take_over=True),
    "its run ends": lambda database, run: end_run(database, run),
}
MOMENTS = ("SELECT r.id, r.claim_token", "WITH rows AS", "UPDATE roir.scan_range p")


@pytest.mark.sample(0)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_happens_to_one_does_not_hurt_the_others(database: Database, table: str, fault: str, moment: str) -> None:
    runs = {index: begin(database, index) for index in INDEXES}
    worker = steps.worker(database, runs["a"])
    claim = steps.claim_of(worker)
    if moment == "UPDATE roir.scan_range p" and "gone" in fault:
        # The drop waits for the batch, and ends with it.
        pytest.skip("a table that was written to can't be dropped before the commit")
    with before(database, moment, lambda: FAULTS[fault](Database(table), runs["b"])):
        assert batch(worker, claim).rows == 5
    assert copied(database, runs["a"]) == 5
    assert copied(database, runs["c"]) in (0, 5)
    for index in ("a", "c"):
        finish(database, index)
    found = operation_status(database, runs["b"].operation_id)
    if (found.status == Status.RUNNING and "gone" not in fault) or found.status == Status.PAUSED:
        finish(database, "b")


@pytest.mark.sample(0)
def test_a_table_that_is_full_is_left_out_and_its_own_worker_says_so(database: Database, table: str) -> None:
    """A batch for three operations: the one at fault is found, and the rows are copied for the other ones again."""
    a, b, c = (begin(database, index) for index in INDEXES)
    worker = steps.worker(database, a)
    held: Claim | None = steps.claim_of(worker)
    rows = []
    # An error of the statement that writes there, like 53100, disk full.
    full = "INSERT INTO roir_data.g2 (c1, c2) SELECT 1 / (random() * 0)::int, 1 UNION ALL "
    with changed(database, r"INSERT INTO roir_data\.g2 \([^)]*\)\s", full):
        while len(rows) < 8:
            outcome = batch(worker, held or steps.claim_of(worker))
            held = outcome.rest
            rows.append((outcome.rows, copied(database, b), copied(database, c)))
        own = steps.worker(database, b)
        with pytest.raises(DBAPIError, match="division by zero"):
            own.step(steps.claim_of(own))
    assert copied(database, a) == sum(row[0] for row in rows)
    assert rows[-1][1] == 0
    # The batch is copied for each operation alone the first time, and then not until the failing one is known.
    assert rows[-1][2] >= copied(database, a) - 3 * 5
    for index in INDEXES:
        finish(database, index)


@pytest.mark.sample(0)
@pytest.mark.parametrize("indexes", ["ab", "abc"])
@pytest.mark.parametrize("error", ["an error of the server", "one of ours"])
def test_what_fails_when_a_companion_is_looked_at_is_its_own(
    database: Database, table: str, monkeypatch: pytest.MonkeyPatch, error: str, indexes: str
) -> None:
    """A new leaf that is renamed at that moment has this effect: a statement fails, and the transaction with it."""
    runs = {index: begin(database, index) for index in indexes}
    worker = steps.worker(database, runs["a"])

    def load(connection: Connection, run: Run) -> Job:
        if run.operation_id == runs["b"].operation_id:
            try:
                execute(connection, "LOCK TABLE ONLY gone IN ACCESS SHARE MODE")
            except DBAPIError as gone:
                if error == "one of ours":
                    raise LockNotAcquired("renamed") from gone
                raise
        return load_job(connection, run)

    monkeypatch.setattr(carrying, "load_job", load)
    assert batch(worker, steps.claim_of(worker)).rows == 5
    assert [copied(database, run) for run in runs.values()] == [5, 0, 5][: len(indexes)]
    monkeypatch.undo()
    for index in indexes:
        finish(database, index)


def test_columns_that_are_exchanged_for_a_while(database: Database, table: str) -> None:
    """The reader's own columns are as before. The capture writes for all, so both fail, and nothing is copied."""
    run_sql(table, "ALTER TABLE t ADD w int; UPDATE t SET w = v + 1000")
    a = steps.begin(database, "a", keys="k", **SMALL)[1]
    b = steps.begin(database, "b", keys="v", **SMALL)[1]
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    run_sql(table, "ALTER TABLE t RENAME v TO x; ALTER TABLE t RENAME w TO v; ALTER TABLE t RENAME x TO w")
    assert held is not None
    with pytest.raises(SourceChanged):
        worker.step(held)
    assert copied(database, a) == copied(database, b) == 5


def test_what_is_wrong_for_a_companion_alone_is_its_own(database: Database, dsn: str) -> None:
    """The reader checks the source for both, and goes on without the companion whose column is altered."""
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int GENERATED ALWAYS AS (id * 2) STORED)",
        f"INSERT INTO t SELECT i, i % 5 FROM generate_series(1, {ROWS}) i",
        "ANALYZE t",
    )
    a = steps.begin(database, "a", keys="k", **SMALL)[1]
    b = steps.begin(database, "b", keys="v", **SMALL)[1]
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    run_sql(dsn, "ALTER TABLE t ALTER v DROP EXPRESSION")
    assert held is not None
    assert batch(worker, held).rows == 3
    assert (copied(database, a), copied(database, b)) == (8, 5)
    finish(database, "a")


@pytest.mark.parametrize("statement", range(1, 14))
def test_a_worker_that_is_killed_between_its_statements(database: Database, table: str, statement: int) -> None:
    """Each operation has the whole batch, or nothing of it."""
    a, b = begin(database, "a"), begin(database, "b")
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    assert held is not None
    with suppress(AssertionError), before(database, "", lambda: kill(worker), at=statement), suppress(DBAPIError):
        worker.step(held)
    assert copied(database, a) == copied(database, b)
    with database.transaction() as connection:
        build.PHASE.left(connection, a, busy=[])
    again = steps.worker(database, a)
    batch(again, steps.claim_of(again))
    assert copied(database, a) == copied(database, b)
    for index in ("a", "b"):
        finish(database, index)


def kill(worker: BuildWorker) -> None:
    session: Any = worker.connection.connection.dbapi_connection
    killer = psycopg2.connect(session.dsn)
    killer.autocommit = True
    steps.sql(killer, "SELECT pg_terminate_backend(%s, 10000)", session.info.backend_pid)
    killer.close()


def test_a_leaf_that_leaves_between_two_batches(database: Database, dsn: str) -> None:
    run_sql(
        dsn,
        "CREATE TABLE t (id int PRIMARY KEY, k text, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (31)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM (31) TO (100)",
        f"INSERT INTO t SELECT i, i % 5, i FROM generate_series(1, {ROWS}) i",
    )
    a, _ = begin(database, "a"), begin(database, "b")
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    detach.detach_partition(database, "t1", "test")
    assert held is not None
    assert batch(worker, held) == Step(0, 0.0, done=False, rests=False)
    for index in ("a", "b"):
        finish(database, index)


@pytest.mark.parametrize("scan", ["key", "block"])
def test_a_truncate_between_two_batches(database: Database, table: str, scan: str) -> None:
    a, _ = begin(database, "a", scan=scan), begin(database, "b", scan=scan)
    worker = steps.worker(database, a)
    held = batch(worker, steps.claim_of(worker)).rest
    run_sql(table, "TRUNCATE t", "INSERT INTO t SELECT i, i % 5, i FROM generate_series(1, 20) i")
    while held is not None:
        held = batch(worker, held).rest
    for index in ("a", "b"):
        finish(database, index)


def test_of_a_source_whose_owner_is_not_trusted(database: Database, dsn: str, stranger: str) -> None:
    steps.make_table(dsn, ROWS)
    run_sql(dsn, f"ALTER TABLE t OWNER TO {psycopg2.extensions.parse_dsn(stranger)['user']}")
    a, b = begin(database, "a"), begin(database, "b")
    steps.batches(database, a)
    assert copied(database, a) == copied(database, b) == ROWS
    for index in ("a", "b"):
        finish(database, index)


def test_a_unique_one_with_duplicates_pauses_alone(database: Database, table: str) -> None:
    a = begin(database, "a")
    b = steps.begin(database, "b", keys="k", unique=True, **SMALL)[1]
    steps.batches(database, a)
    assert copied(database, b) == ROWS
    build.finish(database, b)
    with pytest.raises(DuplicatesFound):
        steps.seal_all(database, b)
    finish(database, "a")


WRITES = (
    "UPDATE t SET k = '{k}' WHERE id = {i}",
    "UPDATE t SET v = v + 100 WHERE id BETWEEN {i} AND {i} + 5",
    "UPDATE t SET id = {i} + 1000 WHERE id = {i}",
    "DELETE FROM t WHERE id BETWEEN {i} AND {i} + 1",
    "INSERT INTO t VALUES ({i}, '{k}', 0) ON CONFLICT (id) DO UPDATE SET k = excluded.k",
    "INSERT INTO t SELECT coalesce(max(id), 0) + 1, '{k}', 1 FROM t",
)


class Crowd:
    """Three operations with the same ranges, each with two workers, and random events for them."""

    def __init__(self, database: Database, chance: random.Random, scan: str) -> None:
        self.database, self.chance, self.scan = database, chance, scan
        self.user = steps.session(database.dsn)
        self.runs = {index: begin(database, index, scan=scan) for index in INDEXES}
        self.workers: dict[tuple[str, int], tuple[BuildWorker, Claim | None]] = {}
        self.carried = 0

    def status(self, index: str) -> str:
        with self.database.transaction() as connection:
            row = operations.read_operation(connection, self.runs[index].operation_id)
            return str(row.phase if row.status == Status.RUNNING else row.status)

    def step(self) -> None:
        index, number = self.chance.choice(list(INDEXES)), self.chance.randrange(2)
        acts: list[tuple[int, Callable[[], object]]] = [
            (60, lambda: self.work(index, number)),
            (25, self.write),
            (3, lambda: self.pause(index)),
            (6, lambda: self.resume(index)),
            (1, lambda: self.fail(index)),
            (2, lambda: self.abort(index)),
            (3, lambda: self.lose(index, number)),
        ]
        self.chance.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()

    def work(self, index: str, number: int) -> None:
        run = self.runs[index]
        if (index, number) not in self.workers:
            if self.status(index) != Phase.BUILD:
                return
            self.workers[index, number] = steps.worker(self.database, run, number), None
        worker, held = self.workers[index, number]
        try:
            if held is None:
                found = worker.claim()
                held = found if isinstance(found, Claim) else None
            else:
                outcome = worker.step(held)
                held = outcome.rest if isinstance(outcome, Step) else None
                self.carried += len(worker.source.carrier.companions)
        except Fenced:
            worker.connection.close()
            del self.workers[index, number]
        else:
            self.workers[index, number] = worker, held

    def write(self) -> None:
        """Writes, and sometimes leaves the transaction open: a prepare drains it, and every other step passes it."""
        values = {"i": self.chance.randrange(1, 70), "k": self.chance.randrange(5)}
        try:
            steps.sql(self.user, self.chance.choice(WRITES).format(**values))
        except psycopg2.errors.UniqueViolation:
            self.user.rollback()
        if self.chance.random() < 0.5:
            self.user.commit()

    def pause(self, index: str) -> None:
        if self.status(index) == Phase.BUILD:
            requests.pause(self.database, index, "test")

    def resume(self, index: str) -> None:
        """Starts another run, even if the last one is alive."""
        if self.status(index) in (Phase.BUILD, Status.PAUSED):
            self.runs[index] = start_run(self.database, index, "test", take_over=True)

    def fail(self, index: str) -> None:
        if self.status(index) == Phase.BUILD:
            settle(self.database, self.runs[index], SourceChanged("by chance"), fatal=True)

    def abort(self, index: str) -> None:
        """Aborts an operation, and begins another one beside the others."""
        self.user.commit()
        for worker, _ in self.workers.values():
            assert not worker.connection.in_transaction()
        if self.status(index) not in (Status.ABORTED, Status.COMPLETED):
            abort.abort(self.database, index, "test")
        self.runs[index] = begin(self.database, index, scan=self.scan)

    def lose(self, index: str, number: int) -> None:
        """Gives a worker's claims back as if it were dead. The worker comes back later."""
        if self.status(index) == Phase.BUILD:
            busy = [n for i, n in self.workers if i == index and n != number]
            with self.database.transaction() as connection:
                build.PHASE.left(connection, self.runs[index], busy=busy)

    def end(self) -> None:
        self.user.commit()
        for worker, _ in self.workers.values():
            worker.connection.close()
        for run in self.runs.values():
            end_run(self.database, run)
        for index in INDEXES:
            if self.status(index) == Status.FAILED:
                abort.abort(self.database, index, "test")
                self.runs[index] = begin(self.database, index, scan=self.scan)
            finish(self.database, index)


@pytest.mark.sample(0)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("scan", ["key", "block"])
def test_whatever_happens_to_three_of_one_scan(database: Database, table: str, scan: str, seed: int) -> None:
    """They are paused, resumed, aborted, failed, lost and begun again beside writes: each is exact in the end."""
    # Two rows in a block give several ranges of blocks.
    run_sql(table, "ALTER TABLE t ADD pad text DEFAULT repeat('x', 3000)", "ALTER TABLE t ALTER pad SET STORAGE PLAIN")
    run_sql(table, "UPDATE t SET pad = pad", "VACUUM FULL t", "ANALYZE t")
    crowd = Crowd(database, random.Random(seed), scan)
    for _ in range(80):
        crowd.step()
    crowd.end()
    if seed == 0:
        assert crowd.carried
